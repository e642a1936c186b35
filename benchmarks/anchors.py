"""Compares estimates with published runs on Hopper, and generates the section of docs/estimate_calibration.md.

    python benchmarks/anchors.py
    python benchmarks/anchors.py --check   exits with status 1 if the page is out of date

Other programs ran these: what differs from the estimate is named beside each number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pages.generated_section import write_or_check
from pages.markdown import table

from lightning_memo.estimate import Estimate, Parallelism, Question, constants_of, estimate, load_cluster, load_model

ROOT: Final = Path(__file__).parents[1]
_CLUSTER: Final = "h100"
_TIMES: Final = {"dense_efficiency", "attention_forward_efficiency", "attention_backward_efficiency"}


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
    long = _trl(constants)
    assert long.step_seconds is not None
    # Checkpoints are on the host there, and on the device in the estimate.
    device = (long.device_bytes["total"] - long.device_bytes["activations"]) / 1e9
    return [
        Anchor(what="seconds of a step, TRL 1.13's release notes", published=380.0, told=long.step_seconds),
        Anchor(what="seconds of a step, another report of the run", published=364.0, told=long.step_seconds),
        Anchor(what="GB of a device, without checkpoints", published=56.2, told=device),
    ]


def _trl(constants: str) -> Estimate:
    """The estimate of TRL's run: checkpoints, ring attention over 8 H100 and ZeRO 3, in bf16."""
    cluster = replace(load_cluster(_CLUSTER), device_bytes=2**38)  # as if there were room for the checkpoints
    question = Question(
        shape=load_model("qwen3_8b"),
        cluster=cluster,
        constants=replace(constants_of(_CLUSTER), **{name: getattr(constants_of(constants), name) for name in _TIMES}),
        method="full_recompute",
        gpus=8,
        seq_len=2**20,
        batch_size=1,
        precision="bf16-true",
    )
    return estimate(question, Parallelism(cp=8, zero_stage=3))


def section() -> str:
    """Returns the constants with their origins, and the errors."""
    constants = constants_of(_CLUSTER)
    origins = [
        [f"`{name}`", f"{getattr(constants, name):.4g}", origin]
        for name, _, origin in (line.partition(": ") for line in constants.measurements)
    ]
    rows = [
        [new.what, f"{new.published:.1f}", f"{new.told:.1f}", f"{new.error:+.1f} %", f"{old.error:+.1f} %"]
        for new, old in zip(anchors(), anchors("a800"), strict=True)
    ]
    head = ["Qwen3-8B, 1,048,576 tokens, 8 H100", "published", "estimate", "error", "error with the A800's rates"]
    lines = ["| constant | value | origin |", "| --- | --: | --- |", *(f"| {' | '.join(row)} |" for row in origins)]
    return "\n".join(lines) + "\n\n" + table(head, rows)


def main() -> int:
    """Writes the section of the page, or compares it."""
    return write_or_check("anchors", __doc__, ROOT / "docs" / "estimate_calibration.md", section)


if __name__ == "__main__":
    raise SystemExit(main())
