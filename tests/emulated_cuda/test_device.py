"""The emulated device: numbers, streams, memory, random numbers, and training."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.devices import emulated_device
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG = 3_000_000_000  # cycles, 1.5 seconds: longer than what a busy machine does in between


def test_properties() -> None:
    assert torch.cuda.get_device_capability() == (9, 0)
    assert "emulated" in torch.cuda.get_device_name()


# ---- numbers


def test_products_are_right(device: torch.device) -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 48)
    torch.testing.assert_close((a.to(device) @ b.to(device)).cpu(), a @ b)


def test_views_dtypes_and_indices_are_right(device: torch.device) -> None:
    a = torch.randn(8, 6)
    c = a.to(device)
    torch.testing.assert_close((c.t()[1:3, ::2] * 2 + 1).cpu(), a.t()[1:3, ::2] * 2 + 1)
    torch.testing.assert_close(c.to(torch.bfloat16).cpu(), a.to(torch.bfloat16))
    assert torch.equal((c > 0).nonzero().cpu(), (a > 0).nonzero())
    assert torch.equal(c[c > 0].cpu(), a[a > 0])
    assert torch.equal(torch.arange(5, device=device).cpu(), torch.arange(5))
    x, y = c.clone(), a.clone()
    x[2:4, 1] = 7
    y[2:4, 1] = 7
    x[torch.tensor([0, 1], device=device)] += 1
    y[torch.tensor([0, 1])] += 1
    assert torch.equal(x.cpu(), y)


def test_tensors_of_other_devices_are_refused(device: torch.device) -> None:
    table, here = torch.randn(8, 6, device=device), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="got index is on cpu, different from other tensors on cuda:0"):
        F.embedding(here, table)
    assert table[here].shape == (2, 6) and (table * torch.tensor(2.0)).device == table.device  # a GPU takes these


def attended(where: str | torch.device, dtype: torch.dtype, given: list[Tensor]) -> list[Tensor]:
    """Causal attention's output and gradients."""
    *inputs, gradient = [t.to(where, dtype) for t in given]
    for t in inputs:
        t.requires_grad_()
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return [t.detach().cpu().double() for t in (out, *torch.autograd.grad(out, inputs, gradient))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH", None])
def test_attention_is_right(backend: str | None, dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float32 and backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        pytest.skip("half precision only")
    given = [torch.randn(2, 4, 40, 16).to(dtype).float() for _ in range(4)]
    expected = attended("cpu", torch.float64, given)
    with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
        actual = attended(device, dtype, given)
    for mine, truth in zip(actual, expected, strict=True):
        assert float((mine - truth).norm() / truth.norm()) < (1e-5 if dtype == torch.float32 else 2**-6)


def train(where: str | torch.device, make: Callable[[], nn.Module], fused: bool | None = None) -> list[float]:
    torch.manual_seed(0)
    model = make().to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).to(where)
    losses = []
    for _ in range(5):
        loss = F.mse_loss(model(data), data)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [None, True])
def test_training_is_right(fused: bool | None, device: torch.device) -> None:
    emulated_device.set_delays(200, 200)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))

    assert train(device, make, fused) == pytest.approx(train("cpu", make), rel=1e-5)


def test_autocast(device: torch.device) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert nn.Linear(8, 8).to(device)(torch.randn(4, 8, device=device)).dtype == torch.bfloat16


def llama_losses(where: str | torch.device) -> list[float]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(1)).to(where)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_llama_trains_as_on_the_cpu(device: torch.device) -> None:
    emulated_device.set_delays(100, 100)
    assert llama_losses(device) == pytest.approx(llama_losses("cpu"), rel=1e-5)


def test_random_state(device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    torch.manual_seed(1)
    state = torch.cuda.get_rng_state()
    first, second = F.dropout(x, 0.3), torch.randn(100, device=device)
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(x, 0.3), first)
    assert torch.equal(torch.randn(100, device=device), second)
    assert not torch.equal(F.dropout(x, 0.3), first)
    assert 0.6 < (first != 0).float().mean().item() < 0.8


# ---- streams: what CUDA does not order is not ordered here


def pinned(size: int) -> Tensor:
    return torch.empty(size).pin_memory()


