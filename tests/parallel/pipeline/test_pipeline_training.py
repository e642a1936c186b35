"""Training in the stages of a pipeline gives what training in one process gives.

Losses, gradient norms, whole gradients (of the first step) and the last weights are compared with one process of plain
PyTorch, as in `test_parallel_training.py`. Of 3 batches, the first is profiled, one micro-batch after the other; in the
others, micro-batches overlap.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from support.architectures.hybrids import make_hybrid
from support.markers.slow import slow_if
from support.modes import BY_ALPHA
from support.parallel_training import Run, WatchAlpha, train_alone, train_together
from support.processes import ProcessError
from support.samples.configurations import BOUND

from lightning_memo.engine import TestMode

PARTS = ("loss", "norm", "gradients", "weights")
RUN = Run(family="llama_gqa", tokens=45, batch=4, layers=8, steps=3, clip=0.5)


class WatchMemory(Callback):
    """Notes what the plan of the last batch needs, and what was needed."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        swap, memory = trainer.strategy.engine.swap, trainer.strategy.engine.memory
        self.notes = {"calls": swap.calls, "in_flight": swap.in_flight, "in_use": trainer.strategy.engine.slots_in_use}
        stored = () if swap.storage.has_one_alpha else swap.storage.calls
        self.notes["places"] = sorted({r.place for call in stored for r in call.ranges})
        if memory is not None:
            self.notes |= {"unplanned": memory.stats.unplanned_slots, "overflow": memory.stats.overflow_bytes}
            self.notes |= {"host": memory.host_bytes, "peak": memory.stats.peak_host_bytes}


def check(run: Run, settings: dict[str, Any], stages: int = 2) -> dict[str, list[Any]]:
    outcome = train_together(stages, run, {"pipeline_parallel_size": stages} | settings, watch=WatchMemory)
    errors = outcome.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), errors
    return outcome.notes


