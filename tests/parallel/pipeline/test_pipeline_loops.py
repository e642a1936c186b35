"""Training loops, calls and outputs that users have around a pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from support.parallel_training import Outcome, Run, train
from support.processes import ProcessError, run_in_processes

from lightning_memo.parallel.pipeline.pipeline_gradients import HeldGradients
from lightning_memo.parallel.pipeline.pipelined_model import PipelineOutput, micro_batches_of

RUN = Run(family="llama_tied", tokens=45, batch=4, layers=4, steps=2)
SETTINGS = {"pipeline_parallel_size": 2, "alpha": 0.5}


class SecondBackward(Callback):
    """Adds the gradients of the same batch once more, as adversarial training does with another batch."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        module.model(**self._batch).loss.backward()


class UnusedForward(Callback):
    """Calls the model while parameters have the gradients of the step."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        before = [p.grad.clone() for p in module.parameters()]
        module.model(**self._batch)
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(module.parameters(), before, strict=True))


class LateHook(Callback):
    """Registers a hook on gradients after the setup."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for p in module.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Thaw(BaseFinetuning):
    """Trains the embedding and the first layers of the first stage from the third batch on."""

    def freeze_before_training(self, module: LightningModule) -> None:
        self.freeze(self._first(module))

    def finetune_function(self, module: LightningModule, epoch: int, optimizer: Any) -> None:
        pass

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.make_trainable(self._first(module))
            kept = {p for group in trainer.optimizers[0].param_groups for p in group["params"]}
            thawed = [p for p in module.parameters() if p not in kept]
            trainer.optimizers[0].add_param_group({"params": thawed, "lr": 1e-2})

    @staticmethod
    def _first(module: LightningModule) -> list[Any]:
        layers = module.model.model.layers
        return [part for part in (module.model.model.embed_tokens, layers[0], layers[1]) if part is not None]


def _train_thawing(sizes: dict[str, Any]) -> Outcome:
    return train(Run(family="llama_gqa", tokens=45, batch=4, layers=8, steps=5), sizes, callbacks=[Thaw()])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_layers_that_are_trained_later_are_profiled(blocks: int) -> None:
    alone, *_ = run_in_processes(1, _train_thawing, {})
    sizes = SETTINGS | {"virtual_pipeline_size": blocks}
    for stage in run_in_processes(2, _train_thawing, sizes):
        assert stage.losses == pytest.approx(alone.losses, rel=1e-5)


def _train(callback: type[Callback] | None) -> Outcome:
    return train(RUN, SETTINGS, callbacks=[] if callback is None else [callback()])


@pytest.mark.slow
@pytest.mark.parametrize(("callback", "times"), [(SecondBackward, 2), (UnusedForward, 1)])
def test_calls_outside_of_the_training_step_keep_gradients(callback: type[Callback], times: int) -> None:
    plain, found = (run_in_processes(2, _train, each) for each in (None, callback))
    for once, more in zip(plain, found, strict=True):
        for name, gradient in once.gradients.items():
            torch.testing.assert_close(more.gradients[name], times * gradient, rtol=1e-5, atol=1e-7)


def test_hooks_on_gradients_that_are_registered_later_are_refused() -> None:
    with pytest.raises(ProcessError, match="a hook on the gradient of a parameter would see gradients before"):
        run_in_processes(2, _train, LateHook)


def test_labels_that_the_call_ignores_are_not_counted() -> None:
    ids = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])
    parts = micro_batches_of({"input_ids": ids, "labels": ids, "ignore_index": 0}, 1)
    assert [part["num_items_in_batch"].item() for part in parts] == [2.0, 2.0]


def test_tensors_in_containers_are_refused() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    arguments = {"input_ids": ids, "labels": ids, "attention_mask": {"full_attention": torch.ones(2, 1, 4, 4)}}
    with pytest.raises(ValueError, match=r"not known how to divide the argument attention_mask dict of the model"):
        micro_batches_of(arguments, 1)


def test_an_output_has_the_loss_and_nothing_else() -> None:
    output = PipelineOutput(torch.tensor(2.0))
    assert "loss" in output and "logits" not in output
    assert output.get("loss") is output["loss"] is output[0] is output.loss
    assert output.get("logits") is getattr(output, "logits", None) is None
    with pytest.raises(ValueError, match="the model's logits are not there"):
        output.logits  # noqa: B018


def test_the_gradient_of_the_loss_is_not_rounded() -> None:
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    place: Any = SimpleNamespace(grad=None, parameter=None)
    held = HeldGradients([place], check_factor=lambda factor: None)
    with held.collecting():
        place.grad = gradient.clone()
    (held.loss(torch.tensor(1.0)) / 3).backward()
    assert torch.equal(place.grad, (gradient.float() / 3).bfloat16())
