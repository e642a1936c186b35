"""Memory of the fullest device: model state by ZeRO stage, logits, gathered weights and transient activations.

In the zero-bubble order of a pipeline, gradients of weights wait: linear layers keep their input and the gradient of
their output on the device, see `lightning_memo.parallel.pipeline.pipeline_gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from math import comb
from typing import Final

import numpy as np

from lightning_memo.estimate.layer_operations import LayerProduct, later_products
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.saved_tensors import BF16, FP32, ElementBytes, readers_of_norm
from lightning_memo.estimate.step_buffers import CHUNK_BYTES
from lightning_memo.parallel.parallel_sizes import BLOCK, GRADIENT_BITS, WEIGHT_BITS, sent_bytes
from lightning_memo.parallel.pipeline.stage_order import most_waiting
from lightning_memo.planner.placement import Problem
from lightning_memo.shapes.model_shape import QUANTIZED_BYTES, ModelShape

LOGIT_BYTES: Final = BF16 + FP32 + BF16
"""Bytes per logit: the bf16 logit, its fp32 copy (which the gradient overwrites) and the bf16 gradient."""
CHUNKED_LOGIT_BYTES: Final = FP32 + BF16
"""Bytes per logit of a chunk: in fp32, and in bf16 for the logit or its gradient."""
Buffer = tuple[int, int, float]
"""Time of allocation, time of release, and size in bytes."""


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Number of weights on a device: those of experts, and all others."""

    others: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        return self.others + self.experts

    def by_ranks(self, parallel: Parallelism) -> Iterator[tuple[float, int, int]]:
        """Yield each group of weights with the number of ranks that ZeRO shards it over, and their distance."""
        ranks, expert_parallel = parallel.dp * parallel.cp, parallel.expert_parallel_size
        yield self.others, ranks, parallel.tp
        if self.experts:
            yield self.experts, ranks // expert_parallel, parallel.tp * expert_parallel


