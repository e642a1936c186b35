import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, record_function

from lightning_memo.profiler import memory_meter as meter
from lightning_memo.profiler.memory_meter import AllocationRecorder, PeakMeter

CPU = torch.device("cpu")


def test_a_block_that_allocates_nothing_has_no_peak():
    with PeakMeter(CPU) as measured:
        pass
    assert measured.peak_bytes == 0


def test_only_memory_is_recorded(monkeypatch):
    """PyTorch writes the end of an event that outlives the profiler, such as a collective, into freed memory."""
    seen, disable = [], torch._C._autograd._disable_profiler

    def disable_and_look():
        result = disable()
        seen.extend(event.typed[0].name for event in result.experimental_event_tree())
        return result

    monkeypatch.setattr(torch._C._autograd, "_disable_profiler", disable_and_look)
    recorder = AllocationRecorder()
    with record_function("under way"):
        block = torch.empty(1000)
        requests = recorder.stop()
    assert set(seen) == {"Allocation"}
    assert [request.size_bytes for request in requests] == [block.nbytes]


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["", "raise SystemExit"])
def test_a_process_may_end_while_memory_is_recorded(statement):
    """PyTorch's profiler would use its own objects after they are gone, and the process be killed by SIGSEGV."""
    code = f"""
        import torch
        from lightning_memo.profiler.memory_meter import AllocationRecorder
        recorder = AllocationRecorder()
        print(torch.ones(3, requires_grad=True).sum().item())
        {statement}
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "3.0\n"), ended.stderr


def test_the_peak_is_what_is_alive_at_once():
    with PeakMeter(CPU) as measured:
        first = torch.empty(1000)
        second = torch.empty(2001, dtype=torch.uint8)
        del first
        third = torch.empty(500, dtype=torch.float64)
    assert measured.peak_bytes == 4000 + 2001 + (4000 - 4000)
    assert second.numel() + third.numel() == 2501


def test_what_was_there_before_does_not_count():
    before = torch.zeros(100_000)
    with PeakMeter(CPU) as measured:
        before.add_(1)
        view = before[10:].view(-1)
        after = torch.empty(10)
    assert measured.peak_bytes == 40
    assert view.data_ptr() != after.data_ptr()


def test_frees_of_older_blocks_leave_the_level():
    before = [torch.zeros(1000) for _ in range(3)]
    with PeakMeter(CPU) as measured:
        before.clear()
        after = torch.empty(700)
    assert measured.peak_bytes == 2800
    del after


def test_blocks_of_an_earlier_meter_are_older_blocks_too():
    with PeakMeter(CPU):
        kept = torch.empty(10_000)
    with PeakMeter(CPU) as measured:
        del kept
        after = torch.empty(700)
        more = torch.empty(300)
    assert measured.peak_bytes == 4000
    assert after.numel() + more.numel() == 1000


@pytest.mark.parametrize(
    ("requests", "peak_bytes"),
    [
        ([], 0),
        ([(1, 10), (2, 20), (1, -10), (3, 15)], 35),
        ([(1, 10), (9, -1000), (2, 20)], 30),
        ([(1, 10), (1, -10), (1, 30), (1, -30)], 30),
    ],
)
def test_the_ledger(requests, peak_bytes):
    assert meter.peak_of(requests) == peak_bytes


def test_forward_and_backward_of_an_mlp_to_the_byte():
    batch, width, hidden, out = 64, 48, 256, 32
    x = torch.randn(batch, width)
    w1 = torch.randn(hidden, width, requires_grad=True)
    w2 = torch.randn(out, hidden, requires_grad=True)
    dy = torch.ones(batch, out)
    with PeakMeter(CPU) as measured:
        y = torch.relu(x @ w1.t()) @ w2.t()
        y.backward(dy)
    # In the backward of the ReLU: its saved output, the gradients of its output and input; y; and the finished dW2.
    assert measured.peak_bytes == 4 * (3 * batch * hidden + batch * out + out * hidden)
    with PeakMeter(CPU) as measured, torch.no_grad():
        torch.relu(x @ w1.t())
    assert measured.peak_bytes == 4 * 2 * batch * hidden


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp().exp()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = leaf.exp().exp()
        return torch.autograd.grad(y, leaf, dy)


def test_a_backward_inside_backward_counts():
    x = torch.randn(1000, requires_grad=True)
    dy = torch.ones(1000)
    with PeakMeter(CPU) as measured:
        y = x.exp().exp()
        y.backward(dy)
    assert measured.peak_bytes == 4 * 4000  # two outputs and two gradients
    del y
    x.grad = None
    with PeakMeter(CPU) as measured:
        y = Recomputed.apply(x)
        y.backward(dy)
    assert measured.peak_bytes == 5 * 4000  # the output, and then the same again


def test_other_threads_do_not_count():
    def allocate():
        torch.zeros(10**6)

    with PeakMeter(CPU) as measured:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        torch.empty(25)
    assert measured.peak_bytes == 100


def test_an_error_in_the_block_passes_and_leaves_no_profiler_running():
    with pytest.raises(RuntimeError, match="shape"), PeakMeter(CPU):
        torch.empty(10).view(3)
    with PeakMeter(CPU) as measured:
        torch.empty(10)
    assert measured.peak_bytes == 40


def test_another_profiler_is_refused():
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match="while another profiler runs: turn that one off"),
        PeakMeter(CPU),
    ):
        pass


def test_on_a_gpu_the_allocators_counter_is_read(monkeypatch):
    device = torch.device("cuda", 0)
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(("reset", device)))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    with PeakMeter(device) as measured:
        assert calls == [("reset", device)]
    assert measured.peak_bytes == 4000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured():
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.empty(2**20, device=device)
    with PeakMeter(device) as measured:
        torch.empty(2**20, device=device)
        torch.empty(2**19, device=device)
    assert measured.peak_bytes == 2**22
    assert before.numel() == 2**20


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device 'meta' can't be measured: use a CPU or a CUDA device"):
        PeakMeter(torch.device("meta"))
