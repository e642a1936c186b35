"""A few training steps at one sequence length, by default on random tokens: whether the length fits in memory.

They run in a separate process: whatever a failed attempt leaves behind disappears with it.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import MemoConfig
from lightning_memo.planner import HostMemoryError
from lightning_memo.profiler.measured_costs import state_bytes
from lightning_memo.profiler.memory_meter import WorkingSetMeter
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face
from lightning_memo.utils.process import exit_with_parent
from lightning_memo.utils.units import format_bytes
from lightning_memo.utils.user_errors import user_message


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Result of training steps at one length. Sizes are None if the attempt ended before they were known."""

    tokens: int
    fits: bool
    reason: str = ""
    """Why it does not fit, in one line."""

    planned_device_bytes: int | None = None
    peak_device_bytes: int | None = None
    """Measured peak: parameters, gradients, optimizer state, rounding buffers and the working memory of a step."""

    host_bytes: int | None = None
    """Host memory for swapped activations."""

    device_limit_bytes: int | None = None
    host_limit_bytes: int | None = None
    alpha: float | None = None
    """Fraction of the tokens whose activations were swapped, or None if nothing was swapped or recomputed."""

    step_seconds: float | None = None


BatchOf = Callable[[int], Any]
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": -1,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}
# Trainer arguments that a trial sets itself, so that the user's values have no effect.
OVERRIDDEN_TRAINER_ARGUMENTS = frozenset({*QUIET, "strategy", "callbacks", "max_steps", "devices", "default_root_dir"})
_MAX_REASON_CHARACTERS = 200


class PlanningStrategy(Protocol):
    """What a trial reads from the strategy after training."""

    @property
    def config(self) -> MemoConfig:
        """Settings of the strategy."""

    @property
    def plan(self) -> Plan | None:
        """The plan that was executed, or None if no layer was trained."""


StrategyFactory = Callable[..., PlanningStrategy]
"""Builds a Lightning strategy from the settings of `MemoStrategy`. It must be picklable, as a class is."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Training steps that can be run at any sequence length. It is pickled and sent to the trial process."""

    strategy_factory: StrategyFactory
    module: LightningModule
    batch_of: BatchOf
    settings: Mapping[str, Any]
    """Arguments of `strategy_factory`."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of Lightning's `Trainer`."""

    steps: int = 3
    """Number of optimizer steps. The first is profiled and the last is measured.

    There are more if host memory is locked slowly: the plan is in force once that is over."""

    def __call__(self, tokens: int) -> Attempt:
        """Trains `module` itself, in this process, for some steps at a length.

        Raises:
            Exception: Training failed for another reason than a lack of memory.
        """
        strategy, measured = self.strategy_factory(**self.settings), LastStep(self.steps)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._fit(strategy, measured, self.batch_of(tokens))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _attempt(tokens, strategy, measured, _one_line(error))
        return _attempt(tokens, strategy, measured, _over_budget(strategy, measured))

    def _fit(self, strategy: PlanningStrategy, measured: LastStep, batch: Any) -> None:
        accumulate = self.trainer.get("accumulate_grad_batches", 1)
        own = {"strategy": strategy, "callbacks": [measured], "max_steps": self.steps, "devices": 1}
        rows: Any = [batch] * (self.steps * accumulate)
        batches: DataLoader[Any] = DataLoader(rows, batch_size=None)
        with tempfile.TemporaryDirectory() as folder:  # for the plans that the strategy saves
            Trainer(**{**self.trainer, **QUIET, **own, "default_root_dir": folder}).fit(self.module, batches)


