"""A slice's forward, run again in the backward, and what comes of it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.matrix_products import AnsweredProduct, MeasuredProduct, ProductMode
from lightning_memo.kernels import AttentionResult, AttentionSpec

if TYPE_CHECKING:
    from lightning_memo.engine.layers.slice_run import SliceRun


class EnoughError(Exception):
    """Everything that a recomputation is for has been computed."""


class Recomputed:
    """What came of a slice's forward that ran again.

    Attributes:
        qkv: Queries, keys and values of the slice's attention calls.
        results: Results of those that had to run again.
        saved: What the forward saved, in order, until it is taken.
    """

    def __init__(self) -> None:
        self.qkv: list[tuple[Tensor, Tensor, Tensor]] = []
        self.results: dict[int, AttentionResult] = {}
        self.saved: list[Tensor | None] = []

    def take(self, number: int) -> Tensor:
        """A tensor that the forward saved; once.

        Raises:
            RuntimeError: It was taken before.
        """
        t, self.saved[number] = self.saved[number], None
        if t is None:
            raise RuntimeError(
                "a recomputed activation was asked for twice: a second backward through the same graph "
                "(retain_graph) is not supported, run the forward again; an autograd Function may read "
                "ctx.saved_tensors once"
            )
        return t


def recompute(part: SliceRun) -> Recomputed:
    """Run a slice's forward again until all is there that the backward needs.

    Raises:
        RuntimeError: The forward saved other tensors than before.
    """
    return _Recomputation(part).run()


class _Recomputation:
    """A slice's forward with attention and stored products answered. The slice must not refer to it: it would stay."""

    def __init__(self, part: SliceRun) -> None:
        self._part = part
        self._found = Recomputed()

    def run(self) -> Recomputed:
        part, run = self._part, self._part.run
        run.begin_backward()
        run.mark("recompute_begin")
        x = run.narrow(part.load(part.x), part.range).detach().requires_grad_()
        with contextlib.ExitStack() as stack:
            stack.enter_context(run.engine.recorder.computing("recompute", part.subject))
            stack.enter_context(contextlib.suppress(EnoughError))
            stack.enter_context(run.rng_start.replayed())
            stack.enter_context(run.state.replayed())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(run.autocast())
            stack.enter_context(saved_tensors_hooks(self._record, _refuse))
            stack.enter_context(handling(self._attend))
            if run.needs_mode:
                stack.enter_context(run.call.mode(part.range))
            stack.enter_context(run.casting())
            if on_product := self._on_product():
                stack.enter_context(ProductMode(run.call.layer, on_product))
            run.restored_call().run(x, part.range)
        run.mark("recompute_end")
        if not self._enough:
            raise RuntimeError(
                f"{type(run.call.layer).__name__} saved {len(self._found.saved)} tensors when it was recomputed and "
                f"{part.saved} before: its forward depends on something besides its inputs, weights and random state"
            )
        return self._found

    @property
    def _enough(self) -> bool:
        return len(self._found.saved) == self._part.saved and len(self._found.qkv) == len(self._part.attentions)

    def _stop_if_enough(self) -> None:
        if self._enough:
            raise EnoughError

    def _record(self, t: Tensor) -> None:
        if not self._part.run.stays(t):
            self._found.saved.append(t.detach())
            self._stop_if_enough()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        part, number = self._part, len(self._found.qkv)
        self._found.qkv.append((q.detach(), k.detach(), v.detach()))
        saved = part.attentions[number]
        if saved.out is None:
            with torch.no_grad(), part.run.engine.recorder.computing("attention"):
                core = part.run.cores[number]
                self._found.results[number] = core.forward_again(part.place, *self._found.qkv[number], saved.spec)
        self._stop_if_enough()
        part.rng_after_attention[number].restore()
        known = self._found.results[number].out if saved.out is None else part.load(saved.out)
        out: Tensor = _KnownOutput.apply(known, q, k, v)
        return out

    def _on_product(self) -> Callable[[str, Callable[[], Tensor]], Tensor] | None:
        profile = self._part.run.engine.profile
        if profile is not None:
            return self._measure if profile.with_products else None
        return self._answer if self._part.products else None

    def _answer(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        handle = self._part.products.get(name)
        if handle is None:
            return compute()
        with AnsweredProduct(self._part.load(handle)):
            return compute()

    def _measure(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        run, profile = self._part.run, self._part.run.engine.profile
        assert profile is not None
        with MeasuredProduct(profile.now) as measured:
            out = compute()
        profile.product(run.index, name, measured)
        return out


class RecomputedKeysValues:
    """Keys and values of a recomputed slice: on the device in the forward, computed again when the backward needs them.

    The slices after it, whose backward comes first, meet them as well.
    """

    def __init__(self, part: SliceRun, number: int, k: Tensor, v: Tensor) -> None:
        self._part = weakref.ref(part)  # the graph refers to its slices, and they to what holds this
        self._number = number
        self._present: tuple[Tensor, Tensor] | None = (k.detach(), v.detach())

    def peek(self) -> tuple[Tensor, Tensor]:
        """While the forward still runs."""
        assert self._present is not None
        return self._present

    def end_forward(self) -> None:
        """The layer's forward is over."""
        self._present = None

    def load(self) -> tuple[Tensor, Tensor]:
        """In the backward."""
        part = self._part()
        assert part is not None
        _, k, v = part.recompute().qkv[self._number]
        return k, v


class _KnownOutput(torch.autograd.Function):
    """An attention output as a function of q, k, v, so that what follows requires grad. Never differentiated."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        raise RuntimeError("a recomputed graph is never differentiated")


def _refuse(_: None) -> Tensor:
    raise RuntimeError("a recomputed graph is never differentiated")
