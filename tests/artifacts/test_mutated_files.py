"""Mutated plans, traces and tables are either refused in one line or read as valid data."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.draws import draws
from support.samples.plans import small_plan
from support.samples.storage_problems import ALWAYS, MIB, planned

from lightning_memo.artifacts.buffer_placement import PhasePlacement, StepPlacement
from lightning_memo.artifacts.costs import Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.trace import Trace
from lightning_memo.planner.placement.csv_tables import COLUMNS, read_problem
from lightning_memo.planner.placement.problem import MAX_BYTES
from lightning_memo.planner.placement.step_placement import problem_of
from lightning_memo.planner.token_slices import why_not_stored
from lightning_memo.utils.units import format_bytes

MUTANTS = draws(1000)  # of each kind of file

# Less than what all layers store.
BUDGET = Budget(device_bytes=ALWAYS + 30 * MIB, host_bytes=40 * MIB)
_NUMBERS = (b"-1", b"0", b"1e999", b"-0.0", b"9" * 19, b"9" * 400, b"4611686018427387904", b"NaN", b"0x10", b"true")


def flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def drop(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.randint(1, 40)]


def repeat(data: bytearray, chance: random.Random) -> None:
    """Repeat a part of the file, for example a line, a field or half a number."""
    start = chance.randrange(len(data))
    part = data[start : start + chance.randint(1, 200)]
    data[start:start] = part


def repeat_line(data: bytearray, chance: random.Random) -> None:
    """Repeat a line, which is a field of a document or a row of a table."""
    lines = bytes(data).split(b"\n")
    number = chance.randrange(len(lines))
    lines.insert(number, lines[number])
    data[:] = b"\n".join(lines)


def renumber(data: bytearray, chance: random.Random) -> None:
    """Replace a number by another one, or by text that is not a number."""
    places = [n for n, byte in enumerate(data) if chr(byte).isdigit()]
    if places:
        start = chance.choice(places)
        stop = next((n for n in range(start, len(data)) if not chr(data[n]).isdigit()), len(data))
        data[start:stop] = chance.choice(_NUMBERS)


def nest(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    data[start:start] = chance.choice((b"[", b'{"a":', b'"', b"(")) * chance.choice((1, 100, 5000))


def swap(data: bytearray, chance: random.Random) -> None:
    """Exchange two parts."""
    first, second = sorted(chance.randrange(len(data)) for _ in range(2))
    part = data[second : second + 30]
    data[second : second + 30] = data[first : first + 30]
    data[first : first + len(part)] = part


KINDS = (flip, flip, cut, drop, repeat, repeat_line, renumber, renumber, nest, swap)


def mutants(original: bytes, seed: int) -> list[bytes]:
    """Reproducible mutants: files with one or several mutations, and files in which one number is very large."""
    chance = random.Random(seed)
    numbers = re.finditer(rb"\d+", original)
    made = [b"%s%d%s" % (original[: n.start()], 2**62, original[n.end() :]) for n in numbers]
    for number in range(MUTANTS):
        data = bytearray(original)
        for _ in range(1 + number % 2):
            if data:
                chance.choice(KINDS)(data, chance)
        made.append(bytes(data))
    return made


def refused_or_read(path: Path, original: bytes, read: Callable[[Path], object], seed: int) -> list[object]:
    """Results of reading the mutants. Checks that all others are refused in one line that names the file."""
    found = []
    for data in mutants(original, seed):
        path.write_bytes(data)
        try:
            found.append(read(path))
        except ValueError as error:
            text = str(error)
            assert text.startswith(str(path)), data
            assert text.isprintable(), (text, data)
            assert len(text) < 600, data
    assert 0 < len(found) < MUTANTS / 2  # both happen
    return found


def placed_plan() -> Plan:
    phases = (
        PhasePlacement(
            name="layer 0 forward", sizes=(64, 128, 64), offsets=(0, 64, -1), varying=(128,), occasional=(64,)
        ),
        PhasePlacement(name="layer 0 backward", sizes=(256,), offsets=(0,)),
    )
    placement = StepPlacement(
        phases=phases, peak_bytes=256, lower_bound_bytes=192, min_bytes=16, threads=1, method="first fit", seconds=0.1
    )
    return replace(small_plan(), placement=placement)


@pytest.mark.slow
def test_mutated_plans(tmp_path: Path) -> None:
    """A mutant that is read is a valid plan: its sizes can be computed, and it can be saved."""
    original = placed_plan().to_json().encode()
    for read in refused_or_read(tmp_path / "plan.json", original, Plan.load, seed=1):
        assert isinstance(read, Plan)
        assert 0.0 <= read.swap.alpha <= 1.0
        assert format_bytes(read.device_bytes + read.swap.host_bytes + read.swap.disk_bytes)
        assert Plan.from_json(read.to_json()) == read
        for phase in read.placement.phases if read.placement else ():
            ends = [offset + size for size, offset in zip(phase.sizes, phase.offsets, strict=True) if offset >= 0]
            assert max(ends, default=0) <= read.placement.peak_bytes


def fields_of(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all fields of JSON."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in inner:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += fields_of(value, (*path, key))
    return found


def other_value(value: Any, chance: random.Random) -> Any:
    """Another value, mostly of the same type, which may contradict other fields."""
    if isinstance(value, list):
        shorter, longer = value[: chance.randrange(len(value) + 1)], value + value[: chance.randrange(len(value) + 1)]
        return chance.choice((shorter, longer, value * 2, value[::-1]))
    if isinstance(value, int | float) and not isinstance(value, bool):
        near = value * chance.choice((0, 1, 2, 1000)) + chance.choice((0, 1, -1))
        return chance.choice((near, near, 2**63 - 1, 2**63 - 513, 2**62, 0, 1, 0.5, 1e18))
    if isinstance(value, str):
        return chance.choice(
            ("memo", "plain", "none", "attention", "hidden", "model", "device", "host", "disk", "input")
        )
    return chance.choice((None, 1, 0.5, "", [], {}, True))


@pytest.mark.slow
def test_plans_whose_fields_contradict_each_other() -> None:
    """A plan is refused in one line when it is made, or all that depends on several fields can be computed."""
    chance, read = random.Random(4), 0
    text = planned(BUDGET).to_json()
    for _ in range(MUTANTS):
        document = json.loads(text)
        for path in chance.sample(fields_of(document), chance.choice((1, 1, 2))):
            *outer, last = path
            with contextlib.suppress(KeyError, IndexError, TypeError):  # the first change removed the second field
                place = functools.reduce(operator.getitem, outer, document)
                place[last] = other_value(place[last], chance)
        try:
            plan = Plan.from_json(json.dumps(document))
        except ValueError as error:
            message = str(error)
            assert message.isprintable() and len(message) < 600, message
            continue
        read += 1
        assert format_bytes(plan.device_bytes + plan.swap.host_bytes + plan.swap.disk_bytes)
        assert Plan.from_json(plan.to_json()) == plan
        assert list(map(plan.swap.slot_disk_bytes, range(plan.swap.calls)))
        if not plan.swap.storage.has_one_alpha:
            assert plan.swap.storage.share("input") >= 0.0
            why_not_stored(plan.swap.storage, joint_attention=True)
        if plan.storage_costs is not None:
            calls = plan.storage_costs.call_classes
            assert plan.storage_costs.pairs(calls) is not None and plan.storage_costs.unpaired(calls) is not None
    assert 0 < read < MUTANTS


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("swap", "memory", "disk"), [0], r"memory.disk must have an entry for each of the \d+ layer calls"),
        (("swap", "storage", "call_classes"), [], "call_classes must have a class for each layer call"),
        (("swap", "storage", "calls"), [], "call_classes must have a class for each layer call"),
        (("swap", "storage", "tokens"), 1, "after the 1 of a layer call"),
        (("swap", "storage", "tokens"), 10**6, r"storage has 1000000 tokens .* the numbers must be equal"),
        (("step_seconds",), 2**63 - 1, "expected a number"),
        (("swap", "storage", "calls", 0, "ranges", 0, "start"), 10**6, "start=1000000 must be at most stop="),
    ],
)
def test_what_is_wrong_with_a_plan(path: tuple[Any, ...], value: Any, why: str) -> None:
    document = json.loads(planned(BUDGET).to_json())
    *outer, last = path
    functools.reduce(operator.getitem, outer, document)[last] = value
    with pytest.raises(ValueError, match=why):
        Plan.from_json(json.dumps(document))


def test_a_plan_that_could_not_be_loaded_is_not_made() -> None:
    with pytest.raises(ValueError, match=r"device_bytes=9223372036854775808 must be less than 2\^63"):
        Budget(device_bytes=2**63, host_bytes=0)


def test_mutated_traces(tmp_path: Path) -> None:
    """A mutant that is read is a valid trace, for which memory can be planned."""
    phases = ("input", "layer 0 forward", "layer 0 backward")
    step = Trace(
        phases=phases,
        **{
            name: np.array(values, np.int64)
            for name, values in {
                "phase": [0, 0, 1, 1, 2, 2],
                "size": [100, 700, 300, 64, 4096, 20],
                "death": [2, 5, 4, 0, 6, 1],
                "lane": [0, 0, 0, 0, 1, 0],
            }.items()
        },
    )
    step.save(tmp_path / "trace.csv")
    original = (tmp_path / "trace.csv").read_bytes()
    for trace in refused_or_read(tmp_path / "trace.csv", original, Trace.load, seed=2):
        assert isinstance(trace, Trace)
        if sum(trace.size.tolist()) < MAX_BYTES // 2:  # else the problem is refused
            assert len(problem_of(trace, 64).size) == len(trace.planned)
        assert len(trace.death_phase) == len(trace.sequence) == len(trace)
        trace.save(tmp_path / "again.csv")
        assert trace.same_requests(Trace.load(tmp_path / "again.csv"))


def test_mutated_tables(tmp_path: Path) -> None:
    """A mutant that is read is a valid problem."""
    rows = [f"{n},{n},{n + 3},{64 + 96 * n}" for n in range(6)]
    original = "\n".join([",".join(COLUMNS), *rows, ""]).encode()
    for table in refused_or_read(tmp_path / "in.csv", original, read_problem, seed=3):
        problem = table.problem
        assert (problem.size >= 0).all()
        assert (problem.lower < problem.upper).all()
        assert len(table.rows) == len(problem.size)
