"""Device memory does not grow with the number of layers, and stays below that of gradient checkpointing."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from support.devices import DEVICE
from support.families import VOCABULARY, make_batch
from support.harness import Batch, EngineUnderTest
from support.markers.slow import slow_if
from torch import nn

from lightning_memo.profiler.memory_meter import PeakMeter

# Sizes at which activations dominate: a layer input has 512 KiB, and the logits of the small vocabulary 384 KiB.
TOKENS, BATCH, HIDDEN = 512, 2, 128
INPUT_BYTES = BATCH * TOKENS * HIDDEN * 4
# The CPU's random state, kept at the start of each layer call and after each slice's attention. It is in host memory on
# every machine, but the meter counts it where device and host are one.
RANDOM_STATE_BYTES = torch.get_rng_state().nbytes

each_alpha = pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0], ids=lambda alpha: f"alpha{alpha:g}")


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


def step_peak(model: nn.Module, batch: Batch) -> int:
    """Peak bytes of forward and backward, without parameters and gradients, which exist before."""
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=False)
    with PeakMeter(DEVICE) as meter:
        model(**batch).loss.backward()
    return meter.peak_bytes


@functools.cache
def peak_with_engine(layers: int, alpha: float) -> int:
    """The peak of a step with the engine, including the rounding buffers, which were allocated before."""
    model, batch = build(layers), make_batch(BATCH, TOKENS)
    with EngineUnderTest(model, test_mode=None) as under_test:
        under_test.profile_step(batch)
        slot_bytes = max(under_test.load(alpha))
        peak = step_peak(model, batch)
        under_test.assert_as_planned()
    return peak + 2 * slot_bytes


@functools.cache
def peak_of_plain_training(layers: int, checkpointing: bool) -> int:
    model = build(layers)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return step_peak(model, make_batch(BATCH, TOKENS))


@slow_if(lambda alpha: alpha != 0.5)
@each_alpha
def test_peak_does_not_grow_with_layers(alpha: float) -> None:
    shallow, deep = peak_with_engine(8, alpha), peak_with_engine(16, alpha)
    assert deep - shallow < 0.01 * shallow
    # A single tensor kept per layer, however small, would exceed this bound.
    states = 3 if 0.0 < alpha < 1.0 else 2
    assert deep - shallow <= 8 * (states * RANDOM_STATE_BYTES + 256)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_the_meter_sees_what_layers_keep() -> None:
    """Plain training keeps 15 layer inputs' worth per layer here, and gradient checkpointing one."""
    assert peak_of_plain_training(16, False) - peak_of_plain_training(8, False) > 8 * 10 * INPUT_BYTES
    assert peak_of_plain_training(16, True) - peak_of_plain_training(8, True) >= 8 * INPUT_BYTES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("layers", [8, 16])
def test_full_recomputation_takes_no_more_than_gradient_checkpointing(layers: int) -> None:
    assert peak_with_engine(layers, 0.0) <= 1.15 * peak_of_plain_training(layers, True)


@pytest.mark.slow
@each_alpha
def test_after_the_forward_only_the_last_two_layers_are_on_the_device(alpha: float) -> None:
    model, batch = build(8), make_batch(BATCH, TOKENS)
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(alpha)
        loss = model(**batch).loss
        memory = under_test.engine.memory
        assert memory is not None
        assert memory.host.arena.buffers_in_use == 6  # each of the first six slots has one host buffer
        assert memory.slots_in_use - memory.host.arena.buffers_in_use == 2  # the last two have the rounding buffers
        assert memory.stats.unplanned_slots == 0
        loss.backward()
        under_test.assert_empty()
        under_test.assert_as_planned()
