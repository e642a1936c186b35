"""The page on model types: it is what the results say, and the results are what training gives."""

from __future__ import annotations

import contextlib
import csv
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.benchmark_modules import ROOT, load

pytestmark = pytest.mark.usefixtures("own_modules")

RESULTS = ROOT / "benchmarks" / "results" / "models.json"
SECONDS = 120.0
# A spread over kinds, levels and outcomes that takes less than a minute.
SPREAD = [
    ("causal", "llama", ["alpha 0", "fractions", "slices", "slice schedule"]),
    ("causal", "llama", ["context", "tensor"]),
    ("causal", "mixtral", ["tensor"]),
    ("causal", "qwen3_moe", ["fractions"]),
    ("causal", "gpt_oss", ["slices"]),
    ("causal", "doge", ["alpha 1"]),
    ("causal", "falcon_mamba", ["alpha 1", "fractions"]),
    ("causal", "camembert", ["slice schedule"]),
    ("causal", "lfm2", ["slice schedule"]),
    ("causal", "reformer", ["alpha 0"]),
    ("masked", "xlm", ["slices"]),
    ("masked", "bert", ["fractions", "slices"]),
    ("seq2seq", "t5", ["fractions"]),
    ("seq2seq", "bart", ["alpha 1"]),
    ("image-text", "llava", ["fractions"]),
    ("image-text", "qwen3_vl", ["alpha 0"]),
]
# Words for layer types in the code of a model that name no layer type of it.
_MASKS = {"full_attention", "linear_attention", "sliding_attention", "conv"}
_IN_OLD_CONFIGS = {"full_attention"}
NO_LAYER_TYPES = {
    "falcon_h1": _MASKS, "inkling": _MASKS, "inkling2": _MASKS, "inkling2_loop": _MASKS, "zamba": _MASKS,
    "zamba2": _MASKS, "zaya": _MASKS, "dots3_note": _IN_OLD_CONFIGS, "glm5_next": _IN_OLD_CONFIGS,
    "qwen4_exp": _IN_OLD_CONFIGS, "step3p7": {"minimax_m3_sparse"},
}  # fmt: skip


@pytest.fixture
def report() -> dict[str, Any]:
    found: dict[str, Any] = load("models").load(RESULTS)
    return found


def test_the_page_and_the_table_are_what_the_results_say(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["models.py", "--check"])
    assert load("models").main() == 0, capsys.readouterr().err


def test_all_types_have_results(report: dict[str, Any]) -> None:
    if report["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the results are of another version of transformers")
    for name, kind in load("model_types.kinds").KINDS.items():
        assert tuple(report["results"][name]) == kind.types
        for entry in report["results"][name].values():
            assert "not_built" in entry or list(entry["levels"]) == list(load("model_types.levels").LEVELS)


@pytest.mark.slow
def test_tiny_models_have_every_layer_type() -> None:
    """The page says of a type what holds for its published models, whose layers the default configuration may lack."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    made: dict[Path, set[str]] = {}
    for config in _tiny_configs():
        for part in load("model_types.configs").parts_of(config):
            for name in ("layer_types", "mlp_layer_types"):
                if types := getattr(part, name, None):
                    made.setdefault(Path(inspect.getfile(type(part))).parent, set()).update(types)
    assert len(made) > 50
    for folder, types in made.items():
        code = "".join(
            file.read_text() for name in ("configuration", "modeling") for file in folder.glob(f"{name}_*.py")
        )
        known = {word for word in ALLOWED_LAYER_TYPES if f'"{word}"' in code}
        assert known - NO_LAYER_TYPES.get(folder.name, set()) <= types, folder.name


def _tiny_configs() -> Iterator[Any]:
    names = {name for kind in load("model_types.kinds").KINDS.values() for name in kind.types}
    for name in names:
        with contextlib.suppress(Exception):  # the page lists these types
            yield load("model_types.configs").tiny_config(name)


@pytest.fixture
def messages(report: dict[str, Any]) -> set[str]:
    return {
        outcome["why"]
        for entries in report["results"].values()
        for entry in entries.values()
        for outcome in entry.get("levels", {}).values()
        if "why" in outcome and outcome["status"] != "works"
    }


def test_reasons_in_the_table_come_from_the_messages(messages: set[str]) -> None:
    shortened = load("model_types.page").shortened
    assert len(messages) > 20
    for message in messages:
        pieces = [re.escape(piece) for piece in shortened(message).split("...")]
        assert re.search(r"[\w.]+".join(pieces), message), message


def test_the_page_groups_every_reason(messages: set[str]) -> None:
    page = load("model_types.page")
    groups = {message: page.group(message) for message in messages}
    assert not [message for message, group in groups.items() if group == page._OTHER]
    assert set(groups.values()) == {title for title, _, _ in page._GROUPS}


def test_the_table_has_a_row_for_each_type(report: dict[str, Any]) -> None:
    rows = list(csv.DictReader((ROOT / "benchmarks" / "results" / "models.csv").read_text().splitlines()))
    assert [(row["kind"], row["type"]) for row in rows] == [
        (kind, name) for kind, entries in report["results"].items() for name in entries
    ]
    words = {"refused": "no", "plain": "nothing swapped"}
    for row in rows:
        entry = report["results"][row["kind"]][row["type"]]
        for level, outcome in entry["levels"].items() if "not_built" not in entry else ():
            assert row[level].split(":")[0] == words.get(outcome["status"], outcome["status"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model_type", "levels"), SPREAD, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_training_again_gives_what_the_results_say(
    kind: str, model_type: str, levels: list[str], report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "HF_HUB_OFFLINE"):  # which the processes change
        monkeypatch.setenv(name, os.environ.get(name, ""))
    made = load("model_types.processes").train_type(kind, model_type, levels, SECONDS)
    expected = report["results"][kind][model_type]
    assert made["parameters"] == expected["parameters"]
    for level, outcome in made["levels"].items():
        known = expected["levels"][level]
        assert (outcome["status"], outcome.get("why")) == (known["status"], known.get("why"))
