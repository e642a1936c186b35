"""Lazy tensors: reading and writing a few rows at a time, and the operations that compute the real tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.devices import DEVICE
from support.harness import DELAYS
from torch import Tensor

from lightning_memo.engine.memory.lazy_tensor import Assembly, LazyTensor, read_parts, read_rows
from lightning_memo.engine.memory.slot_memory import SlotMemory


@pytest.fixture
def memory() -> Iterator[SlotMemory]:
    memory = SlotMemory(64, 4096, DEVICE, test_mode=DELAYS, state_bytes=4096)
    yield memory
    memory.close()


def on_host(whole: Tensor, memory: SlotMemory, dim: int = 1, at_once: int = 4) -> LazyTensor:
    """`whole`, written to the host in slices that differ in length, the last one first."""
    assembly = Assembly(whole.shape, whole.dtype, DEVICE, at_once, memory)
    for start, stop in ((5, whole.shape[dim]), (2, 5), (0, 2)):
        assembly.write(dim, start, whole.narrow(dim, start, stop - start))
    t = assembly.take()
    assert isinstance(t, LazyTensor)
    return t


@pytest.mark.parametrize("dim", [0, 1])
def test_what_was_written_is_read(dim: int, memory: SlotMemory) -> None:
    whole = torch.randn((2, 7, 3) if dim == 1 else (7, 2, 3))
    t = on_host(whole, memory, dim)
    parts = list(read_parts(t, dim, [(0, 3), (3, 7)]))
    assert torch.equal(torch.cat(parts, dim), whole)
    assert torch.equal(torch.cat(list(read_rows(t, 4))), whole.view(-1, 3))
    assert torch.equal(t.narrow(dim, 2, 4), whole.narrow(dim, 2, 4))
    assert memory.state_arena.bytes_in_use == whole.nbytes  # the tensor is still lazy
    del t, parts
    assert memory.slots_in_use == 0


def test_aliases_and_casts_stay_on_the_host(memory: SlotMemory) -> None:
    whole = torch.randn(2, 7, 3)
    t = on_host(whole, memory)
    for same in (t.detach(), t[:, :, :], t.view(2, 7, 3), t.view_as(t), t.contiguous()):
        assert isinstance(same, LazyTensor) and torch.equal(same[:, 1:3], whole[:, 1:3])
    half = t.to(torch.bfloat16)
    assert isinstance(half, LazyTensor) and half.dtype == torch.bfloat16
    assert torch.equal(next(read_rows(half, 14)), whole.bfloat16().view(-1, 3))


def test_everything_else_makes_them_real_once(memory: SlotMemory) -> None:
    whole = torch.randn(2, 7, 3)
    t = on_host(whole, memory)
    alias = t.detach()
    assert torch.equal(t * 2, whole * 2) and torch.equal(t.transpose(0, 1), whole.transpose(0, 1))
    assert t.add_(1.0) is t
    assert torch.equal(alias[:, 2:4], whole[:, 2:4] + 1)
    assert memory.slots_in_use == 0  # the host buffer has been released


def test_gradients_flow_through_them(memory: SlotMemory) -> None:
    whole, weight = torch.randn(2, 7, 3), torch.randn(3, 5)
    t, plain = on_host(whole, memory).requires_grad_(), whole.clone().requires_grad_()
    for x in (t, plain):
        (x.float() @ weight).tanh().sum().backward()
    assert t.grad is not None and torch.equal(t.grad, plain.grad)


def test_a_part_that_was_never_written_is_an_error(memory: SlotMemory) -> None:
    assembly = Assembly((1, 4, 2), torch.float32, DEVICE, 4, memory)
    assembly.write(1, 0, torch.zeros(1, 3, 2))
    with pytest.raises(RuntimeError, match="1 rows of a tensor"):
        assembly.take()


def test_what_an_abandoned_step_left_is_refused(memory: SlotMemory) -> None:
    t = on_host(torch.randn(1, 7, 3), memory)
    memory.abandon()
    assert memory.slots_in_use == 0
    with pytest.raises(RuntimeError, match="hidden states were read after their step"):
        t[:, :2]


def test_what_finds_no_room_on_the_host_stays_on_the_device(memory: SlotMemory) -> None:
    whole = torch.randn(1, 2000, 1)
    t = on_host(whole, memory)
    assert torch.equal(t[:, 3:2000], whole[:, 3:2000])
    assert memory.stats.overflow_bytes == whole.nbytes
