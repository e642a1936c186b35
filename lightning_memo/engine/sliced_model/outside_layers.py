"""Checks that a model can run slice by slice outside of its layers: embeddings, last norm, head, and its own code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memo.engine.forward.collected_outputs import collecting_nothing
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.modules.layer_forward import innermost_forward
from lightning_memo.engine.modules.module_attributes import ModuleAttributes
from lightning_memo.engine.modules.token_local_modules import depends_on_length
from lightning_memo.engine.recurrence import StateCall
from lightning_memo.engine.token_locality.fake_run import (
    TrialMode,
    fake_like,
    has_custom_functions,
    has_hooks,
    running,
    trial,
    trial_error,
)
from lightning_memo.engine.token_locality.operator_rules import TOKENS, Dims, TokensMixed, holds_tokens
from lightning_memo.engine.token_locality.prove_locality import counts_tokens, unlike_other_sizes
from lightning_memo.engine.token_locality.stand_ins import LocalFunctions, attend_in_shape, hand_in_shape
from lightning_memo.engine.token_locality.token_tracker import Step, TokenTracker, difference_of
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.operator_values import tensors_in
from lightning_memo.utils.user_errors import RefusedAtAnyLength

_LABELS = ("labels", "shift_labels", "num_items_in_batch")

Names = Mapping[nn.Module, str]


class OutsideLayers:
    """The parts of a model outside of its layers, which are proven to keep tokens apart before they run on slices.

    Args:
        layers: The model's layers.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._proven: set[object] = set()

    def check(self, model: nn.Module, forward: Callable[..., Any], inputs: dict[str, Any], tokens: int) -> None:
        """Check that a model computes each token by itself outside of its layers.

        It is proven again after modules, numbers among the attributes of modules or the form of inputs change.

        Args:
            model: The model.
            forward: Its own forward.
            inputs: Its inputs for a slice, by name.
            tokens: Number of tokens of the sequence.

        Raises:
            ValueError: The model may relate tokens to each other outside of its layers.
        """
        batch, part = inputs["labels"].shape
        call = LayerCall(model, forward, (), {k: v for k, v in inputs.items() if k not in _LABELS}, part, batch)
        state = (call.form(), *self._state(model))
        if part < 2 or state in self._proven:  # a single token looks like anything of size 1
            return
        with collecting_nothing():
            why = self._counting(model) or why_tokens_mixed(call, self._layers, tokens)
        if why:
            raise ValueError(
                f'stream_from_host="model" runs the model slice after slice, but {why}: use stream_from_host="hidden"'
            )
        self._proven.add(state)

    def refuse_hooks(self, model: nn.Module) -> None:
        """Refuse hooks of a user, before they see any tokens.

        Args:
            model: The model.

        Raises:
            ValueError: A module outside of the layers has hooks.
        """
        hooked = next((name for name, m in self._modules(model) if has_hooks(m)), "")
        if hooked:
            raise ValueError(
                f'stream_from_host="model" runs the model slice after slice, but hooks on {hooked} would see the '
                'tokens of one slice only: use stream_from_host="hidden"'
            )

    def _modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules whose hooks run for each slice, and that no proof of a layer covers."""
        inside = {m for layer in self._layers for m in layer.modules() if m is not layer}
        return ((name, m) for name, m in model.named_modules() if m is not model and m not in inside)

    def _counting(self, model: nn.Module) -> str:
        """Return which embedding relates the tokens of a batch; empty if none does."""
        counting = next((name for name, m in self._modules(model) if counts_tokens(m)), "")
        return counting and f"{counting} relates tokens by scale_grad_by_freq or max_norm"

    def _state(self, model: nn.Module) -> Iterator[object]:
        """Iterate over what may decide what modules compute, apart from the values of tensors."""
        layers = set(self._layers)
        modules = [("", model), *self._modules(model)]
        yield ModuleAttributes.of((name, m) for name, m in modules if m not in layers)


def why_tokens_mixed(call: LayerCall, layers: Sequence[nn.Module], longest: int) -> str:
    """Return why a model may relate tokens to each other outside of its layers; empty if it is proven that it does not.

    The model runs on fake tensors, as a layer does in a proof of its own; see `prove_locality`.

    Args:
        call: The model, its own forward, and its arguments by name, for `[batch, tokens]`. There are no labels.
        layers: The model's layers, which are proven by themselves.
        longest: The largest number of tokens at which the model runs.

    Raises:
        ValueError: The model is refused at any number of tokens.
    """
    return trial(call.name, functools.partial(_why_mixed, call, layers, longest))


def _why_mixed(call: LayerCall, layers: Sequence[nn.Module], longest: int, mode: TrialMode) -> str:
    names = {module: name or class_name(module) for name, module in call.layer.named_modules()}
    sizes = unlike_other_sizes(call, longest, *(t for t in tree_leaves(call.kwargs) if isinstance(t, Tensor)))
    try:
        short, long = (_operations(call, layers, MixingTracker(tokens, names), mode) for tokens in sizes)
    except TokensMixed as mixed:
        return str(mixed)
    except RefusedAtAnyLength:
        raise
    except Exception as error:  # whatever a model raises on tensors without values, it is not proven
        where = _module_in((frame for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__)))), names)
        return f"{where} may not compute each token by itself: {trial_error(error)}"
    if why := difference_of(short, long):
        return f"{call.name} computes otherwise with more tokens: {why}"
    return ""


class MixingTracker(TokenTracker):
    """Also follows tensors whose entries may depend on several tokens, or on the number of tokens.

    Outside of layers, models make tensors that relate tokens and that no hidden state depends on, such as masks. An
    operation that may have mixed tokens is therefore only noted, and ends the proof once a layer or the logits depend
    on its result.

    Args:
        tokens: As for every tracker.
        names: The names of the model's modules.

    Attributes:
        in_layer: Whether a layer runs, which may draw random numbers for each token.
    """

    def __init__(self, tokens: int, names: Names) -> None:
        super().__init__(tokens)
        self.in_layer = False
        self._names = names
        self._mixed: dict[int, str] = {}

    def dims(self, t: Tensor) -> Dims:
        """Return where a tensor holds tokens.

        Raises:
            TokensMixed: Its entries may depend on several tokens. The message says where they were mixed, and how.
        """
        if id(t) in self._mixed:
            raise TokensMixed(self._mixed[id(t)])
        return super().dims(t)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        count = len(self.steps)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and not self.in_layer:
            raise TokensMixed(f"{self._where()} draws random numbers, which would be others for each slice")
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except TokensMixed as mixed:
            why = str(mixed)
            if not any(id(t) in self._mixed for t in tensors_in(args, kwargs)):
                why = f"{self._where()} may not compute each token by itself: {why}"
            if func._schema.is_mutable:  # views of what it writes to would not be known
                raise TokensMixed(why) from None
        else:
            drawn = tensors_in(result) if draws else []
            if drawn and not any(holds_tokens(self.dims(t)) for t in drawn):
                raise TokensMixed(f"{self._where()} draws random numbers for all tokens at once, others for each slice")
            return result
        del self.steps[count:]
        result = func(*args, **kwargs or {})
        for t in tensors_in(result):
            self._mixed[id(self.mark(t, ()))] = why
        return result

    def _where(self) -> str:
        return _module_in((frame for frame, _ in traceback.walk_stack(None)), self._names)


def _operations(call: LayerCall, layers: Sequence[nn.Module], tracker: MixingTracker, mode: TrialMode) -> list[Step]:
    """Run a model on fake tensors of the tracker's number of tokens, and return what it computes its logits with.

    Raises:
        TokensMixed: The input of a layer or the logits may depend on several tokens.
    """
    inputs = tree_map_only(Tensor, functools.partial(fake_like, tracker, mode, call), call.kwargs)
    fake_call = LayerCall(call.layer, call.forward, (), inputs, tracker.sizes.tokens, call.batch)
    checks, attend = _Checks(tracker), functools.partial(attend_in_shape, tracker, 1)
    with (
        _own_forwards(call.layer, layers, checks),
        running(fake_call, tracker, mode, (), attend, hand=functools.partial(_hand, tracker)) as functions,
    ):
        checks.functions = functions
        inside = {m for layer in layers for m in layer.modules()}
        buffers = [(m, b, b._version) for m in call.layer.modules() if m not in inside for b in m._buffers.values()
                   if b is not None]  # fmt: skip
        with mode, tracker:
            logits = call.forward(**inputs).logits
            checks.check(call.name, logits)
            for m, b, version in buffers:
                if b._version != version:
                    raise TokensMixed(f"{class_name(m)} changes a buffer, which it would for each slice")
            if functions.hooked:
                raise TokensMixed(f"{call.name} may not compute each token by itself: it registers hooks on tensors")
        if [TOKENS in dim for dim in tracker.dims(logits)[:2]] != [False, True]:
            raise TokensMixed(f"the logits of {call.name} do not hold one entry for each token")
    return tracker.steps


def _hand(tracker: MixingTracker, call: StateCall) -> Tensor:
    if not tracker.in_layer:
        tracker.refuse(f"{call.name} hands a state from token to token outside of the layers")
    return hand_in_shape(tracker, call)


class _Checks:
    """Checks what layers and the head get.

    Args:
        tracker: Follows the tokens.
    """

    def __init__(self, tracker: MixingTracker) -> None:
        self._tracker = tracker
        self.functions: LocalFunctions | None = None

    def check(self, name: str, values: Any) -> None:
        """Check that each entry of some tensors depends on one token only, in a backward pass, too.

        Raises:
            TokensMixed: It may depend on several.
        """
        for t in tree_leaves(values):
            if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
                self._tracker.dims(t)
                if has_custom_functions(t):
                    raise TokensMixed(f"{name} gets what an autograd function computed, whose backward is not known")

    def run_layer(self, forward: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a layer, which is proven by itself, and cut off what it computed from the graph."""
        self.check(name, (args, kwargs))
        assert self.functions is not None
        hooked, self._tracker.in_layer = self.functions.hooked, True
        output = forward(*args, **kwargs)
        self.functions.hooked, self._tracker.in_layer = hooked, False
        return tree_map_only(Tensor, Tensor.detach, output)


@contextlib.contextmanager
def _own_forwards(model: nn.Module, layers: Sequence[nn.Module], checks: _Checks) -> Iterator[None]:
    """Inside this context, modules run their own forwards, not those that this package has replaced them with.

    Frequencies of rotary tables are chosen by values, which fake tensors do not have, and not by token; see
    `attach_rotary`.
    """
    replaced = [(module, vars(module).get("forward")) for module in model.modules()]
    try:
        for module in model.modules():
            module.forward = innermost_forward(module)
            if depends_on_length(module):
                module.forward = functools.partial(inspect.unwrap(type(module).forward), module)
        for layer in layers:
            layer.forward = functools.partial(checks.run_layer, layer.forward, class_name(layer))
        yield
    finally:
        for module, forward in replaced:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _module_in(frames: Iterable[FrameType], names: Names) -> str:
    """Return the name of the module that the first of some frames that belongs to one runs."""
    modules = (frame.f_locals.get("self") for frame in frames)
    return next((names[module] for module in modules if isinstance(module, nn.Module) and module in names), "the model")
