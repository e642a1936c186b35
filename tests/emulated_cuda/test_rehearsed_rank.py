"""One rank of several in simulated time: collectives take the time of the network, and training has a rank's memory."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

RANKS, TOKENS, LAYERS = 8, 524288, 6
GIB = 2**30
HERE = Path(__file__).parent


def rehearse(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "rehearse.py"), "--device", "h100", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@functools.cache
def rehearsed(*arguments: str) -> dict[str, Any]:
    """What the program prints as one of eight ranks on a host with 1 TiB."""
    done = rehearse("--ranks", str(RANKS), "--host-memory", "1TiB", *arguments)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rank() -> dict[str, Any]:
    return rehearsed(str(HERE / "rehearsed_rank.py"))


def trained(*settings: str) -> dict[str, Any]:
    """The last step of a training whose tokens and weights are divided."""
    method = json.dumps({"context_parallel_size": RANKS, "zero_stage": 3})
    return rehearsed(*settings, str(HERE / "rehearsed_training.py"), str(TOKENS), method)


def test_collectives_take_the_time_of_the_network() -> None:
    for name, (seconds, expected) in rank()["collectives"].items():
        assert seconds == pytest.approx(expected, rel=0.02, abs=2e-4), name


def test_small_values_are_those_that_equal_ranks_give() -> None:
    assert rank()["values"] == {
        "sum": [8.0 * n for n in range(8)],
        "counts": [float(-n % 8) for n in range(8)],
        "ring": [float(n) for n in range(8)],
        "all": [0, 2**20 - 1, 2**20 - 2],
    }


def test_a_message_that_other_ranks_do_not_send_is_an_error() -> None:
    assert "NCCL Error 5" in rank()["refused"]


def test_the_ranks_share_the_memory_of_the_host() -> None:
    assert rank()["processes"] == RANKS
    assert rank()["host_bytes"] == 1024 * GIB - RANKS * GIB


def test_tokens_and_weights_of_a_step_are_divided() -> None:
    step = trained()
    assert step["weight_bytes"] == pytest.approx(2 * step["weights"] / RANKS, rel=1e-3)
    causal = LAYERS * 4 * 32 * 128 * TOKENS * (TOKENS + 1) / 2
    assert RANKS * step["kinds"]["cudnn_forward"][2] == pytest.approx(causal, rel=1e-3)
    assert step["peak_bytes"] <= 1.02 * step["planned_bytes"]


def test_a_step_sends_weights_and_what_the_ring_passes_on_and_hides_both() -> None:
    step = trained()
    (network_seconds, sent, _), computing = step["kinds"]["network"], 0.0
    for kind, (seconds, _, flops) in step["kinds"].items():
        computing += seconds if flops or kind == "memory" else 0.0
    keys_and_values = 2 * 8 * 128 * 2 * TOKENS / RANKS
    ring = LAYERS * (RANKS - 1) * 4 * keys_and_values  # forward, backward, and fp32 gradients
    weights = 2 * step["weights"] * (RANKS - 1) / RANKS
    assert ring + weights <= sent <= ring + 2.1 * weights
    assert computing <= step["seconds"] <= computing + 0.5 * network_seconds


def test_a_slow_network_bounds_a_step() -> None:
    slow = trained("--set", "network=1e9")
    assert slow["kinds"]["network"][0] == pytest.approx(slow["kinds"]["network"][1] / 1e9, rel=0.01)
    assert slow["seconds"] >= 0.97 * slow["kinds"]["network"][0]


def test_more_ranks_than_the_links_join_are_refused_in_one_line() -> None:
    done = rehearse("--ranks", "16", "train.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("argument --ranks: 16: give 1 to 8, the devices that nvlink links")
