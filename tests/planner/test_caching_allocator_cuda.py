"""The simulated caching allocator against PyTorch's own, on a stub of the CUDA runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from support import warm
from support.cuda_stub.real_allocator import Replay
from support.cuda_stub.real_allocator import replay as replay_real
from support.markers.slow import slow_if
from support.paths import ROOT
from support.samples.plans import record_step

from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.planner.placement.caching_allocator import replay
from lightning_memo.utils import native_build as native

FETCHED = ROOT / ".cuda"
# Torch 2.12 alone chooses between free blocks of the same size by the order in which they came to be.
VERSIONS = sorted(path.parent for path in FETCHED.glob("*/torch/complete") if "2.12." not in str(path))
KIB, MIB = 2**10, 2**20
DEVICE_BYTES = 2**36
TRACES = 40

pytestmark = pytest.mark.skipif(not VERSIONS, reason="no headers of CUDA builds: make cuda-headers")
each_version = pytest.mark.parametrize("version", VERSIONS, ids=[version.parent.name for version in VERSIONS])
each_setting = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])


@pytest.fixture(autouse=True)
def compiler():
    try:
        native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))


def random_trace(rng: np.random.Generator) -> Trace:
    """Random requests: sizes around the allocator's thresholds, short and long lives, some across the end of a step."""
    count = int(rng.integers(1, 120))
    choices = np.stack(
        [
            rng.integers(0, 3 * KIB, count),
            rng.integers(MIB - KIB, MIB + KIB, count),
            rng.integers(0, 2 * MIB, count),
            rng.integers(9 * MIB, 12 * MIB, count),
            rng.integers(0, 45 * MIB, count),
            rng.choice([MIB, 5 * MIB, 10 * MIB, 20 * MIB], count),
        ]
    )
    life = rng.geometric(rng.choice([0.5, 0.1, 0.02]), count)
    death = (np.arange(count) + life) % (count + 1)
    return Trace(
        phases=("all",),
        phase=np.zeros(count, np.int64),
        size=choices[rng.integers(0, len(choices), count), np.arange(count)],
        death=np.where(rng.random(count) < 0.05, NEVER, death),
        lane=np.where(rng.random(count) < 0.05, 1, 0),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recorded training step, unchanged and with the sizes of larger models."""
    trace = record_step(tmp_path_factory.mktemp("run")).memory.trace
    return [replace(trace, size=trace.size * times) for times in (1, 100, 1_000, 10_000)]


def assert_exact(traces, version, expandable):
    curves = [replay(trace, expandable=expandable) for trace in traces]
    steps = [Replay(trace, curve.steps) for trace, curve in zip(traces, curves, strict=True)]
    shown = replay_real(steps, version, expandable=expandable, device_bytes=DEVICE_BYTES)
    for curve, real in zip(curves, shown, strict=True):
        assert real.allocated[-1].tolist() == curve.allocated_bytes.tolist()
        assert real.reserved[-1].tolist() == curve.reserved_bytes.tolist()


@slow_if(lambda version: version in VERSIONS[:-1])
@each_version
@each_setting
def test_random_traces_exactly(version, expandable):
    rng = np.random.default_rng(7)
    assert_exact([random_trace(rng) for _ in range(TRACES)], version, expandable)


@each_setting
def test_a_recorded_step_exactly(recorded, expandable):
    assert_exact(recorded, VERSIONS[-1], expandable)


def test_the_real_allocator_takes_the_setting(recorded):
    real = [replay_real([Replay(recorded[-1], 2)], VERSIONS[-1], expandable=choice) for choice in (False, True)]
    assert real[0][0].reserved[-1].tolist() != real[1][0].reserved[-1].tolist()


def test_a_resident_buffer_counts(recorded):
    (alone,), (beside,) = (
        replay_real([Replay(recorded[0], 1, resident)], VERSIONS[-1]) for resident in (0, 30 * MIB + 1)
    )
    assert ((beside.allocated - alone.allocated) == 30 * MIB + 512).all()
    assert ((beside.reserved - alone.reserved) == 32 * MIB).all()


def test_what_does_not_fit_is_an_error(recorded):
    with pytest.raises(RuntimeError, match="out of memory"):
        replay_real([Replay(recorded[-1], 1)], VERSIONS[-1], device_bytes=2 * MIB)


def test_the_benchmark_writes_a_report(recorded, tmp_path):
    recorded[-1].save(tmp_path / "step.csv")
    command = [sys.executable, ROOT / "benchmarks" / "reserved.py", "--quick", "--output", tmp_path]
    command += ["--torch", VERSIONS[-1].parent.name, tmp_path / "step.csv"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "reserved.json").read_text())["results"]
    assert row["lower_bound_bytes"] <= row["arena_bytes"]
    for setting, peaks in row["without_plan"].items():
        assert peaks["model"]["exact"] and peaks["steady"]
        assert peaks["peak_allocated_bytes"] <= peaks["peak_reserved_bytes"]
        assert row["arena_bytes"] <= row["with_plan"][setting]["peak_reserved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--torch", "1.0", "step.csv"], "fetch.py 1.0"),
        (["--torch", "{}", "missing.csv"], "missing.csv"),
        (["--torch", "{}", __file__], "not a trace"),
    ],
    ids=["torch", "missing", "no trace"],
)
def test_the_benchmark_refuses_what_it_can_not_use(arguments, message):
    given = [argument.format(VERSIONS[-1].parent.name) for argument in arguments]
    command = [warm.tools() / "python", ROOT / "benchmarks" / "reserved.py", *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
