"""Experiments that no test machine can run: that they compose, and are accepted by all that reads them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from test_context_extension import SAVED
from test_documents_data import TEXTS

from lightning_memo.assemble import build_strategy
from lightning_memo.cli import config_dir
from lightning_memo.estimate.command import answer
from lightning_memo.estimate.settings import read_request
from lightning_memo.models import ModelConfig, build_model, load_hf_config
from lightning_memo.parallel.sizes import resolve_sizes

PAPER = Path(__file__).parent / "data" / "papers" / "memo_app_table7_memo.csv"


def composed(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return compose(name, list(overrides))


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
    assert cfg.data.seq_len == int(cell["seq_k"]) * 1024 and config.alpha == float(cell["alpha"])
    assert cfg.trainer.accumulate_grad_batches * sizes.data * cfg.data.batch_size == 16
    assert load_hf_config(ModelConfig(**OmegaConf.to_container(cfg.model))).max_position_embeddings >= cfg.data.seq_len
    parallel = {"tp": sizes.tensor, "cp": sizes.context, "dp": sizes.data, "zero_stage": cfg.strategy.zero_stage}
    forced = [f"parallel.{name}={size}" for name, size in parallel.items()]
    asked = composed("estimate", "model=gpt_7b", "cluster=a800", f"seq_len={cfg.data.seq_len}", *forced)
    settings: dict[str, Any] = OmegaConf.to_container(asked)
    _, ranking = answer(read_request(settings, "gpt_7b"), progress=False)
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
    [("data.path=a.txt", "give model.config .* or model.path"), ("model.path=.", "data.path: give")],
)
def test_finetuning_without_model_or_documents_is_refused(given: str, message: str) -> None:
    cfg = composed("train", "experiment=finetune_documents", given, "data.tokenizer=null")

    def start() -> None:
        ModelConfig(**OmegaConf.to_container(cfg.model, resolve=True))
        instantiate(cfg.data, seed=0).setup()

    with pytest.raises(ValueError, match=message):
        start()
