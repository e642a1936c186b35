"""Records the requests of a step, plans an offset for each, and makes the allocator serve them there.

One memory planner works at a time: PyTorch has one allocator in a process, and phases of two trainings would mix in it.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_memo.allocator import AllocatorStats, PlannedAllocator
from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.plan_cache import PlanCache, cache_folder
from lightning_memo.artifacts.trace import Trace
from lightning_memo.engine import Engine
from lightning_memo.planner.placement.placement_core import load_library
from lightning_memo.planner.placement.step_placement import place_step, plan_memory
from lightning_memo.reports.tables import MemoryUse
from lightning_memo.runtime.activation_planner import ActivationPlanner
from lightning_memo.runtime.allocator_report import memory_metrics, memory_use, placement_summary
from lightning_memo.runtime.request_recording import RecordedRequests, RequestRecording, StepMarks
from lightning_memo.runtime.training_run import TrainingRun
from lightning_memo.utils.messages import tell

_Result = TypeVar("_Result")


def in_background(work: Callable[[], _Result], name: str, finish_at_exit: bool = False) -> Future[_Result]:
    """Run a function in a new thread.

    Args:
        work: The function.
        name: Name of the thread.
        finish_at_exit: Whether the process waits for the thread when it ends. HiGHS needs this: it aborts the process
            if the interpreter is gone when the solver returns.

    Returns:
        A future of the function's result or exception.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=not finish_at_exit).start()
    return future


_lock = threading.Lock()


class Planner(Protocol):
    """A memory planner."""

    def yield_allocator(self) -> None:
        """Leave the allocator to other planners, until the next step of its training."""


class _Owner(NamedTuple):
    """The planner that uses the allocator, and the thread of its training."""

    planner: weakref.ref[Planner]
    thread: threading.Thread


_owner: _Owner | None = None


def begin_planning(planner: Planner) -> None:
    """Let a planner use the allocator of the process until `end_planning`.

    Raises:
        RuntimeError: Another one uses it.
    """
    global _owner
    with _lock:
        other = None if _owner is None else _owner.planner()
        if other is not None and other is not planner:
            raise RuntimeError("another training of this process, which has not ended, plans its memory")
        _owner = _Owner(weakref.ref(planner), threading.current_thread())


def end_planning(planner: Planner) -> None:
    """Leave the allocator to other planners."""
    global _owner
    with _lock:
        if _owner is not None and _owner.planner() is planner:
            _owner = None


def interrupt_planning() -> None:
    """Let the planner of an earlier training of this thread, or of a thread that has ended, leave the allocator.

    A training that has failed may never tell of its end: the Trainer of Hugging Face has no hook for it.
    """
    owner = _owner
    planner = None if owner is None else owner.planner()
    if owner is None or planner is None:
        return
    if owner.thread is threading.current_thread() or not owner.thread.is_alive():
        planner.yield_allocator()


_WATCHED_STEPS: Final = 10  # The first step of a plan is examined, and then each interval of so many steps.
_MISSED_SHARE: Final = 0.01  # If the arena is too small for more requests than these, steps need more than was planned.

MIN_BYTES: Final = 512
"""Smaller requests, mostly scalars for logging, are not planned: they are irregular, and fragment nothing."""
_ALIGNMENT: Final = {"cpu": 64, "cuda": 512}
_PLANNING_SECONDS: Final = 20.0
_MOST_PLANS: Final = 3
_MOST_TRIES: Final = 5


class HitRateWatch:
    """Compares the allocator's counters from step to step, from the step at which a plan begins to be served.

    Requests that miss their places are no reason to plan again as long as the arena serves them. For example, a buffer
    that is sent to another process lives until that process has received it.

    Args:
        repeats: Whether the steps that the plan was made from made the same requests. Its places are then expected to
            be used; otherwise it is enough if requests find room in the arena.

    Attributes:
        steps: Steps that the plan was served in.
    """

    def __init__(self, repeats: bool = True) -> None:
        self._repeats = repeats
        self.steps = 0
        self._before: AllocatorStats | None = None

    def is_due(self) -> bool:
        """Whether the step that is over is one of those to be examined."""
        self.steps += 1
        return self.steps == 1 or self.steps % _WATCHED_STEPS == 0

    def plan_is_wrong(self, stats: AllocatorStats) -> bool:
        """Whether the plan should be made anew.

        Args:
            stats: The counters at the end of a step.
        """
        if self.steps == 1:
            good = stats.hits if self._repeats else stats.served
            return stats.served + stats.misses > 2 * good
        if self.steps % _WATCHED_STEPS:
            return False
        before, self._before = self._before, stats
        without_room = _without_room(stats) - (0 if before is None else _without_room(before))
        return without_room > _MISSED_SHARE * (stats.served - (0 if before is None else before.served))


