"""Profiles a step, solves for the plan, and swaps it in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import HostBacked, StreamedBytes
from lightning_memo.callbacks.planning.earlier_plan import EarlierPlan
from lightning_memo.callbacks.planning.plan_storage import plan_by_kind
from lightning_memo.callbacks.planning.step_meter import MeteringCallback, meter_step
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.memory.spill_file import SpillError
from lightning_memo.parallel.agree_on_plan import agree_on_plan
from lightning_memo.parallel.rank_groups import Ranks
from lightning_memo.parallel.run_on_ranks import on_first_rank
from lightning_memo.planner import plan_swap
from lightning_memo.planner.token_slices import slice_tokens_by_alpha, slot_bytes
from lightning_memo.profiler.measured_costs import (
    available_budget,
    estimated_working_set,
    fingerprint,
    measured_layer_costs,
    state_bytes,
)
from lightning_memo.profiler.memory_meter import WorkingSet
from lightning_memo.reports.plan_tables import plan_tables
from lightning_memo.reports.shortage import plan_shortage
from lightning_memo.utils.files import check_writable

PLAN_FILE = "memo_plan.json"
CHECKPOINT_KEY = "lightning_memo_plan"
_LEAST_ALPHA = 1 / 16
T = TypeVar("T")


class PlanAfterFirstStep(MeteringCallback):
    """The engine profiles the first batch (and any larger one); when it is over, a plan is made and loaded.

    Args:
        engine: The engine of the run.
        config: The user's settings.
        ranks: The processes that have to agree on a plan.

    Attributes:
        plan: The plan that is in force; `None` until the first batch is over.
    """

    def __init__(self, engine: Engine, config: MemoConfig, ranks: Ranks | None = None) -> None:
        self.plan: Plan | None = None
        self._engine = engine
        self._config = config
        self._ranks = ranks or Ranks()
        self._started_seconds = 0.0
        self._is_first = True
        self._resumed: str | None = None
        self._folder = Path()
        self._most_device_bytes, self._most_alpha = math.inf, 1.0  # of plans, once one was too large
        self._shrunk = False

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A run that is resumed with the same plan computes the same numbers: another alpha rounds differently.
        if self.plan is not None:
            checkpoint[CHECKPOINT_KEY] = self.plan.to_json()

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed = checkpoint.get(CHECKPOINT_KEY)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning asks all processes for it at once, and plans are saved by one.
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)
        on_first_rank(lambda: _check_folder(self._folder))
        if self._config.plan is not None or self._resumed is not None:
            self._use_earlier_plan(trainer, pl_module)
        if self.plan is None:
            rank_zero_info("MemoStrategy: the first batch is profiled, with every layer recomputed.")

    def _use_earlier_plan(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        earlier = EarlierPlan(self._engine, self._config, self._ranks, self._resumed)
        plan = earlier.for_run(trainer, pl_module)
        if plan is None:
            return
        self._together(lambda: self._engine.load(plan.swap, plan.costs.batch * plan.costs.tokens))
        self._engine.attention.trials = plan.attention_trials
        self.plan = plan
        rank_zero_info(f"MemoStrategy: uses {earlier.source}.")
        self._show(plan, trainer, replanned=False)
        self._tell_shortage(plan)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.plan is None and self._is_first:  # later ones may be measured by others
            if self._engine.device.type == "cuda":
                torch.cuda.synchronize(self._engine.device)
            self._meter = meter_step(self._engine)
        self._is_first = False
        self._started_seconds = time.perf_counter()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_meter(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        profile = self._engine.profile
        if profile is None or not profile.complete:
            self._stop_meter(trainer)
            return
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self._make_plan(profile, time.perf_counter() - self._started_seconds, trainer, pl_module)

    def _make_plan(
        self, profile: StepProfile, step_seconds: float, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        device, engine, ranks, first = self._engine.device, self._engine, self._ranks, self.plan is None
        # Data-parallel processes meet longer batches at different times: later plans are of the sequence's processes.
        findings = ranks.gather((engine.kinds.why_whole, engine.kinds.schedule), everyone=first)
        schedules = [schedule for _, schedule in findings]
        engine.kinds.agree(next((why for why, _ in findings if why), ""), "nest" if "nest" in schedules else "layer")
        fixed = state_bytes(pl_module, trainer.optimizers)
        working_set = self._working_set(profile, trainer)
        costs = self._together(
            lambda: measured_layer_costs(profile, step_seconds, fixed, working_set, device, engine.spill_path),
            everyone=first,
        )
        limits = available_budget(self._config, device, fixed, engine.host_bytes, ranks.on_this_node)
        limits = replace(limits, device_bytes=int(min(limits.device_bytes, self._most_device_bytes)))
        label = fingerprint(pl_module, profile, str(trainer.precision), device, ranks.parallel)

        assert engine.swap is not None
        backing = engine.swap.host_backed

        def solve(alpha: float | None, may_be_plain: bool) -> Plan:
            plan = plan_at(self._alpha() if alpha is None else alpha, may_be_plain)
            return plan if plan.swap.alpha <= self._most_alpha else plan_at(self._most_alpha, may_be_plain)

        def plan_at(alpha: float | str, may_be_plain: bool) -> Plan:
            return plan_swap(
                costs,
                limits,
                label,
                alpha=alpha,
                schedule=engine.kinds.schedule,
                slice_tokens=self._slice_tokens,
                slot_bytes=self._slot_bytes(profile),
                allowed=(0.0, 1.0) if engine.kinds.why_whole else None,
                # What a step takes whose layers are not cut was not seen.
                may_be_plain=may_be_plain and backing == "none",
                host_backed=backing,
                streamed_bytes=None if backing == "none" else self._streamed_bytes(profile, backing),
            )

        if self._config.storage == "kinds":
            measured = self._config.device_memory is None and self._most_device_bytes == math.inf
            plan = plan_by_kind(profile, costs, limits, label, ranks, first, measured)
        else:
            plan = agree_on_plan(solve, ranks, everyone=first)
        plan = self._with_attention(plan)
        self._together(lambda: engine.load(plan.swap, profile.batch * profile.tokens), everyone=first)
        self.plan = plan
        self._show(plan, trainer, replanned=not first)
        self._tell_shortage(plan, everyone=first)
        self._shrunk = False

    def _with_attention(self, plan: Plan) -> Plan:
        """The plan with the attention kernel that was profiled."""
        kernels = self._engine.attention
        swap = replace(plan.swap, attention=kernels.chosen or plan.swap.attention)
        return replace(plan, swap=swap, attention_trials=kernels.trials)

    def _together(self, work: Callable[[], T], everyone: bool = True) -> T:
        """Do what the disk of one process may refuse.

        Raises:
            SpillError: It refused; ValueError where there are several processes.
        """
        result, error = None, None
        try:
            result = work()
        except SpillError as refused:
            error = refused
        self._ranks.raise_together(error, everyone)
        return cast(T, result)

    def _stop_meter(self, trainer: pl.Trainer) -> WorkingSet | None:
        """What was metered, if anything was."""
        meter, self._meter = self._meter, None
        return None if meter is None else meter.stop(accumulating=trainer.accumulate_grad_batches > 1)

    def _working_set(self, profile: StepProfile, trainer: pl.Trainer) -> WorkingSet:
        metered = self._stop_meter(trainer)
        return metered or estimated_working_set(profile, None if self.plan is None else self.plan.costs)

    @property
    def _slice_tokens(self) -> int | None:
        return None if self._config.slice_tokens == "auto" else int(self._config.slice_tokens)

    def _alpha(self) -> float | str:
        """The wished alpha.

        Raises:
            ValueError: It cuts a layer that cannot be cut.
        """
        alpha, why = self._config.alpha, self._engine.kinds.why_whole
        if why and alpha not in ("auto", 0.0, 1.0):
            raise ValueError(f'alpha={alpha} cuts the layers into slices, but {why}: use alpha=0, alpha=1 or "auto"')
        return alpha

    def _slot_bytes(self, profile: StepProfile) -> Any:
        """Bytes of the largest slot as a function of alpha."""
        whole = bool(self._engine.kinds.why_whole)

        def of_alpha(alpha: float) -> int:
            slices = slice_tokens_by_alpha(profile.tokens, alpha, None if whole else self._slice_tokens)
            schedule = self._engine.kinds.schedule
            return max(slot_bytes(call.saved, profile.tokens, slices, schedule) for call in profile.in_order())

        return of_alpha

    def _streamed_bytes(self, profile: StepProfile, backing: HostBacked) -> Callable[[float], StreamedBytes]:
        """Memory as a function of alpha, where slices swap for themselves."""

        def of_alpha(alpha: float) -> StreamedBytes:
            engine = self._engine
            slices = engine.cut(profile.tokens, alpha, self._slice_tokens)
            return engine.streamed_bytes(profile.saved_by_calls, slices, backing)

        return of_alpha

    def _show(self, plan: Plan, trainer: pl.Trainer, replanned: bool) -> None:
        if not trainer.is_global_zero:
            return
        if replanned and self._shrunk:
            rank_zero_info("MemoStrategy: planned anew, for less memory.")
        elif replanned:
            rank_zero_info(
                f"MemoStrategy: a batch of {plan.costs.batch} x {plan.costs.tokens} tokens is larger than the one that "
                "was planned for; it was profiled and planned anew."
            )
        if self._engine.kinds.why_whole:
            rank_zero_warn(f"MemoStrategy: layers run as one slice, because {self._engine.kinds.why_whole}.")
        for trial in plan.attention_trials:
            if trial.name == self._config.attention and trial.why_not:
                rank_zero_warn(f'MemoStrategy: attention="{trial.name}" is left to PyTorch: {trial.why_not}.')
        Console().print(*plan_tables(plan), sep="\n")
        if plan.budget.spill_bytes and not plan.swap.spill_bytes:
            why = "the host has room for all that is swapped"
            if plan.swap.storage is not None:
                why = "a step would not be shorter with it"
            rank_zero_info(f"MemoStrategy: spill_path is not needed, as {why}.")
        rank_zero_info(f"MemoStrategy: plan saved to {self._save(plan)}")

    def _tell_shortage(self, plan: Plan, everyone: bool = True) -> None:
        """Say which process, the first of them, lacks device memory for its plan."""
        told = self._ranks.gather(plan_shortage(plan, can_have_more=self._most_device_bytes == math.inf), everyone)
        for rank, shortage in enumerate(told):
            if shortage:
                rank_zero_warn(f"MemoStrategy: {f'rank {rank}: ' * (len(told) > 1)}{shortage}.")
                return

    @property
    def can_shrink(self) -> bool:
        """Whether there is a plan that needs less device memory than the one in force: that of alpha 0 needs least."""
        swap = None if self.plan is None else self.plan.swap
        return swap is not None and (swap.mode == "plain" or swap.alpha > 0.0 or swap.storage is not None)

    def shrink(self, most_device_bytes: float = math.inf) -> None:
        """There is no room for the plan: the next forward is profiled, and from then on plans are smaller.

        A batch that is profiled has every layer recomputed. A plan that was too large is followed by one of half its
        alpha, of 0 below 1/16; plain training by one that is not plain.

        Args:
            most_device_bytes: Of later plans.
        """
        assert self.plan is not None
        swap = self.plan.swap
        self._most_device_bytes = min(self._most_device_bytes, most_device_bytes)
        if swap.mode != "plain":
            self._most_alpha = swap.alpha / 2 if swap.alpha > _LEAST_ALPHA else 0.0
        self._shrunk = True
        self._engine.unload()
        self._started_seconds = time.perf_counter()

    def complete(self, plan: Plan, trainer: pl.Trainer) -> None:
        """Take the plan with the places of buffers in it."""
        self.plan = plan
        if trainer.is_global_zero:
            self._save(plan)

    def _save(self, plan: Plan) -> Path:
        path = self._folder / PLAN_FILE
        plan.save(path)
        return path


def _check_folder(folder: Path) -> None:
    """Refuses a folder that the plan cannot be written to, before the first step rather than after it."""
    try:
        check_writable(folder)
    except OSError as error:
        raise ValueError(
            f"{folder}: {PLAN_FILE} can't be written there ({error.strerror}); give Trainer a default_root_dir, or a "
            "logger, whose folder can be written"
        ) from None
