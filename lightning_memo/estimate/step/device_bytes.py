"""Memory of the fullest device: model state by ZeRO stage, logits, gathered weights and transient activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np

from lightning_memo.artifacts.compressed_layout import BLOCK
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import BF16, FP32, ElementBytes, program_bytes
from lightning_memo.estimate.memory.device_weights import (
    device_parameters,
    device_trained_parameters,
    layer_weights,
)
from lightning_memo.estimate.memory.working_set import CHUNK_BYTES
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, runs_here
from lightning_memo.estimate.times.expert_exchange import received_tokens
from lightning_memo.estimate.times.layer_times import has_whole_logits
from lightning_memo.parallel.zero.quantised_bytes import GRADIENT_BITS, WEIGHT_BITS, sent_bytes
from lightning_memo.planner.placement import Problem
from lightning_memo.shapes.model_shape import ModelShape

PROGRAM: Final = program_bytes()

LOGIT_BYTES: Final = BF16 + FP32 + BF16
"""Bytes per logit: the bf16 logit, its fp32 copy (which the gradient overwrites) and the bf16 gradient."""

CHUNKED_LOGIT_BYTES: Final = FP32 + BF16
"""Bytes per logit of a chunk: in fp32, and in bf16 for the logit or its gradient."""

Buffer = tuple[int, int, float]
"""Time of allocation, time of release, and size in bytes."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """Bytes of the model state on one device."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_state_bytes(
    weights: float,
    ranks: int,
    zero_stage: int,
    sizes: ElementBytes = PROGRAM,
    trained: float | None = None,
    staged: bool = False,
) -> ModelState:
    """Compute the bytes of weights, gradients and optimizer state on one device (ZeRO, section 3).

    Args:
        weights: Number of weights before ZeRO shards them.
        ranks: Number of ranks that ZeRO shards over.
        zero_stage: ZeRO stage: 1 shards the optimizer state, 2 also gradients, 3 also weights.
        sizes: Sizes of elements. The default is 2 + 2 + 12 bytes for each weight.
        trained: Number of weights that get a gradient, or None for all.
        staged: Whether they are those of a stage of this package's pipelines.
    """
    trained = weights if trained is None else trained
    if sizes.whole_copies:
        return _state_of_fsdp(weights, trained, ranks, zero_stage, sizes, staged)

    def divided(size_bytes: float, stage: int) -> float:
        return size_bytes / (ranks if zero_stage >= stage else 1)

    return ModelState(
        divided(sizes.weight * weights, 3), divided(sizes.gradient * trained, 2), divided(sizes.optimizer * trained, 1)
    )


def _state_of_fsdp(
    weights: float, trained: float, ranks: int, zero_stage: int, sizes: ElementBytes, staged: bool
) -> ModelState:
    """FSDP2 shards all state from stage 1 on, and adds full weights up to stage 2 and full gradients at stage 1.

    In a pipeline, gradients of micro-batches are added up in the type in which they are reduced: full ones up to stage
    1, from stage 2 on shards.
    """
    shards = ranks if zero_stage else 1
    copied = shards > 1 or sizes.copies_weights
    whole = sizes.product if shards > 1 and zero_stage == 1 else 0
    gradient = sizes.gradient / shards + whole
    if staged and (ranks > 1 or sizes.copies_weights):
        gradient = sizes.reduced / (ranks if zero_stage >= 2 else 1)
    return ModelState(
        parameters=weights * (sizes.weight / shards + (sizes.product if copied and zero_stage < 3 else 0)),
        gradients=trained * gradient,
        optimizer=trained * sizes.optimizer / shards,
    )


def device_state_bytes(question: Question, parallel: Parallelism) -> ModelState:
    """Compute the model state on the fullest device."""
    sizes, stage = element_bytes(question), parallel.zero_stage
    weights, staged = device_parameters(question.shape, parallel), parallel.pp > 1
    if question.shape.adapters is not None:  # of dense models only
        trained = device_trained_parameters(question.shape, parallel).total
        return model_state_bytes(weights.total, parallel.dp * parallel.cp, stage, sizes, trained, staged)
    groups = weights.by_ranks(parallel)
    states = [model_state_bytes(count, ranks, stage, sizes, staged=staged) for count, ranks, _ in groups]
    return ModelState(*(sum(kind) for kind in zip(*map(astuple, states), strict=True)))


