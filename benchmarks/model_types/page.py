"""The page on model types, made from the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model_types.kinds import KINDS
from model_types.levels import LEVELS, TOKENS
from model_types.outcomes import AS_NEAR, BOUND, MOST

Entry = dict[str, Any]
_WORKING = ("works", "whole")
# What messages add to a reason: the setting before it, and the advice after it.
_FRAMES = (
    r"^(?:MemoStrategy|lightning_memo): layers run as one slice.*?, because (?P<why>.*)\.$",
    r"^(?:MemoStrategy|lightning_memo): nothing is swapped, because (?P<why>.*?); if .*$",
    r"^(?:alpha|host_backed|schedule)=\S+ .*?, but (?P<why>.*): (?:use|set) .*$",
    r"^tensor_parallel_size: (?P<why>.*?): (?:train|name) .*$",
    r"^(?P<why>.*?), and the tokens of a sequence are divided over processes: train .*$",
    r"^(?P<why>.*?): (?:use|set|train|give|with) .*$",
)
# Names of classes, and of modules in a model
_NAMES = re.compile(r"\b(?!ALiBi\b)[A-Z]\w*[a-z]\w*[A-Z]\w*\b|\b[A-Z]{2,}[a-z]\w+|\bmodel(?:\.\w+)+")
_ELLIPSIS = "..."
_MEANINGS = [
    ["works", f"the loss and each parameter's gradient have a relative error of at most {BOUND:g}"],
    ["whole", "the same; layers run as one slice, and alpha is the fraction of the layers that are swapped"],
    ["nothing swapped", "the same; no plan is made, and training is plain"],
    ["no", "training is refused in one line"],
    ["**wrong**", "a gradient differs: a bug"],
    ["**error**", "training ends with an error that is no message of `MemoStrategy`: a bug"],
]


def render(report: Mapping[str, Any]) -> str:
    """Returns the page."""
    parts = [_introduction(report), _summary(report["results"]), _levels()]
    parts += [_section(kind, entries) for kind, entries in report["results"].items()]
    return "\n\n".join(parts) + "\n"


def shortened(message: str) -> str:
    """Returns the reason in a message, without settings and advice and with `...` for names of a single model."""
    found = next(filter(None, (re.match(frame, message) for frame in _FRAMES)), None)
    return _NAMES.sub(_ELLIPSIS, message if found is None else found["why"])


def _introduction(report: Mapping[str, Any]) -> str:
    versions, results = report["versions"], report["results"]
    count = sum(len(entries) for entries in results.values())
    kinds = _listed([KINDS[kind].title.lower() for kind in results])
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "transformers")
    made = Counter(entry["transformers"] for entries in results.values() for entry in entries.values())
    transformers = _listed([f"{version} ({number} entries)" for version, number in made.most_common()])
    return f"""# Model types

This page shows how `MemoStrategy` trains each model type that transformers registers for {kinds} ({count} entries).
`python benchmarks/models.py` generates it from `benchmarks/results/models.json`, which contains all messages and errors
({report["date"][:10]}; {told}; {report["cpu"]["name"]}).

Types and their layers are those of transformers {transformers}; other versions may have others. Each type
is trained on a CPU in fp32, with random weights, about four layers, a hidden size of 32, no dropout, and two sequences
of {TOKENS} tokens. If a type has several types of layers, the tiny model has each of them. The first step is profiled,
and the second one follows the plan. In both steps, the loss and the gradient of every parameter are compared with plain
training:

{_table(["cell", "meaning"], _MEANINGS)}

The error of a gradient is relative to its norm, or to 1e-6 of the norm of the whole gradient if that is larger. If it
exceeds {BOUND:g}, plain training is repeated in fp64: a gradient is also right if its error against fp64 is at most
{AS_NEAR:g} times that of plain training in fp32, and at most {MOST:.0%}. In one process, a gradient that is not
right is compared once more with slightly different weights, because a rounding error may cross the kink of a function
such as ReLU. transformers computes gated delta nets in fp32 also in an fp64 model, so that this reference has
rounding errors of its own; with 48 tokens, it computes them in one chunk. Models have their default `use_cache`,
except for the few that cannot be trained with it.

