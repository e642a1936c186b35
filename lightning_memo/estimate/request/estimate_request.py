"""An estimate request, which describes a training run, and its result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lightning_memo.artifacts.compressed_layout import SwapPrecision
from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.estimate.inputs.cluster import Cluster
from lightning_memo.estimate.inputs.constants import Constants
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import Precision
from lightning_memo.estimate.memory.slice_settings import Slices
from lightning_memo.shapes.model_shape import ModelShape

Status = Literal["ok", "oom", "oohm"]
"""Whether training fits ("ok"), the device is out of memory ("oom"), or the host is out of memory ("oohm")."""

Storage = dict[str, dict[str, float]]
"""Shares of the tokens for which each kind of tensor is kept on the device ("keep"), swapped to the host ("swap"),
spilled to a disk ("spill") and recomputed ("recompute"). Kinds are "input", "attention", the outputs of matrix products
by the names of their modules, and "all" for all other tensors."""

ZeroCommunication = Literal["none", "int8", "int4"]

Method = Literal["memo", "full_recompute", "full_swap", "megatron", "deepspeed_ulysses", "fpdt", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A training to estimate: model, cluster, method and batch, without the parallelism."""

    shape: ModelShape
    """Sizes of the model."""

    cluster: Cluster
    """GPUs, hosts and links."""

    constants: Constants
    """Calibrated constants of the estimate, such as efficiencies."""

    method: Method
    """Training method to estimate."""

    gpus: int
    """Number of GPUs of the run."""

    seq_len: int
    """Tokens per sequence."""

    batch_size: int
    """Sequences per optimizer step, over all devices."""

    alpha: float | None = None
    """Fraction of the tokens whose activations are swapped, or None to let the planner choose."""

    precision: Precision = "bf16-mixed"
    """Precision of training with this package."""

    zero_shard_size: int | None = None
    """Number of devices over which ZeRO 3 shards weights between forward and backward, or None for all."""

    zero_communication: ZeroCommunication = "none"
    """How ZeRO sends weights and gradients."""

    swap_precision: SwapPrecision = "exact"
    """How activations are swapped."""

    slices: Slices | None = None
    """Settings for layers that run slice by slice, or None to run layers on whole sequences."""

    spill_bytes: int = 0
    """Disk space per node for layer calls that do not fit in host memory."""

    stage: int = 0
    """Pipeline stage of the device. `estimate` tries those that may need the most memory."""

    def __post_init__(self) -> None:
        check_range(self, {"gpus": 1, "seq_len": 1, "batch_size": 1})

    def runs(self, parallel: Parallelism) -> tuple[Question, ...]:
        """The question for each run of consecutive equal layers of the first pipeline stage alone, in order.

        Equal layers save the same tensors, so that the first layer is alone if embeddings are not trained.
        """
        runs = [replace(part, layers=part.layers // parallel.pp) for part in self.shape.runs]
        if self.shape.adapters is not None and runs[0].layers > 1:
            runs = [replace(runs[0], layers=1, input_gradient=False), replace(runs[0], layers=runs[0].layers - 1)]
        return tuple(replace(self, shape=part) for part in runs)

    @property
    def sliced(self) -> Slices | None:
        """The slices if the sequence is longer than one slice, otherwise None."""
        return self.slices if self.slices is not None and self.seq_len > self.slices.tokens else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Prediction for a question. If the status is not "ok", times are None, and sizes are what would be needed."""

    status: Status
    """Whether training fits, or which memory is too small."""

    method: Method
    """Method of the question."""

    model: str
    """Name of the model."""

    seq_len: int
    """Tokens per sequence."""

    gpus: int
    """Number of GPUs of the run."""

    parallel: Parallelism
    """Parallel sizes of the estimate."""

    alpha: float | None
    """Fraction of the tokens all of whose activations are swapped, or None if the method does not swap."""

    storage: Storage | None
    """What becomes of each kind of tensor, or None if alpha decides for all of them."""

    step_seconds: float | None
    """Time of an optimizer step."""

    recompute_seconds: float | None
    """Part of it in which activations are recomputed."""

    mfu: float | None
    """Model FLOPs utilization in percent: causal attention, without recomputation."""

    hfu: float | None
    """Hardware FLOPs utilization in percent: including recomputation."""

    tokens_per_gpu_per_second: float | None
    """Tokens per second, divided by the number of GPUs."""

    device_bytes: dict[str, int]
    """Memory of the fullest device by category, with the sum as "total"."""

    host_bytes: int
    """Host memory per node."""

    disk_bytes: int
    """Disk space per node, which is written and read in every step."""

    slices: Slices | None
    """Slices of the question."""

    speeds: str
    """Where the speeds of the estimate come from, if they were not measured on the machine; otherwise empty."""

    limits: list[str]
    """Sentences: what happens to activations, what limits alpha, and which rules besides the linear program apply."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate as plain data for JSON."""
        return asdict(self)
