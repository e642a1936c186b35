"""Swapping per slice, running the model slice by slice, and the loss in chunks, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from support.harness import EngineUnderTest, Step, loss_and_gradients
from support.markers.slow import slow_if
from support.samples.cuda import FARTHER, MIB, make_batch, make_model
from support.trainer_harness import fit
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.swap_plan import StreamFromHost
from lightning_memo.engine import TestMode
from lightning_memo.loss.attach_loss import attach_chunked_loss

Batch = dict[str, Tensor]


def truth_of(model: nn.Module, batch: Batch) -> Step:
    """Loss and gradients in fp64, on the CPU."""
    in_double = copy.deepcopy(model).to("cpu", torch.float64)
    return loss_and_gradients(in_double, {name: t.cpu() for name, t in batch.items()})


def on_cpu(step: Step) -> Step:
    return Step(step.loss.cpu(), {name: g.cpu() for name, g in step.gradients.items()})


@slow_if(lambda window, stream_from_host: (window is None) == (stream_from_host != "hidden"))
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("stream_from_host", ["attention", "hidden", "model"])
def test_gradients_are_those_of_plain_training(
    stream_from_host: StreamFromHost, window: int | None, device: torch.device
) -> None:
    """Keys and values are read in blocks with random delays, through buffers that are poisoned when they are free."""
    model, batch = make_model(device, window=window), make_batch(device)
    truth = truth_of(model, batch)
    plain = on_cpu(loss_and_gradients(model, batch)).distance(truth)
    late = TestMode(seed=1, longest_delay_seconds=0.002)
    with EngineUnderTest(model, late, 64, stream_from_host, device) as under_test:
        under_test.engine.attention.block_tokens = 128
        assert on_cpu(under_test.profile_step(batch)).distance(truth) <= FARTHER * plain
        for alpha in (0.0, 0.5, 1.0):
            under_test.load(alpha)
            assert on_cpu(under_test.step(batch)).distance(truth) <= FARTHER * plain
            under_test.assert_as_planned()


def test_full_precision_is_named_as_the_reason() -> None:
    line = r'in half precision only on a GPU, and not in torch\.float32: set stream_from_host="none"$'
    with pytest.raises(ValueError, match=line):
        fit(MemoStrategy(stream_from_host="hidden", slice_tokens=16), accelerator="gpu", max_steps=2)


def test_keys_and_values_that_stay_on_the_device_are_told_of() -> None:
    with pytest.warns(
        UserWarning, match="keys and values stay on the device, because attention runs slice after slice in"
    ):
        fit(MemoStrategy(alpha=0.5, slice_tokens=16), accelerator="gpu", max_steps=2)


def loss_peak_bytes(model: nn.Module, batch: Batch, device: torch.device) -> int:
    """Peak bytes of a step above those at its start, when the gradients exist already."""
    loss_and_gradients(model, batch)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model(**batch).loss.backward()
    return torch.cuda.max_memory_allocated(device) - before


def test_logits_exist_in_chunks(device: torch.device) -> None:
    model, batch = make_model(device), make_batch(device)
    assert isinstance(model, PreTrainedModel)
    model.resize_token_embeddings(32768)
    truth = truth_of(model, batch)
    plain, plain_bytes = on_cpu(loss_and_gradients(model, batch)), loss_peak_bytes(model, batch, device)
    attach_chunked_loss(model, chunk_tokens=64)
    chunked, chunked_bytes = on_cpu(loss_and_gradients(model, batch)), loss_peak_bytes(model, batch, device)
    assert chunked.distance(truth) <= FARTHER * plain.distance(truth)
    torch.testing.assert_close(chunked.loss, plain.loss, rtol=2**-7, atol=0)  # bf16
    assert plain_bytes - chunked_bytes >= 64 * MIB  # 1024 x 32768 logits in bf16 alone