def test_the_backward_runs_in_a_thread_of_the_device(device: torch.device) -> None:
    threads = []
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: threads.append(threading.get_ident()))
    y.sum().backward()
    assert threads
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("wait", [True, False])
def test_a_copy_without_a_wait_reads_what_is_not_computed_yet(wait: bool, device: torch.device) -> None:
    a, host, side = torch.zeros(1000, device=device), pinned(1000).zero_(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    a.fill_(7)
    if wait:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(a, non_blocking=True)
    side.synchronize()
    assert bool((host == 7).all()) is wait
    torch.cuda.synchronize()


@pytest.mark.parametrize("wait", [True, False])
def test_a_kernel_without_a_wait_reads_what_has_not_arrived(wait: bool, device: torch.device) -> None:
    emulated_device.set_delays(copy_microseconds=400_000)
    wrong = 0
    for _ in range(5):
        a, host, side = torch.zeros(1000, device=device), pinned(1000).fill_(3), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            a.copy_(host, non_blocking=True)
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        b = a * 2
        wrong += not bool((b == 6).all())
        torch.cuda.synchronize()
    assert (wrong == 0) is wait


@pytest.mark.parametrize("wait", [True, False])
def test_the_host_can_overwrite_what_a_copy_has_not_read(wait: bool, device: torch.device) -> None:
    a, host = torch.zeros(1000, device=device), pinned(1000).fill_(3)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    a.copy_(host, non_blocking=True)
    if wait:
        torch.cuda.current_stream().synchronize()
    host.fill_(4)
    assert bool((a == 3).all()) is wait


def late_copy(device: torch.device) -> tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]:
    """A tensor of threes, and a stream that copies it to the host later."""
    side, host = torch.cuda.Stream(), pinned(1 << 20).zero_()
    a = torch.full((1 << 20,), 3.0, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        host.copy_(a, non_blocking=True)
    return side, host, a


@pytest.mark.parametrize("record", [True, False])
def test_freed_memory_that_a_stream_still_reads_is_nan(record: bool, device: torch.device) -> None:
    side, host, a = late_copy(device)
    if record:
        a.record_stream(side)
    del a
    torch.empty(1, device=device)
    torch.cuda.synchronize()
    assert bool((host == 3).all()) is record
    assert bool(host.isnan().all()) is not record


def test_freed_memory_may_be_read_until_its_stream_allocates(device: torch.device) -> None:
    side, host, a = late_copy(device)
    del a
    torch.cuda.current_stream().wait_stream(side)
    b = torch.empty(1 << 20, device=device)
    torch.cuda.synchronize()
    assert bool((host == 3).all())
    assert bool(b.isnan().all())


def test_writing_freed_memory_is_an_error(device: torch.device) -> None:
    side = torch.cuda.Stream()
    a = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        a.fill_(1)
    del a
    torch.empty(1, device=device)
    torch.cuda.synchronize()
    b = torch.empty(1 << 20, device=device)
    with pytest.raises(RuntimeError, match="was written after its memory had been freed"):
        torch.cuda.synchronize(), b.fill_(0)


def test_new_memory_is_nan(device: torch.device) -> None:
    assert bool(torch.empty(1000, device=device).isnan().all())


def test_events(device: torch.device) -> None:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(LONG)
    stop.record()
    assert not stop.query()
    stop.synchronize()
    assert start.elapsed_time(stop) > 1400


def test_waits_of_the_host_are_counted(device: torch.device) -> None:
    a = torch.ones(10, device=device)
    torch.cuda.synchronize()
    before = emulated_device.count("host_waits")
    b = (a + 1) * 2
    assert emulated_device.count("host_waits") == before
    b.sum().item()
    assert emulated_device.count("host_waits") > before


# ---- what is not emulated


def test_cuda_graphs_are_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="emulated"):
        torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__()


class Dim3(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def test_a_kernel_that_is_not_emulated_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    before, one = emulated_device.count("unknown_kernels"), Dim3(1, 1, 1)
    launch = emulated_device.runtime().cudaLaunchKernel
    assert launch(ctypes.c_void_p(4096), one, one, None, ctypes.c_size_t(0), None) == 801  # cudaErrorNotSupported
    assert emulated_device.runtime().cudaGetLastError() == 801
    assert emulated_device.count("unknown_kernels") == before + 1
    assert "a kernel that is not emulated was launched" in capfd.readouterr().err


def test_a_function_that_is_not_emulated_is_named(device: torch.device, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        torch.cuda.current_blas_handle()
    assert "cublasCreate" in capfd.readouterr().err


# ---- memory


def test_memory_is_limited_and_counted(device: torch.device) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    a = torch.empty(100 << 20, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_allocated() - before == 100 << 20
    del a
    assert torch.cuda.max_memory_allocated() - before == 100 << 20
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=device)


def test_a_thread_that_uses_the_device_has_a_context_there_only(device: torch.device) -> None:
    assert emulated_device.contexts() == {0}
