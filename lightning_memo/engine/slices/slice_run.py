"""One slice of a layer call: how its saved tensors are packed, unpacked and recomputed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_memo.engine.attention.sliced_attention import KeysValuesSource
from lightning_memo.engine.forward.as_written import run_eager
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.matrix_products import ProductMode
from lightning_memo.engine.forward.refuse_checkpointing import refuse_inner_backward, refusing_transforms
from lightning_memo.engine.forward.repeated_choices import NotedChoices
from lightning_memo.engine.layers.call_storage import SliceStorage
from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.memory.block_reader import token_rows
from lightning_memo.engine.memory.noted_tensors import NotedTensor
from lightning_memo.engine.memory.saved_storages import resolved
from lightning_memo.engine.recurrence import StateCall, handing
from lightning_memo.engine.saved_tensors.offload_group import Handle, KeysValues
from lightning_memo.engine.saved_tensors.offloaded_arguments import OffloadedArgument
from lightning_memo.engine.saved_tensors.weight_copies import WeightCopy
from lightning_memo.engine.saved_tensors.wrapper_subclasses import is_sparse, is_wrapped, plain_parts
from lightning_memo.engine.slices.recomputation import Recomputed, RecomputedKeysValues, recompute
from lightning_memo.engine.slices.saved_attention import NotedCall, SavedAttention, StartState
from lightning_memo.kernels import AttentionResult, AttentionSpec, RngState
from lightning_memo.kernels.attention_kernel import detached, gradient_of_sinks, merge_sinks
from lightning_memo.parallel.local_tensors import ShardedHandle, local_part
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.retained_graph import graph_is_retained


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
                stack.enter_context(handing(run.call.layer, self.hand, run.check_handed))
            if run.needs_mode:
                stack.enter_context(run.call.mode(self.range))
            stack.enter_context(run.arguments.casting())
            if self.recomputes and self.range.has_products:
                stack.enter_context(ProductMode(run.call.layer, self.storage))
            if self.recomputes and run.routes:
                stack.enter_context(NotedChoices(self.choices.append, run.arguments))
            if self.storage.saving is not None:
                stack.enter_context(self.storage.saving)
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
                    swapped_bytes = None if wrapped else storage.swapped_bytes(part)
                    run.meter.profile.recomputed(run.position.layer, part, run.call.layer, swapped_bytes=swapped_bytes)
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
        """Answer an attention call of the layer's forward in the schedule "layer"."""
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
        profile = self.run.engine.profile
        if profile is not None and self._recomputed is not None:
            profile.most_read_bytes = max(profile.most_read_bytes, self._recomputed.most_taken_bytes)
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