Numbers in parentheses refer to the reasons below each table."""


def _summary(results: Mapping[str, Mapping[str, Entry]]) -> str:
    lines = []
    for title, entries in _groups(results):
        built = [entry for entry in entries.values() if "not_built" not in entry]
        counts = [str(len(entries)), _share(len(built), len(entries))]
        for level in LEVELS:
            working = [e for e in built if e["levels"].get(level, {}).get("status") in _WORKING]
            cut = [e for e in working if e["levels"][level]["status"] == "works"]
            text = _share(len(working), len(built))
            counts.append(text if len(cut) == len(working) else f"{text}, {len(working) - len(cut)} of them whole")
        lines.append([title, *counts])
    head = ["kind", "types", "tiny models", *LEVELS]
    return "## How many work\n\nShares are of the tiny models that could be built.\n\n" + _table(head, lines)


def _groups(results: Mapping[str, Mapping[str, Entry]]) -> Iterator[tuple[str, Mapping[str, Entry]]]:
    for kind, entries in results.items():
        yield KINDS[kind].title, entries
        if kind == "image-text":
            built = {name: entry for name, entry in entries.items() if "not_built" not in entry}
            yield "- trained with images", {name: e for name, e in built.items() if not _is_on_text(e)}
            yield "- trained on text only", {name: e for name, e in built.items() if _is_on_text(e)}


def _is_on_text(entry: Entry) -> bool:
    return bool(entry["inputs"] == "text")


def _levels() -> str:
    lines = []
    for name, level in LEVELS.items():
        settings = ", ".join(f"{key}={value!r}".replace("'", '"') for key, value in level.settings.items())
        lines.append([name, f"`MemoStrategy({settings})`", str(level.processes)])
    text = (
        "Slices on the host, the slice schedule and divided tokens swap one stack of layers, the largest "
        "(of the text model, if there is one): the decoder "
        "or the encoder, but not both. Smaller stacks, such as vision towers, are trained plainly.\n\n"
        "If tensor parallelism is refused with the advice `sequence_parallel=False`, the advice is followed; the cell "
        "then names the reason."
    )
    return "## Levels\n\n" + _table(["level", "settings", "processes"], lines) + "\n\n" + text


def _section(kind: str, entries: Mapping[str, Entry]) -> str:
    built = {name: entry for name, entry in entries.items() if "not_built" not in entry}
    reasons = _Reasons()
    told = ", text only" if kind == "image-text" else ""
    lines = [
        [f"`{name}`{told * _is_on_text(entry)}", *(_cell(entry["levels"].get(level), reasons) for level in LEVELS)]
        for name, entry in built.items()
    ]
    parts = [f"## {KINDS[kind].title}", _table(["type", *LEVELS], lines)]
    if reasons.texts:
        parts.append("\n".join(f"{number}. {text}" for number, text in enumerate(reasons.texts, 1)))
    if told and any(map(_is_on_text, built.values())):
        parts.append('Types with "text only" were trained without images: with images, a level may be refused.')
    missing = {name: entry["not_built"] for name, entry in entries.items() if "not_built" in entry}
    if missing:
        parts.append("No tiny model could be built of these types:")
        parts.append(_table(["type", "why"], [[f"`{name}`", _escaped(_brief(why))] for name, why in missing.items()]))
    return "\n\n".join(parts)


class _Reasons:
    """Numbers the reasons in the cells of a table."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, message: str) -> int:
        text = _escaped(message)
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def _cell(outcome: Mapping[str, Any] | None, reasons: _Reasons) -> str:
    if outcome is None:
        return "-"
    status, why = outcome["status"], outcome.get("why", "")
    if status == "works":
        return "works" if not why else f"works ({reasons.number(shortened(why))})"
    if status == "wrong":
        return f"**wrong** ({outcome['error']:.0e})" if "error" in outcome else "**wrong**"
    word = {"whole": "whole", "plain": "nothing swapped", "refused": "no", "crash": "**error**"}[status]
    return f"{word} ({reasons.number(why if status == 'crash' else shortened(why))})"


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else "-"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _brief(message: str) -> str:
    return message if len(message) <= 200 else message[:200].rpartition(" ")[0] + " " + _ELLIPSIS


def _escaped(text: str) -> str:
    """Returns text that Markdown shows as it is."""
    return re.sub(r"([|*<>\[\]`])", r"\\\1", _brief(text))


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])
