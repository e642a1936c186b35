"""`Trainer(strategy=MemoStrategy(...))` trains as plain Lightning does, whatever else the Trainer is asked to do."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import signal
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from support.families import FAMILIES, PlainBlock, PlainModel, make_batch
from support.markers.slow import slow_if
from support.trainer_harness import (
    LanguageModel,
    ResumableLoader,
    Sequences,
    Stream,
    batches,
    copy_threads,
    fit,
    forwards,
    listening,
    loader,
    make_trainer,
    mixing_model,
    plain,
    plain_of,
)

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.engine import TestMode
from lightning_memo.planner.token_slices import plan_of_alpha, plan_of_plain_training

# fp32 rounds a slice's part of a weight gradient before it is added to the others' (relative error of at most 6e-7 per
# step). AdamW bounds what a step can make of that, so along training it adds up, at most linearly: over 32 steps to
# 32 * 6e-7 * (the loss's change per step, at most 0.1) = 1.9e-6. Measured over 100 steps and three families: 9.6e-7,
# two units in the last place of a loss of 4. A wrong gradient is 1000 times as far off: see
# `test_bound_tells_wrong_training_apart`.
CURVE_BOUND = 1.9e-6
CURVE_STEPS = 32
CURVE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
ALPHAS = [0.0, 0.125, 0.25, 0.5, 1.0]
DELAYS = TestMode(seed=3, longest_delay_seconds=0.0003)
SMALL_DEVICE = "1MiB"
AMPLE_DEVICE = "64GiB"

slow_pair = slow_if(lambda family, alpha: (family, alpha) not in (("llama", 0.5), ("block_dropout", 0.0)))


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    """Every test leaves no copy thread, whatever happens in it."""
    yield
    assert copy_threads() == []


def largest_difference(losses: list[float], expected: list[float]) -> float:
    assert len(losses) == len(expected)
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def assert_as_plain(result, expected, alpha: float, bound: float = 3e-6) -> None:
    """Same losses and weights: in every bit where a layer runs as one slice, but for rounding else."""
    if alpha in (0.0, 1.0):
        assert result.losses == expected.losses
        for (name, a), b in zip(result.module.state_dict().items(), expected.module.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
    else:
        assert largest_difference(result.losses, expected.losses) <= bound
    assert set(result.held) == {0}


# ---- settings


def test_by_name():
    """`strategy="memo"` is MemoStrategy with its defaults."""
    result = fit("memo")
    assert isinstance(result.trainer.strategy, MemoStrategy)
    assert result.losses == plain_of().losses


@slow_pair
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("in_configure_model", [False, True], ids=["init", "configure_model"])
@pytest.mark.parametrize("family", ["block_dropout", "llama"])
def test_model_built_anywhere(family, in_configure_model, alpha):
    """A plain training_step works, with the model built in `__init__` or in `configure_model`."""
    result = fit(MemoStrategy(alpha=alpha), LanguageModel(family, in_configure_model))
    assert_as_plain(result, plain_of(LanguageModel, family, in_configure_model), alpha)
    assert (result.plan.swap.plain, result.plan.swap.alpha) == (False, alpha)


def test_auto_alpha_swaps_where_the_device_is_small(capsys):
    """alpha="auto" with little device memory recomputes or swaps, and shows the plan."""
    result = fit(MemoStrategy(device_memory=SMALL_DEVICE))
    shown = capsys.readouterr().out
    assert not result.plan.swap.plain
    assert 0.0 <= result.plan.swap.alpha <= 1.0
    assert result.plan.swap.host_bytes > 0
    assert str(result.plan).splitlines()[1:] == shown.splitlines()[1:]  # titles are filled to the width
    assert largest_difference(result.losses, plain_of().losses) <= 3e-6


def test_auto_alpha_trains_plainly_where_the_device_is_ample(capsys):
    """alpha="auto" with ample device memory falls back to plain training, and says so in one line."""
    with listening() as heard:
        result = fit(MemoStrategy(device_memory=AMPLE_DEVICE))
    assert result.plan.swap.plain
    assert f"lightning_memo: fits: trains as without lightning_memo. {result.plan.reason}" in heard
    assert "plan" not in capsys.readouterr().out
    assert result.trainer.strategy.plan.swap.host_bytes == 0
    assert_as_plain(result, plain_of(), 1.0)


@pytest.mark.slow
def test_small_slices():
    """slice_tokens bounds the slices, and changes nothing but rounding."""
    result = fit(MemoStrategy(alpha=0.5, slice_tokens=5))
    assert result.plan.swap.storage.slice_tokens == 5
    assert_as_plain(result, plain_of(), 0.5)


def test_layers_by_name():
    """`layers` picks the list of layers; the others train plainly."""
    model = PlainModel([PlainBlock() for _ in range(3)])
    model.extra = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(2)])  # more parameters, never called
    assert fit(MemoStrategy(alpha=1.0, layers="blocks"), LanguageModel(lambda: model)).plan.swap.calls == 3


# ---- the plan


class Spy(Callback):
    """Notes after every batch whether there is a plan, and whether the step was profiled."""

    def __init__(self):
        self.before, self.profiled, self.alphas = [], [], []

    def on_train_batch_start(self, trainer, *args):
        self.before.append(trainer.strategy.plan is not None)

    def on_before_zero_grad(self, trainer, *args):  # after the batch's backward, before the plan is made
        self.profiled.append(trainer.strategy.engine.profile is not None)

    def on_train_batch_end(self, trainer, *args):
        self.alphas.append(trainer.strategy.plan.swap.alpha)


def test_plan_is_there_after_the_first_step(tmp_path):
    """`trainer.strategy.plan` is set when the first batch is over, saved as JSON, and outlives the fit."""
    spy = Spy()
    strategy = MemoStrategy(alpha=0.5)
    assert strategy.plan is None
    result = fit(strategy, callbacks=[spy], default_root_dir="run")
    assert spy.before == [False, True, True, True]
    assert spy.alphas == [0.5] * 4
    assert (result.plan.fingerprint.batch, result.plan.fingerprint.tokens) == (2, 32)
    assert result.plan.swap.calls == 4
    assert Plan.load("run/memo_plan.json") == result.plan
    result.plan.save(tmp_path / "folder" / "copy.json")
    assert Plan.load(tmp_path / "folder" / "copy.json") == result.plan


def test_plan_is_saved_in_the_root_folder(tmp_path):
    """Without a logger, `default_root_dir` gets the plan."""
    fit(MemoStrategy(alpha=1.0), default_root_dir=tmp_path / "runs", max_steps=1)
    assert (tmp_path / "runs" / "memo_plan.json").exists()


@pytest.mark.parametrize("settings", [{}, {"default_root_dir": "."}], ids=str)
def test_no_file_in_the_working_folder(settings, tmp_path):
    """Without a folder for the run, nothing is written."""
    with listening() as heard:
        fit(MemoStrategy(alpha=1.0), **settings)
    assert list(tmp_path.iterdir()) == []
    assert not [line for line in heard if "saved" in line]


@pytest.mark.parametrize("as_path", [str, Path], ids=["str", "Path"])
def test_plan_is_reused(as_path):
    """`MemoStrategy(plan=...)` profiles nothing and trains from the first batch on as planned."""
    made = fit(MemoStrategy(alpha=1.0)).plan
    made.save("plan.json")
    spy = Spy()
    with listening() as heard:
        result = fit(MemoStrategy(plan=as_path("plan.json")), callbacks=[spy])
    reason = f"When the plan was made: {made.reason}"
    assert result.plan == dataclasses.replace(made, budget=result.plan.budget, reason=reason)  # memory of this run
    assert spy.before == [True] * 4
    assert True not in spy.profiled
    assert not [line for line in heard if "profiled" in line]
    assert [line for line in heard if "the plan plan.json" in line]
    assert_as_plain(result, plain_of(), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["model", "precision"])
def test_foreign_plan_is_not_used(change):
    """A plan for another model or precision is set aside in one line, and the first batch is profiled."""
    module = LanguageModel("gpt2" if change == "model" else "block_dropout")
    fit(MemoStrategy(alpha=1.0), module, max_steps=1).plan.save("foreign.json")
    precision = "bf16-true" if change == "precision" else "32-true"
    with pytest.warns(UserWarning, match="is not used, and the first batch is profiled") as caught:
        result = fit(MemoStrategy(alpha=0.0, plan="foreign.json"), precision=precision)
    line = next(str(w.message) for w in caught if "is not used" in str(w.message))
    assert "\n" not in line
    assert "foreign.json" in line
    assert result.plan.swap.alpha == 0.0
    assert result.losses == plain_of(precision=precision).losses


def test_plan_of_shorter_batches_is_replaced():
    """A given plan serves batches up to its own size; a larger one is profiled."""
    fit(MemoStrategy(alpha=1.0), data=loader(tokens=16)).plan.save("short.json")
    with listening() as heard:
        result = fit(MemoStrategy(plan="short.json", alpha=1.0))
    assert [line for line in heard if "larger than the one" in line]
    assert result.plan.fingerprint.tokens == 32
    assert_as_plain(result, plain_of(), 1.0)


WRONG = {
    "slot": lambda swap: {"memory": dataclasses.replace(swap.memory, slot=64)},
    "calls": lambda swap: {"storage": plan_of_alpha(swap.storage.tokens, 1.0, 2 * swap.calls)},
    "alpha": lambda swap: {"storage": plan_of_alpha(swap.storage.tokens, 0.0, swap.calls)},
    "joint attention": lambda swap: {"joint_attention": True},
    "plain": lambda swap: {"storage": plan_of_plain_training(swap.storage.tokens, swap.calls)},
}


@slow_if(lambda wrong: wrong in ("alpha", "plain"))
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_plan_costs_no_correctness(wrong):
    """A plan whose numbers are wrong trains right all the same."""
    plan = fit(MemoStrategy(alpha=1.0), max_steps=1).plan
    dataclasses.replace(plan, swap=dataclasses.replace(plan.swap, **WRONG[wrong](plan.swap))).save("wrong.json")
    result = fit(MemoStrategy(plan="wrong.json", alpha=1.0))
    assert_as_plain(result, plain_of(), 1.0)


# ---- loss curves


@pytest.fixture(scope="module")
def plain_curve():
    return plain(data=loader(160), max_steps=CURVE_STEPS, **CURVE)


@pytest.fixture(scope="module")
def curves():
    return {}


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_loss_curve(alpha, plain_curve, curves):
    """32 optimizer steps with dropout, accumulation and clipping lie on plain training's."""
    result = fit(MemoStrategy(alpha=alpha), data=loader(160), max_steps=CURVE_STEPS, **CURVE)
    assert len(result.losses) == 2 * CURVE_STEPS
    assert plain_curve.losses[-1] < plain_curve.losses[0] - 1
    assert_as_plain(result, plain_curve, alpha, CURVE_BOUND)
    curves[alpha] = result.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "alpha"), [*(("block_dropout", a) for a in ALPHAS), ("gpt2_dropout", 0.25), ("gpt2_dropout", 1.0)]
)
def test_loss_curve_in_test_mode(family, alpha, plain_curve, curves):
    """Delayed copies and poisoned buffers change no bit: no copy is used too early, no buffer too late."""
    steps = 8
    result = fit(
        MemoStrategy(alpha=alpha, test_mode=DELAYS), LanguageModel(family), loader(160), max_steps=steps, **CURVE
    )
    if family == "block_dropout":
        expected = curves.get(alpha) if alpha in curves else plain_curve.losses
        bound = 0.0 if alpha in curves or alpha in (0.0, 1.0) else CURVE_BOUND
        assert largest_difference(result.losses, expected[: 2 * steps]) <= bound
    else:
        assert result.plan.swap.joint_attention
        assert_as_plain(result, plain(LanguageModel(family), loader(160), max_steps=steps, **CURVE), alpha, CURVE_BOUND)
    assert set(result.held) == {0}


