"""What a profiled step measures of each layer call: what it saves, and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_memo.engine.copies.clock import Clock, Moment
from lightning_memo.engine.forward.matrix_products import MeasuredProduct
from lightning_memo.engine.memory.saved_storages import Registry
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import SavedBytes


@dataclass(frozen=True, slots=True)
class ProductProfile:
    """A matrix product that a recomputation computes: its name, its output's bytes, and when it began and ended."""

    name: str
    size_bytes: int
    started: Moment
    stopped: Moment

    @property
    def seconds(self) -> float:
        return Clock.seconds(self.started, self.stopped)

    @property
    def saved(self) -> SavedBytes:
        """Its output, as if it was saved."""
        return SavedBytes(self.name, self.size_bytes)


@dataclass(slots=True)
class CallProfile:
    """One layer call: the tensors that its first slice saves, its products, windows of attention, and marks in time."""

    saved: list[SavedBytes] = field(default_factory=list)
    products: list[ProductProfile] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    marks: dict[str, list[Moment]] = field(default_factory=dict)
    seen: Registry[None] = field(default_factory=Registry)

    def seconds(self, name: str) -> float:
        """Seconds from `{name}_begin` to `{name}_end`, all times together; 0 if that did not happen."""
        times = zip(self.marks.get(f"{name}_begin", ()), self.marks.get(f"{name}_end", ()), strict=False)
        return sum(Clock.seconds(start, stop) for start, stop in times)


class StepProfile:
    """Filled by the engine while a step runs with every layer recomputed.

    Args:
        device: Where layers run.
        batch: Sequences of a layer's input.
        tokens: Tokens of each.
        slice_tokens: Tokens of the first slice, whose tensors are recorded.
        with_products: Whether matrix products are recorded, too.

    Attributes:
        setup_seconds: Time within the step that went into looking at layers and allocating memory.
    """

    def __init__(
        self, device: torch.device, batch: int, tokens: int, slice_tokens: int, with_products: bool = False
    ) -> None:
        self.batch, self.tokens, self.slice_tokens = batch, tokens, slice_tokens
        self.with_products = with_products
        self.setup_seconds = 0.0
        self.calls: dict[int, CallProfile] = {}
        self._clock = Clock(device)

    @property
    def complete(self) -> bool:
        """Whether forward and backward of every layer call were seen."""
        return bool(self.calls) and all("backward_end" in call.marks for call in self.calls.values())

    def mark(self, index: int, name: str, again: bool = False) -> None:
        """A layer call begins or ends something, or does so `again` for another slice."""
        if name == "forward_begin" and not again:
            self.calls[index] = CallProfile()  # a forward that was given up before leaves nothing
        self._call(index).marks.setdefault(name, []).append(self._clock.now())

    def saved(self, index: int, kind: str, size_bytes: int) -> None:
        """A tensor that was stored."""
        if size_bytes:
            self._call(index).saved.append(SavedBytes(kind, size_bytes))

    def recomputed(self, index: int, t: Tensor, layer: nn.Module, kind: str = "other") -> None:
        """A tensor that would be stored if its slice were swapped; each of its bytes counts once."""
        call = self._call(index)
        if t.numel() and call.seen.find(t) is None:
            call.seen.add(t, None)
            call.saved.append(SavedBytes(kind, t.nbytes, self._is_per_token(t, layer)))

    def now(self) -> Moment:
        """The present point in time."""
        return self._clock.now()

    def product(self, index: int, name: str, measured: MeasuredProduct) -> None:
        """A product was computed again; one whose output has not a row for each token is of no use to a plan."""
        out = measured.out
        if out is not None and out.shape[0] == self.batch * self.slice_tokens:
            product = ProductProfile(name, out.nbytes, measured.started, measured.stopped)
            self._call(index).products.append(product)

    def window(self, index: int, tokens: int | None) -> None:
        """Keys that a query of an attention call sees at most."""
        self._call(index).windows.append(tokens)

    def _is_per_token(self, t: Tensor, layer: nn.Module) -> bool:
        """A tensor is per token unless all its sizes are those of weights (experts get any number of tokens)."""
        if any(size in (self.slice_tokens, self.batch * self.slice_tokens) for size in t.shape):
            return True
        weights = [*layer.parameters(), *layer.buffers()]  # quantised ones may be either
        sizes = {1, *(size for w in weights for size in local_part(w).shape)}
        return any(size not in sizes for size in t.shape)

    def bytes_of(self, *kinds: str) -> tuple[int, ...]:
        """Bytes of these kinds for every call and all its tokens, in order of execution."""
        return tuple(size * self.tokens // self.slice_tokens for size in self.slice_bytes_of(*kinds))

    def slice_bytes_of(self, *kinds: str) -> tuple[int, ...]:
        """Bytes of these kinds for the first slice of every call, in order of execution."""
        return tuple(sum(s.size_bytes for s in call.saved if s.kind in kinds) for call in self.in_order())

    def seconds_of(self, name: str) -> tuple[float, ...]:
        return tuple(call.seconds(name) for call in self.in_order())

    @property
    def saved_by_calls(self) -> list[tuple[list[SavedBytes], int]]:
        """What each call saves, in order of execution, and for how many tokens."""
        return [(call.saved, self.slice_tokens) for call in self.in_order()]

    def in_order(self) -> list[CallProfile]:
        """The calls in order of execution."""
        return [self.calls[index] for index in sorted(self.calls)]

    def _call(self, index: int) -> CallProfile:
        return self.calls.setdefault(index, CallProfile())
