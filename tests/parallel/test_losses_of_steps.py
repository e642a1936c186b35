"""Steps that compute with the model's loss and other outputs: the gradients of one process, or an error of one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.families import FAMILIES
from support.parallel_training import LR, Run, Texts, train, train_alone
from support.processes import run_in_processes
from support.samples.configurations import BOUND, CONFIGURATIONS
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy

Loss = Callable[["Step", dict[str, Tensor]], Tensor]


class Step(nn.Module):
    """Computes a loss from the outputs of a model."""

    def __init__(self, loss: Loss, **sizes: Any) -> None:
        super().__init__()
        self.model = FAMILIES["llama_gqa"].build(**sizes)
        self.of_hidden = nn.Linear(self.model.config.hidden_size, 1)
        self._loss = loss

    def forward(self, **batch: Tensor) -> Any:
        return SimpleNamespace(loss=plain(self._loss(self, batch)))


def plain(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def squared(**sizes: Any) -> nn.Module:
    """Also with a penalty on weights."""

    def loss(step: Step, batch: dict[str, Tensor]) -> Tensor:
        whole = step.model(**batch).loss
        return whole**2 + 1e-3 * sum(p.pow(2).sum() for p in step.model.parameters())

    return Step(loss, **sizes)


def of_outputs(**sizes: Any) -> nn.Module:
    """Hidden states, also through a module of the user, and logits."""

    def loss(step: Step, batch: dict[str, Tensor]) -> Tensor:
        out = step.model(**batch, output_hidden_states=True)
        regular = 100 * out.hidden_states[1].pow(2).mean() + step.of_hidden(out.hidden_states[-1]).pow(2).mean()
        return plain(out.loss + 1e-2 * out.logits.logsumexp(-1).pow(2).mean()) + regular

    return Step(loss, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "configuration", ["cp2 ring", "cp2 ulysses", "dp2 zero0", "dp2 x cp2", "tp2", "tp2+sp", "cp2 x tp2+sp"]
)
def test_functions_of_the_loss(configuration: str) -> None:
    size, settings = CONFIGURATIONS[configuration]
    run = Run(family=squared, tokens=45, padded=True, accumulate=2, steps=2, layers=2)
    alone = train_alone(run)
    for outcome in run_in_processes(size, train, run, settings | {"alpha": 0.5}):
        errors = outcome.worst_error(alone)  # losses of each process, not their mean
        assert all(error <= BOUND for error in errors.values()), errors


def looked_at(**sizes: Any) -> nn.Module:
    """One process computes a loss more, without gradients."""

    def loss(step: Step, batch: dict[str, Tensor]) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 0:
            with torch.no_grad():
                assert step.model(**batch).loss > 0
        return step.model(**batch).loss

    return Step(loss, **sizes)


@pytest.mark.slow
def test_a_process_that_runs_a_forward_more() -> None:
    run = Run(family=looked_at, tokens=48, steps=2, layers=2)
    settings = CONFIGURATIONS["dp2 zero0"][1]
    for outcome in run_in_processes(2, train, run, settings | {"alpha": 0.5}):
        errors = outcome.worst_error(train_alone(run))
        assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["none", "hidden"])
@pytest.mark.parametrize("configuration", ["tp2", "tp2+sp"])
def test_functions_of_hidden_states_and_logits(configuration: str, stream_from_host: str) -> None:
    run = Run(family=of_outputs, tokens=48, steps=2, layers=2)
    settings = CONFIGURATIONS[configuration][1] | {
        "alpha": 0.5,
        "slice_tokens": 8,
        "stream_from_host": stream_from_host,
    }
    for outcome in run_in_processes(2, train, run, settings):
        errors = outcome.worst_error(train_alone(run))
        assert all(error <= BOUND for error in errors.values()), errors


def of_logits(**sizes: Any) -> nn.Module:
    """Terms that users add to a loss, or write in its place."""

    def loss(step: Step, batch: dict[str, Tensor]) -> Tensor:
        logits = step.model(input_ids=batch["input_ids"]).logits
        labels = batch.get("shift_labels")
        labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:] if labels is None else labels
        weights = torch.linspace(0.5, 1.5, logits.shape[-1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weights, label_smoothing=0.1)
        logarithms = logits.float().log_softmax(-1)
        entropy = -(logarithms.exp() * logarithms).sum(-1)
        of_labels = logarithms.gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1)
        terms = (
            entropy.mean()
            - 0.5 * of_labels.mean()
            - 0.3 * logarithms.mean()
            + 1e-2 * logits.logsumexp(-1).pow(2).mean()
        )
        assert 0 <= (logits.argmax(-1) == labels).float().mean().item() <= 1
        return loss + 0.1 * terms

    return Step(loss, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["auto", 5])
@pytest.mark.parametrize("configuration", ["tp2", "tp2+sp"])
def test_terms_from_logits(configuration: str, chunk: int | str) -> None:
    run = Run(family=of_logits, tokens=48, ignore=0.3, steps=2, layers=2)
    settings = CONFIGURATIONS[configuration][1] | {"alpha": 0.5, "loss_chunk_tokens": chunk}
    for outcome in run_in_processes(2, train, run, settings):
        errors = outcome.worst_error(train_alone(run))
        assert all(error <= BOUND for error in errors.values()), errors


class Backbone(LanguageModel):
    """Calls the model without its head."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.model.model(input_ids=batch["input_ids"]).last_hidden_state
        return hidden.mean(1).pow(2).sum()


class ShiftsLabels(LanguageModel):
    """Computes its loss as it does in one process."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class DecaysWeights(LanguageModel):
    """Adds a penalty on all weights, of which some are whole at this time."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + sum(p.pow(2).sum() for p in self.model.parameters())


def _plain_sum(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLossFunction(LanguageModel):
    """Replaces the loss function of the model."""

    def _seeded_build(self) -> nn.Module:
        model = super()._seeded_build()
        model.loss_function = _plain_sum
        return model


def _error(module: type[LanguageModel], settings: dict[str, Any]) -> str:
    run = Run(layers=2)
    trainer = make_trainer(
        MemoStrategy(**settings, alpha=0.5),
        devices=dist.get_world_size(),
        max_steps=1,
        use_distributed_sampler=False,
    )
    try:
        trainer.fit(module(run.build, lr=LR), DataLoader(Texts(run), batch_size=2))
    except ValueError as error:
        return str(error)
    return ""


CONTEXT = {"context_parallel_size": 2}
TENSOR = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (Backbone, TENSOR, r'^LlamaModel was called by itself and got no position_ids.* pass batch\["position_ids"\]'),
        (ShiftsLabels, CONTEXT, r'^batch\["labels"\]\[:, 1:\] would shift the labels twice.*batch\["shift_labels"\]'),
        (OwnLossFunction, CONTEXT, "but the loss function _plain_sum of LlamaForCausalLM takes no shift_labels and no"),
        (DecaysWeights, CONTEXT | {"zero_stage": 3}, "adds weights of which each process has a part"),
        (DecaysWeights, TENSOR | {"zero_stage": 3}, "adds weights of which each process has a part"),
    ],
    ids=["no head", "shifted twice", "loss function", "zero3", "tp2 zero3"],
)
def test_losses_of_divided_batches_and_weights(
    module: type[LanguageModel], settings: dict[str, Any], message: str
) -> None:
    for error in run_in_processes(2, _error, module, settings):
        assert re.search(message, error) and "\n" not in error, error
