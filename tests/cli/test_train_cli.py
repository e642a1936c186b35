import csv
import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.commands import MODULE, run
from support.disks import mounted
from support.markers.slow import slow_if
from support.paths import ROOT

from lightning_memo import __version__
from lightning_memo import train as command
from lightning_memo.cli import step_stats
from lightning_memo.cli.hydra_command import command_error_message, config_dir
from lightning_memo.utils.files import replacing

EXPERIMENTS = sorted(path.stem for path in Path(config_dir(), "experiment").glob("demo*.yaml"))  # on a CPU
EXPERIMENTS = [name for name in EXPERIMENTS if "parallel" not in name]  # test_train_processes.py runs those
PAGES = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/command_line.md"))
FOUND = set(re.findall(r"^python -m lightning_memo\.train ?(.*)$", PAGES, re.MULTILINE))
COMMANDS = sorted(command for command in FOUND if "my-model" not in command)  # a placeholder


def only(paths):
    (path,) = paths
    return path


def summary(folder):
    return json.loads(only(folder.glob("outputs/*/runs/*/summary.json")).read_text())


def metrics(run, name):
    with (run / "csv" / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments(train, tmp_path, experiment):
    status, out, err = train(f"experiment={experiment}", "strategy.device_memory=null")
    assert status == 0, err
    assert summary(tmp_path)["status"] == "ok"
    assert "unigram entropy of the text" in out


def test_commands_of_the_documentation_are_found():
    assert len(COMMANDS) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_of_the_documentation(train, tmp_path, arguments):
    for name in ("a.md", "b.md", "c.md"):
        (tmp_path / name).write_text("text\n" * 800)
    if "ckpt_path=last" in arguments:
        assert train("strategy=plain")[0] == 0
    # The tiny settings replace the number of steps and the sequence length; a sweep keeps the number of its jobs.
    short = {"trainer.max_steps=400": "trainer.max_steps=7", "data.seq_len=512,1024,2048": "data.seq_len=16,24,32"}
    overrides = [short.get(o, o) for o in arguments.split() if o != "data.seq_len=512"]
    status, _, err = train(*overrides)
    assert status == 0, err


def test_summary_and_files_of_a_run(train, tmp_path):
    status, out, err = train("strategy=memo", "strategy.alpha=0.5", "trainer.max_steps=6", report=True)
    assert status == 0, err
    run = only(tmp_path.glob("outputs/train/runs/*"))
    result = summary(tmp_path)
    assert result["alpha"] == pytest.approx(0.5, abs=0.1)
    assert result["host_bytes"] > 0
    assert result["tokens_per_second"] == pytest.approx(result["seq_len"] / result["step_seconds"])
    assert result["step_memory_bytes"] > 0
    assert result["val_loss"] > 0
    assert "trainer.max_steps=6" in result["overrides"]
    assert f"unigram entropy of the text {result['unigram_entropy']:.3f}" in out
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert list(run.glob("tensorboard/events*"))
    assert (run / "csv" / "report.html").exists()
    losses = list(metrics(run, "train_loss").values())
    assert result["train_loss"] == pytest.approx(sum(losses) / 6)
    assert not list(tmp_path.glob("**/.*.json"))


@pytest.mark.slow
def test_comparison_table(train):
    status, out, err = train("strategy=full_recompute", "compare=true")
    assert status == 0, err
    table = out[out.index("Comparison") :]
    assert "plain" in table
    assert "this run, alpha 0.00" in table


def test_sigterm_in_the_comparison_is_no_success(train, monkeypatch):
    class Terminated(command.CausalLM):
        def training_step(self, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(step_stats, "CausalLM", Terminated)
    # Lightning's exception has no status, which Python treats as 0.
    assert train("strategy=plain", "compare=true")[0] == 128 + signal.SIGTERM


@pytest.mark.slow
def test_learning_beats_the_unigram_entropy(train, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.py").write_text("for line in text:\n    print(line)\n" * 100)
    quick = ["trainer.max_steps=60", "optim.lr=0.02", "optim.warmup_steps=5", "data.batch_size=4"]
    assert train("strategy=plain", f"data.path={tmp_path}", *quick)[0] == 0
    result = summary(tmp_path)
    assert result["val_loss"] < 0.8 * result["unigram_entropy"]


@pytest.mark.slow
def test_resuming_the_newest_run(train, tmp_path):
    settings = ["strategy=plain", "callbacks.checkpoint.every_n_train_steps=2", "callbacks.checkpoint.save_top_k=-1"]
    assert train(*settings, "trainer.max_steps=6", "name=whole")[0] == 0
    whole = only(tmp_path.glob("outputs/whole/runs/*"))
    middle = whole / "checkpoints" / "step-2.ckpt"
    status, _, err = train(*settings, "trainer.max_steps=6", "name=part", f"ckpt_path={middle}")
    assert status == 0, err
    part = only(tmp_path.glob("outputs/part/runs/*"))
    for name in ("train_loss", "lr", "tokens"):
        rest = metrics(part, name)
        assert set(rest) == {2, 3, 4, 5}
        assert rest == {step: value for step, value in metrics(whole, name).items() if step >= 2}
    means = [json.loads((run / "summary.json").read_text())["train_loss"] for run in (part, whole)]
    assert means[0] == pytest.approx(means[1], rel=1e-6)  # the losses before the checkpoint count
    assert train(*settings, "trainer.max_steps=8", "name=part", "ckpt_path=last", "hydra.run.dir=again")[0] == 0
    assert set(metrics(tmp_path / "again", "train_loss")) == {6, 7}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.precision=16-mixed"],
            "trainer.precision=16-mixed: give one of 32-true, 64-true, bf16-true, bf16-mixed",
        ),
        (["trainer.precision=8"], "trainer.precision=8: give one of"),
        (["model=nothing"], "model=nothing: no such model; give one of default"),
        (["nothing=1"], "nothing: no such setting; --help lists all"),
        (["data.seqlen=16"], "data.seqlen: no such setting; did you mean data.seq_len?"),
        (["seq_len=16"], "seq_len: no such setting; did you mean data.seq_len?"),
        (
            ["strategy.context_parallel_method=usp"],
            "strategy.context_parallel_method: no setting any more: set ulysses_size",
        ),
        (["zero_stage=1"], "zero_stage: no such setting; did you mean parallel.zero_stage or strategy.zero_stage?"),
        (["data=documents"], "data.max_bytes: the chosen data has no such setting; data=text has it"),
        (["+datum=1"], "datum: no such setting; did you mean data"),
        (["demo"], "demo: give SETTING=VALUE"),
        (["40 gigs"], "40 gigs: give SETTING=VALUE"),
        (
            ['name="40 gigs'],
            "cannot be read; a value with special characters needs two kinds of quotes: 'name=\"40 gigs\"'",
        ),
        (["data.path=(a)"], "data.path=(a): cannot be read; a value with special characters"),
        (["data.seq_len=["], "data.seq_len=[: cannot be read"),
        (["+trainer.nothing=1"], "trainer: Trainer.__init__() got an unexpected keyword argument 'nothing'"),
        (["strategy.alpha=2"], "strategy.alpha=2"),
        (["trainer.max_steps=abc"], "trainer.max_steps=abc is text: give a number"),
        (["trainer.benchmark=true"], "trainer.benchmark: no setting of its own, but an argument of Trainer: write +"),
        (["+trainer.benchmark=maybe"], "trainer.benchmark=maybe is text: give true or false"),
        (["model.lora=true"], "model.lora=True is no group of settings: give model.lora.r"),
        (["strategy=1"], "strategy=1: no such strategy; give one of fpdt, full_recompute"),
        (["data.path=/nowhere"], "data.path=/nowhere: no such file or folder"),
        (["data.seq_len=1"], "data.seq_len=1: give 2 or more"),
        (["data.seq_len=lots"], "data.seq_len='lots' is not a number of tokens"),
        (
            ["data.seq_len=90K"],
            "data.seq_len=92160 x batch_size=1: one batch needs 92160 tokens, the",
        ),
        (["data.suffix=.nothing"], "data.path="),
        (["model.path=/nowhere", "data.tokenizer=/nowhere"], "error: model.path=/nowhere: no config.json"),
        (["model.config.vocab_size=100"], "data.tokenizer: its ids go up to 256, but the model has embeddings for 100"),
        (["ckpt_path=/nowhere"], "ckpt_path=/nowhere: no such checkpoint"),
        (["strategy.plan=/nowhere.json"], "/nowhere.json"),
        (["ckpt_path=last"], "ckpt_path=last: no checkpoint in outputs/train/runs"),
        (
            ["paths.root=/dev/null/runs"],
            " (Not a directory): give a folder that can be written to as paths.root=FOLDER",
        ),
        (["-m", "model=nothing,llama_tiny"], "model=nothing: no such model; give one of default"),
    ],
)
def test_mistakes_end_with_one_line(train, overrides, message):
    status, _, err = train(*overrides)
    assert status == 2
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in err


