"""The states of random generators before a layer's forward, from which its recomputation draws the same numbers."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.engine.state.held_state import Generator, HeldState
from lightning_memo.kernels import RngState

_TWISTER_BYTES: Final = 625 * 4  # of NumPy's Mersenne Twister: 624 words, and the position of the next one


class OtherGenerators:
    """States of generators besides PyTorch's default ones, by which these can be restored.

    Args:
        generators: The generators.
    """

    def __init__(self, generators: Iterable[Generator]) -> None:
        self._states = [(generator, _state_of(generator)) for generator in generators]
        self._twisters: dict[int, bytes] = {}

    @classmethod
    def of(cls, state: HeldState) -> OtherGenerators:
        """Return the present states of Python's and NumPy's generators, and of those of a layer and its arguments."""
        held = {id(generator): generator for generator in state.generators}
        return cls([random._inst, np.random.mtrand._rand, *held.values()])

    def drawn(self) -> list[Generator]:
        """Return the generators that have been used since."""
        return [generator for generator, _ in self.used()._states]

    def used(self) -> OtherGenerators:
        """Return these states of the generators that have been used since."""
        found = OtherGenerators(())
        found._states = [(each, state) for each, state in self._states if not _same(_state_of(each), state)]
        return found

    def present(self) -> OtherGenerators:
        """Return the present states of the same generators."""
        return OtherGenerators(generator for generator, _ in self._states)

    def note(self) -> None:
        """Take the present states in place of the earlier ones. Tensors remain in the same memory."""
        for n, (generator, state) in enumerate(self._states):
            if self._is_same_twister(n, generator, state):
                continue
            present = _state_of(generator)
            self._states[n] = generator, state.copy_(present) if isinstance(state, Tensor) else present

    def _is_same_twister(self, n: int, generator: Generator, state: Any) -> bool:
        """Return whether NumPy's legacy generator has not been used since the last note. Its state takes 0.1 ms."""
        if not isinstance(generator, np.random.RandomState) or type(generator._bit_generator) is not np.random.MT19937:
            self._twisters.pop(n, None)
            return False
        earlier, address = self._twisters.get(n), generator._bit_generator.ctypes.state_address
        self._twisters[n] = ctypes.string_at(address, _TWISTER_BYTES)
        # A second normal number is drawn together with the first one, and given without another draw.
        return earlier == self._twisters[n] and not state["has_gauss"]

    def restore(self) -> None:
        """Make these states the present ones."""
        for generator, state in self._states:
            _set_state(generator, state)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Use these states inside this context, and restore the present ones afterwards."""
        present = self.present()
        self.restore()
        try:
            yield
        finally:
            present.restore()


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return all(_same(value, other[name]) for name, value in state.items())
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else bool(state == other)


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
