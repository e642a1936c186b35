"""SIGTERM ends a step before it is over, and the run goes on from there as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.processes import forking
from support.trainer_harness import TOKENS, LanguageModel, Sequences, copy_threads, forwards, make_trainer
from torch import Tensor, nn

from lightning_memo import MemoStrategy
from lightning_memo.data.resumable_loader import SequenceDataset
from lightning_memo.data.sequence_module import Loaded, SequenceDataModule
from lightning_memo.profiler import measured_costs as costs

LAYERS = 6
STEPS = 6
MANY_LAYERS = 20
SIGNALLED = MANY_LAYERS + 15  # calls of layers: in the second step, as some calls of the first one are trials


class Act(torch.autograd.Function):
    """Calls a function in its forward, and another in its backward."""

    @staticmethod
    def forward(ctx, x, begin, end):
        ctx.end = end
        begin()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.end()
        return dx, None, None


class Watched(PlainBlock):
    """A block that calls `begin` before its forward and `end` in its backward."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(dropout=0.2)
        self._begin, self._end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        return Act.apply(super().forward(x), self._begin, self._end)


class Killed:
    """Layers of which one sends SIGTERM to its own process, in the forward or the backward of a step."""

    def __init__(self, place: str, step: int) -> None:
        self.place, self.step = place, step
        self.passed: list[tuple[str, int]] = []
        self.module = LanguageModel(self._build)

    def _build(self) -> nn.Module:
        blocks = []
        for number in range(LAYERS):
            calls = [self._at(place, number) for place in ("forward", "backward")]
            blocks.append(Watched(*calls))
        return PlainModel(blocks)

    def _at(self, place: str, number: int) -> Callable[[], None]:
        def call() -> None:
            if self.module.trainer.global_step == self.step:
                self.passed.append((place, number))
                if (place, number) == (self.place, 3):
                    os.kill(os.getpid(), signal.SIGTERM)

        return call


class Repeats(SequenceDataset):
    """The sequences of `trainer_harness`."""

    def __init__(self) -> None:
        self._sequences = Sequences(14)

    @property
    def tokens(self) -> int:
        return len(self) * TOKENS

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._sequences[index]


class Data(SequenceDataModule):
    def __init__(self) -> None:
        super().__init__(seq_len=TOKENS, batch_size=2, seed=3, num_workers=0)

    def load(self) -> Loaded:
        return Loaded(Repeats(), Repeats(), VOCABULARY, 1.0)


def train(folder: Path, module: LanguageModel, alpha: float, ckpt_path: Path | None = None) -> None:
    saver = ModelCheckpoint(folder, "stopped", every_n_train_steps=100, save_on_exception=True)
    trainer = make_trainer(
        MemoStrategy(alpha=alpha), max_steps=STEPS, callbacks=[saver], enable_checkpointing=True,
        default_root_dir=folder, limit_val_batches=0,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path, weights_only=False)


@slow_if(lambda place, alpha: (place, alpha) != ("forward", 0.5))
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_the_step_ends_after_the_layer_and_is_run_again(tmp_path: Path, place: str, alpha: float) -> None:
    whole, killed, resumed = (Killed(place, step) for step in (-1, 2, -1))  # in step 4, a layer is compared
    train(tmp_path, whole.module, alpha)
    with pytest.raises(SIGTERMException):
        train(tmp_path, killed.module, alpha)
    assert killed.passed[-1] == (place, 3)
    assert forwards(killed.module) == [] and copy_threads() == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(tmp_path, resumed.module, alpha, tmp_path / "stopped.ckpt")
    assert killed.module.losses[:2] + resumed.module.losses == whole.module.losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.module.parameters(), whole.module.parameters(), strict=True))


def train_slowly(folder: Path) -> None:
    """Train so that the signal arrives in a layer of the second step, which waits for it; each notes that it begins."""
    torch.set_num_threads(1)
    costs._BANDWIDTH_SECONDS = 0.005  # of no interest here
    begun = folder / "layers"

    def begin() -> None:
        with begun.open("a") as file:
            file.write(".")
        while begun.stat().st_size == SIGNALLED and not module.trainer.received_sigterm:
            time.sleep(0.01)

    blocks = [Watched(begin, lambda: None) for _ in range(MANY_LAYERS)]
    module = LanguageModel(lambda: PlainModel(blocks))
    train(folder, module, alpha=1.0)


def test_a_process_ends_within_a_layer(tmp_path: Path) -> None:
    process = forking().Process(target=train_slowly, args=(tmp_path,), daemon=True)
    process.start()
    layers = tmp_path / "layers"
    while process.is_alive() and (not layers.exists() or layers.stat().st_size < SIGNALLED):
        time.sleep(0.01)
    process.terminate()
    process.join()
    assert process.exitcode == 0  # as Lightning ends
    assert layers.stat().st_size <= SIGNALLED + 1
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=False)
    assert saved["global_step"] == 1
