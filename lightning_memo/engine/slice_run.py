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

from lightning_memo.engine.block_reader import token_rows
from lightning_memo.engine.intercept import handling
from lightning_memo.engine.run import LayerRun
from lightning_memo.engine.sharded import ShardedHandle, local_part
from lightning_memo.engine.slice_arguments import ParkedView
from lightning_memo.engine.slices import Action, TokenRange
from lightning_memo.engine.unit import Handle, KeysValues
from lightning_memo.kernels import AttentionResult, AttentionSpec, RngState


class EnoughError(Exception):
    """Everything that a recomputation is for has been computed."""


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """What the backward of one attention call needs; `query` and `keys_values` are `None` where they are recomputed."""

    out: Handle
    lse: Handle
    state: Any
    query: Handle | None
    keys_values: KeysValues | None
    spec: AttentionSpec


class SliceRun:
    """Some tokens of a layer call: how their saved tensors are packed, unpacked, and recomputed; `x` is their input."""

    def __init__(self, run: LayerRun, index: int, part: TokenRange, x: Tensor) -> None:
        self.run, self.index, self.range = run, index, part
        self.unit, self._x = run.open(part, x)
        self.attentions: list[SavedAttention] = []
        self.rng_after_attention: list[RngState] = []
        self._saved = 0  # tensors that a recomputation has to deliver
        self._replayed: list[Tensor | None] | None = None
        self._replayed_qkv: list[tuple[Tensor, Tensor, Tensor]] = []

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
            if self.run.engine.needs_mode(self.run):
                stack.enter_context(self.run.call.mode(self.range))
            yield

    def call(self, x: Tensor) -> Any:
        """The layer's own forward on these tokens."""
        return self.run.call.run(x, self.range)

    def pack(self, t: Tensor) -> Handle:
        run, local = self.run, local_part(t)
        known = self.unit.find(local) if local.numel() else None
        if known is None and t in run.shared:
            return run.shared_handle(t)
        if self.action is Action.RECOMPUTE:
            if known is None and run.profile is not None:
                run.profile.recomputed(run.index, local, run.call.layer)
            self._saved += 1
            return self._saved - 1
        handle = known if known is not None else self.store("other", local)
        return ShardedHandle.of(t, handle) if isinstance(t, DTensor) else handle

    def unpack(self, handle: Handle) -> Tensor:
        if isinstance(handle, int):
            return self._take_replayed(handle)
        return self.run.load_shared(handle) if isinstance(handle, ParkedView) else self.load(handle)

    def store(self, kind: str, t: Tensor) -> Handle:
        """Put a tensor into the slice's unit, unless the slice keeps what it saves on the device."""
        return self.run.store(self.unit, kind, t.detach(), self.action is Action.KEEP)

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
        else:
            self.unit.offload()

    # ---- attention of a single slice, or slice after slice

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Answer an attention call of the layer's forward in the schedule "layer"."""
        self.run.engine.check_sliceable(self.run, spec)
        out: Tensor = _SliceAttention.apply(self, spec, q, k, v)
        self.rng_after_attention.append(RngState.capture(q.device, self.run.rng_start))
        return out

    def attention_forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        run, number = self.run, len(self.attentions)
        core = run.core(number, q, k, v, spec)
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
        run, recompute = self.run, self.action is Action.RECOMPUTE
        needed_later = not nested and (run.streamed or self.index < len(run.slices) - 1)
        saved = SavedAttention(
            out=self.store("out", result.out),
            lse=result.lse if nested else self.store("lse", result.lse),
            state=result.state,
            query=None if recompute else self._store_once("query", q),
            keys_values=self._store_keys(k, v) if needed_later or not recompute else None,
            spec=spec,
        )
        if recompute and run.profile is not None:
            kinds = {"query": q} if saved.keys_values is not None else {"query": q, "key": k, "value": v}
            for kind, t in kinds.items():
                run.profile.recomputed(run.index, t, run.call.layer, kind)
        self.attentions.append(saved)
        return saved

    def _store_keys(self, k: Tensor, v: Tensor) -> KeysValues:
        if self.run.streamed:  # as rows of tokens, so that those of several slices join to one block
            return KeysValues(self.unit, self.store("key", token_rows(k)), self.store("value", token_rows(v)))
        return KeysValues(self.unit, self._store_once("key", k), self._store_once("value", v))

    def _store_once(self, kind: str, t: Tensor) -> Handle:
        """Store a tensor unless its bytes are in the slot already."""
        known = self.unit.find(t)
        return known if known is not None else self.store(kind, t)

    def attention_backward(self, number: int, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        saved = self.attentions[number]
        q, k, v = self.qkv(number)
        result = AttentionResult(self.load(saved.out), self.load(saved.lse), saved.state)
        return self.run.cores[number].backward(self.place, dout, q, k, v, result, saved.spec)

    def qkv(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the attention call `number`, stored or recomputed."""
        saved = self.attentions[number]
        if self.action is Action.RECOMPUTE:
            self.recompute()
        if saved.keys_values is None or (self.action is Action.RECOMPUTE and not self.run.streamed):
            return self._replayed_qkv[number]
        k, v = saved.keys_values.load()
        if self.run.streamed:
            k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        return self._replayed_qkv[number][0] if saved.query is None else self.load(saved.query), k, v

    # ---- recomputation

    def _take_replayed(self, number: int) -> Tensor:
        self.recompute()
        assert self._replayed is not None
        t = self._replayed[number]
        if t is None:
            raise RuntimeError(
                "a recomputed activation was asked for twice: a second backward through the same graph "
                "(retain_graph) is not supported; run the forward again"
            )
        self._replayed[number] = None
        return t

    def recompute(self) -> None:
        """Run the slice's forward again, attention answered from its saved output, and record what it saves."""
        if self._replayed is not None:
            return
        run = self.run
        run.begin_backward()
        run.mark("recompute_begin")
        self._replayed = []
        x = run.narrow(self.load(self._x), self.range).detach().requires_grad_()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(EnoughError))
            stack.enter_context(run.rng_start.replayed())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(run.autocast())
            stack.enter_context(saved_tensors_hooks(self._record, _refuse))
            stack.enter_context(handling(self._replay_attention))
            if run.engine.needs_mode(run):
                stack.enter_context(run.call.mode(self.range))
            run.restored_call().run(x, self.range)
        run.mark("recompute_end")
        if len(self._replayed) != self._saved or len(self._replayed_qkv) != len(self.attentions):
            raise RuntimeError(
                f"{type(run.call.layer).__name__} saved {len(self._replayed)} tensors when it was recomputed and "
                f"{self._saved} before: its forward depends on something besides its inputs, weights and random state"
            )

    def _record(self, t: Tensor) -> None:
        if t in self.run.shared:
            return
        assert self._replayed is not None
        self._replayed.append(t.detach())
        self._stop_if_enough()

    def _replay_attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        number = len(self._replayed_qkv)
        self._replayed_qkv.append((q.detach(), k.detach(), v.detach()))
        self._stop_if_enough()
        self.rng_after_attention[number].restore()
        out: Tensor = _KnownOutput.apply(self.load(self.attentions[number].out), q, k, v)
        return out

    def _stop_if_enough(self) -> None:
        assert self._replayed is not None
        if len(self._replayed) == self._saved and len(self._replayed_qkv) == len(self.attentions):
            raise EnoughError

    def end_backward(self) -> None:
        self._replayed, self._replayed_qkv = [], []
        self.attentions = []
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


class _KnownOutput(torch.autograd.Function):
    """A saved attention output as a function of q, k, v, so that what follows requires grad. Never differentiated."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        raise RuntimeError("a recomputed graph is never differentiated")


def _refuse(_: None) -> Tensor:
    raise RuntimeError("a recomputed graph is never differentiated")
