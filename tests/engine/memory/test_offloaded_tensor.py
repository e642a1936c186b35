"""Lazy tensors: reading and writing a few rows at a time, and the operations that compute the real tensor."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from support.devices import DEVICE
from support.harness import DELAYS
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor, TensorBuilder, part_of, read_parts, read_rows
from lightning_memo.engine.memory.slot_memory import SlotMemory


@pytest.fixture
def memory() -> Iterator[SlotMemory]:
    memory = SlotMemory(64, 4096, HostPages(DEVICE), test_mode=DELAYS, state_bytes=4096)
    yield memory
    memory.close()


def on_host(whole: Tensor, memory: SlotMemory, dim: int = 1, at_once: int = 4) -> OffloadedTensor:
    """`whole`, written to the host in slices that differ in length, the last one first."""
    assembly = TensorBuilder(whole.shape, whole.dtype, DEVICE, at_once, memory)
    for start, stop in ((5, whole.shape[dim]), (2, 5), (0, 2)):
        assembly.write(dim, start, whole.narrow(dim, start, stop - start))
    t = assembly.take()
    assert isinstance(t, OffloadedTensor)
    return t


@pytest.mark.parametrize("dim", [0, 1])
def test_what_was_written_is_read(dim: int, memory: SlotMemory) -> None:
    whole = torch.randn((2, 7, 3) if dim == 1 else (7, 2, 3))
    t = on_host(whole, memory, dim)
    parts = list(read_parts(t, dim, [(0, 3), (3, 7)]))
    assert torch.equal(torch.cat(parts, dim), whole)
    assert torch.equal(torch.cat(list(read_rows(t, 4))), whole.view(-1, 3))
    assert torch.equal(part_of(t, dim, 2, 6), whole.narrow(dim, 2, 4))
    assert memory.states.arena.bytes_in_use == whole.nbytes  # the tensor is still lazy
    del t, parts
    assert memory.slots_in_use == 0


def test_aliases_and_casts_stay_on_the_host(memory: SlotMemory) -> None:
    whole = torch.randn(2, 7, 3)
    t = on_host(whole, memory)
    for same in (t.detach(), t[:, :, :], t.view(2, 7, 3), t.view_as(t), t.contiguous()):
        assert isinstance(same, OffloadedTensor) and torch.equal(part_of(same, 1, 1, 3), whole[:, 1:3])
    half = t.to(torch.bfloat16)
    assert isinstance(half, OffloadedTensor) and half.dtype == torch.bfloat16
    assert torch.equal(next(read_rows(half, 14)), whole.bfloat16().view(-1, 3))


def test_everything_else_makes_them_real_once(memory: SlotMemory) -> None:
    whole = torch.randn(2, 7, 3)
    t = on_host(whole, memory)
    alias = t.detach()
    assert torch.equal(t * 2, whole * 2) and torch.equal(t.transpose(0, 1), whole.transpose(0, 1))
    assert t.add_(1.0) is t
    assert torch.equal(alias[:, 2:4], whole[:, 2:4] + 1)
    assert memory.slots_in_use == 0  # the host buffer has been released


def loaded(save: Callable[[Any, Any], object], load: Callable[[Any], Any], value: Any) -> Any:
    file = io.BytesIO()
    save(value, file)
    file.seek(0)
    return load(file)


OUTSIDE: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.detach().numpy().copy(),
    "numpy, of a graph": lambda t: t.numpy(force=True),
    "array": lambda t: np.asarray(t.detach()) * 2,
    "bytes": lambda t: t.detach().numpy().tobytes().hex(),
    "repr": lambda t: re.sub("grad_fn=.*", "", repr(t)),
    "format": lambda t: f"{t.detach()}",
    "item": lambda t: t.detach()[:1, :1, :1].item(),
    "save": lambda t: loaded(torch.save, torch.load, t.detach()),
    "save, of a graph": lambda t: loaded(torch.save, torch.load, t).requires_grad,
    "aliases that are saved": lambda t: loaded(torch.save, torch.load, [t, t.detach()])[1].mul_(2),
    "safetensors": lambda t: safetensors.torch.load(safetensors.torch.save({"t": t.detach()}))["t"],
    "pickle": lambda t: loaded(pickle.dump, pickle.load, {"t": t.detach()})["t"],
    "deepcopy": lambda t: (copy.deepcopy(t.detach()).mul_(2), t.detach() + 0),
    "deepcopy of a leaf": lambda t: copy.deepcopy(t.detach().requires_grad_()).requires_grad,
    "copy": lambda t: copy.copy(t.detach()),
    "address": lambda t: ctypes.cast(t.data_ptr(), ctypes.POINTER(ctypes.c_float))[4],
    "storage": lambda t: t.detach().untyped_storage().tolist(),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).clone(),
    "dlpack of NumPy": lambda t: np.from_dlpack(t.detach()).copy(),
    "apply": lambda t: t.detach().apply_(lambda value: value * 2),
}


@pytest.mark.parametrize("read", OUTSIDE.values(), ids=OUTSIDE)
def test_what_reads_memory_gets_that_of_the_real_tensor(read: Callable[[Tensor], Any], memory: SlotMemory) -> None:
    whole = torch.randn(2, 7, 3)
    made = (torch.clone, lambda t: on_host(t, memory))
    expected, found = (read(Rows.apply(whole.clone().requires_grad_(), make)) for make in made)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert type(found) is type(expected)
    assert not memory.slots_in_use


def test_what_of_a_graph_plain_tensors_refuse(memory: SlotMemory) -> None:
    t = Rows.apply(torch.randn(2, 7, 3, requires_grad=True), lambda t: on_host(t, memory))
    for refused in (lambda: t.numpy(), lambda: copy.deepcopy(t)):
        with pytest.raises(RuntimeError, match=r"requires grad|created explicitly by the user"):
            refused()
    with pytest.raises(RuntimeError, match="data pointer"):  # a segmentation fault otherwise
        to_dlpack(on_host(torch.randn(2, 7, 3), memory))


def test_gradients_flow_through_them(memory: SlotMemory) -> None:
    whole, weight = torch.randn(2, 7, 3), torch.randn(3, 5)
    t, plain = on_host(whole, memory).requires_grad_(), whole.clone().requires_grad_()
    for x in (t, plain):
        (x.float() @ weight).tanh().sum().backward()
    assert t.grad is not None and torch.equal(t.grad, plain.grad)


class Rows(torch.autograd.Function):
    """Gives a lazy tensor a history, as embeddings do."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, lazy: Callable[[Tensor], Tensor]) -> Tensor:
        return lazy(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clone(), None


# Compute a tensor from embeddings [2, 7, 3], a soft prompt [2, 5, 3] and features [6] by writing into the embeddings.
Write = Callable[[Tensor, Tensor, Tensor], Tensor]
WRITES: dict[str, Write] = {
    "setitem": lambda e, prompt, _: (e.__setitem__((slice(None), slice(5)), prompt), e)[1],
    "an index": lambda e, prompt, _: (e.__setitem__((0, 1, 2), 7.0), e)[1],
    "slice": lambda e, prompt, _: (e[:, :5].mul_(3), e)[1],
    "slice of a slice": lambda e, prompt, _: (e[:, 1:][:, :2].mul_(3), e)[1],
    "a slice that is read": lambda e, prompt, _: torch.cat([e[:, :5], e.mul_(2)], 1),
    "narrow": lambda e, prompt, _: (e.narrow(1, 2, 3).fill_(0.5), e)[1],
    "select": lambda e, prompt, _: (e.select(1, 3).mul_(2), e)[1],
    "transpose": lambda e, prompt, _: (e.transpose(0, 1)[1].mul_(2), e)[1],
    "a view that is read": lambda e, prompt, _: (e.transpose(0, 1), e.add_(1))[0],
    "unsqueeze": lambda e, prompt, _: (e.unsqueeze(0)[0, 0].mul_(2), e)[1],
    "as_strided": lambda e, prompt, _: (e.as_strided((2, 3), (21, 1), 3).mul_(2), e)[1],
    "view": lambda e, prompt, _: (e.view(14, 3)[3:5].mul_(3), e)[1],
    "same view": lambda e, prompt, _: (e.view(2, 7, 3).mul_(3), e)[1],
    "index_put_": lambda e, prompt, _: e.index_put_((torch.tensor([0, 1]), torch.tensor([2, 3])), prompt[:, 0]),
    "index_copy_": lambda e, prompt, _: e.index_copy_(1, torch.tensor([1, 2]), prompt[:, :2]),
    "a mask": lambda e, prompt, _: (e.__setitem__(IMAGE, prompt[:, 1]), e)[1],
    "masked_scatter_": lambda e, _, features: e.masked_scatter_(IMAGE[..., None].expand_as(e), features),
    "copy_": lambda e, prompt, _: e.copy_(torch.cat([prompt, prompt[:, :2]], 1)),
    "cat": lambda e, prompt, _: (e[:, 6].zero_(), torch.cat([prompt, e[:, 5:]], 1))[1],
    "dropout": lambda e, prompt, _: F.dropout(e, 0.5, inplace=True),
    "detach": lambda e, prompt, _: (e.detach()[:, 1:3].zero_(), e)[1],
    "data": lambda e, prompt, _: (e.data[:, 1:3].zero_(), e)[1],
    "other data": lambda e, prompt, _: (setattr(e, "data", torch.ones(2, 7, 3)), e)[1],
    "unbind": lambda e, prompt, _: (e.detach().unbind(1)[2].mul_(2), e)[1],
    "split": lambda e, prompt, _: (e.detach().split(3, 1)[1].mul_(2), e)[1],
    "chunk": lambda e, prompt, _: (e.detach().chunk(2, 1)[0].add_(1), e)[1],
    "out": lambda e, prompt, _: (torch.mul(e.detach(), 2, out=e.detach()), e)[1],
    "foreach": lambda e, prompt, _: (torch._foreach_mul_([e.detach()], 2.0), e)[1],
    "transpose_": lambda e, prompt, _: e.transpose_(0, 1) * prompt[0, 0],
    "a cast": lambda e, prompt, _: (e.mul_(3), e.double(), e[:, 2].zero_())[1],
}  # fmt: skip
IMAGE = torch.zeros(2, 7, dtype=torch.bool).index_fill_(1, torch.tensor([2]), True)


@pytest.mark.parametrize("name", WRITES)
def test_writes_reach_them_as_in_plain_training(name: str, memory: SlotMemory) -> None:
    found = []
    for lazy in (torch.clone, lambda t: on_host(t, memory)):
        torch.manual_seed(0)
        whole, prompt, features = (torch.randn(*shape, requires_grad=True) for shape in ((2, 7, 3), (2, 5, 3), (6,)))
        y = WRITES[name](Rows.apply(whole, lazy), prompt, features)
        parts = torch.cat(list(read_parts(y.detach(), 1, [(0, 1), (1, y.shape[1])])), 1)
        (y * torch.linspace(1, 2, y.numel()).view(y.shape)).tanh().sum().backward()
        found.append((y.detach() + 0, parts, whole.grad, prompt.grad, features.grad))
    for mine, plain in zip(found[1], found[0], strict=True):
        assert mine is plain is None or torch.equal(mine, plain)


def test_parts_are_read_differentiably(memory: SlotMemory) -> None:
    whole = torch.randn(2, 7, 3, requires_grad=True)
    t = Rows.apply(whole, lambda t: on_host(t, memory))
    (part_of(t, 1, 2, 5) * 3).sum().backward()
    assert not t.is_real and whole.grad is not None
    assert torch.equal(whole.grad, F.pad(torch.full((2, 3, 3), 3.0), (0, 0, 2, 2)))


def test_data_of_another_shape_is_refused(memory: SlotMemory) -> None:
    with pytest.raises(ValueError, match=r"got data \[3\] of torch.float32: compute a new tensor instead"):
        on_host(torch.randn(2, 7, 3), memory).data = torch.ones(3)


def test_a_part_that_was_never_written_is_an_error(memory: SlotMemory) -> None:
    assembly = TensorBuilder((1, 4, 2), torch.float32, DEVICE, 4, memory)
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
