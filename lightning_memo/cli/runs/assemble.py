"""From the configuration to the objects of a run, with checks that name the setting to change."""

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig

from lightning_memo.cli.hydra_command import plain_settings
from lightning_memo.cli.launch import started_processes
from lightning_memo.config import PRECISIONS
from lightning_memo.data import SequenceDataModule
from lightning_memo.parallel.parallel_sizes import resolve_sizes
from lightning_memo.strategy import MemoStrategy


def module_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns the arguments of :class:`~lightning_memo.models.CausalLM`."""
    return {"model": plain_settings(cfg.model), **plain_settings(cfg.optim)}


def trainer_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns the arguments of Lightning's trainer that the configuration holds."""
    return plain_settings(cfg.trainer)


def build_trainer(cfg: DictConfig, *callbacks: Callback) -> Trainer:
    """Returns the trainer with the configured strategy, loggers and callbacks, and with ``callbacks``.

    Raises:
        ValueError: The precision is not allowed, or there are more or fewer processes than the trainer's.
    """
    check_precision(cfg.trainer.precision)
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=build_strategy(cfg.strategy),
        callbacks=[*_build_group(cfg.callbacks), *callbacks],
        logger=_build_group(cfg.logger),
    )
    _check_started(trainer)
    return trainer


def count_processes(trainer: Trainer) -> int:
    """Returns how many processes train; those that Lightning has not started yet count."""
    return trainer.num_devices * trainer.num_nodes


def check_data(data: SequenceDataModule, trainer: Trainer) -> None:
    """Refuses a training text that does not give each data-parallel process a batch.

    Raises:
        ValueError: It is too short, or the processes cannot be divided as the strategy says.
    """
    processes = count_processes(trainer)
    strategy = trainer.strategy
    groups = resolve_sizes(strategy.config, processes).data if isinstance(strategy, MemoStrategy) else processes
    if data.train_sequences < data.batch_size * groups:
        raise ValueError(
            f"data.batch_size={data.batch_size} on {groups} data-parallel processes: the training text has "
            f"{data.train_sequences} sequences of data.seq_len={data.seq_len}; lower one, or give more text "
            f"({data.more_text})"
        )


def checkpoint_to_resume(cfg: DictConfig) -> str | None:
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
    found = newest_checkpoint(runs.glob("*/checkpoints/*.ckpt"))
    if found is None:
        raise ValueError(f"ckpt_path=last: no checkpoint in {runs}; give a path, or the name=... of an earlier run")
    return found


def newest_checkpoint(paths: Iterable[Path]) -> str | None:
    """Returns the newest complete checkpoint, if there is one.

    Args:
        paths: Files, folders of several processes, and links to them; a link leads nowhere if its run was killed while
            saving, and a file may be cut short.
    """
    complete = [path for path in paths if path.is_dir() or (path.exists() and zipfile.is_zipfile(path))]
    newest = max(complete, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else str(newest.resolve())


def build_strategy(cfg: DictConfig) -> Strategy | str:
    """Returns the configured strategy, or the name of one of Lightning's own."""
    if "_target_" in cfg:
        return instantiate(cfg)
    ignored = sorted(set(cfg) - {"name"})
    if ignored:
        rank_zero_warn(f"strategy={cfg.name} is Lightning's own and ignores strategy.{', strategy.'.join(ignored)}.")
    return cfg.name


def _build_group(cfg: DictConfig) -> list[Any]:
    return [instantiate(item) for item in cfg.values() if item is not None]


def check_precision(precision: Any) -> None:
    """Refuses a precision that the strategy does not know.

    Raises:
        ValueError: It is one.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"trainer.precision={precision}: give one of {', '.join(PRECISIONS)}")


def _check_started(trainer: Trainer) -> None:
    wanted, started = count_processes(trainer), started_processes()
    if started not in (None, wanted):
        raise ValueError(
            f"trainer.devices={trainer.num_devices} x trainer.num_nodes={trainer.num_nodes}: that is {wanted} "
            f"processes, and {started} were started; make trainer.devices those of a node, and trainer.num_nodes the "
            "nodes"
        )
