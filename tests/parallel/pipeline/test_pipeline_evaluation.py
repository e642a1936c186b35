"""Losses of a pipeline are right on all stages: in training, validation, test and prediction; and so are metrics."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from support.families import FAMILIES
from support.parallel_training import LR, Run, Texts
from support.processes import Group, ProcessError, run_in_processes
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoStrategy

RUN = Run(tokens=45, batch=4, steps=3, layers=4)


class Evaluated(LanguageModel):
    """Logs losses, and trains a function of the loss."""

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss**2 / 2

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1, sync_dist=True)

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=1, sync_dist=True)


def _loader(rows: int = RUN.batch) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Texts(RUN), batch_size=rows)


def _evaluate(settings: dict[str, Any], precision: str) -> list[float]:
    """Return losses of this process; data-parallel processes get the same batches."""
    module = Evaluated(RUN.build, lr=LR)
    trainer: Trainer = make_trainer(
        MemoStrategy(pipeline_parallel_size=2, alpha=0.5, **settings),
        devices=dist.get_world_size(), max_steps=2, num_sanity_val_steps=1, val_check_interval=2,
        use_distributed_sampler=False, precision=precision,
    )  # fmt: skip
    losses = [trainer.validate(module, _loader(3), verbose=False)[0]["val_loss"]]
    torch.manual_seed(1)
    trainer.fit(module, _loader(), _loader(3))
    losses += [trainer.callback_metrics[name].item() for name in ("loss", "val_loss")]
    losses.append(trainer.test(module, _loader(3), verbose=False)[0]["test_loss"])
    predicted = torch.stack(trainer.predict(module, _loader(3))).mean()
    dist.all_reduce(predicted)  # context-parallel processes have parts of it
    return [*losses, predicted.item() / dist.get_world_size()]


@torch.no_grad()
def _loss_of(module: LanguageModel) -> float:
    return sum(float(module.loss(batch)) for batch in _loader(3)) / len(_loader(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "settings", "precision"),
    [
        (2, {}, "32-true"),
        pytest.param(2, {}, "bf16-mixed", marks=pytest.mark.slow),
        pytest.param(4, {"zero_stage": 1}, "32-true", marks=pytest.mark.slow),
        pytest.param(4, {"zero_stage": 3}, "32-true", marks=pytest.mark.slow),
        pytest.param(4, {"tensor_parallel_size": 2}, "32-true", marks=pytest.mark.slow),
        pytest.param(4, {"context_parallel_size": 2}, "32-true", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_are_those_of_one_process_on_all_stages(
    processes: int, settings: dict[str, Any], precision: str
) -> None:
    module = Evaluated(RUN.build, lr=LR)
    optimizer, expected = module.configure_optimizers(), [_loss_of(module)]
    for batch in list(_loader())[:2]:
        loss = module.loss(batch)
        optimizer.zero_grad()
        (loss**2 / 2).backward()
        optimizer.step()
    expected += [loss.item()] + [_loss_of(module)] * 3
    for losses in run_in_processes(processes, _evaluate, settings, precision):
        assert losses == pytest.approx(expected, rel=1e-6 if precision == "32-true" else 2e-4)


def _error_of(kind: type[LanguageModel], family: Any, settings: dict[str, Any]) -> str:
    module = kind(family)
    trainer = make_trainer(
        MemoStrategy(pipeline_parallel_size=2, **settings),
        devices=2, max_steps=1,
    )  # fmt: skip
    try:
        trainer.fit(module, _loader())
    except ValueError as error:
        return str(error)
    return ""


def _fails_alone(kind: type[LanguageModel], family: Any, told: str) -> None:
    """Train; a process that is refused something says so in a file, and ends."""
    try:
        error = _error_of(kind, family, {})
    except RuntimeError:
        raise Lost from None
    Path(f"{told}-{dist.get_rank()}").write_text(error)
    os._exit(1)


class Lost(Exception):
    """The other process has ended."""


class UsesLogits(LanguageModel):
    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self.model(**batch)
        return outputs.loss + outputs.logits.square().mean()


class WithoutLabels(LanguageModel):
    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits.mean()


class WithHiddenStates(LanguageModel):
    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, output_hidden_states=True).loss


class WithOtherTensor(LanguageModel):
    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, weights=torch.ones(4)).loss


class CallsPart(LanguageModel):
    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model.model(input_ids=batch["input_ids"])[0].mean()


class CallsCopy(LanguageModel):
    """Calls a copy of its model, as for averaged weights."""

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return copy.deepcopy(self.model)(**batch).loss


class Manual(LanguageModel):
    def __init__(self, family: Any) -> None:
        super().__init__(family)
        self.automatic_optimization = False


class ByLbfgs(LanguageModel):
    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class LooksEarly(LanguageModel):
    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Would see no gradients."""


