"""Plans that the user gave or a checkpoint holds: whether they hold for this run."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memo.artifacts.layer_costs import Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.parallel.rank_groups import Ranks
from lightning_memo.profiler.measured_costs import available_budget, run_fingerprint, state_bytes
from lightning_memo.utils.units import format_bytes

# What a process has of its own in a plan that all of them run.
_OWN_SIZES = (
    "slot_bytes", "streamed_host_bytes", "gradient_host_bytes", "state_host_bytes", "staging_bytes",
    "stored_host_bytes", "kept_bytes", "spilled_calls",
)  # fmt: skip


class EarlierPlan:
    """The plan that the user gave, or else that of the checkpoint a run is resumed from.

    Args:
        engine: The engine of the run.
        config: The user's settings, `config.plan` among them.
        ranks: The processes that have to run by the same plan.
        resumed: The checkpoint's plan as JSON; `None` if there is none.
    """

    def __init__(self, engine: Engine, config: MemoConfig, ranks: Ranks, resumed: str | None) -> None:
        self._engine, self._config, self._ranks, self._resumed = engine, config, ranks, resumed

    @property
    def source(self) -> str:
        """Where it comes from, for messages."""
        return "the checkpoint's plan" if self._config.plan is None else f"the plan {self._config.plan}"

    def for_run(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Plan | None:
        """The plan, if it was made for this run, with what there is to spend now; `None`, and a warning, if not.

        Raises:
            ValueError: The file is no plan, needs more host memory than there is, or another process has another plan.
        """
        plan, why_not, error = None, "", None
        try:
            plan = self._read()
            if plan is not None:
                plan = replace(plan, budget=self._budget(trainer, pl_module))
            why_not = "" if plan is None else self._why_not(plan, trainer, pl_module)
        except (ValueError, OSError) as refused:
            error = refused
        self._ranks.raise_together(error)
        self._refuse_different(plan)
        if plan is None:
            return None
        if why_not := next((why for why in self._ranks.gather(why_not) if why), ""):
            rank_zero_warn(f"MemoStrategy: {self.source} is not used, and the first batch is profiled: {why_not}.")
            return None
        if self._config.alpha not in ("auto", plan.swap.alpha):  # the checkpoint's would not hold then
            rank_zero_warn(
                f"MemoStrategy: alpha={self._config.alpha} is not used, because {self.source} says {plan.swap.alpha}."
            )
        return plan

    def _budget(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Budget:
        device, fixed = self._engine.device, state_bytes(pl_module, trainer.optimizers)
        return available_budget(self._config, device, fixed, self._engine.host_bytes, self._ranks.on_this_node)

    def _read(self) -> Plan | None:
        """The plan that the user gave or the checkpoint holds; `None` if that one is not readable.

        Raises:
            ValueError: The user's file is no plan.
            OSError: It can't be read.
        """
        if self._config.plan is not None:
            return Plan.load(self._config.plan)
        try:
            return Plan.from_json(self._resumed or "")
        except ValueError:
            return None

    def _refuse_different(self, plan: Plan | None) -> None:
        """End all processes if they have plans that cannot run together.

        Raises:
            ValueError: They have.
        """
        own = None
        if plan is not None:
            own = replace(plan.swap.executed, stored_spill_bytes=(), **dict.fromkeys(_OWN_SIZES, 0))
        swaps = self._ranks.gather(own)  # sizes may differ
        for rank, swap in enumerate(swaps):
            if swap != swaps[0]:
                told = [
                    f"rank {r}: {'none' if s is None else f'alpha={s.alpha:g} {s.mode}'}"
                    for r, s in ((0, swaps[0]), (rank, swap))
                ]
                raise ValueError(
                    f"processes were given different plans ({', '.join(told)}): give all of them the same file, or None"
                )

    def _why_not(self, plan: Plan, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        """Why the plan does not hold for this run; empty if it does."""
        expected = run_fingerprint(pl_module, str(trainer.precision), self._engine.device, self._ranks.parallel)
        for name, value in expected.items():
            if getattr(plan.fingerprint, name) != value:
                return f"it was made for {name} {getattr(plan.fingerprint, name)}, and this is {value}"
        longest = self._config.slice_tokens
        if longest != "auto" and int(longest) != plan.swap.slice_tokens:
            return f"it was made for slice_tokens={plan.swap.slice_tokens}, and {longest} was given"
        if why := self._engine.why_not(plan.swap):
            return why
        if self._config.plan is None and self._config.alpha not in ("auto", plan.swap.alpha):
            return f"it says alpha={plan.swap.alpha}, and {self._config.alpha} was given"
        return self._what_is_missing(plan)

    def _what_is_missing(self, plan: Plan) -> str:
        """Memory that the plan needs and the machine has not got; empty if it has.

        Raises:
            ValueError: It is host memory, and the user gave the plan.
        """
        given = self._config.plan
        available = plan.budget
        if plan.swap.host_bytes > available.host_bytes:
            needs, has = format_bytes(plan.swap.host_bytes), format_bytes(available.host_bytes)
            if given is not None:
                raise ValueError(
                    f"{given} needs {needs} of host memory, and {has} is available: raise host_memory, or make the "
                    "plan again"
                )
            return f"it needs {needs} of host memory, and {has} is available"
        if plan.swap.spill_bytes > available.spill_bytes:
            needs, has = format_bytes(plan.swap.spill_bytes), format_bytes(available.spill_bytes)
            return f"it spills {needs} to the disk, and {has} is available"
        if plan.swap.mode == "plain" and plan.device_excess_bytes:
            return f"plain training needs {format_bytes(plan.device_bytes)} of {format_bytes(available.device_bytes)}"
        return ""