class LastStep(Callback):
    """Measures the time and the peak device memory of the last step, which runs by the plan.

    Args:
        steps: Number of optimizer steps of the run, if the plan is in force by then.

    Attributes:
        seconds: Time of the last step, or None before it has ended.
        peak_bytes: Peak device memory of the last step, including parameters, gradients and optimizer state.
    """

    def __init__(self, steps: int) -> None:
        self.seconds: float | None = None
        self.peak_bytes: int | None = None
        self._steps = steps
        self._meter: WorkingSetMeter | None = None
        self._started = 0.0

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self._steps - 1 and _runs_by_another_plan(trainer.strategy):
            self._steps += 1
            trainer.fit_loop.epoch_loop.max_steps = self._steps
        elif trainer.global_step == self._steps - 1 and self._meter is None:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)
                torch.cuda.reset_peak_memory_stats(pl_module.device)
            else:
                self._meter = WorkingSetMeter(pl_module.device)
            self._started = time.perf_counter()

    @override
    def on_before_backward(self, *args: Any) -> None:
        if self._meter is not None:
            self._meter.begin_backward()

    @override
    def on_after_backward(self, *args: Any) -> None:
        if self._meter is not None:
            self._meter.end_backward()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step < self._steps:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.seconds = time.perf_counter() - self._started
        if self._meter is None:
            self.peak_bytes = torch.cuda.max_memory_allocated(pl_module.device)
            return
        used, self._meter = self._meter.stop(0, trainer.accumulate_grad_batches > 1), None
        strategy: Any = trainer.strategy
        plan = strategy.plan  # None if no layer is trained
        buffers = 0 if plan is None else plan.swap.memory.buffer_bytes
        self.peak_bytes = state_bytes(pl_module, trainer.optimizers) + buffers + max(used.layers, used.outside)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._meter is not None:
            self._meter.stop(kept_bytes=0, accumulating=False)


def _runs_by_another_plan(strategy: Any) -> bool:
    """Whether there is a plan (there is none if no layer is trained), and steps do not run by it yet."""
    return strategy.plan is not None and not strategy.follows_plan


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception was caused by a lack of device or host memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    known = isinstance(error, (MemoryError, HostMemoryError, torch.OutOfMemoryError))
    return known or no_thread or is_oom_error(error)


def _over_budget(strategy: PlanningStrategy, measured: LastStep) -> str:
    limit, peak = strategy.config.device_memory_bytes, measured.peak_bytes or 0
    if limit is None or peak <= limit:
        return ""
    return f"a step needs {format_bytes(peak)} of device memory, more than device_memory={format_bytes(limit)}"


