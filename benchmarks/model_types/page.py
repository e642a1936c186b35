"""The page and the table on model types, made from the results."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from model_types.kinds import KINDS
from model_types.levels import LEVELS, TOKENS
from model_types.outcomes import AS_NEAR, BOUND, MOST

Entry = dict[str, Any]
_WORKING = ("works", "whole")
# What messages add to a reason: the setting before it, and the advice after it.
_FRAMES = (
    r"^(?:MemoStrategy|lightning_memo): layers run as one slice.*?, because (?P<why>.*)\.$",
    r"^(?:MemoStrategy|lightning_memo): nothing is swapped, because (?P<why>.*?); if .*$",
    r"^(?:alpha|stream_from_host)=\S+ .*?, but (?P<why>.*): (?:use|set) .*$",
    r"^tensor_parallel_size: (?P<why>.*?): (?:train|name) .*$",
    r"^(?P<why>.*?), and the tokens of a sequence are divided over processes: train .*$",
    r"^(?P<why>.*?): (?:use|set|train|give|with) .*$",
)
# Names of classes, and of modules in a model
_NAMES = re.compile(r"\b(?!ALiBi\b)[A-Z]\w*[a-z]\w*[A-Z]\w*\b|\b[A-Z]{2,}[a-z]\w+|\bmodel(?:\.\w+)+")
_ELLIPSIS = "..."
_OTHER: Final = "another reason"
_WHOLE_TOKENS: Final = '`context_parallel_size=1`, `sequence_parallel=False`, `stream_from_host="hidden"`'
_GROUPS: Final = (
    ("the model has no `tp_plan`", "has no tp_plan", "`tensor_parallel_plan`, context parallelism, or ZeRO 3"),
    (
        "the model's `tp_plan` splits weights in an unsupported way",
        r"the plan splits|^style |splits nn\.Linear|passes a divided weight|experts \(|does not divide",
        "`tensor_parallel_plan`, context parallelism, or ZeRO 3",
    ),
    (
        "a layer relates tokens outside attention, or cannot be proven not to",
        "may not compute each token by itself|needs every layer to run",
        "no `slice_tokens`: layers then run whole",
    ),
    (
        "labels or inputs cannot be divided over slices or processes",
        r"takes neither shift_labels|the batch has labels|batch's labels are|a batch of keys|a forward of \d+ tokens|"
        r"divide the tokens of \[batch|"
        "not known where",
        "a loss that takes `shift_labels` and `num_items_in_batch`",
    ),
    (
        "attention is not causal, has a mask of all tokens, or is not computed by a kernel",
        "needs all tokens at once|an attention mask|computes attention itself|attends outside of the repeated layers",
        f'`stream_from_host="none"`; {_WHOLE_TOKENS}',
    ),
    ("images have places among all tokens of a row", "pixel_values", _WHOLE_TOKENS),
    ("the model counts positions itself", "counts positions|takes no position_ids|axial positions", _WHOLE_TOKENS),
    ("a module that needs all tokens draws random numbers", "draws random numbers", "`context_parallel_size=1`"),
    (
        "the largest stack of layers gets no gradient",
        "no backward went through",
        'name the trained stack: `layers="..."`',
    ),
)
"""Title, pattern of shortened messages, and remedy of the reasons on the page; the first that matches counts."""
_MEANINGS = [
    ["works", f"the loss and the gradient of each parameter have a relative error of at most {BOUND:g}"],
    ["whole", "the same; layers run as one slice, and alpha is the fraction of the layers that are swapped"],
    ["nothing swapped", "the same; no plan is made, and training is plain"],
    ["no", "one line refuses the training"],
    ["wrong, error", "a gradient differs, or training ends with an unexpected error: a bug"],
]
_WORDS: Final = {"plain": "nothing swapped", "refused": "no", "crash": "error"}


def render(report: Mapping[str, Any]) -> str:
    """Returns the page."""
    results = report["results"]
    parts = [_introduction(report), _summary(results), _levels(), _reasons(results), _found(results), _OWN]
    return "\n\n".join(parts) + "\n"


def table(report: Mapping[str, Any]) -> str:
    """Returns a CSV table with a row for each type: the outcome of each level, and its reason."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kind", "type", "inputs", *LEVELS, "transformers"])
    for kind, entries in report["results"].items():
        for name, entry in entries.items():
            if "not_built" in entry:
                cells = ["no tiny model: " + _brief(entry["not_built"])] + [""] * (len(LEVELS) - 1)
            else:
                cells = [_cell(entry["levels"].get(level)) for level in LEVELS]
            writer.writerow([kind, name, entry.get("inputs", ""), *cells, entry["transformers"]])
    return text.getvalue()


def shortened(message: str) -> str:
    """Returns the reason in a message, without settings and advice and with `...` for names of a single model."""
    found = next(filter(None, (re.match(frame, message) for frame in _FRAMES)), None)
    return _NAMES.sub(_ELLIPSIS, message if found is None else found["why"])


def group(message: str) -> str:
    """Returns the title of the reason to which a message belongs."""
    text = shortened(message)
    return next((title for title, pattern, _ in _GROUPS if re.search(pattern, text)), _OTHER)