class HeadsByName(Callback):
    """Gives heads an optimizer group of their own, by their name, which a tied head has on the last stage only."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        group = trainer.optimizers[0].param_groups[0]
        heads = [p for name, p in module.named_parameters() if "lm_head" in name]
        self.notes = {"heads": len(heads)}
        if heads:
            group["params"] = [p for p in group["params"] if all(p is not head for head in heads)]
            trainer.optimizers[0].add_param_group({"params": heads, "lr": 10 * group["lr"], "weight_decay": 0.5})


@pytest.mark.slow
def test_tied_weights_of_other_optimizer_groups_stay_equal() -> None:
    run = Run(family="llama_tied", tokens=45, batch=4, layers=8, steps=3, clip=0.5)
    outcome = train_together(2, run, {"pipeline_parallel_size": 2, "alpha": 0.5}, watch=HeadsByName)
    assert outcome.notes["heads"] == [0, 1]
    errors = outcome.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), errors


@slow_if(lambda alpha, accumulate: (alpha, accumulate) not in ((0.0, 1), (0.5, 4)))
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_equals_one_process_at_every_alpha(alpha: float, accumulate: int) -> None:
    run = Run(family="llama_gqa", tokens=45, batch=4, layers=8, steps=3, clip=0.5, accumulate=accumulate)
    notes = check(run, {"alpha": alpha})
    # The first stage has the forwards of two micro-batches before the backward of the first one.
    assert (notes["in_flight"], notes["calls"], notes["in_use"]) == ([2, 1], [8, 4], [0, 0])
    assert notes["unplanned"] == notes["overflow"] == [0, 0]
    assert notes["peak"] == notes["host"] and notes["host"][0] == 4 * notes["host"][1] > 0  # 8 calls, and 4 - 2


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    ("family", "device_memory"),
    [("llama_tied", "1000KiB"), ("gemma3_mixed_windows", "1350KiB"), ("llama_lora", "600KiB")],
)
def test_a_place_for_each_kind_of_tensor(family: str, device_memory: str, blocks: int) -> None:
    run = Run(family=family, tokens=45, batch=6, layers=8, steps=3, clip=0.5)
    budget = {"device_memory": device_memory, "host_memory": "300KiB"}
    delays = {"test_mode": TestMode(5, 0.0005, plans="kinds")}
    notes = check(run, {"virtual_pipeline_size": blocks} | budget | delays)
    assert (notes["calls"], notes["in_use"]) == ([12, 8] if blocks == 2 else [8, 4], [0, 0])
    assert notes["places"][0] == ["device", "host"]
    assert notes["unplanned"] == notes["overflow"] == [0, 0]
    assert all(0 < peak <= host for peak, host in zip(notes["peak"], notes["host"], strict=True))
    assert blocks == 2 or notes["peak"] == notes["host"]


@pytest.mark.slow
def test_a_stage_without_a_plan_ends_all_in_one_line() -> None:
    """The last stage, with fewer activations in flight, has one."""
    run = Run(family="llama_gqa", tokens=45, batch=4, layers=8, steps=2)
    budget = {"device_memory": "500KiB", "host_memory": "100KiB"}
    with pytest.raises(ProcessError, match=r"rank 0: .* to the host, but the budget is 50\.0 KiB") as caught:
        train_together(2, run, {"pipeline_parallel_size": 2} | budget)
    assert "rank 0: rank" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["llama_tied", "gemma3_mixed_windows", "llama_lora", "gemma", "qwen3", "gpt_neox", "llama_frozen_below", "mixtral"],
)
def test_kinds_of_models(family: str) -> None:
    # The weights of GPT-NeoX whose gradients are rounding take other steps.
    layers = 6 if family == "llama_frozen_below" else 4  # of which the first two are frozen
    run = Run(family=family, tokens=45, batch=4, layers=layers, steps=3, clip=0.5, accumulate=2)
    outcome = train_together(2, run, {"pipeline_parallel_size": 2, "alpha": 0.5})
    errors = outcome.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS if part != "weights" or family != "gpt_neox"), errors


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("config", ["BambaConfig", "FalconH1Config", "NemotronHConfig", "Qwen3_5TextConfig"])
def test_hybrid_models(config: str, blocks: int) -> None:
    """Layers of Bamba and Falcon-H1 return tuples."""
    layers = {} if config == "NemotronHConfig" else {"num_hidden_layers": 4}
    layers |= {"layer_types": ["linear_attention", "full_attention"] * 2} if config.startswith("Qwen") else {}
    run = Run(family=functools.partial(make_hybrid, config, **layers), tokens=45, batch=4, steps=3, clip=0.5)
    check(run, {"alpha": 0.5, "virtual_pipeline_size": blocks})


@pytest.mark.slow
def test_chunked_loss_and_planned_memory() -> None:
    run = Run(family="llama_tied", tokens=45, batch=4, layers=4, steps=7, clip=0.5)
    check(run, {"alpha": 0.5, "loss_chunk_tokens": 7, "plan_memory": True})


@pytest.mark.slow
def test_three_stages_with_delays_and_poison() -> None:
    run = Run(family="llama_gqa", tokens=45, batch=6, layers=8, steps=3, clip=0.5)
    settings = {"alpha": 0.5, "pipeline_layers": [3, 3, 2], "test_mode": TestMode(5, 0.0005)}
    notes = check(run, settings, stages=3)
    assert (notes["in_flight"], notes["calls"], notes["in_use"]) == ([3, 2, 1], [9, 6, 2], [0, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "padded", "packed"), [((48, 24, 60), False, False), ((), True, False), ((), False, True)]
)
def test_rows_of_other_kinds(lengths: tuple[int, ...], padded: bool, packed: bool) -> None:
    """A longer batch is profiled again, one micro-batch after the other."""
    run = Run(family="llama_gqa", tokens=45, lengths=lengths, padded=padded, packed=packed, batch=4, layers=4, steps=4)
    check(run, {"alpha": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_dynamic_rope", "phi3_longrope", "gemma3_dynamic_rope"])
def test_rotary_frequencies_are_those_of_the_whole_batch(family: str) -> None:
    """They depend on the largest position of all rows, and micro-batches have other ones."""
    check(Run(family=family, tokens=48, packed=True, uneven=True, batch=4, layers=4), {"alpha": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [2, 3])
def test_micro_batches_of_several_rows(micro_batch_size: int) -> None:
    """Three rows do not divide a batch of four: the micro-batches then have one."""
    check(RUN, {"alpha": 0.5, "micro_batch_size": micro_batch_size})


@pytest.mark.slow
def test_plain_training_where_memory_is_ample() -> None:
    notes = check(RUN, {})
    assert notes["calls"] == [8, 4]


@pytest.mark.slow
def test_a_small_host_budget_limits_alpha_by_the_micro_batches_in_flight() -> None:
    """With the same budget, the first stage swaps a smaller fraction: eight calls leave the device, two of the last."""
    settings = {"pipeline_parallel_size": 2, "test_mode": BY_ALPHA, "device_memory": "1MiB", "host_memory": "1MiB"}
    outcome = train_together(2, RUN, settings, watch=WatchAlpha)
    errors = outcome.worst_error(train_alone(RUN))
    assert all(errors[part] <= BOUND for part in PARTS), errors
    first, last = outcome.notes["alpha"]
    assert first < last == 1.0
