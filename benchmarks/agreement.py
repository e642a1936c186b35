"""Compares estimates with rehearsals on a simulated GPU, and generates the table of docs/estimate.md.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --check   exits with status 1 if the page is out of date

An estimate gets the constants of the machine that was simulated, which are in the results of the rehearsal
(benchmarks/results/rehearsed).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cells.cell import Cell, Result, load_all
from pages.generated_section import write_or_check
from pages.markdown import table, tokens
from rehearse import described

from lightning_memo.estimate import Estimate, Parallelism, Question, constants_of, estimate, load_cluster, load_model
from lightning_memo.shapes.adapters import adapters_of
from lightning_memo.utils.units import format_bytes, format_seconds, parse_bytes

ROOT: Final = Path(__file__).parents[1]
_RESULTS: Final = ROOT / "benchmarks" / "results"
_CLUSTER: Final = "h200"
_LORA: Final = {"r": 16, "target_modules": "all-linear"}
_METHODS: Final[dict[str, dict[str, Any]]] = {
    "memo_auto_unplanned": {"method": "memo"},
    "checkpointing": {"method": "full_recompute"},
    "memo_alpha_0": {"method": "memo", "alpha": 0.0},
    "memo_alpha_1": {"method": "memo", "alpha": 1.0},
}
_KERNELS: Final = {"sdpa": "flash", "cudnn": "cudnn"}
# Longer sequences run in slices, which training chooses once a step has not fitted. Estimates are for given slices.
_LONGEST: Final = 256 * 1024
_SHOWN: Final = {"memo_auto_unplanned": "Memo", "checkpointing": "checkpointing"}
_USABLE_HOST: Final = 0.9
"""Share of the free host memory that training uses (`lightning_memo.profiler.measured_costs`)."""


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
        return answer.step_seconds, answer.device_bytes["total"], answer.host_bytes

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


def _estimate(cell: Cell, machine: dict[str, float]) -> Estimate:
    return estimate(_question(cell, machine), Parallelism())


def _question(cell: Cell, machine: dict[str, float]) -> Question:
    shape, cluster = load_model(cell.model), load_cluster(_CLUSTER)
    if cell.tuning == "lora":
        shape = replace(shape, adapters=adapters_of(_LORA))
    kernel = _KERNELS[cell.attention]
    constants = replace(
        constants_of(_CLUSTER),
        dense_efficiency=machine["gemm_half"] / cluster.peak_flops,
        attention_forward_efficiency=machine[f"{kernel}_forward"] / cluster.peak_flops,
        attention_backward_efficiency=machine[f"{kernel}_backward"] / cluster.peak_flops,
        memory_efficiency=machine["hbm"] / cluster.memory_bandwidth,
        host_efficiency=1.0,
        device_share=1.0,
        host_share=_USABLE_HOST,
    )
    cluster = replace(
        cluster,
        device_bytes=parse_bytes(described(_CLUSTER)["device_bytes"]),
        host_bytes=int(machine["host_bytes"]),
        host_bandwidth=min(machine["to_host"], machine["to_device"]),
    )
    return Question(
        shape=shape,
        cluster=cluster,
        constants=constants,
        gpus=1,
        seq_len=cell.tokens,
        batch_size=1,
        precision="bf16-true",
        **_METHODS[cell.method],
    )


def main() -> int:
    """Writes the section of the page, or compares it."""
    return write_or_check(
        "agreement", __doc__, ROOT / "docs" / "estimate.md",
        lambda: section(comparisons(), comparisons("rehearsed_further")),
    )  # fmt: skip


def section(found: Sequence[Comparison], further: Sequence[Comparison]) -> str:
    """Returns the table of Memo's default and checkpointing, and sentences about all other rehearsals."""
    shown = [
        c for c in found if c.cell.method in _SHOWN and not (c.cell.method == "checkpointing" and c.host != "1TiB")
    ]
    head = ["", "tokens", "host", "step", "device memory", "host memory"]
    rows = table(head, [list(_row(c)) for c in sorted(shown, key=_order)])
    given = [c for c in found if c.cell.method not in _SHOWN]
    wrong = sum((c.estimated.status == "ok") != c.fits for c in (*found, *further))
    llamas = [c for c in further if "llama" in c.cell.model]
    others = [c for c in further if c not in llamas]
    return (
        f"{rows}\n\nThe largest errors of time, device memory and host memory elsewhere:\n\n"
        f"- with `alpha=0` or `alpha=1`: {_largest(given)};\n"
        f"- in rehearsals that were run after the estimate had been compared with those above (Llama 1B, 3B and 8B, "
        f"LoRA and full,\n  64K to 192K, hosts of 64 and 256 GiB, two attention kernels): {_largest(llamas)};\n"
        f"- the same for Qwen3 8B: {_largest(others)}.\n\n"
        f"Whether training fits is estimated wrongly in {wrong} of all {len(found) + len(further)} rehearsals."
    )


def _largest(comparisons: Sequence[Comparison]) -> str:
    errors = [c.errors for c in comparisons if c.fits]
    largest = (max(map(abs, column)) for column in zip(*errors, strict=True))
    return f"{', '.join(f'{error:.1f} %' for error in largest)} ({len(errors)} rehearsals)"


def _order(comparison: Comparison) -> tuple[Any, ...]:
    cell = comparison.cell
    return cell.method == "checkpointing", cell.model, cell.tuning, cell.tokens, comparison.host != "128GiB"


def _row(comparison: Comparison) -> Iterator[str]:
    cell = comparison.cell
    yield f"{_SHOWN[cell.method]}, {cell.model}, {cell.tuning}"
    yield tokens(cell.tokens)
    yield "any" if cell.method == "checkpointing" else comparison.host
    if not comparison.fits:
        yield f"{comparison.rehearsed['status']}, {comparison.estimated.status}"
        yield from ("-", "-")
        return
    formats = (format_seconds, format_bytes, format_bytes)
    for form, measured, error in zip(formats, comparison.measured, comparison.errors, strict=True):
        yield f"{form(measured)}, {round(error, 1) + 0.0:+.1f} %" if measured else "0, 0"


if __name__ == "__main__":
    sys.exit(main())
