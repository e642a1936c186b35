"""Lightning's own command line builds the strategy from a YAML file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from support.samples.documents import TEXTS
from support.samples.models import TINY

from lightning_memo import MemoStrategy
from lightning_memo.data import DocumentsDataModule
from lightning_memo.models import CausalLM

STRATEGY = {
    "class_path": "lightning_memo.MemoStrategy",
    "init_args": {"alpha": 0.5, "host_memory": "1GiB", "slice_tokens": 16},
}


def run(folder: Path, strategy: object, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> LightningCLI:
    """`fit` with what a user's file says."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    Path("documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {
        "trainer": {"accelerator": "cpu", "max_steps": 2, "limit_val_batches": 1, "strategy": strategy, **quiet},
        "model": {"model": {"config": TINY | {"vocab_size": 257}}, "lr": 1e-3},
        "data": {"path": "documents.jsonl", "seq_len": 48, "val_fraction": 0.2},
    }
    Path("fit.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config=fit.yaml", *arguments])
    return LightningCLI(CausalLM, DocumentsDataModule, save_config_callback=None)


@pytest.mark.slow
def test_the_strategy_comes_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = run(tmp_path, STRATEGY, monkeypatch, "--trainer.strategy.init_args.alpha=0.25")
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MemoStrategy)
    assert (strategy.config.alpha, strategy.config.host_memory) == (0.25, "1GiB")
    assert strategy.plan.swap.alpha == 0.25 and not strategy.plan.swap.plain
    assert cli.trainer.global_step == 2


def test_a_wrong_setting_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"alpha=2.0 is not a fraction of the tokens: give a number from 0.0 to 1.0"):
        run(tmp_path, STRATEGY, monkeypatch, "--trainer.strategy.init_args.alpha=2")
