"""One slice of a layer call: how its saved tensors are packed, unpacked, and recomputed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_memo.engine.forward.activation_checkpointing import refuse_inner_backward
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.matrix_products import ProductMode
from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.layers.recomputation import Recomputed, RecomputedKeysValues, recompute
from lightning_memo.engine.memory.block_reader import token_rows
from lightning_memo.engine.saved.offload_group import Handle, KeysValues
from lightning_memo.engine.saved.parked_arguments import ParkedView
from lightning_memo.engine.saved.weight_copies import WeightCopy
from lightning_memo.engine.saved.wrapper_subclasses import WrappedHandle, is_opaque, is_wrapped, plain_parts
from lightning_memo.kernels import AttentionResult, AttentionSpec, RngState
from lightning_memo.parallel.local_tensors import ShardedHandle, local_part
from lightning_memo.planner.token_slices import Action, TokenRange


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """What the backward of one attention call needs.

    `query` and `keys_values` are `None` where they are recomputed, `out` and `lse` where attention runs again.
    """

    out: Handle | None
    lse: Handle | None
    state: Any
    query: Handle | None
    keys_values: KeysValues | RecomputedKeysValues | None
    spec: AttentionSpec


class SliceRun:
    """Some tokens of a layer call: how their saved tensors are packed, unpacked, and recomputed; `x` is their input."""

    def __init__(self, run: LayerRun, index: int, part: TokenRange, x: Tensor) -> None:
        self.run, self.index, self.range = run, index, part
        self.subject = run.slice_subject(index)
        self.unit, self.x = run.open(part, x)
        self.attentions: list[SavedAttention] = []
        self.products: dict[str, Handle] = {}  # outputs of matrix products that a recomputation does not compute
        self.rng_after_attention: list[RngState] = []
        self.saved = 0  # tensors that a recomputation has to deliver
        self._in_forward = False
        self._recomputed: Recomputed | None = None

    @property
    def action(self) -> Action:
        return self.range.action

    @property
    def place(self) -> int:
        """Which slice this is to attention."""
        return self.run.first_slice + self.index

    # ---- forward

    @contextlib.contextmanager
    def running(self, handler: Callable[..., Tensor]) -> Iterator[None]:
        """Inside, what the layer saves is packed, and its attention calls go to `handler`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(self.pack, self.unpack))
            stack.enter_context(handling(handler))
            if self.run.needs_mode:
                stack.enter_context(self.run.call.mode(self.range))
            stack.enter_context(self.run.casting())
            if self.action is Action.RECOMPUTE and self.range.places is not None:
                stack.enter_context(ProductMode(self.run.call.layer, self._store_product))
            self._in_forward = True
            yield
        self._in_forward = False

    def call(self, x: Tensor) -> Any:
        """The layer's own forward on these tokens."""
        return self.run.call.run(x, self.range)

    def pack(self, t: Tensor) -> Handle:
        run, local = self.run, local_part(t)
        wrapped = is_wrapped(local)
        known = self._find(local) if local.numel() and not wrapped else None
        if known is None and run.stays(t):
            return t if wrapped else run.shared_handle(t)
        if self.action is Action.RECOMPUTE:
            if known is None and run.profile is not None:
                for part in plain_parts(local):
                    run.profile.recomputed(run.index, part, run.call.layer)
            self.saved += 1
            return self.saved - 1
        handle = known if known is not None else self._store_parts(local) if wrapped else self._store_other(local)
        return ShardedHandle.of(t, handle) if isinstance(t, DTensor) else handle

    def _store_parts(self, t: Tensor) -> WrappedHandle:
        return WrappedHandle.of(t, lambda part: self._store_parts(part) if is_wrapped(part) else self._store_part(part))

    def _store_part(self, part: Tensor) -> Handle:
        """Store a part of a tensor: parts may be other tensors' bytes, or weights' (views of quantised ones)."""
        known = self._find(part) if part.numel() else None
        return known if known is not None else part if self.run.stays(part) else self._store_other(part)

    def _store_other(self, t: Tensor) -> Handle:
        return t.detach() if is_opaque(t) else self.store("other", t)

    def unpack(self, handle: Handle) -> Tensor:
        if self._in_forward:
            refuse_inner_backward(type(self.run.call.layer).__name__)
        if isinstance(handle, int):
            return self.recompute().take(handle)
        shared = isinstance(handle, (ParkedView, WeightCopy))
        return self.run.load_shared(handle) if shared else self.load(handle)

    def store(self, kind: str, t: Tensor) -> Handle:
        """Store a tensor where the slice's tensors of its kind are stored."""
        return self.run.store(self.unit, kind, t.detach(), self.range.place(kind), self.range)

    def _find(self, t: Tensor) -> Handle | None:
        """The handle of a tensor whose bytes are stored already."""
        known = self.unit.find(t)
        return self.run.kept.find(t) if known is None else known

    def _store_product(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        out = compute()
        if self.range.place(name) is not None and out.is_contiguous():
            place = self.range.place(name)
            self.products[name] = self.run.store_copy(self.unit, name, out.detach(), place, self.range)
        return out

    def load(self, handle: Handle) -> Tensor:
        """A stored tensor on the device, in the backward."""
        if not isinstance(handle, Tensor):
            self.run.begin_backward()
        return self.unit.load(handle)

    def end_forward(self) -> None:
        """Nothing of this slice's forward is needed on the device any more; slices that share a unit may follow."""
        self.run.recorded = True
        if self.run.unit is None:
            self.unit.end_forward()
        elif self.range.places is None:
            self.unit.offload()

    # ---- attention of a single slice, or slice after slice

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Answer an attention call of the layer's forward in the schedule "layer"."""
        self.run.check_sliceable(spec)
        out: Tensor = _SliceAttention.apply(self, spec, q, k, v)
        self.rng_after_attention.append(RngState.capture(q.device, self.run.rng_start))
        return out

    def attention_forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        run, number = self.run, len(self.attentions)
        core = run.core(number, q, k, v, spec)
        with run.measuring_attention(spec):
            result, k, v = core.forward(self.place, q, k, v, spec)
        saved = self.save_attention(q, k, v, result, spec)
        if saved.keys_values is not None:
            core.hold(self.place, saved.keys_values)
        return result.out

    def save_attention(
        self, q: Tensor, k: Tensor, v: Tensor, result: AttentionResult, spec: AttentionSpec, nested: bool = False
    ) -> SavedAttention:
        """Store what the backward of attention needs; a recomputed slice finds its own q, k, v again.

        Args:
            nested: Attention ran over all slices at once: their common log-sum-exp is stored elsewhere.
        """
        run, recomputed = self.run, self.action is Action.RECOMPUTE
        needed_later = not nested and (run.streamed or self.index < len(run.slices) - 1)
        dropped = self.range.place("out") is None
        saved = SavedAttention(
            out=None if dropped else self.store("out", result.out),
            lse=None if dropped else result.lse if nested else self.store("lse", result.lse),
            state=result.state,
            query=None if recomputed else self._store_once("query", q),
            keys_values=self._store_keys(k, v) if needed_later or not recomputed else None,
            spec=spec,
        )
        if recomputed and run.profile is not None:
            kinds = {"query": q} if saved.keys_values is not None else {"query": q, "key": k, "value": v}
            for kind, t in kinds.items():
                run.profile.recomputed(run.index, t, run.call.layer, kind)
        self.attentions.append(saved)
        return saved

    def _store_keys(self, k: Tensor, v: Tensor) -> KeysValues | RecomputedKeysValues:
        if self.action is Action.RECOMPUTE and self.range.places is not None:
            return RecomputedKeysValues(self, len(self.attentions), k, v)
        if self.run.streamed:  # as rows of tokens, so that those of several slices join to one block
            return KeysValues(self.unit, self.store("key", token_rows(k)), self.store("value", token_rows(v)))
        return KeysValues(self.unit, self._store_once("key", k), self._store_once("value", v))

    def _store_once(self, kind: str, t: Tensor) -> Handle:
        """Store a tensor unless its bytes are in the slot already."""
        known = self._find(t)
        return known if known is not None else self.store(kind, t)

    def attention_backward(self, number: int, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        saved = self.attentions[number]
        q, k, v = self.qkv(number)
        if saved.out is None or saved.lse is None:
            result = self.recompute().results[number]
        else:
            result = AttentionResult(self.load(saved.out), self.load(saved.lse), saved.state)
        with self.run.engine.recorder.computing("attention"):
            return self.run.cores[number].backward(self.place, dout, q, k, v, result, saved.spec)

    def qkv(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the attention call `number`, stored or recomputed."""
        saved = self.attentions[number]
        again = self.recompute().qkv[number] if self.action is Action.RECOMPUTE else None
        if again is not None and (saved.keys_values is None or not self.run.streamed):
            return again
        assert saved.keys_values is not None
        k, v = saved.keys_values.load()
        if self.run.streamed:
            k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        if again is not None:
            return again[0], k, v
        assert saved.query is not None
        return self.load(saved.query), k, v

    # ---- recomputation

    def recompute(self) -> Recomputed:
        """What comes of the slice's forward when it runs again, which it does once."""
        if self._recomputed is None:
            self._recomputed = recompute(self)
        return self._recomputed

    def begin_backward(self) -> None:
        """The slice's first act in the backward, but for a recomputation that a later slice needs."""
        if not self.run.whole:
            self.run.engine.recorder.begin("slice", self.subject)

    def end_backward(self) -> None:
        self.run.engine.recorder.end("slice", self.subject)
        self._recomputed = None
        self.attentions = []
        self.products = {}
        if self.run.unit is None:
            self.unit.release()


class _SliceAttention(torch.autograd.Function):
    """Attention of one slice. Saves nothing itself: the slice does."""

    @staticmethod
    def forward(ctx: Any, part: SliceRun, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.part, ctx.number = part, len(part.attentions)
        return part.attention_forward(q, k, v, spec)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.part.attention_backward(ctx.number, dout))
