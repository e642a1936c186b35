"""One run of the training command: alone, or as a job of a sweep, which may have been interrupted before."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.hydra_command import exit_for_user, user_message
from lightning_memo.cli.launch import is_first_process, let_the_first_speak, started_processes, told_by_the_first
from lightning_memo.cli.restarts import Launch
from lightning_memo.cli.run_summary import RunSummary
from lightning_memo.cli.runs.assemble import build_trainer, count_processes, find_checkpoint, newest_checkpoint
from lightning_memo.cli.runs.compare import quiet
from lightning_memo.cli.sweeps.job_processes import is_apart, run_apart
from lightning_memo.cli.sweeps.sweep_folder import finished
from lightning_memo.utils.units import read_length

log = logging.getLogger(__name__)

Train = Callable[[DictConfig], RunSummary]


def run_job(cfg: DictConfig, train: Train) -> RunSummary:
    """Trains and writes the summary. Within a sweep a failed job has one too, and the other jobs go on.

    Of several processes, the first one writes.

    Args:
        cfg: The composed configuration.
        train: What trains.
    """
    job = HydraConfig.get()
    output_dir = Path(job.runtime.output_dir)
    overrides = [override for override in job.overrides.task if not override.startswith("sweep=")]
    sweep = job.mode is RunMode.MULTIRUN
    try:
        if not sweep and len(overrides) < len(job.overrides.task):
            raise ValueError("sweep=...: give -m as well; a single run is resumed by ckpt_path=last")
        summary = replace(run_what_is_left(cfg, output_dir, overrides, train), overrides=overrides)
    except Exception as error:
        if not (sweep or is_apart()):
            exit_for_user(error)
            raise
        let_the_first_speak()
        summary = _failure(cfg, overrides, error)
        log.error("job failed: %s", summary.message, exc_info=error if user_message(error) is None else None)
    except BaseException:
        if sweep:
            log.warning("interrupted; the same command with sweep=%s goes on", output_dir.parent.name)
        elif (newest := _own_checkpoint(cfg)) is not None and is_first_process():
            log.warning("interrupted; the same command with ckpt_path=last goes on from %s", newest)
        raise
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    if is_first_process():
        summary.save(output_dir)
    return summary


def run_what_is_left(cfg: DictConfig, folder: Path, overrides: list[str], train: Train) -> RunSummary:
    """Runs a job, or what an earlier start of it has left.

    A job that came to its end before is not run again. Others go on from their newest checkpoint. A job of a sweep that
    needs several processes gets them, unless a launcher has started them already.

    Args:
        cfg: Of the job.
        folder: That it has to itself.
        overrides: What the command line changes.
        train: What trains.

    Raises:
        ValueError: A setting is not allowed, or data or a checkpoint is missing.
        JobFailed: It failed in processes of its own.
    """
    sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    done, checkpoint = told_by_the_first(lambda: _left_behind(cfg, folder, None if sweep else Launch.here(overrides)))
    if done is not None:
        log.info("finished before: %s", folder)
        return done
    cfg = OmegaConf.merge(cfg, {"ckpt_path": checkpoint})
    if sweep and started_processes() is None:
        with quiet():
            processes = count_processes(build_trainer(cfg))
        if processes > 1:
            return run_apart(cfg, folder)
    return train(cfg)


def _left_behind(cfg: DictConfig, folder: Path, launch: Launch | None) -> tuple[RunSummary | None, str | None]:
    """The summary of a job that came to its end before; the checkpoint from which it starts or goes on.

    What a folder holds counts in a sweep, whose folders go by number, and where a launch is started again.
    """
    own = launch is None and HydraConfig.get().mode is RunMode.MULTIRUN
    if launch is not None:
        own = launch.goes_on_in(folder)
        if is_first_process():
            launch.save(folder)
    done = finished(folder) if own else None
    newest = _own_checkpoint(cfg) if own else None
    if newest is not None:
        log.info("goes on from %s", newest)
    return done, newest or find_checkpoint(cfg)


def _own_checkpoint(cfg: DictConfig) -> str | None:
    return newest_checkpoint(Path(cfg.paths.checkpoint_dir).glob("*.ckpt"))


def _failure(cfg: DictConfig, overrides: list[str], error: Exception) -> RunSummary:
    message = user_message(error) or " ".join(f"{type(error).__name__}: {error}".split())
    try:
        seq_len = read_length("seq_len", OmegaConf.select(cfg, "data.seq_len"))
    except ValueError:  # which may be why it failed
        seq_len = None
    batch_size = OmegaConf.select(cfg, "data.batch_size")
    return RunSummary(overrides=overrides, status="failed", message=message, seq_len=seq_len, batch_size=batch_size)
