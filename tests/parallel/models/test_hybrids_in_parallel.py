"""Hybrid models in several processes, which hand on the states of recurrences, train as in one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from support.architectures.hybrids import HYBRIDS, make_hybrid, make_separate
from support.devices import skip_ring_on_cuda
from support.parallel_training import LR, Run, Texts, train, train_alone, train_together
from support.processes import ProcessError, run_in_processes
from support.samples.configurations import BOUND, CONFIGURATIONS
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoLoop, MemoStrategy
from lightning_memo.parallel.context_parallel import StateExchange, StateLink

MODELS = {config: functools.partial(make_hybrid, config) for config in HYBRIDS}
PACKED = {config: functools.partial(make_hybrid, config, use_cache=False) for config in HYBRIDS}
KINDS = ("Qwen3NextConfig", "BambaConfig", "FalconH1Config", "Lfm2Config", "NemotronHConfig")
# AdamW makes whole steps of gradients that are zero but for rounding.
PARTS = ("loss", "norm", "gradients")


def check(configuration: str, run: Run, **settings: Any) -> None:
    size, of_configuration = CONFIGURATIONS[configuration]
    skip_ring_on_cuda(of_configuration)
    errors = train_together(size, run, of_configuration | settings).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), f"{configuration} {settings}: {errors}"


WAYS = ("cp2 ring", "cp2 ulysses", "cp3 ring", "cp4 ulysses2 x ring2")
QUICK = {("BambaConfig", "cp2 ring", 0.0)}
MORE = {
    ("Qwen3NextConfig", "cp2 ring", 0.5), ("Qwen3NextConfig", "cp2 ulysses", 0.5), ("BambaConfig", "cp2 ring", 1.0),
    ("Lfm2Config", "cp2 ring", 0.5),
}  # fmt: skip
# Every type in every way, with one alpha after the other.
OTHERS = zip(itertools.product(HYBRIDS, WAYS), itertools.cycle((0.0, 0.5, 1.0)), strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "configuration", "alpha"), sorted(QUICK.union(MORE, ((*case, alpha) for case, alpha in OTHERS)))
)
def test_equals_one_process_at_every_alpha(config: str, configuration: str, alpha: float) -> None:
    check(configuration, Run(family=MODELS[config], tokens=45, steps=2, clip=0.5), alpha=alpha)


QUICK_SLICES = {("Qwen3NextConfig", "cp2 ring", "none")}
MORE_SLICES = {("Lfm2Config", "cp2 ulysses", "hidden")}
OTHER_SLICES = zip(
    itertools.product(KINDS, (WAYS[0], WAYS[1], WAYS[3])), itertools.cycle(("none", "hidden", "attention", "hidden")),
    strict=False,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "configuration", "stream_from_host"),
    sorted(QUICK_SLICES.union(MORE_SLICES, ((*case, backed) for case, backed in OTHER_SLICES))),
)
def test_slices(config: str, configuration: str, stream_from_host: str) -> None:
    run = Run(family=MODELS[config], tokens=61, steps=2)
    check(configuration, run, alpha=0.5, slice_tokens=7, stream_from_host=stream_from_host)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["cp2 ring", "cp2 ulysses", "cp3 ring"])
@pytest.mark.parametrize("config", ["Qwen3NextConfig", "BambaConfig", "FalconH1Config"])
def test_long_rows_with_padding(config: str, configuration: str) -> None:
    run = Run(family=MODELS[config], tokens=389, padded=True, steps=2, accumulate=2)
    check(configuration, run, alpha=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["cp2 ring", "dp2 x cp2", "dp2 x cp2 zero3 ulysses"])
@pytest.mark.parametrize("config", ["Qwen3NextConfig", "BambaConfig", "Lfm2Config"])
def test_batches_of_other_lengths(config: str, configuration: str) -> None:
    """Some processes have fewer tokens than a convolution needs of the one before."""
    run = Run(family=MODELS[config], lengths=(45, 13, 5, 62), steps=4, accumulate=2, clip=0.5)
    check(configuration, run, alpha=0.5)


def frozen(config: str, trained: str, make: Callable[..., nn.Module] = make_hybrid, **others: Any) -> nn.Module:
    model = make(config, **others)
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    return model


FROZEN = {trained: functools.partial(frozen, "BambaConfig", trained) for trained in ("A_log", "self_attn", "mamba.D")}


@pytest.mark.slow
@pytest.mark.parametrize("trained", FROZEN)
def test_frozen_weights(trained: str) -> None:
    """States have gradients in some layers only. Those of the first layer do not depend on the weight D."""
    check("cp2 ring", Run(family=FROZEN[trained], tokens=45, steps=2), alpha=0.5)


class CountsMessages(Callback):
    """Counts the states and the gradients of states that this process sends."""

    def __init__(self) -> None:
        self.notes = {"sent": 0}

    @override
    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        send = StateExchange.send

        def count(exchange: StateExchange, t: Tensor, link: StateLink) -> None:
            self.notes["sent"] += 1
            send(exchange, t, link)

        self._patch = mock.patch.object(StateExchange, "send", count)
        self._patch.start()

    @override
    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._patch.stop()


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_recomputation_sends_nothing(alpha: float) -> None:
    """Each layer with a recurrence has a convolution, too: the first process sends states, the second one gradients."""
    run = Run(family=MODELS["Qwen3NextConfig"], tokens=45, steps=3)
    outcome = train_together(2, run, {"context_parallel_size": 2, "alpha": alpha}, watch=CountsMessages)
    recurrent = HYBRIDS["Qwen3NextConfig"]["layer_types"].count("linear_attention")
    assert outcome.notes["sent"] == [2 * recurrent * run.steps] * 2


class Evaluated(LanguageModel):
    """Logs the loss of a validation."""

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)


VALIDATION = Run(tokens=63, ignore=0.0)


def evaluate(run: Run, settings: dict[str, Any]) -> tuple[float, float]:
    module = Evaluated(run.build, lr=LR)
    trainer = make_trainer(MemoStrategy(alpha=0.5, **settings), devices=2, max_steps=1)
    texts, validation = (DataLoader(Texts(each), batch_size=2) for each in (run, VALIDATION))
    before = trainer.validate(module, validation, verbose=False)[0]["val_loss"]
    torch.manual_seed(1)
    trainer.fit(module, texts, validation)
    return before, trainer.callback_metrics["val_loss"].item()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"slice_tokens": 8, "stream_from_host": "attention"}])
def test_validation_with_a_cache_and_another_length(settings: dict[str, Any]) -> None:
    run = Run(family=MODELS["Qwen3NextConfig"], tokens=45, steps=1)
    model = LanguageModel(run.build).eval()
    assert model.model.config.use_cache
    (before, after), others = run_in_processes(2, evaluate, run, {"context_parallel_size": 2} | settings)
    assert (before, after) == others
    with torch.no_grad():
        losses = [float(model.loss(batch)) for batch in DataLoader(Texts(VALIDATION), batch_size=2)]
    assert before == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert after != before


PACKED_KINDS = ("Qwen3NextConfig", "BambaConfig", "Lfm2Config", "FalconH1Config")
QUICK_PACKED = {("Qwen3NextConfig", "cp2 ring", "none")}
OTHER_PACKED = zip(
    itertools.product(PACKED_KINDS, WAYS), itertools.cycle(("none", "hidden", "attention")), strict=False
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "configuration", "stream_from_host"),
    sorted(QUICK_PACKED.union((*case, backed) for case, backed in OTHER_PACKED)),
)
def test_packed_documents(config: str, configuration: str, stream_from_host: str) -> None:
    """Documents start in the ranges of both processes, and go on in the next one."""
    run = Run(family=PACKED[config], tokens=61, packed=True, uneven=True, steps=2)
    size, settings = CONFIGURATIONS[configuration]
    skip_ring_on_cuda(settings)
    settings = settings | {"alpha": 0.5, "slice_tokens": 7, "stream_from_host": stream_from_host}
    alone = train_alone(replace(run, family=functools.partial(make_separate, config)))
    errors = train_together(size, run, settings).worst_error(alone)
    assert all(errors[part] <= BOUND for part in PARTS), errors


def in_halves(index: int, row: dict[str, Tensor]) -> dict[str, Tensor]:
    return row | {"position_ids": torch.arange(24).repeat(2)}


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["A_log", "conv1d"])
def test_a_process_whose_first_token_starts_a_document_returns_a_gradient(trained: str) -> None:
    """The process before waits for it, also where it is zero. Inputs have no gradient."""
    run = Run(family=functools.partial(frozen, "BambaConfig", trained, use_cache=False), change=in_halves, steps=2)
    alone = replace(run, family=functools.partial(frozen, "BambaConfig", trained, make=make_separate))
    errors = train_together(2, run, {"context_parallel_size": 2, "alpha": 0.5}).worst_error(train_alone(alone))
    assert all(errors[part] <= BOUND for part in PARTS), errors


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["dp2 zero0", "dp2 zero3", "pipeline"])
def test_packed_documents_beside_other_parallelism(configuration: str) -> None:
    run = Run(family=PACKED["Qwen3NextConfig"], tokens=61, packed=True, steps=2)
    size, settings = CONFIGURATIONS.get(configuration, (2, {"pipeline_parallel_size": 2}))
    alone = train_alone(replace(run, family=functools.partial(make_separate, "Qwen3NextConfig")))
    errors = train_together(size, run, settings | {"alpha": 0.5}).worst_error(alone)
    assert all(errors[part] <= BOUND for part in PARTS), errors


def loss_of_loop(arguments_for_kernels: bool) -> list[float]:
    """Train in a loop on the first row of a run, and return the losses of three steps."""
    row = Texts(Run(tokens=61, packed=True, uneven=True))[1]
    positions = row["position_ids"]
    if arguments_for_kernels:
        row["seq_idx"] = (positions == 0).cumsum(0).int()
    batch = {name: t[None] for name, t in row.items()}
    if arguments_for_kernels:
        starts = (positions == 0).nonzero()[:, 0].tolist()
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor([*starts, 61], dtype=torch.int32)
    together = dist.is_initialized() and dist.get_world_size() > 1
    model = PACKED["BambaConfig"]() if together else make_separate("BambaConfig")
    wrapped = DistributedDataParallel(model) if together else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with MemoLoop(wrapped, optimizer, context_parallel_size=2, alpha=0.5) if together else nullcontext():
        for _ in range(3):
            optimizer.zero_grad()
            loss = wrapped(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("arguments_for_kernels", [False, True])
def test_packed_documents_in_a_loop(arguments_for_kernels: bool) -> None:
    alone = loss_of_loop(arguments_for_kernels)
    for losses in run_in_processes(2, loss_of_loop, arguments_for_kernels):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        (MODELS["BambaConfig"], r"BambaModel makes a key-value cache.*: set model\.config\.use_cache = False, or "),
        (PACKED["GraniteMoeHybridConfig"], "GraniteMoeHybridModel makes its attention masks without position_ids"),
    ],
)
def test_packed_documents_that_see_each_other_are_refused_in_one_line(family: Any, why: str) -> None:
    with pytest.raises(ProcessError, match=f"ValueError: position_ids tell .*{why}.*\n"):
        run_in_processes(2, train, Run(family=family, packed=True), {"context_parallel_size": 2})


@pytest.mark.slow
def test_a_later_layer_whose_attention_needs_all_tokens_is_refused_where_slices_are_divided() -> None:
    """The first layer has no attention, and the batch is laid out for slices before the second one runs."""
    run = Run(family=functools.partial(make_hybrid, "Qwen3NextConfig", attention_dropout=0.1), tokens=61)
    size, settings = CONFIGURATIONS["cp2 ulysses"]
    settings = settings | {"slice_tokens": 7, "stream_from_host": "attention"}
    why = r"Qwen3NextDecoderLayer needs all tokens at once, because .*: set stream_from_host=\"none\""
    with pytest.raises(ProcessError, match=f"ValueError: stream_from_host=.* but attention of {why}\n"):
        run_in_processes(size, train, run, settings)


def test_divided_experts_are_refused_in_one_line() -> None:
    run, settings = Run(family=MODELS["Qwen3NextConfig"]), {"context_parallel_size": 2, "expert_parallel_size": 2}
    with pytest.raises(ProcessError, match=r"ValueError: expert_parallel_size=2 beside context_parallel_size=2: .*\n"):
        run_in_processes(2, train, run, settings)
