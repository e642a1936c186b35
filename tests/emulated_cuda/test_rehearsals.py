"""What no change may break, at full size: speed relative to other methods, memory within budgets, and no waits."""

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

TOKENS = 65536
MIB, GIB = 2**20, 2**30
HOSTS = {"much": "1TiB", "little": "24GiB"}


@functools.cache
def rehearsed(method: str, host: str) -> dict[str, Any]:
    """The last step of a run on a simulated H200."""
    program = Path(__file__).parent / "rehearsed_training.py"
    rehearse = ROOT / "benchmarks" / "rehearse.py"
    done = subprocess.run(
        [sys.executable, str(rehearse), "--host-memory", HOSTS[host], str(program), str(TOKENS), method],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["follows_plan"]
    return result


def memo(host: str, **settings: Any) -> dict[str, Any]:
    """The last step of a run with this strategy, on a device on which plain training does not fit."""
    return rehearsed(json.dumps({"device_memory": 48 * GIB, **settings}), host)


@pytest.mark.parametrize("host", HOSTS)
def test_the_default_is_as_fast_as_any_other_setting_and_as_checkpointing(host: str) -> None:
    others = {"checkpointing": rehearsed('"checkpointing"', host), "alpha 0": memo(host, alpha=0.0)}
    if host == "much":
        others["alpha 1"] = memo(host, alpha=1.0)
    seconds = memo(host)["seconds"]
    for name, other in others.items():
        assert seconds <= 1.01 * other["seconds"], name
    assert seconds <= 0.9 * others["checkpointing"]["seconds"]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of Llama 3 8B with LoRA at 64K tokens, on a host of 128 GiB."""
    folder = tmp_path_factory.mktemp("cells")
    methods = ["checkpointing", "selective_liger", "memo_auto_unplanned"]
    subprocess.run(
        [sys.executable, "benchmarks/rehearse.py", "benchmarks/gpu.py", "--models", "llama3_8b", "--tuning", "lora",
         "--attention", "cudnn", "--lengths", str(TOKENS), "--warmup", "1", "--repeats", "2", "--output", str(folder),
         "--methods", *methods],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    (found,) = folder.glob("*/*")
    return {method: json.loads((found / f"{TOKENS:08d}-{method}.json").read_text()) for method in methods}


def test_the_default_is_faster_than_selective_checkpointing_with_fused_kernels(cells: dict[str, Any]) -> None:
    assert cells["selective_liger"]["median_seconds"] >= 1.12 * cells["memo_auto_unplanned"]["median_seconds"]


def test_training_starts_nearly_as_soon_as_with_checkpointing(cells: dict[str, Any]) -> None:
    first, second, *_ = (seconds for _, _, _, seconds, *_ in cells["memo_auto_unplanned"]["every_step"])
    waited = first + second - cells["memo_auto_unplanned"]["median_seconds"]
    assert waited <= 1.4 * cells["checkpointing"]["first_step_seconds"]


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.0}], ids=str)
def test_host_memory_is_within_its_budget_in_the_first_step_too(settings: dict[str, Any]) -> None:
    limit = 20 * GIB if settings else 6 * GIB
    assert 0 < memo("little", host_memory=limit, **settings)["pinned_bytes"] <= limit + MIB


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.0}, {"alpha": 0.5}, {"slice_tokens": 16384}], ids=str)
def test_device_memory_is_as_planned(settings: dict[str, Any]) -> None:
    result = memo("much", **settings)
    assert result["peak_bytes"] <= 1.02 * result["planned_bytes"]


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.5}, {"slice_tokens": 16384}], ids=str)
def test_the_host_does_not_wait_in_a_step(settings: dict[str, Any]) -> None:
    assert memo("much", **settings)["host_waits"] == rehearsed('"checkpointing"', "much")["host_waits"]
