"""Command line ``python -m lightning_memo.train [overrides]``: one training run, or a sweep with ``-m``."""

if __name__ == "__main__":  # before the imports that take seconds
    from lightning_memo.cli.processes import finish_imports, prepare_process

    prepare_process()

import gc
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from rich.console import Console

from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.cli.build_run import (
    build_trainer,
    check_data,
    count_processes,
    module_settings,
    trainer_settings,
)
from lightning_memo.cli.hydra_command import config_dir, run_command, settings_of
from lightning_memo.cli.processes import arguments_of_process, ending_together
from lightning_memo.cli.run_folder import RunSummary
from lightning_memo.cli.step_stats import StepStats, measure_baselines
from lightning_memo.cli.training_job import EarlierMetrics, is_separate_job, run_training_job
from lightning_memo.data import SequenceDataModule
from lightning_memo.models import CausalLM, ModelConfig, check_vocabulary, load_hf_config
from lightning_memo.reports.tables import Measurement, MemoryUse, comparison_table, memory_table
from lightning_memo.utils.files import WriteError
from lightning_memo.utils.process import is_rank_zero


@dataclass(frozen=True)
class Fitted:
    """Results of a finished training run."""

    stats: StepStats
    processes: int
    val_loss: float | None
    step_memory_bytes: int | None
    alpha: float | None = None
    """Fraction of the tokens whose activations were swapped, or None if all stayed on the device."""
    host_bytes: int = 0
    disk_bytes: int = 0
    memory: MemoryUse | None = None
    """How the requests for memory were served, or None if memory was not planned."""


def train(cfg: DictConfig) -> RunSummary:
    """Trains as configured, prints the results and returns them.

    Args:
        cfg: Composed configuration, see ``conf/train.yaml``.

    Raises:
        ValueError: A setting is not allowed, or data or a checkpoint is missing.
    """
    logging.captureWarnings(True)  # Hydra writes what is logged to train.log
    # Batches are views of text in memory, so worker processes have no benefit.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # caused by Lightning's use of torch
    if not is_rank_zero():
        warnings.simplefilter("ignore")  # rank zero gives the same warnings
    seed_everything(cfg.seed, verbose=False)
    model = ModelConfig(**module_settings(cfg)["model"])
    load_hf_config(model)  # fails before the text is read
    data: SequenceDataModule = instantiate(cfg.data)
    with settings_of("data"):
        data.check_model(model.folder)
        data.setup()
    fitted = train_model(cfg, data)
    stats = fitted.stats
    summary = RunSummary(
        overrides=[],
        status="ok",
        processes=fitted.processes,
        seq_len=data.seq_len,
        batch_size=data.batch_size,
        alpha=fitted.alpha,
        step_seconds=stats.step_seconds,
        tokens_per_second=stats.tokens_per_second,
        step_memory_bytes=fitted.step_memory_bytes,
        host_bytes=fitted.host_bytes,
        disk_bytes=fitted.disk_bytes,
        arena_bytes=None if fitted.memory is None else fitted.memory.arena_bytes,
        train_loss=stats.train_loss,
        val_loss=fitted.val_loss,
        unigram_entropy=data.unigram_entropy,
    )
    rows = compare(cfg, data, fitted) if cfg.compare else []
    if is_rank_zero():
        print_results(summary, rows, fitted.memory)
    return summary


def train_model(cfg: DictConfig, data: SequenceDataModule) -> Fitted:
    """Trains, and reads the plan of the strategy, if there is one.

    Raises:
        ValueError: A setting is not allowed.
    """
    ckpt_path = cfg.ckpt_path
    resumes = ckpt_path is not None and Path(ckpt_path).is_relative_to(Path(cfg.paths.output_dir).resolve())
    settings = module_settings(cfg)
    with settings_of("data"):
        check_vocabulary(ModelConfig(**settings["model"]), data.vocab_size)
    stats, earlier = StepStats(goes_on=resumes), EarlierMetrics()
    trainer = build_trainer(cfg, stats, earlier)
    processes = count_processes(trainer)
    check_data(data, trainer)
    if resumes:
        earlier.read(trainer.loggers)
        warnings.filterwarnings("ignore", message="(Experiment logs|Checkpoint) directory")
    else:
        for logger in trainer.loggers:
            logger.log_metrics({"unigram_entropy": data.unigram_entropy}, step=0)
    with ending_together(trainer.strategy.launcher, with_parent=is_separate_job()):
        trainer.fit(CausalLM(**settings), datamodule=data, ckpt_path=ckpt_path)
    data.trainer = None  # releases the model, because the comparison needs the memory
    val_loss = trainer.callback_metrics.get("val_loss", earlier.last.get("val_loss"))
    fitted = Fitted(
        stats,
        processes,
        None if val_loss is None else float(val_loss),
        stats.step_memory_bytes,
        memory=getattr(getattr(trainer.strategy, "memory", None), "use", None),
    )
    plan: Plan | None = getattr(trainer.strategy, "plan", None)
    if plan is None:
        return fitted
    return fitted if plan.swap.plain else _with_swap(fitted, plan.swap)


