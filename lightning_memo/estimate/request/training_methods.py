"""Training methods: what each recomputes, how it manages memory, and which parallelisms it supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import ElementBytes, bytes_of, program_bytes
from lightning_memo.estimate.memory.layer_buffers import has_known_buffers
from lightning_memo.estimate.request.estimate_request import Method, Question
from lightning_memo.shapes.model_shape import Kernels

Recomputed = Literal["alpha", "all", "nothing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodTraits:
    """Traits of a training method."""

    recomputes: Recomputed
    """Recomputation in a layer's backward: of tokens that were not swapped, of the layer with attention, or none."""

    planned: bool
    """Whether buffers have planned addresses, which avoids fragmentation and reorganization."""

    whole_logits: bool = False
    """Whether the logits of all tokens exist at once. Otherwise the loss is computed in chunks of tokens."""

    ulysses: bool = False
    """Whether context parallelism exchanges heads (Ulysses), rather than passing keys and values around a ring."""

    tensor_parallel: bool = True
    streamed: bool = False
    """Whether slices of tokens run one after another, with keys, values and hidden states on the host."""

    megatron: bool = False
    """Whether the papers ran the method in Megatron-LM, which keeps gradients in fp32."""

    attention_time: float = 1.0
    """Time of attention in the paper's program, relative to Megatron-LM."""

    fused: bool = False
    """Whether the method is a program with fused kernels. The others run the layers of Hugging Face."""


_MEMO: Final = MethodTraits(recomputes="alpha", planned=True, megatron=True)
_DEEPSPEED: Final = MethodTraits(
    recomputes="all", planned=False, whole_logits=True, ulysses=True, tensor_parallel=False, fused=True,
    # From table 3 of MEMO. FlashAttention 1 takes twice the time of FlashAttention 2 (FlashAttention-2, section 4), as
    # does a kernel that computes masked pairs. The paper does not report which kernel was used.
    attention_time=2.0,
)  # fmt: skip

METHOD_TRAITS: Final[dict[Method, MethodTraits]] = {
    "memo": _MEMO,
    "full_swap": _MEMO,
    "full_recompute": MethodTraits(recomputes="all", planned=True, megatron=True),
    "megatron": MethodTraits(recomputes="all", planned=False, whole_logits=True, megatron=True, fused=True),
    "deepspeed_ulysses": _DEEPSPEED,
    "fpdt": MethodTraits(
        recomputes="all", planned=False, ulysses=True, tensor_parallel=False, streamed=True, fused=True
    ),
    "plain": MethodTraits(recomputes="nothing", planned=False, whole_logits=True, megatron=True),
}


def runs_here(question: Question) -> bool:
    """Whether this package trains, rather than one of the papers' programs."""
    return not (METHOD_TRAITS[question.method].fused or question.constants.published)


def layer_kernels(question: Question) -> Kernels:
    """Return the kernels of the layers. The papers' programs use fused kernels."""
    return question.shape.kernels if runs_here(question) else "fused"


def element_bytes(question: Question) -> ElementBytes:
    """Return the sizes of elements: by precision for this package, fixed for the papers' programs."""
    if runs_here(question):
        return bytes_of(question.precision, question.gpus)
    return program_bytes(4 if METHOD_TRAITS[question.method].megatron else 2)


