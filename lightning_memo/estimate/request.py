"""The training to estimate: method, settings and parallelism, and the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.estimate.cluster import Cluster, Constants
from lightning_memo.estimate.layer_buffers import has_known_buffers
from lightning_memo.estimate.saved_tensors import ElementBytes, Precision, bytes_of
from lightning_memo.estimate.slice_settings import Slices
from lightning_memo.shapes.model_shape import ModelShape

SEQUENCE: Final = "sequence"
BATCH: Final = "batch"
_EXPERT_RANKS: Final = "data- and context-parallel processes"
Schedule = Literal["1f1b", "zero_bubble"]

_COUNTS = ("tp", "cp", "dp", "pp", "expert_parallel_size", "virtual_pipeline_size")

Status = Literal["ok", "oom", "oohm"]
"""Whether training fits ("ok"), the device is out of memory ("oom"), or the host is out of memory ("oohm")."""
Storage = dict[str, dict[str, float]]
"""Shares of the tokens for which each kind of tensor is kept on the device ("device"), swapped to the host ("host"),
spilled to a disk ("disk") and recomputed ("recompute"). Kinds are "input", "attention", the outputs of matrix products
by the names of their modules, and "other" for all other tensors."""
ZeroCommunication = Literal["none", "int8", "int4"]
Method = Literal["memo", "full_recompute", "selective_checkpointing", "full_swap", "plain"]
_SUCCESSORS: Final = {
    "megatron": "method=full_recompute",
    "deepspeed_ulysses": "method=full_recompute parallel.zero_stage=3",
    "fpdt": "method=memo slice_tokens=64K stream_from_host=hidden",
}
"""Methods of earlier versions, and settings for this project's training that are closest to them."""


