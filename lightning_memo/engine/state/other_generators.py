"""Generators of random numbers besides torch's default ones: Python's, NumPy's, and those of a layer."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from lightning_memo.engine.state.named_values import named_values
from lightning_memo.engine.state.python_state import Generator, PythonState, is_generator

_TWISTER_BYTES: Final = 625 * 4  # of NumPy's Mersenne Twister: 624 words, and the position of the next one


class OtherGenerators:
    """States of generators, by which these can be restored.

    Args:
        generators: The generators.
    """

    def __init__(self, generators: Iterable[Generator]) -> None:
        self._states = [(generator, _state_of(generator)) for generator in generators]
        self._twisters: dict[int, bytes] = {}

    @classmethod
    def of(cls, layer: nn.Module, state: PythonState) -> OtherGenerators:
        """Return the present states of all generators from which a layer is known to be able to draw.

        Args:
            layer: The layer.
            state: What its modules and arguments hold.
        """
        known = named_values(layer)
        # A name may stand for another generator by now.
        named = filter(is_generator, (namespace.get(name) for namespace, name in known.generator_names))
        found = {id(generator): generator for generator in (*state.generators, *known.generators, *named)}
        return cls([random._inst, np.random.mtrand._rand, *found.values()])

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
