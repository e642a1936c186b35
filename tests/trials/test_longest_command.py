"""The search for the longest sequence, with trials in a process that may run out of memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import LightningModule
from support.paths import ROOT
from support.trainer_harness import LanguageModel, shorten_measurements
from torch import nn

from lightning_memo import MemoStrategy
from lightning_memo.cli.build_run import build_strategy, module_settings
from lightning_memo.cli.hydra_command import config_dir
from lightning_memo.longest import main
from lightning_memo.trials import longest_sequence as find
from lightning_memo.trials.longest_sequence import LengthSearch
from lightning_memo.trials.training_trial import Attempt, RandomTokens, Trial, TrialProcess

TRAINER = {"accelerator": "cpu", "devices": 1}
BUDGET = {"device_memory": 1_200_000, "alpha": 0.0}
WORDS = 64
PAGE = (ROOT / "docs" / "long_sequences.md").read_text()
COMMANDS = re.findall(r"^python -m lightning_memo\.longest ?(.*)$", PAGE, re.MULTILINE)


def build() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=WORDS,
        use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch_with_accidents(tokens):
    if tokens == 64:
        torch.ones(2**29)  # 2 GiB
    if tokens == 80:
        os.kill(os.getpid(), signal.SIGKILL)
    if tokens == 96:
        raise KeyError("a bug")
    return RandomTokens(vocabulary=WORDS)(tokens)


def trial(**settings):
    batch_of, module = RandomTokens(vocabulary=WORDS), LanguageModel(build)
    return Trial(
        **{
            "strategy_factory": MemoStrategy,
            "module": module,
            "batch_of": batch_of,
            "trainer": TRAINER,
            "steps": 2,
            "settings": {},
            **settings,
        }
    )


@pytest.mark.slow
def test_attempts_that_run_out_of_memory_are_survived():
    with TrialProcess(trial(batch_of=batch_with_accidents), memory_bytes=2**30) as attempt:
        refused, killed = attempt(64), attempt(80)
        assert not refused.fits
        assert "can't allocate memory" in refused.reason
        assert not killed.fits
        assert "SIGKILL" in killed.reason
        with pytest.raises(RuntimeError, match="a bug"):
            attempt(96)
        assert attempt(32).fits


ENDLESS = """
import time
from lightning_memo.trials.training_trial import TrialProcess
attempt = TrialProcess(time.sleep, memory_bytes=None)
attempt._start()
print(attempt._process.pid, attempt._folder.name, flush=True)
attempt(3600)
"""


def wait_for(happened):
    for _ in range(600):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it has not happened in a minute")


def alive(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


@pytest.mark.slow
def test_an_attempt_ends_with_the_process_that_waits_for_it():
    waiting = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True)
    process, folder = waiting.stdout.readline().split()
    assert alive(int(process)) and Path(folder).is_dir()
    waiting.kill()
    waiting.communicate()
    wait_for(lambda: not alive(int(process)))
    assert not Path(folder).exists()


@pytest.mark.slow
def test_the_search_finds_what_trying_all_lengths_finds(monkeypatch):
    shorten_measurements(monkeypatch)
    attempt = trial(settings=BUDGET)
    search = LengthSearch(32, 256, 32)
    while (tokens := search.next_tokens()) is not None:
        search.add(attempt(tokens))
    known = {made.tokens: made for made in search.attempts}
    scan = [known.get(tokens) or attempt(tokens) for tokens in range(32, 257, 32)]
    assert search.longest.tokens == max(made.tokens for made in scan if made.fits)
    assert 32 < search.longest.tokens < 256
    assert [made.fits for made in scan] == sorted((made.fits for made in scan), reverse=True)
    assert "more than device_memory=1.1 MiB" in scan[-1].reason


@pytest.mark.slow
def test_a_search_leaves_the_module_and_the_random_state_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module, file = LanguageModel(build), tmp_path / "folder" / "longest.json"
    weights, random_state = [p.clone() for p in module.parameters()], torch.get_rng_state()
    arguments = {"low": 32, "high": 64, "multiple_of": 32, "steps_per_trial": 2, "results": file, **TRAINER}
    assert MemoStrategy(**BUDGET).max_sequence_length(module, **arguments) == 64
    assert all(torch.equal(p, w) for p, w in zip(module.parameters(), weights, strict=True))
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert list(tmp_path.rglob("*")) == [file.parent, file]
    content = json.loads(file.read_text())
    assert (content["longest"], content["finished"]) == (64, True)
    assert [attempt["tokens"] for attempt in content["attempts"]] == [32, 64]
    out = capsys.readouterr().out
    assert "64 tokens: fits" in out
    assert "planned" in out

    # All attempts are known, so nothing is tried.
    monkeypatch.setattr(TrialProcess, "__call__", None)
    assert MemoStrategy(**BUDGET).max_sequence_length(module, **arguments, resume=True) == 64
    with pytest.raises(ValueError, match="used another strategy: start a new search"):
        MemoStrategy().max_sequence_length(module, **arguments, resume=True)


def test_results_that_cannot_be_written_are_told_before_the_first_attempt(monkeypatch, tmp_path):
    monkeypatch.setattr(find, "TrialProcess", lambda *_: contextlib.nullcontext(process))
    process = FakeProcess()
    with pytest.raises(OSError, match="exists and is not a regular file"):
        MemoStrategy().max_sequence_length(NoTokens(), build, low=1024, high=2048, results=tmp_path, **TRAINER)
    assert process.tried == []


def test_memory_is_not_planned_in_trials(monkeypatch):
    settings = {}

    def tried(trial, *_):
        settings.update(trial.settings)
        return contextlib.nullcontext(FakeProcess())

    monkeypatch.setattr(find, "TrialProcess", tried)
    MemoStrategy(plan_memory=True).max_sequence_length(NoTokens(), build, low=100, high=300, multiple_of=100, **TRAINER)
    assert settings["plan_memory"] is False


def test_a_search_goes_on_with_another_logger(monkeypatch, tmp_path):
    monkeypatch.setattr(find, "TrialProcess", lambda *_: contextlib.nullcontext(FakeProcess()))
    arguments = {"low": 100, "high": 1000, "multiple_of": 100, "results": tmp_path / "a.json", **TRAINER}
    assert MemoStrategy().max_sequence_length(NoTokens(), build, **arguments) == 300
    arguments |= {"resume": True, "enable_progress_bar": True, "max_steps": 7}
    assert MemoStrategy().max_sequence_length(NoTokens(), build, **arguments, logger=True) == 300
    with pytest.raises(ValueError, match="used another trainer"):
        MemoStrategy().max_sequence_length(NoTokens(), build, **arguments, precision="bf16-true")


class FakeProcess:
    """Decides by a rule whether lengths fit, and is interrupted at one of them."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.tried: list[int] = []
        self._interrupted_at = interrupted_at

    def __call__(self, tokens: int) -> Attempt:
        if tokens == self._interrupted_at:
            raise KeyboardInterrupt
        self.tried.append(tokens)
        return Attempt(tokens=tokens, fits=tokens <= 300)


