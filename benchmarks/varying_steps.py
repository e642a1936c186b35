"""Measures where planned memory serves the requests of steps that differ from each other.

    python benchmarks/varying_steps.py
    python benchmarks/varying_steps.py --quick

A Llama with random weights trains on one row per step, on a CPU. The documents that are packed into a row differ from
step to step, or the length of the row, or both. Lengths are at most that of the first row: a longer one is profiled and
planned anew. The requests of all steps that were served by a plan are counted. The results are printed and written to a
JSON file.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from circumstances import circumstances, save_report
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.allocator import AllocatorStats
from lightning_memo.runtime import memory_planner

_RESULTS = Path(__file__).parent / "results"
_VOCABULARY = 96
_SETTINGS: dict[str, dict[str, Any]] = {
    "two slices": {"alpha": 0.5},
    "slices": {"alpha": 0.5, "slice_tokens": 64},
    "plain": {"alpha": "auto"},
}


@dataclass(frozen=True)
class Rows:
    """Kinds of rows.

    Attributes:
        name: Name in the table.
        packed: Whether a row has several documents.
        length: Draws the length of a row that has at most the given number of tokens.
    """

    name: str
    packed: bool
    length: Callable[[random.Random, int], int]

    def batches(self, count: int, longest: int) -> Iterator[dict[str, Tensor]]:
        rng, generator = random.Random(0), torch.Generator().manual_seed(0)
        for number in range(count):
            tokens = longest if number == 0 else self.length(rng, longest)
            ids = torch.randint(0, _VOCABULARY, (1, tokens), generator=generator)
            positions = {"position_ids": _positions(rng, tokens, longest)} if self.packed else {}
            yield {"input_ids": ids, "labels": ids.clone()} | positions


def _positions(rng: random.Random, tokens: int, longest: int) -> Tensor:
    """[1, tokens] Positions of documents, of which half are short and the others at most half as long as a row."""
    documents: list[Tensor] = []
    while (left := tokens - sum(map(len, documents))) > 0:
        drawn = rng.choice([rng.randint(8, 40), rng.randint(30, longest // 2)])
        documents.append(torch.arange(min(left, drawn)))
    return torch.cat(documents)[None]


_ROWS = (
    Rows("documents", True, lambda rng, longest: longest),
    Rows("eight lengths", False, lambda rng, longest: longest // 2 + longest // 16 * rng.randint(1, 8)),
    Rows("any length", False, lambda rng, longest: rng.randint(longest // 2, longest)),
    Rows("documents, any length", True, lambda rng, longest: rng.randint(longest // 2, longest)),
)


class _Model(LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=options.hidden, intermediate_size=2 * options.hidden, num_hidden_layers=options.layers,
            num_attention_heads=4, vocab_size=_VOCABULARY, max_position_embeddings=options.tokens, use_cache=False,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class _Counters(Callback):
    """Lets no step begin while memory is planned, and notes the counters after each step."""

    def __init__(self) -> None:
        self.stats: list[AllocatorStats] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        while trainer.strategy.memory.busy:
            time.sleep(0.002)
        if trainer.strategy.memory.stats is not None:
            self.stats.append(trainer.strategy.memory.stats)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    known = circumstances(("torch", "transformers", "lightning", "lightning_memo"))
    results = []
    for rows in _ROWS:
        for name in options.settings:
            results.append({"rows": rows.name, "settings": name, **_measure(options, rows, _SETTINGS[name])})
    names = ("layers", "hidden", "tokens", "steps", "threads")
    report = {**known, "settings": {name: getattr(options, name) for name in names}, "results": results}
    path = options.output / "varying_steps.json"
    save_report(path, report)
    _show(results)
    Console().print(f"Results: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "hidden": 128, "tokens": 512, "steps": 60, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--settings", nargs="+", choices=_SETTINGS, default=list(_SETTINGS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a test")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.tokens, options.steps = 32, 128, 20
    return options


def _measure(options: argparse.Namespace, rows: Rows, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    counters = _Counters()
    batches = list(rows.batches(options.steps, options.tokens))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(memory_planner, "cache_folder", return_value=Path(folder)),
    ):
        trainer = Trainer(
            strategy=MemoStrategy(plan_memory=True, **settings), accelerator="cpu", devices=1,
            max_steps=options.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[counters], default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(_Model(options), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    # The counters begin anew with each plan.
    last = [one for one, other in pairwise(counters.stats) if other.served < one.served] + counters.stats[-1:]
    names = ("hits", "fitted", "misses", "served_bytes", "missed_bytes")
    counted = {name: sum(getattr(stats, name) for stats in last) for name in names}
    sizes = {name: counters.stats[-1].__dict__[name] for name in ("arena_bytes", "peak_live_bytes")}
    return {"steps": len(counters.stats), "plans": len(last)} | counted | sizes


def _show(results: list[dict[str, Any]]) -> None:
    table = Table(title="Requests of steps that differ")
    for column in ("rows", "settings", "steps", "in the arena", "bytes", "at planned offsets", "arena / peak in use"):
        table.add_column(column)
    for row in results:
        served = row["hits"] + row["fitted"]
        requests, size_bytes = served + row["misses"], row["served_bytes"] + row["missed_bytes"]
        table.add_row(
            row["rows"], row["settings"], str(row["steps"]), f"{served / requests:.2%}",
            f"{row['served_bytes'] / size_bytes:.2%}", f"{row['hits'] / requests:.1%}",
            f"{row['arena_bytes'] / row['peak_live_bytes']:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
