"""Probes a layer before its first run: whether it can be cut by tokens, and the needs of its attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.collected_outputs import split_output
from lightning_memo.engine.forward.cut_tokens import take_tokens
from lightning_memo.engine.forward.intercept import OwnMode, handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.refuse_checkpointing import refuse_inner_backward, refusing_transforms
from lightning_memo.engine.forward.repeated_choices import NotedChoices, as_function_of
from lightning_memo.engine.memory.offloaded_tensor import part_of
from lightning_memo.engine.recurrence import StateCall, handing
from lightning_memo.engine.saved_tensors.side_effects import HiddenWrites, SideEffects, kept_elsewhere
from lightning_memo.engine.state.layer_state import LayerState
from lightning_memo.engine.token_locality.fake_run import without_global_hooks, without_hooks
from lightning_memo.engine.token_locality.prove_locality import Locality
from lightning_memo.kernels import AttentionBackend, AttentionSpec, RngState
from lightning_memo.kernels.attention_kernel import merge_sinks, sums_dtype
from lightning_memo.planner.token_slices import KEPT, SavedBytes, TokenRange

# Two runs of the same arithmetic may differ by rounding, where sums are computed in any order.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1
_DIRECTIONS = 8
BackendOf = Callable[[Tensor, Tensor, Tensor, AttentionSpec], AttentionBackend]


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """The traits of a layer that decide how it can run.

    Attributes:
        unsliceable: Why the layer has to run as one slice; empty if it can be cut.
        needs_full_attention: Why attention cannot run slice after slice; empty if it can.
        saved: Sizes of attention outputs, log-sum-exps, keys, values and states of one call.
        saved_bytes: Bytes of all that one call saves.
        tokens: Number of tokens that were probed.
        key_value_gradient_bytes: Size of the gradients of keys and values, in the dtype in which they are summed.
        changing: Names of the buffers that a forward changes.
        routes: Whether the layer chooses indices by values, as a router chooses experts.
        inspects_grad: Whether the layer asks if gradients go through a tensor.
        locality: The proof that the layer keeps tokens apart.
    """

    unsliceable: str
    needs_full_attention: str = ""
    saved: tuple[SavedBytes, ...] = ()
    saved_bytes: int = 0
    tokens: int = 1
    key_value_gradient_bytes: int = 0
    changing: tuple[str, ...] = ()
    routes: bool = False
    inspects_grad: bool = False
    locality: Locality = field(default_factory=lambda: Locality(""), compare=False)


def probe_layer(call: LayerCall, x: Tensor, backend_of: BackendOf, longest: int | None = None) -> LayerTraits:
    """Run a layer twice as in training, and check that it gives the same output. The layer's state is restored.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        backend_of: Returns the attention kernel.
        longest: Largest number of tokens to probe; `None` for all tokens.

    Raises:
        ValueError: The layer gives another output for the same input, or it has written or kept tensors where a run
            cannot be undone.
    """
    tokens = min(call.tokens, longest or call.tokens)
    try:
        return _probe(call, x, backend_of, tokens)
    except torch.OutOfMemoryError:  # which says nothing about the layer
        raise
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:  # models check the sizes of masks
        if tokens == call.tokens:
            raise
        tensors = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
        if any(t.dim() > 2 and t.shape[-1] == call.tokens for t in tensors):
            why = (
                f"{call.name} gets an attention mask of all tokens, which is a tensor (padding on the left makes one, "
                "padding on the right does not)"
            )
        else:
            why = f"{call.name} cannot run on some of the tokens: {str(error).splitlines()[0]}"
    return replace(_probe(call, x, backend_of, call.tokens), unsliceable=why)


def _probe(call: LayerCall, x: Tensor, backend_of: BackendOf, tokens: int) -> LayerTraits:
    with without_hooks(call.layer), without_global_hooks():
        before = LayerState(call, x.device)
        arguments = (t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor) and t.requires_grad)
        effects = SideEffects([x, *arguments], before.why_not_written)
        part = part_of(x.detach(), call.token_dim, 0, tokens).requires_grad_(x.requires_grad)
        is_leaf = x.requires_grad and x.is_leaf
        try:
            traits = _traits_of(call, part, _Recorder(backend_of, HiddenWrites(call)), before, effects, is_leaf)
        finally:
            before.restore()
    if effects.keeps_tensors():
        raise ValueError(kept_elsewhere(call.name))
    return traits


def _traits_of(
    call: LayerCall, x: Tensor, recorder: _Recorder, before: LayerState, effects: SideEffects, is_leaf: bool
) -> LayerTraits:
    tokens = x.shape[call.token_dim]
    everything = TokenRange(0, tokens, KEPT)
    with (
        _watched_run(call, x, recorder, effects) as copy,
        NotedChoices(recorder.note_choice),
        NotedQuestions(call.name, copy if is_leaf else None) as questions,
    ):
        hidden = split_output(call.with_copied_containers().run(copy, everything), x, call.layer)[0]
    recorder.changes_input = copy._version > 0
    sketch = _sketch(hidden, x)
    del hidden, copy
    recorder.writes.refuse()
    changing, rewritten = before.changed_buffers(), before.changed_tensor()

    def repeats(part: TokenRange) -> bool:
        before.restore()
        with effects.watching():
            return _repeats(call, x, recorder, sketch, part)

    # On a part of the tokens, which takes less memory, if that suffices.
    if not (repeats(TokenRange(0, max(1, tokens // 2), KEPT)) or repeats(everything)):
        raise ValueError(
            f"{call.name} gives another output for the same input: its forward depends on something "
            "besides inputs, weights, attributes and random states (a variable of a module, class or function, a "
            "generator that it does not hold, numbers that another thread draws at the same time): make it a function "
            "of these, for example in attributes of the layer, or train this model without lightning_memo"
        )
    needs_full_attention = _why_full_attention(call, recorder)
    why = _why_not_sliced(call, recorder, not needs_full_attention, changing, rewritten)
    return LayerTraits(
        why,
        needs_full_attention,
        tuple(recorder.saved),
        recorder.writes.saved_bytes,
        tokens,
        recorder.gradient_bytes,
        changing,
        recorder.routes,
        questions.asked,
    )


@contextlib.contextmanager
def _watched_run(call: LayerCall, x: Tensor, recorder: _Recorder, effects: SideEffects) -> Iterator[Tensor]:
    """Yield a copy of the input with which the layer is to run inside the context.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        recorder: Answers calls of attention and recurrences, and watches what the layer writes into saved tensors.
        effects: Watches the tensors that the layer writes and keeps.
    """
    note = effects.outside(recorder.writes.note)
    with effects.watching(), _in_training(call, note):
        copy = x.clone()  # because a layer may change its input in place
        note(copy)  # another layer may have saved it
        everything = TokenRange(0, x.shape[call.token_dim], KEPT)
        attention = handling(effects.outside(recorder.whole), call.layer, call.layout, recorder.note_own)
        recurrences = handing(call.layer, recorder.hand, recorder.note_own)
        with attention, recurrences, call.mode(everything), recorder.writes:
            yield copy


@contextlib.contextmanager
def _in_training(call: LayerCall, on_saved: Callable[[Tensor], None] = lambda t: None) -> Iterator[None]:
    """Let a layer find gradients enabled, as layers may ask for that, without keeping what autograd saves.

    Args:
        call: The layer and its arguments.
        on_saved: Called with each tensor that autograd saves.
    """
    saved = saved_tensors_hooks(on_saved, lambda _: refuse_inner_backward(call.name))
    # What a layer adds to in place must not become a function of a probe.
    tables = [table for module in call.layer.modules() for table in (module._buffers, vars(module))]
    held = [(table, name, t, t.detach()) for table in tables for name, t in table.items() if _is_tensor(t)]
    for table, name, _, alias in held:
        table[name] = alias
    try:
        with torch.enable_grad(), refusing_transforms(call.name), saved:
            yield
    finally:
        for table, name, t, alias in held:
            if table.get(name) is alias:
                table[name] = t


def _is_tensor(value: object) -> bool:
    """Return whether a value is a tensor. Proxies are not asked for their classes."""
    return issubclass(type(value), Tensor)


class _Recorder:
    """Answers attention calls, and records them."""

    def __init__(self, backend_of: BackendOf, writes: HiddenWrites) -> None:
        self._backend_of, self.writes = backend_of, writes
        self.specs: list[AttentionSpec] = []
        self.why_no_blocks = ""  # why an attention kernel needs all tokens at once
        self.saved: list[SavedBytes] = []
        self.gradient_bytes = 0
        self.outputs: list[tuple[Tensor, RngState]] = []
        self.routes = self.changes_input = False
        self.why_own = ""  # why the layer computes attention itself

    def whole(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        backend = self._backend_of(q, k, v, spec)
        with torch.no_grad():
            result = merge_sinks(backend.forward(q, k, v, spec), spec.sinks)
        for t in (q, k, v, result.out):
            self.writes.note(t)
        self.specs.append(spec)
        if not backend.blocks:
            self.why_no_blocks = _why_no_blocks(q)
        for kind, t in (("out", result.out), ("lse", result.lse), ("key", k), ("value", v)):
            self.saved.append(SavedBytes(kind, t.nbytes))
        self.gradient_bytes += (k.numel() + v.numel()) * sums_dtype(k).itemsize
        self.outputs.append((result.out, RngState.capture(q.device)))
        return as_function_of(result.out, q, k, v, spec.sinks)

    def hand(self, call: StateCall) -> Tensor:
        out, state = call.run()
        self.saved.append(SavedBytes("state", state.nbytes, per_token=False))
        return out

    def note_own(self, why: str) -> None:
        self.why_own = why

    def note_choice(self, _: Tensor) -> None:
        self.routes = True

    def known(self, part: TokenRange, tokens: int) -> Callable[..., Tensor]:
        """Return a handler that answers with the known outputs of some tokens, and draws as much as attention did."""
        known = iter(self.outputs)

        def answer(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            out, after = next(known)
            after.restore()
            if part.tokens != tokens:  # otherwise, queries may be no tokens
                out = take_tokens(out, 2, tokens, part.start, part.stop)
            return as_function_of(out, q, k, v, spec.sinks)

        return answer


def _repeats(call: LayerCall, x: Tensor, recorder: _Recorder, sketch: Tensor, part: TokenRange) -> bool:
    """Run a layer once more on some tokens, with known attention, and return whether it gives the same output."""
    tokens, x = x.shape[call.token_dim], x.narrow(call.token_dim, part.start, part.tokens)
    handed = handing(call.layer, lambda state_call: state_call.run()[0], lambda why: None)
    errors = () if part.tokens == tokens else (RuntimeError, ValueError, IndexError, AssertionError)
    try:
        attention = handling(recorder.known(part, tokens), call.layer, call.layout)
        with _in_training(call), attention, handed, call.mode(part):
            again = split_output(call.with_copied_containers().run(x.clone(), part), x, call.layer)[0]
            return _same(_sketch(again, x), sketch.narrow(call.token_dim, part.start, part.tokens), x)
    except torch.OutOfMemoryError:
        raise
    except (StopIteration, *errors):
        return False


@torch.no_grad()
def _sketch(hidden: Tensor, x: Tensor) -> Tensor:
    """Return what a layer added to its input, projected on a few directions: `[batch, tokens, 8]`, which is small."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(x.shape[-1], _DIRECTIONS, generator=generator)
    return ((hidden - x).nan_to_num_() @ directions.to(x)).float()


