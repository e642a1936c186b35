"""Values in 8 bits: the error of a round trip, what arrives as it was, and tensors of all layouts in a slot."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.devices import DEVICE
from torch import Tensor

from lightning_memo.artifacts.slot_layouts import BLOCK, compressed_bytes
from lightning_memo.engine.memory import compressed_values
from lightning_memo.engine.memory.compressed_values import CompressedValues
from lightning_memo.engine.memory.slot_memory import Slot, SlotShare

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Spacing of the smallest numbers of a type, by half of which a result may be rounded.
LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149, torch.float64: 0.0}


def values(count: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of very different sizes, all within the range of fp16."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.logspace(-5, 3, count, dtype=torch.float64)[torch.randperm(count, generator=generator)]
    return (torch.randn(count, generator=generator, dtype=torch.float64) * sizes).to(dtype).to(DEVICE)


def arrived(t: Tensor) -> Tensor:
    """Return values, `[values]`, after they were compressed into memory that holds NaN, and restored."""
    memory = torch.full((compressed_bytes(len(t), t.itemsize),), 255, dtype=torch.uint8, device=t.device)
    CompressedValues(memory, len(t), t.dtype).write(t)
    return CompressedValues(memory.clone(), len(t), t.dtype).read()


def assert_within_bounds(result: Tensor, t: Tensor) -> None:
    """Assert the error that `compressed_values.py` states."""
    assert (result.dtype, result.shape) == (t.dtype, t.shape)
    result, exact = result.double(), t.double()
    largest = torch.zeros(-(-len(t) // BLOCK) * BLOCK, dtype=torch.float64, device=t.device)
    largest[: len(t)] = exact.abs()
    largest = largest.view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)[: len(t)]
    bound = torch.maximum(exact.abs() / 17, largest * 2.0**-17).clamp_min(2.0**-136) + LEAST[t.dtype] / 2
    assert ((result - exact).abs() <= bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_of_a_round_trip(dtype: torch.dtype, count: int) -> None:
    t = values(count, dtype)
    assert_within_bounds(arrived(t), t)


def test_error_is_that_of_three_bits() -> None:
    t = torch.linspace(1, 2, 1 + 2**16, device=DEVICE)
    worst = ((arrived(t) - t) / t).abs().max()
    assert 0.999 / 17 < worst <= 1 / 17


@pytest.mark.parametrize("passes", [1, 3])
def test_values_of_several_passes(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_values, "_BLOCKS_AT_ONCE", 4)
    t = values(passes * 4 * BLOCK + 5, torch.float32)
    assert_within_bounds(arrived(t), t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_few_bits_stay_as_they_are(dtype: torch.dtype) -> None:
    t = torch.zeros(3 * BLOCK, dtype=dtype, device=DEVICE)
    t[BLOCK : 2 * BLOCK : 2] = 1.0  # such as a mask that is multiplied
    t[2 * BLOCK :] = torch.arange(16, dtype=dtype, device=DEVICE).repeat(8) * -0.25
    assert torch.equal(arrived(t), t)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_arrives_as_nan(dtype: torch.dtype, value: float) -> None:
    t = values(3 * BLOCK, dtype)
    t[BLOCK + 3] = value
    result = arrived(t)
    assert result[BLOCK : 2 * BLOCK].isnan().all()
    for others in (slice(0, BLOCK), slice(2 * BLOCK, None)):
        assert_within_bounds(result[others], t[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    t = torch.tensor([info.max * 0.9, -info.max * 0.9, info.max * 0.7], dtype=dtype, device=DEVICE)
    assert_within_bounds(arrived(t), t)
    for size in (info.tiny, info.smallest_normal * 3, info.tiny * info.eps):
        t = torch.tensor([size, -size, size / 2, 0.0], dtype=dtype, device=DEVICE)
        assert_within_bounds(arrived(t), t)


def test_the_largest_numbers_of_fp16_stay_finite() -> None:
    t = torch.tensor([65504.0, -65504.0, 64000.0], dtype=torch.float16, device=DEVICE)
    assert_within_bounds(arrived(t), t)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "part of the last dimension": lambda t: t[..., 3:10],
    "every other row": lambda t: t[:, ::2],
    "expanded": lambda t: t[:, :, :1].expand(-1, -1, 6),
    "one value": lambda t: t[0, 0, 0],
}


@pytest.mark.parametrize("spill", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_all_layouts_in_a_slot(layout: str, spill: bool) -> None:
    t = LAYOUTS[layout](values(4 * 18 * 12, torch.float32).view(4, 18, 12))
    buffer = torch.full((2 * 8192,), 255, dtype=torch.uint8, device=DEVICE)
    slot = Slot(buffer, SlotShare(0, 8192), SlotShare(8192, 2 * 8192))
    view = slot.put(t, spill, compress=True)
    assert view is not None
    assert view.size_bytes == compressed_bytes(t.numel(), 4)
    result = slot.load(view)
    assert result.shape == t.shape
    order = sorted(range(t.dim()), key=t.stride)
    assert order == sorted(range(t.dim()), key=result.stride) or layout == "expanded"
    in_memory = [x.permute(order[::-1]).reshape(-1) for x in (result, t)]
    assert_within_bounds(*in_memory)
    assert slot.load(view).data_ptr() != result.data_ptr()  # a kernel may overwrite what it was given


def test_views_of_a_compressed_tensor() -> None:
    t = values(6 * 64, torch.float32).view(6, 64)
    slot = Slot(torch.empty(4096, dtype=torch.uint8, device=DEVICE), SlotShare(0, 4096), SlotShare(4096, 4096))
    view = slot.put(t, compress=True)
    assert view is not None
    rows = slot.load(view.view_like(t[2:4], 2 * 64 * 4))
    assert torch.equal(rows, slot.load(view)[2:4])
    columns = slot.load(view.view_like(t[:, 10:20], 10 * 4))
    assert torch.equal(columns, slot.load(view)[:, 10:20])


def test_a_slot_that_is_too_full_takes_nothing() -> None:
    t = values(1024, torch.float32)
    slot = Slot(torch.empty(4096, dtype=torch.uint8, device=DEVICE), SlotShare(0, 1000), SlotShare(1000, 1000))
    assert slot.put(t, compress=True) is None
    assert slot.used_bytes == 0
