"""The training command in several processes: one folder, one set of messages, and a common end."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import (
    HASTY_MODULE,
    ROOT,
    TINY_RUN,
    WITHOUT_REPORT,
    environment,
    errors,
    free_port,
    lightning,
    run,
    torchrun,
)
from support.pickles import Touches
from torch.distributed import TCPStore

from lightning_memo.artifacts.plan import Plan
from lightning_memo.cli.hydra_command import config_dir
from lightning_memo.cli.processes import SweepRefused, arguments_of_process
from lightning_memo.utils.process import is_rank_zero

PARALLEL_EXPERIMENTS = sorted(p.stem for p in Path(config_dir(), "experiment").glob("*.yaml") if "parallel" in p.stem)
PAGE = (ROOT / "docs" / "parallelism.md").read_text()
PAGE_COMMANDS = re.findall(r"^((?:python -m|torchrun) .*)$", PAGE, re.MULTILINE)
README_COMMANDS = re.findall(r"^(torchrun .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)


def only(paths):
    (path,) = paths
    return path


def metrics(folder, name):
    with (folder / "csv" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def files(folder):
    """Names of all files, without parts that differ between runs."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"events\.out.*", "events", name) for name in names)


SAVING = ["callbacks.checkpoint.every_n_train_steps=2", "trainer.accumulate_grad_batches=2"]
SAVED = [*SAVING, "strategy.alpha=0.5", "data.seq_len=31"]


def train_in_both(tmp_path, **how):
    """Train in two processes, and return the folder of the run, stdout and stderr."""
    (tmp_path / "both").mkdir()
    parallel = ["strategy.context_parallel_size=2", "strategy.zero_stage=3", "compare=true"]
    status, out, err = run(torchrun(*SAVED, *parallel, report=True), tmp_path / "both", **how)
    assert status == 0, err
    return only((tmp_path / "both" / "outputs" / "train" / "runs").iterdir()), out, err


def test_torchrun_trains_as_one_process_and_writes_once(tmp_path, train):
    both, out, _ = train_in_both(tmp_path)
    assert [p.name for p in (tmp_path / "both").iterdir()] == ["outputs"]
    assert len(re.findall("unigram entropy of the text", out)) == 1
    assert out.count("compare=true needs a run in one process") == 1

    assert train(*SAVED, "name=alone", report=True)[0] == 0
    alone = only((tmp_path / "outputs" / "alone" / "runs").iterdir())
    for name in ("train_loss", "val_loss", "tokens", "lr"):
        assert metrics(both, name) == pytest.approx(metrics(alone, name), rel=1e-5), name
    results = [json.loads((folder / "summary.json").read_text()) for folder in (both, alone)]
    assert [result["processes"] for result in results] == [2, 1]
    assert results[0]["train_loss"] == pytest.approx(results[1]["train_loss"], rel=1e-5)
    for result in results:
        assert result["tokens_per_second"] == pytest.approx(2 * 31 / result["step_seconds"])
    # The checkpoint of one process is a file, and memory may or may not be planned within 5 steps.
    one, two = ({f for f in files(each) if ".ckpt" not in f and "memory" not in f} for each in (alone, both))
    assert two == one | {"launch.json"}


@pytest.mark.slow
def test_one_process_goes_on_where_two_new_interpreters_ended(tmp_path, train):
    both, _, _ = train_in_both(tmp_path, cold=True)
    checkpoint = only((both / "checkpoints").glob("step-4.ckpt"))
    assert checkpoint.is_dir()
    assert train(*SAVED, "trainer.max_steps=7", f"ckpt_path={both / 'checkpoints' / 'last.ckpt'}", "name=on")[0] == 0
    assert train(*SAVED, "trainer.max_steps=7", "name=whole")[0] == 0
    on, whole = (metrics(only((tmp_path / "outputs" / n / "runs").iterdir()), "train_loss") for n in ("on", "whole"))
    assert set(on) == {4, 5, 6}
    # The learning rate schedules of 5 and 7 steps differ; the first losses do not depend on them.
    assert on[4] == pytest.approx(whole[4], rel=1e-4)


