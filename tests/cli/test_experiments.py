"""Experiments that need GPUs are valid configurations, and run in small versions."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from support import commands
from support.commands import composed
from support.paths import REFERENCE, ROOT
from support.samples.documents import TEXTS
from support.samples.models import SAVED

from lightning_memo.cli.build_run import build_strategy
from lightning_memo.cli.hydra_command import config_dir
from lightning_memo.estimate.command import answer, read_settings
from lightning_memo.models import ModelConfig, build_model, load_hf_config
from lightning_memo.parallel.parallel_sizes import resolve_sizes
from lightning_memo.train import main

PAPER = REFERENCE / "papers" / "memo_app_table7_memo.csv"


def cells_of_the_paper() -> list[dict[str, str]]:
    with PAPER.open() as file:
        return [cell for cell in csv.DictReader(file) if cell["model"] == "7B" and cell["status"] == "ok"]


def name_of(cell: dict[str, str]) -> str:
    return "memo_7b_1m" if cell["seq_k"] == "1024" else f"memo_7b_{cell['seq_k']}k"


def test_every_length_of_the_paper_has_an_experiment() -> None:
    files = {path.stem for path in Path(config_dir(), "experiment").glob("memo_7b_*.yaml")}
    assert files == {name_of(cell) for cell in cells_of_the_paper()}


@pytest.mark.parametrize("cell", cells_of_the_paper(), ids=name_of)
def test_experiments_are_the_papers_settings_and_fit_its_machine(cell: dict[str, str]) -> None:
    cfg = composed("train", f"experiment={name_of(cell)}")
    config = build_strategy(cfg.strategy).config
    sizes = resolve_sizes(config, cfg.trainer.devices)
    assert [cfg.trainer.devices, sizes.tensor, sizes.context, sizes.data] == [
        int(cell[name]) for name in ("gpus", "TP", "CP", "DP")
    ]
    assert cfg.model.config.vocab_size == 50257, "GPT-2's"
    assert cfg.data.seq_len == int(cell["seq_k"]) * 1024 and config.alpha == float(cell["alpha"])
    assert cfg.trainer.accumulate_grad_batches * sizes.data * cfg.data.batch_size == 16
    assert load_hf_config(ModelConfig(**OmegaConf.to_container(cfg.model))).max_position_embeddings >= cfg.data.seq_len
    parallel = {"tp": sizes.tensor, "cp": sizes.context, "dp": sizes.data, "zero_stage": cfg.strategy.zero_stage}
    forced = [f"parallel.{name}={size}" for name, size in parallel.items()]
    asked = composed(
        "estimate", "model=gpt_7b", "cluster=a800", f"seq_len={cfg.data.seq_len}", "batch_size=16", *forced
    )
    settings: dict[str, Any] = OmegaConf.to_container(asked)
    _, ranking = answer(read_settings(settings, "gpt_7b"), progress=False)
    assert ranking.best.status == "ok"


def test_finetuning_takes_a_model_and_documents(tmp_path: Path) -> None:
    build_model(ModelConfig(config=SAVED)).save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text(TEXTS[0])
    cfg = composed("train", "experiment=finetune_documents", f"model.path={tmp_path}", "data.path=a.txt")
    model = load_hf_config(ModelConfig(**OmegaConf.to_container(cfg.model, resolve=True)))
    assert model.max_position_embeddings == cfg.data.seq_len == 131072
    assert model.rope_parameters["factor"] == 131072 / 32
    assert cfg.data.tokenizer == str(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [("data.path=a.txt", "give model.config .* or model.path"), ("model.path=.", "path: give the file or folder")],
)
def test_finetuning_without_model_or_documents_is_refused(given: str, message: str) -> None:
    cfg = composed("train", "experiment=finetune_documents", given, "data.tokenizer=null")

    def start() -> None:
        ModelConfig(**OmegaConf.to_container(cfg.model, resolve=True))
        instantiate(cfg.data, seed=0).setup()

    with pytest.raises(ValueError, match=message):
        start()


# ---- experiments run, small

TINY_RUN = (
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.limit_val_batches=1",
    "callbacks.progress_bar=null",
    *commands.WITHOUT_REPORT,
    "+trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
)
"""Nothing of what an experiment is about: where, how long, and what is shown."""

FINETUNING = ROOT / "docs" / "finetuning.md"


@pytest.fixture
def documents(tmp_path: Path) -> None:
    """The experiments in the commands of the documentation."""
    build_model(ModelConfig(config=SAVED | {"vocab_size": 264})).save_pretrained(tmp_path / "my-model")
    lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "documents.jsonl").write_text("".join(lines))


def losses(folder: Path) -> list[float]:
    (metrics,) = folder.glob("outputs/*/runs/*/csv/metrics.csv")
    with metrics.open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.mark.slow
@pytest.mark.usefixtures("documents")
@pytest.mark.parametrize("more", [[], ["data.streaming=true", "data.val_documents=6"]], ids=["whole", "streamed"])
def test_the_command_of_finetuning_runs(more: list[str], in_process: Any, tmp_path: Path) -> None:
    command, *_ = re.findall(r"^python -m lightning_memo\.train (experiment=.*)$", FINETUNING.read_text(), re.MULTILINE)
    status, _, err = in_process(main, *command.split(), *TINY_RUN, "data.tokenizer=null", "data.seq_len=64", *more)
    assert status == 0, err
    assert "knows" not in err, "positions are extended to the length of rows"
    # The uniform distribution over 264 tokens has 5.58 nats; two steps of LoRA change little.
    assert losses(tmp_path) == pytest.approx([5.58] * 2, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("cell", cells_of_the_paper(), ids=name_of)
def test_the_papers_experiments_run(cell: dict[str, str], tmp_path: Path) -> None:
    """Runs small versions in a process of their own, because ZeRO creates a process group."""
    small = {
        "data.seq_len": int(cell["seq_k"]) * 1024 // 8192,
        "data.path": commands.TEXT_FOLDER,
        "data.max_bytes": 40000,
        "model.config.hidden_size": 32,
        "model.config.intermediate_size": 64,
        "model.config.num_hidden_layers": 4,
        "model.config.num_attention_heads": 2,
        "model.config.vocab_size": 1024,
        "trainer.devices": 1,
        "trainer.accumulate_grad_batches": 4,
        "strategy.tensor_parallel_size": 1,
        "strategy.context_parallel_size": 1,
    }
    settings = [f"{name}={value}" for name, value in small.items()]
    command = ["python", "-m", "lightning_memo.train", f"experiment={name_of(cell)}", *TINY_RUN, *settings]
    status, _, err = commands.run(command, tmp_path)
    assert status == 0, err
    # The loss of the uniform distribution over the vocabulary.
    assert losses(tmp_path)[0] == pytest.approx(math.log(1024), abs=0.2)


@pytest.mark.slow
def test_the_terminal_is_not_told_what_pytorch_says_to_itself(tmp_path: Path) -> None:
    """Runs in a new interpreter, because PyTorch reads its logging settings at the start."""
    command = ["python", "-m", "lightning_memo.train", *commands.TINY_RUN, "data.seq_len=64"]
    status, out, err = commands.run(command, tmp_path, cold=True)
    assert status == 0, err
    assert "the first batch is profiled" in err + out
    assert not re.search("USDT|CPUAllocator|SyncActivity", err + out)


@pytest.mark.slow
def test_the_commands_of_sweeps_run(in_process: Any, tmp_path: Path) -> None:
    """Runs a sweep and continues it. The other commands of the page need GPUs or SLURM."""
    text = (FINETUNING.parent / "sweeps.md").read_text()
    found = re.findall(r"^python -m lightning_memo\.train -m (data.seq_len=.*)$", text, re.MULTILINE)
    assert len(found) == 2 and found[1] == f"{found[0]} sweep=last"
    for line in found:
        short = line.replace("512,1024,2048", "16,24,32").split()
        tiny = [setting for setting in commands.TINY_RUN if not setting.startswith("data.seq_len")]
        status, _, err = in_process(main, "-m", *tiny, *commands.WITHOUT_REPORT, *short)
        assert status == 0, err
        assert len(list(tmp_path.glob("outputs/train/sweeps/2*/[0-9]/summary.json"))) == 6
    assert len(list(tmp_path.glob("outputs/train/sweeps/2*"))) == 1, "the second one went on"
