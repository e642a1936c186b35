"""Tensors of more than 2^31 elements, and copies of more than 2^31 bytes, on a GPU that has the memory."""

from __future__ import annotations

import gc

import pytest
import torch
from support.benchmark_modules import benchmark_modules, load
from support.kernels.attention_reference import Attended, Inputs, attend

from lightning_memo.engine.copy_streams import CudaCopyStream
from lightning_memo.engine.memory.host_pages import HostPages, in_parts
from lightning_memo.engine.memory.slot_memory import Slot, SlotShare
from lightning_memo.kernels import AttentionSpec, select_backend

GIB = 2**30
HEADS, HEAD = 32, 128
# Results are rounded to bf16, and the kernels sum gradients in a varying order.
BOUND = 2**-7


def need(size_bytes: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # of other tests
    free, _ = torch.cuda.mem_get_info()
    if free < size_bytes:
        pytest.skip(f"needs {size_bytes // GIB} GiB of free device memory, and there are {free // GIB}")


def random_inputs(batch: int, tokens: int, key_heads: int, device: torch.device) -> Inputs:
    """Random inputs on the device, with the memory layout `[batch, tokens, heads, head_dim]`."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (HEADS, key_heads, key_heads, HEADS)
    shapes = [(batch, tokens, n, HEAD) for n in heads]
    made = (torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes)
    return Inputs(*(t.transpose(1, 2) for t in made))


def assert_alike(found: Attended, expected: Attended) -> None:
    for name, mine, theirs in zip(Attended._fields, found, expected, strict=True):
        distance = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
        assert distance <= BOUND, (name, distance)


@pytest.mark.parametrize("key_heads", [8, 32])
def test_attention_of_many_rows(choice: str, key_heads: int, device: torch.device) -> None:
    """The last batch row has the results that it has alone."""
    need(60 * GIB)
    batch, tokens = 130, 4096
    inputs, spec = random_inputs(batch, tokens, key_heads, device), AttentionSpec()
    assert inputs.q.numel() > 2**31
    found = attend(select_backend(*inputs[:3], spec, choice), inputs, spec)
    last = Inputs(*(t[-1:] for t in inputs))
    assert_alike(Attended(*(t[-1:] for t in found)), attend(select_backend(*last[:3], spec, choice), last, spec))


@pytest.mark.parametrize("part", ["rows", "documents", "heads"])
def test_parts_of_small_calls_are_what_they_are_alone(part: str) -> None:
    """What the benchmark compares has no distance where kernels can index everything."""
    with benchmark_modules():
        found = load("large_attention").distances("sdpa", part, 1 if part != "rows" else 3, 480)
    assert found.keys() == set(Attended._fields) and max(found.values()) <= BOUND


def test_attention_of_many_tokens(choice: str, device: torch.device) -> None:
    """With a window, queries at the end of a long sequence have the results of a short sequence."""
    need(60 * GIB)
    tokens, window = 2**31 // (HEADS * HEAD) + 4096, 256
    inputs, spec = random_inputs(1, tokens, 8, device), AttentionSpec(window=window)
    assert inputs.q.numel() > 2**31
    found = attend(select_backend(*inputs[:3], spec, choice), inputs, spec)
    last = Inputs(*(t[:, :, -2048:] for t in inputs))
    expected = attend(select_backend(*last[:3], spec, choice), last, spec)
    seen = slice(-2048 + window, None)  # those before see less of the short sequence
    pairs = [Attended(*(t[:, :, seen] for t in result)) for result in (found, expected)]
    assert_alike(*pairs)


def test_attention_of_many_documents(choice: str, device: torch.device) -> None:
    """The last of many packed documents has the results that it has alone."""
    need(60 * GIB)
    length, count = 120, 4400
    inputs, starts = random_inputs(1, length * count, 8, device), tuple(range(0, length * count, length))
    spec = AttentionSpec(documents=(starts,))
    found = attend(select_backend(*inputs[:3], spec, choice), inputs, spec)
    last, alone = Inputs(*(t[:, :, -length:] for t in inputs)), AttentionSpec()
    expected = attend(select_backend(*last[:3], alone, choice), last, alone)
    assert_alike(Attended(*(t[:, :, -length:] for t in found)), expected)


def test_a_slot_of_many_bytes_goes_and_comes_back(device: torch.device) -> None:
    need(20 * GIB)
    count = 2**31 + 4096
    pages = HostPages(device)
    pages.hold(2 * count)
    try:
        pages.wait()
        (host,) = in_parts(pages.memory)
        buffer = torch.empty(2 * count, dtype=torch.uint8, device=device)
        slot = Slot(buffer, {"host": SlotShare(0, 2 * count)})
        t = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, device=device)
        stored = slot.put(t)
        assert stored is not None
        out, back = CudaCopyStream(device), CudaCopyStream(device)
        gone = out.copy(host, buffer)
        gone.wait()
        buffer.fill_(0)
        back.copy(buffer, host, gone).wait()
        assert torch.equal(slot.load(stored), t)
    finally:
        torch.cuda.synchronize(device)
        pages.close()
