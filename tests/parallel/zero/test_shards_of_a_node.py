"""ZeRO 3 whose weights are sharded over the processes of a node between forward and backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.families import FAMILIES
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together
from support.processes import run_in_processes
from support.samples.collectives import GATHER, LAYERS, RUN, UNITS, Collectives, Counting
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memo.config import MemoConfig
from lightning_memo.parallel.device_mesh import build_mesh, neighbours
from lightning_memo.parallel.parallel_sizes import ParallelSizes, resolve_sizes

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp2 x cp2": {"context_parallel_size": 2},
    "alpha 0": {"alpha": 0.0},
    "alpha 1": {"alpha": 1.0},
    "slices": {"slice_tokens": 8, "stream_from_host": "hidden"},
    "offload": {"offload_state": True},
}


@slow_if(lambda name: name != "dp4")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_one_process(name: str) -> None:
    run = Run(family="llama_gqa", batch=4, accumulate=2)
    settings = {"zero_stage": 3, "zero_shard_size": 2, "alpha": 0.5} | CONFIGURATIONS[name]
    errors = train_together(4, run, settings).worst_error(train_alone(run))
    assert all(error <= 1e-5 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_frozen_below", "llama_lora", "llama_tied"])
def test_frozen_adapted_and_tied_weights(family: str) -> None:
    run = Run(family=family, batch=4)
    errors = train_together(4, run, {"zero_stage": 3, "zero_shard_size": 2}).worst_error(train_alone(run))
    assert all(error <= 1e-5 for error in errors.values()), errors


def with_trained_norms(**sizes: Any) -> nn.Module:
    """A model whose norms have different weights, as those of trained models: their blocks are not rounded exactly."""
    model = FAMILIES["llama_gqa"].build(**sizes)
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.ndim == 1:
            p.data = 0.5 + torch.rand(p.shape, generator=generator)
    return model


@pytest.mark.slow
def test_quantised_weights_are_not_rounded_again() -> None:
    """The backward has the weights of the forward, and results are those without neighbours."""
    run = Run(family=with_trained_norms, batch=4, layers=3)
    settings = {"zero_stage": 3, "alpha": 0.5, "zero_communication": "int8"}
    near, all_ranks = (train_together(4, run, settings | more) for more in ({"zero_shard_size": 2}, {}))
    assert near.losses == pytest.approx(all_ranks.losses, rel=1e-6)
    for name, gradient in near.gradients.items():
        assert (gradient - all_ranks.gradients[name]).norm() <= 1e-5 * gradient.norm()


@pytest.mark.slow
def test_experts_that_more_processes_hold() -> None:
    """Their number of replicas does not divide that of the experts, so that another dimension is sharded."""
    run = Run(family="mixtral", batch=8, accumulate=2)
    settings = {"zero_stage": 3, "zero_shard_size": 2, "alpha": 0.5, "expert_parallel_size": 2}
    errors = train_together(8, run, settings).worst_error(train_alone(run))
    assert all(error <= 1e-5 for error in errors.values()), errors


class LooksAtWeights(Callback):
    """Notes norms of the weights of layers between forward and backward."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    @override
    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        seen = {name: p.full_tensor() for name, p in module.model.model.layers.named_parameters()}  # type: ignore
        self.notes.setdefault("norms", {name: float(t.norm()) for name, t in seen.items()})


@pytest.mark.slow
def test_weights_between_forward_and_backward() -> None:
    run = Run(family="llama_gqa", batch=4, layers=2)
    settings = {"zero_stage": 3, "alpha": 0.5, "tensor_parallel_size": 2}
    near, all_ranks = (
        train_together(8, run, settings | more, watch=LooksAtWeights).notes["norms"]
        for more in ({"zero_shard_size": 2}, {})
    )
    assert near[0].keys() == all_ranks[0].keys() and near[0]
    for norms in near:
        assert norms == pytest.approx(all_ranks[0], rel=1e-6)


