"""How layers are asked to run, before any of them was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memo.artifacts.swap_plan import HostBacked
from lightning_memo.engine.modules.layer_probe import LayerTraits


@dataclass(frozen=True, slots=True)
class Wishes:
    """Settings of a profiled step; later ones run by a plan.

    Attributes:
        schedule: "auto", "layer", "nest" or "slice".
        slice_tokens: Longest slice; `None`: no limit.
        host_backed: What lives on the host: see :class:`~lightning_memo.artifacts.swap_plan.SwapPlan`; "auto" is
            "attention" where `slice_tokens` are given and the layers can run slice after slice.
        divided: Whether processes share the tokens of a sequence.
        by_kind: Whether plans say kind by kind what is stored.
    """

    schedule: str = "auto"
    slice_tokens: int | None = None
    host_backed: HostBacked | Literal["auto"] = "none"
    divided: bool = False
    by_kind: bool = False

    def check(self, traits: LayerTraits, layer: str, tokens: int) -> None:
        """Refuse layers that cannot run as was asked for.

        Args:
            traits: What a layer allows.
            layer: Its name.
            tokens: Of its input.

        Raises:
            ValueError: They shall be stored kind by kind, and cannot run slice after slice.
        """
        if not self.by_kind or tokens < 2:
            return
        why = traits.why_whole
        if not why and traits.schedule == "nest":
            why = f"attention of {layer} is not causal, has an explicit mask or draws dropout"
        if why:
            raise ValueError(f'storage="kinds" runs layers slice after slice, but {why}: use storage="alpha"')

    @property
    def may_stream(self) -> bool:
        """Whether keys and values may be on the host.

        Where processes share tokens, a batch is laid out for slices before the layers are known, so only if it was
        asked for by name.
        """
        by_name = self.host_backed in ("attention", "all")
        return self.slice_tokens is not None and (by_name or (self.host_backed == "auto" and not self.divided))

    @property
    def states_on_host(self) -> bool:
        """Whether hidden states between layers shall be on the host."""
        return self.may_stream and self.host_backed == "all" and self.schedule != "slice"

    @property
    def probed_tokens(self) -> int | None:
        """Most tokens on which a layer is looked at: where no more than a slice may be on the device, two of them."""
        return 2 * self.slice_tokens if self.slice_tokens is not None and self.may_stream else None

    def backing(self, traits: LayerTraits, layer: str, tokens: int, sliced: bool) -> HostBacked:
        """What lives on the host while layers are profiled.

        Args:
            traits: Of the first of them.
            layer: Its name.
            tokens: Of its input.
            sliced: Whether the batch is laid out for slices already.

        Raises:
            ValueError: Keys and values shall, and the layers cannot run slice after slice.
        """
        if self.slice_tokens is None or not self.may_stream or (tokens <= self.slice_tokens and not sliced):
            return "none"
        why = traits.why_whole
        if not why and "nest" in (self.schedule, traits.schedule):
            why = f"attention of {layer} needs all tokens at once"
        if not why:
            return "attention" if self.host_backed == "auto" else self.host_backed
        if self.host_backed == "auto":
            return "none"
        raise ValueError(
            f'host_backed="{self.host_backed}" runs layers slice after slice, but {why}: set host_backed="none"'
        )
