"""One training run, started alone or as a job of a sweep, including runs that were interrupted before."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.hydra_command import command_error_message, exit_for_user
from lightning_memo.cli.launch import computed_on_rank_zero, delay_unless_rank_zero, started_processes
from lightning_memo.cli.restarts import Launch
from lightning_memo.cli.run_summary import RunSummary
from lightning_memo.cli.runs.baselines import quiet
from lightning_memo.cli.runs.build_run import build_trainer, count_processes
from lightning_memo.cli.runs.resume_checkpoint import checkpoint_to_resume, newest_checkpoint
from lightning_memo.cli.sweeps.job_processes import is_separate_job, run_separate_job
from lightning_memo.cli.sweeps.sweep_folder import finished_job
from lightning_memo.utils.process_rank import is_rank_zero
from lightning_memo.utils.units import read_length

log = logging.getLogger(__name__)

Train = Callable[[DictConfig], RunSummary]


def run_training_job(cfg: DictConfig, train: Train) -> RunSummary:
    """Trains, and writes the summary in rank zero. A failed job of a sweep has a summary too, and the sweep continues.

    Args:
        cfg: Composed configuration.
        train: Function that trains as configured.
    """
    job = HydraConfig.get()
    output_dir = Path(job.runtime.output_dir)
    overrides = [override for override in job.overrides.task if not override.startswith("sweep=")]
    sweep = job.mode is RunMode.MULTIRUN
    try:
        if not sweep and len(overrides) < len(job.overrides.task):
            raise ValueError("sweep=...: give -m as well; to resume a single run, give ckpt_path=last")
        summary = replace(resume_or_run(cfg, output_dir, overrides, train), overrides=overrides)
    except Exception as error:
        if not (sweep or is_separate_job()):
            exit_for_user(error)
            raise
        delay_unless_rank_zero()
        summary = _failure(cfg, overrides, error)
        log.error("job failed: %s", summary.message, exc_info=error if command_error_message(error) is None else None)
    except BaseException:
        if sweep:
            log.warning(
                "interrupted; to continue the sweep, run the same command with sweep=%s", output_dir.parent.name
            )
        elif (newest := _own_checkpoint(cfg)) is not None and is_rank_zero():
            log.warning("interrupted; to resume from %s, run the same command with ckpt_path=last", newest)
        raise
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    if is_rank_zero():
        summary.save(output_dir)
    return summary


def resume_or_run(cfg: DictConfig, folder: Path, overrides: list[str], train: Train) -> RunSummary:
    """Runs a job, or resumes it from its newest checkpoint if an earlier start was interrupted.

    A job that has finished before is not repeated. If a job of a sweep needs several processes, a separate command
    starts them, unless a launcher has already started them.

    Args:
        cfg: Configuration of the job.
        folder: Folder of the job.
        overrides: Overrides of the command line.
        train: Function that trains as configured.

    Raises:
        ValueError: A setting is not allowed, or data or a checkpoint is missing.
        JobFailed: The separate command failed.
    """
    sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    finished, checkpoint = computed_on_rank_zero(
        lambda: _earlier_results(cfg, folder, None if sweep else Launch.here(overrides))
    )
    if finished is not None:
        log.info("already finished: %s", folder)
        return finished
    cfg = OmegaConf.merge(cfg, {"ckpt_path": checkpoint})
    if sweep and started_processes() is None:
        with quiet():
            processes = count_processes(build_trainer(cfg))
        if processes > 1:
            return run_separate_job(cfg, folder)
    return train(cfg)


def _earlier_results(cfg: DictConfig, folder: Path, launch: Launch | None) -> tuple[RunSummary | None, str | None]:
    """Returns the summary of a job that has already finished, and the checkpoint to start or resume from.

    The contents of the job's folder are used only in a sweep, whose folders are numbered, and after a restart of the
    same launch.
    """
    own = launch is None and HydraConfig.get().mode is RunMode.MULTIRUN
    if launch is not None:
        own = launch.resumes_in(folder)
        if is_rank_zero():
            launch.save(folder)
    finished = finished_job(folder) if own else None
    newest = _own_checkpoint(cfg) if own else None
    if newest is not None:
        log.info("resuming from %s", newest)
    return finished, newest or checkpoint_to_resume(cfg)


def _own_checkpoint(cfg: DictConfig) -> str | None:
    return newest_checkpoint(Path(cfg.paths.checkpoint_dir).glob("*.ckpt"))


def _failure(cfg: DictConfig, overrides: list[str], error: Exception) -> RunSummary:
    message = command_error_message(error) or " ".join(f"{type(error).__name__}: {error}".split())
    try:
        seq_len = read_length("seq_len", OmegaConf.select(cfg, "data.seq_len"))
    except ValueError:  # possibly the reason for the failure
        seq_len = None
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    return RunSummary(overrides=overrides, status="failed", message=message, seq_len=seq_len, batch_size=batch_size)
