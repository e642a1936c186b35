"""The host does not wait for the device in a training step, as the runtime counts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.devices import emulated_device
from support.samples.cuda import make_model
from support.trainer_harness import LanguageModel, batches, fit, loader
from torch import Tensor
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.kernels.attention_kernel import to_device_async

COMPARED = (1, 2, 4, 8)  # steps in which layers are compared with themselves in slices


class Counting(LanguageModel):
    """Counts the waits of each step, from the first operation to the end of the backward."""

    def __init__(self) -> None:
        super().__init__(lambda: make_model("cpu"))
        self.waits: list[int] = []

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.waits.append(-emulated_device.count("host_waits"))
        return self.model(**batch).loss

    @override
    def on_after_backward(self) -> None:
        self.waits[-1] += emulated_device.count("host_waits")


def waits_of(strategy: Any, data: Any = None) -> dict[int, int]:
    """The number of waits by step, of steps in which nothing is compared."""
    module, data = Counting(), loader(tokens=64) if data is None else data
    fit(strategy, module, data, accelerator="gpu", precision="bf16-true", max_steps=7)
    return {step: count for step, count in enumerate(module.waits, 1) if step not in COMPARED}


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 0.5},
        {"alpha": 1.0},
        {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"},
        {"slice_tokens": 16, "stream_from_host": "model"},
    ],
    ids=str,
)
def test_steps_wait_no_more_than_in_plain_training(settings: dict[str, Any]) -> None:
    """transformers itself reads once in each step whether documents are packed, unless slices know that."""
    waits, plain = waits_of(MemoStrategy(**settings)), waits_of("auto")
    assert plain == dict.fromkeys((3, 5, 6, 7), 1)
    assert waits == dict.fromkeys((3, 5, 6, 7), 0 if settings.get("stream_from_host") == "model" else 1)


PADDED = {"attention_mask": (torch.arange(64) < torch.tensor([[64], [50]])).long()}
PACKED = {"position_ids": torch.cat([torch.arange(20), torch.arange(44)]).repeat(2, 1)}


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(("given", "count"), [(PADDED, 2), (PACKED, 3)], ids=["padded", "packed"])
def test_masks_are_read_once_in_each_step(given: dict[str, Tensor], count: int) -> None:
    """Not once for each of six layers. Reading a tensor is two waits; of packed rows transformers reads one, too."""
    ids = torch.randint(0, 90, (2, 64), generator=torch.Generator().manual_seed(0))
    data = batches([{"input_ids": ids, "labels": ids, **given}] * 7)
    assert waits_of(MemoStrategy(alpha=0.5), data) == dict.fromkeys((3, 5, 6, 7), count)


@pytest.mark.parametrize(
    "t",
    [torch.arange(128).view(2, 64)[:, 16:32], torch.arange(16)[None].expand(2, -1), torch.tensor(5)],
    ids=["part", "expanded", "number"],
)
def test_small_tensors_are_copied_without_a_wait(t: Tensor, device: torch.device) -> None:
    before = emulated_device.count("host_waits")
    there = to_device_async(t, device)
    assert emulated_device.count("host_waits") == before
    assert torch.equal(there.cpu(), t)
