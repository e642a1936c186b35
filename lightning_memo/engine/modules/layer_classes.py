"""The classes of layers in a model, and the traits of each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from lightning_memo.artifacts.swap_plan import Schedule
from lightning_memo.engine.attention.hugging_face import collecting_nothing
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.modules.layer_probe import BackendOf, LayerTraits, probe_layer
from lightning_memo.engine.modules.low_precision_scales import refuse_changing_scales, why_scaled_together
from lightning_memo.engine.modules.requested_settings import RequestedSettings


class LayerClasses:
    """Probes one layer of each class before it runs. Layers of one class have the same modules and parameter shapes.

    Args:
        layers: The layers. If one of them cannot be cut because of its scales, all run as one slice.
        backend_of: Returns the attention kernel.
        settings: The settings that were requested.

    Attributes:
        agreed: Traits on which all processes have agreed.
    """

    def __init__(self, layers: Sequence[nn.Module], backend_of: BackendOf, settings: RequestedSettings) -> None:
        self._layers = layers
        self._why_scaled: str | None = None
        self._backend_of = backend_of
        self._settings = settings
        self.agreed = LayerTraits("", "layer")
        self._traits: dict[object, LayerTraits] = {}

    def __iter__(self) -> Iterator[LayerTraits]:
        """Iterate over the traits of the classes that were probed."""
        return iter(self._traits.values())

    def forget(self) -> None:
        """Forget all traits, which may be others for the next batch: sizes, and whether there are tokens to cut."""
        self._traits.clear()
        self._why_scaled = None

    def agree(self, why_whole: str, schedule: str) -> None:
        """Set the traits on which processes have agreed, so that all run layers alike.

        Args:
            why_whole: Why layers have to run as one slice; empty if they can be cut.
            schedule: "layer" or "nest".
        """
        self.agreed = LayerTraits(why_whole, schedule)

    @property
    def why_whole(self) -> str:
        """Why some layer cannot be cut into slices; empty if all layers can."""
        return next((traits.why_whole for traits in (*self, self.agreed) if traits.why_whole), "")

    @property
    def schedule(self) -> Schedule:
        """The schedule of the model's layers: "nest" if it was requested or some layer needs it."""
        if "nest" in (self._settings.schedule, self.agreed.schedule, *(traits.schedule for traits in self)):
            return "nest"
        return "slice" if self._settings.schedule == "slice" else "layer"

    def of(self, call: LayerCall, x: Tensor) -> LayerTraits:
        """Return the traits of a layer, which is probed if it is the first of its class.

        Args:
            call: The layer and its arguments.
            x: The layer's input.

        Raises:
            ValueError: The layer may mix tokens outside of attention, and tokens are divided over processes; or the
                layer cannot run more than once.
        """
        refuse_changing_scales(call.layer)
        shapes = tuple((name, tuple(p.shape)) for name, p in call.layer.named_parameters())
        # Traits of a single token do not hold for longer sequences.
        modules = tuple((name, type(m), *m._buffers) for name, m in call.layer.named_modules())
        layer_class = (modules, call.layer.training, call.tokens < 2, shapes)
        if layer_class not in self._traits:
            with collecting_nothing():
                traits = probe_layer(call, x, self._backend_of, self._settings.probed_tokens, self._scaled_together())
            if traits.may_mix and call.layout is not None and self._settings.divided:
                raise ValueError(
                    f"{traits.why_whole}, and the tokens of a sequence are divided over processes: train this model "
                    "with context_parallel_size=1 and sequence_parallel=False"
                )
            self._traits[layer_class] = traits
        return self._traits[layer_class]

    def _scaled_together(self) -> str:
        if self._why_scaled is None:
            self._why_scaled = next(filter(None, map(why_scaled_together, self._layers)), "")
        return self._why_scaled
