"""The part of the performance page with rehearsals at full size on a simulated GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cells.cell import Cell, Result
from cells.methods import METHODS

from lightning_memo.utils.units import format_bytes
from pages.comparison import Group, groups_of, is_settled
from pages.gpu_page import TUNING
from pages.markdown import over, table, tokens

INTRODUCTION = """## On a simulated GPU

**Nothing in this section was measured on a GPU.** PyTorch's CUDA build, its allocators, the model and all methods run at full size
and unmodified, but large tensors are not computed: kernels and copies take the time that a model of the device says.
[Benchmarks](benchmarks.md#the-same-at-full-size-without-a-gpu) describes it and its limits.

A cell is the time of a step; Memo's cells also have the peak of the device and the locked memory of the host. All methods use cuDNN's
attention, the loss in chunks and AdamW, in bf16 on one sequence; memory is not planned. "Selective checkpointing" saves the outputs
of attention and recomputes everything else. Methods "+ liger-kernel" run its norms, rotary positions and feed-forwards. The bound is a
step without recomputation and waiting, extrapolated from 1 and 2 layers. The start of Memo is the time until its plan has run
once, less a later step: profile, plan, and slower steps while host memory is locked. "Without Triton", Memo has PyTorch's operations alone, and is compared with methods
that have no other ones. The last row compares Memo's default settings, which have
[fused kernels](kernels.md#fused-kernels), with the fastest other method. Steps in which Memo compares layers with themselves
(1, 2, 4, ..., and every 64th) take up to 0.5 s longer, which the median leaves out."""  # noqa: E501  lines of the page

_LONGEST = """### The longest sequences

Default settings. A first step that does not fit with every layer recomputed as a whole is run again
in slices, and later ones stay cut ([long_sequences.md](long_sequences.md))."""

_BESIDE_ALL = """### The default beside all other settings and methods

The time of a step with Memo's default settings, in times of the fastest of all others that fit: alpha 0, alpha 1, and the methods of
the tables above. All cells of a number are of one commit. "-": nothing fits, the timed steps were not those of the plan, or the length was not
rehearsed."""  # noqa: E501  lines of the page

_ALLOCATORS = """### Planned memory beside PyTorch's allocator

Steps of Memo's default settings, with [planned memory](planned_memory.md) and without. "Not served" means that memory was not planned
before the timed steps, or not at all: PyTorch's allocator served them."""  # noqa: E501  lines of the page

_ALST = """### Beside the parts of ALST

The parts of DeepSpeed's Arctic Long Sequence Training that concern activations on one GPU ({packages}): feed-forward layers in tiles of
as many tokens as the hidden size, the loss in tiles of 1 GiB of fp32 logits, and checkpoints on the host. Three rows differ in their
checkpoints:

- "DeepSpeed ALST": DeepSpeed's context manager as its tutorial shows it. Layer inputs that came back from the host stay on the device
  until the step has ended.
- "inputs freed after use": the same, changed here, so that each input is freed once its layer has used it.
- "reentrant checkpoints": the tutorial's other way. Inputs are copied as in ArcticTraining, on the compute stream, to memory that is
  not locked; the rate of these copies (`pageable`) is assumed.

The published run of 500K tokens on one H100 also keeps weights and optimizer states on the host by ZeRO 3, and uses FlashAttention and
liger-kernel's fused operations, none of which is used here. A length that does not fit here says nothing about those settings, nor
about expandable segments, which the tutorial recommends."""  # noqa: E501  lines of the page

_BESIDE_MEASURED = """### Simulated beside measured

Each measured cell, and the same cell on a [simulated GPU](#on-a-simulated-gpu) with 128 GiB of host memory, rehearsed with the code of the
day on which it was measured. The rates of the simulated device were fitted to the kernels' times of these cells."""  # noqa: E501  lines of the page

# Memory of the host, name of the device, and results of all groups.
Rehearsed = Sequence[tuple[str, str, Sequence[Result]]]

_NEGLIGIBLE_BYTES = 1 << 20
_WITHOUT_TRITON = "memo_auto_without_triton"


def section(host: str, device: str, results: Sequence[Result]) -> str:
    """Returns the section of a device and a size of the host's memory.

    Args:
        host: Memory of the host.
        device: Name of the device.
        results: Results of all groups.
    """
    title = f"### {device}, {host} of host memory"
    return "\n\n".join([title, *map(_group, _whole_models(results))])


def beside_measured(devices: Mapping[str, Sequence[Result]], rehearsed: Rehearsed) -> list[str]:
    """Returns a section that compares measured cells with rehearsals of the same code, if there are any.

    Args:
        devices: Measured results, by name of the device.
        rehearsed: Day of the measured cells, name of the device, and results of all groups.
    """
    rows = []
    for day, device, found in rehearsed:
        simulated = {_path(r): r for r in found}
        for r in devices.get(device.removesuffix(" (simulated)"), ()):
            there = simulated.get(_path(r))
            if r["date"].startswith(day) and there and r["status"] == there["status"] == "ok":
                cell = r["cell"]
                name = f"{cell['model']}, {cell['tuning']}, {tokens(cell['tokens'])}: {METHODS[cell['method']].label}"
                seconds = [each["median_seconds"] for each in (r, there)]
                name += "" if is_settled(r) else " (not settled)"
                sizes = [format_bytes(each["memory"]["peak_allocated_bytes"]) for each in (r, there)]
                rows.append([name, *map(_seconds, seconds), f"{seconds[1] / seconds[0] - 1:+.1%}", *sizes])
    head = ["", "measured", "simulated", "error", "device memory, measured", "simulated"]
    return [f"{_BESIDE_MEASURED}\n\n" + table(head, rows)] if rows else []


def _path(result: Result) -> Path:
    return Cell(**result["cell"]).path


def longest(rehearsed: Rehearsed) -> str:
    """Returns the section of the longest sequences that were rehearsed with default settings.

    Args:
        rehearsed: Memory of the host, name of the device, and results of all groups.
    """
    rows = [
        [r["cell"]["model"], TUNING[r["cell"]["tuning"]], device, host, f"{r['cell']['tokens']:,}", _cell(r)]
        for host, device, found in rehearsed
        for r in sorted(found, key=lambda r: r["cell"]["tokens"])
    ]
    return f"{_LONGEST}\n\n" + table(["", "", "device", "host memory", "tokens", "a step"], rows)


def beside_all(rehearsed: Rehearsed) -> str:
    """Returns the section that compares the default with the fastest of all other settings and methods.

    Args:
        rehearsed: Memory of the host, name of the device, and results of all groups.
    """
    ratios: dict[tuple[str, ...], dict[int, str]] = {}
    for host, device, found in rehearsed:
        for group in _whole_models(found):  # of one commit each
            row = ratios.setdefault((group.cell.model, TUNING[group.cell.tuning], device, host), {})
            row.update({n: ratio for n in group.lengths if (ratio := _beside_all(group, n)) != "-"})
    lengths = sorted({length for row in ratios.values() for length in row})
    rows = [[*names, *(row.get(n, "-") for n in lengths)] for names, row in ratios.items()]
    return f"{_BESIDE_ALL}\n\n" + table(["", "", "device", "host memory", *map(tokens, lengths)], rows)


def _beside_all(group: Group, length: int) -> str:
    own, others = group.default(length), [group.best_other(length), group.best_alpha(length)]
    seconds = [found[1] for found in others if found is not None]
    return f"{own[1] / min(seconds):.3f}" if own is not None and seconds else "-"


def allocators(rehearsed: Rehearsed) -> str:
    """Returns the section that compares PyTorch's allocator, expandable segments and planned memory.

    Args:
        rehearsed: Memory of the host, name of the device, and results of all groups.
    """
    rows = []
    for host, device, found in rehearsed:
        for r in sorted(found, key=lambda r: (r["cell"]["model"], r["cell"]["tuning"] == "full", r["cell"]["tokens"])):
            cell, memory = r["cell"], r["memory"]
            allocator = "PyTorch's" + (", expandable segments" if cell["allocator"] == "expandable_segments" else "")
            if cell["method"] == "memo_auto":
                allocator = "planned" + ("" if is_settled(r) and r["plan"]["memory_planned"] else ", not served")
            sizes = [format_bytes(memory[f"peak_{name}_bytes"]) for name in ("reserved", "allocated")]
            rows.append(
                [cell["model"], TUNING[cell["tuning"]], device, host, f"{cell['tokens']:,}", allocator,
                 f"{r['median_seconds']:.2f} s", *sizes, str(memory["alloc_retries"])]
            )  # fmt: skip
    head = ["", "", "device", "host memory", "tokens", "allocator", "a step", "reserved", "allocated", "retries"]
    return f"{_ALLOCATORS}\n\n" + table(head, rows)


def alst(rehearsed: Rehearsed) -> str:
    """Returns the section that compares with the parts of ALST.

    Args:
        rehearsed: Memory of the host, name of the device, and results of all groups.
    """
    found = [r for _, _, results in rehearsed for r in results if r["cell"]["method"].startswith("alst")]
    packages = ", ".join(sorted({package for r in found for package in r.get("packages", [])}))
    parts = [_ALST.format(packages=packages)]
    for host, device, results in rehearsed:
        for group in groups_of(results):
            cell = group.cell
            allocator = "" if cell.allocator == "native" else f", allocator: {cell.allocator}"
            title = f"**{device}, {host} of host memory: {cell.model}, {TUNING[cell.tuning]}{allocator}**"
            parts.append(f"{title}\n\n{_methods(group)}")
    return "\n\n".join(parts)


def summary(rehearsed: Rehearsed) -> str:
    """Returns a table of the default's speedup over the fastest other method.

    Args:
        rehearsed: Memory of the host, name of the device, and results of all groups.
    """
    groups = [(host, group) for host, _, found in rehearsed for group in _whole_models(found)]
    lengths = sorted({length for _, group in groups for length in group.lengths})
    rows = [
        [f"{group.cell.model}, {group.cell.tuning}, {host} of host memory", *(_ratio(group, n) for n in lengths)]
        for host, group in groups
    ]
    devices = ", ".join(sorted({device for _, device, _ in rehearsed}))
    return (
        f"**{devices}**: speedup of `MemoStrategy()` over the fastest other method that fits. Times are *simulated*, "
        "nothing was\nmeasured.\n\n" + table(["", *map(tokens, lengths)], rows)
    )


def _whole_models(results: Sequence[Result]) -> list[Group]:
    return [group for group in groups_of(results) if group.cell.layers is None]


def _group(group: Group) -> str:
    bounds = [
        [label, *(_seconds(group.bound_seconds(n, method)) for n in group.lengths)]
        for label, method in (("bound", "plain"), ("bound + liger-kernel", "plain_liger"))
    ]
    rows = [_expected(group), _start(group), *(row for row in bounds if set(row[1:]) != {"-"})]
    return f"**{group.cell.model}, {TUNING[group.cell.tuning]}** ({group.code})\n\n{_methods(group, *rows)}"


def _expected(group: Group) -> list[str]:
    """Returns the row of what the plans of the default expect."""
    results = [_of_default(group, n) for n in group.lengths]
    return ["expected by Memo's plan", *(_seconds(r["plan"].get("expected_seconds") if r else None) for r in results)]


def _start(group: Group) -> list[str]:
    """Returns the row of what the first two steps take, less a later one, beside checkpointing's first step."""
    cells = []
    for n in group.lengths:
        own, other = _of_default(group, n), group.finished("checkpointing", n)
        # A run that begins with shorter steps says nothing about its start.
        if own is None or own.get("first_planned_step_seconds") is None or own["steps"].get("prime"):
            cells.append("-")
            continue
        text = _seconds(own["first_planned_step_seconds"] - own["median_seconds"])
        cells.append(text if other is None else f"{text} ({_seconds(other['first_step_seconds'])})")
    return ["start of Memo (first step of checkpointing)", *cells]


def _of_default(group: Group, length: int) -> Result | None:
    found = group.default(length)
    return None if found is None else group.result(found[0], length)


def _methods(group: Group, *more: list[str]) -> str:
    """Returns the table of all methods, with more rows before the last one."""
    rows = [[METHODS[m].label, *(_cell(group.result(m, n)) for n in group.lengths)] for m in group.methods]
    rows.extend(more)
    if _WITHOUT_TRITON in group.methods:
        rows.append(
            [f"{METHODS[_WITHOUT_TRITON].label}: times as fast", *(_eager_speedup(group, n) for n in group.lengths)]
        )
    if any(METHODS[m].is_memo for m in group.methods):
        rows.append(["Memo's default: times as fast", *(_speedup(group, n) for n in group.lengths)])
    return table(["", *map(tokens, group.lengths)], rows)


def _cell(result: Result | None) -> str:
    if result is None or result["status"] != "ok":
        return "-" if result is None else result["status"]
    if not METHODS[result["cell"]["method"]].is_memo:
        return _seconds(result["median_seconds"])
    memory = result["memory"]
    pinned = max(result["swapped_host_bytes"], memory["peak_pinned_bytes"] or 0)
    sizes = format_bytes(memory["peak_allocated_bytes"]), "0" if pinned < _NEGLIGIBLE_BYTES else format_bytes(pinned)
    return f"{_seconds(result['median_seconds'])} <small>{', '.join(sizes)}</small>"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _speedup(group: Group, length: int) -> str:
    """Returns how many times as fast as the fastest other method the default is, with the name of that method."""
    other = group.best_other(length)
    ratio = _ratio(group, length)
    return ratio if other is None or ratio == "-" else over(ratio, other[0])


def _eager_speedup(group: Group, length: int) -> str:
    """Returns how many times as fast Memo is without Triton as the fastest other method without fused kernels."""
    own, other = group.seconds(_WITHOUT_TRITON, length), group.best_other(length, fused=False)
    return "-" if own is None or other is None else over(f"{other[1] / own:.3f}", other[0])


def _ratio(group: Group, length: int) -> str:
    """Returns how many times as fast as the fastest other method the default is."""
    own, other = group.default(length), group.best_other(length)
    if own is None:
        return "-"
    if other is None:
        tried = any(group.result(m, length) is not None for m in group.methods if not METHODS[m].is_memo)
        return "only Memo fits" if tried else "-"
    return f"{other[1] / own[1]:.3f}"
