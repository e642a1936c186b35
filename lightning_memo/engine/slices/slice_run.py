"""One slice of a layer call: how its saved tensors are packed, unpacked and recomputed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_memo.engine.attention.sliced_attention import KeysValuesSource
from lightning_memo.engine.forward.collected_outputs import collecting_nothing
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.matrix_products import ProductMode
from lightning_memo.engine.forward.refuse_checkpointing import refuse_inner_backward, refusing_transforms
from lightning_memo.engine.forward.repeated_choices import NotedChoices, RepeatedChoices, as_function_of
from lightning_memo.engine.layers.call_storage import SliceStorage
from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.memory.block_reader import token_rows
from lightning_memo.engine.memory.saved_storages import NotedTensor, resolved
from lightning_memo.engine.modules.layer_forward import run_eager
from lightning_memo.engine.recurrence import StateCall, handing
from lightning_memo.engine.saved_tensors.call_arguments import OffloadedArgument, WeightCopy
from lightning_memo.engine.saved_tensors.offload_group import Handle, KeysValues
from lightning_memo.engine.saved_tensors.wrapper_subclasses import is_sparse, is_wrapped, plain_parts
from lightning_memo.engine.slices.recomputed_products import MeasuredProducts, StoredMatmuls
from lightning_memo.engine.state.random_states import RepeatedDraws
from lightning_memo.kernels import AttentionResult, AttentionSpec, RngState
from lightning_memo.kernels.attention_kernel import detached, gradient_of_sinks, merge_sinks
from lightning_memo.parallel.local_tensors import ShardedHandle, local_part
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.retained_graph import NEVER_DIFFERENTIATED, NOT_RETAINED, graph_is_retained


class SliceRun:
    """Some tokens of a layer call, from their forward to the end of their backward.

    Args:
        run: The layer call.
        index: Number of the slice in the call.
        part: The tokens.
        x: The slice's input.

    Attributes:
        recomputes: Whether the slice's activations are recomputed.
        storage: Stores the tensors that the slice saves.
        gaps: Whether the slice's input has gaps, because it is a part of a tensor of several rows.
        attentions: What the backward of each attention call needs.
        rng_after_attention: The random state after each attention call.
        starts: The state at the start of each recurrence.
        saved: Shapes and dtypes of the tensors that a recomputation has to deliver.
        choices: Indices that the layer chose by values, for the recomputation.
        sums: Sums of the saved tensors, if recomputed values are to be compared with the forward's.
        draws: The random states of the forward.
    """

    def __init__(self, run: LayerRun, index: int, part: TokenRange, x: Tensor) -> None:
        self.run, self.index, self.range = run, index, part
        self.recomputes = part.recomputes
        self.subject = run.meter.slice_subject(index)
        self.storage = SliceStorage(run.storage, run.arguments, run.begin_backward, part, x)
        self.gaps = not x.is_contiguous()
        self.attentions: list[SavedAttention] = []
        self.rng_after_attention: list[RngState] = []
        self.starts: list[StartState | None] = []
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.choices: list[Tensor] = []
        compared = self.recomputes and run.forward_context.comparable
        self.sums = run.engine.comparison.sums_of(run.key) if compared else None
        noted = run.engine.comparison.draws or run.engine.profile is not None
        self.draws = run.forward_context.draws(noted and self.recomputes)
        self._in_forward = False
        self._recomputed: Recomputed | None = None
        run.parts.add(self)

    @property
    def number(self) -> int:
        """Number of the slice in the sequence, by which attention cores know it."""
        return self.run.position.first_slice + self.index

    # ---- forward

    @contextlib.contextmanager
    def running(self, handler: Callable[..., Tensor]) -> Iterator[None]:
        """Pack what the layer saves inside the context, and direct its attention calls to `handler`."""
        run = self.run
        with contextlib.ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(self.pack, self.unpack))
            stack.enter_context(handling(handler, run.call.layer, run.call.layout, run.check_whole))
            if run.hands_states:
                documents = run.documents_of(self.number)
                stack.enter_context(handing(run.call.layer, self.hand, run.check_handed, documents))
            if run.needs_mode:
                stack.enter_context(run.call.mode(self.range))
            stack.enter_context(run.arguments.casting())
            if self.recomputes and self.range.has_products:
                stack.enter_context(ProductMode(run.call.layer, self.storage))
            if self.recomputes and run.routes:
                stack.enter_context(NotedChoices(self.choices.append, run.arguments))
            self._in_forward = True
            with refusing_transforms(run.call.name):
                yield
        self._in_forward = False
        if self.recomputes:
            self.draws.end_forward()
            run.engine.comparison.draws |= self.draws.changed

    def call(self, x: Tensor) -> Any:
        """Run the layer's own forward on these tokens."""
        return self.run.call.run(x, self.range)

    def pack(self, t: Tensor) -> Handle:
        """Store a tensor that autograd saves, and return its handle."""
        t = resolved(t)
        run, storage, local = self.run, self.storage, local_part(t)
        wrapped, sparse = is_wrapped(local), is_sparse(local)
        known = storage.find(local) if local.numel() and not (wrapped or sparse) else None
        if (known is None or self.recomputes) and t in run.arguments:  # a recomputation does not know what is stored
            return t if wrapped or sparse else run.arguments.handle(t)
        if self.recomputes:
            if known is None and run.meter.profile is not None:
                for part in plain_parts(local):
                    run.meter.profile.recomputed(run.position.layer, part, run.call.layer)
            if self.sums is not None:
                self.sums.note(len(self.saved), t)
            self.draws.note()
            self.saved.append((t.shape, t.dtype))
            return len(self.saved) - 1
        if known is None:
            known = storage.store_parts(local) if wrapped else storage.store_other(local)
        return ShardedHandle.of(t, known) if isinstance(t, DTensor) else known

    def unpack(self, handle: Handle) -> Tensor:
        """Return the tensor of a handle, in the backward."""
        if self._in_forward:
            refuse_inner_backward(self.run.call.name)
        if isinstance(handle, int):
            return self.recompute().take(handle)
        if isinstance(handle, (NotedTensor, OffloadedArgument, WeightCopy)):
            return self.run.arguments.load(handle)
        return self.storage.load(handle)

    def hand(self, call: StateCall) -> Tensor:
        """Compute a recurrence from the state that the slice before has reached."""
        run, number = self.run, len(self.starts)
        first, last = self.number == 0, self.number == len(run.attention.slices) - 1
        start = run.handed.start(number, call, first)
        kept = None
        if start is not None and self.recomputes:
            kept = StartState(self.storage.store_state(start, planned=run.in_slices), start.requires_grad)
        self.starts.append(kept)
        return run.handed.run(number, call, start, first, last)

    def end_forward(self) -> None:
        """Release what only this slice's forward needs on the device."""
        self.run.meter.recorded = True
        self.storage.end_forward()

    # ---- attention of a single slice, or slice after slice

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Answer an attention call of the layer's forward, slice by slice."""
        self.run.check_sliceable(spec)
        self.note_attention(q, k, v)
        out: Tensor = _SliceAttention.apply(self, detached(spec), q, k, v, spec.sinks)
        self.rng_after_attention.append(RngState.capture(q.device, self.run.forward_context.rng))
        return out

    def note_attention(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Note with what the next attention call begins, if a recomputation is to be compared with that."""
        self.draws.note()
        if self.sums is not None:
            self.sums.note_attention(len(self.attentions), q, k, v)

    def attention_forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute attention of this slice to its own and earlier keys, and store what the backward needs."""
        core = self.run.attention.core(len(self.attentions), q, k, v, spec)
        with self.run.meter.computing_attention(spec):
            result, k, v = core.forward(self.number, q, k, v, spec)
            result = merge_sinks(result, spec.sinks)
        saved = self.save_attention(q, k, v, result, spec)
        if saved.keys_values is not None:
            core.hold(self.number, saved.keys_values)
        return result.out

    def save_attention(
        self, q: Tensor, k: Tensor, v: Tensor, result: AttentionResult, spec: AttentionSpec, nested: bool = False
    ) -> SavedAttention:
        """Store what the backward of attention needs; a recomputed slice computes its own q, k, v again.

        Args:
            q: Queries, `[batch, heads, tokens, head_dim]`.
            k: Keys.
            v: Values.
            result: The result of the kernel.
            spec: The attention call.
            nested: Whether attention ran over all slices at once.
        """
        run, storage = self.run, self.storage
        needed_later = not nested and (run.storage.per_slice or self.index < len(run.slices) - 1)
        dropped = self.range.place("out") is None
        saved = SavedAttention(
            out=None if dropped else storage.store("out", result.out),
            lse=None if dropped else storage.store("lse", result.lse),
            state=result.state,
            query=None if self.recomputes else storage.store_once("query", q),
            keys_values=self._store_keys(k, v) if needed_later or not self.recomputes else None,
            call=NotedCall.of(spec),
        )
        profile = run.meter.profile
        if self.recomputes and profile is not None:
            kinds = {"query": q} if saved.keys_values is not None else {"query": q, "key": k, "value": v}
            kinds |= {"out": result.out, "lse": result.lse} if dropped else {}
            for kind, t in kinds.items():
                profile.recomputed(run.position.layer, t, run.call.layer, kind)
        self.attentions.append(saved)
        return saved

    def _store_keys(self, k: Tensor, v: Tensor) -> KeysValuesSource:
        storage = self.storage
        if self.range.place("key") is None:
            return RecomputedKeysValues(self, len(self.attentions), k, v)
        if self.run.storage.per_slice:  # as rows of tokens, so that those of several slices join to one block
            return KeysValues(storage.group, storage.store("key", token_rows(k)), storage.store("value", token_rows(v)))
        return KeysValues(storage.group, storage.store_once("key", k), storage.store_once("value", v))

    def attention_backward(self, number: int, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sinks, if any, of the attention call `number`."""
        saved = self.attentions[number]
        spec = saved.call.again(self.run.call.name)
        q, k, v = self.qkv(number)
        if saved.out is None or saved.lse is None:
            result = self.recompute().results[number]
        else:
            result = AttentionResult(self.storage.load(saved.out), self.storage.load(saved.lse), saved.state)
        with self.run.engine.recorder.computing("attention"):
            dsinks = None if spec.sinks is None else gradient_of_sinks(dout, result, spec.sinks)
            return *self.run.attention.cores[number].backward(self.number, dout, q, k, v, result, spec), dsinks

    def qkv(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the attention call `number`, stored or recomputed."""
        saved, per_slice = self.attentions[number], self.run.storage.per_slice
        again = self.recompute().qkv[number] if self.recomputes else None
        if again is not None and (saved.keys_values is None or not per_slice):
            return again
        assert saved.keys_values is not None
        k, v = saved.keys_values.load()
        if per_slice:
            k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        if again is not None:
            return again[0], k, v
        assert saved.query is not None
        return self.storage.load(saved.query), k, v

    # ---- recomputation and backward

    def recompute(self) -> Recomputed:
        """Return the results of running the slice's forward again, which happens once."""
        if self._recomputed is None:
            variables = self.run.forward_context.variables.copy()  # a recomputation may need that of another slice
            self._recomputed = variables.run(run_eager, recompute, self)
        return self._recomputed

    def begin_backward(self) -> None:
        """Begin the slice's backward; a later slice may have recomputed this one before."""
        if not self.run.whole:
            self.run.engine.recorder.begin("slice", self.subject)

    def end_backward(self) -> None:
        """End the slice's backward, and give its memory back, unless the graph is kept for another backward."""
        self.run.engine.recorder.end("slice", self.subject)
        self._recomputed = None
        if not graph_is_retained():
            self.attentions, self.choices, self.starts = [], [], []
            self.storage.end_backward()

    def rewind(self) -> None:
        """Drop what a backward has made, so that another one can run."""
        self._recomputed = None
        self.storage.rewind()


class _SliceAttention(torch.autograd.Function):
    """Attention of one slice. The slice stores what the backward needs, not this function."""

    @staticmethod
    def forward(
        ctx: Any, part: SliceRun, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        ctx.part, ctx.number = part, len(part.attentions)
        return part.attention_forward(q, k, v, spec)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.part.attention_backward(ctx.number, dout))


@dataclass(frozen=True, slots=True)
class NotedCall:
    """An attention call, whose masks have to be in the backward what they were in the forward.

    Note: [Masks that change]
    PyTorch's attention saves a boolean mask as the numbers that it adds, so that a user may fill the mask with other
    values before the backward. The engine keeps the user's own mask.
    """

    _spec: AttentionSpec
    _masks: tuple[NotedTensor, ...]

    @classmethod
    def of(cls, spec: AttentionSpec) -> NotedCall:
        """Note a call in the forward."""
        return cls(spec, tuple(NotedTensor.of(mask) for mask in (spec.mask, spec.whole_mask) if mask is not None))

    def again(self, layer: str) -> AttentionSpec:
        """Return the call.

        Args:
            layer: Name of the layer, for messages.

        Raises:
            RuntimeError: A mask was changed in place since the forward.
        """
        for mask in self._masks:
            mask.check(
                f"the attention mask of {layer} was changed in place between a forward and its backward, which needs "
                "its values: give each forward a mask of its own, or change it after the backward"
            )
        return self._spec


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """Handles of the tensors that the backward of one attention call needs.

    Attributes:
        out: The output; `None` if attention runs again.
        lse: The log-sum-exp of the scores; `None` if attention runs again.
        state: What else the kernel needs.
        query: The queries; `None` if they are recomputed.
        keys_values: The keys and values; `None` if they are recomputed and no later slice needs them.
        call: The attention call.
    """

    out: Handle | None
    lse: Handle | None
    state: Any
    query: Handle | None
    keys_values: KeysValuesSource | None
    call: NotedCall


@dataclass(frozen=True, slots=True)
class StartState:
    """The state at the start of a recurrence, from which a recomputation begins.

    Attributes:
        state: Handle of the state.
        requires_grad: Whether its gradient goes to the slice before.
    """

    state: Handle
    requires_grad: bool


class StopRecomputation(BaseException):
    """Ends a recomputation: everything that the backward needs has been computed. Layers must not catch it."""


class Recomputed:
    """The results of a recomputation.

    Attributes:
        qkv: Queries, keys and values of the slice's attention calls.
        results: Results of those attention calls that had to run again, by their numbers.
        saved: The tensors that the forward saved, in order, until they are taken.
    """

    def __init__(self) -> None:
        self.qkv: list[tuple[Tensor, Tensor, Tensor]] = []
        self.results: dict[int, AttentionResult] = {}
        self.saved: list[Tensor | None] = []
        self._reader = 0  # the autograd Function that took tensors last
        self._read: dict[int, Tensor] = {}

    def take(self, number: int) -> Tensor:
        """Return a tensor that the forward saved; each can be taken once, or often by a single autograd Function.

        Raises:
            RuntimeError: The tensor was taken before.
        """
        t, self.saved[number] = self.saved[number], None
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if id(node) != self._reader:
            self._reader, self._read = id(node), {}
        if isinstance(node, BackwardCFunction):  # whose backward may read `ctx.saved_tensors` more than once
            t = self._read.get(number) if t is None else self._read.setdefault(number, t)
        if t is None:
            raise RuntimeError(NOT_RETAINED)
        return t


def recompute(part: SliceRun) -> Recomputed:
    """Run a slice's forward again until everything that the backward needs has been computed.

    Raises:
        RuntimeError: The forward saved other tensors than before.
    """
    return _Recomputation(part).run()


class _Recomputation:
    """A forward whose attention and stored matrix products are answered from storage.

    The slice must not refer to this object, which would then live as long as the slice.
    """

    def __init__(self, part: SliceRun) -> None:
        self._part = part
        self._found = Recomputed()
        self._starts = iter(part.starts)
        self._draws = RepeatedDraws(part.run.call.name, part.draws) if part.draws.changed else None

    def run(self) -> Recomputed:
        part, run = self._part, self._part.run
        run.begin_backward()
        run.meter.mark("recompute_begin")
        x = self._input().requires_grad_(run.states.x_requires_grad)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run.engine.recorder.computing("recompute", part.subject))
            stack.enter_context(contextlib.suppress(StopRecomputation))
            copies = stack.enter_context(run.forward_context.replayed(part.draws))
            stack.enter_context(run.arguments.with_copies(copies))
            stack.enter_context(collecting_nothing())
            stack.enter_context(saved_tensors_hooks(self._record, _refuse))
            stack.enter_context(handling(self._attend, run.call.layer, run.call.layout, run.check_whole))
            if run.hands_states:
                documents = run.documents_of(part.number)
                stack.enter_context(handing(run.call.layer, self._hand, run.check_handed, documents))
            if run.needs_mode:
                stack.enter_context(run.call.mode(part.range))
            stack.enter_context(run.arguments.casting())
            if part.choices:
                stack.enter_context(RepeatedChoices(part.choices, run.arguments))
            if self._draws is not None:
                stack.enter_context(self._draws)
            if mode := self._product_mode():
                stack.enter_context(mode)
            run.arguments.restored_call().run(as_function_of(x, x), part.range)
        run.meter.mark("recompute_end")
        if not self._enough:
            raise RuntimeError(
                f"{run.call.name} saved {len(self._found.saved)} tensors when it was recomputed and {len(part.saved)} "
                "before: its forward depends on something besides its inputs, weights and random state"
            )
        return self._found

    def _input(self) -> Tensor:
        """Return the slice's input, with gaps if it had some: operations save other tensors, in another order, then."""
        part, call = self._part, self._part.run.call
        x = call.narrow(part.storage.load(part.storage.input), part.range).detach()
        if not part.gaps or not x.is_contiguous():
            return x
        shape = list(x.shape)
        shape[call.token_dim] += 1
        return x.new_empty(shape).narrow(call.token_dim, 0, part.range.tokens).copy_(x)

    @property
    def _enough(self) -> bool:
        return len(self._found.saved) == len(self._part.saved) and len(self._found.qkv) == len(self._part.attentions)

    def _check_draws(self) -> None:
        if self._draws is not None:
            self._draws.check(len(self._found.saved) + len(self._found.qkv))

    def _stop_if_enough(self) -> None:
        if self._enough:
            raise StopRecomputation

    def _record(self, t: Tensor) -> None:
        t = resolved(t)
        if t not in self._part.run.arguments:
            self._check_draws()
            self._check(t)
            self._found.saved.append(t.detach())
            self._stop_if_enough()

    def _check(self, t: Tensor) -> None:
        part, number = self._part, len(self._found.saved)
        shape, dtype = part.saved[number] if number < len(part.saved) else (t.shape, t.dtype)
        if t.shape != shape or t.dtype != dtype:
            raise RuntimeError(
                f"{part.run.call.name} saved a {t.dtype} tensor of shape {list(t.shape)} when it was recomputed and a "
                f"{dtype} tensor of shape {list(shape)} before: its forward depends on something besides its inputs, "
                "weights and random state: make it a function of these"
            )
        if part.sums is not None and not part.sums.alike(number, t):
            raise RuntimeError(_other_values(part.run.call.name))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        part, number = self._part, len(self._found.qkv)
        self._check_draws()
        self._found.qkv.append((q.detach(), k.detach(), v.detach()))
        if part.sums is not None and not part.sums.attention_alike(number, q, k, v):
            raise RuntimeError(_other_values(part.run.call.name))
        saved = part.attentions[number]
        if saved.out is None:
            with torch.no_grad(), part.run.meter.computing_attention_again():
                core = part.run.attention.cores[number]
                noted = saved.call.again(part.run.call.name)
                again = core.forward_again(part.number, *self._found.qkv[number], noted)
                self._found.results[number] = merge_sinks(again, noted.sinks)
            if self._draws is not None:
                self._draws.check_state(part.rng_after_attention[number])
        self._stop_if_enough()
        if part.draws.changed:
            part.rng_after_attention[number].restore()
        known = self._found.results[number].out if saved.out is None else part.storage.load(saved.out)
        return as_function_of(known, q, k, v, spec.sinks)

    def _hand(self, call: StateCall) -> Tensor:
        start, state = next(self._starts), None
        if start is not None:
            state = self._part.storage.load(start.state).detach().requires_grad_(start.requires_grad)
        return call.run(state)[0]

    def _ends_with(self, saved: tuple[Tensor, ...]) -> bool:
        """Return whether the recomputation ends as soon as autograd has saved some tensors."""
        part, found = self._part, self._found
        more = sum(t not in part.run.arguments for t in saved)
        return len(found.saved) + more == len(part.saved) and len(found.qkv) == len(part.attentions)

    def _product_mode(self) -> ProductMode | None:
        part, layer, profile = self._part, self._part.run.call.layer, self._part.run.engine.profile
        if profile is not None and profile.with_products:
            return ProductMode(layer, MeasuredProducts(profile, part.run.position.layer), self._ends_with)
        mode = ProductMode(layer, StoredMatmuls(part.storage), self._ends_with)
        return mode if part.storage.products or mode.adapts else None


class RecomputedKeysValues:
    """Keys and values of a recomputed slice: on the device in the forward, computed again in the backward.

    Later slices, whose backward comes first, attend to them as well.
    """

    def __init__(self, part: SliceRun, number: int, k: Tensor, v: Tensor) -> None:
        self._part = weakref.ref(part)  # the slice refers to the attention core that holds this object
        self._number = number
        self._present: tuple[Tensor, Tensor] | None = (k.detach(), v.detach())

    def peek(self) -> tuple[Tensor, Tensor]:
        """Return them while the forward still runs."""
        assert self._present is not None
        return self._present

    def end_forward(self) -> None:
        """Drop the tensors of the forward."""
        self._present = None

    def load(self) -> tuple[Tensor, Tensor]:
        """Return them in the backward, computed again."""
        part = self._part()
        assert part is not None
        _, k, v = part.recompute().qkv[self._number]
        return k, v


def _other_values(layer: str) -> str:
    return (
        f"{layer} was recomputed with other values than in its forward: an input or a weight was written since without "
        "a trace (through .data), or something else that it reads has changed (a variable of a module, class or "
        "function): change it after the backward only, or keep it in attributes of the layer's modules"
    )


def _refuse(_: None) -> Tensor:
    raise RuntimeError(NEVER_DIFFERENTIATED)
