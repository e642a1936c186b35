"""One run of the training command: alone, or as a job of a sweep, which may have been interrupted before."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_memo.assemble import build_trainer, count_processes, newest_checkpoint
from lightning_memo.cli import exit_for_user, user_message
from lightning_memo.compare import quiet
from lightning_memo.launch import is_first_process, let_the_first_speak, started_processes
from lightning_memo.summary import RunSummary
from lightning_memo.sweeps.folder import finished
from lightning_memo.sweeps.processes import is_apart, run_apart

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
        summary = replace(run_of_sweep(cfg, output_dir, train) if sweep else train(cfg), overrides=overrides)
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
        raise
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    if is_first_process():
        summary.save(output_dir)
    return summary


def run_of_sweep(cfg: DictConfig, folder: Path, train: Train) -> RunSummary:
    """Runs one job of a sweep, or what is left of it.

    A job that came to its end before is not run again. Others go on from their newest checkpoint. One that needs
    several processes gets them, unless a launcher has started them already.

    Args:
        cfg: Of the job.
        folder: That it has to itself.
        train: What trains.

    Raises:
        ValueError: A setting is not allowed, or data or a checkpoint is missing.
        JobFailed: It failed in processes of its own.
    """
    done = finished(folder)
    if done is not None:
        log.info("finished before: %s", folder)
        return done
    own = newest_checkpoint(Path(cfg.paths.checkpoint_dir).glob("*.ckpt"))
    if own is not None:
        log.info("goes on from %s", own)
        cfg = OmegaConf.merge(cfg, {"ckpt_path": own})
    with quiet():
        processes = count_processes(build_trainer(cfg))
    return run_apart(cfg, folder) if processes > 1 and started_processes() is None else train(cfg)


def _failure(cfg: DictConfig, overrides: list[str], error: Exception) -> RunSummary:
    message = user_message(error) or " ".join(f"{type(error).__name__}: {error}".split())
    sizes: dict[str, Any] = {name: OmegaConf.select(cfg, f"data.{name}") for name in ("seq_len", "batch_size")}
    return RunSummary(overrides=overrides, status="failed", message=message, **sizes)
