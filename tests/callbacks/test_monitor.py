"""Metrics of speed and memory, and the report of a run."""

from __future__ import annotations

import base64
import csv
import html
import io
import re
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import rich
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from rich.table import Table
from support.trainer_harness import LanguageModel, batches, make_trainer

from lightning_memo import MemoStrategy
from lightning_memo.callbacks import Monitor, ScheduleRecorder, StepProgressBar, WriteReport, monitor
from lightning_memo.callbacks.monitor import shape_of_module
from lightning_memo.engine import TestMode
from lightning_memo.reports.run_page import RunReport, curve_svg

ROWS, TOKENS, VOCABULARY = 2, 32, 96
PEAK = 1e12


class Noted(Callback):
    """Collects the metrics that were logged after each step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(folder: Path, *callbacks: Callback, steps: int = 4, **settings: Any) -> Any:
    strategy = MemoStrategy(alpha=0.5)
    trainer = make_trainer(
        strategy, max_steps=steps, default_root_dir=str(folder), callbacks=list(callbacks), log_every_n_steps=2,
        **settings,
    )  # fmt: skip
    module = LanguageModel("llama")
    trainer.fit(module, data(steps * settings.get("accumulate_grad_batches", 1)))
    return trainer, module


def data(count: int) -> Any:
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return batches([{"input_ids": ids, "labels": ids}] * count)


# ---- what is logged


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 3])
def test_rates_agree_with_each_other_and_with_the_model(tmp_path: Path, accumulated: int) -> None:
    noted = Noted()
    trainer, module = train(tmp_path, Monitor(PEAK), noted, accumulate_grad_batches=accumulated)
    after = noted.metrics[-1]
    tokens = ROWS * TOKENS * accumulated
    assert after["throughput/tokens_per_second"] * after["throughput/step_seconds"] == pytest.approx(tokens)
    shape = shape_of_module(module)
    assert shape is not None
    flops = ROWS * accumulated * shape.model_flops(TOKENS)
    rate = PEAK * after["throughput/step_seconds"] / 100
    assert after["throughput/mfu"] * rate == pytest.approx(flops)
    again = 0.5 * ROWS * accumulated * shape.recomputed_flops(TOKENS)
    assert after["throughput/hfu"] * rate == pytest.approx(flops + again)
    swap = trainer.strategy.plan.swap
    assert after["memo/alpha"] == 0.5
    assert after["memo/swapped_bytes"] == swap.host_bytes
    assert after["memo/recomputed_bytes"] == pytest.approx(sum(trainer.strategy.plan.costs.other_bytes) / 2, rel=1e-6)
    assert after["host/peak_bytes"] > 2**26


@pytest.mark.slow
def test_loggers_get_the_metrics_every_n_steps(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="", version="")
    train(tmp_path, Monitor(PEAK), logger=logger)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/mfu"]]
    assert [(row["step"], row["memo/alpha"]) for row in rows] == [
        ("1", "0.5"),
        ("3", "0.5"),
    ]  # Lightning counts steps from 0


@pytest.mark.slow
def test_stalls_are_the_waits_of_the_schedule(tmp_path: Path) -> None:
    """Delayed copies make the computation wait; with a plan that copies nothing, it never waits."""
    noted, recorded = Noted(), ScheduleRecorder(step=2)
    delays = TestMode(seed=1, longest_delay_seconds=0.02)
    settings = {"default_root_dir": str(tmp_path), "log_every_n_steps": 1}
    strategy = MemoStrategy(alpha=1.0, test_mode=delays)
    make_trainer(strategy, callbacks=[recorded, Monitor(), noted], **settings).fit(LanguageModel("llama"), data(4))
    assert recorded.timeline is not None
    waited = sum(recorded.timeline.waited_seconds.values())
    assert waited > 0
    stalls = [metrics["memo/stall_seconds"] for metrics in noted.metrics]
    assert stalls[2] == pytest.approx(waited, abs=1e-7)
    assert min(stalls) > 0 and len(stalls) == 4
    make_trainer(MemoStrategy(), callbacks=[Monitor(), noted], **settings).fit(LanguageModel("llama"), data(4))
    assert noted.metrics[-1]["memo/stall_seconds"] == 0


def test_weights_without_gradient_take_a_third_less() -> None:
    module = LanguageModel("llama")
    shape = shape_of_module(module)
    assert shape is not None
    attention = 3 * shape.layers * shape.attention_flops(TOKENS)
    whole, frozen = (shape.model_flops(TOKENS, trained) - attention for trained in (1.0, 0.0))
    assert frozen == pytest.approx(whole * 2 / 3)


@pytest.mark.slow
def test_without_a_known_model_or_device_there_is_no_utilisation(tmp_path: Path) -> None:
    noted = Noted()
    train(tmp_path, Monitor(), noted)  # Lightning's table has no CPU
    assert not any("mfu" in name for name in noted.metrics[-1])
    assert shape_of_module(LanguageModel("block_dropout")) is None


@pytest.mark.parametrize("peak", [0, -1.0, float("nan")])
def test_a_peak_has_to_be_above_zero(peak: float) -> None:
    with pytest.raises(ValueError, match=r"peak_flops=.*: give FLOP/s of a device, above 0"):
        Monitor(peak)


# ---- the bar


@pytest.fixture
def rich_console() -> Iterator[None]:
    """Restores the process's console, which Lightning's bar changes."""
    yield
    rich.reconfigure()


class Logging(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True)
        return loss


@pytest.mark.slow
@pytest.mark.usefixtures("rich_console")
@pytest.mark.parametrize("width", [120, 60])
@pytest.mark.parametrize("steps", [3, -1])
def test_the_bar_tells_steps_and_what_is_monitored(width: int, steps: int, tmp_path: Path) -> None:
    out = io.StringIO()
    bar = StepProgressBar(console_kwargs={"file": out, "width": width, "force_terminal": True, "color_system": None})
    trainer = make_trainer(
        MemoStrategy(alpha=0.5), callbacks=[Monitor(), bar], max_steps=steps, max_epochs=2,
        enable_progress_bar=True, default_root_dir=str(tmp_path), log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Logging("llama"), data(2))
    lines = [line for line in re.split(r"[\r\n]+|\x1b\[[0-9;?]*[A-Za-z]", out.getvalue()) if line.strip()]
    start = max(n for n, line in enumerate(lines) if line.startswith(("Step", "Epoch")))
    shown = " ".join(" ".join(lines[start:]).split())
    assert max(map(len, lines)) <= width
    first, done = ("Step", "3/3") if steps == 3 else ("Epoch 1/1", "2/2")
    assert shown.startswith(first) and done in shown
    for name in ("train_loss: ", "tokens/s: ", "alpha: 0.50", "host peak: "):
        assert name in shown, shown


@pytest.mark.slow
@pytest.mark.usefixtures("rich_console")
def test_without_a_terminal_there_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_LINE_SECONDS", 0.0)
    out = io.StringIO()
    trainer = make_trainer(
        MemoStrategy(alpha=0.5), max_steps=3, enable_progress_bar=True, log_every_n_steps=1,
        callbacks=[Monitor(), StepProgressBar(console_kwargs={"file": out})], default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(Logging("llama"), data(3))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in lines] == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]
    assert re.fullmatch(
        r"step 3 of 3: train_loss \d\.\d{3}, tokens/s [\d,]+, alpha 0\.50, host peak [\d.]+ \wiB", lines[-1]
    )


# ---- the page


class Page(HTMLParser):
    """The words of a page, and the files that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.slow
