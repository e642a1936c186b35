"""Compares estimates with rehearsals on a simulated GPU, and generates the table of docs/estimate.md.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --check   exits with status 1 if the page is out of date

Estimates have the package's constants, which have to be those of the simulated machine. Only the memory is that of one
process alone on it, and FlashAttention 2 has its own rates.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cells.cell import Cell, Result, load_all
from pages.generated_section import write_or_check
from pages.markdown import table
from rehearse import described

from lightning_memo.estimate import (
    Estimate,
    EstimateRequest,
    Parallelism,
    Slices,
    constants_of,
    estimate,
    load_cluster,
    load_model,
)
from lightning_memo.estimate.what_would_fit import own_slices
from lightning_memo.shapes.model_shape import adapters_of
from lightning_memo.utils.units import parse_bytes

ROOT: Final = Path(__file__).parents[1]
_RESULTS: Final = ROOT / "benchmarks" / "results"
_CLUSTER: Final = "h200"
_LORA: Final = {"r": 16, "target_modules": "all-linear"}
_METHODS: Final[dict[str, dict[str, Any]]] = {
    "memo_auto_unplanned": {"method": "memo"},
    "checkpointing": {"method": "full_recompute"},
    "selective": {"method": "selective_checkpointing"},
    "memo_alpha_0": {"method": "memo", "alpha": 0.0},
    "memo_alpha_1": {"method": "memo", "alpha": 1.0},
    "memo_slices_hidden": {"method": "memo"},
}
# Longer sequences run in slices, which training chooses once a step has not fitted. Estimates are for given slices.
_LONGEST: Final = 256 * 1024
_SHOWN: Final = {
    "memo_auto_unplanned": "Memo",
    "checkpointing": "checkpointing",
    "selective": "selective checkpointing",
}
_USABLE_HOST: Final = 0.9
"""Share of the free host memory that training uses (`lightning_memo.profiler.measured_costs`)."""
_MEASURED_HOST: Final = "125GiB"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A rehearsal and its estimate."""

    host: str
    cell: Cell
    rehearsed: Result
    estimated: Estimate

    @property
    def fits(self) -> bool:
        """Whether the rehearsal ran."""
        return bool(self.rehearsed["status"] == "ok")

    @property
    def measured(self) -> tuple[float, int, int]:
        """Seconds of a step, peak of the device and host bytes of the rehearsal."""
        result = self.rehearsed
        return result["median_seconds"], result["memory"]["peak_allocated_bytes"], result["swapped_host_bytes"]

    @property
    def told(self) -> tuple[float, int, int]:
        """The same numbers of the estimate."""
        answer = self.estimated
        assert answer.step_seconds is not None
        return answer.step_seconds, answer.device_bytes["total"], answer.host_bytes // self.cell.ranks

    @property
    def errors(self) -> tuple[float, float, float]:
        """Errors of the estimate in percent of what was rehearsed."""
        seconds, device, host = (
            100 * (told - measured) / (measured or 1) for told, measured in zip(self.told, self.measured, strict=True)
        )
        return seconds, device, host


def comparisons(folder: str = "rehearsed") -> list[Comparison]:
    """Return the rehearsals of whole models by methods that are estimated, each with its estimate.

    Args:
        folder: Folder of benchmarks/results: "rehearsed", or "rehearsed_further" for those that were run after the
            estimate had been compared with the others.
    """
    return [
        Comparison(host=host.name, cell=cell, rehearsed=result, estimated=_estimate(cell, result["simulated"]))
        for host in sorted((_RESULTS / folder).iterdir())
        for result in load_all(next(path for path in host.iterdir() if path.is_dir()))
        if (cell := Cell(**result["cell"])).layers is None and cell.method in _METHODS and cell.tokens <= _LONGEST
    ]


def measured_on_a_gpu() -> list[Comparison]:
    """Return whole models that were measured on an H200, each with its estimate. There were no fused kernels yet."""
    machine = {"host_bytes": parse_bytes(_MEASURED_HOST)}
    return [
        Comparison(
            host=_MEASURED_HOST,
            cell=cell,
            rehearsed=result,
            estimated=estimate(replace(_request(cell, machine), fused_kernels=False), Parallelism()),
        )
        for result in load_all(_RESULTS / "gpu" / "nvidia_h200")
        if (cell := Cell(**result["cell"])).layers is None and cell.method in _METHODS
    ]


