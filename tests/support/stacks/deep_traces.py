"""A trace of a model with many layers, made from a recorded one by repeating a layer from its middle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from lightning_memo.artifacts.trace import NEVER, Trace

EDGE_LAYERS: Final = 3
"""Number of layers at each end that differ from those in between. The last two layers stay on the device."""

_LAYER: Final = re.compile(r"(?<=layer )\d+")


def repeat_layers(trace: Trace, layers: int) -> Trace:
    """Return the trace of a model with more layers.

    Requests outside the layers are copied. This is right for embedding, head and loss, but an optimizer that allocates
    scratch memory for each parameter would allocate it more often.

    Args:
        trace: Trace of a model with at least `2 * EDGE_LAYERS + 1` layers.
        layers: Number of layers, at least the recorded number.
    """
    recorded = 1 + max((_layer(name) for name in trace.phases), default=-1)
    assert 2 * EDGE_LAYERS < recorded <= layers
    return _Repetition(trace, recorded, layers).trace()


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[0]) if found else -1


class _Repetition:
    """The phases of the longer step, each with the recorded phase that it repeats."""

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
        """Layers that a recorded layer becomes. The first middle layer is repeated, the others are dropped."""
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
        """Death of request `number` in layer call `layer`, which repeats the recorded request `row`."""
        at = int(self._trace.death[row])
        if at in (NEVER, 0):
            return at
        phase = int(self._trace.death_phase[row])
        target, source = (int(self._trace.layer_of_phase[p]) for p in (phase, self._trace.phase[row]))
        name = _LAYER.sub(str(self._moved(target, source, layer)), self._trace.phases[phase])
        death = self._start[name] + min(at - int(self._trace.phase_start[phase]), self._count[name])
        return int(min(death, number) if at <= row else max(death, number + 1))

    def _moved(self, target: int, source: int, layer: int) -> int:
        """Layer that relates to `layer`, a copy of layer `source`, as layer `target` relates to `source`."""
        if source >= 0 and abs(target - source) < EDGE_LAYERS:
            return layer + target - source
        return target if target < self._recorded - EDGE_LAYERS else target + self._added
