"""The part of the performance page with measurements on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cells.cell import Result
from cells.methods import METHODS
from cells.plans import ALPHAS, BOUND_LAYERS

from pages.comparison import LOSS_TOLERANCE, NORM_TOLERANCE, Group, Speedup, groups_of, is_settled, speedups
from pages.markdown import number, over, ratio, table, tokens

NOT_MEASURED = """Nothing has been measured on a GPU yet; `benchmarks/results/gpu` is empty.
`bash benchmarks/lease.sh` measures everything for this page, the most important comparisons first. You can stop it at
any time; it continues where it stopped. `python benchmarks/gpu.py --help` describes single comparisons."""

TUNING = {"full": "all weights trained", "lora": "LoRA of rank 16 on all linear layers"}

_EXPLAINED = f"""Each cell is the median of the timed steps of Lightning's Trainer on one sequence of random tokens, in bf16 with AdamW. All
methods use one attention kernel and compute the loss in chunks (ALST in its own tiles). MFU counts attention as causal and does
not count recomputed operations. First losses agree within {LOSS_TOLERANCE:.1%}, and the norms of first gradients within
{NORM_TOLERANCE:.1%}, unless a line says otherwise. "oom" means that the GPU ran out of memory; "oohm" means that the host did. A cell
is "not settled" unless all plans were in force before its timed steps and during one more; nothing is compared with such a
cell. Cells of different days or commits are in different tables."""  # noqa: E501  a line of the page


def device_section(results: Sequence[Result], picture_of: Callable[[Group], Path]) -> str:
    """Returns the section with all groups of one device.

    Args:
        results: Results of the device.
        picture_of: Returns the path of a group's picture, relative to the page.
    """
    groups = [_group(group, picture_of(group)) for group in groups_of(results)]
    return "\n\n".join([_EXPLAINED, *groups, _circumstances(results)])


def _circumstances(results: Sequence[Result]) -> str:
    dates = sorted(r["date"][:10] for r in results if "date" in r)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    versions = sorted({f"{k} {v}" for r in results for k, v in r.get("versions", {}).items() if k != "lightning_memo"})
    packages = sorted({package for r in results for package in r.get("packages", [])})
    return f"Measured on {days} with {', '.join(dict.fromkeys([*versions, *packages]))}."


def _group(group: Group, picture: Path) -> str:
    cell = group.cell
    layers = "" if cell.layers is None else f", its first {cell.layers} layers"
    kernel = {"sdpa": "PyTorch's flash attention", "cudnn": "cuDNN's attention"}[cell.attention]
    special = "" if cell.loss == "chunked" else ", whole logits"
    special += "" if cell.allocator == "native" else f", allocator: {cell.allocator}"
    parts = [
        f"#### {cell.model}{layers}, {TUNING[cell.tuning]}{special}: {group.code}",
        f"Attention: {kernel}.",
        *_deviations(group),
        f"![Tokens per second of each method]({picture})",
        "**Tokens per second, and MFU**\n\n" + _over_lengths(group, group.methods, _speed),
        _ratios(group),
        _alphas(group),
        _longest(group),
    ]
    return "\n\n".join(part for part in parts if part)


def _over_lengths(group: Group, methods: Sequence[str], of: Callable[[Result], str]) -> str:
    rows = []
    for method in methods:
        found = [group.result(method, length) for length in group.lengths]
        rows.append([METHODS[method].label, *["-" if r is None else _state(r) or of(r) for r in found]])
    return table(["", *map(tokens, group.lengths)], rows)


def _state(result: Result) -> str:
    """Returns the reason why there is no number, or an empty string if there is one."""
    if result["status"] == "unavailable":
        return "not installed" if "not installed" in result["reason"] else "not available"
    return "" if result["status"] == "ok" and result["median_seconds"] else result["status"]


def _speed(result: Result) -> str:
    told = f"{result['tokens_per_second']:,.0f} ({number(result['mfu'], '{:.1%}')})"
    return told if is_settled(result) else f"{told}, not settled"


def speedup_table(found: Sequence[tuple[str, Speedup]]) -> str:
    """Returns a table of speedups with the models that they are of. A column without values is left out.

    Args:
        found: Name of the model, which may be empty, and its speedup.
    """
    columns = {
        "model": [name for name, _ in found],
        "length": [tokens(speedup.tokens) for _, speedup in found],
        "settings": [METHODS[speedup.method].label for _, speedup in found],
        "over the fastest other method": [over(number(each.over_best, "{:.3f}"), each.best) for _, each in found],
        "over checkpointing": [number(speedup.over_recomputation, "{:.3f}") for _, speedup in found],
        "bound / step time": [number(speedup.bound, "{:.3f}") for _, speedup in found],
    }
    columns = {head: cells for head, cells in columns.items() if set(cells) - {"", "-"}}
    return table(list(columns), list(zip(*columns.values(), strict=True)))


def _ratios(group: Group) -> str:
    """Compares the default settings with the best other method, full recomputation and the bound."""
    found = speedups(group)
    if not found:
        return ""
    told = "The settings are the default, or the fastest ones where no settled cell has the default."
    if any(speedup.bound is not None for speedup in found):
        first, second = BOUND_LAYERS
        told += (
            " The bound is a step without\nrecomputation and waiting, extrapolated from plain training of "
            f"{first} and {second} layers."
        )
    return "\n\n".join(["**Speedup of Memo**", speedup_table([("", speedup) for speedup in found]), told])


def _alphas(group: Group) -> str:
    """Compares step times by alpha with the fastest, and lists the chosen alpha."""
    swept = [m for m in ALPHAS if m in group.methods and m.startswith("memo_alpha")]
    rows = []
    for length in group.lengths:
        best = group.best_alpha(length)
        if len(swept) < 2 or best is None or group.result(ALPHAS[-1], length) is None:
            continue
        chosen = group.finished(ALPHAS[-1], length)
        alpha = "-" if chosen is None else f"{chosen['plan']['alpha']:.3f}"
        cells = [ratio(best[1], group.seconds(m, length)) for m in swept]
        rows.append([tokens(length), *cells, ratio(best[1], group.seconds(ALPHAS[-1], length)), alpha])
    if not rows:
        return ""
    head = ["length", *[METHODS[m].label.removeprefix("Memo, ") for m in swept], "the plan's choice", "its alpha"]
    return "**Speed by alpha, relative to the fastest alpha**\n\n" + table(head, rows)


def _longest(group: Group) -> str:
    """Lists the longest sequences, if longer ones have been tried."""
    rows = []
    found = {method: group.longest(method) for method in group.methods}
    if all(beyond is None for _, beyond in found.values()):
        return ""
    for method, (fits, beyond) in found.items():
        if fits is None:
            continue
        above = "-" if beyond is None else f"{tokens(beyond['cell']['tokens'])}: {beyond['status']}"
        rows.append([METHODS[method].label, tokens(fits["cell"]["tokens"]), above])
    return "**Longest sequence that was trained**\n\n" + table(["", "tokens", "next length"], rows) if rows else ""


def _deviations(group: Group) -> list[str]:
    return [
        f"**{METHODS[r['cell']['method']].label} at {tokens(r['cell']['tokens'])}: its {name} is {error:.1%} off the "
        "others', so its time is not comparable.**"
        for r, name, error in group.deviations()
    ]
