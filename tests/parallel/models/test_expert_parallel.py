"""Experts divided over data- and context-parallel processes: results are those of one process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from support.architectures.mixtures import MIXTURES, lopsided
from support.devices import skip_ring_on_cuda
from support.families import FAMILIES
from support.markers.slow import slow_if
from support.modes import JOINT
from support.parallel_training import Outcome, Run, train, train_alone, train_together
from support.processes import run_in_processes
from support.samples.configurations import BOUND
from support.trainer_harness import LanguageModel, loader, make_trainer
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_memo import MemoStrategy
from lightning_memo.config import MemoConfig
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.parallel_sizes import ParallelSizes, resolve_sizes
from lightning_memo.parallel.tensor.experts import check_experts

_EP2, _EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
_CP2, _TP2 = {"context_parallel_size": 2}, {"tensor_parallel_size": 2}
# Name: processes, and settings of the strategy.
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, _EP2),
    "ep2 zero3": (2, _EP2 | {"zero_stage": 3}),
    "ep2 zero3 offload": (2, _EP2 | {"zero_stage": 3, "offload_state": True}),
    "cp2 ep2": (2, _EP2 | _CP2),
    "dp4 ep2 zero0": (4, _EP2),
    "dp4 ep2 zero1": (4, _EP2 | {"zero_stage": 1}),
    "dp4 ep2 zero2": (4, _EP2 | {"zero_stage": 2}),
    "dp4 ep2 zero3": (4, _EP2 | {"zero_stage": 3}),
    "dp2 x cp2 ep2 zero3": (4, _EP2 | _CP2 | {"zero_stage": 3}),
    "dp2 x cp2 ep4": (4, _EP4 | _CP2),
    "dp2 x cp2 ep4 zero3 ulysses": (4, _EP4 | _CP2 | {"zero_stage": 3, "ulysses_size": 2}),
    "ep2 x tp2": (4, _EP2 | _TP2 | {"sequence_parallel": False}),
    "ep2 x tp2+sp": (4, _EP2 | _TP2),
}
# Those with all families. The others, which combine the same parts, run with one.
WITH_ALL = ("ep2", "cp2 ep2", "ep2 x tp2", "dp2 x cp2 ep2 zero3")
MORE = {("dp4 ep2 zero3", "granitemoe_balanced")}


def _trains(configuration: str, family: str) -> bool:
    """Whether the model trains in a configuration without divided experts."""
    if family == "gpt_oss":
        return "cp" not in configuration and "tp" not in configuration  # attention sinks, and no plan for it
    if family == "granitemoe_balanced":
        return "tp" not in configuration  # transformers has no plan for it
    return not (family in ("deepseek_v3", "lopsided") and "sp" in configuration)  # its plan leaves projections whole


def check(size: int, run: Run, settings: dict[str, Any]) -> None:
    """Train, and compare losses and gradients with those of one process."""
    skip_ring_on_cuda(settings)
    errors = train_together(size, run, settings).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


@slow_if(lambda configuration, family: (configuration, family) != ("cp2 ep2", "deepseek_v3"))
@pytest.mark.parametrize(
    ("configuration", "family"),
    [
        (c, f)
        for c in CONFIGURATIONS
        for f in MIXTURES
        if _trains(c, f) and (c in WITH_ALL or f == "mixtral_balanced" or (c, f) in MORE)
    ],
)
def test_equals_one_process(configuration: str, family: str) -> None:
    size, settings = CONFIGURATIONS[configuration]
    run = Run(family=MIXTURES[family], tokens=45, batch=4, steps=2, layers=3, accumulate=2)
    check(size, run, settings | {"alpha": 0.5})


WAYS: dict[str, dict[str, Any]] = {
    "alpha=auto": {},
    "alpha=0": {"alpha": 0.0},
    "alpha=1": {"alpha": 1.0, "plan_memory": True},
    "slices": {"alpha": 0.5, "slice_tokens": 100},
    "slices on the device": {"alpha": 0.5, "slice_tokens": 100, "stream_from_host": "none"},
    "nested slices": {"alpha": 0.5, "slice_tokens": 100, "test_mode": JOINT},
    "states on the host": {"alpha": 0.5, "slice_tokens": 100, "stream_from_host": "hidden"},
    "little memory": {"device_memory": "5MiB"},
    "shared sequences": {"alpha": 0.5, "slice_tokens": 50, "context_parallel_size": 2, "zero_stage": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_uneven_loads_in_all_ways_to_run_layers(way: str) -> None:
    """One process gets all tokens, and the other one none."""
    check(2, Run(family=lopsided, tokens=300, steps=4, layers=4), _EP2 | WAYS[way])


def _bytes_of_weights(trainer: Any) -> dict[str, Any]:
    held: Counter[bool] = Counter()
    for name, p in trainer.lightning_module.named_parameters():
        held[".experts." in name] += local_part(p).nbytes
    return {"experts": held[True], "others": held[False]}


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["ep2", "ep2 zero3", "dp4 ep2 zero0", "dp4 ep2 zero3", "ep2 x tp2"])
def test_bytes_of_weights(configuration: str) -> None:
    size, settings = CONFIGURATIONS[configuration]
    run = Run(family="qwen3_moe_balanced", tokens=16, batch=4, steps=1, layers=2)
    counts: Counter[bool] = Counter()
    for name, p in run.build().named_parameters():
        counts[".experts." in name] += p.nbytes
    notes = train_together(size, run, settings | {"alpha": 0.0}, _bytes_of_weights).notes
    sharded = size if settings.get("zero_stage") == 3 else 1
    assert notes["experts"] == [counts[True] // max(sharded, 2 * settings.get("tensor_parallel_size", 1))] * size
    if "tp" not in configuration:
        assert notes["others"] == [counts[False] // sharded] * size


# ---- checkpoints

RUN = Run(family="qwen3_moe_balanced", tokens=45, batch=4, clip=0.5, steps=4, layers=3)
SAVED_AFTER = 2
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2 x tp2+sp": CONFIGURATIONS["ep2 x tp2+sp"],
    "dp4 ep2 zero3": CONFIGURATIONS["dp4 ep2 zero3"],
    "dp2 zero3": (2, {"zero_stage": 3}),
    "one": (1, {}),
}
RESUMED = {"dp4 ep2 zero3", "dp2 zero3", "one"}


def _train(settings: dict[str, Any], folder: str, resume: bool) -> Outcome:
    """Train all steps, save after some of them, and export the model at the end; or go on from there."""
    settings = settings | {"alpha": 0.5}
    if resume:
        return train(RUN, settings, ckpt_path=f"{folder}/saved-step={SAVED_AFTER}.ckpt", skip=SAVED_AFTER)
    saving = ModelCheckpoint(folder, "saved-{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1)

    def export(trainer: Any) -> dict[str, Any]:
        trainer.strategy.save_pretrained(f"{folder}/model")
        return {}

    return train(RUN, settings, export, callbacks=[saving])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Outcome, Path]]:
    """Trains in a topology, once; returns the outcome, and where the checkpoint and the model are."""

    @functools.cache
    def trained(topology: str) -> tuple[Outcome, Path]:
        folder, (size, settings) = tmp_path_factory.mktemp("checkpoints"), TOPOLOGIES[topology]
        return run_in_processes(size, _train, settings, str(folder), False)[0], folder

    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "to"), [(of, to) for of in ("ep2 x tp2+sp", "dp4 ep2 zero3") for to in TOPOLOGIES if to in RESUMED | {of}]
)
def test_checkpoints_hold_whole_experts(uninterrupted: Any, of: str, to: str) -> None:
    whole, folder = uninterrupted(of)
    exported = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.equal(exported[name.removeprefix("model.")], t) for name, t in whole.weights.items())
    size, settings = TOPOLOGIES[to]
    resumed = run_in_processes(size, _train, settings, str(folder), True)[0]
    for name, t in resumed.weights.items():
        torch.testing.assert_close(t, whole.weights[name], rtol=1e-4, atol=1e-6, msg=name)


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({"expert_parallel_size": 3}, 4, "=3 does not fit 4 processes with .*; it can be 1, 2, 4$"),
        ({"expert_parallel_size": 2}, 1, "=2 does not fit 1 processes with .*; it can be 1$"),
        (
            {"expert_parallel_size": 4, "context_parallel_size": 6},
            12,
            "=4 does not fit .*; it can be 1, 2, 3, 6, 12$",
        ),
        ({"expert_parallel_size": 4, "tensor_parallel_size": 2}, 4, "=4 does not fit 2 processes with"),
    ],
)
def test_sizes_that_do_not_fit(settings: dict[str, Any], processes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_sizes(MemoConfig(**settings), processes)


def test_the_label_of_sizes_names_divided_experts() -> None:
    assert ParallelSizes(data=4, expert=2).describe(3) == "dp4-cp1-tp1-ep2-zero3"


class _WithAdapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = FAMILIES["qwen3_moe"].build().model.layers[0].mlp.experts


@pytest.mark.parametrize(
    ("build", "sizes", "message"),
    [
        (FAMILIES["qwen3_moe"].build, (3, 1), "num_experts of .*=4: expert_parallel_size can be 1, 2, 4$"),
        (FAMILIES["qwen3_moe"].build, (4, 2), "=4 x tensor_parallel_size=2 does not .*_size can be 1, 2$"),
        (FAMILIES["llama"].build, (2, 1), "LlamaForCausalLM has no experts with stacked weights"),
        (_WithAdapter, (2, 1), "base_layer has an adapter on the weights of experts, which is not divided"),
    ],
)
def test_models_whose_experts_cannot_be_divided(build: Any, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_experts(build(), *sizes)


def train_on_other_lengths() -> None:
    """Each data-parallel process gets sequences of another length."""
    trainer = make_trainer(MemoStrategy(**_EP2), devices=2, max_steps=2, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="share experts got batches of 2 x 40, 2 x 48 tokens, and need equal sizes"):
        trainer.fit(LanguageModel("qwen3_moe"), loader(8, 40 + 8 * dist.get_rank()))


def test_batches_of_other_sizes_are_refused() -> None:
    run_in_processes(2, train_on_other_lengths)