@pytest.mark.slow
def test_fpdt_is_one_word(tmp_path, train):
    status, _, err = run(lightning("strategy=fpdt", "strategy.slice_tokens=6"), tmp_path)
    assert status == 0, err
    both = only((tmp_path / "outputs" / "train" / "runs").iterdir())
    swap = Plan.load(next(both.rglob("memo_plan.json"))).swap
    assert (swap.stream_from_host, swap.storage.slice_tokens, swap.alpha) == ("hidden", 6, 0.0)
    assert train("name=alone", "strategy.alpha=0")[0] == 0
    alone = only((tmp_path / "outputs" / "alone" / "runs").iterdir())
    assert metrics(both, "train_loss") == pytest.approx(metrics(alone, "train_loss"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "processes"), [("demo_expert_parallel", 2), ("demo_hybrid", 1)])
def test_other_models_beat_the_unigram_entropy(tmp_path, experiment, processes):
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / "texts" / f"{name}.py").write_text("for line in text:\n    print(line)\n" * 100)
    quick = ["trainer.max_steps=60", "optim.lr=0.02", "optim.warmup_steps=5", "data.batch_size=4"]
    settings = [f"experiment={experiment}", f"data.path={tmp_path / 'texts'}", *quick, f"trainer.devices={processes}"]
    status, _, err = run(lightning(*settings), tmp_path)
    assert status == 0, err
    result = json.loads(only(tmp_path.glob("outputs/*/runs/*/summary.json")).read_text())
    assert result["processes"] == processes
    assert result["val_loss"] < 0.8 * result["unigram_entropy"]


@pytest.mark.slow
def test_commands_of_the_documentation(tmp_path):
    assert set(README_COMMANDS) <= set(PAGE_COMMANDS)
    assert len(PAGE_COMMANDS) >= 4
    checkpoint = tmp_path / "checkpoint"
    for command in PAGE_COMMANDS:
        if "lightning_memo.export" in command:
            last = max((tmp_path / "outputs" / "train" / "runs").glob("*/checkpoints/last.ckpt"))
            checkpoint.symlink_to(last)
            words = command.replace("CHECKPOINT", str(checkpoint)).split()
        else:
            # A resumed run needs further steps.
            steps = ["trainer.max_steps=7"] if "ckpt_path=last" in command else []
            words = [*command.split(), *TINY_RUN, *WITHOUT_REPORT, *steps]
        status, _, err = run(words, tmp_path)
        assert status == 0, f"{command}\n{err}"
    assert (tmp_path / "FOLDER" / "config.json").is_file()
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/*/runs/*/summary.json")]
    assert [result["processes"] for result in runs] == [2] * len(runs)
    assert len(runs) == sum("lightning_memo.train" in command for command in PAGE_COMMANDS)
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "FOLDER", "checkpoint"}


def test_all_parallel_experiments_are_on_the_page():
    assert PARALLEL_EXPERIMENTS
    for name in PARALLEL_EXPERIMENTS:
        assert any(f"experiment={name}" in command for command in PAGE_COMMANDS), name


ONE_HEAD = ["model.config.num_attention_heads=1", "model.config.num_key_value_heads=1"]


@pytest.mark.slow
def test_a_mistake_of_all_is_told_once(tmp_path):
    ended, _, err = run(lightning("strategy.tensor_parallel_size=2", *ONE_HEAD), tmp_path)
    assert ended == 2
    assert "tensor_parallel_size=2 does not divide num_attention_heads=1" in only(errors(err))


