"""The scripts under examples/ do what they say."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from commands import ROOT, TINY_RUN, free_port, run

EXAMPLES = ROOT / "examples"

# Starts the tasks of one node, as srun does, and ends them all if one fails (--kill-on-bad-exit).
FAKE_SRUN = """#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=1 ]] || exit 3
while [[ $1 == --* ]]; do shift; done
tasks=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS "$@" &
    tasks+=($!)
done
for _ in "${tasks[@]}"; do
    wait -n || { status=$?; kill -9 "${tasks[@]}" 2>/dev/null; exit "$status"; }
done
"""
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "lightning_memo",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": "127.0.0.1",
    "SLURM_CPUS_PER_TASK": "1",
}


def results(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in folder.glob("outputs/*/runs/*/summary.json")]


@pytest.mark.parametrize("script", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().startswith("#!/usr/bin/env bash\n# ")


def test_torchrun(tmp_path: Path) -> None:
    status, out, err = run([EXAMPLES / "torchrun.sh", *TINY_RUN], tmp_path)
    assert status == 0, err
    (result,) = results(tmp_path)
    assert result["processes"] == 2
    assert out.count("unigram entropy of the text") == 1


def test_two_hosts_end_with_the_loss_of_one_process(tmp_path: Path) -> None:
    status, out, err = run([EXAMPLES / "two_hosts.sh"], tmp_path, PORT=free_port())
    assert status == 0, err
    assert "train loss: two_hosts " in out
    assert sorted(result["processes"] for result in results(tmp_path)) == [1, 2]


def test_slurm_job(tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)
    small = ["strategy.context_parallel_size=2", "trainer.precision=bf16-mixed"]
    words = shlex.join([str(EXAMPLES / "slurm.sbatch"), *TINY_RUN, *small])
    command = ["bash", "-c", f'PATH="{srun.parent}:$PATH" exec bash {words}']
    status, out, err = run(command, tmp_path, MASTER_PORT=free_port(), **JOB)
    assert status == 0, err
    (result,) = results(tmp_path)
    assert result["processes"] == 2
    assert out.count("unigram entropy of the text") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "outputs"}
