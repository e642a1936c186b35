"""Measures the overhead of MemoStrategy if there is nothing to swap: steps of its plan "plain" and of plain Lightning.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --shapes 4x64 --lengths 128 --launches 20
    python benchmarks/overhead.py --methods memo planned monitor
    python benchmarks/overhead.py --base unchecked --methods checked --turn-steps 64 --shapes 4x256 --lengths 1024

Each method trains the same model with its own `Trainer` in its own process. Once the plan is active and memory is
planned, the processes take turns: one trains briefly while the others sleep, and a round has one turn of each. A step
lasts from one `on_train_batch_start` to the next, so it includes all work of Lightning and the callbacks. The number of
a turn is the median of its steps. Ratios are computed within a round, so that a machine that slows down for a while
affects both. All processes are launched several times, each of them first in turn, because two processes that do the
same differ by some percent, depending on where their memory lies and on which one was started first. What is reported
is the mean over launches of the median over rounds, with the 95 % interval of a bootstrap over both, for the wall time
and for the time that the process ran on a core, which other programs disturb less. "again" is plain Lightning a second
time: its ratio should be 1, and its deviation shows the accuracy of the others.

"checked" and "unchecked" swap half of the tokens, with and without `check_slices`. A layer is compared with itself in
every 64th step, so a turn needs 64 steps, and its number is their mean.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import transformers
from circumstances import circumstances, save_report
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, IterableDataset

from lightning_memo import MemoStrategy
from lightning_memo.callbacks import Monitor

_RESULTS = Path(__file__).parent / "results"
_PLAIN, _METHODS = "plain", ("again", "memo", "planned", "monitor")
_CUT = ("checked", "unchecked")
_MOST_WARMUP_STEPS = 2000
_VOCABULARY = 1024
Batch = dict[str, torch.Tensor]


class Llama(LightningModule):
    """A Llama with random weights.

    Args:
        layers: Number of layers.
        hidden: Their width; heads have a width of 32.
    """

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 43 // 16, num_hidden_layers=layers, vocab_size=_VOCABULARY,
            num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, use_cache=False,
        )  # fmt: skip
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Batches(IterableDataset[Batch]):
    """Yields one batch of random tokens again and again."""

    def __init__(self, tokens: int) -> None:
        self._ids = torch.randint(0, _VOCABULARY, (1, tokens))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield {"input_ids": self._ids, "labels": self._ids}


class TakeTurns(Callback):
    """Trains on command, and reports how long a step took.

    Args:
        orders: Connection that sends "go" and receives medians: seconds, and seconds on a core. Any other word ends
            training.
        turn_seconds: Length of a turn, which has at least one step in addition to one that warms up and is not counted.
        turn_steps: Number of steps of a turn, of which the mean is reported; 0 lets `turn_seconds` decide.
    """

    def __init__(self, orders: Connection, turn_seconds: float, turn_steps: int) -> None:
        self._orders, self._turn_seconds, self._turn_steps = orders, turn_seconds, turn_steps
        self._ready = False
        self._steps: list[tuple[float, float]] = []  # of this turn, measured by `_clocks`
        self._started: tuple[float, float] | None = None

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        now = _clocks()
        if not self._ready:
            self._ready = trainer.global_step >= _MOST_WARMUP_STEPS or _settled(trainer)
            if self._ready:
                self._wait(trainer, "ready")
            return
        if self._started is not None:  # otherwise the warm-up step has just ended
            self._steps.append((now[0] - self._started[0], now[1] - self._started[1]))
        self._started = _clocks()
        if self._turn_steps and len(self._steps) >= self._turn_steps:
            self._wait(trainer, tuple(mean(column) for column in zip(*self._steps, strict=True)))
        elif not self._turn_steps and sum(seconds for seconds, _ in self._steps) >= self._turn_seconds:
            self._wait(trainer, tuple(median(column) for column in zip(*self._steps, strict=True)))

    def _wait(self, trainer: Trainer, answer: Any) -> None:
        self._orders.send(answer)
        trainer.should_stop = self._orders.recv() != "go"
        self._steps, self._started = [], None


def _clocks() -> tuple[float, float]:
    """Returns wall time, and the time that this process ran on a core, in seconds."""
    return time.perf_counter(), time.process_time()


def _settled(trainer: Trainer) -> bool:
    """Returns whether the plan and planned memory will not change any more."""
    strategy = trainer.strategy
    if trainer.global_step < 5:
        return False
    return not isinstance(strategy, MemoStrategy) or strategy.memory is None or strategy.memory.settled


def _train(method: str, shape: tuple[int, int], tokens: int, orders: Connection, options: argparse.Namespace) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    strategies = {_PLAIN: "auto", "again": "auto", "planned": MemoStrategy(plan_memory=True)}
    for cut in _CUT:
        strategies[cut] = MemoStrategy(alpha=0.5, check_slices=cut == "checked")
    callbacks: list[Callback] = [TakeTurns(orders, options.turn_seconds, options.turn_steps)]
    if method == "monitor":
        callbacks.append(Monitor())
    trainer = Trainer(
        strategy=strategies.get(method) or MemoStrategy(), accelerator="cpu", devices=1, max_steps=-1, logger=False,
        callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Llama(*shape), DataLoader(Batches(tokens), batch_size=None))
    plan = getattr(trainer.strategy, "plan", None)
    if method not in _CUT and plan is not None and not plan.swap.plain:
        raise ValueError(f"{tokens} tokens of {shape} do not fit as plain training: give smaller ones")


class Rounds:
    """The processes that train one setting with different methods, turn by turn."""

    def __init__(self, shape: tuple[int, int], tokens: int, options: argparse.Namespace, launch: int) -> None:
        # Each process has its own threads and allocator; imports are shared.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning.pytorch", "lightning_memo", "transformers"])
        methods = [options.base, *options.methods]
        first = launch % len(methods)  # a process that is started first is up to 2 % slower, so each is first at times
        self.steps: dict[str, list[tuple[float, float]]] = {m: [] for m in methods[first:] + methods[:first]}
        self._pipes, self._processes = {}, []
        for method in self.steps:
            here, there = context.Pipe()
            process = context.Process(target=_train, args=(method, shape, tokens, there, options), daemon=True)
            process.start()
            there.close()
            self._pipes[method] = here
            self._processes.append(process)
            here.recv()  # one after the other, so that no process plans while another starts

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            # The order alternates, so that no process always runs after the slowest.
            methods = list(self.steps) if number % 2 == 0 else list(self.steps)[::-1]
            for method in methods:
                self._pipes[method].send("go")
                self.steps[method].append(self._pipes[method].recv())

    def end(self) -> None:
        """Ends all processes.

        Raises:
            RuntimeError: A process ended with an error.
        """
        for pipe, process in zip(self._pipes.values(), self._processes, strict=True):
            pipe.send("end")
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a process ended with {process.exitcode}; what it wrote above says why")


def ratio(seconds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the mean over launches of the median ratio of their rounds, and its 95 % interval.

    Args:
        seconds: The times of a method, `[launches, rounds]`.
        base: Those of what it is compared with.
    """
    ratios, random = np.array(seconds) / np.array(base), np.random.default_rng(0)
    launches, rounds = ratios.shape
    launch = random.integers(launches, size=(2000, launches, 1))
    drawn = ratios[launch, random.integers(rounds, size=(2000, launches, rounds))]
    low, high = np.quantile(np.median(drawn, axis=2).mean(axis=1), (0.025, 0.975))
    return {"mean": float(np.median(ratios, axis=1).mean()), "low": float(low), "high": float(high)}