@pytest.mark.slow
@pytest.mark.parametrize(("start", "status"), [(torchrun, 1), (lightning, 2)])
def test_a_process_that_fails_alone_ends_the_others(tmp_path, start, status):
    (tmp_path / "text0").mkdir()
    for name in "abc":
        (tmp_path / "text0" / f"{name}.py").write_text("for line in text:\n    print(line)\n" * 100)
    # The other process waits for up to half an hour for this one to join.
    ended, _, err = run(start("data.path=text${oc.env:LOCAL_RANK,0}", module=HASTY_MODULE), tmp_path)
    assert ended == status  # torchrun's own is always 1
    assert "data.path=text1: no such file or folder" in only(errors(err))


DIES = """
import os, signal
from lightning_memo.models.causal_lm import CausalLM
from lightning_memo.train import main

step = CausalLM.training_step

def dies(self, batch, batch_idx):
    if os.environ["RANK"] == "1" and batch_idx == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, batch_idx)

CausalLM.training_step = dies
main()
"""


@pytest.mark.slow
def test_a_process_that_lost_another_says_so_in_one_line(tmp_path):
    """They are started without torchrun, which would end the second one at once."""
    (tmp_path / "dies.py").write_text(DIES)
    command = ["python", "dies.py", *TINY_RUN, *WITHOUT_REPORT, "trainer.devices=2"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [environment() | place | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    to_one = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, cwd=tmp_path, env=env, **to_one) for env in ranks]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL], said
    assert said[0].count("lost another process of the run, which ended or did not answer in time: look for") == 1
    assert "Traceback" not in said[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.context_parallel_size=3"], "context_parallel_size=3 does not divide"),
        (["strategy.zero_stage=4"], "zero_stage=4"),
        (
            ["data.max_bytes=25000", "data.seq_len=1000", "data.batch_size=10"],
            "data.batch_size=10 on 2 data-parallel processes: the training",
        ),
    ],
)
def test_mistakes_are_found_before_other_processes_start(train, overrides, message):
    status, _, err = train("trainer.devices=2", *overrides)
    assert status == 2
    assert message in only(errors(err))
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.devices=1"], "= 1 processes, but 2 were started; set trainer.devices"),
        (["-m", "trainer.devices=2", "data.seq_len=16,32"], "-m: start a sweep as one process, without torchrun"),
    ],
)
def test_mistakes_under_torchrun(train, monkeypatch, tmp_path, overrides, message):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    status, _, err = train(*overrides)
    assert status == 2
    assert message in only(errors(err))
    assert not list(tmp_path.glob("outputs/*/sweeps"))


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"])
def test_only_the_first_process_has_a_folder(monkeypatch, name):
    given = ["data.seq_len=16", "hydra.run.dir=mine"]
    monkeypatch.setenv(name, "0")
    assert is_rank_zero()
    assert arguments_of_process(given) == given
    monkeypatch.setenv(name, "1")
    assert not is_rank_zero()
    assert arguments_of_process(given) == [*given, "hydra.output_subdir=null", "hydra/job_logging=stdout"]
    assert "hydra.run.dir=." in arguments_of_process([])


def test_a_sweep_in_one_process_of_torchrun_is_allowed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert arguments_of_process(["-m", "data.seq_len=16,32"]) == ["-m", "data.seq_len=16,32"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SweepRefused):
        arguments_of_process(["--multirun", "data.seq_len=16,32"])


SECOND_PROCESS = """
from lightning_memo.cli.processes import computed_on_rank_zero
try:
    print(computed_on_rank_zero(lambda: "own"))
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["result", "error", "pickle", "not a document"])
def test_a_result_in_the_store_of_the_rendezvous_runs_no_code(tmp_path, sent):
    """Whoever reaches the port can write to the store."""
    touched = tmp_path / "touched"
    written = {
        "result": b'{"result": [null, "last.ckpt"]}',
        "error": b'{"error": "no such checkpoint"}',
        "pickle": pickle.dumps(Touches(str(touched))),
        "not a document": b"{",
    }[sent]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("lightning_memo/result", written)
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    done = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS],
        env={**os.environ, **ranks, **address, "TORCHELASTIC_RUN_ID": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert not touched.exists()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[None, 'last.ckpt']" if sent == "result" else "refused: ")
