"""The load-balancing loss of a mixture of experts is that of all tokens of all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import BALANCED
from support.parallel_training import Run, train_alone, train_together
from support.processes import ProcessError
from support.samples.configurations import BOUND, CONFIGURATIONS
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from lightning_memo.parallel.batches.loss_arguments import RouterLosses, balancing_loss
from lightning_memo.parallel.batches.token_layout import CurrentLayout


def check(configuration: str, run: Run, alpha: float = 0.5) -> None:
    """Train, and compare losses and gradients with those of one process."""
    size, settings = CONFIGURATIONS[configuration]
    errors = train_together(size, run, settings | {"alpha": alpha}).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), f"{configuration}: {errors}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "family"),
    [
        (configuration, family)
        for family in BALANCED
        for configuration in ("cp2 ring", "cp2 ulysses", "dp2 zero3", "tp2", "tp2+sp", "cp2 x tp2+sp")
        # transformers has no tensor-parallel plan for GraniteMoe
        if family != "granitemoe_balanced" or "tp" not in configuration
    ],
)
def test_equals_one_process(configuration: str, family: str) -> None:
    check(configuration, Run(family=family, tokens=45, steps=2, layers=3, accumulate=2))


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["cp2 ring", "cp2 ulysses", "dp2 zero3", "dp2 x cp2", "tp2+sp"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_padding_and_packed_documents(configuration: str, layout: str) -> None:
    run = Run(family="mixtral_balanced", tokens=45, steps=2, layers=3, batch=4, **{layout: True})
    check(configuration, run)


def _other_loss(**sizes: Any) -> nn.Module:
    """Return a model whose module has a function of the known name that computes something else."""

    class OwnCode(MixtralForCausalLM):
        __module__ = __name__

    model = BALANCED["mixtral_balanced"](**sizes)
    model.__class__ = OwnCode
    return model


def load_balancing_loss_func(gate_logits: tuple[Tensor, ...], *_: Any) -> Tensor:
    """Return a z-loss."""
    return torch.stack([logits.logsumexp(-1).square().mean() for logits in gate_logits]).mean()


@pytest.mark.slow
def test_sums_are_fp32_in_bf16_training() -> None:
    """In bf16, counts of tokens would end at 256."""
    run = Run(family="mixtral_balanced", tokens=300, steps=2, layers=3, precision="bf16-true")
    size, settings = CONFIGURATIONS["dp2 zero0"]
    errors = train_together(size, run, settings | {"alpha": 0.5}).worst_error(train_alone(run))
    assert errors["loss"] < 5e-3 and errors["norm"] < 5e-2, errors


@pytest.mark.parametrize("configuration", ["cp2 ring", "dp2 zero3"])
def test_an_unknown_loss_is_refused(configuration: str) -> None:
    size, settings = CONFIGURATIONS[configuration]
    with pytest.raises(ProcessError, match="may compute a loss from its router logits"):
        train_together(size, Run(family=_other_loss, layers=3), settings | {"alpha": 0.5})


def test_functions_are_replaced_only_in_forwards() -> None:
    model, losses = BALANCED["mixtral_balanced"](), RouterLosses(CurrentLayout())
    before = modeling_mixtral.load_balancing_loss_func
    undo = losses.attach(model)
    losses.use(object())  # type: ignore[arg-type]
    with pytest.raises(Exception):  # noqa: B017, PT011  there are no processes
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert modeling_mixtral.load_balancing_loss_func is before
    undo()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_sums_of_one_process_are_the_loss_of_transformers() -> None:
    logits = tuple(torch.randn(12, 4) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    for given in (None, mask):
        expected = modeling_mixtral.load_balancing_loss_func(logits, 4, 2, given)
        torch.testing.assert_close(balancing_loss(logits, 4, 2, given), expected)
