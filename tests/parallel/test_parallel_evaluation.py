"""Validation, test and prediction in several processes: the same losses as in one, before, in and after a fit."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from support.parallel_training import LR, Keep, Run, Texts
from support.processes import run_in_processes
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoStrategy

RUN = Run(tokens=45, steps=2, layers=2)

CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2 ring": (2, {"context_parallel_size": 2}),
    "cp2 ulysses": (2, {"context_parallel_size": 2, "ulysses_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "tp2+sp": (2, {"tensor_parallel_size": 2}),
    "dp2 zero3": (2, {"zero_stage": 3}),
    "cp2 x tp2+sp zero3": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 3}),
}


class Evaluated(LanguageModel):
    """Logs losses as the mean over all processes, and predicts the loss of each batch."""

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=1)


def _loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Texts(RUN), batch_size=RUN.batch // 2)


def _evaluate(settings: dict[str, Any]) -> dict[str, float]:
    module = Evaluated(RUN.build, lr=LR)
    strategy = MemoStrategy(**({"alpha": 0.5} | settings))
    trainer: Trainer = make_trainer(
        strategy, devices=dist.get_world_size(), max_steps=2, num_sanity_val_steps=1, val_check_interval=1
    )
    losses = {"before": trainer.validate(module, _loader(), verbose=False)[0]["val_loss"]}
    torch.manual_seed(1)
    trainer.fit(module, _loader(), _loader())
    losses["in the fit"] = trainer.callback_metrics["val_loss"].item()
    losses["after"] = trainer.test(module, _loader(), verbose=False)[0]["test_loss"]
    predictions = trainer.predict(module, _loader())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, float(torch.stack(predictions).mean()))
    losses["predicted"] = sum(gathered) / len(gathered)
    return losses


@torch.no_grad()
def _loss_of(module: LanguageModel) -> float:
    return sum(float(module.loss(batch)) for batch in _loader()) / len(_loader())


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_losses_of_all_stages(configuration: str) -> None:
    size, settings = CONFIGURATIONS[configuration]
    losses = run_in_processes(size, _evaluate, settings)
    assert all(of_rank == losses[0] for of_rank in losses)
    # Batches of two data-parallel processes are weighted by their tokens together, those of one process one by one.
    rel = 2e-3 if configuration.startswith("dp2") else 1e-6
    assert losses[0]["before"] == pytest.approx(_loss_of(LanguageModel(RUN.build)), rel=rel)
    assert losses[0]["before"] != losses[0]["after"]
    assert losses[0]["after"] == pytest.approx(losses[0]["in the fit"], rel=1e-6)
    assert losses[0]["after"] == pytest.approx(losses[0]["predicted"], rel=rel)


class ByName(LanguageModel):
    """Passes the model entries of the batch by name, as many users do."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


class InParts(LanguageModel):
    """Calls the backbone and the head by themselves, and computes the loss from logits."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
        hidden = self.model.model(input_ids=batch["input_ids"], **positions).last_hidden_state
        logits = self.model.lm_head(hidden).flatten(0, 1)
        if "shift_labels" not in batch:
            targets = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
            count = batch.get("num_items_in_batch", (targets != -100).sum())
        else:
            targets, count = batch["shift_labels"], batch["num_items_in_batch"]
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / count


class TwoPasses(LanguageModel):
    """Two forwards and backwards in one step, by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.keep(loss)
            self.manual_backward(loss)
            optimizer.step()


def _first_losses(kind: type[LanguageModel], settings: dict[str, Any]) -> list[float]:
    """Losses of two steps, from the same weights; `settings` of no processes are plain training."""
    module = kind(RUN.build, lr=LR)
    strategy = MemoStrategy(**({"alpha": 0.5} | settings))
    trainer = make_trainer(strategy, devices=dist.get_world_size(), max_steps=4, limit_train_batches=2, max_epochs=1,
                           use_distributed_sampler=False)  # fmt: skip
    trainer.fit(module, DataLoader(Texts(RUN), batch_size=RUN.batch))
    return module.losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByName, InParts, TwoPasses])
