"""The conditions under which a layer's forward ran, apart from its inputs and weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.engine.fp8_state import ForwardFp8
from lightning_memo.engine.state.forward_state import ForwardState
from lightning_memo.engine.state.mutated_buffers import BufferVersions, MutatedBuffers
from lightning_memo.engine.state.other_generators import OtherGenerators
from lightning_memo.kernels import RngState


class ForwardDraws:
    """The random states of the forward of a slice, from which its recomputation draws again.

    Args:
        start: PyTorch's random state before the forward.
        generators: The states of other generators before the forward.
        noted: Whether PyTorch's random states in the forward are noted.

    Attributes:
        changed: Whether PyTorch's random state after the forward is another one: the forward has drawn, or another
            thread.

    Note: [Random numbers and threads]
    A generator serves all threads of a process. If another thread draws during a forward or its recomputation, both
    continue from different states, and dropout has different masks, without any other sign; `torch.utils.checkpoint`
    has this fault as well. The states of PyTorch's generators are therefore compared wherever the forward saves a
    tensor or calls attention, from the first number on that the recomputation itself draws. Generators that a forward
    has not used stay as they are in its recomputation, so that other threads do not get the same numbers again.
    Forwards are noted in profiled steps, and after one of them has drawn, so that steps without dropout request the
    same memory. Python's and NumPy's generators are not compared.
    """

    def __init__(self, start: RngState, generators: OtherGenerators, noted: bool) -> None:
        self._start, self._generators = start, generators
        self._states: list[RngState] | None = [] if noted else None
        self.changed = False

    def note(self) -> None:
        """Note the present state: the forward saves a tensor or calls attention."""
        if self._states is not None:
            before = self._states[-1] if self._states else self._start  # of which another copy would take 5 KiB
            self._states.append(RngState.capture(self._start.device, before))

    def end_forward(self) -> None:
        """Note which generators have been used."""
        self.changed = not RngState.capture(self._start.device).same(self._start)
        self._generators = self._generators.used()

    def at(self, number: int) -> RngState | None:
        """Return the state of a note; `None` if there is none."""
        return self._states[number] if self._states is not None and number < len(self._states) else None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the used generators give the same numbers inside this context, and restore them afterwards."""
        with self._start.replayed() if self.changed else contextlib.nullcontext(), self._generators.replayed():
            yield


class RepeatedDraws(TorchDispatchMode):
    """Compares the random states of a recomputation, once it has drawn a number, with those of its forward.

    Args:
        layer: Name of the layer's class.
        draws: The states of the forward.
    """

    def __init__(self, layer: str, draws: ForwardDraws) -> None:
        super().__init__()
        self._layer, self._draws = layer, draws
        self._has_drawn = False  # in this thread, from PyTorch's own generators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self._has_drawn = True
        return func(*args, **kwargs)

    def check(self, number: int) -> None:
        """Compare the present state with a note of the forward.

        Raises:
            RuntimeError: Other numbers have been drawn.
        """
        self.check_state(self._draws.at(number))

    def check_state(self, expected: RngState | None) -> None:
        """Compare the present state with one of the forward.

        Raises:
            RuntimeError: Other numbers have been drawn.
        """
        if self._has_drawn and expected is not None:
            expected.check_repeated(self._layer)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a recomputation has to restore so that it computes the same as the forward did.

    Attributes:
        rng: The random state before the forward.
        generators: States of other generators before the forward.
        buffers: The values that the layer's changing buffers had before the forward.
        state: What the forward read apart from its inputs; `None` if nothing is recomputed.
        autocast: A factory of the autocast context that was active in the forward.
        versions: Counts of changes of the buffers before the forward; `None` if the layer runs on all tokens at once.
        fp8: The FP8 autocast and scales of the forward; `None` if the layer has none, or nothing is recomputed.
        variables: The context variables (`contextvars`) of the forward. In the backward on a GPU, which has a thread of
            its own, they would have their defaults.
    """

    rng: RngState
    generators: OtherGenerators
    buffers: MutatedBuffers
    state: ForwardState | None
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    versions: BufferVersions | None
    fp8: ForwardFp8 | None = None
    variables: Context = field(default_factory=copy_context)

    @property
    def comparable(self) -> bool:
        """Whether a recomputation saves the same values as the forward."""
        return self.fp8 is None or not self.fp8.pads_scales

    def draws(self, noted: bool) -> ForwardDraws:
        """Return the random states of a slice's forward, which is about to begin.

        Args:
            noted: Whether its recomputation can be compared with it.
        """
        return ForwardDraws(self.rng, self.generators, noted)

    def restore_random(self) -> None:
        """Let the next slice draw the random numbers that the first one drew."""
        self.rng.restore()
        self.generators.restore()

    @contextlib.contextmanager
    def replayed(self, draws: ForwardDraws) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Restore the conditions and enable gradients inside the context; put the present state back afterwards.

        Args:
            draws: The random numbers that the forward has drawn.

        Returns:
            The tensors that are replaced by copies, each with its copy.
        """
        assert self.state is not None
        with (
            draws.replayed(), self.state.replayed() as copies, self.buffers.replayed(),
            torch.enable_grad(), self.autocast(),
            contextlib.nullcontext() if self.fp8 is None else self.fp8.replayed(),
        ):  # fmt: skip
            yield copies
