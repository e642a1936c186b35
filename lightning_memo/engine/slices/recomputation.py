"""The recomputation of a slice: its forward runs again in the backward, apart from products that are in storage."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.engine.forward.collected_outputs import collecting_nothing
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.known_tensor import as_function_of
from lightning_memo.engine.forward.matrix_products import AnsweredProduct, Compute, MeasuredProduct, ProductMode
from lightning_memo.engine.forward.repeated_choices import RepeatedChoices
from lightning_memo.engine.layers.call_storage import SliceStorage
from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.memory.saved_storages import resolved
from lightning_memo.engine.recurrence import StateCall, handing
from lightning_memo.engine.saved_tensors.saved_sums import SavedSums
from lightning_memo.engine.slices.recomputed_sums import SumMode
from lightning_memo.engine.slices.saved_attention import SavedAttention, StartState
from lightning_memo.engine.state.random_states import ForwardDraws, RepeatedDraws
from lightning_memo.engine.timeline_recorder import Subject
from lightning_memo.kernels import AttentionResult, AttentionSpec, RngState
from lightning_memo.kernels.attention_kernel import merge_sinks
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.retained_graph import NEVER_DIFFERENTIATED, NOT_RETAINED

# The last adapted module of a layer rarely saves more tensors: its input, the mask of dropout, and `A(x)`.
_SAVED_BY_LAST = 4


class StopRecomputation(BaseException):
    """Ends a recomputation: everything that the backward needs has been computed. Layers must not catch it."""


class Recomputed:
    """The results of a recomputation.

    Attributes:
        qkv: Queries, keys and values of the slice's attention calls.
        results: Results of those attention calls that had to run again, by their numbers.
        saved: The tensors that the forward saved, in order, until they are taken.
        most_taken_bytes: Bytes of the tensors that one autograd Function took, of the one that took most.
    """

    def __init__(self) -> None:
        self.qkv: list[tuple[Tensor, Tensor, Tensor]] = []
        self.results: dict[int, AttentionResult] = {}
        self.saved: list[Tensor | None] = []
        self.most_taken_bytes = 0
        self._reader = 0  # the autograd Function that took tensors last
        self._read: dict[int, Tensor] = {}
        self._taken_bytes = 0  # by this Function

    def take(self, number: int) -> Tensor:
        """Return a tensor that the forward saved; each can be taken once, or often by a single autograd Function.

        Raises:
            RuntimeError: The tensor was taken before.
        """
        t, self.saved[number] = self.saved[number], None
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if id(node) != self._reader:
            self._reader, self._read, self._taken_bytes = id(node), {}, 0
        if isinstance(node, BackwardCFunction):  # whose backward may read `ctx.saved_tensors` more than once
            t = self._read.get(number) if t is None else self._read.setdefault(number, t)
        if t is None:
            raise RuntimeError(NOT_RETAINED)
        self._taken_bytes += t.nbytes
        self.most_taken_bytes = max(self.most_taken_bytes, self._taken_bytes)
        return t


class RecomputedSlice(Protocol):
    """What a recomputation needs of its slice.

    Attributes:
        run: The layer call.
        range: The tokens.
        subject: The slice as the recorder names it.
        storage: Stores the tensors that the slice saves.
        gaps: Whether the slice's input had gaps, because it was a part of a tensor of several rows.
        attentions: What the backward of each attention call needs.
        rng_after_attention: The random state after each attention call.
        starts: The state at the start of each recurrence.
        saved: Shapes and dtypes of the tensors that the forward saved.
        choices: Indices that the layer chose by values.
        sums: Sums of the saved tensors, if the recomputed ones are to be compared.
        draws: The random states of the forward.
    """

    run: LayerRun
    range: TokenRange
    subject: Subject
    storage: SliceStorage
    gaps: bool
    attentions: list[SavedAttention]
    rng_after_attention: list[RngState]
    starts: list[StartState | None]
    saved: list[tuple[torch.Size, torch.dtype]]
    choices: list[Tensor]
    sums: SavedSums | None
    draws: ForwardDraws

    @property
    def number(self) -> int:
        """Number of the slice in the sequence, by which attention cores know it."""

    def recompute(self) -> Recomputed:
        """Return the results of running the slice's forward again, which happens once."""


