"""Profiles a step, makes the plan, and loads it into the engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.memory.disk import DiskError
from lightning_memo.parallel.ranks import Ranks, on_first_rank
from lightning_memo.planner.make_plan import Seconds, choose_plan
from lightning_memo.planner.token_slices import slices_of
from lightning_memo.profiler.measured_costs import (
    available_budget,
    estimated_working_set,
    fingerprint,
    measured_layer_costs,
    state_bytes,
)
from lightning_memo.profiler.memory_meter import Precedence, WorkingSet, end_abandoned
from lightning_memo.reports.tables import plan_shortage
from lightning_memo.runtime.announce_plan import (
    announce_locking,
    announce_plan,
    announce_whole_layers,
    warn_of_no_plan,
    warn_of_shortage,
)
from lightning_memo.runtime.earlier_plan import EarlierPlan
from lightning_memo.runtime.solve_plan import MeasuredStep, plan_by_alpha, plan_by_kind, return_keys
from lightning_memo.runtime.step_meter import MetersSteps
from lightning_memo.runtime.training_run import TrainingRun
from lightning_memo.utils.files import check_writable
from lightning_memo.utils.messages import tell

PLAN_FILE: Final = "memo_plan.json"
_LEAST_ALPHA: Final = 1 / 16
T = TypeVar("T")


class ActivationPlanner(MetersSteps):
    """Plans which activations are swapped, from the first batch that the engine profiles and from any larger one.

    Args:
        engine: The engine of the run.
        config: The settings of the strategy.
        ranks: The processes that have to agree on a plan.
        run: The training run.

    Note: [Until host memory is locked]
    Locking the host memory of a plan takes a second for each 4 to 10 GiB, often longer than the profiled step. The next
    batches then run by another plan of the same profile, which recomputes more and has its memory locked in time.

    Attributes:
        plan: The plan in force; `None` until the first batch is over.
    """

    def __init__(self, engine: Engine, config: MemoConfig, ranks: Ranks, run: TrainingRun) -> None:
        self.plan: Plan | None = None
        self._engine, self._config, self._ranks, self._run = engine, config, ranks, run
        self._started_seconds = 0.0
        self._is_first_batch = True
        self._folder: Path | None = None
        self._most_device_bytes, self._most_alpha = math.inf, 1.0  # limits of later plans, once a plan was too large
        self._shrunk = self._dropped = self._warned = False
        self._is_unproven = False  # whether the plan is an earlier one, and no layer has run yet
        self._steps = 0  # optimizer steps before the current batch
        self._batches_until_locked = 0

    @property
    def follows_plan(self) -> bool:
        """Whether batches run by `plan`: none is being profiled, and the host memory is locked."""
        return self.plan is not None and self._engine.swap is self.plan.swap

    def start(self, resumed_plan: str | None) -> None:
        """Training starts.

        Args:
            resumed_plan: The plan in the checkpoint from which the run is resumed, as JSON; `None` if there is none.

        Raises:
            ValueError: The plan cannot be written to the run's folder, or the user's plan is not usable.
        """
        self._folder = self._run.folder()
        on_first_rank(lambda: _check_folder(self._folder))
        if self._config.plan is not None or resumed_plan is not None:
            self._use_earlier_plan(resumed_plan)
        if self.plan is None:
            tell("the first batch is profiled, with every layer recomputed.")

    def _use_earlier_plan(self, resumed_plan: str | None) -> None:
        earlier = EarlierPlan(self._engine, self._config, self._ranks, self._run, resumed_plan)
        plan = earlier.valid_plan()
        if plan is None:
            return
        swap, settings = plan.swap, self._engine.settings
        longest = swap.storage.slice_tokens
        if longest is not None and settings.slice_tokens is None and not settings.divided:
            self._engine.cut(longest, swap.stream_from_host)  # a step of the earlier run did not fit without
        self._raising_together(lambda: self._engine.load(plan.swap, plan.costs.batch * plan.costs.tokens))
        self._engine.attention.trials = plan.attention_trials
        self.plan, self._is_unproven = plan, True
        tell(f"uses {earlier.source}.")
        self._announce(plan)
        self._warn_of_shortage(plan)

    def begin_batch(self) -> None:
        """A training batch begins."""
        end_abandoned()
        if self.plan is None and self._is_first_batch:
            self._wait_for_device()
            self.start_meter(self._engine, Precedence.FIRST_STEP)
        self._is_first_batch = self._engine.ran_plainly = False
        self._steps = self._run.step
        self._started_seconds = time.perf_counter()

    def before_profile(self) -> None:
        """A step is going to be profiled, and memory of earlier plans has been freed."""
        if self._meter is None:  # a batch behind the first one, which others may measure as well
            self.start_meter(self._engine, Precedence.LATER_STEP)

    def fail(self) -> None:
        """Training ends with an exception."""
        self._stop_meter()

    def end_batch(self) -> None:
        """A training batch is over, and so is its optimizer step, if there is one: make a plan if it was profiled.

        Raises:
            ValueError: There is no plan within the budget.
        """
        if self._is_unproven:
            self._check_earlier_plan()
        profile = self._engine.profile
        stepped = self._run.step > self._steps
        if profile is None or not (profile.complete or (stepped and profile.finish())):
            self._stop_meter()
            if self.plan is None and stepped and not (self._warned or self._engine.ran_plainly):
                self._warned = True
                warn_of_no_plan(self._engine.layers)
            if profile is None:
                self._count_until_locked()
            return
        self._wait_for_device()
        self._make_plan(profile, time.perf_counter() - self._started_seconds)

    def _check_earlier_plan(self) -> None:
        """Drop an earlier plan that cuts layers if they cannot be cut, which is known once they have run."""
        assert self.plan is not None
        self._is_unproven, swap = False, self.plan.swap
        self._agree_on_layers(everyone=True)
        why = self._engine.layer_classes.unsliceable
        cuts = len(slices_of(swap.storage, 0, swap.storage.tokens)) > 1
        if why and cuts and not swap.plain and self._engine.profile is None:
            rank_zero_warn(
                f"lightning_memo: the plan is dropped, and the next batch is profiled: it cuts layers into slices, but "
                f"{why}."
            )
            self._dropped = True
            self._engine.unload()
        elif self._run.rank == 0:
            announce_whole_layers(self.plan, self._config, why)

    def _wait_for_device(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)

    def _make_plan(self, profile: StepProfile, step_seconds: float) -> None:
        # Data-parallel processes meet longer batches at different times. Only the first plan is made by all of them at
        # once; later ones are made by the processes that share a sequence.
        earlier = self.plan
        first = earlier is None
        self._agree_on_layers(first)
        # Calls of a later stack may have been larger than this batch's; the size of a batch shows at its first call.
        profile.extend(self._engine.limits.largest)
        if self._engine.micro_batches.in_flight is not None:
            self._engine.micro_batches.repeat(profile)
        step = self._measured(profile, step_seconds, first)
        if not self._ranks.world and return_keys(step, self._engine, self._config.alpha):
            return  # the next batch is profiled
        plan = self._raising_together(lambda: self._solve(step, first), everyone=first)
        kernels = self._engine.attention
        swap = replace(plan.swap, attention=kernels.chosen or plan.swap.attention)
        plan = replace(plan, swap=swap, attention_trials=kernels.trials)
        while_locking = self._while_locking(step, plan, first)
        tokens, ahead = profile.batch * profile.tokens, plan.swap.memory.host
        self._raising_together(lambda: self._engine.load(while_locking, tokens, ahead), everyone=first)
        self.plan = plan
        if earlier is not None and earlier.swap.plain and plan.swap.calls < earlier.swap.calls:
            self._engine.limits.exceed()  # other calls of this batch had run plainly before the profile began
        self._announce(plan, earlier)
        if self._batches_until_locked:
            announce_locking(plan.swap.host_bytes, while_locking.host_bytes, self._batches_until_locked)
        self._warn_of_shortage(plan, everyone=first)
        self._shrunk = self._dropped = False

    def _while_locking(self, step: MeasuredStep, plan: Plan, everyone: bool) -> SwapPlan:
        """The plan of the batches until the host memory of `plan` is locked; see Note [Until host memory is locked]."""
        pages, self._batches_until_locked = self._engine.pages, 0
        seconds_per_byte, missing_bytes = pages.locking_seconds_per_byte, plan.swap.memory.host - pages.held_bytes
        # A batch takes the memory in its forward, while locking goes on.
        late_bytes = missing_bytes - sum(step.costs.forward_seconds) / seconds_per_byte if seconds_per_byte else 0
        if not any(self._ranks.gather_slicing(late_bytes > 0, everyone)):
            return plan.swap
        host_bytes = plan.swap.host_bytes - max(math.ceil(late_bytes), 0)
        try:
            smaller = self._solve(replace(step, budget=replace(step.budget, host_bytes=host_bytes)), everyone)
        except ValueError:  # alpha is given, for example: the next batch waits
            return plan.swap
        if smaller.swap.storage.segment_calls != plan.swap.storage.segment_calls:  # all processes would have to change
            return plan.swap
        batches = math.ceil(max(missing_bytes, 0) * seconds_per_byte / smaller.step_seconds)
        self._batches_until_locked = max(self._ranks.gather_slicing(batches, everyone))
        return replace(smaller.swap, attention=plan.swap.attention) if self._batches_until_locked else plan.swap

    def _count_until_locked(self) -> None:
        """A batch that was not profiled is over: run by the plan from now on if its host memory should be locked."""
        plan, engine = self.plan, self._engine
        if plan is None or engine.swap is None or not self._batches_until_locked:
            return
        if any(self._ranks.gather_slicing(bool(engine.calls), everyone=False)):
            return  # a backward through earlier batches may follow
        self._batches_until_locked -= 1
        if self._batches_until_locked == 0:
            tokens = plan.costs.batch * plan.costs.tokens
            self._raising_together(lambda: engine.load(plan.swap, tokens), everyone=False)

    def _agree_on_layers(self, everyone: bool) -> None:
        """All processes cut their layers alike, and run the slices in the same order."""
        classes = self._engine.layer_classes
        findings = self._ranks.gather_slicing((classes.unsliceable, classes.needs_full_attention), everyone)
        unsliceable, needs_full_attention = (next(filter(None, whys), "") for whys in zip(*findings, strict=True))
        classes.agree(unsliceable, needs_full_attention)

    def _measured(self, profile: StepProfile, step_seconds: float, everyone: bool) -> MeasuredStep:
        run, engine, device = self._run, self._engine, self._engine.device
        settings = engine.settings
        engine.pages.pause()
        fixed = state_bytes(run.model, run.optimizers)
        metered, in_flight = self._stop_meter(), engine.micro_batches.in_flight
        working_set = metered or estimated_working_set(profile, None if self.plan is None else self.plan.costs)
        # The input and the output of each block of a pipeline stage stay on the device for each micro-batch in flight.
        in_pipeline = (sum(in_flight or (1,)) - 1) * 2 * max(profile.bytes_of("input"))
        waiting = engine.micro_batches.waiting - bool(metered)  # while it was metered, the gradients of one waited
        working_set = working_set.with_more(in_pipeline + waiting * engine.micro_batches.waiting_bytes)
        arena = None if engine.memory is None else engine.memory.host.arena
        costs = self._raising_together(
            lambda: measured_layer_costs(
                profile,
                step_seconds,
                fixed,
                working_set,
                device,
                settings.disk_path,
                arena,
                counts_launches=settings.test_mode is None,
            ),
            everyone,
        )
        limits = available_budget(self._config, device, fixed, engine.host_bytes, self._ranks.on_this_node)
        return MeasuredStep(
            profile=profile,
            # What a stage does besides its layers is mostly to wait for other stages.
            costs=costs if in_flight is None else replace(costs, in_flight=max(in_flight), outside_seconds=0.0),
            budget=replace(limits, device_bytes=int(min(limits.device_bytes, self._most_device_bytes))),
            label=fingerprint(run.model, profile, run.precision, device, self._ranks.parallel),
        )

    def _solve(self, step: MeasuredStep, everyone: bool) -> Plan:
        settings, by_kind = self._engine.settings, None
        if settings.by_kind and self._can_name_kinds(step.profile, everyone):
            by_kind = plan_by_kind(
                step,
                self._ranks,
                everyone,
                device_measured=self._measures_device,
                divided=settings.divided,
                exchanging=self._config.expert_parallel_size > 1,
                joint_attention=self._engine.layer_classes.joint_attention,
            )
        if by_kind is not None and settings.test_mode is not None and settings.test_mode.plans == "kinds":
            return by_kind

        def slowest(seconds: Seconds) -> Seconds:
            of_kind, of_alpha = zip(*self._ranks.gather_slicing(seconds, everyone), strict=True)
            return max(of_kind), max(of_alpha)

        return choose_plan(
            by_kind,
            lambda: plan_by_alpha(step, self._engine, self._config, self._most_alpha, self._ranks, everyone),
            device_measured=self._measures_device,
            slowest=slowest,
        )

    @property
    def _measures_device(self) -> bool:
        """Whether the device budget is what was free, rather than a limit of the user or of a step that failed."""
        return self._config.device_memory is None and self._most_device_bytes == math.inf

    def _can_name_kinds(self, profile: StepProfile, everyone: bool) -> bool:
        """Whether layers can run by a plan that names a place for each kind of tensor."""
        classes = self._engine.layer_classes
        return all(self._ranks.gather_slicing(profile.uniform and not classes.unsliceable, everyone))

    def _raising_together(self, work: Callable[[], T], everyone: bool = True) -> T:
        """Do work that may fail in a single process, or in a single stage of a pipeline; then all processes end.

        Raises:
            DiskError: The disk refused it. With several processes this is a `ValueError`.
            ValueError: There is no plan, or it cannot run here.
        """
        return self._ranks.run_together(work, everyone, (DiskError, ValueError))

    def _stop_meter(self) -> WorkingSet | None:
        return self.stop_meter(accumulating=self._run.accumulated_batches > 1)

    def _why_again(self, plan: Plan, earlier: Plan) -> str:
        """Why there is another plan, as the beginning of a sentence; a message may have told it already."""
        by_kind = not earlier.swap.storage.has_one_alpha
        if self._dropped or (by_kind and self._engine.layer_classes.unsliceable):
            return "planned anew. "
        if self._shrunk:
            return "planned anew, for less memory. "
        return (
            f"a batch of {plan.costs.batch} x {plan.costs.tokens} tokens is larger than the one that was planned for; "
            "planned anew. "
        )

    def _announce(self, plan: Plan, earlier: Plan | None = None) -> None:
        if self._run.rank == 0:
            classes, settings = self._engine.layer_classes, self._engine.settings
            on_host = settings.may_stream and settings.stream_from_host == "auto" and not settings.joint_attention
            why_on_device = classes.needs_full_attention if on_host and not classes.unsliceable else ""
            why_again = None if earlier is None else self._why_again(plan, earlier)
            announce_plan(plan, self._config, classes.unsliceable, why_on_device, why_again)
            self._save(plan)
            if self._folder is not None:
                tell(f"plan saved to {self._folder / PLAN_FILE}", logging.DEBUG)

    def _warn_of_shortage(self, plan: Plan, everyone: bool = True) -> None:
        shortage = plan_shortage(plan, can_have_more=self._most_device_bytes == math.inf)
        warn_of_shortage(self._ranks.gather(shortage, everyone))

    @property
    def can_shrink(self) -> bool:
        """Whether another plan needs less device memory than the one in force. The plan of alpha 0 needs least."""
        swap = None if self.plan is None else self.plan.swap
        return swap is not None and (swap.alpha > 0.0 or not swap.storage.has_one_alpha)

    def limit_device(self, most_bytes: float) -> None:
        """Let later plans use no more device memory than this."""
        self._most_device_bytes = min(self._most_device_bytes, most_bytes)

    def shrink(self) -> None:
        """Drop a plan that takes too much memory: the next forward is profiled, and later plans are smaller.

        A profiled batch has every layer recomputed. The next plan has half the alpha, or 0 below 1/16 and where layers
        run whole; after plain training it is not plain.
        """
        assert self.plan is not None
        self._batches_until_locked, swap = 0, self.plan.swap
        if not swap.plain:
            # A single swapped layer takes as much device memory as many of them.
            fewer = swap.alpha > _LEAST_ALPHA and not self._engine.layer_classes.unsliceable
            self._most_alpha = swap.alpha / 2 if fewer else 0.0
        self._shrunk = True
        self._engine.unload()
        self._started_seconds = time.perf_counter()

    def restart(self) -> None:
        """A profiled step failed, and is going to be run again in a way that takes less memory."""
        self._stop_meter()
        self._shrunk = True
        self._started_seconds = time.perf_counter()

    def complete(self, plan: Plan) -> None:
        """Replace the plan in force by the same plan with the placement of its buffers."""
        self.plan = plan
        if self._run.rank == 0:
            self._save(plan)

    def _save(self, plan: Plan) -> None:
        if self._folder is not None:
            plan.save(self._folder / PLAN_FILE)


def _check_folder(folder: Path | None) -> None:
    """Refuse a folder that the plan cannot be written to before the first step rather than after it."""
    try:
        if folder is not None:
            check_writable(folder)
    except OSError as error:
        raise ValueError(
            f"{folder}: {PLAN_FILE} can't be written there ({error.strerror}); give Trainer a default_root_dir or a "
            "logger whose folder can be written, or MemoLoop another output_dir"
        ) from None
