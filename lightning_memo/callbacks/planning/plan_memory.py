"""Records the requests of a step, plans a place for each, and has the allocator serve them there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memo.allocator import AllocatorStats, PlannedAllocator
from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.plan_cache import PlanCache, cache_folder
from lightning_memo.artifacts.trace import Trace
from lightning_memo.callbacks.planning.allocator_report import memory_metrics, memory_use, summary
from lightning_memo.callbacks.planning.plan_after_first_step import PlanAfterFirstStep
from lightning_memo.callbacks.planning.step_marks import StepMarks
from lightning_memo.engine import Engine
from lightning_memo.planner.placement.phase_offsets import place_step
from lightning_memo.planner.placement.placement_core import load_library
from lightning_memo.planner.placement.step_placement import plan_memory
from lightning_memo.profiler.step_trace import RecordedStep, trace_of
from lightning_memo.reports.memory_use import MemoryUse
from lightning_memo.utils.background_job import in_background

MIN_BYTES: Final = 512
"""Smaller requests, the scalars of logging above all, come and go irregularly, and fragment nothing."""

_ALIGNMENT: Final = {"cpu": 64, "cuda": 512}
_PLANNING_SECONDS: Final = 20.0
_RECORDED_STEPS: Final = 3
_MOST_RECORDED: Final = 8
_MOST_PLANS: Final = 3
_WATCHED_STEPS: Final = 10  # that are looked at when a plan is new; later ones are one in so many
# A buffer that another process is sent lives until that one has it: few lives that differ are no reason to plan again.
_MISSED_SHARE: Final = 0.1


class PlanMemory(Callback):
    """After the swap plan is in force, some steps are recorded, planned in the background, and from then on served.

    A step is all micro-batches of an optimizer step. What happens between them, like loading data, validation and
    logging, is left to PyTorch's allocator.

    Args:
        engine: The engine of the run.
        planning: Makes the plan that is completed here.

    Attributes:
        trace: What the plan was made from; `None` if that is not known.
        use: What became of the requests; `None` until training has ended, or failed.
    """

    def __init__(self, engine: Engine, planning: PlanAfterFirstStep) -> None:
        self.trace: Trace | None = None
        self.use: MemoryUse | None = None
        self._engine, self._planning = engine, planning
        self._allocator: PlannedAllocator | None = None
        self._marks = StepMarks()
        self._do: Callable[[pl.Trainer], None] = self._wait_for_allocator
        self._building: Future[PlannedAllocator] | None = None
        self._solving: Future[StepPlacement] | None = None
        self._swap: object = None
        self._steps: list[RecordedStep] = []
        self._plans_made = 0
        self._last_stats: AllocatorStats | None = None
        self._before: AllocatorStats | None = None  # counters when they were last looked at
        self._steps_served = 0
        self._given_up = False
        self._global_step = 0

    # ---- for reports

    @property
    def stats(self) -> AllocatorStats | None:
        """What became of the requests since the plan is served, up to the end of training; None before."""
        return self._allocator.stats() if self._allocator is not None and self._serving else self._last_stats

    @property
    def _serving(self) -> bool:
        return self._do == self._watch

    @property
    def busy(self) -> bool:
        """Whether something goes on in the background."""
        return any(future is not None and not future.done() for future in (self._building, self._solving))

    @property
    def settled(self) -> bool:
        """Whether nothing is going to change any more if steps stay alike: a plan is served, or was given up."""
        return self._serving or self._given_up

    # ---- a step

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._global_step = trainer.global_step
        self._building = in_background(lambda: _build(self._engine.device), "build allocator")
        self._engine.on_mark = self._marks.layer

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._marks.begin_batch()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._marks.before_backward(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._marks.after_backward()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._marks.end_batch() and self._allocator is not None:
            self._allocator.leave()
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._marks.end_step()
        if self._planning.plan is None or self._engine.profile is not None:
            return  # steps of a profile are not those that follow
        if self._planning.plan.swap is not self._swap:
            self._start_over(self._planning.plan)
        self._do(trainer)

    # ---- from one stage to the next, each at the end of a step

    def _start_over(self, plan: Plan) -> None:
        """Another swap plan makes other requests."""
        self._swap = plan.swap
        self._plans_made, self.trace = 0, None
        self._pause(self._wait_for_allocator)

    def _pause(self, then: Callable[[pl.Trainer], None]) -> None:
        if self._allocator is not None:
            self._allocator.idle()
        self._marks.stop()
        self._given_up, self._steps = False, []
        self._do = then

    def release(self) -> None:
        """A step that is under way needs the memory of the arena: it is given back, and planned again afterwards."""
        self._pause(self._wait_for_allocator)
        self._marks.end_batch()
        if self._allocator is not None:
            self._allocator.leave()
            self._allocator.release()

    def _give_up(self, reason: str) -> None:
        rank_zero_warn(
            f"MemoStrategy: memory is not planned: {reason}. Training goes on, and buffers may fragment memory; "
            "plan_memory=False turns planning off, and this warning."
        )
        self._pause(lambda trainer: None)
        self._given_up = True

    def _wait_for_allocator(self, trainer: pl.Trainer) -> None:
        if self._building is None or not self._building.done():
            return
        try:
            allocator = self._building.result()
            allocator.install()
        except Exception as error:  # training does not depend on it, so nothing about it may end training
            self._give_up(str(error) or repr(error))
            return
        self._allocator = allocator
        plan = self._planning.plan
        assert plan is not None
        found = self._cache(trainer).find(plan)
        if plan.placement is not None and plan.placement.threads == torch.get_num_threads():
            if found is not None and found[0] == plan.placement:
                self.trace = found[1]
            self._serve_when_empty(plan.placement, "of the given plan", trainer)
        elif found is not None:
            placement, self.trace = found
            self._serve_when_empty(placement, "from an earlier run", trainer)
        else:
            self._record()

    def _record(self) -> None:
        assert self._allocator is not None
        self._marks.start(self._allocator.phase)
        self._allocator.record(MIN_BYTES)
        self._do = self._collect

    def _collect(self, trainer: pl.Trainer) -> None:
        """Take what the step requested; enough is known when it requests the same again."""
        assert self._allocator is not None
        self._steps.append(self._marks.recorded(self._allocator.take_events()))
        if len(self._steps) < _RECORDED_STEPS:
            return
        names = self._marks.names
        first, second, third = self._steps[-_RECORDED_STEPS:]
        before, trace = trace_of(first, second, names), trace_of(second, third, names)
        if trace.same_requests(before):
            # Lives differ a little from step to step: gradients, for one, can be freed early by a callback.
            trace = trace.longest_lives(before)
        elif len(self._steps) < _MOST_RECORDED:
            return
        if self.trace is not None and trace.same_requests(self.trace):
            trace = trace.longest_lives(self.trace)
        self._pause(self._wait_for_placement)
        self.trace = trace
        alignment, threads = _ALIGNMENT[self._engine.device.type], torch.get_num_threads()
        self._solving = in_background(lambda: _solve(trace, alignment, threads), "plan memory", to_its_end=True)

    def _wait_for_placement(self, trainer: pl.Trainer) -> None:
        if self._solving is None or not self._solving.done():
            return
        future, self._solving = self._solving, None
        if (error := future.exception()) is not None:
            self._give_up(f"{error} (please report this)")
            return
        placement = future.result()
        self._plans_made += 1
        if placement.requests == 0:
            self._give_up("no buffer is requested and freed in every step")
            return
        self._serve_when_empty(placement, f"{placement.method}, {placement.seconds:.1f} s", trainer, solved_here=True)

    def _serve_when_empty(
        self, placement: StepPlacement, source: str, trainer: pl.Trainer, solved_here: bool = False, tries: int = 4
    ) -> None:
        """Serve, unless buffers of an earlier plan are alive in the arena, like gradients of a discarded model."""
        assert self._allocator is not None
        if not self._allocator.release():
            gc.collect()
        if self._allocator.release():
            try:
                self._serve(placement, source, trainer)
            except (ValueError, RuntimeError) as error:
                self._do_without(error, solved_here)
        elif tries == 0:
            self._give_up(f"{self._allocator.stats().live_blocks} buffers of an earlier plan are still alive")
        else:
            self._do = lambda trainer: self._serve_when_empty(placement, source, trainer, solved_here, tries - 1)

    def _do_without(self, error: Exception, solved_here: bool) -> None:
        """A plan from a file may say anything, and the memory for an arena may be missing."""
        if solved_here:
            self._give_up(str(error))
        else:
            rank_zero_warn(f"MemoStrategy: an earlier memory plan is ignored, and memory is planned anew: {error}")
            self.trace = None
            self._record()

    def _serve(self, placement: StepPlacement, source: str, trainer: pl.Trainer) -> None:
        assert self._allocator is not None and self._planning.plan is not None
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()  # what unplanned steps left in it would stay reserved beside the arena
        self._marks.start(self._allocator.phase, [phase.name for phase in placement.phases])
        self._allocator.serve(
            [(phase.sizes, phase.offsets) for phase in placement.phases], placement.peak_bytes, placement.min_bytes
        )
        self._allocator.reset_stats()
        self._before, self._steps_served = None, 0
        self._do = self._watch
        plan = replace(self._planning.plan, placement=placement)
        self._planning.complete(plan, trainer)
        if self.trace is not None:
            self._cache(trainer).store(plan, self.trace)
        rank_zero_info(f"MemoStrategy: {summary(placement)} ({source}).")

    def _watch(self, trainer: pl.Trainer) -> None:
        """Report; or plan again, a few times, if the plan is of no use."""
        assert self._allocator is not None
        reports = bool(trainer.loggers) and trainer.global_step % max(trainer.log_every_n_steps, 1) == 0
        self._steps_served += 1
        if self._steps_served > _WATCHED_STEPS and self._steps_served % _WATCHED_STEPS and not reports:
            return
        stats, before = self._allocator.stats(), self._before
        self._before = stats
        useless = before is None and stats.misses > stats.hits
        # Where the sizes are right, so are the requests, and it is their lives that differ from what was recorded.
        sizes_missed = stats.miss_size + stats.miss_end - (before.miss_size + before.miss_end if before else 0)
        overlaps = stats.miss_overlap - (before.miss_overlap if before else 0)
        lives_differ = not sizes_missed and overlaps > _MISSED_SHARE * (stats.hits - (before.hits if before else 0))
        if (useless or lives_differ) and self._plans_made < _MOST_PLANS:
            self._plans_made += 1
            self._pause(self._collect)
            self._record()
        elif reports:
            for logger in trainer.loggers:
                logger.log_metrics(memory_metrics(stats, self._engine.device), step=trainer.global_step)

    def _cache(self, trainer: pl.Trainer) -> PlanCache:
        def warn(message: str) -> None:
            rank_zero_warn(f"MemoStrategy: {message}")

        decisive = _described(trainer) + ", check_restored" * self._engine.check_restored
        return PlanCache(cache_folder(), warn, torch.get_num_threads(), decisive)

    # ---- the end

    def draw(self, folder: str | Path) -> list[Path]:
        """Writes pictures of the memory plan: its map and its curves as PNG, and both as a page to look around in.

        Args:
            folder: Where they go.

        Returns:
            The files; none if there is no plan, or it is not known what it was made from.

        Raises:
            OSError: A file can't be written.
        """
        # matplotlib takes long to import
        from lightning_memo.reports.memory_page import memory_page
        from lightning_memo.reports.memory_pictures import memory_curve, memory_map

        plan = self._planning.plan
        if self.use is None or self.trace is None or plan is None or plan.placement is None:
            return []
        files = [Path(folder) / name for name in ("memory_map.png", "memory_curve.png", "memory.html")]
        for write, file in zip((memory_map, memory_curve, memory_page), files, strict=True):
            write(self.trace, plan.placement, file)
        return files

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close(pl_module)

    def close(self, pl_module: pl.LightningModule | None) -> None:
        """PyTorch's own allocator serves all again; the arena goes back when the last buffer in it is freed.

        Args:
            pl_module: Its gradients leave the arena: a model may be kept for long after its training.
        """
        self._engine.on_mark = None
        self._marks.stop()
        self._marks.end_batch()
        self._marks.end_step()
        if self._allocator is None:
            return
        plan = self._planning.plan
        if self._serving and plan is not None and plan.placement is not None:
            self._last_stats = self._allocator.stats()
            self.use = memory_use(self._last_stats, plan.placement, self._engine.device)
            self._do = lambda trainer: None
        self._allocator.leave()
        self._allocator.idle()
        self._allocator.uninstall()
        if pl_module is not None and not self._allocator.release():
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()


def _build(device: torch.device) -> PlannedAllocator:
    load_library()  # the planner's core, so that planning does not wait for a compiler
    return PlannedAllocator(device)


def _solve(trace: Trace, alignment: int, threads: int) -> StepPlacement:
    placement = plan_memory(trace, alignment=alignment, time_limit_seconds=_PLANNING_SECONDS)
    return place_step(trace, placement, min_bytes=MIN_BYTES, threads=threads)


def _described(trainer: pl.Trainer) -> str:
    """What decides over the requests beside model and plan."""
    optimizers = ", ".join(f"{type(o).__name__} {len(o.param_groups)}" for o in trainer.optimizers)
    place = f"rank {trainer.global_rank} of {trainer.world_size}"
    return f"{optimizers}; accumulate {trainer.accumulate_grad_batches}; clip {trainer.gradient_clip_val}; {place}"