def gathered_bytes(question: Question, parallel: Parallelism) -> float:
    """Compute the bytes that ZeRO 3 gathers: weights of two layers and gradients of one, or those of the head.

    FSDP2 frees the gathered weights of layers only; those of the embedding and the head stay. What is sent quantised
    has buffers of its own. In pipelines, ZeRO 2 has whole gradients of one layer, too, or those of the head.
    """
    sent = _quantised_bytes(question, parallel)
    if parallel.zero_stage == 2 and parallel.pp > 1 and runs_here(question):
        return sent + _whole_gradients(question, parallel)
    if parallel.zero_stage < 3:
        return sent
    return sent + _gathered_bytes(question, parallel) + _shards_of_neighbours(question, parallel)


def _shards_of_neighbours(question: Question, parallel: Parallelism) -> float:
    """Bytes of the weights of all layers that are sharded over neighbours between forward and backward."""
    size = question.zero_shard_size
    if size is None or size >= parallel.dp * parallel.cp:
        return 0.0
    weights = sum(part.layers * layer_weights(part, parallel).total for part in question.shape.runs)
    return element_bytes(question).product * weights / parallel.pp / size


def _quantised_bytes(question: Question, parallel: Parallelism) -> float:
    """Bytes of the weights that are received, and of the gradients that are sent and received, of the largest unit."""
    if question.zero_communication == "none":
        return 0.0
    shape = question.shape
    bits = WEIGHT_BITS + 2 * GRADIENT_BITS[question.zero_communication]
    layers = max(layer_weights(part, parallel).total for part in shape.runs)
    return max(layers, shape.vocab * shape.hidden / parallel.tp) * sent_bytes(BLOCK, bits) / BLOCK


def _gathered_bytes(question: Question, parallel: Parallelism) -> float:
    shape, sizes = question.shape, element_bytes(question)
    gradient = sizes.product if sizes.whole_copies else sizes.gradient
    layers = max(_gathered_of_layer(part, parallel, 2 * sizes.product, gradient) for part in shape.runs)
    embedding = shape.vocab * shape.hidden / parallel.tp
    if shape.adapters is not None:
        gradient = 0  # the embedding and the head are not trained
    if sizes.whole_copies:
        kept = sizes.product * embedding * (1 if shape.tied or parallel.pp > 1 else 2)
        return max(layers, gradient * embedding) + kept
    return max(layers, (sizes.product + gradient) * embedding)


def _whole_gradients(question: Question, parallel: Parallelism) -> float:
    """Bytes of the gradients of the largest unit of a pipeline stage, from its backward until they are reduced."""
    shape, product = question.shape, element_bytes(question).product
    layers = max(_gathered_of_layer(part, parallel, 0, product) for part in shape.runs)
    return max(layers, 0 if shape.adapters is not None else product * shape.vocab * shape.hidden / parallel.tp)


def _gathered_of_layer(part: ModelShape, parallel: Parallelism, weight_bytes: int, gradient_bytes: int) -> float:
    """Bytes of the weights and gradients of a layer that are sharded, and therefore gathered."""
    if part.adapters is not None:
        trained = part.trained_layer_parameters
        return (weight_bytes * part.layer_parameters + gradient_bytes * trained) / parallel.tp
    weights = layer_weights(part, parallel)
    gathered = sum(count for count, ranks, _ in weights.by_ranks(parallel) if ranks > 1)
    return (weight_bytes + gradient_bytes) * gathered


