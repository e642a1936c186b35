"""Bytes on the fullest device: the model's state by ZeRO stage, and what is alive beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import ElementBytes, program_bytes
from lightning_memo.estimate.memory.working_set import CHUNK_BYTES
from lightning_memo.estimate.request.question import Question
from lightning_memo.estimate.request.training_methods import element_bytes, runs_here
from lightning_memo.estimate.step.layer_times import (
    BF16,
    FP32,
    device_parameters,
    device_trained_parameters,
    has_whole_logits,
)
from lightning_memo.planner.placement import Problem

PROGRAM: Final = program_bytes()

LOGIT_BYTES: Final = BF16 + FP32 + BF16
"""A logit, its copy in fp32, of which its gradient takes the place, and the gradient in bf16."""

CHUNKED_LOGIT_BYTES: Final = FP32 + BF16
"""A logit of a chunk in fp32, and what it was made from or its gradient."""

Buffer = tuple[int, int, float]
"""Birth, death and bytes."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """Bytes of the model's state on one device."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_state_bytes(
    weights: float, ranks: int, zero_stage: int, sizes: ElementBytes = PROGRAM, trained: float | None = None
) -> ModelState:
    """Bytes of weights, gradients and optimizer on one device: 2 + 2 + 12 for each weight (ZeRO, section 3), or others.

    Args:
        weights: before ZeRO divides them.
        ranks: that ZeRO divides over.
        zero_stage: 1 divides the optimizer, 2 gradients too, 3 weights too.
        sizes: of elements.
        trained: those of the weights that get a gradient; None: all.
    """
    trained = weights if trained is None else trained
    if sizes.whole_copies:
        return _state_of_fsdp(weights, trained, ranks, zero_stage, sizes)

    def divided(size_bytes: float, stage: int) -> float:
        return size_bytes / (ranks if zero_stage >= stage else 1)

    return ModelState(
        divided(sizes.weight * weights, 3), divided(sizes.gradient * trained, 2), divided(sizes.optimizer * trained, 1)
    )


def _state_of_fsdp(weights: float, trained: float, ranks: int, zero_stage: int, sizes: ElementBytes) -> ModelState:
    """All is sharded from stage 1 on; whole weights are there beside up to stage 2, and whole gradients at stage 1."""
    shards = ranks if zero_stage else 1
    copied = shards > 1 or sizes.copies_weights
    return ModelState(
        parameters=weights * (sizes.weight / shards + (sizes.product if copied and zero_stage < 3 else 0)),
        gradients=trained * (sizes.gradient / shards + (sizes.product if shards > 1 and zero_stage == 1 else 0)),
        optimizer=trained * sizes.optimizer / shards,
    )


def device_state_bytes(question: Question, parallel: Parallelism) -> ModelState:
    """The state on the fullest device."""
    weights = device_parameters(question.shape, parallel)
    trained = device_trained_parameters(question.shape, parallel)
    return model_state_bytes(weights, parallel.dp * parallel.cp, parallel.zero_stage, element_bytes(question), trained)


def gathered_bytes(question: Question, parallel: Parallelism) -> float:
    """Of what ZeRO 3 gathers: weights of a layer and of the next one, and gradients of one; or the head's.

    FSDP2 here gives back layers only: weights of the embedding and the head stay.
    """
    if parallel.zero_stage < 3:
        return 0.0
    shape, sizes = question.shape, element_bytes(question)
    gradient = sizes.product if sizes.whole_copies else sizes.gradient
    layers = 2 * sizes.product * shape.layer_parameters + gradient * shape.trained_layer_parameters
    embedding = shape.vocab * shape.hidden
    if shape.adapters is not None:
        gradient = 0  # of the embedding and the head, which are not trained
    if sizes.whole_copies:
        kept = sizes.product * embedding * (1 if shape.tied or parallel.pp > 1 else 2)
        return (max(layers, gradient * embedding) + kept) / parallel.tp
    return max(layers, (sizes.product + gradient) * embedding) / parallel.tp


def logits_bytes(question: Question, parallel: Parallelism) -> float:
    """Logits and their gradients, of all tokens or of a chunk; tensor parallelism divides the vocabulary.

    With a chunk, also the head's gradient in fp32, which all chunks add to, if it is trained.
    """
    vocabulary = question.shape.vocab / parallel.tp
    logits = question.seq_len / parallel.cp * vocabulary
    if has_whole_logits(question):
        return LOGIT_BYTES * logits
    if logits <= CHUNK_BYTES / FP32:
        return CHUNKED_LOGIT_BYTES * logits
    summed = runs_here(question) and question.shape.adapters is None
    of_head = FP32 * vocabulary * question.shape.hidden if summed else 0.0
    return CHUNKED_LOGIT_BYTES * CHUNK_BYTES / FP32 + of_head


def loss_bytes(question: Question, parallel: Parallelism) -> float:
    """Hidden states at the loss: the last layer's output and the norm's. Gathered ones live before and after logits."""
    return 2 * _hidden_units(question, parallel)[0]


def backward_bytes(question: Question, parallel: Parallelism) -> int:
    """The largest load of a layer's backward, recomputed activations excluded: no placement has a lower peak."""
    birth, death, size = zip(*_backward_buffers(question, parallel), strict=True)
    problem = Problem(lower=np.array(birth), upper=np.array(death), size=np.array(size, np.int64))
    return problem.lower_bound_bytes


def _hidden_units(question: Question, parallel: Parallelism) -> tuple[float, float]:
    """Bytes of a device's hidden states, and of those gathered from the tensor-parallel devices."""
    unit = question.seq_len * question.shape.hidden * element_bytes(question).stream / (parallel.tp * parallel.cp)
    return unit, unit * parallel.tp if parallel.tp > 1 else 0.0


def _backward_buffers(question: Question, parallel: Parallelism) -> Iterator[Buffer]:
    """Transient activations of a layer's backward, in the order of its operations."""
    shape = question.shape
    unit, gathered = _hidden_units(question, parallel)
    tokens = question.seq_len / (parallel.tp * parallel.cp)
    product = element_bytes(question).product
    ffn = tokens * shape.ffn * shape.active_experts * product
    queries = tokens * shape.heads * shape.head_dim * product
    keys_and_values = 2 * tokens * shape.kv_heads * shape.head_dim * product
    yield 0, 8, unit  # the gradient of the layer's output, which the residual hands on
    yield 1, 3, gathered
    yield 2, 4, ffn  # of the activated
    yield 3, 6, ffn * (2 if shape.gated else 1)  # of the first products' outputs
    yield 4, 6, gathered  # what these products read
    yield 5, 7, gathered or unit  # its gradient, each device's part
    yield 6, 8, unit
    yield 7, 16, unit  # of the residual between attention and feed-forward
    yield 8, 10, gathered
    yield 9, 12, queries  # of attention's output
    yield 10, 14, queries + keys_and_values
    if parallel.cp > 1:
        yield 10, 12, 3 * keys_and_values  # those of another device on their way in and out, and their gradients
    yield 12, 14, gathered  # what the first products of attention read
    yield 13, 15, gathered or unit
    yield 14, 16, unit
    yield 15, 17, unit