def test_an_interrupted_search_goes_on(monkeypatch, tmp_path):
    def search(process: FakeProcess) -> int:
        monkeypatch.setattr(find, "TrialProcess", lambda *_: contextlib.nullcontext(process))
        return MemoStrategy().max_sequence_length(
            NoTokens(), build, low=100, high=1000, multiple_of=100, results=tmp_path / "a.json", resume=True, **TRAINER
        )

    with pytest.raises(KeyboardInterrupt):
        search(interrupted := FakeProcess(interrupted_at=1000))
    assert interrupted.tried == [100, 200]
    content = json.loads((tmp_path / "a.json").read_text())
    assert (content["longest"], content["finished"]) == (200, False)
    assert search(second := FakeProcess()) == 300
    assert not {100, 200} & set(second.tried)


class NoTokens(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (NoTokens, {}, "NoTokens holds no Hugging Face model with a vocabulary"),
        (NoTokens, {"batch_of": lambda tokens: None}, "module or batch_of cannot be pickled"),
        (NoTokens, {"batch_of": build, "low": 10, "high": 5}, "high=5 is below low=10"),
        (NoTokens, {"batch_of": build, "devices": 2}, "searched in one process"),
        (NoTokens, {"batch_of": build, "steps_per_trial": 1}, "steps_per_trial=1: give 2 or more"),
        (
            NoTokens,
            {"batch_of": build, "precison": 32},
            "precison: not an argument of the search or of Lightning's Trainer",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(module, arguments, message):
    with pytest.raises(ValueError, match=message) as told:
        MemoStrategy().max_sequence_length(module(), **{"accelerator": "cpu", **arguments})
    assert "\n" not in str(told.value)


def command(monkeypatch, folder, *overrides):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    GlobalHydra.instance().clear()
    sizes = "hidden_size=32 intermediate_size=64 num_hidden_layers=3 num_attention_heads=2 num_key_value_heads=2"
    tiny = [f"model.config.{size}" for size in sizes.split()] + ["trainer.accelerator=cpu", "steps_per_trial=2"]
    monkeypatch.setattr(sys, "argv", ["longest", *tiny, *overrides])
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path, capfd):
    lengths = ["low=32", "high=96", "multiple_of=32", "strategy.slice_tokens=32"]
    assert command(monkeypatch, tmp_path, *lengths) == 0
    out = capfd.readouterr().out
    assert "longest sequence: at least 96 tokens, the most that high=96 allows; for more, raise high" in out
    assert json.loads((tmp_path / "outputs/longest/longest.json").read_text())["longest"] == 96
    # Nothing fits any more.
    assert command(monkeypatch, tmp_path, *lengths, "strategy.device_memory=512KiB") == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: not even low=32 tokens fit (a step needs")


def test_commands_of_the_docs_are_understood():
    assert len(COMMANDS) >= 2
    for arguments in COMMANDS:
        with initialize_config_dir(config_dir(), version_base="1.3"):
            cfg = compose("longest", arguments.split())
        assert isinstance(build_strategy(cfg.strategy), MemoStrategy)
        assert module_settings(cfg)["model"]["config"]
        assert LengthSearch(cfg.low, cfg.high, cfg.multiple_of).next_tokens() == cfg.low
