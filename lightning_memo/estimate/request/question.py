"""What is asked, and what is answered."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.estimate.inputs.cluster import Cluster
from lightning_memo.estimate.inputs.constants import Constants
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import Precision
from lightning_memo.estimate.memory.slice_settings import Slices
from lightning_memo.shapes.model_shape import ModelShape

Status = Literal["ok", "oom", "oohm"]
"""It fits; the device is out of memory; the host is."""

Method = Literal["memo", "full_recompute", "full_swap", "megatron", "deepspeed_ulysses", "fpdt", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be trained, where and how; the parallelism apart."""

    shape: ModelShape
    cluster: Cluster
    constants: Constants
    method: Method
    gpus: int
    seq_len: int
    batch_size: int
    """Sequences of a step, over all devices."""

    alpha: float | None = None
    """Given, or None: the plan's."""

    precision: Precision = "bf16-mixed"
    """Of training by this project."""

    slices: Slices | None = None
    """Settings by which layers run slice after slice; None: they do not."""

    spill_bytes: int = 0
    """Room on a node's disk for layer calls that the host has no room for."""

    def __post_init__(self) -> None:
        check_range(self, {"gpus": 1, "seq_len": 1, "batch_size": 1})

    @property
    def sliced(self) -> Slices | None:
        """The slices, if the sequence is longer than one: else it runs without."""
        return self.slices if self.slices is not None and self.seq_len > self.slices.tokens else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is expected. Where the status is not "ok", times are None, and bytes are those that were too many."""

    status: Status
    method: Method
    model: str
    seq_len: int
    gpus: int
    parallel: Parallelism
    alpha: float | None
    """None where the method has none."""

    step_seconds: float | None
    mfu: float | None
    """Percent, nothing recomputed counted, attention causal."""

    hfu: float | None
    """Percent, what is recomputed counted."""

    tokens_per_gpu_per_second: float | None
    device_bytes: dict[str, int]
    """Of the fullest device, by kind, with their sum as "total"."""

    host_bytes: int
    """Of a node."""

    disk_bytes: int
    """Of a node, written and read in every step."""

    slices: Slices | None
    """As asked."""

    limits: list[str]
    """What happens to activations, what binds, which rule beyond the linear program was applied: a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