@slow_if(lambda size, failing: size == "36k")
@pytest.mark.parametrize(
    ("size", "failing"),
    [("4k", "{root}"), ("28k", "{root}/train/runs/"), ("36k", "{root}/train/runs/")],
    ids=["settings", "logger", "checkpoint"],
)
def test_a_full_disk_ends_with_one_line(train, tmp_path, size, failing):
    """It is full when Hydra writes the settings, a logger its files, or the run a checkpoint."""
    with mounted(tmp_path / "disk", size) as disk:
        status, _, err = train(f"paths.root={disk}", "callbacks.checkpoint.every_n_train_steps=2")
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert status == 2 and "Traceback" not in err and len(errors) == 1
        assert errors[0].startswith(f"error: {failing.format(root=disk)}")
        assert (
            " cannot be written (No space left on device): free space there, or give a folder on another" in errors[0]
        )
        assert not list(disk.glob("**/*.ckpt"))


def test_a_model_with_a_tokenizer_gets_no_bytes(train, tmp_path):
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text('{"model_type": "llama"}')
    status, _, err = train(f"model.path={tmp_path}")
    assert status == 2
    assert f"error: data.tokenizer=None: that is one token per byte, and the model of {tmp_path} has" in err


def test_an_incomplete_checkpoint_is_skipped(train, tmp_path):
    file = tmp_path / "outputs/train/runs/killed/checkpoints/last.ckpt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"PK the beginning of an archive")
    with pytest.warns(UserWarning, match=f"{re.escape(str(file))}: incomplete checkpoint, skipped$"):
        status, _, err = train("ckpt_path=last")
    assert status == 2
    assert "error: ckpt_path=last: no checkpoint in outputs/train/runs" in err


