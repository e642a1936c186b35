"""From the configuration to the objects of a run, with checks that name the setting to change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, OmegaConf

from lightning_memo.models import ModelConfig, load_hf_config

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


def module_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns the arguments of :class:`~lightning_memo.models.CausalLM`."""
    return {"model": plain_container(cfg.model), **plain_container(cfg.optim)}


def trainer_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns the arguments of Lightning's trainer that the configuration holds."""
    return plain_container(cfg.trainer)


def build_trainer(cfg: DictConfig, *callbacks: Callback) -> Trainer:
    """Returns the trainer with the configured strategy, loggers and callbacks, and with ``callbacks``.

    Raises:
        ValueError: The precision is not allowed.
    """
    _check_precision(cfg.trainer.precision)
    return instantiate(
        cfg.trainer,
        strategy=_build_strategy(cfg.strategy),
        callbacks=[*_build_group(cfg.callbacks), *callbacks],
        logger=_build_group(cfg.logger),
    )


def find_checkpoint(cfg: DictConfig) -> str | None:
    """Returns the checkpoint to resume from; ``last`` is the newest one of the runs of this name.

    Raises:
        ValueError: There is none.
    """
    if cfg.ckpt_path is None:
        return None
    if cfg.ckpt_path != "last":
        if not Path(cfg.ckpt_path).exists():
            raise ValueError(f"ckpt_path={cfg.ckpt_path}: no such checkpoint; give the path of one, or last")
        return str(cfg.ckpt_path)
    runs = Path(cfg.paths.root) / cfg.name / "runs"
    found = sorted(runs.glob("*/checkpoints/last*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"ckpt_path=last: no checkpoint in {runs}; give a path, or the name=... of an earlier run")
    return str(found[-1].resolve())


def check_vocabulary(model: Mapping[str, Any], vocab_size: int) -> None:
    """Refuses a model without embeddings for all tokens.

    Args:
        model: Fields of :class:`~lightning_memo.models.ModelConfig`.
        vocab_size: Of the tokenizer.

    Raises:
        ValueError: The model's vocabulary is smaller.
    """
    embeddings = load_hf_config(ModelConfig(**model)).get_text_config().vocab_size
    if vocab_size > embeddings:
        raise ValueError(
            f"data.tokenizer: it has {vocab_size} ids, but the model has embeddings for {embeddings};"
            " give the model's own tokenizer, or a larger model.config.vocab_size"
        )


def plain_container(cfg: DictConfig) -> dict[str, Any]:
    """Returns the resolved section as a dictionary, without Hydra's own keys."""
    container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items() if key != "_target_"}


def _build_strategy(cfg: DictConfig) -> Strategy | str:
    if "_target_" in cfg:
        return instantiate(cfg)
    ignored = sorted(set(cfg) - {"name"})
    if ignored:
        rank_zero_warn(f"strategy={cfg.name} is Lightning's own and ignores strategy.{', strategy.'.join(ignored)}.")
    return cfg.name


def _build_group(cfg: DictConfig) -> list[Any]:
    return [instantiate(item) for item in cfg.values() if item is not None]


def _check_precision(precision: Any) -> None:
    if precision in PRECISIONS or (precision == "16-mixed" and torch.cuda.is_available()):
        return
    hint = "; 16-mixed needs CUDA, take bf16-mixed" if precision == "16-mixed" else ""
    raise ValueError(f"trainer.precision={precision}: give one of {', '.join(PRECISIONS)}{hint}")
