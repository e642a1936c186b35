"""Times of a step outside the layers: head, loss, embedding, final norm and optimizer."""

from __future__ import annotations

from typing import Final

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import FP32
from lightning_memo.estimate.memory.device_weights import device_trained_parameters
from lightning_memo.estimate.memory.working_set import CHUNK_BYTES
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, runs_here
from lightning_memo.estimate.times.layer_times import has_whole_logits, memory_rate
from lightning_memo.estimate.times.memory_bound import norm_traffic
from lightning_memo.shapes.model_shape import SINGLE_OPERATIONS

_LOGIT_OPERANDS: Final = 8
"""Times that the loss reads or writes each logit in fp32: maximum, difference, exponential, sum, scaling."""


def head_seconds(question: Question, parallel: Parallelism) -> float:
    """Return the time of the head's products, forward and backward, for one sequence."""
    shape = question.shape
    products = 3 if shape.adapters is None else 2  # the weight needs no gradient
    flops = 2 * products * question.seq_len * shape.vocab * shape.hidden / (parallel.tp * parallel.cp)
    return flops / (question.cluster.peak_flops * element_bytes(question).rate * question.constants.dense_efficiency)


def loss_seconds(question: Question, parallel: Parallelism) -> float:
    """Return the time of the memory-bound operations of loss, embedding and final norm, for one sequence.

    The gradient of the head is the sum of those of all chunks. Zero for the papers' programs, whose constants include
    this time.
    """
    if not runs_here(question):
        return 0.0
    shape, sizes = question.shape, element_bytes(question)
    divided, trained = parallel.tp * parallel.cp, shape.adapters is None
    logits = question.seq_len * shape.vocab / divided
    casts = 0 if sizes.product == FP32 else 2 * (sizes.product + FP32)
    moved = logits * (_LOGIT_OPERANDS * FP32 + casts)
    separate = shape.kernels in SINGLE_OPERATIONS
    forward, backward = norm_traffic(shape.hidden, sizes.stream, separate=separate, trained=trained)
    moved += question.seq_len / divided * (2 * forward + backward + 2 * sizes.stream * shape.hidden)
    if trained:
        weights = shape.vocab * shape.hidden / parallel.tp
        chunks = 1.0 if has_whole_logits(question) else max(logits * FP32 / CHUNK_BYTES, 1.0)
        moved += weights * chunks * (2 * FP32 + sizes.product) + 2 * weights * sizes.gradient
    return moved / memory_rate(question)


def outside_seconds(question: Question, parallel: Parallelism) -> float:
    """Return the time outside the layers for one sequence, without the optimizer."""
    return head_seconds(question, parallel) + loss_seconds(question, parallel)


def optimizer_seconds(question: Question, parallel: Parallelism) -> float:
    """Return the time of a fused optimizer, which reads weights, gradients and state, and writes all but gradients."""
    if not runs_here(question):
        return 0.0
    sizes = element_bytes(question)
    moved = 2 * (sizes.weight + sizes.optimizer) + sizes.gradient
    groups = device_trained_parameters(question.shape, parallel).by_ranks(parallel)
    updated = sum(weights / (ranks if parallel.zero_stage else 1) for weights, ranks, _ in groups)
    return moved * updated / memory_rate(question)
