"""The scripts under examples/ do what they say."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from lightning.fabric import Fabric
from support.commands import ROOT, TINY_RUN, WITHOUT_REPORT, free_port, run

from lightning_memo import MemoStrategy

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


SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().startswith("#!/usr/bin/env bash\n# ")


@pytest.mark.slow  # tests of the command cover torchrun
def test_torchrun(tmp_path: Path) -> None:
    status, out, err = run([EXAMPLES / "torchrun.sh", *TINY_RUN, *WITHOUT_REPORT], tmp_path)
    assert status == 0, err
    (result,) = results(tmp_path)
    assert result["processes"] == 2
    assert out.count("unigram entropy of the text") == 1


@pytest.mark.slow
def test_two_hosts_end_with_the_loss_of_one_process(tmp_path: Path) -> None:
    status, out, err = run([EXAMPLES / "two_hosts.sh", *WITHOUT_REPORT], tmp_path, PORT=free_port())
    assert status == 0, err
    assert "train loss: two_hosts " in out
    assert sorted(result["processes"] for result in results(tmp_path)) == [1, 2]


@pytest.mark.slow
def test_slurm_job(tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)
    small = ["strategy.context_parallel_size=2", "trainer.precision=bf16-mixed"]
    words = shlex.join([str(EXAMPLES / "slurm.sbatch"), *TINY_RUN, *WITHOUT_REPORT, *small])
    command = ["bash", "-c", f'PATH="{srun.parent}:$PATH" exec bash {words}']
    status, out, err = run(command, tmp_path, MASTER_PORT=free_port(), **JOB)
    assert status == 0, err
    (result,) = results(tmp_path)
    assert result["processes"] == 2
    assert out.count("unigram entropy of the text") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "outputs"}


def run_python(script: str, *arguments: str) -> None:
    """In this process, which has loaded all that takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments])
        patch.syspath_prepend(EXAMPLES)
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of an example, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def losses(out: str) -> list[float]:
    return [float(number) for number in re.findall(r"^step \d+: loss (\S+)$", out, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "steps"), [("one_line.py", 4), ("own_loop.py", 4), ("fabric.py", 5)])
def test_one_line_changes_no_loss(script: str, steps: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python(script, "--plain")
    plain = losses(capsys.readouterr().out)
    run_python(script)
    out = capsys.readouterr().out
    assert len(plain) == steps and losses(out) == pytest.approx(plain, abs=1.1e-4)  # as printed
    assert "alpha=0.5" in out


@pytest.mark.slow
def test_one_argument_of_the_trainer_changes_no_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for arguments in (["--plain"], []):
        run_python("hugging_face_trainer.py", *arguments)
        out = capsys.readouterr().out
        found.append([float(number) for number in re.findall(r"'loss': '?([\d.]+)", out)])
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], abs=1.1e-3)  # as printed
    assert "alpha=0.5" in out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_preferences_with_a_switched_off_adapter_as_the_reference(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for arguments in (["--plain"], []):
        run_python("dpo.py", *arguments)
        out = capsys.readouterr().out
        found.append([float(number) for number in re.findall(r"'loss': '?([\d.]+)", out)])
    assert len(found[0]) == 8 and found[0][0] == pytest.approx(math.log(2), abs=1e-4)  # the adapter begins as zero
    assert found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], abs=1.1e-3)  # as printed
    assert "alpha=0.4848" in out  # 16 of 33 tokens


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reinforcement_learning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards, losses = [], []
    for arguments in (["--plain"], []):
        run_python("grpo.py", *arguments)
        out = capsys.readouterr().out
        rewards.append([float(number) for number in re.findall(r"'reward': '?([\d.]+)", out)])
        losses.append([float(number) for number in re.findall(r"'loss': '?([\d.e-]+)", out)])
    assert len(rewards[0]) == 10 and sum(rewards[0][5:]) > sum(rewards[0][:5])
    assert len(losses[0]) == 20
    assert losses[1][:4] == pytest.approx(losses[0][:4], abs=1e-4)  # later ones may be of other tokens
    assert rewards[1][:2] == pytest.approx(rewards[0][:2], abs=1e-3)
    assert "alpha=0.5" in out


def test_fabric_itself_says_where_the_strategy_belongs() -> None:
    with pytest.raises(ValueError, match=r"invalid strategy name: `strategy=<MemoStrategy .*; needs lightning.pytorch"):
        Fabric(strategy=MemoStrategy(), accelerator="cpu", devices=1)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
def test_finetuning_on_documents(lora: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python("finetune_documents.py", "--steps=4", f"--lora={lora}", "--output=first")
    assert "train loss" in capsys.readouterr().out
    if lora:
        assert (folder / "first" / "adapter_model.safetensors").is_file()
        return
    config = json.loads((folder / "first" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn" and config["max_position_embeddings"] == 256