def _without_room(stats: AllocatorStats) -> int:
    return stats.displaced - stats.fitted


class MemoryState(Enum):
    """What the memory planner does. Transitions happen at the end of an optimizer step."""

    BUILDING = "waits until the allocator is compiled"
    RECORDING = "records the requests of each step"
    SOLVING = "waits for the placement, which is computed in the background"
    DRAINING = "waits until the buffers of an earlier placement are freed"
    SERVING = "serves the requests of each step at their offsets"
    GIVEN_UP = "leaves all requests to PyTorch's allocator, because something failed"
    CLOSED = "has ended"


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A placement that is going to be served."""

    placement: StepPlacement
    origin: str = ""
    """Where it comes from, for the message, if it was not computed for this run."""

    solved_here: bool = False


class MemoryPlanner:
    """Plans the memory of steps that run by the plan in force: records some, solves in the background, then serves.

    A step is all micro-batches of an optimizer step. What happens between them, for example loading data, validation
    and logging, is left to PyTorch's allocator.

    Args:
        engine: The engine of the run.
        activations: Makes the plan that is completed here.
        run: The training run.

    Attributes:
        state: What the planner does at present.
        marks: Marks the phases of a step. The runtime calls its methods for each batch.
        trace: The requests that the placement was made from; `None` if they are not known.
        use: Counters of the served requests; `None` until training ends or fails.
    """

    def __init__(self, engine: Engine, activations: ActivationPlanner, run: TrainingRun) -> None:
        self.state = MemoryState.BUILDING
        self.marks = StepMarks()
        self.trace: Trace | None = None
        self.use: MemoryUse | None = None
        self._engine, self._activations, self._run = engine, activations, run
        self._allocator: PlannedAllocator | None = None
        self._building: Future[PlannedAllocator] | None = None
        self._solving: Future[StepPlacement] | None = None
        self._recording: RequestRecording | None = None
        self._candidate: PlacementCandidate | None = None
        self._tries = 0
        self._watch = HitRateWatch()
        self._last_stats: AllocatorStats | None = None
        self._swap: object = None
        self._plans_made = 0
        self._step = 0

    @property
    def _alignment(self) -> int:
        """Bytes that offsets are multiples of."""
        return _ALIGNMENT[self._engine.device.type]

    # ---- for reports

    @property
    def stats(self) -> AllocatorStats | None:
        """Counters of the requests since the placement is served, up to the end of training; `None` before."""
        serving = self._allocator is not None and self.state is MemoryState.SERVING
        return self._allocator.stats() if self._allocator is not None and serving else self._last_stats

    @property
    def busy(self) -> bool:
        """Whether work is under way in the background."""
        return any(future is not None and not future.done() for future in (self._building, self._solving))

    @property
    def settled(self) -> bool:
        """Whether the state is final while steps stay alike: a placement is served, or planning was given up."""
        return self.state in (MemoryState.SERVING, MemoryState.GIVEN_UP)

    def draw(self, folder: str | Path) -> list[Path]:
        """Write pictures of the memory plan: its map and its curve as PNG, and both as an interactive page.

        Args:
            folder: Where the files are written.

        Returns:
            The files; none if there is no plan, or the requests that it was made from are not known.

        Raises:
            OSError: A file cannot be written.
        """
        # These import matplotlib, which takes long.
        from lightning_memo.reports.memory_pictures import memory_curve, memory_map, memory_page

        plan = self._activations.plan
        if self.use is None or self.trace is None or plan is None or plan.placement is None:
            return []
        files = [Path(folder) / name for name in ("memory_map.png", "memory_curve.png", "memory.html")]
        for write, file in zip((memory_map, memory_curve, memory_page), files, strict=True):
            write(self.trace, plan.placement, file)
        return files

    # ---- a step

    def start(self) -> None:
        """Training starts: compile the allocator in the background."""
        interrupt_planning()
        self._step = self._run.step
        self._building = in_background(lambda: _build(self._engine.device), "build allocator")
        self._engine.on_mark = self.marks.layer

    def end_batch(self) -> None:
        """A training batch is over, and so is its optimizer step, if there is one."""
        if self.marks.end_batch() and self._allocator is not None:
            self._allocator.leave()
        if self._run.step == self._step:
            return
        self._step = self._run.step
        self.marks.end_step()
        plan = self._activations.plan
        if plan is None or not self._activations.follows_plan:
            return  # profiled steps, for example, make other requests than those that follow
        if plan.swap is not self._swap:
            self._start_over(plan)
        transitions = {
            MemoryState.BUILDING: self._install,
            MemoryState.RECORDING: self._record_step,
            MemoryState.SOLVING: self._take_placement,
            MemoryState.DRAINING: self._serve_when_empty,
            MemoryState.SERVING: self._check_hits,
        }
        if self.state in transitions:
            transitions[self.state]()

    def _pause(self, then: MemoryState) -> None:
        """Leave all requests to PyTorch's allocator, and go to another state."""
        if self._allocator is not None:
            self._allocator.idle()
        self.marks.stop()
        self.state = then

    def _start_over(self, plan: Plan) -> None:
        """Steps of another plan make other requests."""
        self._swap = plan.swap
        self._plans_made, self.trace, self._candidate = 0, None, None
        self._pause(MemoryState.BUILDING)

    def release(self) -> None:
        """Free the arena with the last buffer in it, because a step needs the memory; plan again later."""
        self._pause(MemoryState.BUILDING)
        self.marks.end_batch()
        if self._allocator is not None:
            self._allocator.leave()
            if not self._allocator.release():
                copy_gradients(self._run.model)

    def _give_up(self, reason: str) -> None:
        rank_zero_warn(
            f"lightning_memo: memory is not planned: {reason}. Training goes on, and buffers may fragment memory; "
            "plan_memory=False turns planning off, and this warning."
        )
        self._pause(MemoryState.GIVEN_UP)

    def _install(self) -> None:
        """Put the allocator in front of PyTorch's, and serve an earlier placement or record steps."""
        if self._building is None or not self._building.done():
            return
        try:
            allocator = self._building.result()
            begin_planning(self)
            allocator.install()
        except Exception as error:  # training does not depend on the allocator, so no failure of it ends training
            self._give_up(str(error) or repr(error))
            return
        self._allocator = allocator
        self._engine.comparison.before = allocator.leave
        plan = self._activations.plan
        assert plan is not None
        cached = cached_placements(cache_folder(), self._run, self._engine).find(plan)
        if plan.placement is not None and plan.placement.threads == torch.get_num_threads():
            if cached is not None and cached[0] == plan.placement:
                self.trace = cached[1]
            self._try_to_serve(PlacementCandidate(plan.placement, " (from the given plan)"))
        elif cached is not None:
            placement, self.trace = cached
            self._try_to_serve(PlacementCandidate(placement, " (from an earlier run)"))
        else:
            self._record()

    def _record(self) -> None:
        assert self._allocator is not None
        self.marks.start(self._allocator.phase)
        self._allocator.record(MIN_BYTES)
        self._recording = RequestRecording(self._alignment)
        self.state = MemoryState.RECORDING

    def _record_step(self) -> None:
        """Take the requests of the step; solve once enough is known."""
        assert self._allocator is not None and self._recording is not None
        step = self.marks.recorded(self._allocator.take_events())
        recorded = self._recording.add(step, self.marks.names)
        if recorded is None:
            return
        if self.trace is not None and recorded.trace.same_requests(self.trace):
            recorded = replace(recorded, trace=recorded.trace.longest_lives(self.trace))
        self._pause(MemoryState.SOLVING)
        self._recording, self.trace = None, recorded.trace
        earlier, alignment, threads = self._candidate, self._alignment, torch.get_num_threads()
        least_bytes = earlier.placement.arena_bytes if earlier is not None and earlier.solved_here else 0
        self._solving = in_background(
            lambda: _solve(recorded, least_bytes, alignment, threads), "plan memory", finish_at_exit=True
        )

    def _take_placement(self) -> None:
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
        self._try_to_serve(PlacementCandidate(placement, solved_here=True))

    def _try_to_serve(self, candidate: PlacementCandidate) -> None:
        self._candidate, self._tries = candidate, 0
        self._serve_when_empty()

    def _serve_when_empty(self) -> None:
        """Serve, unless buffers of an earlier placement are alive in the arena, like gradients of a discarded model."""
        assert self._allocator is not None and self._candidate is not None
        self._tries += 1
        if not self._allocator.release():
            gc.collect()
        if self._allocator.release():
            try:
                self._serve(self._candidate)
            except (ValueError, RuntimeError) as error:  # a file holds a wrong plan, or the arena finds no memory
                if self._candidate.solved_here:
                    self._give_up(str(error))
                    return
                rank_zero_warn(f"lightning_memo: an earlier memory plan is ignored, and a new one is made: {error}")
                self.trace = None
                self._record()
        elif self._tries == _MOST_TRIES:
            self._give_up(f"{self._allocator.stats().live_blocks} buffers of an earlier plan are still alive")
        else:
            self.state = MemoryState.DRAINING

    def _serve(self, candidate: PlacementCandidate) -> None:
        assert self._allocator is not None and self._activations.plan is not None
        placement = candidate.placement
        self._empty_cache()
        self.marks.start(self._allocator.phase, [phase.name for phase in placement.phases])
        places = [np.array(phase.places, np.int64).reshape(-1, 3) for phase in placement.phases]
        pairs, in_turn = [(columns[:, 0], columns[:, 1]) for columns in places], [columns[:, 2] for columns in places]
        self._allocator.serve(pairs, placement.arena_bytes, placement.min_bytes, in_turn)
        self._allocator.reset_stats()
        self._watch = HitRateWatch(placement.repeats)
        self.state = MemoryState.SERVING
        plan = replace(self._activations.plan, placement=placement)
        self._activations.complete(plan)
        if self.trace is not None:
            cached_placements(cache_folder(), self._run, self._engine).store(plan, self.trace)
        tell(f"{placement_summary(placement)}{candidate.origin}.")
        tell(f"placed by {placement.method} in {placement.seconds:.1f} s", logging.DEBUG)

    def _empty_cache(self) -> None:
        """Return what PyTorch's allocator caches: memory of unplanned steps would stay reserved beside the arena."""
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_hits(self) -> None:
        """Report the counters, or record again, a few times at most, if the plan does not fit the steps."""
        assert self._allocator is not None
        logs_now = self._run.logs_now
        if not (self._watch.is_due() or logs_now):
            return
        stats = self._allocator.stats()
        if self._watch.steps == 1:
            self._empty_cache()  # of the gradients before the plan, which lived until this step
        if self._watch.plan_is_wrong(stats) and self._plans_made < _MOST_PLANS:
            self._pause(MemoryState.RECORDING)
            self._allocator.release()  # recorded steps need the memory
            self._record()
        elif logs_now:
            self._run.log(memory_metrics(stats, self._engine.device))

    def close(self, model: nn.Module | None) -> None:
        """Give all requests back to PyTorch's allocator. The arena is freed together with the last buffer in it.

        Args:
            model: The trained model. Its gradients leave the arena, because it may be kept long after training.
        """
        self._leave_allocator(model)
        self._engine.on_mark = None
        if self.state is MemoryState.SERVING:
            self.state = MemoryState.CLOSED

    def fail(self) -> None:
        """A batch has failed: what is requested until the next one belongs to no step."""
        if self.marks.end_batch() and self._allocator is not None:
            self._allocator.leave()

    def yield_allocator(self) -> None:
        """Leave the allocator to other planners, and ask for it again after the next step, if there is one."""
        self._leave_allocator(self._run.model)
        if self.state is not MemoryState.GIVEN_UP:
            self.state = MemoryState.BUILDING

    def _leave_allocator(self, model: nn.Module | None) -> None:
        end_planning(self)
        self._engine.comparison.before = None
        self.marks.stop()
        self.marks.end_batch()
        self.marks.end_step()
        allocator, self._allocator = self._allocator, None
        if allocator is None:
            return
        plan = self._activations.plan
        if self.state is MemoryState.SERVING and plan is not None and plan.placement is not None:
            self._last_stats = allocator.stats()
            self.use = memory_use(self._last_stats, plan.placement, self._engine.device)
        allocator.leave()
        allocator.idle()
        allocator.uninstall()
        if model is not None and not allocator.release():
            copy_gradients(model)


