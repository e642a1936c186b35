"""Compares estimates with runs on Hopper, and generates the section of docs/estimate_calibration.md.

    python benchmarks/anchors.py
    python benchmarks/anchors.py --check   exits with status 1 if the page is out of date

Steps of this project were measured on an H200 (benchmarks/results/gpu). Other programs ran what is published: what
differs from the estimate is named beside each number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

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
    """A number of a published run, and the same number of the estimate."""

    what: str
    published: float
    told: float

    @property
    def error(self) -> float:
        """Error of the estimate in percent of the published number."""
        return 100 * (self.told - self.published) / self.published


def anchors(constants: str = _CLUSTER) -> list[Anchor]:
    """Return the published numbers, each with the estimate's.

    Args:
        constants: Cluster whose constants are used, so that those of the A800 can be compared.
    """
    dense, mixture = (_trl(model, constants) for model in ("qwen3_8b", "qwen3_30b_a3b"))
    assert dense.step_seconds is not None and mixture.step_seconds is not None
    notes, example = (
        "seconds of a step, TRL 1.13's release notes",
        "seconds of a step, example of TRL's pull request 6845",
    )
    return [
        Anchor(what=f"Qwen3-8B, {notes}", published=380.0, told=dense.step_seconds),
        Anchor(what=f"Qwen3-8B, {example}", published=364.0, told=dense.step_seconds),
        Anchor(
            what="Qwen3-8B, GB of a device, without checkpoints", published=56.2, told=_gigabytes(dense, _CHECKPOINTS)
        ),
        Anchor(what=f"Qwen3-30B-A3B, {example}", published=483.0, told=mixture.step_seconds),
        Anchor(
            what="Qwen3-30B-A3B, GB of a device, without checkpoints and model state",
            published=46.0,
            told=_gigabytes(mixture, _CHECKPOINTS | _STATE),
        ),
    ]


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
        [new.what, f"{new.published:.1f}", f"{new.told:.1f}", f"{new.error:+.1f} %", f"{old.error:+.1f} %"]
        for new, old in zip(anchors(), anchors("a800"), strict=True)
    ]
    head = ["1,048,576 tokens, 8 H100", "published", "estimate", "error", "error with the A800's rates"]
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