def _attempt(tokens: int, strategy: PlanningStrategy, measured: LastStep, reason: str) -> Attempt:
    plan = strategy.plan
    if plan is None:
        return Attempt(tokens=tokens, fits=not reason, reason=reason)
    return Attempt(
        tokens=tokens,
        fits=not reason,
        reason=reason,
        planned_device_bytes=plan.device_bytes,
        peak_device_bytes=measured.peak_bytes,
        host_bytes=plan.swap.host_bytes,
        device_limit_bytes=plan.budget.device_bytes,
        host_limit_bytes=plan.budget.host_bytes,
        alpha=None if plan.swap.plain else plan.swap.alpha,
        step_seconds=measured.seconds,
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return textwrap.shorten(text, _MAX_REASON_CHARACTERS, placeholder=" ...")


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
    """Makes batches of random tokens: `{"input_ids": [batch_size, tokens], "labels": [batch_size, tokens]}`."""

    vocabulary: int
    batch_size: int = 1

    def __call__(self, tokens: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, self.vocabulary, (self.batch_size, tokens), generator=generator)
        return {"input_ids": ids, "labels": ids}


def random_tokens(module: LightningModule) -> RandomTokens:
    """Returns random batches for a module that holds a Hugging Face model.

    Raises:
        ValueError: The module holds no such model, or one without a vocabulary.
    """
    for model in find_hugging_face(module):
        config: Any = model.config
        size = getattr(config.get_text_config(), "vocab_size", None)
        if size:
            return RandomTokens(vocabulary=size)
    raise ValueError(
        f"{class_name(module)} holds no Hugging Face model with a vocabulary (a model that configure_model builds "
        "does not exist yet): give batch_of, a function that takes a number of tokens and returns a batch for "
        "training_step"
    )


_MAX_OUTPUT_CHARACTERS = 4000
_KILLED = "the kernel killed the process (SIGKILL), which usually means that host memory ran out"


class TrialProcess:
    """Runs trials in a separate process, which is started when needed and restarted after an attempt that failed.

    The process trains a copy of the module. The caller's module, its optimizers and the random state do not change.

    Args:
        trial: Called with a number of tokens. It and the returned attempt must be picklable.
        memory_bytes: Host memory that the process may allocate, or None for no limit. The operating system refuses
            further memory to this process, so that a trial cannot exhaust the machine.
        preload: Names of modules that the fork server imports once, to make restarts fast.

    Raises:
        ValueError: `trial` cannot be pickled.
    """

    def __init__(self, trial: Callable[[int], Attempt], memory_bytes: int | None, preload: Sequence[str] = ()) -> None:
        self._memory_bytes = memory_bytes
        self._preload = [Trial.__module__, *preload]
        self._process: Any = None
        self._pipe: Connection | None = None
        self._output = Path()
        self._folder = tempfile.TemporaryDirectory(prefix="lengths-")
        try:
            # Plain pickle copies tensors; multiprocessing would share them with the process, which trains them.
            self._trial = pickle.dumps(trial)
        except Exception as error:
            raise ValueError(
                "lengths are tried in another process, and the module or batch_of cannot be pickled to send it there: "
                f"define the module's class and batch_of at the top level of an importable file ({error})"
            ) from error

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def __call__(self, tokens: int) -> Attempt:
        """Runs a trial of `tokens` tokens.

        Raises:
            ValueError: A setting is wrong.
            RuntimeError: The attempt failed for another reason than a lack of memory. The message holds its traceback.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(tokens)
            kind, result = self._pipe.recv()
        except (EOFError, OSError):
            return self._ended(tokens)
        if kind == "refused":
            raise ValueError(result)
        if kind == "failed":
            raise RuntimeError(f"the trial of {tokens} tokens failed:\n{result}")
        attempt: Attempt = result
        if not attempt.fits:
            self._stop()  # a new process is free of what the failed attempt left allocated
        return attempt

    def _ended(self, tokens: int) -> Attempt:
        """Returns the attempt whose process ended.

        Raises:
            RuntimeError: The process ended for another reason than a lack of memory.
        """
        self._process.join()
        status, output = self._process.exitcode, self._output.read_text(errors="replace")[-_MAX_OUTPUT_CHARACTERS:]
        self._stop()
        if status == -signal.SIGKILL:
            return Attempt(tokens=tokens, fits=False, reason=_KILLED)
        raise RuntimeError(f"the trial of {tokens} tokens failed: its process ended with status {status}:\n{output}")

    def _start(self) -> None:
        # A fork server has none of this process's threads and CUDA state, and later processes start fast.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        self._output = Path(self._folder.name) / "output.txt"
        self._pipe, there = context.Pipe()
        arguments = (there, self._trial, self._memory_bytes, str(Path.cwd()), self._output)
        self._process = context.Process(target=_serve, args=arguments, name="lengths", daemon=True)
        try:
            self._process.start()
        except (EOFError, ConnectionError) as error:
            self._pipe.close()
            self._pipe = None
            raise ValueError(
                "the process that tries lengths ended during its start: put the code of the script under "
                '`if __name__ == "__main__":`'
            ) from error
        there.close()

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._pipe = None


def _serve(pipe: Connection, pickled: bytes, memory_bytes: int | None, folder: str, output: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.chdir(folder)
    tempfile.tempdir = str(output.parent)  # the parent removes it, even if this process is killed
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    watch = exit_with_parent(output.parent)  # from now on, the folder may vanish
    trial = pickle.loads(pickled)
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_try(trial, pipe.recv()))
    watch.join()  # the parent closed the pipe: it kills this process, or has ended itself


def _try(trial: Callable[[int], Attempt], tokens: int) -> tuple[str, Any]:
    try:
        return "done", trial(tokens)
    except Exception as error:
        message = user_message(error)
        return ("failed", traceback.format_exc()) if message is None else ("refused", message)


def _limit_memory(memory_bytes: int) -> None:
    """Limits this process to its present memory plus `memory_bytes`, and makes it the kernel's first choice to kill."""
    import resource  # does not exist on Windows

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