class GroupSizes(Counting):
    """Counts all-gathers by the number of processes."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == f"c10d::{GATHER}":
            gathered, own = (tree_leaves(t)[0] for t in args[:2])
            self.counts[gathered.numel() // own.numel()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("communication", ["none", "int8"])
def test_weights_for_the_backward_come_from_neighbours(communication: str) -> None:
    """So that nothing crosses nodes for them."""
    settings = {"zero_stage": 3, "zero_shard_size": 2, "alpha": 0.5, "zero_communication": communication}
    for counts in train_together(4, RUN, settings, watch=partial(Collectives, GroupSizes)).notes["counts"]:
        assert counts == Counter({4: UNITS * RUN.accumulate, 2: LAYERS * RUN.accumulate})


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=str)
def test_beside_other_sizes(other: dict[str, int]) -> None:
    """Stages of a pipeline gather weights from all processes for one of the two passes of a micro-batch."""
    run = replace(RUN, batch=8, layers=4)
    settings = {"zero_stage": 3, "zero_shard_size": 2, "alpha": 0.5} | other
    outcome = train_together(8, run, settings, watch=partial(Collectives, GroupSizes))
    errors = outcome.worst_error(train_alone(run))
    assert all(error <= 1e-5 for error in errors.values()), errors
    layers, passes = (2, 2 * RUN.accumulate) if "pipeline_parallel_size" in other else (4, RUN.accumulate)
    units = RUN.accumulate
    for counts in outcome.notes["counts"]:
        assert (counts[4], counts[2]) == (layers * passes + units, layers * passes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("llama_gqa", {}),
        ("llama_tied", {"virtual_pipeline_size": 2, "pipeline_layers": [1, 2, 1, 1]}),
        ("llama_lora", {"context_parallel_size": 2, "ulysses_size": 2}),
        ("mixtral", {"expert_parallel_size": 2}),
        ("mixtral", {"expert_parallel_size": 4}),
    ],
    ids=str,
)
def test_pipelines_whose_stages_have_different_layers(family: str, other: dict[str, Any]) -> None:
    """Process groups are made by all processes alike."""
    run = Run(family=family, batch=8, layers=5 if "pipeline_layers" in other else 3, accumulate=2)
    settings = {"zero_stage": 3, "zero_shard_size": 2, "pipeline_parallel_size": 2, "alpha": 0.5} | other
    errors = train_together(8, run, settings).worst_error(train_alone(run))
    assert all(error <= 1e-5 for error in errors.values()), errors


def groups_of_neighbours(sizes: ParallelSizes, size: int | None, experts: int) -> list[int] | None:
    time = timedelta(seconds=30)
    mesh = neighbours(build_mesh(sizes, torch.device("cpu"), time), size, time, experts)
    return None if mesh is None else mesh.mesh.tolist()


@pytest.mark.parametrize(
    ("sizes", "size", "experts", "expected"),
    [
        (ParallelSizes(data=4), None, 1, None),
        (ParallelSizes(data=4), 4, 1, None),
        (ParallelSizes(data=4), 2, 1, [[0, 1], [2, 3]]),
        (ParallelSizes(data=2, context=2), 2, 1, [[0, 1], [2, 3]]),
        (ParallelSizes(data=4), 2, 2, None),  # two processes hold the same experts
        (ParallelSizes(data=4), 3, 1, None),
    ],
    ids=str,
)
def test_neighbours(sizes: ParallelSizes, size: int | None, experts: int, expected: list[list[int]] | None) -> None:
    assert run_in_processes(4, groups_of_neighbours, sizes, size, experts) == [expected] * 4


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zero_shard_size=4 is for weights that are gathered .*: set zero_stage=3"):
        MemoConfig(zero_stage=2, zero_shard_size=4)
    with pytest.raises(ValueError, match="zero_shard_size=0 is not a number of processes: give an integer"):
        MemoConfig(zero_stage=3, zero_shard_size=0)
    with pytest.raises(ValueError, match=r"zero_shard_size=1 keeps the weights whole .*: set zero_stage=2"):
        MemoConfig(zero_stage=3, zero_shard_size=1)
    with pytest.raises(ValueError, match=r"zero_shard_size=4 does not divide .* processes with the same weights: give"):
        resolve_sizes(MemoConfig(zero_stage=3, zero_shard_size=4), 6)


def test_a_module_and_a_plan_know_it() -> None:
    """Otherwise a second fit of a module would go on with the shards of the first, without a word."""
    assert ParallelSizes(data=4).describe(3, "int8", 2) == "dp4-cp1-tp1-zero3-shard2-int8"
