"""One call of one layer: its slices, what they saved, and how that comes back in the backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.engine.attention import AttentionCore
from lightning_memo.engine.intercept import LayerMode, handling
from lightning_memo.engine.memory import Slot, SlotMemory, Stored
from lightning_memo.engine.regions import Registry
from lightning_memo.engine.shared import SharedTensors
from lightning_memo.engine.slices import Action, TokenRange, cut
from lightning_memo.kernels import AttentionResult, AttentionSpec, RngState

if TYPE_CHECKING:
    from lightning_memo.engine.engine import Engine

LayerForward = Callable[..., Any]
# A saved tensor's handle: itself (weights, what stays on the device), its place in the slot, or its number in a replay.
Handle = Tensor | Stored | int


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's forward and its arguments beside the input, which is `[batch, tokens, hidden]`.

    `token_dim` is 1, or 0 for a layer that takes `[tokens, batch, hidden]`.
    """

    layer: nn.Module
    forward: LayerForward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int
    batch: int
    token_dim: int = 1

    def run(self, x: Tensor, part: TokenRange) -> Any:
        """The layer's own forward on some of the tokens, whose input is `x`."""
        arguments = (self.args, self.kwargs)
        args, kwargs = cut(arguments, self.tokens, part.start, part.stop, self.batch, self.token_dim)
        return self.forward(x, *args, **kwargs)

    def mode(self, part: TokenRange) -> LayerMode:
        return LayerMode(self.tokens, part.start, part.stop, self.batch, self.token_dim)


class EnoughError(Exception):
    """Everything that a recomputation is for has been computed."""


