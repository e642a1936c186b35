"""The settings that were requested of the engine, and the classes of layers that run by them, with their traits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from lightning_memo.artifacts.swap_plan import Attention, StreamFromHost
from lightning_memo.engine.copy_streams import TestMode
from lightning_memo.engine.forward.collected_outputs import collecting_nothing
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_modules import (
    Fp8Check,
    fp8_form,
    lock_channels,
    why_scaled_by_engine,
    why_scaled_together,
)
from lightning_memo.engine.modules.gathered_modules import GatheredModules
from lightning_memo.engine.modules.layer_probe import BackendOf, LayerTraits, probe_layer
from lightning_memo.engine.modules.module_attributes import ModuleAttributes
from lightning_memo.engine.token_locality.prove_locality import Locality, LocalityProofs, prove_locality, why_other_at
from lightning_memo.parallel.tensor.experts import exchanging_nothing


@dataclass(slots=True)
class RequestedSettings:
    """Settings of an engine. The profiled step runs by them; later steps run by a plan.

    Slices may become shorter while the engine is detached, if a profiled step does not fit the device.

    Attributes:
        attention: Attention kernel; "auto" measures the kernels in the first profiled step and takes the fastest.
        slice_tokens: Longest slice; `None` if slices may have any length.
        stream_from_host: What lives on the host: see :class:`~lightning_memo.artifacts.swap_plan.SwapPlan`. "auto" is
            "attention" if `slice_tokens` is given and the layers can run slice after slice.
        joint_attention: Whether attention runs over all slices of a layer at once also where it need not.
        by_kind: Whether plans may name a place for each kind of tensor; otherwise alpha alone decides.
        stacks: Number of stacks to which the layers belong.
        divided: Whether processes share the tokens of a sequence.
        disk_path: Folder on a disk for the layer calls that a plan spills.
        test_mode: Random delays and poisoned buffers, to bring out copy races.
        fused_kernels: Whether parts of layers run by fewer kernels than they call themselves.
        check_slices: Whether layers in slices are compared with whole layers while training.
        why_not_fp8: With which setting layers with modules of TransformerEngine do not compute in FP8, and what to set;
            empty if they do.
        host_limit: Returns the host bytes that the profiled step may use, given those that the engine holds. What needs
            more stays on the device.
    """

    attention: Attention | Literal["auto"] = "auto"
    slice_tokens: int | None = None
    stream_from_host: StreamFromHost | Literal["auto"] = "none"
    joint_attention: bool = False
    by_kind: bool = False
    stacks: int = 1
    divided: bool = False
    disk_path: Path | None = None
    test_mode: TestMode | None = None
    fused_kernels: bool = True
    check_slices: bool = True
    why_not_fp8: str = ""
    host_limit: Callable[[int], float] = lambda held_bytes: math.inf

    def check(self, traits: LayerTraits, by_slices: bool) -> None:
        """Refuse layers that cannot run by the settings.

        Args:
            traits: The traits of a layer.
            by_slices: Whether processes divided each slice of the batch. Attention of all tokens at once would take
                them in a wrong order.

        Raises:
            ValueError: The batch is laid out for slices, and the layer cannot run slice after slice.
        """
        if by_slices and (why := traits.unsliceable or traits.needs_full_attention):
            raise self.not_streamed_error(why)

    def too_short(self, batch: int, tokens: int) -> bool:
        """Return whether an input has nothing to swap or recompute, or a single token where layers run in slices.

        Args:
            batch: Number of sequences in the layer's input.
            tokens: Number of tokens of each.
        """
        if self.divided:
            return False
        in_slices = self.slice_tokens is not None and self.stream_from_host != "none"
        return batch * tokens == 0 or (tokens < 2 and in_slices)

    @property
    def may_stream(self) -> bool:
        """Whether keys and values may be on the host.

        If processes share tokens, a batch is laid out for slices before the layers are known. `stream_from_host` then
        has to name what lives on the host: "auto" is not enough.
        """
        if self.slice_tokens is None or self.stream_from_host == "none":
            return False
        return self.stream_from_host != "auto" or not self.divided

    @property
    def states_on_host(self) -> bool:
        """Whether hidden states between layers are to be on the host."""
        return self.may_stream and self.stream_from_host == "hidden"

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
        whole = traits.unsliceable or traits.needs_full_attention or self.joint_attention
        return None if whole or (self.divided and not self.may_stream) else self.slice_tokens

    def streamed(self, traits: LayerTraits, tokens: int, sliced: bool) -> StreamFromHost:
        """Return what lives on the host while layers are profiled.

        Args:
            traits: The traits of the first layer.
            tokens: Number of tokens in the layer's input.
            sliced: Whether the batch is laid out for slices already.

        Raises:
            ValueError: `stream_from_host` is given, and layers cannot run slice after slice.
        """
        if self.slice_tokens is None or not self.may_stream or (tokens <= self.slice_tokens and not sliced):
            return "none"
        why = traits.unsliceable or traits.needs_full_attention
        if self.stream_from_host == "auto":
            return "none" if why or self.joint_attention else "attention"
        if why:
            raise self.not_streamed_error(why)
        return self.stream_from_host

    def streamed_by_whole_layers(self, profiled: StreamFromHost, why: str) -> StreamFromHost:
        """Return what lives on the host by a plan whose layers run as one slice.

        Args:
            profiled: What has lived there in the profiled step, whose first layer may have been one that can be cut.
            why: Why some layer has to run as one slice.

        Raises:
            ValueError: `stream_from_host` is given.
        """
        if profiled == "none" or self.stream_from_host == "auto":
            return "none"
        raise self.not_streamed_error(why)

    def not_streamed_error(self, why: str) -> ValueError:
        """Return the error for layers that run as one slice where keys and values are on the host.

        Args:
            why: Why layers have to run as one slice.
        """
        return ValueError(
            f'stream_from_host="{self.stream_from_host}" runs layers slice after slice, but {why}: set '
            'stream_from_host="none"'
        )


# A layer that is called in more forms, for example with a number that counts steps, runs as one slice.
_MOST_FORMS = 16
_ANY_OTHER = object()
# A layer is looked at for as many numbers of tokens, which takes some seconds together.
_MOST_LENGTHS = 128


class LayerClasses:
    """Probes one layer of each class before it runs, and proves for each layer whether it keeps tokens apart.

    Layers of one class have the same modules and parameter shapes, and get arguments of the same form.

    Args:
        layers: The layers. If one of them cannot be cut because of its scales, all run as one slice.
        backend_of: Returns the attention kernel.
        settings: The settings that were requested.
        gathered: The modules that run on the tokens of all processes.

    Attributes:
        agreed: Traits on which all processes have agreed.
        routes: Whether some layer that has run chooses indices by values.
    """

    def __init__(
        self, layers: Sequence[nn.Module], backend_of: BackendOf, settings: RequestedSettings, gathered: GatheredModules
    ) -> None:
        self._layers, self._gathered = layers, gathered
        self._why_scaled: str | None = None
        self._backend_of = backend_of
        self._settings = settings
        self._fp8 = Fp8Check(settings.why_not_fp8)
        self.agreed = LayerTraits("")
        self.routes = False
        self._proofs = LocalityProofs(layers)
        self._numbers: dict[int, tuple[object, int]] = {}
        self._probed: dict[object, LayerTraits] = {}
        self._traits: dict[object, dict[object, LayerTraits]] = {}  # by layer, and by the form of its call

    def __iter__(self) -> Iterator[LayerTraits]:
        """Iterate over the traits of the layers that have run."""
        return (traits for by_form in self._traits.values() for traits in by_form.values())

    def forget(self) -> None:
        """Forget all traits, which may be others for the next batch: sizes, and whether there are tokens to cut."""
        self._probed.clear()
        self._proofs.forget()
        self._traits.clear()
        self._numbers.clear()
        self._why_scaled = None
        self.routes = False

    def agree(self, unsliceable: str, needs_full_attention: str) -> None:
        """Set the traits on which processes have agreed, so that all run layers alike.

        Args:
            unsliceable: Why layers have to run as one slice; empty if they can be cut.
            needs_full_attention: Why attention cannot run slice after slice; empty if it can.
        """
        self.agreed = LayerTraits(unsliceable, needs_full_attention)

    @property
    def unsliceable(self) -> str:
        """Why some layer cannot be cut into slices; empty if all layers can."""
        return next((traits.unsliceable for traits in (*self, self.agreed) if traits.unsliceable), "")

    @property
    def needs_full_attention(self) -> str:
        """Why attention of some layer cannot run slice after slice; empty if that of all layers can."""
        return next((traits.needs_full_attention for traits in (*self, self.agreed) if traits.needs_full_attention), "")

    @property
    def joint_attention(self) -> bool:
        """Whether attention runs over all slices of a layer at once: it was requested, or some layer needs it."""
        return self._settings.joint_attention or bool(self.needs_full_attention)

    def of(self, call: LayerCall, x: Tensor) -> LayerTraits:
        """Return the traits of a layer, which are found before its first run, and those that were agreed on.

        Args:
            call: The layer and its arguments.
            x: The layer's input.

        Raises:
            ValueError: The layer may mix tokens outside of attention, and tokens are divided over processes; or the
                layer cannot run more than once, or not in FP8.
        """
        self._fp8.check(call.layer)
        lock_channels(call.layer, self._layers)
        attributes = ModuleAttributes.of(call.layer.named_modules())
        # Traits of a single token do not hold for longer sequences.
        form: object = (x.dtype, call.form(), attributes.switches, call.tokens < 2, fp8_form())
        by_form = self._traits.setdefault((id(call.layer), attributes.modules, _gradients_of(x)), {})
        if form not in by_form and len(by_form) >= _MOST_FORMS:
            form = _ANY_OTHER
        numbers = (attributes.numbers, attributes.inner)
        if form not in by_form or (self._has_new_numbers(call.layer, numbers) and not by_form[form].unsliceable):
            was_cut = any(not traits.unsliceable for traits in by_form.values())
            before = by_form.get(form)
            with collecting_nothing(), exchanging_nothing():
                kind, any_other = (attributes.modules, form), form is _ANY_OTHER
                # A layer may set context variables.
                by_form[form] = copy_context().run(self._find, call, x, kind, attributes.inner, any_other)
            self.routes |= by_form[form].routes
            if before is not None and by_form[form].locality is before.locality:  # they decide nothing: not counted
                self._numbers[id(call.layer)] = numbers, self._numbers[id(call.layer)][1] - 1
            if was_cut and by_form[form].unsliceable and call.tokens > 1:
                warnings.warn(f"lightning_memo: {by_form[form].unsliceable}. It runs as one slice now.", stacklevel=4)
        found, agreed = by_form[form], self.agreed.unsliceable
        return replace(found, unsliceable=agreed) if agreed and not found.unsliceable else found

    def _has_new_numbers(self, layer: nn.Module, numbers: object) -> bool:
        """Return whether numbers among a layer's attributes are others than in its last call, a few times at most."""
        before, changes = self._numbers.setdefault(id(layer), (numbers, 0))
        if numbers == before or changes == _MOST_FORMS:
            return False
        self._numbers[id(layer)] = numbers, changes + 1
        return True

    def _find(self, call: LayerCall, x: Tensor, kind: object, inner: object, any_other: bool) -> LayerTraits:
        """Return the traits of a layer in calls of a new form.

        Args:
            call: The layer and its arguments.
            x: The layer's input.
            kind: What the layer and the call have in common with others.
            inner: Numbers in objects of the layer, of which a proof does not know whether it uses them.
            any_other: Whether the traits are to hold for all further forms.

        Raises:
            ValueError: It may mix tokens, and tokens are divided over processes.
        """
        locality = Locality("")
        if scaled := self._scaled_together() or why_scaled_by_engine(call.layer):
            locality = Locality(scaled)
        elif any_other:
            locality = Locality(f"{call.name} gets other arguments in each call")
        elif call.tokens > 1:
            gathers = not self._gathered.why_not(call)
            locality = self._proofs.of(call, x, (kind, inner, _gradients_of(x)), gathers)
        if locality.why_not and call.layout is not None and self._settings.divided and call.tokens > 1:
            raise ValueError(
                f"{locality.why_not}, and the tokens of a sequence are divided over processes: train this model with "
                f"{call.layout.how_to_compute_all}"
            )
        self._gathered.use(call.layer, locality.gathered or ())
        traits = self._probe(call, x, kind, None if locality.gathered else self._settings.probed_tokens)
        why = locality.why_not or traits.unsliceable
        if not why and locality.gathered:
            why = f"{call.name} needs the tokens of all processes at once"
        if not why and locality.hands_states and (traits.needs_full_attention or self._settings.joint_attention):
            why = f"{call.name} hands a state from token to token, and attention needs all tokens at once"
        return replace(traits, unsliceable=why, locality=locality)

    def _probe(self, call: LayerCall, x: Tensor, kind: object, longest: int | None) -> LayerTraits:
        """Return the traits that a probe finds, which layers of one kind share if they do not ask for gradients."""
        asked, shared = (kind, _gradients_of(x)), self._probed.get(kind)
        traits = self._probed.get(asked) if shared is None or shared.inspects_grad else shared
        if traits is None:
            traits = self._probed[asked] = probe_layer(call, x, self._backend_of, longest)
            self._probed.setdefault(kind, traits)
        return traits

    def why_other_at(self, call: LayerCall, x: Tensor, traits: LayerTraits, lengths: Collection[int]) -> str:
        """Return why a layer may compute otherwise at some numbers of tokens; empty if it does not.

        Each number is looked at once for all layers that are alike, and after many of them no more.

        Args:
            call: The layer and its arguments.
            x: The layer's input.
            traits: The traits of the layer.
            lengths: The numbers of tokens.
        """
        known = traits.locality.lengths
        # PyTorch itself computes otherwise for one token: what is then contiguous needs no copy.
        lengths = [length for length in lengths if length > 1]
        if known.issuperset(lengths) or len(known) >= _MOST_LENGTHS:
            return ""
        with collecting_nothing():
            why = why_other_at(call, x, set(lengths) - known, traits.locality)
            if why:  # the layer may have changed since the proof, for example by a number that a callback sets
                fresh = prove_locality(call, x)
                why = fresh.why_not or why_other_at(call, x, set(lengths) - known, fresh)
                traits.locality.operations[:] = fresh.operations
        if not why:
            known.update(lengths)
        return why

    def _scaled_together(self) -> str:
        if self._why_scaled is None:
            self._why_scaled = next(filter(None, map(why_scaled_together, self._layers)), "")
        return self._why_scaled


def _gradients_of(x: Tensor) -> tuple[bool, bool]:
    """Return what the first layer may be told otherwise than the others, for example if the embedding is frozen."""
    return x.requires_grad, x.is_leaf
