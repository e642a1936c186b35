"""A resumed run does, to the last bit, what the uninterrupted one does."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from support.markers.slow import slow_if
from support.processes import run_in_processes
from support.samples.models import run

from lightning_memo.cli.training_job import EarlierMetrics
from lightning_memo.data import TextDataModule
from lightning_memo.models import CausalLM


class Apart(CausalLM):
    """Draws other random numbers in each process."""

    def on_train_start(self):
        resumed = self._rng_state is not None
        super().on_train_start()
        if not resumed:
            torch.manual_seed(self.global_rank)


def run_apart(folder, text, ckpt_path=None):
    return run(folder, TextDataModule(seq_len=32, path=str(text)), ckpt_path, Apart, strategy="ddp", devices=2)


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.py").write_text(f"x{number} = {number}\n" * (10 + number))
    return folder


@slow_if(lambda case_id: case_id in ("worker", "validation"))
@pytest.mark.parametrize(
    ("epoch_batches", "num_workers", "changes"),
    [
        (10, 0, {}),
        (10, 0, {"accumulate_grad_batches": 2}),
        (10, 0, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
        (4, 0, {"limit_train_batches": 4}),
        (5, 0, {"limit_train_batches": 0.5}),
        (10, 1, {}),
    ],
    ids=["plain", "accumulation", "validation", "epoch-end", "short-epochs", "worker"],
)
def test_batches_and_losses_go_on(tmp_path, text, epoch_batches, num_workers, changes):
    def data():
        return TextDataModule(seq_len=32, batch_size=2, path=str(text), num_workers=num_workers)

    whole = run(tmp_path / "whole", data(), **changes)
    assert max(batch_idx for _, batch_idx, *_ in whole) == epoch_batches - 1, "the steps resumed from lie within epochs"
    for step in (4, 8, 12):
        rest = run(tmp_path / "resumed", data(), ckpt_path=tmp_path / "whole" / f"step={step}.ckpt", **changes)
        assert rest
        assert rest == whole[-len(rest) :]
        # An accumulation that the end of an epoch cuts short has one batch less.
        assert len(whole) - len(rest) == pytest.approx(step * changes.get("accumulate_grad_batches", 1), abs=1)


def test_rows_of_earlier_metrics_come_once(tmp_path):
    logger = CSVLogger(tmp_path, name="csv", version="")
    for step in range(3):
        logger.log_metrics({"memo/alpha": 0.5}, step + 1)  # a callback counts the steps that are over
        logger.log_metrics({"train_loss": 5.0 - step}, step)
        logger.save()
    path = tmp_path / "csv" / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, *lines[-2:]]))  # as an interrupt after the rows were written leaves it
    again, earlier = CSVLogger(tmp_path, name="csv", version=""), EarlierMetrics()
    earlier.read([again])
    trainer = Trainer(logger=again, accelerator="cpu", enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 2
    assert trainer.global_step == 2
    earlier.on_train_start(trainer, None)
    again.save()
    assert path.read_text().splitlines(keepends=True) == lines[:5]


@pytest.mark.slow
def test_random_numbers_of_each_process_go_on(tmp_path, text):
    whole = run_in_processes(2, run_apart, tmp_path / "whole", text)
    resumed = run_in_processes(2, run_apart, tmp_path / "resumed", text, tmp_path / "whole" / "step=8.ckpt")
    assert [group[8:] for group in whole] == resumed
    states = torch.load(tmp_path / "whole" / "step=8.ckpt")["rng_states"]
    assert len(states) == 2 and not torch.equal(states[0][0], states[1][0])


@pytest.mark.parametrize("change", ["older", "more processes", "on a GPU"])
def test_random_numbers_of_other_checkpoints_are_read(tmp_path, text, change):
    def data():
        return TextDataModule(seq_len=32, path=str(text))

    whole, path = run(tmp_path, data()), tmp_path / "step=8.ckpt"
    checkpoint = torch.load(path)
    ((state, device),) = checkpoint.pop("rng_states")
    assert device is None, "a run on a CPU"
    others = {
        "older": {"rng_state": state},
        "more processes": {"rng_states": [(state, None), (state.roll(8), None)]},
        "on a GPU": {"rng_states": [(state, torch.zeros(16, dtype=torch.uint8))]},
    }
    torch.save(checkpoint | others[change], path)
    assert run(tmp_path / "resumed", data(), ckpt_path=path) == whole[8:]
