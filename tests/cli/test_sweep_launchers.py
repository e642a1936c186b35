"""Sweeps whose jobs are started by the submitit launchers, on this machine and with SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import MODULE, SWEEP, TINY_RUN, WITHOUT_REPORT, free_port, run
from support.markers.extras import extra

from lightning_memo.cli.hydra_command import command_error_message
from lightning_memo.cli.sweep import load_runs

submitit = extra("submitit", "slurm")

# Runs the jobs of an array one after another, as SLURM would start each on its own node.
SBATCH = """#!/usr/bin/env bash
script=${!#}
echo "Submitted batch job 4711"
tasks=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' "$script")
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
(
    for ((job = 0; job <= ${last:-0}; job++)); do
        SLURM_ARRAY_JOB_ID=4711 SLURM_ARRAY_TASK_ID=$job SLURM_JOB_ID=$((4711 + job)) SLURM_NTASKS=$tasks \\
            SLURM_NTASKS_PER_NODE=$tasks SLURM_NNODES=1 SLURM_NODELIST=127.0.0.1 SLURM_JOB_NAME=train \\
            SLURM_JOB_NUM_NODES=1 bash "$script"
    done
) > sbatch.log 2>&1 &
"""
# In processes other than rank zero, mistakes are reported after 1 second instead of 15.
SRUN = """#!/usr/bin/env bash
submit="
import runpy
from lightning_memo.cli import processes
processes._DELAY_SECONDS = 1.0
runpy.run_module('submitit.core._submit', run_name='__main__', alter_sys=True)
"
while [[ $1 == --* || $1 == -* ]]; do
    [[ $1 == --output || $1 == --error ]] && shift
    shift
done
[[ "$2 $3 $4" == "-u -m submitit.core._submit" ]] || exit 3
tasks=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS \\
        "$1" -c "$submit" "${@:5}" &
    tasks+=($!)
done
wait "${tasks[@]}"
"""
SACCT = """#!/usr/bin/env bash
echo 'JobID|State|NodeList'
"""


def command(*settings: str) -> list[str]:
    return ["python", *MODULE, "-m", *TINY_RUN, *WITHOUT_REPORT, "strategy=plain", *settings]


@pytest.mark.slow
def test_jobs_at_the_same_time_on_this_machine(tmp_path: Path) -> None:
    # Jobs are identified by process ids, which differ for the processes of `warm`.
    sweep = command("hydra/launcher=submitit_local", "data.seq_len=16,24", "sweep=mine")
    status, _, err = run(sweep, tmp_path, cold=True)
    assert status == 0, err
    assert [run.status for run in load_runs(tmp_path / SWEEP)] == ["ok", "ok"]


@pytest.mark.slow
def test_jobs_of_two_tasks_by_slurm(tmp_path: Path) -> None:
    """One job succeeds and one fails. The same command does not repeat the finished job."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scontrol": SACCT}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    settings = ["hydra/launcher=slurm", "trainer.devices=2", "hydra.launcher.gpus_per_node=null", "sweep=mine"]
    started = f'PATH="{tools}:$PATH" exec "$@"'
    words = ["bash", "-c", started, "-", *command(*settings, "data.seq_len=16,90000")]
    status, out, err = run(words, tmp_path, MASTER_PORT=free_port())
    assert status == 1, err
    done, failed = load_runs(tmp_path / SWEEP)
    assert (done.status, done.processes, failed.status) == ("ok", 2, "failed")
    assert "data.seq_len=90000 failed: data.seq_len=90000" in out and out.count(" Sweep ") == 1
    assert (tmp_path / SWEEP / "sweep.png").is_file()
    assert "Traceback" not in err

    written = (tmp_path / SWEEP / "0" / "csv" / "metrics.csv").stat()
    assert run(words, tmp_path, MASTER_PORT=free_port())[0] == 1
    assert (tmp_path / SWEEP / "0" / "csv" / "metrics.csv").stat() == written


def test_a_job_that_was_killed_is_told_in_a_line() -> None:
    lost = submitit.core.utils.UncompletedJobError("Job 4711 (task: 0) with path x\nhas not produced any output")
    assert command_error_message(lost) == (
        "Job 4711 (task: 0) with path x: SLURM ended the job; when all other jobs have ended, continue with the same "
        "command and sweep=last"
    )
