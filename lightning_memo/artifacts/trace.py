"""The memory requests of one training step, from which the placement of buffers is planned (MEMO, section 4.3)."""

from __future__ import annotations

import csv
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_memo.utils.array_types import Integers
from lightning_memo.utils.files import replacing

NEVER: Final = -1
"""Death of a buffer that outlives the next step, for example optimizer state. It gets no offset."""

_COLUMNS: Final = ("id", "lane", "phase", "sequence", "size", "birth", "death", "death_phase", "layer")
_VERSION: Final = "lightning_memo trace 1"
_LAYER: Final = re.compile(r"layer (\d+)")
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Memory requests in the order in which they were made. Steps repeat, so time is cyclic.

    Births and deaths are measured in requests made before them; deaths between two requests are therefore not ordered.

    Raises:
        ValueError: The columns differ in length, or a value is impossible.
    """

    phases: tuple[str, ...]
    """Names of the phases in the order of the step: "input", "layer 0 forward", ..., "backward", ..., "optimizer"."""

    phase: Integers
    """[requests] Index into `phases`; does not fall."""

    size: Integers
    """[requests] Bytes of each request."""

    death: Integers
    """[requests] Number of requests made before the buffer was freed. At most the request's own index if the buffer was
    freed in the next step; `NEVER` if the buffer was still alive when the same request was made again."""

    lane: Integers
    """[requests] Index of the stream; memory is planned for stream 0."""

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.phase, self.size, self.death, self.lane)}
        if len(lengths) != 1:
            raise ValueError(f"columns have {sorted(lengths)} entries: each must have one for each request")
        self._refuse((self.phase < 0) | (self.phase >= len(self.phases)), "phase")
        self._refuse(np.diff(self.phase, prepend=0) < 0, "phase")
        self._refuse(self.size < 0, "size")
        self._refuse((self.death < NEVER) | (self.death > len(self)), "death")
        self._refuse(self.lane < 0, "lane")

    def _refuse(self, wrong: npt.NDArray[np.bool_], name: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(f"request {first}: {name}={int(getattr(self, name)[first])} is impossible here")

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def phase_start(self) -> Integers:
        """[phases + 1] Index of the first request of each phase; the last entry is the number of requests."""
        return np.searchsorted(self.phase, np.arange(len(self.phases) + 1))

    @cached_property
    def sequence(self) -> Integers:
        """[requests] Index of the request within its phase."""
        return np.arange(len(self)) - self.phase_start[self.phase]

    @cached_property
    def death_phase(self) -> Integers:
        """[requests] Index of the phase in which the buffer is freed; `NEVER` if it is not."""
        # A buffer is freed in the phase of the last request that was made before.
        last = np.maximum(self.death - 1, 0)
        return np.where(self.death == NEVER, NEVER, self.phase[last] if len(self) else last)

    @cached_property
    def planned(self) -> Integers:
        """Indices of the requests that get an offset."""
        return np.nonzero((self.death != NEVER) & (self.lane == 0))[0]

    @cached_property
    def layer_of_phase(self) -> Integers:
        """[phases] Index of the layer call; -1 outside the layers."""
        found = (_LAYER.search(name) for name in self.phases)
        return np.array([int(layer[1]) if layer else -1 for layer in found], np.int64)

    def same_requests(self, other: Trace) -> bool:
        """Whether another step requested the same sizes in the same phases."""
        return (
            self.phases == other.phases
            and np.array_equal(self.phase, other.phase)
            and np.array_equal(self.size, other.size)
            and np.array_equal(self.lane, other.lane)
        )

    def longest_lives(self, other: Trace) -> Trace:
        """This trace with the later of the two deaths of every buffer.

        Args:
            other: A trace of the same requests.
        """
        ages = [np.where(trace.death == NEVER, 2 * len(self), trace._age) for trace in (self, other)]
        return replace(self, death=np.where(ages[0] >= ages[1], self.death, other.death))

    @property
    def _age(self) -> Integers:
        """[requests] Number of requests between birth and death."""
        age = self.death - np.arange(len(self))
        return np.where(age <= 0, age + len(self), age)

    # ---- CSV

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as CSV: one line with the version, one with the column names, and one for each request."""
        names = [*self.phases, ""]  # NEVER is the last
        with replacing(Path(path)) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([_VERSION, *self.phases])
            writer.writerow(_COLUMNS)
            columns = (
                self.lane,
                self.phase,
                self.sequence,
                self.size,
                self.death,
                self.death_phase,
                self.layer_of_phase[self.phase],
            )
            for index, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
                lane, phase, sequence, size, death, death_phase, layer = row
                writer.writerow([index, lane, names[phase], sequence, size, index, death, names[death_phase], layer])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that was written by `save`.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not a trace. The message is one line that names file and line.
        """
        try:
            with Path(path).open(newline="", encoding="utf-8") as file:
                reader = csv.reader(file, strict=True)
                first = next(reader, [])
                if first[:1] != [_VERSION]:
                    raise ValueError(f"the first line does not begin with {_VERSION!r}")
                if next(reader, []) != list(_COLUMNS):
                    raise ValueError(f"the second line is not {','.join(_COLUMNS)}")
                return _from_rows(tuple(first[1:]), [(reader.line_num, row) for row in reader])
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{os.fspath(path)}: not a trace: {error}") from None


def _from_rows(phases: tuple[str, ...], rows: list[tuple[int, list[str]]]) -> Trace:
    if len(set(phases)) != len(phases):
        raise ValueError("two phases have the same name")
    number = {name: index for index, name in enumerate(phases)}
    columns: dict[str, list[int]] = {name: [] for name in ("lane", "phase", "size", "death")}
    for line, row in rows:
        if len(row) != len(_COLUMNS):
            raise ValueError(f"line {line}: {len(row)} values for {len(_COLUMNS)} columns")
        values = dict(zip(_COLUMNS, row, strict=True))
        if values["phase"] not in number:
            raise ValueError(f"line {line}: phase {values['phase'][:60]!r} is not one of those in the first line")
        for name in ("lane", "size", "death"):
            if not _INTEGER.fullmatch(values[name]) or abs(int(values[name])) >= 2**63:
                raise ValueError(f"line {line}: {name}={values[name][:60]!r} is not a 64-bit integer")
            columns[name].append(int(values[name]))
        columns["phase"].append(number[values["phase"]])
    arrays = {name: np.array(values, np.int64) for name, values in columns.items()}
    return Trace(phases=phases, phase=arrays["phase"], size=arrays["size"], death=arrays["death"], lane=arrays["lane"])
