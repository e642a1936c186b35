"""Real out-of-memory errors of PyTorch's allocator: the step is run again with a smaller plan."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from lightning.pytorch import LightningModule
from support.devices import emulated_device
from support.samples.cuda import MIB, make_batch, make_model
from support.trainer_harness import batches, make_trainer
from torch import Tensor
from typing_extensions import override

from lightning_memo import MemoStrategy

STEPS = 4
WHOLE_BYTES = 8 << 30
KERNEL = {"attention": "sdpa"}  # the fastest one may be another one in another run, and take other memory


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("cpu")
        self.losses: list[float] = []
        self._last = 0.0

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self._last = loss.item()
        return loss

    @override
    def on_train_batch_end(self, *args: object) -> None:
        self.losses.append(self._last)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(limit_bytes: int, **settings: object) -> tuple[list[float], int]:
    """The losses of a run on a device of this size, and the bytes that PyTorch reserved at most."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    emulated_device.set_memory(limit_bytes)
    module = Module()
    # The device is smaller than the plan is told.
    strategy = MemoStrategy(device_memory="8GiB", host_memory="8GiB", **settings)
    trainer = make_trainer(strategy, accelerator="gpu", precision="bf16-true", max_steps=STEPS)
    trainer.fit(module, batches(make_batch("cpu") for _ in range(STEPS)))
    return module.losses, torch.cuda.max_memory_reserved()


@pytest.fixture
def whole_memory() -> Iterator[None]:
    yield
    emulated_device.set_memory(WHOLE_BYTES)


@pytest.mark.usefixtures("whole_memory", "own_folder")
def test_a_step_that_does_not_fit_is_run_again() -> None:
    kept, kept_bytes = train(WHOLE_BYTES, alpha="auto", **KERNEL)
    recomputed, recomputed_bytes = train(WHOLE_BYTES, alpha=0.0, **KERNEL)
    assert kept == recomputed
    assert kept_bytes - recomputed_bytes > 15 * MIB
    with pytest.warns(UserWarning, match="out of device memory") as caught:
        losses, _ = train((kept_bytes + 3 * recomputed_bytes) // 4, alpha="auto", **KERNEL)
    assert len([w for w in caught if "the step is run again" in str(w.message)]) == 1
    assert losses == pytest.approx(kept, rel=2**-8)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_memory", "own_folder")
def test_a_step_that_fits_in_slices_only_is_run_in_slices() -> None:
    settings = {"alpha": 0.0, "fused_kernels": False, **KERNEL}  # with them, slices reserve as much
    whole, whole_bytes = train(WHOLE_BYTES, **settings)
    sliced, sliced_bytes = train(WHOLE_BYTES, **settings, slice_tokens=32, stream_from_host="none")
    assert whole_bytes > sliced_bytes
    with pytest.warns(UserWarning, match="with every layer recomputed") as caught:
        losses, _ = train((whole_bytes + sliced_bytes) // 2, **settings)
    assert len([w for w in caught if 'slice_tokens=32, stream_from_host="none"' in str(w.message)]) == 1
    assert losses == sliced
    assert losses == pytest.approx(whole, rel=2**-8)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_memory", "own_folder")
def test_a_step_that_never_fits_ends_in_one_line() -> None:
    _, least_bytes = train(WHOLE_BYTES, alpha=0.0, slice_tokens=128, stream_from_host="hidden")
    with pytest.raises(torch.OutOfMemoryError, match="even with every layer recomputed") as caught:
        train(least_bytes // 2, alpha=1.0)
    assert "\n" not in str(caught.value)
    assert len(train(WHOLE_BYTES, alpha=1.0)[0]) == STEPS
