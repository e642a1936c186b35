"""Builds the objects of a run from its configuration, with checks that name the setting to change."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args, get_type_hints

from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig

from lightning_memo.cli.hydra_command import plain_settings
from lightning_memo.cli.processes import started_processes
from lightning_memo.config import PRECISIONS
from lightning_memo.data import SequenceDataModule
from lightning_memo.parallel.parallel_sizes import resolve_sizes
from lightning_memo.strategy import MemoStrategy


def module_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns the arguments of :class:`~lightning_memo.models.CausalLM`."""
    return {"model": plain_settings(cfg.model), **plain_settings(cfg.optim)}


def trainer_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns the arguments of Lightning's trainer in the configuration."""
    return plain_settings(cfg.trainer)


def build_trainer(cfg: DictConfig, *callbacks: Callback) -> Trainer:
    """Returns the trainer with the configured strategy, loggers and callbacks, and additional ``callbacks``.

    Raises:
        ValueError: The precision is not allowed, or the number of started processes is not the trainer's.
    """
    check_precision(cfg.trainer.precision)
    _check_kinds(plain_settings(cfg.trainer))
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=build_strategy(cfg.strategy),
        callbacks=[*_build_group(cfg.callbacks), *callbacks],
        logger=_build_group(cfg.logger),
    )
    _check_started(trainer)
    return trainer


def _check_kinds(arguments: Mapping[str, Any]) -> None:
    """Refuse text where the trainer takes none, which it would compare with numbers.

    Raises:
        ValueError: An argument is text.
    """
    kinds = get_type_hints(Trainer.__init__)
    for name, value in arguments.items():
        allowed = get_args(kinds.get(name)) or (kinds.get(name, str),)
        if isinstance(value, str) and {bool, int, float}.issuperset(set(allowed) - {type(None)}):
            wanted = "true or false" if bool in allowed else "a number"
            raise ValueError(f"trainer.{name}={value} is text: give {wanted}")


def count_processes(trainer: Trainer) -> int:
    """Returns the number of training processes, including those that Lightning has not started yet."""
    return trainer.num_devices * trainer.num_nodes


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the messages of Lightning about a new trainer, which the trainer of the run has already printed."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def check_data(data: SequenceDataModule, trainer: Trainer) -> None:
    """Refuses a training text that is too short to give each data-parallel process a batch.

    Raises:
        ValueError: The text is too short, or the strategy's parallel sizes do not divide the number of processes.
    """
    processes = count_processes(trainer)
    strategy = trainer.strategy
    groups = resolve_sizes(strategy.config, processes).data if isinstance(strategy, MemoStrategy) else processes
    if data.train_sequences < data.batch_size * groups:
        raise ValueError(
            f"data.batch_size={data.batch_size} on {groups} data-parallel processes: the training text has only "
            f"{data.train_sequences} sequences of data.seq_len={data.seq_len}; lower data.batch_size or data.seq_len, "
            f"or give more text ({data.more_text})"
        )


def build_strategy(cfg: DictConfig) -> Strategy | str:
    """Returns the configured strategy, or the name of one of Lightning's strategies."""
    if "_target_" in cfg:
        strategy: Strategy = instantiate(cfg)
        return strategy
    ignored = sorted(set(cfg) - {"name"})
    if ignored:
        rank_zero_warn(
            f"strategy={cfg.name} is a strategy of Lightning and ignores strategy.{', strategy.'.join(ignored)}."
        )
    name: str = cfg.name
    return name


def _build_group(cfg: DictConfig) -> list[Any]:
    return [instantiate(item) for item in cfg.values() if item is not None]


def check_precision(precision: Any) -> None:
    """Refuses a precision that the strategy does not support.

    Raises:
        ValueError: The precision is not supported.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"trainer.precision={precision}: give one of {', '.join(PRECISIONS)}")


def _check_started(trainer: Trainer) -> None:
    wanted, started = count_processes(trainer), started_processes()
    if started not in (None, wanted):
        raise ValueError(
            f"trainer.devices={trainer.num_devices} x trainer.num_nodes={trainer.num_nodes} = {wanted} processes, but "
            f"{started} were started; set trainer.devices to the processes per node and "
            "trainer.num_nodes to the number of nodes"
        )
