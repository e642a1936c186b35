"""Short runs on this machine, to be measured. Alone in this package it needs torch, and imports it when asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_memo.plan import Plan


def run(model: Mapping[str, Any], tokens: int) -> Plan:
    """Train a sequence for a step, which is profiled, with every layer recomputed; a shorter one comes before it.

    Args:
        model: settings of the model group.
        tokens: of the sequence, at least 2.

    Returns:
        The plan, with what was measured.
    """
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_memo.lengths.trial import RandomTokens
    from lightning_memo.models import CausalLM, ModelConfig, load_hf_config
    from lightning_memo.strategy import MemoStrategy

    batch_of = RandomTokens(vocabulary=load_hf_config(ModelConfig(**model)).get_text_config().vocab_size)
    # A first step is cold; a longer batch is profiled anew.
    batches: Any = [batch_of(tokens // 2), batch_of(tokens)]
    strategy = MemoStrategy(plan_memory=False)
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy, devices=1, max_steps=len(batches), default_root_dir=Path(folder), logger=False,
            precision="bf16-true" if torch.cuda.is_available() else "32-true", enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(CausalLM(dict(model)), DataLoader(batches, batch_size=None))
    plan = strategy.plan
    assert isinstance(plan, Plan)
    return plan