def of_ranks() -> list[Comparison]:
    """Return the rehearsals of one rank of several whose tokens go round a ring, each with its estimate."""
    return [
        Comparison(
            host=host.name,
            cell=cell,
            rehearsed=result,
            estimated=_of_rank(_request(cell, result["simulated"], device="h100")),
        )
        for host in sorted((_RESULTS / "rehearsed_ranks").iterdir())
        for result in load_all(host / "nvidia_h100_simulated")
        if (cell := Cell(**result["cell"])).context == "ring" and cell.method in _METHODS
    ]


def _of_rank(request: EstimateRequest) -> Estimate:
    """The estimate of a rank; in slices that training chooses by itself if whole layers do not fit."""
    whole = estimate(request, Parallelism(cp=request.gpus, zero_stage=3))
    sliced = own_slices(request, {"cp": request.gpus, "zero_stage": 3}) if whole.status != "ok" else None
    return whole if sliced is None else sliced.best


def _estimate(cell: Cell, machine: dict[str, float]) -> Estimate:
    return estimate(_request(cell, machine), Parallelism())


def _request(cell: Cell, machine: dict[str, float], device: str = _CLUSTER) -> EstimateRequest:
    shape, cluster = load_model(cell.model), load_cluster(device)
    if cell.tuning == "lora":
        shape = replace(shape, adapters=adapters_of(_LORA))
    constants = replace(constants_of(device), device_share=1.0, host_share=_USABLE_HOST)
    if cell.attention == "sdpa":  # FlashAttention 2; the constants are cuDNN's
        constants = replace(
            constants,
            attention_forward_efficiency=machine["flash_forward"] / cluster.peak_flops,
            attention_backward_efficiency=machine["flash_backward"] / cluster.peak_flops,
        )
    device_bytes = parse_bytes(described(device)["device_bytes"])
    slices = Slices(tokens=cell.slice_tokens, stream_from_host="hidden")
    return EstimateRequest(
        shape=shape,
        cluster=replace(cluster, device_bytes=device_bytes, host_bytes=int(machine["host_bytes"])),
        constants=constants,
        gpus=cell.ranks,
        seq_len=cell.tokens,
        batch_size=1,
        precision=cell.precision,  # type: ignore[arg-type]
        slices=slices if cell.method == "memo_slices_hidden" else None,
        **_METHODS[cell.method],
    )


def main() -> int:
    """Writes the section of the page, or compares it."""
    return write_or_check(
        "agreement", __doc__, ROOT / "docs" / "estimate.md",
        lambda: section(comparisons(), comparisons("rehearsed_further"), of_ranks()),
    )  # fmt: skip


def section(found: Sequence[Comparison], further: Sequence[Comparison], ranks: Sequence[Comparison]) -> str:
    """Returns the table of the largest errors, and how often the estimate is wrong about whether training fits."""
    sets = {
        f"{_SHOWN[method]}, {model}, {tuning}": [
            c for c in found if (c.cell.method, c.cell.model, c.cell.tuning) == (method, model, tuning)
        ]
        for method, model, tuning in sorted({_group(c) for c in found if c.cell.method in _SHOWN}, key=_order)
    }
    sets["`alpha=0` and `alpha=1`"] = [c for c in found if c.cell.method not in _SHOWN]
    sets["run afterwards: Llama 1B, 3B and 8B, hosts of 64 and 256 GiB, two attention kernels"] = [
        c for c in further if "llama" in c.cell.model
    ]
    sets["run afterwards: Qwen3 8B"] = [c for c in further if "llama" not in c.cell.model]
    sets["Memo, llama3_8b, full, bf16-mixed, 1M and 5M tokens, one of eight ranks on H100"] = list(ranks)
    head = ["rehearsals", "number", "time", "device memory", "host memory"]
    every = (*found, *further, *ranks)
    wrong = sum((c.estimated.status == "ok") != c.fits for c in every)
    return (
        f"{table(head, [[name, *_largest(members)] for name, members in sets.items()])}\n\n"
        f"Whether training fits is estimated wrongly in {wrong} of all {len(every)} rehearsals."
    )


def _group(comparison: Comparison) -> tuple[str, str, str]:
    cell = comparison.cell
    return cell.method, cell.model, cell.tuning


def _order(group: tuple[str, str, str]) -> tuple[int, str, str]:
    method, model, tuning = group
    return list(_SHOWN).index(method), model, tuning


def _largest(comparisons: Sequence[Comparison]) -> list[str]:
    """Returns the number of rehearsals that fit, and the largest errors among them."""
    errors = [c.errors for c in comparisons if c.fits]
    largest = (max(map(abs, column)) for column in zip(*errors, strict=True))
    return [str(len(errors)), *(f"{error:.1f} %" for error in largest)]


if __name__ == "__main__":
    sys.exit(main())