def test_bound_tells_wrong_training_apart(plain_curve):
    """Updates that are wrong by a thousandth leave the bound of the curves within ten steps."""
    wrong = plain(LanguageModel(lr=3e-3 * 1.001), loader(160), max_steps=10, **CURVE)
    assert largest_difference(wrong.losses, plain_curve.losses[:20]) > 10 * CURVE_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("family", ["block_dropout", "llama"])
def test_bf16(family, precision, alpha):
    """bf16 trains; with one slice per layer, as plain training in every bit."""
    result = fit(MemoStrategy(alpha=alpha), LanguageModel(family), precision=precision, max_steps=6)
    assert_as_plain(result, plain_of(LanguageModel, family, precision=precision, max_steps=6), alpha, bound=0.03)


# ---- what else a Trainer does


OPTIONS = {
    "fast_dev_run": {"fast_dev_run": 2},
    "detect_anomaly": {"detect_anomaly": True, "max_steps": 3},
    "clip_by_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "epochs": {"max_epochs": 3, "max_steps": -1, "limit_train_batches": 2},
    "overfit_batches": {"overfit_batches": 2, "max_steps": 6},
    "deterministic": {"deterministic": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_trainer_options(options, alpha):
    """Settings of the Trainer keep their meaning."""
    try:
        result, expected = fit(MemoStrategy(alpha=alpha), **options), plain_of(**options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_as_plain(result, expected, alpha)


@pytest.mark.parametrize(("family", "alpha"), [("block_dropout", 0.0), ("llama", 1.0), ("llama", 0.5), ("gpt2", 0.5)])
def test_validation_between_steps(family, alpha):
    """A sanity check and validation in the middle of training change nothing, and see the same losses."""
    losses = []
    for strategy in (MemoStrategy(alpha=alpha), "auto"):
        seen = []

        class Metrics(Callback):
            def on_validation_end(self, trainer, module, seen=seen):
                seen.append(trainer.callback_metrics["val_loss"].item())

        losses.append(
            fit(strategy, LanguageModel(family), val_data=loader(4), val_check_interval=2, num_sanity_val_steps=2,
                callbacks=[Metrics()])
        )  # fmt: skip
        losses.append(seen)
    result, seen, expected, expected_seen = losses
    assert_as_plain(result, expected, alpha)
    assert len(seen) == 3
    assert seen == (pytest.approx(expected_seen, abs=3e-6) if alpha == 0.5 else expected_seen)


def test_validation_with_gradients():
    """A forward with gradients that has no backward, in validation, leaves nothing behind."""

    class Probing(LanguageModel):
        def validation_step(self, batch, batch_idx):
            with torch.enable_grad():
                self.seen = self.loss(batch)  # kept, graph and all

    options = {"val_check_interval": 2, "num_sanity_val_steps": 2, "inference_mode": False}
    result = fit(MemoStrategy(alpha=1.0), Probing(), val_data=loader(4), **options)
    assert result.losses == plain(Probing(), val_data=loader(4), **options).losses


@pytest.mark.parametrize("family", ["block_dropout", "llama"])
@pytest.mark.parametrize("after_fit", [False, True], ids=["alone", "after fit"])
def test_validate_test_predict(family, after_fit):
    """Evaluation runs without the engine, with a fit before it and without."""
    answers = []
    for strategy in (MemoStrategy(alpha=1.0), "auto"):
        module = LanguageModel(family)
        trainer = fit(strategy, module).trainer if after_fit else make_trainer(strategy)
        answers.append(
            [
                trainer.validate(module, loader(4), verbose=False),
                trainer.test(module, loader(4), verbose=False),
                [loss.item() for loss in trainer.predict(module, loader(6))],
            ]
        )
    assert answers[0] == answers[1]
    assert len(answers[0][2]) == 3


def test_fit_after_predict():
    """Predict, then fit, then predict on one trainer."""
    answers = []
    for strategy in (MemoStrategy(alpha=1.0), "auto"):
        trainer, module = make_trainer(strategy), LanguageModel()
        before = trainer.predict(module, loader(4))
        torch.manual_seed(1)
        trainer.fit(module, loader())
        answers.append([*before, *trainer.predict(module, loader(4)), *module.losses])
    assert answers[0] == answers[1]


# ---- fit after fit


@slow_if(lambda family: family == "llama")
@pytest.mark.parametrize("reuse", ["trainer and strategy", "nothing"])
@pytest.mark.parametrize("family", ["block_dropout", "llama"])
def test_second_fit(family, reuse):
    """Training goes on in a second fit, with the same trainer and strategy object, or with new ones."""
    losses = []
    for strategy, again in ((MemoStrategy(alpha=1.0), MemoStrategy(alpha=1.0)), ("auto", "auto")):
        module = LanguageModel(family)
        trainer = fit(strategy, module).trainer
        torch.manual_seed(2)
        if reuse == "nothing":
            make_trainer(again).fit(module, loader())
        else:
            trainer.fit_loop.epoch_loop.max_steps = 8
            trainer.fit(module, loader())
        losses.append(module.losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


@pytest.mark.slow
def test_same_trainer_serves_another_model():
    """One trainer and strategy object, two models: the second is profiled anew."""
    result = fit(MemoStrategy(alpha=1.0))
    first, module = result.plan, LanguageModel("llama")
    result.trainer.fit_loop.epoch_loop.max_steps = 8
    torch.manual_seed(1)
    result.trainer.fit(module, loader())
    assert result.plan.fingerprint.model != first.fingerprint.model
    assert module.losses == plain_of(LanguageModel, "llama").losses


class Boom(Exception):
    pass


class Failing(LanguageModel):
    """Raises at a step, at a place."""

    def __init__(self, family, place, step):
        super().__init__(family)
        self.place, self.step = place, step

    def training_step(self, batch, batch_idx):
        if batch_idx != self.step:
            return super().training_step(batch, batch_idx)
        handles = []

        def boom(*args):
            for handle in handles:
                handle.remove()
            raise Boom

        third = next(m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)[2]
        inner = [m for m in third.modules() if isinstance(m, torch.nn.LayerNorm) or "RMSNorm" in type(m).__name__][1]
        if self.place == "inside a layer":
            handles.append(inner.register_forward_hook(boom))
        elif self.place == "backward":
            handles.append(inner.weight.register_hook(boom))
        loss = super().training_step(batch, batch_idx)
        if self.place == "training_step":
            raise Boom
        return loss

    def configure_gradient_clipping(self, *args, **kwargs):
        if self.place == "before the optimizer" and self.trainer.global_step == self.step:
            raise Boom


PLACES = ["training_step", "inside a layer", "backward", "before the optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "place", "step"),
    [
        *(("block_dropout", place, step) for place in PLACES for step in (0, 2)),
        *(("llama", place, 2) for place in PLACES[:3]),
    ],
)
def test_exception_leaves_process_and_model_usable(family, place, step):
    """After an exception anywhere in a step, the model is as it was and the same process trains normally."""
    module = Failing(family, place, step)
    own = forwards(module)
    attention = getattr(getattr(module.model, "config", None), "_attn_implementation", None)
    alpha = 1.0 if family == "llama" else 0.5
    trainer = make_trainer(MemoStrategy(alpha=alpha, test_mode=DELAYS))
    callbacks = list(trainer.callbacks)
    with pytest.raises(Boom):
        trainer.fit(module, loader())
    assert copy_threads() == []
    assert forwards(module) == own
    assert getattr(getattr(module.model, "config", None), "_attn_implementation", None) == attention
    assert trainer.callbacks == callbacks
    # The same trainer and model go on, with steps that do not fail; a fresh one trains as plain training does.
    module.step = -1
    trainer.fit(module, loader())
    assert trainer.strategy.plan is not None
    assert_as_plain(fit(MemoStrategy(alpha=alpha), LanguageModel(family)), plain_of(LanguageModel, family), alpha)


def test_a_refused_model_is_left_as_it_was():
    module = LanguageModel("block_dropout")
    own = forwards(module)
    with pytest.raises(ValueError, match="has none: use stream_from_host"):
        fit(MemoStrategy(stream_from_host="model", slice_tokens=8), module)
    assert forwards(module) == own


@pytest.mark.parametrize("use", [lambda t: t[:, -1], lambda t: t.mean(), lambda t: torch.softmax(t, -1)])
def test_logits_of_a_model_that_runs_slice_by_slice(use):
    class Metric(LanguageModel):
        def training_step(self, batch, batch_idx):
            output = self.model(**batch)
            use(output.logits)
            return output.loss

    with pytest.raises(ValueError, match="the logits of a sequence are never held"):
        fit(MemoStrategy(stream_from_host="model", slice_tokens=8), Metric("llama"))


def test_keyboard_interrupt():
    """Ctrl+C stops the copies, and gives the model back."""

    class Interrupted(LanguageModel):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                self.loss(batch)
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    handler, module = signal.getsignal(signal.SIGINT), Interrupted()
    try:
        with pytest.raises(SystemExit):
            fit(MemoStrategy(alpha=1.0), module)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert forwards(module) == []
    assert copy_threads() == []


# ---- training steps of all kinds


class Manual(LanguageModel):
    """Manual optimization: two backwards, then a step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in ({name: t[:1] for name, t in batch.items()}, {name: t[1:] for name, t in batch.items()}):
            self.manual_backward(self.keep(self.loss(half)))
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()


class TwoForwards(LanguageModel):
    """Two forwards before one backward: twice the layer calls are alive."""

    def training_step(self, batch, batch_idx):
        first, second = ({name: t[n : n + 1] for name, t in batch.items()} for n in (0, 1))
        return self.keep(self.loss(first) + self.loss(second))


class NoGradBetween(LanguageModel):
    """A forward without gradients between a forward and its backward, as a teacher's or a reference model's is."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        with torch.no_grad():
            reference = self.loss(batch)
        return self.keep(loss * reference)


class TwoOptimizers(LanguageModel):
    """Two optimizers in turn; the second one's step leaves the model's weights without gradients."""

    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False
        self.scale = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.scale.weight, 0.1)
        torch.nn.init.constant_(self.scale.bias, 0.1)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.01) for part in (self.model, self.scale)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.keep(self.loss(batch) * self.scale(torch.ones(1, 1)).sum().exp()))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class Lbfgs(LanguageModel):
    """An optimizer that runs the training step several times per batch."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class LayerDrop(LanguageModel):
    """Leaves out layers, other ones in every batch."""

    def loss(self, batch):
        x = self.model.embed(batch["input_ids"])
        for number, block in enumerate(self.model.blocks):
            if (number + len(self.losses)) % 3:
                x = block(x)
        logits = self.model.head(x)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class EvalForward(LanguageModel):
    """Gradients in eval mode."""

    def on_train_start(self):
        super().on_train_start()
        self.model.eval()


KINDS = {Manual: 4, TwoForwards: 8, NoGradBetween: 4, TwoOptimizers: 4, Lbfgs: 4, LayerDrop: 3, EvalForward: 4}


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("kind", "calls"), KINDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_kinds_of_training_steps(kind, calls, alpha):
    """Training steps that are not just one forward and one backward train as plainly."""
    result = fit(MemoStrategy(alpha=alpha), kind())
    assert_as_plain(result, plain_of(kind), alpha, bound=2e-5)
    assert result.plan.swap.calls == calls


@pytest.mark.slow
def test_learning_rate_finder():
    """The tuner, which trains with callbacks of its own, finds what it finds in plain training; then fit goes on."""
    found = []
    for strategy in (MemoStrategy(alpha=1.0), "auto"):
        module, trainer = LanguageModel(), make_trainer(strategy)
        module.lr = 1e-3
        torch.manual_seed(1)
        finder = Tuner(trainer).lr_find(module, loader(), num_training=6, update_attr=False)
        trainer.fit(module, loader())
        found.append((finder.results, module.losses))
    assert found[0] == found[1]


class Skipping(LanguageModel):
    """Returns None for some batches, after a forward, which Lightning then skips."""

    skipped = (0, 2)

    def training_step(self, batch, batch_idx):
        loss = self.keep(self.loss(batch))
        self.last = loss  # the graph outlives the step
        return None if batch_idx in self.skipped else loss


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_skipped_batches(alpha):
    """A training_step that returns None, the first one included, holds nothing when its loss is gone."""
    result = fit(MemoStrategy(alpha=alpha), Skipping(), max_steps=6)
    expected = plain_of(Skipping, max_steps=6)
    assert len(expected.losses) == 6
    if alpha != 0.5:
        assert result.losses == expected.losses
    assert largest_difference(result.losses, expected.losses) <= 3e-6
    assert result.plan is not None
    assert result.held[-1] == 0


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_iterable_dataset(alpha):
    """Data without a length, over two epochs."""
    options = {"max_steps": -1, "max_epochs": 2}

    def data():
        return torch.utils.data.DataLoader(Stream(6), batch_size=2)

    result = fit(MemoStrategy(alpha=alpha), data=data(), **options)
    assert len(result.losses) == 6
    assert_as_plain(result, plain(data=data(), **options), alpha)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["block_dropout", "llama"])
def test_batches_of_varying_length(family, alpha):
    """Shorter batches run by the plan in force; a longer one is profiled and planned anew, and that is said."""
    shapes = [(2, 24), (2, 16), (1, 24), (2, 40), (3, 24), (2, 24), (2, 48), (2, 2)]
    data = batches(make_batch(*shape, seed=n) for n, shape in enumerate(shapes))
    with listening() as heard:
        result = fit(MemoStrategy(alpha=alpha), LanguageModel(family), data, max_steps=len(data))
    replanned = [line for line in heard if "larger than the one" in line]
    assert [line.split("batch of ")[1].split(" tokens")[0] for line in replanned] == ["2 x 40", "2 x 48"]
    assert result.plan.fingerprint.tokens == 48
    assert_as_plain(result, plain(LanguageModel(family), data, max_steps=len(data)), alpha)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 3])
def test_tiny_sequences(tokens):
    """Sequences shorter than the number of slices that alpha asks for."""
    data = batches(make_batch(2, tokens, seed=n) for n in range(4))
    result = fit(MemoStrategy(alpha=0.5, slice_tokens=1), data=data)
    assert_as_plain(result, plain(data=data), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("padded_first", [False, True], ids=["padded later", "padded first"])
def test_right_padding(padded_first, alpha):
    """Batches padded on the right, some without padding, train as plainly."""
    data = batches(make_batch(3, 24, padded=(n % 2 == 0) == padded_first, seed=n) for n in range(4))
    result = fit(MemoStrategy(alpha=alpha), LanguageModel("llama"), data)
    expected = plain(LanguageModel("llama"), data)
    assert largest_difference(result.losses, expected.losses) <= 3e-6
    assert set(result.held) == {0}


# ---- what is trained


class Lora(LanguageModel):
    """LoRA by peft on all linear layers of attention, with its dropout."""

    def _seeded_build(self):
        peft = pytest.importorskip("peft")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            settings = peft.LoraConfig(
                task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]
            )
            return peft.get_peft_model(self._build(), settings)


class Frozen(LanguageModel):
    """Embeddings, or embeddings and first layers, are not trained."""

    def __init__(self, family, names):
        super().__init__(family)
        for name, p in self.model.named_parameters():
            p.requires_grad_(not any(part in name for part in names))


PARTS = {
    "lora": lambda: Lora("llama"),
    "frozen embeddings": lambda: Frozen("block_dropout", ("embed",)),
    "frozen embeddings, llama": lambda: Frozen("llama", ("embed",)),
    "frozen first layers": lambda: Frozen("block_dropout", ("embed", "blocks.0.", "blocks.1.")),
    "frozen middle": lambda: Frozen("block_dropout", ("embed", "blocks.1.", "blocks.2.")),
    "only biases": lambda: Frozen("block_dropout", ("weight",)),
}


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_part_of_the_model_is_trained(make, alpha):
    """LoRA and frozen weights: the frozen stay, the others train as plainly."""
    module, before = make(), {name: p.clone() for name, p in make().named_parameters()}
    result = fit(MemoStrategy(alpha=alpha, fused_kernels=False), module)
    assert_as_plain(result, plain_of(make), alpha)
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


@slow_if(lambda alpha: alpha not in ("auto", 0.5))
@pytest.mark.parametrize("alpha", ["auto", 0.0, 0.3, 0.5, 1.0])
def test_layer_that_mixes_tokens_is_not_cut(alpha):
    """A layer that mixes tokens outside attention trains whole, and that is said where slices would be another plan."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(MemoStrategy(alpha=alpha, device_memory=SMALL_DEVICE), LanguageModel(mixing_model))
    line = "layers run as one slice.*, because Mixing may not compute each token by itself"
    assert any(re.search(line, str(each.message)) for each in caught) == (alpha not in (0.0, 1.0))
    assert not result.plan.swap.plain
    assert_as_plain(result, plain_of(LanguageModel, mixing_model), 1.0)


@pytest.mark.parametrize(("settings", "told"), [({}, False), ({"alpha": 0.0, "slice_tokens": 8}, True)])
def test_slices_that_nobody_gets(settings, told):
    """A plain plan cuts no layers, and `slice_tokens` asks for slices at any alpha."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(MemoStrategy(**settings), LanguageModel(mixing_model))
    assert (result.plan.swap.plain) != told
    assert any("layers run as one slice" in str(each.message) for each in caught) == told


# ---- the model, the trainer and the process afterwards


class During(Callback):
    """Notes what is attached while training."""

    def on_train_batch_end(self, trainer, module, *args):
        self.forwards, self.threads = forwards(module), sorted(copy_threads())
        self.attention = getattr(getattr(module.model, "config", None), "_attn_implementation", None)


@pytest.mark.parametrize("family", ["block_dropout", "llama", "gpt2_dropout"])
def test_model_is_left_as_it_was(family):
    """After fit layers have their own forward, attention is the model's, no thread runs, callbacks are the user's."""
    module, during = LanguageModel(family), During()
    own = set(forwards(module))
    layers = [m for m in module.modules() if type(m).__name__ in ("PlainBlock", "LlamaDecoderLayer", "GPT2Block")]
    layers[0].forward = mine = layers[0].forward  # someone else's patch
    attention = getattr(getattr(module.model, "config", None), "_attn_implementation", None)
    result = fit(MemoStrategy(alpha=1.0), module, callbacks=[during])
    around_the_loss = 0 if family == "block_dropout" else 2  # a Hugging Face model's head, and the norm before it
    around_layers = 2 if family == "block_dropout" else 3  # which compiled code calls without tracing them
    assert len(set(during.forwards) - own) == 4 + around_layers + around_the_loss
    assert during.threads == ["offload", "prefetch"]
    assert str(during.attention).startswith("lightning_memo") == (attention is not None)
    assert vars(layers[0]).pop("forward") is mine
    assert set(forwards(module)) == own
    assert getattr(getattr(module.model, "config", None), "_attn_implementation", None) == attention
    assert copy_threads() == []
    assert result.trainer.callbacks == make_trainer("auto", callbacks=result.trainer.callbacks).callbacks
    assert {type(callback).__name__ for callback in result.trainer.callbacks} >= {"SlotWatch", "During"}
    assert "RuntimeCallback" not in {type(callback).__name__ for callback in result.trainer.callbacks}


def test_copied_model_runs_by_itself():
    """A copy of the model taken during training (an average of weights) is a plain model."""
    losses = []
    for strategy in (MemoStrategy(alpha=1.0), "auto"):
        module = LanguageModel()
        fit(strategy, module, callbacks=[WeightAveraging(avg_fn=lambda average, new, count: (average + new) / 2)])
        losses.append((module.losses, [p.sum().item() for p in module.parameters()]))
    assert losses[0] == losses[1]


def test_init_module_context():
    """`Trainer.init_module(empty_init=True)` gives weights that can be filled and trained."""
    weights = LanguageModel().state_dict()
    losses = []
    for strategy in (MemoStrategy(alpha=1.0), "auto"):
        trainer = make_trainer(strategy)
        with trainer.init_module(empty_init=True):
            module = LanguageModel()
        module.load_state_dict(weights)
        torch.manual_seed(1)
        trainer.fit(module, loader())
        losses.append(module.losses)
    assert losses[0] == losses[1]


def test_interactive_session(monkeypatch):
    """A notebook is no obstacle: nothing is launched. (Lightning refuses a strategy that launches processes there.)"""
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(Exception, match="not compatible with an interactive"):
        make_trainer("ddp")
    assert fit(MemoStrategy(alpha=1.0)).losses == plain_of().losses


# ---- checkpoints


def tree(content, prefix=""):
    """All leaves of a checkpoint, by path."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        if isinstance(value, (dict, list, tuple)):
            yield from tree(value, f"{prefix}/{key}")
        else:
            yield f"{prefix}/{key}", value


def test_checkpoint_is_plain_trainings():
    """A checkpoint holds what plain training's holds: keys, weights, optimizer state."""
    contents = []
    for name, strategy in (("memo", MemoStrategy(alpha=1.0)), ("plain", "auto")):
        result = fit(strategy, callbacks=[ModelCheckpoint(Path(name), "last")], enable_checkpointing=True)
        result.trainer.save_checkpoint(f"{name}/after.ckpt")
        last, after = (torch.load(f"{name}/{file}.ckpt", weights_only=False) for file in ("last", "after"))
        assert after.keys() == last.keys()
        contents.append(dict(tree(last)))
    memo, expected = contents
    assert Plan.from_json(memo.pop("/lightning_memo_plan")).swap.alpha == 1.0
    assert memo.keys() == expected.keys()
    assert any(key.startswith("/optimizer_states/0/state") for key in memo)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(memo[key], value), key


RESUMED = [
    ("memo", "memo", 0.0, None),
    ("memo", "memo", 1.0, None),
    ("memo", "plain", 1.0, None),
    ("plain", "memo", 1.0, None),
    # A first batch is profiled with every layer whole, which rounds otherwise than slices do. With the plan of the
    # interrupted run, from its checkpoint or its file, nothing is profiled, and the losses are the very same.
    ("memo", "memo", 0.5, None),
    ("memo", "memo", 0.5, "run/memo_plan.json"),
]


@functools.cache
def uninterrupted(alpha):
    return fit(MemoStrategy(alpha=alpha), data=ResumableLoader(Sequences(10)), max_steps=8, max_epochs=9)


@slow_if(lambda first, then, alpha: first == then and alpha != 0.5)
@pytest.mark.parametrize(("first", "then", "alpha", "plan"), RESUMED, ids=str)
def test_resume(first, then, alpha, plan):
    """Training continued from a checkpoint in the middle of an epoch has the losses of the uninterrupted run."""

    def strategy(name, plan=None):
        return MemoStrategy(alpha=alpha, plan=plan) if name == "memo" else "auto"

    def data():
        return ResumableLoader(Sequences(10))

    saver = ModelCheckpoint("saved", every_n_train_steps=3, save_top_k=-1)
    saving = {"callbacks": [saver], "enable_checkpointing": True, "default_root_dir": "run"}
    fit(strategy(first), data=data(), max_steps=4, max_epochs=9, **saving)
    resumed = fit(strategy(then, plan), data=data(), max_steps=8, max_epochs=9, ckpt_path=saver.best_model_path)
    expected = uninterrupted(alpha)
    assert resumed.losses == expected.losses[3:]
    for a, b in zip(resumed.module.parameters(), expected.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_no_warning_of_its_own():
    """Nothing but Lightning's own hints is warned about in an ordinary run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(MemoStrategy(alpha=0.5))
    with warnings.catch_warnings(record=True) as usual:
        warnings.simplefilter("always")
        plain()
    assert {str(w.message) for w in caught} <= {str(w.message) for w in usual}


def test_default_strategy_of_the_comparison():
    """What all of this is compared with is Lightning's own single-device strategy."""
    assert isinstance(plain(max_steps=1).trainer.strategy, SingleDeviceStrategy)
    assert FAMILIES["block_dropout"].dropout


def test_model_is_freed_after_training():
    """Nothing of the process holds on to a model that was trained."""
    result = fit(MemoStrategy(alpha=0.5), LanguageModel("llama"), max_steps=1)
    alive = weakref.ref(result.module)
    del result
    gc.collect()
    assert alive() is None


def test_state_of_an_optimizer_that_has_not_stepped():
    """With accumulation, the first batch is over before the optimizer has a state; the plan counts it all the same."""
    fixed = [fit(MemoStrategy(alpha=1.0), max_steps=1, accumulate_grad_batches=n).plan.costs for n in (1, 2)]
    least = 0.99 * fixed[0].fixed_device_bytes
    assert fixed[1].fixed_device_bytes >= least


def test_device_budget_that_is_not_met():
    """A plan that needs more device memory than it may use is carried out, and said to need more."""
    with pytest.warns(UserWarning, match="more than the budget of 1.0 KiB"):
        fit(MemoStrategy(alpha=0.5, device_memory="1KiB"), max_steps=1)
