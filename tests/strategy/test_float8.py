"""torchao's float8 training in the layers: what has a scale of its own for each token is cut, all else runs whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.families import FAMILIES
from support.markers.extras import extra
from support.modes import BY_KIND
from support.parallel_training import MODELS, Outcome, Run, train, train_alone
from support.processes import ProcessError, run_in_processes
from support.samples.callbacks import Gradients
from support.trainer_harness import LanguageModel, fit, loader, plain
from torch import Tensor, nn

from lightning_memo import MemoStrategy

float8 = extra("torchao.float8", "quantized")

pytestmark = pytest.mark.usefixtures("own_folder")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TOKENS = 48
# Less than plain training needs.
BUDGET = {"device_memory": "1400KiB"}


def build(recipe: str, first: int = 0, head: bool = False) -> nn.Module:
    """A Llama with float8 in its layers from `first` on, and in its head; products are emulated, as no CPU has them."""
    model = FAMILIES["llama"].build()
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    for part in [*model.model.layers[first:], *([model.lm_head] if head else [])]:
        if isinstance(part, nn.Linear):
            model.lm_head = float8.float8_linear.Float8Linear.from_float(part, config=config)
        else:
            float8.convert_to_float8_training(part, config=config)
    return model


def module(recipe: str, **settings: Any) -> LanguageModel:
    return LanguageModel(lambda: build(recipe, **settings))


def trained(strategy: Any, recipe: str, steps: int = 1, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    noted = Gradients()
    train: Callable[..., Any] = plain if strategy is None else lambda *a, **k: fit(strategy, *a, **k)
    result = train(module(recipe), loader(tokens=TOKENS), callbacks=[noted], max_steps=steps, **settings)
    return result, noted.last


@pytest.fixture(scope="module", params=RECIPES)
def expected(request: Any) -> tuple[str, Any, dict[str, Tensor]]:
    return request.param, *trained(None, request.param, steps=2)


@pytest.mark.parametrize(
    "settings", [{"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 1.0, "plan_memory": True}, {"alpha": "auto"} | BUDGET]
)
def test_whole_layers_train_bit_by_bit_as_plainly(expected: Any, settings: dict[str, Any]) -> None:
    """At alpha 0 and 1, and at all others where a layer must not be cut."""
    recipe, losses, gradients = expected[0], expected[1].losses, expected[2]
    strategy = MemoStrategy(**settings)
    result, found = trained(strategy, recipe, steps=2)
    assert not result.plan.swap.plain
    if result.plan.swap.alpha in (0.0, 1.0) or len(result.plan.swap.storage.calls) == 2:
        assert result.losses == losses
        assert all(torch.equal(found[name], g) for name, g in gradients.items())
    else:
        assert recipe != "tensorwise" and result.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 0.5},
        {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "attention"},
        {"test_mode": BY_KIND} | BUDGET,
    ],
    ids=["alpha", "slices", "kinds"],
)
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_layers_with_a_scale_for_each_token_may_be_cut(recipe: str, settings: dict[str, Any]) -> None:
    """As plainly; fp8 turns a difference in the last bit of fp32 into one of its own, here and there."""
    result, found = trained(MemoStrategy(**settings), recipe)
    reference, gradients = trained(None, recipe)
    assert not result.plan.swap.plain
    assert result.losses == pytest.approx(reference.losses, rel=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm()) <= 1e-3 * float(gradient.norm()), name


REFUSED = {
    "slices": ({"alpha": 0.0, "slice_tokens": 16, "stream_from_host": "attention"}, 'set stream_from_host="none"'),
    "slices of the model": (
        {"alpha": 0.0, "slice_tokens": 16, "stream_from_host": "model"},
        'use stream_from_host="hidden"',
    ),
}


@pytest.mark.parametrize(("settings", "advice"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("first", [0, 2])
def test_a_scale_for_all_tokens_is_not_cut(settings: dict[str, Any], advice: str, first: int) -> None:
    """In bf16 too, whose rounding hides it from a comparison, and where the first layers are left in bf16."""
    with pytest.raises(ValueError, match="has one float8 scale for all tokens") as caught:
        fit(MemoStrategy(**settings), module("tensorwise", first=first), loader(tokens=TOKENS), precision="bf16-true")
    line = str(caught.value)
    assert line.endswith(advice) and '"rowwise"' in line and "\n" not in line


def test_a_head_with_a_scale_for_all_tokens_is_not_computed_in_chunks() -> None:
    made, strategy = module("tensorwise", head=True), MemoStrategy(alpha=1.0, loss_chunk_tokens=16)
    with pytest.warns(UserWarning, match="the logits of all tokens are computed at once, because Float8Linear has one"):
        losses = fit(strategy, made, loader(tokens=TOKENS), max_steps=2).losses
    assert losses == plain(module("tensorwise", head=True), loader(tokens=TOKENS), max_steps=2).losses


# ---- several processes

MODELS |= {f"llama_{recipe}": lambda recipe=recipe: build(recipe) for recipe in RECIPES[:2]}


def _train(run: Run, settings: dict[str, Any]) -> Outcome:
    return train(run, settings)  # of this module, which makes the models known to the process that imports it


def test_processes_that_share_tokens() -> None:
    """Each token has its own scale wherever it is; weights' gradients have scales over a process's tokens."""
    run = Run(family="llama_rowwise", steps=1)
    outcomes = run_in_processes(2, _train, run, {"context_parallel_size": 2, "alpha": 0.0})
    reference = train_alone(run)
    assert sum(o.losses[0] for o in outcomes) / 2 == pytest.approx(reference.losses[0], rel=1e-5)
    for name, gradient in reference.gradients.items():
        assert float((outcomes[0].gradients[name] - gradient).norm()) <= 1e-3 * float(gradient.norm()), name


def test_processes_that_share_tokens_have_no_scale_in_common() -> None:
    with pytest.raises(ProcessError, match=r"has one float8 scale for all tokens.*context_parallel_size=1"):
        run_in_processes(2, _train, Run(family="llama_tensorwise", steps=1), {"context_parallel_size": 2})


def test_processes_that_share_weights() -> None:
    """Weights that are gathered for a layer are scaled as whole ones are."""
    run = Run(family="llama_rowwise", steps=2)
    settings = {"zero_stage": 3, "alpha": 1.0}
    losses = zip(*(o.losses for o in run_in_processes(2, _train, run, settings)), strict=True)
    assert [sum(both) / 2 for both in losses] == pytest.approx(train_alone(run).losses, rel=1e-4)