@pytest.mark.parametrize("configuration", ["cp2 ring", "tp2+sp", "dp2 zero3"])
def test_steps_that_do_not_pass_the_batch_on(configuration: str, kind: type[LanguageModel]) -> None:
    size, settings = CONFIGURATIONS[configuration]
    alone = run_in_processes(1, _first_losses, kind, {})[0]
    together = run_in_processes(size, _first_losses, kind, settings)
    for losses in zip(alone, *together, strict=True):
        assert sum(losses[1:]) / size == pytest.approx(losses[0], rel=1e-5)


def _fit_again_after_half_an_accumulation(settings: dict[str, Any]) -> tuple[float, float]:
    """The first gradient norm of a fit after one that stopped between two micro-batches, and of a fresh one."""
    norms = []
    for interrupted in (True, False):
        module = LanguageModel(RUN.build, lr=0.0)
        if interrupted:
            _fit(
                module,
                settings,
                limit_train_batches=1,
                accumulate_grad_batches=2,
                max_steps=-1,
                callbacks=[StopsEarly()],
            )
        keep = Keep()
        _fit(module, settings, max_steps=1, callbacks=[keep])
        norms.append(keep.outcome.norms[0])
    return norms[0], norms[1]


class StopsEarly(Callback):
    """Ends training by an error between two micro-batches."""

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        raise KeyError("stop")


def _fit(module: LanguageModel, settings: dict[str, Any], **trainer: Any) -> None:
    strategy = MemoStrategy(**({"alpha": 0.5} | settings))
    with contextlib.suppress(KeyError):
        make_trainer(strategy, devices=dist.get_world_size(), **({"max_epochs": 1} | trainer)).fit(module, _loader())


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["dp2 zero0", "dp2 zero1", "dp2 zero1 offload", "dp2 zero3", "cp2 ring"])
def test_an_interrupted_accumulation_leaves_nothing(configuration: str) -> None:
    zero = {f"dp2 zero{stage}": (2, {"zero_stage": stage}) for stage in range(4)}
    offload = {"dp2 zero1 offload": (2, {"zero_stage": 1, "offload_state": True})}
    size, settings = (CONFIGURATIONS | zero | offload)[configuration]
    for after, fresh in run_in_processes(size, _fit_again_after_half_an_accumulation, settings):
        assert after == pytest.approx(fresh, rel=1e-6)


def _errors_of_misuse() -> list[str]:
    """One line for each thing that cannot work with tokens or weights divided."""
    errors = []
    module = LanguageModel(RUN.build, lr=LR)
    _fit(module, {"zero_stage": 1}, max_steps=1)
    for settings, callbacks in (({"zero_stage": 3}, []), ({"zero_stage": 1}, [WeightAveraging()])):
        try:
            _fit(module, settings, max_steps=1, callbacks=callbacks)
        except ValueError as error:
            errors.append(str(error))
    for other in (OwnForward(RUN.build, lr=LR), OwnPositions(RUN.build, lr=LR)):
        try:
            _fit(other, {"context_parallel_size": 2}, max_steps=1)
        except ValueError as error:
            errors.append(str(error))
    return errors


class OutsideOfModules(LanguageModel):
    """Uses a weight outside of the module that holds it."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        weight = self.model.model.layers[0].mlp.up_proj.weight
        return super().loss(batch) + (torch.ones(1, weight.shape[1]) @ weight.T).sum()


class OwnTable(LanguageModel):
    """Adds positions to the tokens after the embeddings, of which each process has some."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        embed = self.model.model.embed_tokens
        with embed.register_forward_hook(lambda module, args, output: output + torch.zeros(32, 1)):
            return super().loss(batch)


