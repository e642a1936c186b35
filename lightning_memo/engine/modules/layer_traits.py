"""Which kinds of layers a model has, and what each allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from lightning_memo.artifacts.swap_plan import Schedule
from lightning_memo.engine.attention.hugging_face import collecting_nothing
from lightning_memo.engine.forward.intercept import current_layout
from lightning_memo.engine.layers.layer_run import LayerCall
from lightning_memo.engine.modules.layer_probe import BackendOf, LayerTraits, probe_layer
from lightning_memo.engine.modules.low_precision_scales import refuse_changing_scales, why_scaled_together
from lightning_memo.engine.modules.requested_settings import Wishes


class LayerKinds:
    """Looks at layers before they run: of one kind are layers of the same modules, with parameters of the same shapes.

    Args:
        layers: The layers. If one of them cannot be cut because of its scales, all run as one slice.
        backend_of: Gives the attention kernel.
        wishes: Which schedule was asked for, and how many tokens may be on the device.

    Attributes:
        agreed: What some process found out about its layers.
    """

    def __init__(self, layers: Sequence[nn.Module], backend_of: BackendOf, wishes: Wishes) -> None:
        self._layers = layers
        self._why_scaled: str | None = None
        self._backend_of = backend_of
        self._wishes = wishes
        self.agreed = LayerTraits("", "layer")
        self._traits: dict[object, LayerTraits] = {}

    def __iter__(self) -> Iterator[LayerTraits]:
        """Traits of the kinds met so far."""
        return iter(self._traits.values())

    def forget(self) -> None:
        """Sizes of attention, and whether there are tokens to cut, differ in another batch."""
        self._traits.clear()
        self._why_scaled = None

    def agree(self, why_whole: str, schedule: str) -> None:
        """Take over what some process found out about its layers, so that all run alike."""
        self.agreed = LayerTraits(why_whole, schedule)

    @property
    def why_whole(self) -> str:
        """Why some layer cannot be cut into slices; empty if all can."""
        return next((traits.why_whole for traits in (*self, self.agreed) if traits.why_whole), "")

    @property
    def schedule(self) -> Schedule:
        """The schedule of the model's layers: "nest" if it is wished, or some layer needs it."""
        if "nest" in (self._wishes.schedule, self.agreed.schedule, *(traits.schedule for traits in self)):
            return "nest"
        return "slice" if self._wishes.schedule == "slice" else "layer"

    def of(self, call: LayerCall, x: Tensor) -> LayerTraits:
        """What a layer allows.

        Raises:
            ValueError: Its tokens may meet outside of attention, and are divided over processes; or it cannot run more
                than once.
        """
        refuse_changing_scales(call.layer)
        shapes = tuple((name, tuple(p.shape)) for name, p in call.layer.named_parameters())
        # A single token says nothing about longer sequences.
        modules = tuple((name, type(m), *m._buffers) for name, m in call.layer.named_modules())
        kind = (modules, call.layer.training, call.tokens < 2, shapes)
        if kind not in self._traits:
            with collecting_nothing():
                traits = probe_layer(call, x, self._backend_of, self._wishes.probed_tokens, self._scaled_together())
            if traits.may_mix and current_layout() is not None and self._wishes.divided:
                raise ValueError(
                    f"{traits.why_whole}, and the tokens of a sequence are divided over processes: train this model "
                    "with context_parallel_size=1 and sequence_parallel=False"
                )
            self._traits[kind] = traits
        return self._traits[kind]

    def _scaled_together(self) -> str:
        if self._why_scaled is None:
            self._why_scaled = next(filter(None, map(why_scaled_together, self._layers)), "")
        return self._why_scaled