@pytest.mark.slow
def test_checkpoint_of_other_data_is_refused(train, tmp_path):
    assert train("strategy=plain")[0] == 0
    status, _, err = train("strategy=plain", "ckpt_path=last", "data.seq_len=16")
    assert status == 2
    assert "resume with the same data settings" in err


@pytest.mark.slow
def test_checkpoint_of_another_model_is_refused(train, tmp_path):
    assert train("strategy=plain")[0] == 0
    status, _, err = train("ckpt_path=last", "model.config.hidden_size=32")
    assert status == 2
    line = only(line for line in err.splitlines() if line.startswith("error: "))
    assert "last.ckpt: of another model: model.model.embed_tokens.weight is [264, 16] in the checkpoint" in line
    assert "size mismatch" not in err and "Traceback" not in err


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug")])
def test_bugs_keep_their_tracebacks(train, monkeypatch, error):
    class Broken(command.CausalLM):
        def training_step(self, batch, batch_idx):
            raise error

    monkeypatch.setattr(command, "CausalLM", Broken)
    with pytest.raises(type(error), match="a bug") as caught:
        train("strategy=plain")
    assert command_error_message(caught.value) is None


def test_settings_that_plain_training_ignores_warn(train):
    with pytest.warns(UserWarning, match=r"strategy=auto .*ignores strategy.device_memory"):
        assert train("strategy=plain", "+strategy.device_memory=1GiB")[0] == 0


@pytest.mark.slow
def test_mistake_in_a_process_of_its_own(tmp_path):
    status, out, err = run(["python", *MODULE, "data.path=/nowhere"], tmp_path)
    assert status == 2
    assert err.splitlines()[-1].startswith("error: data.path=/nowhere: no such file or folder")
    assert out == ""


def test_interrupted_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    with replacing(path) as new:
        new.write_text("old")

    def interrupted():
        with replacing(path) as new:
            new.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.read_text() for p in path.parent.iterdir()] == ["old"]


def test_the_version_is_that_of_the_package(in_process):
    status, out, _ = in_process(command.main, "--version")
    assert (status, out) == (0, f"lightning-memo {__version__}\n")