def logits_bytes(question: Question, parallel: Parallelism) -> float:
    """Compute the bytes of logits and their gradients, for all tokens or for a chunk.

    Tensor parallelism divides the vocabulary. A chunked loss also needs the fp32 gradient of the head, to which all
    chunks add, if the head is trained.
    """
    vocabulary = question.shape.vocab / parallel.tp
    logits = question.seq_len / parallel.cp * vocabulary
    if has_whole_logits(question):
        return LOGIT_BYTES * logits
    if logits <= CHUNK_BYTES / FP32:
        return CHUNKED_LOGIT_BYTES * logits
    summed = runs_here(question) and question.shape.adapters is None
    head_gradient = FP32 * vocabulary * question.shape.hidden if summed else 0.0
    return CHUNKED_LOGIT_BYTES * CHUNK_BYTES / FP32 + head_gradient


def loss_bytes(question: Question, parallel: Parallelism) -> float:
    """Compute the bytes of hidden states during the loss: the outputs of the last layer and of the final norm."""
    return 2 * _hidden_state_bytes(question, parallel)[0]


def backward_bytes(question: Question, parallel: Parallelism) -> int:
    """Compute the largest sum of live buffers in a layer's backward, without recomputed activations."""
    birth, death, size = zip(*_backward_buffers(question, parallel), strict=True)
    problem = Problem(lower=np.array(birth), upper=np.array(death), size=np.array(size, np.int64))
    return problem.lower_bound_bytes


def _hidden_state_bytes(question: Question, parallel: Parallelism) -> tuple[float, float]:
    """Bytes of a device's hidden states, and of those gathered from all tensor-parallel devices."""
    unit = question.seq_len * question.shape.hidden * element_bytes(question).stream / (parallel.tp * parallel.cp)
    return unit, unit * parallel.tp if parallel.tp > 1 else 0.0


def _backward_buffers(question: Question, parallel: Parallelism) -> Iterator[Buffer]:
    """Yields the transient buffers of a layer's backward, in the order of its operations."""
    shape = question.shape
    unit, gathered = _hidden_state_bytes(question, parallel)
    tokens = question.seq_len / (parallel.tp * parallel.cp)
    product, widths = element_bytes(question).product, shape.attention
    queries, keys_and_values = tokens * widths.query * product, tokens * (widths.key + widths.value) * product
    yield 0, 8, unit  # gradient of the layer's output, which the residual passes on
    yield 1, 3, gathered
    if shape.experts > 1:
        yield from _buffers_of_experts(question, parallel)
    else:
        ffn = tokens * shape.ffn * product
        yield 2, 4, ffn  # gradient of the activation function's output
        yield 3, 6, ffn * (2 if shape.gated else 1)  # gradients of the first products' outputs
    yield 4, 6, gathered  # input of these products
    yield 5, 7, gathered or unit  # gradient of this input, each device's contribution
    yield 6, 8, unit
    yield 7, 16, unit  # gradient of the residual between attention and feed-forward
    yield 8, 10, gathered
    yield 9, 12, tokens * widths.output * product  # gradient of attention's output
    yield 10, 14, queries + keys_and_values
    if parallel.cp > 1:
        yield 10, 12, 3 * keys_and_values  # sent and received keys and values, and their gradients
    yield 12, 14, gathered  # input of the first products of attention
    yield 13, 15, gathered or unit
    yield 14, 16, unit
    yield 15, 17, unit


def _buffers_of_experts(question: Question, parallel: Parallelism) -> Iterator[Buffer]:
    """Yields the transient buffers of experts, which get a row for each pair of a token and a chosen expert."""
    shape, size = question.shape, element_bytes(question).stream
    chosen = question.seq_len / parallel.cp / parallel.tp * shape.active_experts * size
    rows, ffn = chosen * shape.hidden, chosen * shape.ffn
    yield 1, 3, rows  # gradient of the weighted outputs
    yield 2, 4, rows  # gradient of the outputs
    yield 2, 3, rows  # product of gradient and outputs, for the gradient of the weights
    yield 3, 5, ffn  # gradient of the activation function's output
    yield 4, 6, 4 * ffn if shape.gated else ffn  # gradients of the first products' outputs, and both joined
    yield 5, 7, rows  # gradient of the rows
    yield 0, 7, received_tokens(question, parallel) * shape.hidden * size  # gradient of what came from other devices