def _with_swap(fitted: Fitted, swap: SwapPlan) -> Fitted:
    # The measured peak of a step excludes the two rounding buffers, which stay on the device between steps.
    peak = fitted.step_memory_bytes
    return replace(
        fitted,
        step_memory_bytes=None if peak is None else peak + swap.memory.buffer_bytes,
        alpha=swap.alpha,
        host_bytes=swap.host_bytes,
        disk_bytes=swap.disk_bytes,
    )


def compare(cfg: DictConfig, data: SequenceDataModule, fitted: Fitted) -> list[Measurement]:
    """Returns rows for plain training, full recomputation and the run, or no rows with several processes."""
    if fitted.processes > 1:
        rank_zero_warn(
            f"compare=true needs a run in one process, but this run has {fitted.processes}: the comparison is left out."
        )
        return []
    gc.collect()
    batch = next(iter(data.train_dataloader()))
    rows = measure_baselines(module_settings(cfg), batch, trainer_settings(cfg), cfg.compare_steps, cfg.seed)
    name = "this run" if fitted.alpha is None else f"this run, alpha {fitted.alpha:.2f}"
    own = fitted.stats.measurement(name, fitted.step_memory_bytes, fitted.host_bytes)
    return rows if own is None else [*rows, own]


def print_results(summary: RunSummary, rows: list[Measurement], memory: MemoryUse | None) -> None:
    """Prints the memory table, the comparison and the losses, with the unigram entropy of the text."""
    console = Console()
    if memory is not None:
        console.print(memory_table(memory))
    if rows:
        console.print(comparison_table(rows))
    losses = {"train loss": summary.train_loss, "validation loss": summary.val_loss}
    parts = [f"{name} {value:.3f}" for name, value in losses.items() if value is not None]
    console.print(
        ", ".join([*parts, f"unigram entropy of the text {summary.unigram_entropy:.3f}"]) + " (nats per token)",
        highlight=False,
        soft_wrap=True,
    )


def task(cfg: DictConfig) -> None:
    """The task of Hydra: a single run, or each job of a sweep."""
    summary = run_training_job(cfg, train)
    if is_separate_job() and summary.status == "failed":
        raise SystemExit(1)


def _root_of_runs(arguments: Sequence[str]) -> Path:
    """The folder of all runs, to which Hydra writes their settings. Errors of full disks do not name files."""
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    with hydra.initialize_config_dir(config_dir(), version_base="1.3"):
        return Path(hydra.compose("train", overrides).paths.root).absolute()


def main() -> None:
    """Runs one job, or a sweep. A sweep with failed jobs ends with status 1 after its report.

    After SIGTERM the exit status is 143, as in shells; Lightning's status would be 0. After an interrupt it is 130;
    Lightning's status would be 1.
    """

    def command() -> None:
        sys.argv[1:] = arguments_of_process(sys.argv[1:])
        try:
            hydra.main(version_base="1.3", config_path=config_dir(), config_name="train")(task)()
        except OSError as error:  # the job reports errors of the run itself
            if isinstance(error, (HydraException, BrokenPipeError)):
                raise
            path = Path(error.filename) if error.filename else _root_of_runs(sys.argv[1:])
            raise ValueError(f"{WriteError.of(path, error)} as paths.root=FOLDER") from error

    try:
        run_command(command)
    except SIGTERMException:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


if __name__ == "__main__":
    # Launchers such as submitit pickle the task, so that its functions must be importable by the module's real name.
    from lightning_memo.train import main as _main

    finish_imports()
    _main()
