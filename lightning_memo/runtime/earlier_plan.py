"""Plans from a file or from a checkpoint, and the checks that they are valid for this run."""

from __future__ import annotations

from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memo.artifacts.costs import OTHER, Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner.token_slices import plan_of_alpha, plan_of_whole_layers
from lightning_memo.profiler.measured_costs import available_budget, run_fingerprint, state_bytes
from lightning_memo.runtime.training_run import TrainingRun
from lightning_memo.utils.units import format_bytes

_EARLIER = "When the plan was made: "


class EarlierPlan:
    """The plan that the user gave, otherwise the plan in the checkpoint from which the run is resumed.

    Args:
        engine: The engine of the run.
        config: The settings of the strategy. `config.plan` is the path of the user's plan.
        ranks: The processes that have to run by the same plan.
        run: The training run.
        resumed: The checkpoint's plan as JSON; `None` if the checkpoint has none.
    """

    def __init__(self, engine: Engine, config: MemoConfig, ranks: Ranks, run: TrainingRun, resumed: str | None) -> None:
        self._engine, self._config, self._ranks, self._run = engine, config, ranks, run
        self._resumed = resumed

    @property
    def source(self) -> str:
        """Where the plan comes from, for messages."""
        return "the checkpoint's plan" if self._config.plan is None else f"the plan {self._config.plan}"

    def valid_plan(self) -> Plan | None:
        """The plan with the memory budget of this run.

        Returns:
            The plan, or `None` after a warning if it was made for another run.

        Raises:
            ValueError: The file holds no plan, the plan needs more host memory than there is, or another process has
                another plan.
        """
        plan, why_not, error = None, "", None
        try:
            plan = self._read()
            if plan is not None:
                # The plan's reason speaks of the budget that it was made for.
                reason = _EARLIER + plan.reason.removeprefix(_EARLIER)
                plan = replace(plan, budget=self._budget(), reason=reason)
            why_not = "" if plan is None else self._why_not(plan)
        except (ValueError, OSError) as refused:
            error = refused
        self._ranks.raise_together(error)
        self._refuse_different(plan)
        if plan is None:
            return None
        if why_not := next((why for why in self._ranks.gather(why_not) if why), ""):
            rank_zero_warn(f"lightning_memo: {self.source} is not used, and the first batch is profiled: {why_not}.")
            return None
        if not self._has_alpha(plan):  # a checkpoint's plan was refused in this case
            rank_zero_warn(
                f"lightning_memo: alpha={self._config.alpha} is not used, because {self.source} has alpha="
                f"{plan.swap.alpha}."
            )
        return plan

    def _budget(self) -> Budget:
        device, fixed = self._engine.device, state_bytes(self._run.model, self._run.optimizers)
        return available_budget(self._config, device, fixed, self._engine.host_bytes, self._ranks.on_this_node)

    def _read(self) -> Plan | None:
        """The plan; `None` if the checkpoint's plan cannot be read.

        Raises:
            ValueError: The user's file holds no plan.
            OSError: The user's file cannot be read.
        """
        if self._config.plan is not None:
            return Plan.load(self._config.plan)
        try:
            return Plan.from_json(self._resumed or "")
        except ValueError as error:
            rank_zero_warn(f"lightning_memo: {self.source} is not used, and the first batch is profiled: {error}.")
            return None

    def _refuse_different(self, plan: Plan | None) -> None:
        """End all processes if their plans cannot run together.

        Raises:
            ValueError: Two processes have different plans.
        """
        found = self._ranks.gather(("none", None) if plan is None else (_name(plan.swap), _executed_alike(plan.swap)))
        for rank, other in enumerate(found):
            if other != found[0]:
                plans = f"rank 0: {found[0][0]}, rank {rank}: {other[0]}"
                raise ValueError(
                    f"processes were given different plans ({plans}): give all of them the same file, or None"
                )

    def _why_not(self, plan: Plan) -> str:
        """Why the plan is not valid for this run; empty if it is valid."""
        expected = run_fingerprint(self._run.model, self._run.precision, self._engine.device, self._ranks.parallel)
        for name, value in expected.items():
            if getattr(plan.fingerprint, name) != value:
                return f"it was made for {name} {getattr(plan.fingerprint, name)}, and this run has {value}"
        longest = self._config.slice_tokens
        planned = plan.swap.storage.slice_tokens
        if longest != "auto" and not plan.swap.plain and int(longest) != planned:
            made = "whole sequences" if planned is None else f"slice_tokens={planned}"
            return f"it was made for {made}, and slice_tokens={longest} was given"
        if why := self._engine.why_not(plan.swap):
            return why
        if self._config.plan is None and not self._has_alpha(plan):
            return f"it has alpha={plan.swap.alpha}, and {self._config.alpha} was given"
        return self._missing_memory(plan)

    def _has_alpha(self, plan: Plan) -> bool:
        """Whether the plan swaps the tokens that the user's alpha does."""
        alpha, storage = self._config.alpha, plan.swap.storage
        if alpha == "auto":
            return True
        multiple, calls = self._engine.cutter.multiple, plan.swap.calls
        cut = plan_of_alpha(storage.tokens, float(alpha), multiple=multiple)
        whole = plan_of_whole_layers(storage.tokens, float(alpha), calls)
        return plan.swap.alpha in (cut.share(OTHER), whole.share(OTHER))

    def _missing_memory(self, plan: Plan) -> str:
        """The memory that the plan needs and the machine does not have; empty if it has enough.

        Raises:
            ValueError: There is too little host memory for the user's plan.
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
        if plan.swap.disk_bytes > available.disk_bytes:
            needs, has = format_bytes(plan.swap.disk_bytes), format_bytes(available.disk_bytes)
            return f"it spills {needs} to the disk, and {has} is available"
        if plan.swap.plain and plan.device_excess_bytes:
            return f"plain training needs {format_bytes(plan.device_bytes)} of {format_bytes(available.device_bytes)}"
        return ""


def _name(swap: SwapPlan) -> str:
    return "plain" if swap.plain else f"alpha={swap.alpha:g}"


def _executed_alike(swap: SwapPlan) -> tuple[object, ...]:
    """What all processes execute alike. Which layer calls use the disk depends on the memory of each."""
    calls = [
        [replace(r, place="host") if r.place == "disk" else r for r in swap.storage.call(number).ranges]
        for number in range(swap.calls)
    ]
    runs = swap.stream_from_host, swap.joint_attention, swap.in_flight, swap.attention
    return *runs, swap.storage.tokens, swap.storage.slice_tokens, calls