class WithHead(LanguageModel):
    def __init__(self, family: Any) -> None:
        super().__init__(family)
        self.head = nn.Linear(4, 4)


def _shared(**sizes: Any) -> nn.Module:
    model = FAMILIES["llama"].build(**sizes)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


def _twice(**sizes: Any) -> nn.Module:
    """A model whose forward runs the whole model twice."""
    model = FAMILIES["llama"].build(**sizes)

    class Twice(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            super().forward(*args, **kwargs)
            return super().forward(*args, **kwargs)

    model.__class__ = Twice
    return model


def _with_values(**sizes: Any) -> nn.Module:
    """A model whose layers get another tensor that is computed from the embedding."""
    model = FAMILIES["llama"].build(**sizes)

    class Beside(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, beside: Tensor, **kwargs: Any) -> Tensor:
            return self.layer(x, **kwargs) + beside

    class Passes(type(model.model)):
        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            self.first = self.embed_tokens(input_ids)
            return super().forward(input_ids, **kwargs)

    def add_first(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"beside": model.model.first}

    model.model.layers = nn.ModuleList(map(Beside, model.model.layers))
    model.model.__class__ = Passes
    for layer in model.model.layers:
        layer.register_forward_pre_hook(add_first, with_kwargs=True, prepend=True)
    return model


def _returning(**sizes: Any) -> nn.Module:
    """A model whose layers return another tensor, too."""
    model = FAMILIES["llama"].build(**sizes)

    class Returns(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
            y = self.layer(x, **kwargs)
            return y, y.mean()

    model.model.layers = nn.ModuleList(map(Returns, model.model.layers))
    return model


BAD: dict[str, tuple[type[LanguageModel], Any, dict[str, Any], str]] = {
    "logits": (UsesLogits, "llama", {}, "the model's logits are not there"),
    "labels": (WithoutLabels, "llama", {}, "was called without labels"),
    "hidden states": (WithHiddenStates, "llama", {}, "got output_hidden_states"),
    "argument": (WithOtherTensor, "llama", {}, "how to divide the argument weights"),
    "part": (CallsPart, "llama", {}, "is called by itself"),
    "copy": (CallsCopy, "llama", {}, "or in a copy of the model, and stages have parts of"),
    "manual": (Manual, "llama", {}, "manual optimization may drop gradients"),
    "optimizer": (ByLbfgs, "llama", {}, "LBFGS computes a step from the gradients of all weights"),
    "early": (LooksEarly, "llama", {}, "LooksEarly.on_before_zero_grad would see gradients"),
    "head": (WithHead, "llama", {}, "WithHead has weights in head, which belong to no stage"),
    "shared": (LanguageModel, _shared, {}, "has weights that several layers use"),
    "block": (LanguageModel, "block_dropout", {}, "divides one causal language model of transformers"),
    "stages": (LanguageModel, "llama", {"pipeline_layers": [3, 3]}, "does not divide the 4 layers"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_a_pipeline_cannot_do_is_refused_in_one_line(case: str) -> None:
    kind, family, settings, message = BAD[case]
    errors = run_in_processes(2, _error_of, kind, family, settings)
    told = [error for error in errors if message in error]
    assert told and "\n" not in told[0] and "pipeline" in told[0], errors


@pytest.mark.parametrize(
    ("family", "rank", "message"),
    [
        (_twice, 1, "calls it more than once, or runs its layers in another order"),
        (_with_values, 0, "gets tensors beside its hidden states"),
        (_returning, 0, "returns other tensors beside its hidden states"),
    ],
    ids=["twice", "beside", "returns"],
)
def test_what_one_stage_refuses_ends_the_others(family: Any, rank: int, message: str, tmp_path: Path) -> None:
    group = Group(2)
    try:
        with pytest.raises(ProcessError) as caught:
            group.run(_fails_alone, LanguageModel, family, str(tmp_path / "told"))
    finally:
        group.stop()
    told = (tmp_path / f"told-{rank}").read_text()
    assert message in told and "\n" not in told
    assert "Lost" in caught.value.errors[1 - rank]
