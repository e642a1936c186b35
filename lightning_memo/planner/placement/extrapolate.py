"""Traces of steps that can't be recorded: longer sequences, and more layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np

from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.utils.arrays import Integers

EDGE_LAYERS: Final = 3
"""The first and the last layers differ from those in between, which are alike: the last two stay on the device."""

_LAYER: Final = re.compile(r"(?<=layer )\d+")


class ExtrapolationError(ValueError):
    """The recorded traces do not tell what is asked."""


def extrapolate(traces: tuple[Trace, Trace, Trace], lengths: tuple[int, int, int], tokens: int) -> Trace:
    """The trace of another length: sizes are `a + b * tokens`, told by the outer lengths and checked by the middle one.

    That holds above the lengths at which kernels change how they work in blocks, and where slices cut all lengths in
    the same proportion.

    Args:
        traces: Recorded at three lengths, with all their small requests.
        lengths: Their tokens, ascending.
        tokens: The length that is wanted.

    Raises:
        ExtrapolationError: The steps do not make the same requests, or a size does not grow so.
    """
    if not lengths[0] < lengths[1] < lengths[2]:
        raise ExtrapolationError(f"lengths {lengths}: give three, ascending")
    short, middle, long = traces
    for trace, length in ((middle, lengths[1]), (long, lengths[2])):
        _check_alike(short, trace, lengths[0], length)
    outer = lengths[0], lengths[2]
    expected = _affine(short.size, long.size, outer, lengths[1])
    if len(wrong := np.nonzero(expected != middle.size)[0]):
        row = int(wrong[0])
        raise ExtrapolationError(
            f"request {row} ({short.phases[short.phase[row]]}) has {int(middle.size[row])} bytes at {lengths[1]} "
            f"tokens, where {outer[0]} and {outer[1]} tokens let expect {int(expected[row])}: record longer ones"
        )
    return replace(short, size=_affine(short.size, long.size, outer, tokens))


def _check_alike(first: Trace, second: Trace, length: int, other_length: int) -> None:
    columns = ("phase", "death", "lane")
    same = first.phases == second.phases and all(
        np.array_equal(getattr(first, column), getattr(second, column)) for column in columns
    )
    if not same:
        raise ExtrapolationError(
            f"the steps of {length} and {other_length} tokens do not request and free in the same order: record "
            "lengths at which kernels work alike, with all small requests"
        )


def _affine(first: Integers, second: Integers, lengths: tuple[int, int], tokens: int) -> Integers:
    """Sizes at `tokens`, rounded up to whole bytes."""
    return first - (first - second) * (tokens - lengths[0]) // (lengths[1] - lengths[0])


def repeat_layers(trace: Trace, layers: int) -> Trace:
    """The trace of a model with more layers: a layer between the edges stands for all that are added.

    What happens outside of layers is as recorded. That is right for embedding, head and loss; an optimizer that takes
    scratch memory parameter by parameter would take it more often.

    Args:
        trace: Of a model with at least `2 * EDGE_LAYERS + 1` layers.
        layers: Wanted layers, at least as many as were recorded.

    Raises:
        ExtrapolationError: Too few layers, or a buffer dies in a layer that has nothing to do with its own.
    """
    recorded = 1 + max((_layer(name) for name in trace.phases), default=-1)
    if not 2 * EDGE_LAYERS < recorded <= layers:
        raise ExtrapolationError(
            f"{recorded} layers recorded, {layers} wanted: record at least {2 * EDGE_LAYERS + 1}, and want no fewer"
        )
    return _Repetition(trace, recorded, layers).trace()


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[0]) if found else -1


class _Repetition:
    """The longer step, phase by phase, with the recorded phase that each repeats."""

    def __init__(self, trace: Trace, recorded: int, layers: int) -> None:
        self._trace, self._recorded, self._added = trace, recorded, layers - recorded
        copied = list(self._phases())
        self._names = [name for name, _ in copied]
        self._sources = [source for _, source in copied]
        counts = np.diff(trace.phase_start)[self._sources]
        self._start = dict(zip(self._names, (np.cumsum(counts) - counts).tolist(), strict=True))
        self._count = dict(zip(self._names, counts.tolist(), strict=True))

    def _phases(self) -> Iterator[tuple[str, int]]:
        numbered = enumerate(self._trace.phases)
        for layer, group in groupby(numbered, key=lambda phase: _layer(phase[1])):
            phases = list(group)
            for copy in self._copies(layer, phases[0][1]):
                for source, name in phases:
                    yield _LAYER.sub(str(copy), name), source

    def _copies(self, layer: int, name: str) -> Sequence[int]:
        """What a recorded layer becomes. Those between the edges, but the first, make room for its copies."""
        if layer < EDGE_LAYERS:
            return [layer]
        if layer >= self._recorded - EDGE_LAYERS:
            return [layer + self._added]
        if layer > EDGE_LAYERS:
            return []
        copies = range(EDGE_LAYERS, self._recorded + self._added - EDGE_LAYERS)
        return copies[::-1] if "backward" in name else copies

    def trace(self) -> Trace:
        recorded = self._trace
        rows = [np.arange(*recorded.phase_start[source : source + 2]) for source in self._sources]
        flat = np.concatenate(rows)
        phase = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
        death = [
            self._death(number, _layer(self._names[own]), row)
            for number, (own, row) in enumerate(zip(phase.tolist(), flat.tolist(), strict=True))
        ]
        return Trace(
            phases=tuple(self._names),
            phase=phase,
            size=recorded.size[flat],
            death=np.array(death, np.int64),
            lane=recorded.lane[flat],
        )

    def _death(self, number: int, layer: int, row: int) -> int:
        """When request `number` dies, in layer call `layer`, which repeats the recorded request `row`."""
        at = int(self._trace.death[row])
        if at in (NEVER, 0):
            return at
        phase = int(self._trace.death_phase[row])
        target, source = (int(self._trace.layer_of_phase[p]) for p in (phase, self._trace.phase[row]))
        name = _LAYER.sub(str(self._moved(target, source, layer)), self._trace.phases[phase])
        if name not in self._start:
            raise ExtrapolationError(f"request {row} dies in {self._trace.phases[phase]}, which has no counterpart")
        death = self._start[name] + min(at - int(self._trace.phase_start[phase]), self._count[name])
        return int(min(death, number) if at <= row else max(death, number + 1))

    def _moved(self, target: int, source: int, layer: int) -> int:
        """Where what happened in layer `target`, as seen from `source`, happens as seen from its copy `layer`."""
        if source >= 0 and abs(target - source) < EDGE_LAYERS:
            return layer + target - source
        return target if target < self._recorded - EDGE_LAYERS else target + self._added
