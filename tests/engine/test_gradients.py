"""Gradients with the engine against plain training: every family, precision, batch, padding and alpha."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from support.devices import DEVICE
from support.families import FAMILIES, make_batch
from support.harness import Batch, EngineUnderTest, Step, assert_equal, in_double, loss_and_gradients
from support.markers.slow import slow_if
from torch import nn

TOKENS = 64
ALPHAS = (0.0, 1 / 8, 1 / 2, 1.0)
PRECISIONS = ("fp32", "bf16-true", "bf16-mixed")
# Run padded in half precision and in one row, too. Other families run in each precision, with one row, and padded.
WITH_ALL = ("llama_gqa", "gpt2_dropout", "mixtral")
# Distance to fp64, in units of plain training's own. Cutting the tokens in two rounds every weight gradient once more,
# but brings no new kind of error: 0.9 to 1.12 is measured here.
FARTHER = 1.25
FP32_BOUND = 1e-6
# A mean of many tokens, each rounded to 24 or 8 bits.
LOSS_BOUND = {"fp32": 1e-6, "bf16-true": 2**-8, "bf16-mixed": 2**-8}


@dataclass
class Case:
    """A model that is attached and profiled, and the result of plain training on a batch."""

    family: str
    precision: str
    batch_size: int
    padded: bool
    batch: Batch
    plain: Step
    under_test: EngineUnderTest

    @property
    def amp(self) -> bool:
        return self.precision == "bf16-mixed"

    @property
    def identical(self) -> bool:
        """Whether whole layers compute by the same kernels as plain training."""
        return not FAMILIES[self.family].grouped and not _padded_on_cuda(self.precision, self.padded)

    @property
    def exact(self) -> Step:
        """The gradient in fp64, of the weights as they are. Dropout draws the same masks in every precision."""
        return exact(self.family, self.precision == "bf16-true", self.batch_size, self.padded)


slow_case = slow_if(lambda case: (case[1] != "fp32" and case[0] not in WITH_ALL) or case[2] != 2)


def build(family: str, rounded: bool) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family].build().train()
    return model.bfloat16() if rounded else model


@functools.cache
def exact(family: str, rounded: bool, batch_size: int, padded: bool) -> Step:
    return loss_and_gradients(in_double(build(family, rounded)), make_batch(batch_size, TOKENS, padded))


def _padded_on_cuda(precision: str, padded: bool) -> bool:
    """Whether PyTorch attends by another kernel than the engine: it has no flash kernel for padding."""
    return DEVICE.type == "cuda" and padded and precision != "fp32"


def _cases() -> Iterator[object]:
    for family in FAMILIES:
        plain_module = family.startswith(("block", "encoder"))  # takes no padding mask
        for precision in PRECISIONS:
            for batch in (1, 2) if precision == "fp32" else (2,):
                for padded in (False,) if plain_module else (False, True):
                    if padded and (precision != "fp32" or batch == 1) and family not in WITH_ALL:
                        continue
                    if FAMILIES[family].dropout and _padded_on_cuda(precision, padded):
                        continue  # the kernels draw different masks
                    name = f"{family}-{precision}-batch{batch}" + ("-padded" if padded else "")
                    yield pytest.param((family, precision, batch, padded), id=name)


@pytest.fixture(scope="module", params=_cases())
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    family, precision, batch_size, padded = request.param
    model, batch = build(family, precision == "bf16-true"), make_batch(batch_size, TOKENS, padded)
    plain = loss_and_gradients(model, batch, precision == "bf16-mixed")
    with EngineUnderTest(model) as under_test:
        case = Case(family, precision, batch_size, padded, batch, plain, under_test)
        under_test.profile_step(batch, case.amp)
        yield case


def assert_as_good(case: Case, actual: Step) -> None:
    """The gradient is as good as plain training's.

    In fp32 it is plain training's but for 1e-6, as a whole and for each parameter. What cancels in the true gradient of
    a parameter (a key bias, which softmax ignores; the few weights of a query norm, sums over all tokens and heads)
    leaves rounding errors, in plain training too. Such a parameter must be no farther from fp64 than plain training's,
    and as that compares the lengths of two random vectors of n elements, three standard deviations of their ratio,
    1 / sqrt(n) each, are allowed.

    In bf16 rounding differs in the third digit, so fp64 is the reference for all.
    """
    assert actual.gradients.keys() == case.plain.gradients.keys()
    torch.testing.assert_close(actual.loss, case.plain.loss, rtol=LOSS_BOUND[case.precision], atol=0)
    if case.precision != "fp32":
        assert actual.distance(case.exact) <= FARTHER * case.plain.distance(case.exact)
        return
    assert actual.distance(case.plain) <= FP32_BOUND
    errors = actual.distances(case.plain)
    doubtful = [name for name, error in errors.items() if error > FP32_BOUND]
    if doubtful:
        own, plains_own = actual.distances(case.exact), case.plain.distances(case.exact)
        for name in doubtful:
            spread = 1 + 3 / case.plain.gradients[name].numel() ** 0.5
            assert own[name] <= FARTHER * spread * plains_own[name], name


@slow_if(lambda case, alpha: alpha != 0.5 and (case[0] not in WITH_ALL or case[1] != "fp32"))
@slow_case
@pytest.mark.parametrize("alpha", ALPHAS, ids=lambda alpha: f"alpha{alpha:g}")
def test_gradients_are_those_of_plain_training(case: Case, alpha: float) -> None:
    case.under_test.load(alpha)
    actual = case.under_test.step(case.batch, case.amp)
    if alpha in (0.0, 1.0) and case.identical:
        assert_equal(actual, case.plain)
    assert_as_good(case, actual)
    case.under_test.assert_as_planned()


@slow_case
def test_profiled_step_trains_like_plain_training(case: Case) -> None:
    profiled = case.under_test.profiled
    assert profiled is not None
    assert case.under_test.engine.layer_classes.unsliceable == ""
    if case.identical:
        assert_equal(profiled, case.plain)
    assert_as_good(case, profiled)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.dropout])
def test_dropout_draws_the_same_masks_in_fp64(family: str) -> None:
    """The comparison of families with dropout relies on this: with other masks the distance would be of order 1."""
    model, batch = FAMILIES[family].build().train(), make_batch(2, TOKENS)
    plain, exact = loss_and_gradients(model, batch), loss_and_gradients(in_double(model), batch)
    assert plain.distance(exact) <= 1e-5
    assert loss_and_gradients(model, batch, seed=6).distance(exact) > 0.01
