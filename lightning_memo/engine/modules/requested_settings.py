"""The engine settings that were requested, before the layers have been probed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_memo.artifacts.slot_layouts import SwapPrecision
from lightning_memo.artifacts.swap_plan import Attention, HostBacked
from lightning_memo.engine.copy_streams import TestMode
from lightning_memo.engine.modules.layer_probe import LayerTraits


@dataclass(slots=True)
class RequestedSettings:
    """Settings of an engine. The profiled step runs by them; later steps run by a plan.

    Slices may become shorter while the engine is detached, if a profiled step does not fit the device.

    Attributes:
        attention: Attention kernel; "auto" measures the kernels in the first profiled step and takes the fastest.
        schedule: "auto"; "layer" or "nest" to force the order of slices; "slice" to run the whole model on one slice
            after the other.
        slice_tokens: Longest slice; `None` if slices may have any length.
        host_backed: What lives on the host: see :class:`~lightning_memo.artifacts.swap_plan.SwapPlan`. "auto" is
            "attention" if `slice_tokens` is given and the layers can run slice after slice.
        storage: "kinds" if plans name a place for each kind of tensor, "alpha" if alpha alone decides, "auto" if the
            layers that a profiled step has seen do.
        stacks: Number of stacks to which the layers belong.
        divided: Whether processes share the tokens of a sequence.
        spill_path: Folder on a disk for the layer calls that a plan spills.
        test_mode: Random delays and poisoned buffers, to bring out copy races.
        swap_precision: "fp8" if swapped activations are compressed where that is possible, otherwise "exact".
        check_slices: Whether layers in slices are compared with whole layers while training.
        why_not_fp8: With which setting layers with modules of TransformerEngine do not compute in FP8, and what to set;
            empty if they do.
        host_limit: Returns the host bytes that the profiled step may use. What needs more stays on the device.
    """

    attention: Attention | Literal["auto"] = "auto"
    schedule: str = "auto"
    slice_tokens: int | None = None
    host_backed: HostBacked | Literal["auto"] = "none"
    storage: Literal["auto", "alpha", "kinds"] = "alpha"
    stacks: int = 1
    divided: bool = False
    spill_path: Path | None = None
    test_mode: TestMode | None = None
    check_slices: bool = True
    swap_precision: SwapPrecision = "exact"
    why_not_fp8: str = ""
    host_limit: Callable[[], float] = lambda: math.inf

    def check(self, traits: LayerTraits, tokens: int, by_slices: bool) -> None:
        """Refuse layers that cannot run by the settings.

        Args:
            traits: The traits of a layer.
            tokens: Number of tokens in the layer's input.
            by_slices: Whether processes divided each slice of the batch. Attention of all tokens at once would take
                them in a wrong order.

        Raises:
            ValueError: `storage` is "kinds", and the layer cannot be cut; or the batch is laid out for slices, and
                it cannot run slice after slice.
        """
        if by_slices and (why := traits.why_whole or traits.why_nest):
            raise self.backing_error(why)
        if self.storage == "kinds" and tokens >= 2 and traits.why_whole:
            raise ValueError(f'storage="kinds" runs layers in slices, but {traits.why_whole}: use storage="alpha"')

    def too_short(self, batch: int, tokens: int) -> bool:
        """Return whether an input has nothing to swap or recompute, or a single token where layers run in slices.

        Args:
            batch: Number of sequences in the layer's input.
            tokens: Number of tokens of each.
        """
        if self.divided:
            return False
        in_slices = self.storage == "kinds" or (self.slice_tokens is not None and self.host_backed != "none")
        return batch * tokens == 0 or (tokens < 2 and in_slices)

    @property
    def may_stream(self) -> bool:
        """Whether keys and values may be on the host.

        If processes share tokens, a batch is laid out for slices before the layers are known. `host_backed` then has to
        name what lives on the host: "auto" is not enough.
        """
        by_name = self.host_backed in ("attention", "all")
        return self.slice_tokens is not None and (by_name or (self.host_backed == "auto" and not self.divided))

    @property
    def states_on_host(self) -> bool:
        """Whether hidden states between layers are to be on the host."""
        return self.may_stream and self.host_backed == "all" and self.schedule != "slice"

    @property
    def probed_tokens(self) -> int | None:
        """Largest number of tokens that are probed: two slices if layers may be cut into them; `None` for all."""
        cuts = self.may_stream or not self.divided
        return 2 * self.slice_tokens if self.slice_tokens is not None and cuts else None

    def profiled_slice_tokens(self, traits: LayerTraits) -> int | None:
        """Return the longest slice of a profiled step; `None` if its layers run as one slice.

        Where processes share tokens, a batch has been laid out for that before the layers are known.

        Args:
            traits: The traits of the first layer.
        """
        whole = traits.why_whole or traits.why_nest or self.schedule == "nest"
        return None if whole or (self.divided and not self.may_stream) else self.slice_tokens

    def backing(self, traits: LayerTraits, tokens: int, sliced: bool) -> HostBacked:
        """Return what lives on the host while layers are profiled.

        Args:
            traits: The traits of the first layer.
            tokens: Number of tokens in the layer's input.
            sliced: Whether the batch is laid out for slices already.

        Raises:
            ValueError: `host_backed` puts keys and values on the host, and layers cannot run slice after slice.
        """
        if self.slice_tokens is None or not self.may_stream or (tokens <= self.slice_tokens and not sliced):
            return "none"
        why = traits.why_whole or traits.why_nest
        if self.host_backed == "auto":
            return "none" if why or self.schedule == "nest" else "attention"
        if why:
            raise self.backing_error(why)
        return self.host_backed

    def backing_of_whole_layers(self, profiled: HostBacked, why: str) -> HostBacked:
        """Return what lives on the host by a plan whose layers run as one slice.

        Args:
            profiled: What has lived there in the profiled step, whose first layer may have been one that can be cut.
            why: Why some layer has to run as one slice.

        Raises:
            ValueError: `host_backed` puts keys and values on the host.
        """
        if profiled == "none" or self.host_backed == "auto":
            return "none"
        raise self.backing_error(why)

    def backing_error(self, why: str) -> ValueError:
        """Return the error for layers that run as one slice where keys and values are on the host.

        Args:
            why: Why layers have to run as one slice.
        """
        if self.schedule == "slice":  # decides where tensors live, whatever `host_backed` is
            return ValueError(f'schedule="slice" runs layers slice after slice, but {why}: use schedule="layer"')
        return ValueError(
            f'host_backed="{self.host_backed}" runs layers slice after slice, but {why}: set host_backed="none"'
        )