def test_a_run_ends_with_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    train(tmp_path, Monitor(PEAK), WriteReport())
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags
    assert all(source.startswith("data:image/") for source in page.loaded)
    pictures = [base64.b64decode(source.partition("base64,")[2]) for source in page.loaded]
    assert pictures and all(picture.startswith((b"<?xml", b"\x89PNG")) for picture in pictures)
    shown = "".join(page.words)
    assert "4 steps" in shown and "alpha=0.5" in shown and "LanguageModel" in shown
    assert re.search(r"tokens per second, median\s*[\d,]+", shown)
    assert "default-src 'none'" in text


@pytest.mark.slow
def test_the_page_shows_the_schedule_or_says_why_not(tmp_path: Path) -> None:
    def shown(folder: Path, strategy: MemoStrategy, steps: int) -> tuple[bool, str]:
        settings = {"max_steps": steps, "default_root_dir": str(folder)}
        callbacks = [ScheduleRecorder(step=None), WriteReport()]
        make_trainer(strategy, callbacks=callbacks, **settings).fit(LanguageModel("llama"), data(steps))
        text = (folder / "report.html").read_text()
        return 'alt="Schedule' in text, "".join(Page(text).words)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ScheduleRecorder")
        drawn, words = shown(tmp_path / "short", MemoStrategy(alpha=0.5), 3)
        assert drawn and re.search("Memory map: .*: plan_memory is off", words)
        drawn, words = shown(tmp_path / "one", MemoStrategy(alpha=0.5, plan_memory=True), 1)
        assert not drawn and re.search("Schedule: .*: no step was recorded", words)
        assert re.search("Memory map: .*: training ended before memory was planned", words)
        drawn, words = shown(tmp_path / "plain", MemoStrategy(), 3)
        assert not drawn and re.search("Schedule: .*: nothing was swapped or recomputed", words)


@pytest.mark.slow
def test_validation_counts_where_it_was(tmp_path: Path) -> None:
    report = WriteReport()

    class Validated(LanguageModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    trainer = make_trainer(
        MemoStrategy(alpha=0.5), max_steps=6, default_root_dir=str(tmp_path), callbacks=[report],
        log_every_n_steps=1, val_check_interval=3, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(Validated("llama"), data(6), data(1))
    steps = {name: [step for step, _ in points] for name, points in report._history.items()}
    assert steps == {"train_loss": [1, 2, 3, 4, 5, 6], "val_loss": [3, 6]}
    assert report._history["val_loss"][-1][1] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert "last val_loss" in (tmp_path / "report.html").read_text()


def test_names_are_shown_and_never_run(tmp_path: Path) -> None:
    table = Table(title="</pre><script>alert(1)</script>")
    table.add_column("$title & <b>")
    report = RunReport(title="<script>", facts={"<i>": '"&$facts'}, tables=[table], links={"<u>": '"><script>'})
    report.save(tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert not {"script", "i", "b", "u"} & set(page.tags)
    assert '"&$facts' in "".join(page.words)


@pytest.mark.parametrize("name", [r"$\frac{$loss", "$x$", r"\$5$", "a $ b", r"$\undefined$"])
def test_names_of_metrics_are_no_formulas(name):
    drawn = curve_svg(name, {name: [(1, 2.0), (2, 1.0)], "other": [(1, 2.0)]})
    text = html.escape(name, quote=False)
    assert drawn.count(f"<!-- {text} -->") == 2, "the title, and the line in the legend"


def test_curves_have_gaps_where_there_is_no_number() -> None:
    drawn = curve_svg("Loss", {"train": [(1, 2.0), (2, float("nan")), (3, 1.0)], "empty": []})
    assert drawn.startswith("<?xml") and "train" not in drawn[:100]
