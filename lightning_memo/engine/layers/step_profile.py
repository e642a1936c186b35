"""The profile of a step: the sizes of the tensors that each layer call saves, and how long the call takes."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_memo.engine.memory.saved_storages import Registry
from lightning_memo.engine.timeline_recorder import Clock, Moment
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import SavedBytes


@dataclass(frozen=True, slots=True)
class ProductProfile:
    """A matrix product that a recomputation computes, or a sum of several.

    Attributes:
        name: Name of the product's weight in the layer, or of the module that LoRA adapts.
        size_bytes: Size of its output.
        spans: When each of its kernels began and ended.
    """

    name: str
    size_bytes: int
    spans: Sequence[tuple[Moment, Moment]]

    @property
    def seconds(self) -> float:
        """Duration of the kernels."""
        return sum(Clock.seconds(*span) for span in self.spans)

    @property
    def saved(self) -> SavedBytes:
        """The output as a saved tensor."""
        return SavedBytes(self.name, self.size_bytes)


@dataclass(slots=True)
class CallProfile:
    """The profile of one layer call.

    Attributes:
        saved: The tensors that the first slice saves.
        products: The matrix products that the recomputation of the first slice computes.
        launch_seconds: The shortest time in which the host has launched the forward of a slice.
        windows: The window of each attention call; `None` if it sees all earlier keys.
        marks: Points in time, by name.
        seen: The storages that have been counted.
        batch: Number of sequences in the layer's input.
        tokens: Number of tokens in each sequence.
        slice_tokens: Number of tokens in the first slice.
    """

    batch: int
    tokens: int
    slice_tokens: int
    saved: list[SavedBytes] = field(default_factory=list)
    products: list[ProductProfile] = field(default_factory=list)
    launch_seconds: float = math.inf
    windows: list[int | None] = field(default_factory=list)
    marks: dict[str, list[Moment]] = field(default_factory=dict)
    seen: Registry[None] = field(default_factory=Registry)

    def seconds(self, name: str) -> float:
        """Return the sum of the times from `{name}_begin` to `{name}_end`; 0 if there are none."""
        times = zip(self.marks.get(f"{name}_begin", ()), self.marks.get(f"{name}_end", ()), strict=False)
        return sum(Clock.seconds(start, stop) for start, stop in times)


class StepProfile:
    """The profile of a step in which every layer is recomputed. The engine fills it while the step runs.

    Args:
        device: Where layers run.
        batch: Number of sequences in the first layer's input.
        tokens: Number of tokens in each sequence.
        slice_tokens: Number of tokens in the first slice, whose tensors are profiled.
        with_products: Whether matrix products are profiled, too.

    Attributes:
        batch: Number of sequences of the call with the most tokens, if layers run as one slice.
        tokens: Number of tokens in each of them.
        slice_tokens: Number of tokens in the first slice.
        setup_seconds: Time within the step that was spent on probing layers and allocating memory.
        calls: The profile of each layer call, by its position.
    """

    def __init__(
        self, device: torch.device, batch: int, tokens: int, slice_tokens: int, with_products: bool = False
    ) -> None:
        self.batch, self.tokens, self.slice_tokens = batch, tokens, slice_tokens
        self.with_products = with_products
        self.setup_seconds = 0.0
        self.calls: dict[int, CallProfile] = {}
        self._clock = Clock(device)
        self._waits: list[tuple[Moment, Moment]] = []
        self._launched = 0.0

    @property
    def complete(self) -> bool:
        """Whether the forward and the backward of every layer call have been profiled."""
        return bool(self.calls) and all("backward_end" in call.marks for call in self.calls.values())

    @property
    def uniform(self) -> bool:
        """Whether all layer calls have the same number of tokens, and run as one slice."""
        sizes = {(call.batch, call.slice_tokens) for call in self.calls.values()}
        return sizes == {(self.batch, self.tokens)}

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the computation waits for what steps by a plan do not wait for."""
        began = self._clock.now()
        yield
        self._waits.append((began, self._clock.now()))

    @property
    def waited_seconds(self) -> float:
        """Time within the step during which the device had no work because of such waits."""
        return sum(Clock.seconds(*span) for span in self._waits)

    def mark(self, index: int, name: str, again: bool = False) -> None:
        """Note the time at which a layer call begins or ends something.

        Args:
            index: Position of the layer call.
            name: What begins or ends, for example "forward_begin".
            again: Whether an earlier slice of the sequence has done the same.
        """
        if name == "forward_begin" and not again:
            self.calls.pop(index, None)  # what an abandoned forward has left is dropped
        call = self._call(index)
        call.marks.setdefault(name, []).append(self._clock.now())
        if name == "forward_begin":
            self._launched = time.perf_counter()
        elif name == "forward_end":
            call.launch_seconds = min(call.launch_seconds, time.perf_counter() - self._launched)

    def finish(self) -> bool:
        """Give calls that got no backward the profile of the nearest call that got one. Their forward stores as much.

        Returns:
            Whether any call got a backward.
        """
        finished = [index for index, call in sorted(self.calls.items()) if "backward_end" in call.marks]
        for index in self.calls.keys() - set(finished) if finished else ():
            self.calls[index] = self.calls[min(finished, key=lambda other: abs(other - index))]
        return bool(finished)

    def extend(self, tokens: int) -> None:
        """Let the profile stand for calls with more tokens, all sequences together, if layers run as one slice."""
        longer = -(-tokens // self.batch)
        if self.slice_tokens == self.tokens < longer:
            for call in {id(call): call for call in self.calls.values()}.values():  # some may stand for others
                call.tokens = call.tokens * longer // self.tokens
            self.tokens = longer

    def repeat(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Let the profile of one micro-batch stand for several, whose calls are alive at once, one after another.

        Args:
            blocks: For each block of layers, its number of calls, and of micro-batches whose calls are alive.
        """
        of_one = iter(self.in_order())
        repeated = [list(itertools.islice(of_one, calls)) * times for calls, times in blocks]
        self.calls = dict(enumerate(itertools.chain(*repeated)))

    def resize(self, index: int, batch: int, tokens: int, slice_tokens: int) -> None:
        """Note the size of a layer call. Layers of several stacks get different numbers of tokens.

        Args:
            index: Position of the layer call.
            batch: Number of sequences in its input.
            tokens: Number of tokens in each sequence.
            slice_tokens: Number of tokens in its first slice.
        """
        call = self._call(index)
        call.batch, call.tokens, call.slice_tokens = batch, tokens, slice_tokens
        if batch * tokens > self.batch * self.tokens:
            self.batch, self.tokens, self.slice_tokens = batch, tokens, slice_tokens

    def saved(self, index: int, kind: str, size_bytes: int) -> None:
        """Add a tensor that was stored."""
        if size_bytes:
            self._call(index).saved.append(SavedBytes(kind, size_bytes))

    def handed(self, index: int, saved: Iterable[SavedBytes]) -> None:
        """Add the states among the tensors that were found to be saved: the first slice has none."""
        self._call(index).saved += [item for item in saved if item.kind == "state"]

    def recomputed(self, index: int, t: Tensor, layer: nn.Module, kind: str = "other") -> None:
        """Add a tensor that would be stored if its slice were swapped; each of its bytes counts once.

        Args:
            index: Position of the layer call.
            t: The tensor.
            layer: The layer.
            kind: The kind of tensor.
        """
        call = self._call(index)
        if t.numel() and call.seen.find(t) is None:
            call.seen.add(t, None)
            per_token = _is_per_token(t, layer, (call.slice_tokens, call.batch * call.slice_tokens))
            call.saved.append(SavedBytes(kind, t.nbytes, per_token))

    def now(self) -> Moment:
        """Return the present point in time."""
        return self._clock.now()

    def product(
        self, index: int, name: str, rows: int, size_bytes: int, spans: Sequence[tuple[Moment, Moment]]
    ) -> None:
        """Add a product that was computed again, if a plan can use it: its output has a row for each token.

        Another backward through the same graph computes it once more.
        """
        call = self._call(index)
        if rows == call.batch * call.slice_tokens and all(product.name != name for product in call.products):
            call.products.append(ProductProfile(name, size_bytes, spans))

    def window(self, index: int, tokens: int | None) -> None:
        """Add the window of an attention call: the largest number of keys that a query sees."""
        self._call(index).windows.append(tokens)

    def bytes_of(self, *kinds: str) -> tuple[int, ...]:
        """Return the bytes of these kinds of tensors for all tokens of every call, in order of execution."""
        sizes = zip(self.slice_bytes_of(*kinds), self.in_order(), strict=True)
        return tuple(size * call.tokens // call.slice_tokens for size, call in sizes)

    def slice_bytes_of(self, *kinds: str) -> tuple[int, ...]:
        """Return the bytes of these kinds of tensors for the first slice of every call, in order of execution."""
        return tuple(sum(s.size_bytes for s in call.saved if s.kind in kinds) for call in self.in_order())

    def seconds_of(self, name: str) -> tuple[float, ...]:
        """Return the time that every call spent on `name`, in order of execution; see :meth:`CallProfile.seconds`."""
        return tuple(call.seconds(name) for call in self.in_order())

    @property
    def launch_seconds(self) -> float:
        """Time in which the host launches a forward: the shortest one, as it waits for a device that is behind."""
        return min(call.launch_seconds for call in self.calls.values())

    @property
    def saved_by_calls(self) -> list[tuple[list[SavedBytes], int]]:
        """The tensors that each call saves, and for how many of the profile's `tokens`, in order of execution."""
        return [(call.saved, call.slice_tokens * self.tokens // call.tokens) for call in self.in_order()]

    def in_order(self) -> list[CallProfile]:
        """Return the calls in order of execution."""
        return [self.calls[index] for index in sorted(self.calls)]

    def _call(self, index: int) -> CallProfile:
        return self.calls.setdefault(index, CallProfile(self.batch, self.tokens, self.slice_tokens))


def _is_per_token(t: Tensor, layer: nn.Module, tokens: Collection[int]) -> bool:
    """Return whether a tensor has an entry for each token.

    It has one unless all its sizes are sizes of weights (experts get any number of tokens).

    Args:
        t: The tensor.
        layer: The layer that saves it.
        tokens: Numbers of tokens, of one sequence and of all.
    """
    if any(size in tokens for size in t.shape):
        return True
    weights = [*layer.parameters(), *layer.buffers()]  # quantised ones may be either
    sizes = {1, *(size for w in weights for size in local_part(w).shape)}
    return any(size not in sizes for size in t.shape)
