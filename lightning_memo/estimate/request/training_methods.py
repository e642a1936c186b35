"""What each method of training stores, recomputes and may divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import ElementBytes, bytes_of, program_bytes
from lightning_memo.estimate.memory.layer_buffers import has_known_buffers
from lightning_memo.estimate.request.question import Method, Question
from lightning_memo.shapes.model_shape import Kernels

Recomputed = Literal["alpha", "all", "nothing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodTraits:
    """Of a method."""

    recomputes: Recomputed
    """In the backward of a layer: what was not swapped; all of the layer, attention included; nothing."""

    planned: bool
    """Whether buffers have planned places, so that memory neither fragments nor is reorganised."""

    whole_logits: bool = False
    """Whether logits of all tokens are alive at once; else the loss goes over the tokens in chunks."""

    ulysses: bool = False
    """Whether context parallelism divides the heads in attention, not keys and values in a ring."""

    tensor_parallel: bool = True
    streamed: bool = False
    """Whether slices of tokens run one by one, with keys, values and hidden states on the host."""

    megatron: bool = False
    """Whether the papers ran it in Megatron-LM, which keeps gradients in fp32."""

    attention_time: float = 1.0
    """Of the papers' program: what its attention takes, over Megatron-LM's."""

    fused: bool = False
    """Whether it is a program with fused kernels, whoever measured it; the others run the layers of Hugging Face."""


_MEMO: Final = MethodTraits(recomputes="alpha", planned=True, megatron=True)
_DEEPSPEED: Final = MethodTraits(
    recomputes="all", planned=False, whole_logits=True, ulysses=True, tensor_parallel=False, fused=True,
    # Read off table 3 of MEMO. FlashAttention's first version takes twice the second's time (FlashAttention-2, section
    # 4), and so does a kernel that computes masked pairs, too; which it was is not told.
    attention_time=2.0,
)  # fmt: skip

_FPDT: Final = MethodTraits(
    recomputes="all", planned=False, ulysses=True, tensor_parallel=False, streamed=True, fused=True
)

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
    """Whether it is this project that trains, rather than one of the papers' programs."""
    return not (METHOD_TRAITS[question.method].fused or question.constants.published)


def layer_kernels(question: Question) -> Kernels:
    """Which kernels the layers have: those of the papers' programs are fused."""
    return question.shape.kernels if runs_here(question) else "fused"


def element_bytes(question: Question) -> ElementBytes:
    """What numbers take: the precision is this project's, the papers' programs have theirs."""
    if runs_here(question):
        return bytes_of(question.precision, question.gpus)
    return program_bytes(4 if METHOD_TRAITS[question.method].megatron else 2)


def why_not_by_method(question: Question, parallel: Parallelism) -> str:
    """Why a question's method can't run with a parallelism; empty if it can."""
    method, traits = question.method, METHOD_TRAITS[question.method]
    if question.slices is not None and parallel.tp * parallel.cp * parallel.pp > 1:
        return "slices are estimated for data parallelism only: tp, cp and pp must be 1"
    if question.spill_bytes and parallel.pp > 1:
        return "the disk is estimated without pipelines: pp must be 1"
    if not traits.tensor_parallel and (parallel.tp > 1 or parallel.pp > 1):
        return f"{method} has neither tensor nor pipeline parallelism: tp and pp must be 1"
    # FPDT came with a DeepSpeed that divides heads unevenly.
    if traits.ulysses and not traits.streamed and question.shape.heads % parallel.cp:
        return f"{parallel.cp} does not divide the heads, {question.shape.heads}, which Ulysses exchanges"
    if traits.ulysses and parallel.cp > question.shape.heads:
        return f"{parallel.cp} devices can't share the heads, {question.shape.heads}, which Ulysses exchanges"
    if parallel.zero_stage > 1 and traits.megatron and (question.constants.published or method == "megatron"):
        return f"zero_stage={parallel.zero_stage} is not what Megatron-LM has: its distributed optimizer is stage 1"
    return ""


def check_question(question: Question) -> None:
    """Refuse what is not estimated, however the work is divided.

    Raises:
        ValueError: one line says what, and what to give.
    """
    why_not = ""
    if question.spill_bytes:
        why_not = _why_not_spilled(question)
    if question.slices is not None and not why_not:
        why_not = _why_not_sliced(question)
    if why_not:
        raise ValueError(why_not)


def _why_not_spilled(question: Question) -> str:
    if not (question.method == "memo" and runs_here(question)):
        return "spill_memory is estimated for method=memo, and clusters other than a800: leave it out"
    if question.slices is not None:
        return "spill_memory is for whole layers: leave it or slice_tokens out"
    if question.cluster.disk_write_bandwidth is None or question.cluster.disk_read_bandwidth is None:
        return "spill_memory: give cluster.disk_write_bandwidth and cluster.disk_read_bandwidth, like 4GB and 6GB"
    return ""


def _why_not_sliced(question: Question) -> str:
    assert question.slices is not None
    if not (question.method == "memo" and runs_here(question) and has_known_buffers(question.shape)):
        return (
            "slice_tokens is estimated for method=memo, dense models with layers of Llama, and clusters other than "
            "a800: leave it out"
        )
    if question.slices.schedule == "slice" and question.gpus > 1:
        return f"schedule=slice is estimated for one GPU: give gpus=1, not {question.gpus}, or host_backed=all"
    if question.slices.schedule == "slice" and element_bytes(question).copies_weights:
        return "schedule=slice is not estimated for precision=bf16-mixed: give bf16-true, or host_backed=all"
    return ""
