"""Profiles a step, solves for the plan, and swaps it in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console
from typing_extensions import override

from lightning_memo.config import MemoConfig, format_bytes
from lightning_memo.engine import Engine
from lightning_memo.engine.profile import StepProfile
from lightning_memo.engine.slices import slice_tokens_by_alpha, slot_bytes
from lightning_memo.plan import Plan
from lightning_memo.planner import plan_swap
from lightning_memo.profiler.costs import (
    budget,
    fingerprint,
    layer_costs,
    model_fingerprint,
    state_bytes,
    transient_bytes,
)
from lightning_memo.report import plan_table

PLAN_FILE = "memo_plan.json"


class PlanAfterFirstStep(Callback):
    """The engine profiles the first batch (and any larger one); when it is over, a plan is made and loaded.

    Args:
        engine: The engine of the run.
        config: The user's settings.

    Attributes:
        plan: The plan that is in force; `None` until the first batch is over.
    """

    def __init__(self, engine: Engine, config: MemoConfig) -> None:
        self.plan: Plan | None = None
        self._engine = engine
        self._config = config
        self._started_seconds = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._config.plan is not None:
            self._load_given_plan(trainer, pl_module)
        if self.plan is None:
            rank_zero_info("MemoStrategy: the first batch is profiled, with every layer recomputed.")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._engine.device.type == "cuda" and self.plan is None:
            torch.cuda.synchronize(self._engine.device)
            torch.cuda.reset_peak_memory_stats(self._engine.device)
        self._started_seconds = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        profile = self._engine.profile
        if profile is None or not profile.complete:
            return
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self._make_plan(profile, time.perf_counter() - self._started_seconds, trainer, pl_module)

    def _make_plan(
        self, profile: StepProfile, step_seconds: float, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        device, config = self._engine.device, self._config
        fixed = state_bytes(pl_module, trainer.optimizers)
        costs = layer_costs(profile, step_seconds, fixed, transient_bytes(profile, fixed, device), device)
        plan = plan_swap(
            costs,
            budget(config, device, fixed, self._engine.host_bytes),
            fingerprint(pl_module, profile, str(trainer.precision), device),
            alpha=self._alpha(),
            schedule=self._engine.schedule,
            slice_tokens=None if config.slice_tokens == "auto" else int(config.slice_tokens),
            slot_bytes=self._slot_bytes(profile),
            allowed=(0.0, 1.0) if self._engine.why_whole else None,
        )
        replanned = self.plan is not None
        self._engine.load(plan.swap, profile.input_bytes)
        self.plan = plan
        self._show(plan, trainer, replanned)

    def _alpha(self) -> float | str:
        """The wished alpha.

        Raises:
            ValueError: It cuts a layer that cannot be cut.
        """
        alpha, why = self._config.alpha, self._engine.why_whole
        if why and alpha not in ("auto", 0.0, 1.0):
            raise ValueError(f'alpha={alpha} cuts the layers into slices, but {why}: use alpha=0, alpha=1 or "auto"')
        return alpha

    def _slot_bytes(self, profile: StepProfile) -> Any:
        """Bytes of the largest slot as a function of alpha."""
        longest = None if self._config.slice_tokens == "auto" else int(self._config.slice_tokens)
        whole = bool(self._engine.why_whole)

        def of_alpha(alpha: float) -> int:
            slices = slice_tokens_by_alpha(profile.tokens, alpha, None if whole else longest)
            return max(
                slot_bytes(call.saved, profile.tokens, slices, self._engine.schedule) for call in profile.in_order()
            )

        return of_alpha

    def _show(self, plan: Plan, trainer: pl.Trainer, replanned: bool) -> None:
        if not trainer.is_global_zero:
            return
        if replanned:
            rank_zero_info(
                f"MemoStrategy: a batch of {plan.costs.batch} x {plan.costs.tokens} tokens is larger than the one that "
                "was planned for; it was profiled and planned anew."
            )
        if self._engine.why_whole:
            rank_zero_warn(f"MemoStrategy: layers run as one slice, because {self._engine.why_whole}.")
        Console().print(plan_table(plan))
        path = Path(trainer.log_dir or trainer.default_root_dir) / PLAN_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        rank_zero_info(f"MemoStrategy: plan saved to {path}")

    def _load_given_plan(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Use the plan that the user gave, if it was made for this model."""
        assert self._config.plan is not None
        plan = Plan.load(self._config.plan)
        expected = (model_fingerprint(pl_module), str(trainer.precision))
        if (plan.fingerprint.model, plan.fingerprint.precision) != expected:
            rank_zero_warn(
                f"MemoStrategy: {self._config.plan} was made for {plan.fingerprint.model} in "
                f"{plan.fingerprint.precision}, this is {expected[0]} in {expected[1]}: it is not used, and the first "
                "batch is profiled."
            )
            return
        self._engine.load(plan.swap, max(plan.costs.input_bytes))
        self.plan = plan
        rank_zero_info(f"MemoStrategy: plan {self._config.plan}, host memory {format_bytes(plan.swap.host_bytes)}.")