def _same(again: Tensor, sketch: Tensor, x: Tensor) -> bool:
    """Return whether two sketches differ by rounding only."""
    exact = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
    largest = sketch.abs().max().clamp_min(torch.finfo(sketch.dtype).tiny)
    return float((again - sketch).abs().max() / largest) <= (_TOLERANCE if exact else _HALF_TOLERANCE)


def _why_full_attention(call: LayerCall, recorder: _Recorder) -> str:
    """Return why attention of a layer cannot run slice after slice; empty if it can."""
    if all(spec.sliceable for spec in recorder.specs):
        return recorder.why_no_blocks
    why = "it is not causal, has an explicit mask or draws dropout"
    return f"attention of {call.name} needs all tokens at once, because {why}"


def _why_no_blocks(q: Tensor) -> str:
    """Return why no kernel computes attention of these queries slice after slice."""
    if q.device.type == "cuda" and q.dtype not in (torch.float16, torch.bfloat16):
        return f"attention runs slice after slice in half precision only on a GPU, and not in {q.dtype}"
    return f"no attention kernel on {q.device.type} runs slice after slice in {q.dtype} with head_dim {q.shape[-1]}"


def _why_not_sliced(
    call: LayerCall, recorder: _Recorder, sliceable: bool, changing: tuple[str, ...], rewritten: str
) -> str:
    """Return why a layer that mixes tokens in attention only has to run as one slice; empty if it can be cut."""
    name = call.name
    if call.tokens < 2:
        return f"{name} got a single token"
    if changing:
        return f"{name} changes its buffer {changing[0]} in each forward"
    if rewritten:
        return f"{name} changes {rewritten} in each forward"
    if recorder.why_own:
        return f"in {name}, {recorder.why_own}"
    if not sliceable and recorder.changes_input:
        return f"{name} changes its input in place, and attention needs all tokens at once"
    if not sliceable and len(recorder.specs) > 1:
        return f"{name} calls attention {len(recorder.specs)} times, and not all calls are causal"
    return ""


_ROOTS: tuple[Any, ...] = (Tensor.is_leaf.__get__, Tensor.grad_fn.__get__)  # type: ignore[attr-defined]
_QUESTIONS: tuple[Any, ...] = (*_ROOTS, Tensor.requires_grad.__get__)


class NotedQuestions(OwnMode):
    """Notes whether a layer asks for the gradients of any tensor.

    If the model lets the first hidden states require grad (`enable_input_require_grads` of transformers), they are a
    leaf of autograd's graph. Where the engine runs a layer, its input is a function of that leaf.

    Args:
        name: Name of the layer's class.
        leaf: The layer's input, if it is such a leaf; `None` otherwise.

    Attributes:
        asked: Whether the layer has asked.
    """

    def __init__(self, name: str, leaf: Tensor | None) -> None:
        super().__init__()
        self.asked = False
        self._name, self._leaf = name, leaf

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.asked |= func in _QUESTIONS
        if func in _ROOTS and args[0] is self._leaf:
            raise ValueError(
                f"{self._name} asks is_leaf or grad_fn of its input, which is a leaf in plain training and a function "
                "of that leaf here: let it ask requires_grad"
            )
        return func(*args, **(kwargs or {}))
