"""Tests of the documentation: its code runs, its imports exist, and its messages are those of the code."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import datasets
import pytest
from lightning.pytorch import Trainer
from support.benchmark_modules import ROOT, benchmark_modules
from support.markers.slow import slow_if
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from lightning_memo import MemoStrategy
from lightning_memo.estimate.command import main as estimate_command

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def test_the_quick_start_runs(own_folder: None) -> None:
    found = blocks(DOCS / "quick_start.md")
    assert len(found) >= 5
    names: dict[str, object] = {"__name__": "quick_start"}
    for number, block in enumerate(found):
        exec(compile(block, f"quick_start.md, block {number}", "exec"), names)
    assert Path("plan.json").is_file()


@pytest.mark.slow
def test_finetuning_code_on_the_page_runs(own_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a model and documents of the examples, and rows of 128 tokens, twice the length that the model supports."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("cache").absolute())
    tiny = importlib.import_module("tiny")
    Path(tiny.save_model(Path())).rename("my-model")
    words = {str(number): 1 + number for number in range(256)} | {"[UNK]": 257, "[EOS]": 256, "-": 0}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]").save_pretrained("my-model")
    tiny.write_documents(Path())
    Path("corpus").mkdir()
    tiny.write_documents(Path("corpus"), 120)
    names: dict[str, Any] = {"Trainer": Trainer, "MemoStrategy": MemoStrategy}
    short = {"131072": "128", "max_steps=1000": "max_steps=3"}
    for block in (block for block in blocks(DOCS / "finetuning.md") if "DocumentsDataModule" in block):
        for written, small in (short | {"val_check_interval=100": "val_check_interval=3"}).items():
            block = block.replace(written, small)
        exec(block, names)
        assert names["documents"].train_sequences > 3


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_imports_on_the_pages_exist(page: Path) -> None:
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert not [name.name for name in node.names if not hasattr(module, name.name)]


def test_the_readme_states_the_measured_memory_by_length() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "memory_by_length.json").read_text())
    peaks = {row["method"]: row["peak_bytes"] for row in report["results"] if row["tokens"] == 8192}
    del peaks["gradient checkpointing"]  # described in words
    text = (ROOT / "README.md").read_text()
    assert len(peaks) == 3
    assert not [name for name, peak in peaks.items() if f"{peak / 2**20:,.0f} MiB" not in text]


def test_the_page_states_the_losses_of_rounded_training() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "quantised_training.json").read_text())["runs"]
    text = " ".join((DOCS / "parallelism.md").read_text().split())
    names = list(runs)
    assert names == ["none", "int8", "int4"]
    exact = [run["validation_loss"] for run in runs[names[0]].values()]
    numbers = {6: "six"}
    assert f"With {numbers.get(len(exact), len(exact))} seeds" in text
    assert f"from {min(exact):.2f} to {max(exact):.2f}" in text
    for name in names[1:]:
        for loss in (lambda run: fmean(run["losses"][-50:]), lambda run: run["validation_loss"]):
            percent = [100 * (loss(run) / loss(runs[names[0]][seed]) - 1) for seed, run in runs[name].items()]
            mean, error = fmean(percent), stdev(percent) / len(percent) ** 0.5
            assert re.search(re.escape(f"{mean:+.1f} % (± {error:.1f} %") + r"[,)]", text), (name, mean, error)


def test_the_page_states_how_much_rounding_changes() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "quantised_training.json").read_text())
    exact = report["runs"]["none"]["42"]["validation_loss"]
    changes = [abs(run["validation_loss"] / exact - 1) for run in report["controls"].values()]
    assert f"changes the validation loss by up to {100 * max(changes):.1f} %" in (DOCS / "parallelism.md").read_text()


def test_the_package_is_installed_from_files() -> None:
    """It is on no index yet."""
    files = [ROOT / "README.md", *PAGES, *(ROOT / "examples").iterdir()]
    by_name = re.compile(r"""pip install[^\n]*["' ]lightning[-_]memo(\[|["'`\s])""")
    assert not [path.name for path in files if by_name.search(path.read_text())]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_files_in_the_root_exist(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def estimates() -> list[str]:
    """Returns the estimate commands in the README and docs/estimate.md, except those with a placeholder."""
    text = (ROOT / "README.md").read_text() + (DOCS / "estimate.md").read_text()
    found = re.findall(r"^python -m lightning_memo\.estimate (model.*)$", text, re.MULTILINE)
    return sorted({command for command in found if "FOLDER" not in command})


@slow_if(lambda arguments: arguments not in estimates()[::2])
@pytest.mark.parametrize("arguments", estimates())
def test_commands_for_estimates(in_process: Callable[..., tuple[int, str, str]], arguments: str) -> None:
    status, out, err = in_process(estimate_command, *arguments.split())
    assert status == 0, err
    assert "MFU" in out or "mfu" in out


def literals() -> list[str]:
    """Returns the string literals of the code, with a NUL character for each value that is filled in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"

    files = (ROOT / "lightning_memo").rglob("*.py")
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return [text(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]


@pytest.mark.slow
def test_messages_of_troubleshooting_are_in_the_code() -> None:
    entries = re.findall(r'\*\*"(.+?)"\*\*', (DOCS / "troubleshooting.md").read_text(), re.DOTALL)
    said = "\n".join(literals())
    unknown = []
    for entry in entries:
        pieces = [re.escape(piece) for piece in re.sub(r"\s+", " ", entry).split("...") if piece]
        if not re.search(r"[^\n]*".join(pieces), said):
            unknown.append(entry)
    assert not unknown
    assert len(entries) > 90


def test_entries_of_troubleshooting_have_anchors_of_their_own() -> None:
    headings = re.findall(r"^### .*$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    anchors = [re.search(r" \{#([a-z0-9-]+)\}$", heading) for heading in headings]
    assert not [heading for heading, anchor in zip(headings, anchors, strict=True) if anchor is None]
    assert len({anchor[1] for anchor in anchors if anchor is not None}) == len(headings) > 50


@pytest.mark.slow
@pytest.mark.parametrize("program", ["choosing", "what_fits"])
def test_tables_of_estimates_match_the_estimates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--check"])
    with benchmark_modules():
        status = importlib.import_module(program).main()
    assert status == 0, capsys.readouterr().err


def test_rows_of_what_fits_are_those_of_the_estimate() -> None:
    """A slow test compares all rows."""
    page = (DOCS / "what_fits.md").read_text()
    with benchmark_modules():
        what_fits = importlib.import_module("what_fits")
        cells = [what_fits.cell("l4", "llama3_8b", 1, kind) for kind in what_fits.KINDS]
    assert cells[2] is None
    assert f"| L4<br>22.0 GiB | {cells[0]} | {cells[1]} | - |" in page


def test_every_picture_has_a_source_and_is_shown() -> None:
    with benchmark_modules():
        made = set(importlib.import_module("pictures")._PICTURES)
    there = {path.name for path in (DOCS / "images").iterdir()}
    assert {name for name in there if not name.startswith("performance-")} == made | {
        "alpha.svg",
        "memory_by_length.png",  # by benchmarks/memory_by_length.py
        "quantised_training.png",  # by benchmarks/quantised_training.py
        "schedule.png",  # by benchmarks/simulated_schedule.py
        "stages.svg",
        "streams.svg",
    }
    pages = "".join(page.read_text() for page in PAGES)
    assert not [name for name in there if f"images/{name})" not in pages]
