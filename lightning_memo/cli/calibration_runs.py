"""Short training runs on this machine, whose measurements calibrate the estimate. Imports torch only when called."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_memo.artifacts.plan import Plan


def fastest_run(model: Mapping[str, Any], tokens: int, repeats: int) -> Plan:
    """Return the plan of the fastest of several runs, because other load on the machine only adds time.

    Args:
        model: Settings of the group `model`.
        tokens: Sequence length, at least 2.
        repeats: Number of runs, at least 1.
    """
    plans = [profile_run(model, tokens) for _ in range(repeats)]
    return min(plans, key=lambda plan: sum(plan.costs.forward_seconds) + sum(plan.costs.backward_seconds))


def profile_run(model: Mapping[str, Any], tokens: int) -> Plan:
    """Train one profiled step on a sequence, after a step on a shorter sequence for warm-up. Prints nothing.

    Args:
        model: Settings of the group `model`.
        tokens: Sequence length, at least 2.

    Returns:
        The plan, which contains the measured costs.
    """
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_memo.models import CausalLM, ModelConfig, load_hf_config
    from lightning_memo.strategy import MemoStrategy
    from lightning_memo.trials.training_trial import RandomTokens

    batch_of = RandomTokens(vocabulary=load_hf_config(ModelConfig(**model)).get_text_config().vocab_size)
    # The first step is slower. A longer batch is profiled again.
    batches: Any = [batch_of(tokens // 2), batch_of(tokens)]
    strategy = MemoStrategy(fused_kernels=False)
    with TemporaryDirectory() as folder, _silent():
        trainer = Trainer(
            strategy=strategy, devices=1, max_steps=len(batches), default_root_dir=Path(folder), logger=False,
            precision="bf16-true" if torch.cuda.is_available() else "32-true", enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(CausalLM(dict(model)), DataLoader(batches, batch_size=None))
    plan = strategy.plan
    assert isinstance(plan, Plan)
    return plan


@contextmanager
def _silent() -> Iterator[None]:
    """Discards the output of this process and its libraries, including native ones."""
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for stream in streams:
            stream.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
