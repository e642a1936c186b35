"""Models that a user compiled with `torch.compile` train as they do uncompiled, which one line reports."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin
from lightning.fabric import Fabric
from support.devices import DEVICE
from support.families import FAMILIES, VOCABULARY
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, Sequences, fit, plain
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from lightning_memo import MemoCallback, MemoLoop, MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")
LENGTHS = (40, 40, 48, 56, 32)


@pytest.fixture(autouse=True)
def one_warning() -> Iterator[None]:
    """Exactly one warning tells of what is not compiled, and the compiler itself warns of nothing."""
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = (str(w.message) for w in caught if w.category is UserWarning)
    found = [text for text in texts if "compil" in text or "ynamo" in text]
    assert len(found) == 1, found
    assert found[0].startswith("lightning_memo: torch.compile is off for ")


def build() -> Any:
    torch.manual_seed(0)
    return FAMILIES["llama"].build().to(DEVICE)


def ids_of(number: int) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (2, LENGTHS[number]), generator=torch.Generator().manual_seed(number))
    return ids.to(DEVICE)


def compiled(module: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(module, backend=backend)


def compile_forward(model: Any) -> Any:
    model.forward = compiled(model.forward)
    return model


def compile_layer_forwards(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = compiled(layer.forward)
    return model


def compile_class(model: Any) -> Any:
    """As with `@torch.compile` on the method of a class."""
    model.__class__ = type("Compiled", (type(model),), {"forward": compiled(type(model).forward)})
    return model


# ---- MemoLoop


def losses_of(
    model: nn.Module,
    call: Callable[..., Any],
    memo: Callable[[torch.optim.Optimizer], Any] | None = None,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> tuple[list[float], list[Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    with memo(optimizer) if memo else contextlib.nullcontext():
        for number in range(len(LENGTHS)):
            ids = ids_of(number)
            loss = call(input_ids=ids, labels=ids).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def check(*found: Any, **settings: Any) -> None:
    (losses, weights), model = losses_of(*found, **settings), build()
    expected_losses, expected = losses_of(model, model)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for t, e in zip(weights, expected, strict=True):
        torch.testing.assert_close(t, e, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", [compiled, compile_forward, compile_layer_forwards, compile_class])
def test_a_loop_that_gets_a_compiled_model(way: Callable[[Any], Any]) -> None:
    model = way(build())
    before = dict(vars(model))
    check(model, model, lambda optimizer: MemoLoop(model, optimizer, alpha=0.5))
    assert vars(model).get("forward") == before.get("forward")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_loop_that_calls_a_compiled_form_of_its_model(backend: str) -> None:
    model = build()
    check(model, compiled(model, backend), lambda optimizer: MemoLoop(model, optimizer, alpha=0.5))


@pytest.mark.slow
def test_a_compiled_step() -> None:
    model = build()

    @torch.compile(backend="aot_eager")
    def step(**batch: Tensor) -> Any:
        return model(**batch)

    check(model, step, lambda optimizer: MemoLoop(model, optimizer, alpha=0.5))


def test_fabric_with_a_compiled_model() -> None:
    fabric = Fabric(accelerator=DEVICE.type, devices=1)
    model = build()
    prepared = fabric.setup(compiled(model))
    check(model, prepared, lambda optimizer: MemoLoop(prepared, optimizer, alpha=0.5), fabric.backward)


@slow_if(lambda regional: regional)
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
@pytest.mark.usefixtures("no_accelerator")
def test_accelerate_compiles(regional: bool) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    accelerator, model = Accelerator(cpu=DEVICE.type == "cpu", dynamo_plugin=plugin), build()
    prepared = accelerator.prepare(model)
    check(model, prepared, lambda optimizer: MemoLoop(prepared, optimizer, alpha=0.5), accelerator.backward)


# ---- MemoCallback


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of Accelerate, which a process has once, is made anew, and the environment stays as it was."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for after in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if not after:
            yield


def train(folder: Path, *callbacks: Any, **arguments: Any) -> tuple[list[float], dict[str, Tensor]]:
    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=5, report_to=[], logging_steps=1, seed=1,
        use_cpu=DEVICE.type == "cpu", learning_rate=1e-2, optim="sgd", disable_tqdm=True, bf16=False, **arguments,
    )  # fmt: skip
    trainer = Trainer(build(), settings, train_dataset=Sequences(24), callbacks=list(callbacks))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model.state_dict()


@pytest.mark.usefixtures("no_accelerator")
def test_a_trainer_that_compiles(tmp_path: Path) -> None:
    memo = MemoCallback(alpha=0.5)
    compilation = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    losses, weights = train(tmp_path, memo, save_strategy="steps", save_steps=5, **compilation)
    assert memo.plan is not None and memo.plan.swap.alpha == 0.5
    AcceleratorState._reset_state(reset_partial_state=True)
    expected_losses, expected = train(tmp_path / "plain", save_strategy="no")
    assert losses == pytest.approx(expected_losses, rel=2e-5)
    saved = build().from_pretrained(tmp_path / "checkpoint-5").state_dict()
    for name, t in expected.items():
        torch.testing.assert_close(weights[name], t, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(saved[name].to(DEVICE), t, rtol=1e-5, atol=1e-6)


# ---- MemoStrategy


class Compiled(LanguageModel):
    def __init__(self, way: Callable[[Any], Any] = compiled) -> None:
        super().__init__("llama")
        self.model = way(self.model)


class InStep(LanguageModel):
    """Computes its loss in a compiled function that calls the model."""

    def loss(self, batch: Any) -> Tensor:
        whole: Tensor = compiled(super().loss)(batch)
        return whole


@slow_if(lambda make: make is InStep)
@pytest.mark.parametrize("make", [functools.partial(Compiled, compile_forward), functools.partial(InStep, "llama")])
def test_a_lightning_module(make: Callable[[], LanguageModel]) -> None:
    """Other ways of it are in `tests/engine/test_attached.py`, with other models."""
    result = fit(MemoStrategy(alpha=0.5), make())
    assert result.losses == pytest.approx(plain(LanguageModel("llama")).losses, abs=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [(MemoStrategy(alpha=1.0), "auto"), ("auto", MemoStrategy(alpha=1.0))])
def test_checkpoints_are_those_of_the_compiled_model(strategies: tuple[Any, Any], tmp_path: Path) -> None:
    """Plain Lightning keeps the wrapper in the names of weights, saves for this strategy, and resumes from it."""
    losses = []
    for kind, (first, second) in (
        (Compiled, strategies),
        (functools.partial(LanguageModel, "llama"), ("auto", "auto")),
    ):
        fit(first, made := kind(), max_steps=2).trainer.save_checkpoint(path := tmp_path / "two.ckpt")
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert list(saved) == list(made.state_dict())
        assert any("_orig_mod" in name for name in saved) == (kind is Compiled)
        losses.append(fit(second, kind(), ckpt_path=path).losses)
    assert losses[0] == pytest.approx(losses[1], abs=3e-6)