def _introduction(report: Mapping[str, Any]) -> str:
    versions, results = report["versions"], report["results"]
    count = sum(len(entries) for entries in results.values())
    kinds = _listed([KINDS[kind].title.lower() for kind in results])
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "transformers")
    made = Counter(entry["transformers"] for entries in results.values() for entry in entries.values())
    transformers = _listed([f"{version} ({number} entries)" for version, number in made.most_common()])
    return f"""# Model types

`python benchmarks/models.py` trains every model type that transformers registers for {kinds}
({count} entries). **`benchmarks/results/models.csv` has the outcome of each type** and the reason for each refusal;
`models.json` beside it has all messages and errors. This page, generated from these results, counts them
({report["date"][:10]}; transformers {transformers}; {told}; {report["cpu"]["name"]}).

Each type trains on a CPU in fp32, with random weights, about four layers, a hidden size of 32, no dropout, and two
sequences of {TOKENS} tokens. The tiny model has every layer type. The first step is profiled, and the second one
follows the plan. In both steps, the loss and the gradient of every parameter are compared with plain training:

{_table(["outcome", "meaning"], _MEANINGS)}

The error of a gradient is relative to its norm, or to 1e-6 of the norm of the whole gradient if that is larger. A
gradient beyond {BOUND:g} is also right if its error against fp64 is at most {AS_NEAR:g} times that of plain fp32
training, and at most {MOST:.0%}. Otherwise, it is compared once more with slightly different weights, because rounding
may cross the kink of a function such as ReLU."""


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
        "Slices on the host, the slice schedule and divided tokens swap one stack of layers, the largest (of the text "
        "model, if there is one). Smaller stacks, such as vision towers, train plainly. Where tensor parallelism is "
        "refused with the advice `sequence_parallel=False`, the advice is followed. Where its plan is derived, it may "
        "leave parts of the layers whole. A vision-language type that was trained on text only may be refused with "
        "images."
    )
    return "## Levels\n\n" + _table(["level", "settings", "processes"], lines) + "\n\n" + text


def _reasons(results: Mapping[str, Mapping[str, Entry]]) -> str:
    counts: dict[str, Counter[str]] = {}
    for level, outcome in _outcomes(results):
        if outcome["status"] in ("whole", "plain", "refused"):
            counts.setdefault(group(outcome["why"]), Counter())[level] += 1
    remedies = {title: remedy for title, _, remedy in _GROUPS}
    lines = [
        [title, *(str(counts[title][level] or "") for level in LEVELS), remedies.get(title, "")]
        for title in sorted(counts, key=lambda title: -counts[title].total())
    ]
    return (
        "## Reasons for whole layers and refusals\n\nThe columns count tiny models whose outcome is whole, "
        "nothing swapped or no.\n\n" + _table(["reason", *LEVELS, "remedy"], lines)
    )


def _found(results: Mapping[str, Mapping[str, Entry]]) -> str:
    bugs = [
        f"`{name}` ({KINDS[kind].title.lower()}, {level}): {_cell(outcome)}"
        for kind, entries in results.items()
        for name, entry in entries.items()
        for level, outcome in entry.get("levels", {}).items()
        if outcome["status"] in ("wrong", "crash")
    ]
    text = (
        "Known bugs:\n\n" + "\n".join(f"- {_escaped(bug)}" for bug in bugs)
        if bugs
        else "No gradient is wrong, and no training ends with an unexpected error."
    )
    missing = [name for entries in results.values() for name, entry in entries.items() if "not_built" in entry]
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(missing))
    return f"{text} No tiny model could be built of {len(missing)} entries: {names}."


_OWN: Final = """## Check your own model

Models of other libraries and your own need no registration: `MemoStrategy` finds the repeated layers and proves in the
first step what each of them computes. To check a model, train a few steps on short sequences without dropout, from the
same seed, once with `MemoStrategy(alpha=0.5)` and once without the strategy. The losses agree up to rounding. The table
after the first step names the layers that are swapped; a message names the operation because of which layers run whole.
With `check_slices=True`, the default, training itself compares layers with themselves in slices.

The comparison of this page for one type of transformers takes about a minute:

```bash
python benchmarks/models.py --types llama --results /tmp/models.json --page /tmp/models.md --table /tmp/models.csv
```"""


def _outcomes(results: Mapping[str, Mapping[str, Entry]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for entries in results.values():
        for entry in entries.values():
            yield from entry.get("levels", {}).items()


def _cell(outcome: Mapping[str, Any] | None) -> str:
    if outcome is None:
        return ""
    status, why = outcome["status"], outcome.get("why", "")
    if status == "wrong" and "error" in outcome:
        why = f"{outcome['error']:.0e}"
    word = _WORDS.get(status, status)
    return f"{word}: {_brief(why if status == 'crash' else shortened(why))}" if why else word


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else "-"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _brief(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= 200 else message[:200].rpartition(" ")[0] + " " + _ELLIPSIS


def _escaped(text: str) -> str:
    """Returns text that Markdown shows as it is."""
    return re.sub(r"([|*<>\[\]])", r"\\\1", text)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])
