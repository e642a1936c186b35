"""The norm in front of the head in chunks, and training with the loss in chunks."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.harness import Batch
from support.samples.chunked_models import (
    CHUNK,
    MODELS,
    build,
)
from support.trainer_harness import LanguageModel, fit, forwards, loader, shorten_measurements
from torch import Tensor, nn

from lightning_memo import MemoStrategy
from lightning_memo.loss.attach_loss import attach_chunks, find_last_norm
from lightning_memo.runtime import memory_planner as planning

# ---- the norm before the head


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("llama", "model.norm"),
        ("gpt2", "transformer.ln_f"),
        ("gemma3", "model.norm"),
        ("gpt_neox", "gpt_neox.final_layer_norm"),
        ("phi", "model.final_layernorm"),
    ],
)
def test_last_norm_is_found(name: str, norm: str) -> None:
    model = MODELS[name]()
    assert find_last_norm(model, 32) is model.get_submodule(norm)
    assert find_last_norm(model, 33) is None


@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.RMSNorm(32), nn.LayerNorm(32).bfloat16()])
def test_module_in_chunks(norm: nn.Module) -> None:
    x = torch.randn(2, 23, 32, dtype=norm.weight.dtype)

    def run() -> tuple[Tensor, Tensor, list[Tensor], int]:
        norm.zero_grad()
        here = x.clone().requires_grad_()
        y = norm(here)
        kept = len(getattr(y.grad_fn, "saved_tensors", ()))  # of Python's functions
        y.square().sum().backward()
        return y.detach(), here.grad, [p.grad for p in norm.parameters()], kept

    y, dx, weights, _ = run()
    undo = attach_chunks(norm, CHUNK)
    mine, my_dx, my_weights, kept = run()
    undo()
    assert torch.equal(mine, y)
    assert torch.equal(my_dx, dx)
    exact = copy.deepcopy(norm).double()
    exact.zero_grad()
    exact(x.double()).square().sum().backward()
    for w, whole, p in zip(my_weights, weights, exact.parameters(), strict=True):
        assert w.dtype == whole.dtype
        assert (w - p.grad).norm() <= 1.1 * (whole - p.grad).norm() + 1e-6 * p.grad.norm()
    assert kept == 1


# ---- in the strategy


class Accuracy(LanguageModel):
    """Logs the number of correct tokens, and returns the model's complete output from its step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        out = self.model(**batch)
        with torch.no_grad():
            right = (out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean()
        self.log("right", right)
        self.keep(out.loss)
        return out


class Kinds(Callback):
    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kinds.add(type(outputs["logits"]).__name__)


@pytest.mark.usefixtures("only_chunks")
def test_training_with_the_strategy() -> None:
    runs = []
    for settings in ({"loss_chunk_tokens": None}, {}, {"loss_chunk_tokens": CHUNK}):
        strategy, kinds = MemoStrategy(alpha=0.5, **settings), Kinds()
        run = fit(strategy, Accuracy("llama"), val_data=loader(4), max_steps=6, val_check_interval=3,
                  callbacks=[kinds], accumulate_grad_batches=2)  # fmt: skip
        assert forwards(run.module) == []
        runs.append((run.losses, run.trainer.callback_metrics, kinds.kinds))
    (off, off_metrics, _), (default, _, kinds), (mine, metrics, my_kinds) = runs
    assert default == off
    assert kinds == {"Tensor"} and my_kinds == {"LazyLogits"}
    assert mine == pytest.approx(off, rel=1e-5)
    assert float(metrics["right"]) == pytest.approx(float(off_metrics["right"]), abs=0.02)
    assert float(metrics["val_loss"]) == pytest.approx(float(off_metrics["val_loss"]), rel=1e-5)


class Waits(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        while trainer.strategy.memory.busy:
            time.sleep(0.002)


@pytest.mark.slow
def test_recorded_trace_has_no_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every memory request of a step is smaller than the logits of the batch."""
    shorten_measurements(monkeypatch)
    monkeypatch.setattr(planning, "cache_folder", lambda: tmp_path / "plans")
    largest = {}
    for tokens in (None, 8):
        strategy = MemoStrategy(alpha=0.5, loss_chunk_tokens=tokens, plan_memory=True)
        module = LanguageModel(lambda: build("LlamaConfig", vocab_size=400))
        fit(strategy, module, loader(24, 512), max_steps=9, callbacks=[Waits()], default_root_dir=tmp_path)
        largest[tokens] = int(strategy.memory.trace.size.max())
        assert strategy.memory.use.hits > 0 and not any(strategy.memory.use.displaced.values())
    assert largest[None] == 2 * 512 * 400 * 4 > 2 * largest[8]
