"""Training in 2 and 4 processes gives what training in one gives.

Every configuration trains with AdamW (learning rate 1e-4) in fp32, on sequences that do not divide by the number of
processes and whose labels are ignored unevenly. Of at least 3 batches, the first is profiled, the second takes the
buffers for the first time, the third takes them again. The kinds of models need no third one; one of their three layers
is swapped. Losses, gradient norms, whole gradients (of the first step) and the last weights are compared with one
process of plain PyTorch. The bound is 1e-5, relative, for each; gradients are 6e-7 away or less, and Adam, which
divides by the size of each gradient, amplifies the rounding of the smallest ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.devices import skip_ring_on_cuda
from support.markers.slow import slow_if
from support.modes import BY_KIND
from support.parallel_training import Run, train_alone, train_together
from support.samples.configurations import BOUND, CONFIGURATIONS
from support.stacks import layer_stacks
from torch import Tensor
from typing_extensions import override

from lightning_memo.engine import TestMode

# Each kind of layer once.
QUICK = {
    ("tp2+sp", "mistral_window"), ("cp4 ring", "packed"), ("cp2 ring", "mixtral"),
    ("cp2 ulysses", "mistral_window"), ("cp2 ring", "llama_frozen_below"),
}  # fmt: skip
# Configurations of which each part is in another one as well.
OTHERS = (
    "cp3 ring", "cp4 ulysses", "dp2 zero1", "dp2 zero2", "dp2 x cp2", "dp2 x cp2 zero3 ulysses",
    "cp2 x tp2", "dp2 x tp2+sp zero3", "cp2 x tp2+sp", "cp4 ring", "cp4 ulysses2 x ring2", "tp2", "dp2 zero0",
    "dp2 zero3", "one process zero0",
)  # fmt: skip

PARTS = ("loss", "norm", "gradients", "weights")


def check(configuration: str, run: Run, parts: Sequence[str] = PARTS, **settings: Any) -> None:
    """Train, and compare these parts of what comes out."""
    size, of_configuration = CONFIGURATIONS[configuration]
    skip_ring_on_cuda(of_configuration)
    errors = train_together(size, run, of_configuration | settings).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in parts), f"{configuration} {settings}: {errors}"


# Gradients are accumulated after the engine's part, whatever alpha is.
@slow_if(lambda family, configuration: family == "llama" or configuration in OTHERS)
@pytest.mark.parametrize(
    ("family", "alphas", "accumulate"), [("llama", (0.0, 1.0), 1), ("llama_gqa", (0.5,), 2)], ids=["llama", "llama_gqa"]
)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_equals_one_process_at_every_alpha(
    configuration: str, family: str, alphas: tuple[float, ...], accumulate: int
) -> None:
    for alpha in alphas:
        steps = 3 if alpha == 1.0 else 2
        check(configuration, Run(family=family, tokens=45, accumulate=accumulate, steps=steps, clip=0.5), alpha=alpha)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["tp2+sp", "cp4 ring", "cp4 ulysses2 x ring2", "dp2 x cp2", "cp2 x tp2+sp"])
@pytest.mark.parametrize(
    "run",
    [
        Run(packed=True, steps=2, layers=3),
        Run(family="mistral_window", steps=2, layers=3),
        Run(family="gemma3_mixed_windows", tokens=52, steps=2, layers=3),
        Run(family="qwen3", steps=2, layers=3),
    ],
    ids=["packed documents", "window", "mixed windows", "qk norm"],
)
def test_other_attention_and_layers(configuration: str, run: Run) -> None:
    check(configuration, run, alpha=0.5)


# Layers below the frozen ones run whole, while a batch is laid out for slices.
@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["cp2 ring", "dp2 zero3", "cp2 x tp2+sp", "tp2+sp"])
@pytest.mark.parametrize("family", ["llama_tied", "llama_lora", "llama_frozen_below"])
def test_tied_and_frozen_weights(configuration: str, family: str) -> None:
    check(configuration, Run(family=family, accumulate=2, steps=2, layers=3, clip=0.5), alpha=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["cp2 ring", "cp2 ulysses", "dp2 zero3"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_neox", "gemma"])
def test_other_families(configuration: str, family: str) -> None:
    # GPT-NeoX has biases that begin at zero, and those of keys have only rounding for a gradient: Adam makes it steps.
    check(configuration, Run(family=family, steps=2), parts=("loss", "norm", "gradients"), alpha=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["tp2", "tp2+sp", "cp2 x tp2+sp", "dp2 x tp2+sp zero3"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_of_experts_with_tensor_parallelism(configuration: str, family: str) -> None:
    for alpha in (0.0, 0.5):
        check(configuration, Run(family=family, steps=2), parts=("loss", "norm", "gradients"), alpha=alpha)


@pytest.mark.slow
@pytest.mark.parametrize(("configuration", "slice_tokens"), [("tp2+sp", 1), ("cp2 ring", 3), ("cp2 x tp2+sp", 3)])
def test_many_slices(configuration: str, slice_tokens: int) -> None:
    tokens = 13 if slice_tokens == 1 else 27  # of two processes each
    check(configuration, Run(family="llama_gqa", tokens=tokens), alpha=0.5, slice_tokens=slice_tokens)


# PyTorch's DTensor makes other operations of 257 tokens and more.
@pytest.mark.slow
@pytest.mark.parametrize(("configuration", "family"), [("tp2+sp", "llama_gqa"), ("cp2 x tp2+sp", "mixtral")])
def test_long_sequences_with_sequence_parallelism(configuration: str, family: str) -> None:
    run = Run(family=family, tokens=1040, batch=1, steps=2)
    check(configuration, run, parts=("loss", "norm", "gradients"), alpha=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["cp3 ring", "cp4 ulysses2 x ring2"])
def test_padded_rows(configuration: str) -> None:
    check(configuration, Run(family="llama_gqa", tokens=301, padded=True, steps=2), alpha=0.5)


def labelled_padding(number: int, row: dict[str, Tensor]) -> dict[str, Tensor]:
    return row | {"labels": row["input_ids"]}


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["none", "attention"])
@pytest.mark.parametrize("configuration", ["tp2+sp", "cp2 ring", "cp4 ulysses2 x ring2"])
def test_labels_of_padding(configuration: str, stream_from_host: str) -> None:
    run = Run(family="llama_gqa", tokens=61, padded=True, change=labelled_padding, steps=2, layers=3)
    slices = {} if stream_from_host == "none" else {"stream_from_host": stream_from_host, "slice_tokens": 6}
    check(configuration, run, alpha=0.5, **slices)


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["none", "attention", "hidden"])
@pytest.mark.parametrize("configuration", ["cp2 ring", "cp4 ring", "cp4 ulysses2 x ring2", "cp2 x tp2+sp"])
def test_packed_documents_in_slices(configuration: str, stream_from_host: str) -> None:
    run = Run(family="llama_gqa", packed=True, tokens=96, steps=2)
    check(configuration, run, alpha=0.5, slice_tokens=12, stream_from_host=stream_from_host)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "family", "stream_from_host", "slice_tokens"),
    [
        ("tp2+sp", "llama_gqa", "hidden", 3),
        ("cp2 ring", "llama", "hidden", 4),
        ("cp2 ring", "mistral_window", "attention", 2),
        ("cp2 ulysses", "llama_gqa", "hidden", 3),
        ("cp2 ulysses", "mistral_window", "attention", 5),
        ("cp4 ulysses2 x ring2", "llama", "attention", 3),
        ("cp2 x tp2+sp", "llama_gqa", "hidden", 3),
        ("dp2 x cp2 zero3 ulysses", "llama", "hidden", 2),
        ("cp2 ulysses", "llama_frozen_below", "hidden", 4),
        ("cp2 ring", "llama_frozen_below", "attention", 4),
        ("cp2 ring", "llama_with_reference", "hidden", 4),
    ],
)
def test_keys_and_values_on_the_host(configuration: str, family: str, stream_from_host: str, slice_tokens: int) -> None:
    settings = {"stream_from_host": stream_from_host, "slice_tokens": slice_tokens, "test_mode": TestMode(5, 0.0005)}
    check(configuration, Run(family=family, tokens=29), alpha=0.5, **settings)


def _storage_of(trainer: Any) -> dict[str, Any]:
    return {"storage": trainer.strategy.plan.swap.storage}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "device_memory"),
    [
        *((configuration, size) for configuration in ("tp2", "tp2+sp") for size in ("0.6MiB", "0.8MiB")),
        ("cp2 ring", "0.95MiB"), ("cp2 ring", "1.05MiB"), ("cp2 ulysses", "1.0MiB"),
        ("cp4 ulysses2 x ring2", "0.95MiB"), ("cp2 x tp2+sp", "0.55MiB"),
    ],
)  # fmt: skip
def test_a_place_for_each_kind_of_tensor(configuration: str, device_memory: str) -> None:
    size, settings = CONFIGURATIONS[configuration]
    skip_ring_on_cuda(settings)
    by_kind = {"test_mode": BY_KIND, "device_memory": device_memory, "host_memory": "200KiB"}
    run = Run(family="llama_gqa", tokens=45)
    together = train_together(size, run, settings | by_kind, _storage_of)
    plans = together.notes["storage"]
    assert None not in plans and len(set(plans)) == 1
    errors = together.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [layer_stacks.nested, layer_stacks.repeated, "llama_shared"],
    ids=["nested lists", "one layer", "layers that share an MLP"],
)
def test_layers_of_stacks(family: str | Callable[..., torch.nn.Module]) -> None:
    run = Run(family=family, ignore=0.0, tokens=32)
    errors = train_together(2, run, {"zero_stage": 3, "alpha": 0.5}).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["tp2+sp", "cp2 x tp2+sp", "dp2 x cp2 zero3 ulysses"])
def test_delays_poison_and_planned_memory_change_nothing(configuration: str) -> None:
    run = Run(family="llama_gqa", tokens=45, steps=9)
    size, of_configuration = CONFIGURATIONS[configuration]
    settings = of_configuration | {"alpha": 0.5}
    careful = {"test_mode": TestMode(seed=3, longest_delay_seconds=0.001), "plan_memory": True}
    undisturbed = train_together(size, run, settings)
    disturbed = train_together(size, run, settings | careful, watch=WaitsForPlans)
    for use in disturbed.notes["use"]:
        # A buffer that is being sent lives until the other process has it, a little longer or shorter in every step.
        # What finds its place in use gets other bytes of the arena, which may be the place of others in turn. Two
        # threads may also ask for equal sizes in another order.
        why = {reason for reason, count in use.displaced.items() if count}
        assert why <= {"the memory was not free", "more, or others before them"}, use
        assert use.hits > 1000 and use.missed < use.hits / 50, use
    assert disturbed.losses == undisturbed.losses
    assert all(torch.equal(t, undisturbed.weights[name]) for name, t in disturbed.weights.items())
    errors = undisturbed.worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


class WaitsForPlans(Callback):
    """Lets no step begin while memory is planned in the background, so that there are steps with a plan."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        while trainer.strategy.memory.busy:
            time.sleep(0.01)

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.notes["use"] = trainer.strategy.memory.use
