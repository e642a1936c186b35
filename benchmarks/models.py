"""Trains a tiny model of every type that transformers registers, at each level, and generates a page and a table.

    python benchmarks/models.py
    python benchmarks/models.py --kinds causal masked --levels "alpha 0" fractions
    python benchmarks/models.py --kinds causal --types llama bart --again
    python benchmarks/models.py --page-only
    python benchmarks/models.py --check

Each type has processes of its own. Losses and gradients are compared with those of plain training. Results are written
after each type, with the version of transformers that it was trained with, and a run continues where an earlier one
stopped; `--again` repeats what is there. The page is docs/models.md, and the table benchmarks/results/models.csv.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from circumstances import circumstances, save_report, version_of
from model_types.kinds import KINDS
from model_types.levels import LEVELS
from model_types.page import render, table
from model_types.processes import train_type
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_memo.utils.files import replacing

ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "transformers", "lightning", "lightning_memo")
Results = dict[str, dict[str, Any]]  # by kind and type


def main() -> int:
    options = _options()
    if not (options.page_only or options.check):
        _train(options, _with_versions(load(options.results)) if options.results.exists() else {})
    report = load(options.results)
    made = {options.page: render(report), options.table: table(report)}
    if options.check:
        old = [
            str(path) for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        if old:
            print(f"not what the results say: {', '.join(old)}: run benchmarks/models.py --page-only", file=sys.stderr)
        return 1 if old else 0
    for path, text in made.items():
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    return 0


def load(path: Path) -> dict[str, Any]:
    """Reads the report of earlier runs."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _with_versions(report: dict[str, Any]) -> Results:
    """Returns the results of earlier runs, each with the version of transformers of its run."""
    results: Results = report["results"]
    for entries in results.values():
        for entry in entries.values():
            entry.setdefault("transformers", report["versions"]["transformers"])
    return results


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--types", nargs="+", help="model types (default: all)")
    parser.add_argument("--levels", choices=LEVELS, nargs="+", default=list(LEVELS))
    parser.add_argument("--again", action="store_true", help="repeat what has been trained before")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of each level of a type")
    parser.add_argument("--page-only", action="store_true", help="train nothing, and generate the page and the table")
    parser.add_argument("--check", action="store_true", help="train nothing; status 1 if page or table is out of date")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "models.md")
    parser.add_argument("--table", type=Path, default=ROOT / "benchmarks" / "results" / "models.csv")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "models.json")
    return parser.parse_args()


def _train(options: argparse.Namespace, results: Results) -> None:
    known = circumstances(_PACKAGES)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    work = [(kind, name) for kind in options.kinds for name in KINDS[kind].types if name in (options.types or (name,))]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(work))
        for kind, name in work:
            progress.update(task, description=f"{kind} {name}")
            entry = results.setdefault(kind, {}).setdefault(name, {})
            if _add(entry, kind, name, options):
                _save(options.results, known, results)
            progress.advance(task)


def _add(entry: dict[str, Any], kind: str, name: str, options: argparse.Namespace) -> bool:
    """Trains a type at the levels that are not known yet. Returns whether there were any."""
    trained = entry.pop("not_built", None) is not None  # is tried again: sizes may have changed
    left = set(entry.get("levels", {}))
    for processes in sorted({LEVELS[level].processes for level in options.levels}):
        levels = [level for level in options.levels if LEVELS[level].processes == processes]
        levels = [level for level in levels if options.again or level not in entry.get("levels", {})]
        if levels and "not_built" not in entry:
            made = train_type(kind, name, levels, options.seconds)
            outcomes = entry.get("levels", {}) | made["levels"]
            entry |= made | {"levels": {level: outcomes[level] for level in LEVELS if level in outcomes}}
            left -= set(levels)
            trained = True
    if trained and not left:  # otherwise some outcomes are of an earlier version
        entry["transformers"] = version_of("transformers")
    return trained


def _save(path: Path, known: dict[str, Any], results: Results) -> None:
    ordered = {
        kind: {name: results[kind][name] for name in KINDS[kind].types if name in results[kind]}
        for kind in KINDS
        if kind in results
    }
    save_report(path, {**known, "results": ordered})


if __name__ == "__main__":
    sys.exit(main())