def device_parameters(shape: ModelShape, parallel: Parallelism) -> DeviceWeights:
    """Count the weights of the fullest device: its layers, and the embedding or the head."""
    layers = [(part.layers // parallel.pp, layer_weights(part, parallel)) for part in shape.runs]
    embeddings = shape.vocab * shape.hidden * (2 if parallel.pp == 1 and not shape.tied else 1)
    return DeviceWeights(
        others=sum(count * weights.others for count, weights in layers) + embeddings / parallel.tp,
        experts=sum(count * weights.experts for count, weights in layers),
    )


def device_trained_parameters(shape: ModelShape, parallel: Parallelism) -> DeviceWeights:
    """Count the weights of the fullest device that get a gradient."""
    if shape.adapters is None:
        return device_parameters(shape, parallel)
    return DeviceWeights(shape.layers // parallel.pp * shape.trained_layer_parameters / parallel.tp)


def layer_weights(shape: ModelShape, parallel: Parallelism) -> DeviceWeights:
    """Count the weights of a layer. Each tensor-parallel device has some experts, the router and the shared experts."""
    if shape.experts == 1:
        return DeviceWeights(shape.layer_parameters / parallel.tp)
    experts, routing = shape.experts * shape.ffn_parameters, shape.routing_parameters
    return DeviceWeights(
        others=(shape.layer_parameters - experts - routing) / parallel.tp + routing,
        experts=experts / parallel.tp / parallel.expert_parallel_size,
    )


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
    sizes: ElementBytes,
    trained: float | None = None,
    staged: bool = False,
) -> ModelState:
    """Compute the bytes of weights, gradients and optimizer state on one device (ZeRO, section 3).

    Args:
        weights: Number of weights before ZeRO shards them.
        ranks: Number of ranks that ZeRO shards over.
        zero_stage: ZeRO stage: 1 shards the optimizer state, 2 also gradients, 3 also weights.
        sizes: Sizes of elements.
        trained: Number of weights that get a gradient, or None for all.
        staged: Whether they are those of a stage of a pipeline.
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


def device_state_bytes(request: EstimateRequest, parallel: Parallelism) -> ModelState:
    """Compute the model state on the fullest device."""
    sizes, stage = request.element_bytes, parallel.zero_stage
    weights, staged = device_parameters(request.shape, parallel), parallel.pp > 1
    if request.shape.adapters is not None:  # of dense models only
        trained = device_trained_parameters(request.shape, parallel).total
        state = model_state_bytes(weights.total, parallel.dp * parallel.cp, stage, sizes, trained, staged)
        return replace(state, parameters=state.parameters - _saved_by_quantization(request.shape, sizes))
    groups = weights.by_ranks(parallel)
    states = [model_state_bytes(count, ranks, stage, sizes, staged=staged) for count, ranks, _ in groups]
    return ModelState(*(sum(kind) for kind in zip(*map(astuple, states), strict=True)))


def _saved_by_quantization(shape: ModelShape, sizes: ElementBytes) -> float:
    """Bytes by which quantised weights are smaller. They are on one device."""
    if shape.quantization is None:
        return 0.0
    return shape.layers * shape.quantized_in_a_layer * (sizes.weight - QUANTIZED_BYTES[shape.quantization])


def gathered_bytes(request: EstimateRequest, parallel: Parallelism) -> float:
    """Compute the bytes that ZeRO 3 gathers: weights of two layers and gradients of one, or those of the head.

    FSDP2 frees the gathered weights of layers only; those of the embedding and the head stay. What is sent quantised
    has buffers of its own. In pipelines, ZeRO 2 has whole gradients of one layer, too, or those of the head.
    """
    sent = _quantised_bytes(request, parallel)
    if parallel.zero_stage == 2 and parallel.pp > 1:
        return sent + _whole_gradients(request, parallel)
    if parallel.zero_stage < 3:
        return sent
    return sent + _gathered_bytes(request, parallel) + _shards_of_neighbours(request, parallel)


def _shards_of_neighbours(request: EstimateRequest, parallel: Parallelism) -> float:
    """Bytes of the weights of all layers that are sharded over neighbours between forward and backward."""
    size = request.zero_shard_size
    if size is None or size >= parallel.dp * parallel.cp:
        return 0.0
    weights = sum(part.layers * layer_weights(part, parallel).total for part in request.shape.runs)
    return request.element_bytes.product * weights / parallel.pp / size


def _quantised_bytes(request: EstimateRequest, parallel: Parallelism) -> float:
    """Bytes of the weights that are received, and of the gradients that are sent and received, of the largest unit."""
    if request.zero_communication == "none":
        return 0.0
    shape = request.shape
    bits = WEIGHT_BITS + 2 * GRADIENT_BITS[request.zero_communication]
    layers = max(layer_weights(part, parallel).total for part in shape.runs)
    return max(layers, shape.vocab * shape.hidden / parallel.tp) * sent_bytes(BLOCK, bits) / BLOCK


def _gathered_bytes(request: EstimateRequest, parallel: Parallelism) -> float:
    shape, sizes = request.shape, request.element_bytes
    gradient = sizes.product if sizes.whole_copies else sizes.gradient
    layers = max(_gathered_of_layer(part, parallel, 2 * sizes.product, gradient) for part in shape.runs)
    embedding = shape.vocab * shape.hidden / parallel.tp
    if shape.adapters is not None:
        gradient = 0  # the embedding and the head are not trained
    if sizes.whole_copies:
        kept = sizes.product * embedding * (1 if shape.tied or parallel.pp > 1 else 2)
        return max(layers, gradient * embedding) + kept
    return max(layers, (sizes.product + gradient) * embedding)


def _whole_gradients(request: EstimateRequest, parallel: Parallelism) -> float:
    """Bytes of the gradients of the largest unit of a pipeline stage, from its backward until they are reduced."""
    shape, product = request.shape, request.element_bytes.product
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


def logits_bytes(request: EstimateRequest, parallel: Parallelism) -> float:
    """Compute the bytes of logits and their gradients, for all tokens or for a chunk.

    Tensor parallelism divides the vocabulary. A chunked loss also needs the fp32 gradient of the head, to which all
    chunks add, if the head is trained.
    """
    vocabulary = request.shape.vocab / parallel.tp
    logits = request.seq_len / parallel.cp * vocabulary
    if request.has_whole_logits:
        return LOGIT_BYTES * logits
    if logits <= CHUNK_BYTES / FP32:
        return CHUNKED_LOGIT_BYTES * logits
    head_gradient = FP32 * vocabulary * request.shape.hidden if request.shape.adapters is None else 0.0
    return CHUNKED_LOGIT_BYTES * CHUNK_BYTES / FP32 + head_gradient


def loss_bytes(request: EstimateRequest, parallel: Parallelism) -> float:
    """Compute the bytes of hidden states during the loss: the outputs of the last layer and of the final norm."""
    return 2 * _hidden_state_bytes(request.shape, request.element_bytes, request.seq_len, parallel)


def backward_bytes(shape: ModelShape, sizes: ElementBytes, seq_len: int, parallel: Parallelism) -> int:
    """Compute the largest sum of live buffers in a layer's backward, without recomputed activations."""
    birth, death, size = zip(*_backward_buffers(shape, sizes, seq_len, parallel), strict=True)
    problem = Problem(lower=np.array(birth), upper=np.array(death), size=np.array(size, np.int64))
    return problem.lower_bound_bytes


def _hidden_state_bytes(shape: ModelShape, sizes: ElementBytes, seq_len: int, parallel: Parallelism) -> float:
    """Bytes of a device's hidden states."""
    return seq_len * shape.hidden * sizes.stream / (parallel.tp * parallel.cp)


def _backward_buffers(shape: ModelShape, sizes: ElementBytes, seq_len: int, parallel: Parallelism) -> Iterator[Buffer]:
    """Yields the transient buffers of a layer's backward, in the order of its operations."""
    unit = _hidden_state_bytes(shape, sizes, seq_len, parallel)
    gathered = unit * parallel.tp if parallel.tp > 1 else 0.0  # from all tensor-parallel devices
    tokens = seq_len / (parallel.tp * parallel.cp)
    product, widths = sizes.product, shape.attention
    queries, keys_and_values = tokens * widths.query * product, tokens * (widths.key + widths.value) * product
    yield 0, 8, unit  # gradient of the layer's output, which the residual passes on
    yield 1, 3, gathered
    if shape.experts > 1:
        yield from _buffers_of_experts(shape, sizes, seq_len, parallel)
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


def _buffers_of_experts(
    shape: ModelShape, sizes: ElementBytes, seq_len: int, parallel: Parallelism
) -> Iterator[Buffer]:
    """Yields the transient buffers of experts, which get a row for each pair of a token and a chosen expert."""
    size = sizes.stream
    chosen = seq_len / parallel.cp / parallel.tp * shape.active_experts * size
    rows, ffn = chosen * shape.hidden, chosen * shape.ffn
    yield 1, 3, rows  # gradient of the weighted outputs
    yield 2, 4, rows  # gradient of the outputs
    yield 2, 3, rows  # product of gradient and outputs, for the gradient of the weights
    yield 3, 5, ffn  # gradient of the activation function's output
    yield 4, 6, 4 * ffn if shape.gated else ffn  # gradients of the first products' outputs, and both joined
    yield 5, 7, rows  # gradient of the rows
    yield (
        0,
        7,
        received_tokens(shape, seq_len, parallel) * shape.hidden * size,
    )  # gradient of what came from other devices


def received_tokens(shape: ModelShape, seq_len: int, parallel: Parallelism) -> float:
    """Return the number of tokens that a device gets for its experts, if all choices are equally probable.

    A token is sent once to each device that has experts of it. Tensor-parallel devices have the same tokens, and send
    each of them to devices with experts of their own share. Zero without expert parallelism.
    """
    groups = parallel.expert_parallel_size
    if shape.experts == 1 or groups == 1:
        return 0.0
    others = shape.experts - shape.experts // (groups * parallel.tp)
    missed = comb(others, shape.active_experts) / comb(shape.experts, shape.active_experts)
    return seq_len / parallel.cp * groups * (1.0 - missed)


def fullest_stages(parallel: Parallelism) -> tuple[int, ...]:
    """Return the stages of a pipeline one of which needs the most memory.

    From each stage to the next one, fewer sequences are in flight and gradients of one more backward wait. For the
    first stage, none wait.
    """
    return tuple(sorted({0, 1, parallel.pp - 1})) if parallel.weights_wait else (0,)


def waiting_bytes(request: EstimateRequest, parallel: Parallelism) -> int:
    """Return the bytes on a device of a stage for the gradients of weights of all backwards that wait at once."""
    if not parallel.weights_wait:
        return 0
    tokens = request.seq_len // (parallel.tp * parallel.cp)
    of_stage = sum(run.shape.layers * waiting_bytes_per_token(run, parallel.tp) for run in request.runs(parallel))
    return most_waiting(request.stage) * tokens * of_stage // parallel.virtual_pipeline_size


def waiting_bytes_per_token(request: EstimateRequest, tensor_parallel: int) -> int:
    """Return the bytes that a layer keeps from a backward, for each token that a device keeps between layers.

    Hidden states that tensor-parallel devices gather before a product, and gradients of those that they sum behind
    one, are whole on each device.

    Args:
        request: Training to estimate.
        tensor_parallel: Number of tensor-parallel devices.
    """
    shape = request.shape
    inputs: dict[str, int] = {}
    gradients = 0
    for product in later_products(shape):
        whole = (1 if product.divides_inputs else tensor_parallel), (1 if product.divides_outputs else tensor_parallel)
        if shape.adapters is None:
            inputs[_input_of(request, product)] = whole[0] * product.inputs
            gradients += whole[1] * product.outputs
        elif shape.adapts(product.role):
            # With dropout before adapters, each has an input of its own.
            inputs[product.role] = whole[0] * product.inputs + tensor_parallel * shape.adapters.rank
            gradients += whole[1] * product.outputs + tensor_parallel * shape.adapters.rank
    return (sum(inputs.values()) + gradients) * request.element_bytes.product


def _input_of(request: EstimateRequest, product: LayerProduct) -> str:
    """The same name for products that share an input."""
    if product.role in request.shape.attention.readers:
        return "attention"
    return "feed-forward" if product.role in readers_of_norm(request.shape) else product.role
