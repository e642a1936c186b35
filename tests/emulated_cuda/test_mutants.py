"""Faults that are planted in the engine are noticed on the emulated device, by at least one setting of the delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.devices import emulated_device
from support.harness import EngineUnderTest, Step, loss_and_gradients
from support.samples.cuda import make_batch, make_model

from lightning_memo.artifacts.swap_plan import StreamFromHost
from lightning_memo.engine.copy_streams import CudaCopyEvent, CudaCopyStream
from lightning_memo.engine.memory.offloaded_tensor import HostRows
from lightning_memo.engine.memory.slot_memory import RoundingBuffers

# Longest delays of copies and kernels, in microseconds. Late kernels bring out copies that do not wait for them.
DELAYS = [(20_000, 0), (3_000, 1_000)]
LONGER = [(200_000, 0), (3_000, 20_000)]  # on a busy machine, everything else is late, too
# Of the whole gradient. Where keys and values are on the host, attention runs in slices, which takes half precision.
SETTINGS = {"none": (torch.float32, 1e-5), "hidden": (torch.bfloat16, 2**-5)}

# The emulated device, and the sums of recomputed tensors.
NOTICED = ("was written after its memory had been freed", "was recomputed with other values")


def step_with(delays: tuple[int, int], stream_from_host: StreamFromHost) -> tuple[Step, Step]:
    """Plain training's step, and the engine's with late copies or kernels."""
    device = torch.device("cuda", 0)
    model = make_model(device, SETTINGS[stream_from_host][0])
    batch = {name: t[:, :128] for name, t in make_batch(device).items()}
    plain = loss_and_gradients(model, batch)
    slice_tokens = None if stream_from_host == "none" else 32
    with EngineUnderTest(model, None, slice_tokens, stream_from_host, device, check_slices=False) as under_test:
        under_test.profile_step(batch)
        under_test.load(1.0, slice_tokens)
        under_test.step(batch)  # in which the host waits for the sums of all recomputed tensors
        emulated_device.set_delays(*delays)
        return plain, under_test.step(batch)


def is_noticed(stream_from_host: StreamFromHost) -> bool:
    for delays in DELAYS + LONGER:
        try:
            plain, step = step_with(delays, stream_from_host)
            error = step.distance(plain)
        except RuntimeError as raised:
            return any(line in str(raised) for line in NOTICED)
        if not error <= SETTINGS[stream_from_host][1]:
            return True
    return False


@pytest.mark.parametrize("delays", DELAYS, ids=str)
@pytest.mark.parametrize("stream_from_host", ["none", "hidden"])
def test_without_a_fault_the_gradients_are_right(stream_from_host: StreamFromHost, delays: tuple[int, int]) -> None:
    plain, step = step_with(delays, stream_from_host)
    assert step.distance(plain) <= SETTINGS[stream_from_host][1]


def _no_wait(self: CudaCopyEvent) -> None: ...


def _never_computed(self: CudaCopyStream) -> None: ...


def _free_at_once(self: Any, kept: int) -> None:
    self._leaving.clear()


def _swapped(enter: Callable[..., bool]) -> Callable[..., bool]:
    """Take the other buffer in the backward, where the slot that owns it has not left."""

    def mutant(self: Any, slot: Any, call: int) -> bool:
        entered = enter(self, slot, call)
        if slot.rounding is not None and slot.shares["host"].copied_bytes:
            slot.buffer = self._buffers[1 - slot.rounding]
        return entered

    return mutant


MUTANTS: dict[str, tuple[Any, str, Any, StreamFromHost]] = {
    "computation does not wait for copies": (CudaCopyEvent, "wait", _no_wait, "none"),
    "copies do not wait for computation": (CudaCopyStream, "computed", _never_computed, "none"),
    "memory is freed while it is copied": (HostRows, "_free_sources", _free_at_once, "hidden"),
    "rounding buffers are swapped": (RoundingBuffers, "enter", _swapped(RoundingBuffers.enter), "none"),
}


@contextmanager
def planted(name: str) -> Iterator[StreamFromHost]:
    owner, attribute, mutant, stream_from_host = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, mutant)
        yield stream_from_host


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_noticed(name: str) -> None:
    with planted(name) as stream_from_host:
        assert is_noticed(stream_from_host)
