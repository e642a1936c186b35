"""A small module, its data, and a fit that records the losses, for tests of the strategy."""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from typing_extensions import override

from lightning_memo import MemoStrategy
from support.devices import ACCELERATOR
from support.families import FAMILIES, VOCABULARY, PlainBlock, PlainModel

BATCH, TOKENS = 2, 32
_QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


class LanguageModel(LightningModule):
    """A model of a family that records the loss of every training step. A fixed seed initialises its weights.

    Args:
        family: Name in `FAMILIES`, or a function that builds the model.
        in_configure_model: Whether `configure_model` builds the model instead of `__init__`.
        lr: Learning rate of AdamW.
    """

    def __init__(self, family: Any = "block_dropout", in_configure_model: bool = False, lr: float = 3e-3) -> None:
        super().__init__()
        self._build = FAMILIES[family].build if isinstance(family, str) else family
        self._lr = lr
        self.losses: list[float] = []
        self.model: nn.Module | None = None if in_configure_model else self._seeded_build()
        self._rng_state: Tensor | None = None

    def _seeded_build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # models are made on the CPU
            torch.manual_seed(0)
            return self._build()

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = self._seeded_build()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None
        return self.model(**batch).loss

    def keep(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.keep(self.loss(batch))

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    @override
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self._lr)

    # Lightning saves no random state. Without it, a resumed run with dropout would differ from the uninterrupted one.
    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng_state"] = torch.get_rng_state()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng_state = checkpoint["rng_state"]

    @override
    def on_train_start(self) -> None:
        if self._rng_state is not None:
            torch.set_rng_state(self._rng_state)
            self._rng_state = None


class Sequences(Dataset[dict[str, Tensor]]):
    """Random tokens. Every other token repeats the previous one, which gives the model a pattern to learn."""

    def __init__(self, count: int = 64, tokens: int = TOKENS) -> None:
        ids = torch.randint(0, VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(5))
        ids[:, 1::2] = ids[:, : tokens - tokens % 2 : 2]
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index].clone()}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same sequences, without a length."""

    def __init__(self, count: int = 64) -> None:
        self._sequences = Sequences(count)

    @override
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self._sequences[n] for n in range(len(self._sequences)))


class Shuffled(Sampler[int]):
    """A permutation seeded with the epoch (Lightning calls `set_epoch`), which resumes from a checkpoint."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.start = length, 0, 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        start, self.start = self.start, 0
        return iter(order[start:].tolist())


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """A shuffled loader that saves its position in checkpoints."""

    def __init__(self, sequences: Sequences) -> None:
        self._served = 0
        self._order = Shuffled(len(sequences))
        super().__init__(sequences, batch_size=BATCH, sampler=self._order, generator=torch.Generator())

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first = self._order.start // BATCH
        for self._served, batch in enumerate(super().__iter__(), first + 1):
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"served": self._served % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._served = state["served"]
        self._order.start = self._served * BATCH


def loader(count: int = 64, tokens: int = TOKENS, batch: int = BATCH) -> DataLoader[dict[str, Tensor]]:
    """Return a loader with batches in a fixed order."""
    return DataLoader(Sequences(count, tokens), batch_size=batch)


def batches(ready: Iterable[dict[str, Tensor]]) -> DataLoader[dict[str, Tensor]]:
    """Return a loader of ready-made batches."""
    return DataLoader(list(ready), batch_size=None)  # type: ignore[arg-type]


class SlotWatch(Callback):
    """Records the number of slots that the engine still holds after each batch."""

    def __init__(self) -> None:
        self.held: list[int] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.held.append(trainer.strategy.engine.slots_in_use)


@dataclass
class Result:
    """The result of a fit: the loss of every training batch, the trainer and the module."""

    losses: list[float]
    trainer: Trainer
    module: LanguageModel
    held: list[int] = field(default_factory=list)

    @property
    def plan(self) -> Any:
        return self.trainer.strategy.plan


def make_trainer(strategy: Any, **settings: Any) -> Trainer:
    """Return a trainer on the device of the tests, without progress bar, logger or checkpoints."""
    defaults = {"strategy": strategy, "accelerator": ACCELERATOR, "devices": 1, "max_steps": 4}
    return Trainer(**(defaults | _QUIET | settings))


def fit(
    strategy: Any,
    module: LightningModule | None = None,
    data: Iterable[Any] | None = None,
    val_data: Iterable[Any] | None = None,
    ckpt_path: Any = None,
    **settings: Any,
) -> Result:
    """Train from a fixed random state.

    Args:
        strategy: Strategy of the trainer.
        module: Module to train; a `LanguageModel` by default.
        data: Training batches; `loader()` by default.
        val_data: Validation batches, if any.
        ckpt_path: Checkpoint to resume from.
        settings: Arguments of `Trainer` (`max_steps` is 4 by default).
    """
    module = LanguageModel() if module is None else module
    watch = SlotWatch()
    if isinstance(strategy, MemoStrategy) or strategy == "memo":
        settings["callbacks"] = [watch, *settings.get("callbacks", ())]
    trainer = make_trainer(strategy, **settings)
    torch.manual_seed(1)
    trainer.fit(module, loader() if data is None else data, val_data, ckpt_path=ckpt_path, weights_only=False)
    return Result(module.losses, trainer, module, watch.held)


def plain(module: LightningModule | None = None, data: Iterable[Any] | None = None, **settings: Any) -> Result:
    """Run the same training without MemoStrategy."""
    return fit("auto", module, data, **settings)


@functools.cache
def plain_of(make: Callable[..., LightningModule] = LanguageModel, *arguments: Any, **settings: Any) -> Result:
    """Run `plain` on the module that `make(*arguments)` returns, once for all tests that compare with it."""
    return plain(make(*arguments), **settings)


def copy_threads() -> list[str]:
    """Return the names of the engine's running threads."""
    return [thread.name for thread in threading.enumerate() if thread.name in ("offload", "prefetch")]


def assert_usable_again() -> None:
    """Assert that training in this process works as if no failure had occurred."""
    gc.collect()
    assert copy_threads() == []
    assert fit(MemoStrategy(alpha=1.0), max_steps=2).losses == plain_of(max_steps=2).losses


def forwards(model: nn.Module) -> list[str]:
    """Return the names of the modules with a replaced `forward`."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def shorten_measurements(monkeypatch: Any) -> None:
    """Measure the copy bandwidth, a part of every profiled step, for a few milliseconds only."""
    monkeypatch.setattr("lightning_memo.profiler.measured_costs._BANDWIDTH_SECONDS", 0.005)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the messages of this package and of Lightning."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear()
    loggers = [logging.getLogger(name) for name in ("lightning_memo", "lightning.pytorch", "lightning.fabric")]
    for logger in loggers:
        logger.addHandler(ear)
    try:
        yield heard
    finally:
        for logger in loggers:
            logger.removeHandler(ear)


class Mixing(nn.Module):
    """A block that mixes tokens outside attention: it subtracts a mean over the sequence."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) - 0.1 * x.mean(1, keepdim=True)


def mixing_model() -> nn.Module:
    return PlainModel([Mixing(PlainBlock()) for _ in range(4)])