def _measure(shape: tuple[int, int], tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    launches = []
    for launch in range(options.launches):
        rounds = Rounds(shape, tokens, options, launch)
        rounds.run(options.rounds)
        rounds.end()
        launches.append({method: [*zip(*steps, strict=True)] for method, steps in rounds.steps.items()})
    sizes = {"layers": shape[0], "hidden": shape[1], "tokens": tokens}
    base, base_core = zip(*(steps[options.base] for steps in launches), strict=True)
    rows = []
    for method in (options.base, *options.methods):
        seconds, core = zip(*(steps[method] for steps in launches), strict=True)
        samples = {"seconds": seconds, "core_seconds": core}
        medians = {f"median_{name}": float(np.median(values)) for name, values in samples.items()}
        ratios = {"ratio": ratio(seconds, base), "core_ratio": ratio(core, base_core)}
        rows.append({**sizes, "method": method, **medians, **ratios, **samples})
    return rows


def _show(rows: Sequence[dict[str, Any]], base: str) -> None:
    grid = Table(box=SIMPLE_HEAD)
    ratio_of = f"x {base}"
    for name in ("model", "tokens", "method", "step", ratio_of, "95 % interval", "on a core", ratio_of, "interval"):
        grid.add_column(name, justify="left" if name in ("model", "method") else "right")
    for row in rows:
        cells = [f"{row['layers']} x {row['hidden']}", f"{row['tokens']:,}", row["method"]]
        for of, seconds in ((row["ratio"], row["median_seconds"]), (row["core_ratio"], row["median_core_seconds"])):
            cells += [f"{1000 * seconds:.2f} ms", f"{of['mean']:.4f}", f"{of['low']:.4f}-{of['high']:.4f}"]
        grid.add_row(*cells)
    Console().print(grid)


def _shape(text: str) -> tuple[int, int]:
    layers, _, hidden = text.partition("x")
    if not (layers.isdigit() and hidden.isdigit() and int(layers) >= 2 and int(hidden) >= 32 and int(hidden) % 32 == 0):
        raise argparse.ArgumentTypeError(f"{text}: give layers x hidden, like 4x256: 2 or more, a multiple of 32")
    return int(layers), int(hidden)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_shape, nargs="+", default=[(4, 64), (4, 256)], help="layers x hidden")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--methods", choices=(*_METHODS, *_CUT), nargs="+", default=list(_METHODS))
    parser.add_argument("--base", choices=(_PLAIN, *_CUT), default=_PLAIN, help="method that others are compared with")
    parser.add_argument("--launches", type=int, default=5, help="how often all processes are launched")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each method in a launch")
    parser.add_argument("--turn-seconds", type=float, default=0.25)
    parser.add_argument("--turn-steps", type=int, default=0, help="number of steps of a turn, instead of its seconds")
    parser.add_argument("--threads", type=int, default=1, help="number of compute threads")
    parser.add_argument("--output", type=Path, default=_RESULTS / "overhead.json", help="path of the JSON file")
    return parser.parse_args()


def main() -> None:
    options = _options()
    report: dict[str, Any] = circumstances(("torch", "transformers", "lightning", "lightning_memo"))
    report["settings"] = {
        name: getattr(options, name) for name in ("base", "launches", "rounds", "turn_seconds", "turn_steps", "threads")
    }
    report["results"] = rows = []
    for shape in options.shapes:
        for tokens in options.lengths:
            rows += _measure(shape, tokens, options)
            save_report(options.output, report)
    _show(rows, options.base)
    Console().print(f"Results: {options.output}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