class OwnForward(LanguageModel):
    """Trains on other tokens than the batch's."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(input_ids=torch.arange(32)[None]).logits.mean()


class OwnPositions(LanguageModel):
    """Counts the tokens that it gets, which are some of a sequence."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        positions = torch.arange(batch["input_ids"].shape[1])[None]
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"], position_ids=positions).loss


def _error_of_mixed_tensors(module: type[LanguageModel], sequence_parallel: bool) -> str:
    settings = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    try:
        _fit(module(RUN.build, lr=LR), settings, max_steps=1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module", "sequence_parallel", "message"),
    [
        (OutsideOfModules, False, r"passes a divided weight to aten\..* with tensor_parallel_size=1"),
        (OwnTable, True, r"sequence_parallel=True: the model combines some of the tokens .*sequence_parallel=False"),
    ],
)
def test_models_that_do_not_follow_a_tensor_parallel_plan(
    module: type[LanguageModel], sequence_parallel: bool, message: str
) -> None:
    for error in run_in_processes(2, _error_of_mixed_tensors, module, sequence_parallel):
        assert re.search(message, error) and "\n" not in error, error


class BackwardInForward(nn.Module):
    """Changes its embeddings by their gradient, and runs its layers again, as in adversarial training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, **labels: Tensor) -> Any:
        x = self.model.get_input_embeddings()(input_ids)
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.model(inputs_embeds=leaf, **labels).loss, leaf)
        return self.model(inputs_embeds=x + 0.1 * gradient, **labels)


def _error_of_backward_in_forward() -> str:
    try:
        _fit(LanguageModel(lambda: BackwardInForward(RUN.build()), lr=LR), {}, max_steps=2)
    except ValueError as error:
        return str(error)
    return ""


def test_a_backward_inside_of_a_forward() -> None:
    for error in run_in_processes(2, _error_of_backward_in_forward):
        assert error.startswith("a weight that FSDP2 had divided") and "\n" not in error, error


@pytest.mark.slow
def test_misuse_is_told_in_one_line() -> None:
    for errors in run_in_processes(2, _errors_of_misuse):
        divided, averaging, own, positions = errors
        assert "divided this module as dp2-cp1-tp1-zero1" in divided and "dp2-cp1-tp1-zero3" in divided
        assert "WeightAveraging" in averaging and "one process" in averaging
        assert "a forward of 32 tokens" in own and "the batches that its steps are given" in own
        assert "position_ids other than the batch's" in positions and "omit them" in positions
        assert not any("\n" in error for error in errors)


class _Validated(LanguageModel):
    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.loss(batch)

    test_step = validation_step


def _evaluate_more_in_the_second_process(settings: dict[str, Any]) -> list[str]:
    """Validate and test on 2 batches in the first process and 3 in the second; return the errors, then those of 2."""
    errors = []
    for limit in (1.0, 2):
        for loop in ("fit", "test"):
            limits = {"limit_val_batches": limit, "limit_test_batches": limit, "max_steps": 1}
            trainer = make_trainer(MemoStrategy(**settings), devices=2, use_distributed_sampler=False, **limits)
            rows, more = Texts(Run(tokens=16, steps=2)), Texts(Run(tokens=16, batch=2 + dist.get_rank(), steps=1))
            loaders = [DataLoader(rows), DataLoader(more)] if loop == "fit" else [DataLoader(more)]
            try:
                getattr(trainer, loop)(_Validated("mixtral"), *loaders)
                errors.append("")
            except ValueError as error:
                errors.append(str(error))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"expert_parallel_size": 2}], ids=str)
def test_other_numbers_of_batches_are_refused(settings: dict[str, Any]) -> None:
    for validated, tested, *limited in run_in_processes(2, _evaluate_more_in_the_second_process, settings):
        assert validated.startswith("validate: processes have 2 to 3 batches, and each waits for the others")
        assert tested.startswith("test: processes have 2 to 3 batches")
        assert limited == ["", ""]