@dataclass(frozen=True, order=True, slots=True)
class Obstacle:
    """A size, and the property that it does not divide."""

    size: int
    of: str
    count: int

    def __str__(self) -> str:
        return f"{self.size} does not divide the {self.of}, {self.count}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Sizes of tensor, context, data, pipeline and expert parallelism, and the ZeRO stage.

    Tensor parallelism divides heads and feed-forward, or the experts, and the tokens in between (sequence parallelism).
    Context parallelism divides the tokens. Expert parallelism divides the experts of each layer over data- and
    context-parallel ranks, which exchange tokens. ZeRO shards over data- and context-parallel ranks, and experts over
    those that have the same ones. Each stage of a pipeline has `virtual_pipeline_size` blocks of layers, and with
    `pipeline_schedule="zero_bubble"` computes gradients of weights later than those of hidden states.

    Raises:
        ValueError: A size is below 1, the stage is not from 0 to 3, or the schedule is unknown.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    zero_stage: int = 0
    expert_parallel_size: int = 1
    virtual_pipeline_size: int = 1
    pipeline_schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        check_range(self, dict.fromkeys(_COUNTS, 1))
        if self.zero_stage > 3:
            raise ValueError(f"zero_stage={self.zero_stage} must be from 0 to 3")
        if self.pipeline_schedule not in get_args(Schedule):
            raise ValueError(f"pipeline_schedule={self.pipeline_schedule!r} must be 1f1b or zero_bubble")

    @property
    def weights_wait(self) -> bool:
        """Whether gradients of weights are computed later than those of hidden states."""
        return self.pipeline_schedule == "zero_bubble"

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def obstacles(self, shape: ModelShape, seq_len: int, batch_size: int) -> tuple[Obstacle, ...]:
        """Return the properties of a model, its sequences and a batch that the sizes do not divide."""
        dense = [part.ffn for part in shape.runs if part.experts == 1]
        experts = [(self.tp * self.expert_parallel_size, "experts", n) for n in {shape.experts} - {1}]
        return tuple(
            Obstacle(size, of, count)
            for size, of, count in (
                (self.tp, "heads", shape.heads),
                (self.tp, "key and value heads", shape.kv_heads),
                *((self.tp, "width of the feed-forward", ffn) for ffn in dense[:1]),
                *experts,
                (self.expert_parallel_size, _EXPERT_RANKS, self.dp * self.cp),
                (self.pp * self.virtual_pipeline_size, "layers", shape.layers),
                (self.cp * self.tp, SEQUENCE, seq_len),
                (self.dp, BATCH, batch_size),
            )
            if count % size
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateRequest:
    """A training to estimate: model, cluster, method and batch, without the parallelism.

    Raises:
        ValueError: A number is out of range, or the method is unknown.
    """

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
    """Precision of the training."""

    zero_shard_size: int | None = None
    """Number of devices over which ZeRO 3 shards weights between forward and backward, or None for all."""

    zero_communication: ZeroCommunication = "none"
    """How ZeRO sends weights and gradients."""

    slices: Slices | None = None
    """Settings for layers that run slice by slice, or None to run layers on whole sequences."""

    disk_bytes: int = 0
    """Disk space per node for layer calls that do not fit in host memory."""

    fused_kernels: bool = True
    """Whether layers run by fused kernels where the method and the parallelism allow it."""

    stage: int = 0
    """Pipeline stage of the device. `estimate` tries those that may need the most memory."""

    def __post_init__(self) -> None:
        check_range(self, {"gpus": 1, "seq_len": 1, "batch_size": 1})
        for name, successor in _SUCCESSORS.items():
            if self.method == name:
                raise ValueError(
                    f"method={name}: programs of papers are not estimated; give {successor}, which is the closest "
                    "training of this project"
                )
        if self.method not in get_args(Method):
            raise ValueError(f"method={self.method!r}: give {', '.join(get_args(Method))}")

    @property
    def recomputes(self) -> bool:
        """Whether the backward of a layer computes the layer again, and nothing is swapped."""
        return self.method == "full_recompute" or self.keeps_attention

    @property
    def keeps_attention(self) -> bool:
        """Whether it does so without attention, whose output stays on the device."""
        return self.method == "selective_checkpointing"

    @property
    def swaps(self) -> bool:
        """Whether the method swaps activations, all of them or by a plan."""
        return self.method in ("memo", "full_swap")

    @property
    def has_whole_logits(self) -> bool:
        """Whether the logits of all tokens exist at once. Otherwise the loss is computed in chunks of tokens."""
        return self.method == "plain"

    @property
    def element_bytes(self) -> ElementBytes:
        """Sizes of elements."""
        return bytes_of(self.precision, self.gpus)

    @property
    def uses_tf32(self) -> bool:
        """Whether matrix products in fp32 are assumed to use TF32, at half the peak of bf16."""
        return self.precision == "32-true" and self.cluster.bf16

    @property
    def product_flops(self) -> float:
        """Peak of matrix products in FLOP/s."""
        return self.cluster.peak_flops / (2 if self.uses_tf32 else 1)

    def with_kernels(self, parallel: Parallelism) -> EstimateRequest:
        """The same request, whose shape knows by which kernels its layers run."""
        fused = self.fused_kernels and self.swaps and parallel.tp == 1
        if parallel.weights_wait and self.shape.adapters is not None:
            fused = False  # adapters run as they are; their layers' norms, which are fused, do not count
        parts = tuple(replace(part, fused=fused) for part in self.shape.parts)
        return replace(self, shape=replace(self.shape, fused=fused, parts=parts))

    def runs(self, parallel: Parallelism) -> tuple[EstimateRequest, ...]:
        """The request for each run of consecutive equal layers of the first pipeline stage alone, in order.

        Equal layers save the same tensors, so that the first layer is alone if embeddings are not trained.
        """
        runs = [replace(part, layers=part.layers // parallel.pp) for part in self.shape.runs]
        if self.shape.adapters is not None and runs[0].layers > 1:
            runs = [replace(runs[0], layers=1, input_gradient=False), replace(runs[0], layers=runs[0].layers - 1)]
        return tuple(replace(self, shape=part) for part in runs)

    def sliced(self, tokens: int) -> Slices | None:
        """The slices if the tokens of a process are more than one slice, otherwise None."""
        return self.slices if self.slices is not None and tokens > self.slices.tokens else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Prediction for a training. If the status is not "ok", times are None, and sizes are what would be needed."""

    status: Status
    """Whether training fits, or which memory is too small."""

    method: Method
    """Method of the training."""

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
    """Slices of the training."""

    speeds: str
    """Where the speeds of the estimate come from, if they were not measured on the machine; otherwise empty."""

    limits: list[str]
    """Sentences: what happens to activations, what limits alpha, and which rules besides the linear program apply."""

    longest: int | None = None
    """Tokens of the longest sequence that fits with this parallelism in whole layers, or in the given slices; None if
    none fits or it was not asked for."""

    longest_in_slices: int | None = None
    """Tokens of the longest sequence that fits only in slices that training chooses by itself, or None."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate as plain data for JSON."""
        return asdict(self)


def why_not_parallel(request: EstimateRequest, parallel: Parallelism) -> str:
    """Return the reason why a training cannot run with a parallelism; empty if it can."""
    if parallel.expert_parallel_size > 1 and request.shape.experts == 1:
        return f"expert_parallel_size={parallel.expert_parallel_size} is for mixtures of experts: it must be 1"
    if parallel.cp % parallel.expert_parallel_size and parallel.expert_parallel_size % parallel.cp:
        return f"expert_parallel_size={parallel.expert_parallel_size} and cp={parallel.cp}: one must divide the other"
    if request.shape.parts and parallel.pp > 1:
        return "models whose layers differ are estimated without pipeline parallelism: pp must be 1"
    if request.slices is not None and parallel.tp * parallel.pp > 1:
        return "slices are estimated without tensor and pipeline parallelism: tp and pp must be 1"
    if request.disk_bytes and parallel.pp > 1:
        return "disk_memory is estimated without pipeline parallelism: pp must be 1"
    if why_not := _why_not_staged(parallel):
        return why_not
    if request.zero_communication != "none" and parallel.zero_stage == 0:
        return f"zero_communication={request.zero_communication} needs shards: zero_stage must be 1, 2 or 3"
    if request.zero_shard_size is not None:
        return _why_not_sharded(request.zero_shard_size, parallel)
    return ""


def _why_not_staged(parallel: Parallelism) -> str:
    for name, default in (("virtual_pipeline_size", 1), ("pipeline_schedule", "1f1b")):
        if (given := getattr(parallel, name)) != default and parallel.pp == 1:
            return f"{name}={given} is for pipelines: give pp, or {name}={default}"
    if parallel.weights_wait and parallel.zero_stage > 1:
        return (
            f"pipeline_schedule=zero_bubble is for zero_stage 0 and 1, not {parallel.zero_stage}: give one of them, or "
            "pipeline_schedule=1f1b"
        )
    return ""


def _why_not_sharded(size: int, parallel: Parallelism) -> str:
    if parallel.zero_stage < 3:
        return f"zero_shard_size={size} is for weights that are gathered again: zero_stage must be 3"
    ranks = parallel.dp * parallel.cp
    return f"zero_shard_size={size} does not divide dp x cp = {ranks}" if ranks % size else ""


def check_request(request: EstimateRequest) -> None:
    """Refuse a training that is not estimated with any parallelism.

    Raises:
        ValueError: The message is one line with the setting and what to give instead.
    """
    why_not = ""
    if request.precision != "32-true" and not request.cluster.bf16:
        why_not = f"precision={request.precision}: {request.cluster.device} has no bf16: give precision=32-true"
    if request.shape.quantization is not None and request.gpus > 1:
        why_not = f"quantization={request.shape.quantization} is estimated for one GPU only: give gpus=1"
    if request.disk_bytes and not why_not:
        why_not = _why_not_spilled(request)
    if request.slices is not None and not why_not:
        why_not = _why_not_sliced(request)
    if why_not:
        raise ValueError(why_not)


def _why_not_spilled(request: EstimateRequest) -> str:
    if request.method != "memo":
        return "disk_memory is estimated only for method=memo: leave it out"
    if request.slices is not None:
        return "disk_memory is estimated only for layers that run on whole sequences: leave it or slice_tokens out"
    if request.cluster.disk_write_bandwidth is None or request.cluster.disk_read_bandwidth is None:
        return (
            "disk_memory: give cluster.disk_write_bandwidth and cluster.disk_read_bandwidth too, "
            "for example 4GB and 6GB"
        )
    return ""


def _why_not_sliced(request: EstimateRequest) -> str:
    assert request.slices is not None
    if not (request.method == "memo" and has_known_buffers(request.shape)):
        return (
            "slice_tokens is estimated only for method=memo and dense models with layers of Llama or Qwen3: leave it "
            "out"
        )
    if request.slices.stream_from_host == "model" and request.gpus > 1:
        return (
            f"stream_from_host=model is estimated for one GPU only: give gpus=1 instead of {request.gpus}, or "
            "stream_from_host=hidden"
        )
    if request.slices.stream_from_host == "model" and request.element_bytes.copies_weights:
        return (
            "stream_from_host=model is not estimated for precision=bf16-mixed: give precision=bf16-true, or "
            "stream_from_host=hidden"
        )
    return ""