def _build(device: torch.device) -> PlannedAllocator:
    load_library()  # the planner's compiled core, so that planning does not wait for a compiler
    return PlannedAllocator(device)


def _solve(recorded: RecordedRequests, least_bytes: int, alignment: int, threads: int) -> StepPlacement:
    """Place the recorded requests, in an arena that is no smaller than that of an earlier placement."""
    placement = plan_memory(recorded.trace, alignment=alignment, time_limit_seconds=_PLANNING_SECONDS)
    room_bytes = max(recorded.room_bytes, least_bytes - placement.peak_bytes)
    step = place_step(recorded.trace, placement, min_bytes=MIN_BYTES, threads=threads)
    phases = tuple(
        replace(phase, varying=recorded.varying.get(phase.name, ()), occasional=recorded.occasional.get(phase.name, ()))
        for phase in step.phases
    )
    return replace(step, phases=phases, room_bytes=room_bytes)


def cached_placements(folder: Path, run: TrainingRun, engine: Engine) -> PlanCache:
    """The cache of the placements of runs like this one.

    Args:
        folder: Folder of the plans of earlier runs.
        run: The training run.
        engine: The engine of the run.
    """

    def warn(message: str) -> None:
        rank_zero_warn(f"lightning_memo: {message}")

    optimizers = ", ".join(f"{type(o).__name__} {len(o.param_groups)}" for o in run.optimizers)
    place = f"rank {run.rank} of {run.processes}"
    described = f"{optimizers}; accumulate {run.accumulated_batches}; clip {run.gradient_clip}; {place}"
    return PlanCache(folder, warn, torch.get_num_threads(), described)


def copy_gradients(model: nn.Module) -> None:
    """Replace each gradient by a copy, which is in PyTorch's memory while the allocator is idle."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
