"""Which kinds of layers a model has, and what each allows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_memo.engine.attach import collecting_nothing
from lightning_memo.engine.intercept import current_layout
from lightning_memo.engine.probe import BackendOf, LayerTraits, probe_layer
from lightning_memo.engine.run import LayerCall
from lightning_memo.engine.wishes import Wishes
from lightning_memo.plan import Schedule


class LayerKinds:
    """Looks at layers before they run: layers with parameters of the same names and shapes are of one kind.

    Args:
        backend_of: Gives the attention kernel.
        wishes: Which schedule was asked for, and how many tokens may be on the device.

    Attributes:
        agreed: What some process found out about its layers.
    """

    def __init__(self, backend_of: BackendOf, wishes: Wishes) -> None:
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
            ValueError: Its tokens may meet outside of attention, and are divided over processes.
        """
        shapes = tuple((name, tuple(p.shape)) for name, p in call.layer.named_parameters())
        # A single token says nothing about longer sequences.
        kind = (type(call.layer), call.layer.training, call.tokens < 2, shapes)
        if kind not in self._traits:
            with collecting_nothing():
                traits = probe_layer(call, x, self._backend_of, self._wishes.probed_tokens)
            if traits.may_mix and current_layout() is not None and self._wishes.divided:
                raise ValueError(
                    f"{traits.why_whole}, and the tokens of a sequence are divided over processes: train this model "
                    "with context_parallel_size=1 and sequence_parallel=False"
                )
            self._traits[kind] = traits
        return self._traits[kind]