class LayerRun:
    """State of one layer call from its forward to the end of its backward.

    The autograd graph refers to its slices, and they to it; it refers to neither, so that a graph that is dropped takes
    the run with it, and the slot goes back at once.

    Args:
        engine: Owner of memory, kernels and profile.
        call: The layer and its arguments.
        x: Its input.
        index: Position among the layer calls that are alive, counted from the model's input.
        slices: Token ranges that cover the input.
        memory: Where the call's slot is leased; `None` when every slice keeps its activations.
        swap: Whether the slot leaves for the host.
    """

    def __init__(
        self,
        engine: Engine,
        call: LayerCall,
        x: Tensor,
        index: int,
        slices: Sequence[TokenRange],
        memory: SlotMemory | None,
        swap: bool,
    ) -> None:
        self.engine = engine
        self.call = call
        self.index = index
        self.memory = memory
        self.slot = None if memory is None else memory.lease(index, swap)
        self.shared = SharedTensors(call.layer, (call.args, call.kwargs), x)
        self.registry: Registry[Stored] = Registry()
        self.autocast = _autocast_of(x.device)
        self.device = x.device
        self.x = self.store("input", x.detach())  # x itself must not live until the backward
        self.x_requires_grad = x.requires_grad
        self.x_shape = x.shape
        self.rng_start = RngState.capture(x.device)
        self.slices = tuple(slices)
        self.cores: list[AttentionCore] = []
        self.y: Tensor | None = None
        self.dy: Tensor | None = None
        self.dx: Tensor | None = None
        self._started = False
        # A graph that is dropped without a backward gives its slot back too.
        self._release = weakref.finalize(self, _release_slot, memory, self.slot)
        self._release.atexit = False

    @property
    def whole(self) -> bool:
        """Whether the layer runs as a single slice."""
        return len(self.slices) == 1

    # ---- storing and loading

    def store(self, kind: str, t: Tensor, keep: bool = False) -> Handle:
        """Put a tensor into the slot; it stays on the device if it is kept or finds no room there."""
        if self.engine.profile is not None:
            self.engine.profile.saved(self.index, kind, t.nbytes)
        if keep or self.slot is None or t.numel() == 0:
            return t
        stored = self.slot.put(t)
        if stored is None:
            self.engine.count_overflow(t.nbytes)
            return t
        self.registry.add(t, stored)
        return stored

    def load(self, handle: Handle) -> Tensor:
        """A stored tensor on the device."""
        if isinstance(handle, Tensor):
            return handle
        assert isinstance(handle, Stored) and self.slot is not None
        self.begin_backward()
        return self.slot.load(handle)

    def peek(self, handle: Handle) -> Tensor:
        """A stored tensor, while the forward still runs."""
        if isinstance(handle, Tensor):
            return handle
        assert isinstance(handle, Stored) and self.slot is not None
        return self.slot.load(handle)

    def x_of(self, part: TokenRange) -> Tensor:
        """The input of some tokens, from storage."""
        return self.load(self.x).narrow(self.call.token_dim, part.start, part.tokens)

    # ---- forward

    def core(self, number: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionCore:
        """The core of the layer's attention call `number`; slices make their calls in the same order."""
        if number == len(self.cores):
            self.cores.append(AttentionCore(self.engine.backend(q, k, v, spec), self.slices))
        return self.cores[number]

    def end_forward(self) -> None:
        """Nothing of the forward is needed on the device any more."""
        self.offload()
        self.registry.clear()
        self.engine.mark(self.index, "forward_end")

    def offload(self) -> None:
        """Start copying what was stored so far to the host."""
        if self.memory is not None and self.slot is not None:
            self.memory.offload(self.slot)

    # ---- backward

    def begin_backward(self) -> None:
        """Bring the slot back, and start bringing back the one that is needed next."""
        if self._started:
            return
        self._started = True
        self.engine.begin_backward(self)

    def end_backward(self) -> Tensor | None:
        """The layer's last act: give everything back, return the gradient of its input."""
        dx = self.dx
        self.dy = self.dx = None
        self.cores.clear()
        self.engine.end_backward(self)
        self.release()
        return dx

    def release(self) -> None:
        """Give the slot back; later use of it raises."""
        self._release()


class Slice:
    """Some tokens of a layer call: how their saved tensors are packed, unpacked, and recomputed."""

    def __init__(self, run: LayerRun, index: int, part: TokenRange) -> None:
        self.run, self.index, self.range = run, index, part
        self.attentions: list[SavedAttention] = []
        self.rng_after_attention: list[RngState] = []
        self._saved = 0  # tensors that a recomputation has to deliver
        self._replayed: list[Tensor | None] | None = None
        self._replayed_qkv: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def action(self) -> Action:
        return self.range.action

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
        run = self.run
        known = run.registry.find(t) if t.numel() else None
        if known is None and t in run.shared:
            return t
        if self.action is Action.RECOMPUTE:
            if known is None and run.engine.profile is not None:
                run.engine.profile.recomputed(run.index, t, run.call.layer)
            self._saved += 1
            return self._saved - 1
        if known is not None:
            stored, shift_bytes = known
            return stored.view_like(t, shift_bytes)
        return run.store("other", t.detach(), keep=self.action is Action.KEEP)

    def unpack(self, handle: Handle) -> Tensor:
        if isinstance(handle, int):
            return self._take_replayed(handle)
        return self.run.load(handle)

    # ---- attention of a single slice, or slice after slice

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Answer an attention call of the layer's forward in the schedule "layer"."""
        self.run.engine.check_sliceable(self.run, spec)
        out: Tensor = _SliceAttention.apply(self, spec, q, k, v)
        self.rng_after_attention.append(RngState.capture(q.device))
        return out

    def attention_forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        run, number = self.run, len(self.attentions)
        core = run.core(number, q, k, v, spec)
        result = core.forward(self.index, q, k, v, spec, run.peek)
        saved = self.save_attention(q, k, v, result, spec)
        if saved.key is not None and saved.value is not None:
            core.hold(self.index, saved.key, saved.value)
        return result.out

    def save_attention(
        self, q: Tensor, k: Tensor, v: Tensor, result: AttentionResult, spec: AttentionSpec, nested: bool = False
    ) -> SavedAttention:
        """Store what the backward of attention needs; a recomputed slice finds its own q, k, v again.

        Args:
            nested: Attention ran over all slices at once: their common log-sum-exp is stored elsewhere.
        """
        run, keep = self.run, self.action is Action.KEEP
        recompute = self.action is Action.RECOMPUTE
        needed_later = not nested and self.index < len(run.slices) - 1
        store_keys = not recompute or needed_later
        saved = SavedAttention(
            out=run.store("out", result.out.detach(), keep),
            lse=result.lse if nested else run.store("lse", result.lse, keep),
            state=result.state,
            query=self._store_once("query", q) if not recompute else None,
            key=self._store_once("key", k) if store_keys else None,
            value=self._store_once("value", v) if store_keys else None,
            spec=spec,
        )
        if recompute and run.engine.profile is not None:
            for kind, t in (("query", q), ("key", k), ("value", v)):
                run.engine.profile.recomputed(run.index, t, run.call.layer, kind)
        self.attentions.append(saved)
        return saved

    def _store_once(self, kind: str, t: Tensor) -> Handle:
        """Store a tensor unless its bytes are in the slot already."""
        known = self.run.registry.find(t)
        if known is not None:
            return known[0].view_like(t, known[1])
        return self.run.store(kind, t.detach(), self.action is Action.KEEP)

    def attention_backward(self, number: int, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        run, saved = self.run, self.attentions[number]
        q, k, v = self.qkv(number)
        result = AttentionResult(run.load(saved.out), run.load(saved.lse), saved.state)
        return run.cores[number].backward(self.index, dout, q, k, v, result, saved.spec, run.load)

    def qkv(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the attention call `number`, stored or recomputed."""
        saved = self.attentions[number]
        if self.action is Action.RECOMPUTE:
            self.recompute()
            return self._replayed_qkv[number]
        assert saved.query is not None and saved.key is not None and saved.value is not None
        q, k, v = (self.run.load(handle) for handle in (saved.query, saved.key, saved.value))
        return q, k, v

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
        run.engine.mark(run.index, "recompute_begin")
        self._replayed = []
        x = run.x_of(self.range).detach().requires_grad_()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(EnoughError))
            stack.enter_context(run.rng_start.replayed())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(run.autocast())
            stack.enter_context(saved_tensors_hooks(self._record, _refuse))
            stack.enter_context(handling(self._replay_attention))
            if run.engine.needs_mode(run):
                stack.enter_context(run.call.mode(self.range))
            self.call(x)
        run.engine.mark(run.index, "recompute_end")
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
        out: Tensor = _KnownOutput.apply(self.run.load(self.attentions[number].out), q, k, v)
        return out

    def _stop_if_enough(self) -> None:
        assert self._replayed is not None
        if len(self._replayed) == self._saved and len(self._replayed_qkv) == len(self.attentions):
            raise EnoughError

    def end_backward(self) -> None:
        self._replayed, self._replayed_qkv = [], []
        self.attentions = []


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """What the backward of one attention call needs; `query`, `key`, `value` are `None` where they are recomputed."""

    out: Handle
    lse: Handle
    state: Any
    query: Handle | None
    key: Handle | None
    value: Handle | None
    spec: AttentionSpec


class _SliceAttention(torch.autograd.Function):
    """Attention of one slice. Saves nothing itself: the slice does."""

    @staticmethod
    def forward(ctx: Any, part: Slice, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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


def _release_slot(memory: SlotMemory | None, slot: Slot | None) -> None:
    if memory is not None and slot is not None:
        memory.release(slot)


def _refuse(_: None) -> Tensor:
    raise RuntimeError("a recomputed graph is never differentiated")


def _autocast_of(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A factory of the autocast context that is active now."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled)
