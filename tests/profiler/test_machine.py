import threading
import time

import pytest
import torch

from lightning_memo.profiler import measured_costs
from lightning_memo.profiler.measured_costs import measure_copy_bandwidth
from lightning_memo.utils import free_memory
from lightning_memo.utils.free_memory import free_device_bytes


def test_the_memory_of_a_cpu_is_the_hosts(monkeypatch):
    monkeypatch.setattr(free_memory, "available_host_bytes", lambda: 77)
    assert free_device_bytes(torch.device("cpu")) == 77


def test_free_bytes_of_a_gpu_include_what_pytorch_reserved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 120)
    assert free_device_bytes(torch.device("cuda", 0)) == 1180


def test_other_devices_ask_for_a_setting():
    with pytest.raises(ValueError, match="device 'meta' can't be read: set device_memory"):
        free_device_bytes(torch.device("meta"))


class Clock(threading.local):
    """Stands for `time`; it goes on in copies only, in each thread by itself: a busy machine changes nothing."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def copy_of(self, seconds):
        def copy():
            self.now += seconds

        return copy


@pytest.fixture
def clock(monkeypatch):
    stands_in = Clock()
    monkeypatch.setattr(measured_costs, "time", stands_in)
    return stands_in


def test_each_direction_gets_its_own_bandwidth(clock):
    offload, prefetch = measure_copy_bandwidth(clock.copy_of(0.002), clock.copy_of(0.04), 1000, 0.1)
    assert offload == pytest.approx(1000 / 0.002)
    assert prefetch == pytest.approx(1000 / 0.04)


def test_both_directions_run_at_once():
    meeting = threading.Barrier(2, timeout=60)
    warm = {"out": False, "in": False}

    def copy(name):
        if warm[name] and not meeting.broken:
            try:
                meeting.wait()
            except threading.BrokenBarrierError:
                pytest.fail("the other direction was not running")
            meeting_over.set()
        warm[name] = True

    meeting_over = threading.Event()

    def once(name):
        if not meeting_over.is_set():
            copy(name)

    assert all(rate > 0 for rate in measure_copy_bandwidth(lambda: once("out"), lambda: once("in"), 1, 0.01))
    assert meeting_over.is_set()


def test_a_slow_direction_is_measured_however_short_the_time(clock):
    _, prefetch = measure_copy_bandwidth(clock.copy_of(0.001), clock.copy_of(0.03), 1000, 0.001)
    assert prefetch == pytest.approx(1000 / 0.03)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_that_fails_ends_the_measurement(failing):
    calls = []

    def broken():
        calls.append(1)
        if len(calls) > 1:
            raise OSError("copy failed")

    copies = [lambda: time.sleep(0.001)] * 2
    copies[failing] = broken
    with pytest.raises(OSError, match="copy failed"):
        measure_copy_bandwidth(*copies, 1000, 60.0)


def test_tensor_copies_are_measured():
    source, target = torch.zeros(2**16), torch.zeros(2**16)
    other, back = torch.zeros(2**16), torch.zeros(2**16)
    rates = measure_copy_bandwidth(lambda: target.copy_(source), lambda: back.copy_(other), 2**18, 0.02)
    assert all(rate > 1e6 for rate in rates)
