"""Prints an estimate and the alternative parallelisms as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.estimate.parallelism_search import Ranking
from lightning_memo.estimate.planner_inputs import device_budget
from lightning_memo.estimate.request import Estimate, EstimateRequest, Parallelism, Storage
from lightning_memo.shapes.model_shape import ModelShape
from lightning_memo.utils.units import about_seconds, format_bytes, format_setting, two_digits


def print_answer(request: EstimateRequest, ranking: Ranking, alternatives: int) -> None:
    """Prints an estimate, its device memory, the alternatives and the limits.

    Args:
        request: Training to estimate.
        ranking: Ranking of the parallelisms.
        alternatives: Maximum number of alternatives in the table.
    """
    console = Console()
    console.print(answer_table(request, ranking.best))
    console.print(bytes_table(request, ranking.best))
    if ranking.alternatives and alternatives:
        console.print(alternatives_table(ranking, alternatives))
    for limit in filter(None, (*ranking.best.limits[1:], request.cluster.note)):
        console.print(f"- {limit}", highlight=False, markup=False)
    console.print(f"Speed constants: {request.constants.source}", highlight=False, markup=False)


def answer_table(request: EstimateRequest, answer: Estimate) -> Table:
    """Returns a table of the training and the predictions."""
    cluster = request.cluster
    nodes = -(-request.gpus // cluster.devices_per_node)
    table = Table(title="Estimate", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    where = f"{request.gpus} x {cluster.device}, {nodes} node{_plural(nodes)}"
    rows = {
        "model": f"{answer.model}, {_count(request.shape.parameters)} parameters{_active(request.shape)}",
        "cluster": where,
        "method": answer.method if answer.slices is None else f"{answer.method}, {answer.slices}",
        "sequence": f"{answer.seq_len:,} tokens, {request.batch_size} sequence{_plural(request.batch_size)} per step",
        "status": _status(request, answer),
        "longest": _longest(answer),
        "parallelism": format_parallelism(answer.parallel),
        "alpha": "-" if answer.alpha is None else f"{answer.alpha:.4g}",
        "activations": answer.limits[0],
        "step": _rough(answer.step_seconds, about_seconds, answer.speeds),
        "MFU": _rough(answer.mfu, _percent, "causal attention, recomputation not counted"),
        "HFU": _rough(answer.hfu, _percent, "recomputation counted"),
        "tokens/GPU/s": _rough(answer.tokens_per_gpu_per_second, two_digits),
        "host": _host(request, answer),
    }
    if request.disk_bytes:
        room = format_bytes(request.disk_bytes)
        rows["disk"] = f"{format_bytes(answer.disk_bytes)} of the {room} on each node, written and read in every step"
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _status(request: EstimateRequest, answer: Estimate) -> str:
    if answer.status == "ok":
        return "fits"
    device = answer.device_bytes["total"] > device_budget(request, answer.parallel).device_bytes
    names = [name for name, lacks in (("device", device), ("host", answer.status == "oohm")) if lacks]
    return f"does not fit: out of {' and '.join(names)} memory"


def _longest(answer: Estimate) -> str:
    lengths = []
    if answer.longest is not None:
        lengths.append(f"{answer.longest:,} tokens")
    if answer.longest_in_slices is not None:
        lengths.append(f"{answer.longest_in_slices:,} tokens in slices")
    return " or ".join(lengths) or "no length fits"


def _host(request: EstimateRequest, answer: Estimate) -> str:
    share, whole = request.constants.host_share, request.cluster.host_bytes
    return (
        f"{format_bytes(answer.host_bytes)} of the {format_bytes(round(whole * share))} usable on each node, "
        f"{share:.0%} of cluster.host_bytes={format_setting(whole)}"
    )


def bytes_table(request: EstimateRequest, answer: Estimate) -> Table:
    """Returns a table of the memory of the fullest device by category, the largest first."""
    room = device_budget(request, answer.parallel).device_bytes
    table = Table(title="Device memory", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    categories = sorted(answer.device_bytes.items(), key=lambda item: -item[1])
    for category, size in categories:
        if size and category != "total":
            table.add_row(category.replace("_", " "), format_bytes(size))
    table.add_section()
    table.add_row("total", f"{format_bytes(answer.device_bytes['total'])} of the {format_bytes(room)} usable")
    return table


def alternatives_table(ranking: Ranking, most: int) -> Table:
    """Returns a table of the best parallelism and its alternatives, with the reason why each is worse."""
    table = Table(title="Alternatives", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for name in ("TP", "CP", "DP", "PP", "EP", "ZeRO", "alpha", "step", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    _add_row(table, ranking.best, "best" if ranking.best.status == "ok" else "needs the least memory")
    for alternative in ranking.alternatives[:most]:
        _add_row(table, alternative.estimate, alternative.reason)
    hidden = len(ranking.alternatives) - most
    table.caption = f"and {hidden} more" if hidden > 0 else None
    return table


def format_parallelism(parallel: Parallelism) -> str:
    """Returns all sizes of a parallelism on one line."""
    sizes = [f"TP {parallel.tp}", f"CP {parallel.cp}", f"DP {parallel.dp}", f"PP {parallel.pp}"]
    if parallel.virtual_pipeline_size > 1:
        sizes[-1] += f" x {parallel.virtual_pipeline_size}"
    if parallel.weights_wait:
        sizes[-1] += " zero-bubble"
    if parallel.expert_parallel_size > 1:
        sizes.append(f"EP {parallel.expert_parallel_size}")
    return ", ".join([*sizes, f"ZeRO {parallel.zero_stage}"])


def _add_row(table: Table, answer: Estimate, remark: str) -> None:
    parallel = answer.parallel
    sizes = (
        parallel.tp, parallel.cp, parallel.dp, parallel.pp, parallel.expert_parallel_size, parallel.zero_stage
    )  # fmt: skip
    alpha = format_alpha(answer.alpha, answer.device_bytes, answer.storage)
    table.add_row(
        *map(str, sizes), alpha, _rough(answer.step_seconds, about_seconds), _rough(answer.mfu, _percent), Text(remark)
    )


def _active(shape: ModelShape) -> str:
    """The number of parameters that process a token, or of those that are trained, if it is not the number of all."""
    if shape.experts > 1:
        return f", {_count(shape.active_parameters)} of them active"
    return "" if shape.adapters is None else f", {_count(shape.layers * shape.adapter_parameters)} of them trained"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _plural(count: int) -> str:
    return "" if count == 1 else "s"


def _rough(value: float | None, written: Callable[[float], str], what: str = "") -> str:
    return "-" if value is None else written(value) + (f" ({what})" if what else "")


def _percent(value: float) -> str:
    return f"{two_digits(value)} %"


def format_alpha(alpha: float | None, device_bytes: Mapping[str, int], storage: Storage | None) -> str:
    """Format alpha for a table, with three digits; "kept" if all activations stay on the device, or "by kind".

    Args:
        alpha: Alpha of an estimate.
        device_bytes: Its device memory by category. With swapping, activations are only in the rounding buffers.
        storage: What becomes of each kind of tensor, if a plan names them.
    """
    if storage is not None:
        return "by kind"
    if alpha is None:
        return "-"
    return "kept" if device_bytes.get("activations") else f"{alpha:.3g}"