def recompute(part: RecomputedSlice) -> Recomputed:
    """Run a slice's forward again until everything that the backward needs has been computed.

    Raises:
        RuntimeError: The forward saved other tensors than before.
    """
    return _Recomputation(part).run()


class _Recomputation:
    """A forward whose attention and stored matrix products are answered from storage.

    The slice must not refer to this object, which would then live as long as the slice.
    """

    def __init__(self, part: RecomputedSlice) -> None:
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
                stack.enter_context(handing(run.call.layer, self._hand, run.check_handed))
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

    def _remaining(self) -> int:
        return len(self._part.saved) - len(self._found.saved)

    def _product_mode(self) -> ProductMode | None:
        part, layer, profile = self._part, self._part.run.call.layer, self._part.run.engine.profile
        if profile is not None and profile.with_products:
            return ProductMode(layer, MeasuredProducts(profile, part.run.position.layer))
        mode = ProductMode(layer, StoredMatmuls(part.storage, self._remaining))
        return mode if part.storage.products or mode.adapts else None


class RecomputedKeysValues:
    """Keys and values of a recomputed slice: on the device in the forward, computed again in the backward.

    Later slices, whose backward comes first, attend to them as well.
    """

    def __init__(self, part: RecomputedSlice, number: int, k: Tensor, v: Tensor) -> None:
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


class StoredMatmuls:
    """Reads products from storage, and computes those that are not there.

    Args:
        storage: Stores the tensors of the slice.
        remaining: Returns how many tensors the forward saved behind the present point.
    """

    def __init__(self, storage: SliceStorage, remaining: Callable[[], int]) -> None:
        self._storage, self._remaining = storage, remaining
        self._sum: SumMode | None = None

    def product(self, name: str, compute: Compute) -> Tensor:
        stored = self._stored(name)
        if stored is None:
            return compute()
        with AnsweredProduct(stored):
            return compute()

    def term(self, name: str, compute: Compute) -> Tensor:
        # A plan that was made while something else read terms stores products by themselves.
        if self._sum is None or self._storage.products.get(name) is not None:
            return self.product(name, compute)
        return self._sum.term(name, compute)

    def sum(self, name: str, compute: Compute) -> Tensor:
        stored, self._sum = self._stored(name), None
        if stored is None and self._remaining() > _SAVED_BY_LAST:
            return compute()  # terms of modules before the last one are read, and a mode costs time
        with SumMode(stored) as self._sum:
            out = compute()
        self._sum.finish()
        return out

    def _stored(self, name: str) -> Tensor | None:
        handle = self._storage.products.get(name)
        return None if handle is None else self._storage.load(handle)


class MeasuredProducts:
    """Notes the time of each product that a recomputation computes.

    Args:
        profile: Profile of the step.
        layer: Position of the layer call.
    """

    def __init__(self, profile: StepProfile, layer: int) -> None:
        self._profile, self._layer = profile, layer
        self._sum: SumMode | None = None

    def product(self, name: str, compute: Compute) -> Tensor:
        with MeasuredProduct(self._profile.now) as measured:
            out = compute()
        if (product := measured.out) is not None:
            self._profile.product(self._layer, name, product.shape[0], product.nbytes, [measured.span])
        return out

    def term(self, name: str, compute: Compute) -> Tensor:
        assert self._sum is not None
        return self._sum.term(name, compute)

    def sum(self, name: str, compute: Compute) -> Tensor:
        with SumMode(None, self._profile.now) as self._sum:
            out = compute()
        self._sum.finish()
        if (spans := self._sum.spans_of(out)) is not None:
            rows = out.numel() // max(out.shape[-1], 1)
            self._profile.product(self._layer, name, rows, out.nbytes, spans)
            return out
        for term in self._sum.terms:
            if not term.changed:
                self._profile.product(self._layer, term.name, term.rows, term.size_bytes, term.spans)
        return out