def why_not_by_method(question: Question, parallel: Parallelism) -> str:
    """Return the reason why the method of a question cannot run with a parallelism; empty if it can."""
    method, traits = question.method, METHOD_TRAITS[question.method]
    if parallel.expert_parallel_size > 1 and (question.shape.experts == 1 or not runs_here(question)):
        size = parallel.expert_parallel_size
        return f"expert_parallel_size={size} is for mixtures of experts that this package trains: it must be 1"
    if parallel.cp % parallel.expert_parallel_size and parallel.expert_parallel_size % parallel.cp:
        return f"expert_parallel_size={parallel.expert_parallel_size} and cp={parallel.cp}: one must divide the other"
    if question.shape.parts and parallel.pp > 1:
        return "models whose layers differ are estimated without pipeline parallelism: pp must be 1"
    if question.slices is not None and parallel.tp * parallel.cp * parallel.pp > 1:
        return "slices are estimated for data parallelism only: tp, cp and pp must be 1"
    if question.spill_bytes and parallel.pp > 1:
        return "spill_memory is estimated without pipeline parallelism: pp must be 1"
    if why_not := _why_not_staged(question, parallel):
        return why_not
    if not traits.tensor_parallel and (parallel.tp > 1 or parallel.pp > 1):
        return f"{method} has neither tensor nor pipeline parallelism: tp and pp must be 1"
    # The DeepSpeed version of FPDT divides heads unevenly.
    if traits.ulysses and not traits.streamed and question.shape.heads % parallel.cp:
        return f"cp={parallel.cp} does not divide the {question.shape.heads} heads, which Ulysses exchanges"
    if traits.ulysses and parallel.cp > question.shape.heads:
        return f"cp={parallel.cp} is more than the {question.shape.heads} heads, which Ulysses exchanges"
    if parallel.zero_stage > 1 and traits.megatron and (question.constants.published or method == "megatron"):
        return f"zero_stage={parallel.zero_stage}: Megatron-LM supports stage 1 only, its distributed optimizer"
    if question.zero_communication != "none" and parallel.zero_stage == 0:
        return f"zero_communication={question.zero_communication} needs shards: zero_stage must be 1, 2 or 3"
    if question.zero_shard_size is not None:
        return _why_not_sharded(question.zero_shard_size, parallel)
    return ""


def _why_not_staged(question: Question, parallel: Parallelism) -> str:
    staged = parallel.pp > 1 and runs_here(question)
    for name, default in (("virtual_pipeline_size", 1), ("pipeline_schedule", "1f1b")):
        if (given := getattr(parallel, name)) != default and not staged:
            return f"{name}={given} is for pipelines of this package: give pp, or {name}={default}"
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


def check_question(question: Question) -> None:
    """Refuse a question that is not estimated with any parallelism.

    Raises:
        ValueError: The message is one line with the setting and what to give instead.
    """
    why_not = ""
    sent, size = question.zero_communication, question.zero_shard_size
    if (sent != "none" or size is not None) and not runs_here(question):
        given = f"zero_communication={sent}" if sent != "none" else f"zero_shard_size={size}"
        why_not = f"{given} is estimated for what this package runs: leave it out, or give method=memo"
    if question.swap_precision != "exact" and not (
        METHOD_TRAITS[question.method].recomputes == "alpha" and runs_here(question)
    ):
        why_not = (
            f"swap_precision={question.swap_precision} is estimated for what this package swaps: leave it out, or give "
            "method=memo"
        )
    if question.spill_bytes and not why_not:
        why_not = _why_not_spilled(question)
    if question.slices is not None and not why_not:
        why_not = _why_not_sliced(question)
    if why_not:
        raise ValueError(why_not)


def _why_not_spilled(question: Question) -> str:
    if not (question.method == "memo" and runs_here(question)):
        return "spill_memory is estimated only for method=memo on clusters other than a800: leave it out"
    if question.slices is not None:
        return "spill_memory is estimated only for layers that run on whole sequences: leave it or slice_tokens out"
    if question.cluster.disk_write_bandwidth is None or question.cluster.disk_read_bandwidth is None:
        return (
            "spill_memory: give cluster.disk_write_bandwidth and cluster.disk_read_bandwidth too, "
            "for example 4GB and 6GB"
        )
    return ""


def _why_not_sliced(question: Question) -> str:
    assert question.slices is not None
    if not (question.method == "memo" and runs_here(question) and has_known_buffers(question.shape)):
        return (
            "slice_tokens is estimated only for method=memo, dense models with layers of Llama or Qwen3, and clusters "
            "other than a800: leave it out"
        )
    if question.slices.schedule == "slice" and question.gpus > 1:
        return (
            f"schedule=slice is estimated for one GPU only: give gpus=1 instead of {question.gpus}, or host_backed=all"
        )
    if question.slices.schedule == "slice" and element_bytes(question).copies_weights:
        return "schedule=slice is not estimated for precision=bf16-mixed: give precision=bf16-true, or host_backed=all"
    return ""
