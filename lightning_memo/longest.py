"""Command line ``python -m lightning_memo.longest [overrides]``: searches for the longest sequence that trains."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from lightning_memo.cli.processes import finish_imports, prepare_process

    prepare_process()

from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console

from lightning_memo.cli.build_run import build_strategy, check_precision, module_settings, trainer_settings
from lightning_memo.cli.hydra_command import config_dir, run_command
from lightning_memo.models import CausalLM, ModelConfig, load_hf_config
from lightning_memo.strategy import MemoStrategy
from lightning_memo.trials.training_trial import RandomTokens
from lightning_memo.utils.units import read_length


def search_longest(cfg: DictConfig) -> int:
    """Runs the configured search, and returns the number of tokens of the longest sequence.

    Args:
        cfg: Composed configuration, see ``conf/longest.yaml``.

    Raises:
        ValueError: A setting is not allowed, or not even the shortest length fits.
    """
    check_precision(cfg.trainer.precision)
    strategy = build_strategy(cfg.strategy)
    if not isinstance(strategy, MemoStrategy):
        raise ValueError(
            f"strategy={cfg.strategy.name}: the search needs MemoStrategy; give strategy=memo or "
            "strategy=full_recompute"
        )
    settings = module_settings(cfg)
    vocabulary = load_hf_config(ModelConfig(**settings["model"])).get_text_config().vocab_size
    tokens = strategy.max_sequence_length(
        CausalLM(**settings),
        RandomTokens(vocabulary=vocabulary, batch_size=cfg.batch_size),
        low=cfg.low,
        high=cfg.high,
        multiple_of=cfg.multiple_of,
        steps_per_trial=cfg.steps_per_trial,
        results=Path(cfg.results),
        resume=cfg.resume,
        **trainer_settings(cfg),
    )
    found = f"longest sequence: {tokens:,} tokens"
    if tokens + read_length("multiple_of", cfg.multiple_of) > read_length("high", cfg.high):
        found = (
            f"longest sequence: at least {tokens:,} tokens, the most that high={cfg.high} allows; for more, raise high"
        )
    Console().print(f"{found} ({cfg.results})", highlight=False, soft_wrap=True)
    return tokens


def main() -> None:
    """Runs the search. A user's mistake ends it with one line on stderr and exit status 2."""

    def task(cfg: DictConfig) -> None:
        search_longest(cfg)

    run_command(lambda: hydra.main(version_base="1.3", config_path=config_dir(), config_name="longest")(task)())


if __name__ == "__main__":
    finish_imports()
    main()
