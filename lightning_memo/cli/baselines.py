"""Measures plain training and full recomputation of the same model and batch, to compare them with a run."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memo.callbacks.step_stats import METERED_STEP, StepStats
from lightning_memo.cli.build_run import quiet
from lightning_memo.models import CausalLM
from lightning_memo.reports.result_tables import Measurement


def measure_baselines(
    module: Mapping[str, Any], batch: dict[str, Tensor], trainer: Mapping[str, Any], steps: int, seed: int
) -> list[Measurement]:
    """Trains new models on one batch, with plain training and with Hugging Face's gradient checkpointing.

    The settings of the trainer and the optimizer and the measuring callback are those of the run, so that the only
    difference is the handling of activations.

    Args:
        module: Arguments of :class:`~lightning_memo.models.causal_lm.CausalLM`.
        batch: ``{"input_ids": [batch, seq_len], "labels": [batch, seq_len]}``.
        trainer: Arguments of :class:`~lightning.pytorch.Trainer` in the run, for example precision and accumulation.
        steps: Number of timed optimizer steps.
        seed: Random seed of the weights.

    Returns:
        One row for each. A model that does not fit in device memory is left out, with a warning.
    """
    rows = []
    for name, checkpointing in (("plain", False), ("full recomputation", True)):
        seed_everything(seed, verbose=False)
        model = CausalLM(**{**module, "model": {**module["model"], "gradient_checkpointing": checkpointing}})
        row = _measure(name, model, batch, trainer, steps)
        if row is not None:
            rows.append(row)
    return rows


def _measure(
    name: str, model: CausalLM, batch: dict[str, Tensor], trainer: Mapping[str, Any], steps: int
) -> Measurement | None:
    stats = StepStats(last=steps)
    accumulate = trainer.get("accumulate_grad_batches", 1)
    max_steps = METERED_STEP + 1 + steps
    own = {
        "strategy": "auto",
        "callbacks": [stats],
        "max_steps": max_steps,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    try:
        with quiet():
            rows: Any = [batch] * (max_steps * accumulate)
            batches: DataLoader[Any] = DataLoader(rows, batch_size=None)
            Trainer(**{**trainer, **own}).fit(model, train_dataloaders=batches)
    except torch.OutOfMemoryError:
        rank_zero_warn(f"The comparison leaves out {name!r}, which does not fit in device memory.")
        return None
    return stats.measurement(name, stats.step_memory_bytes, host_bytes=0)
