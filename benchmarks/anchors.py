"""Compares estimates and rehearsals with runs on Hopper, and generates the section of docs/estimate_calibration.md.

    python benchmarks/anchors.py
    python benchmarks/anchors.py --check   exits with status 1 if the page is out of date

Steps of this project were measured on an H200 (benchmarks/results/gpu). Other programs ran what is published: what
differs from the estimate is named beside each number. Rehearsals of these programs are those of trl_long_context.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import agreement
from cells.methods import METHODS
from pages.comparison import is_settled
from pages.generated_section import write_or_check
from pages.markdown import table, tokens

from lightning_memo.estimate import (
    Estimate,
    EstimateRequest,
    Parallelism,
    constants_of,
    estimate,
    load_cluster,
    load_model,
)
from lightning_memo.utils.units import format_bytes

ROOT: Final = Path(__file__).parents[1]
_CLUSTER: Final = "h100"
_PULL_REQUEST: Final = "example of TRL's pull request 6845"
_REHEARSED: Final = ROOT / "benchmarks" / "results" / "rehearsed_published"
_CHECKPOINTS: Final = {"activations"}
_STATE: Final = {"parameters", "gradients", "optimizer"}
_TIMES: Final = (
    "dense_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "memory_efficiency",
)


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A number of a published run, the same number of the estimate, and that of the program on a simulated rank."""

    what: str
    published: float
    told: float
    rehearsed: float

    @property
    def error(self) -> float:
        """Error of the estimate in percent of the published number."""
        return 100 * (self.told - self.published) / self.published

    @property
    def rehearsed_error(self) -> float:
        """Error of the rehearsal in percent of the published number."""
        return 100 * (self.rehearsed - self.published) / self.published


def anchors(constants: str = _CLUSTER) -> list[Anchor]:
    """Return the published numbers, each with the estimate's.

    Args:
        constants: Cluster whose constants are used, so that those of the A800 can be compared.
    """
    rows = (
        ("qwen3_8b", "Qwen3-8B", {"TRL 1.13's release notes": 380.0, _PULL_REQUEST: 364.0}, 56.2, _CHECKPOINTS),
        ("qwen3_30b_a3b", "Qwen3-30B-A3B", {_PULL_REQUEST: 483.0}, 46.0, _CHECKPOINTS | _STATE),
        ("qwen3_32b", "Qwen3-32B", {_PULL_REQUEST: 1295.0}, 60.8, _CHECKPOINTS | _STATE),
    )
    found = []
    for model, name, seconds, gigabytes, on_host in rows:
        answer, result = _trl(model, constants), _rehearsed(model, offloaded=on_host >= _STATE)
        assert answer.step_seconds is not None
        found += [
            Anchor(
                what=f"{name}, seconds of a step, {source}",
                published=published,
                told=answer.step_seconds,
                rehearsed=result["seconds"][-1],
            )
            for source, published in seconds.items()
        ]
        without = "checkpoints and model state" if on_host >= _STATE else "checkpoints"
        found.append(
            Anchor(
                what=f"{name}, GB of a device, without {without}",
                published=gigabytes,
                told=_gigabytes(answer, on_host),
                rehearsed=result["memory"]["peak_allocated_bytes"] / 1e9,
            )
        )
    return found


def _rehearsed(model: str, offloaded: bool) -> dict[str, Any]:
    name = f"{model}-{2**20}{'-offload' if offloaded else ''}.json"
    return json.loads((_REHEARSED / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _gigabytes(answer: Estimate, on_host: set[str]) -> float:
    """GB of a device without what is on the host in the published run. In the estimate, it is on the device."""
    return (answer.device_bytes["total"] - sum(answer.device_bytes[name] for name in on_host)) / 1e9


def _trl(model: str, constants: str) -> Estimate:
    """The estimate of TRL's run: checkpoints, ring attention over 8 H100 and ZeRO 3, with weights in fp32."""
    cluster = replace(load_cluster(_CLUSTER), device_bytes=2**38)  # as if there were room for what is on the host
    request = EstimateRequest(
        shape=load_model(model),
        cluster=cluster,
        constants=replace(constants_of(_CLUSTER), **{name: getattr(constants_of(constants), name) for name in _TIMES}),
        method="full_recompute",
        gpus=8,
        seq_len=2**20,
        batch_size=1,
        precision="bf16-mixed",
    )
    return estimate(request, Parallelism(cp=8, zero_stage=3))


def section() -> str:
    """Returns the constants with their origins, and the errors beside measured and published runs."""
    constants = constants_of(_CLUSTER)
    origins = [
        [f"`{name}`", f"{getattr(constants, name):.4g}", origin]
        for name, _, origin in (line.partition(": ") for line in constants.measurements)
    ]
    rows = [
        [
            new.what,
            *(f"{number:.1f}" for number in (new.published, new.rehearsed)),
            f"{new.rehearsed_error:+.1f} %",
            f"{new.told:.1f}",
            *(f"{error:+.1f} %" for error in (new.error, old.error)),
        ]
        for new, old in zip(anchors(), anchors("a800"), strict=True)
    ]
    head = [
        "1,048,576 tokens, 8 H100", "published", "rehearsed", "error", "estimate", "error", "error with A800's rates",
    ]  # fmt: skip
    lines = ["| constant | value | origin |", "| --- | --: | --- |", *(f"| {' | '.join(row)} |" for row in origins)]
    return "\n\n".join(["\n".join(lines), _beside_measured(), table(head, rows)])


def _beside_measured() -> str:
    rows = []
    for each in agreement.measured_on_a_gpu():
        (seconds, device, _), (told, bytes_told, _) = each.measured, each.told
        name = f"{METHODS[each.cell.method].label}, {tokens(each.cell.tokens)}"
        name += "" if is_settled(each.rehearsed) else " (not settled)"
        sizes = map(format_bytes, (device, bytes_told))
        rows.append([name, f"{seconds:.2f} s", f"{told:.2f} s", f"{each.errors[0]:+.1f} %", *sizes])
    head = ["Llama 3 8B, LoRA, one H200", "measured", "estimate", "error", "device memory, measured", "estimate"]
    return table(head, rows)


def main() -> int:
    """Writes the section of the page, or compares it."""
    return write_or_check("anchors", __doc__, ROOT / "docs" / "estimate_calibration.md", section)


if __name__ == "__main__":
    raise SystemExit(main())
