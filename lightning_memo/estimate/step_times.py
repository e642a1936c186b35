"""Times of a step: of layers (whole or in slices), head, loss, optimizer and communication, and waits in a pipeline.

Times of layers are for one sequence on one device. A micro-batch of a pipeline is one sequence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_memo.estimate.cluster import Cluster
from lightning_memo.estimate.device_bytes import device_parameters, device_trained_parameters, received_tokens
from lightning_memo.estimate.layer_operations import later_products, norm_traffic, traffic_of_layer
from lightning_memo.estimate.request import EstimateRequest, Parallelism
from lightning_memo.estimate.saved_tensors import FP32, ElementBytes, LayerActivations
from lightning_memo.estimate.slice_settings import Slices
from lightning_memo.estimate.step_buffers import CHUNK_BYTES
from lightning_memo.parallel.parallel_sizes import BLOCK, GRADIENT_BITS, WEIGHT_BITS, sent_bytes
from lightning_memo.parallel.pipeline.stage_order import training_order
from lightning_memo.shapes.model_shape import QUANTIZED_BYTES, SINGLE_OPERATIONS, ModelShape
from lightning_memo.utils.units import format_bytes

BACKWARD_OF_ATTENTION: Final = 2.5
"""FLOPs of attention's backward relative to its forward: five matrix products instead of two."""
_FORWARD_COLLECTIVES: Final = 4
_BACKWARD_COLLECTIVES: Final = 6
_EXCHANGES: Final = 2
"""All-to-alls of expert parallelism in the forward, and of gradients in the backward."""
_BACKWARD_CONTEXTS: Final = 2
"""Context-parallel communication of the backward, relative to the forward."""
_LOGIT_OPERANDS: Final = 8
"""Times that the loss reads or writes each logit in fp32: maximum, difference, exponential, sum, scaling."""
# Bytes of device memory that the operations of parallel/zero_sharding.py read and write for each value.
_QUANTISE: Final = 25
_RESTORE_WEIGHT: Final = 3
_RESTORE_GRADIENT: Final = 9


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times of one layer call in seconds, for a sequence that is divided over several devices."""

    dense: float
    """Forward of the matrix products with weights."""

    dense_backward: float
    """Backward of these products: gradients of their inputs and of trained weights."""

    later: float
    """Part of this backward: gradients of weights that a zero-bubble pipeline computes later. Adapters' count as none,
    as memory bounds their products."""

    recomputed_dense: float
    """Recomputation of these products. The output of the last one is not needed again, unless an adapter follows."""

    memory_bound: float
    """Forward of all else but attention: norms, positions, activation functions, casts and adapters."""

    memory_bound_backward: float
    recomputed_memory_bound: float

    attention_forward: float
    attention_backward: float
    collective: float
    """One all-gather or reduce-scatter of hidden states over the tensor-parallel devices."""

    context: float
    """Context-parallel communication of the forward that attention does not hide."""

    exchange: float
    """One all-to-all of expert parallelism, which sends tokens to the devices of their experts, or back."""

    network: float
    """Part of the forward that waits for the network between nodes."""

    @property
    def forward(self) -> float:
        """Forward, with an all-gather before and a reduce-scatter after both attention and feed-forward."""
        computing = self.dense + self.memory_bound + self.attention_forward
        return computing + _FORWARD_COLLECTIVES * self.collective + self.context + _EXCHANGES * self.exchange

    @property
    def backward(self) -> float:
        """Backward without recomputation. The inputs of both parts are gathered again for the gradients of weights."""
        communication = _BACKWARD_COLLECTIVES * self.collective + _BACKWARD_CONTEXTS * self.context
        communication += _EXCHANGES * self.exchange
        return self.dense_backward + self.memory_bound_backward + self.attention_backward + communication

    @property
    def tensor_parallel(self) -> float:
        """Tensor-parallel communication of forward and backward."""
        return (_FORWARD_COLLECTIVES + _BACKWARD_COLLECTIVES) * self.collective

    @property
    def context_parallel(self) -> float:
        """Context-parallel communication of forward and backward."""
        return (1 + _BACKWARD_CONTEXTS) * self.context

    @property
    def expert_parallel(self) -> float:
        """Expert-parallel communication of forward and backward."""
        return 2 * _EXCHANGES * self.exchange

    @property
    def computing(self) -> float:
        """Forward and backward without communication."""
        passing = self.tensor_parallel + self.context_parallel + self.expert_parallel
        return self.forward + self.backward - passing

    @property
    def recompute(self) -> float:
        """Recomputation of everything but attention and the last product, for all tokens.

        Tokens are sent to their experts again. No tensor is saved after the results have come back.
        """
        return self.recomputed_dense + self.recomputed_memory_bound + 3 * self.collective + self.exchange


def layer_times(request: EstimateRequest, parallel: Parallelism) -> LayerTimes:
    """Compute the times of a layer call.

    Matrix products and attention run at a fraction of the device's peak, all other operations at a fraction of the
    bandwidth of its memory, collectives at the bandwidth of the links.
    """
    shape, cluster, constants = request.shape, request.cluster, request.constants
    tokens, divided = request.seq_len, parallel.tp * parallel.cp
    sizes = request.element_bytes
    peak = request.product_flops
    dense_rate = peak * constants.dense_efficiency * divided
    attention_at_peak = shape.attention_flops(tokens) / divided / peak
    attention_forward = attention_at_peak / constants.attention_forward_efficiency
    hidden_bytes = tokens / parallel.cp * shape.hidden * sizes.stream
    collective = hidden_bytes * (parallel.tp - 1) / parallel.tp / ring_bandwidth(cluster, parallel.tp)
    exchanging, merging = _context_seconds(request, parallel, attention_forward)
    traffic = traffic_of_layer(shape, sizes=sizes, tensor_parallel=parallel.tp)
    moving = tokens / divided / memory_rate(request)
    dequantizing = _dequantizing_seconds(request, tokens // divided)
    products, recomputed = _multiplied(shape, parallel, sizes)
    trained, later = (products, _later_weights(request, parallel)) if shape.adapters is None else (0, 0)
    return LayerTimes(
        dense=2 * tokens * products / dense_rate,
        dense_backward=2 * tokens * (products + trained) / dense_rate,
        later=2 * tokens * later / dense_rate,
        recomputed_dense=2 * tokens * recomputed / dense_rate,
        memory_bound=traffic.forward * moving + dequantizing,
        memory_bound_backward=traffic.backward * moving + dequantizing,
        recomputed_memory_bound=traffic.again * moving + dequantizing,
        attention_forward=attention_forward,
        attention_backward=BACKWARD_OF_ATTENTION * attention_at_peak / constants.attention_backward_efficiency,
        collective=collective,
        context=exchanging + merging,
        exchange=_expert_exchange_seconds(request, parallel),
        network=(4 * collective if parallel.tp > cluster.devices_per_node else 0.0)
        + (exchanging if parallel.tp * parallel.cp > cluster.devices_per_node else 0.0),
    )


def _dequantizing_seconds(request: EstimateRequest, tokens: int) -> float:
    """Return the time in which a layer's products read their quantised weights and write real ones, in each slice."""
    shape = request.shape
    if shape.quantization is None:
        return 0.0
    slices = request.sliced(tokens)
    times = 1 if slices is None else -(-tokens // slices.tokens)
    moved = QUANTIZED_BYTES[shape.quantization] + request.element_bytes.product
    return times * shape.quantized_in_a_layer * moved / memory_rate(request)


def _multiplied(shape: ModelShape, parallel: Parallelism, sizes: ElementBytes) -> tuple[float, float]:
    """Weights that each token is multiplied with in the forward, and in a recomputation.

    Adapters are left out, as memory bounds their products. Autocast does not cast for experts, which count as often as
    they are slower. Each tensor-parallel device multiplies the tokens of all with the router and the shared experts.
    The last projection is computed again if a separate adapter follows it.
    """
    slower = sizes.stream // sizes.product - 1 if shape.experts > 1 else 0
    more = slower * shape.active_experts * shape.ffn_parameters + (parallel.tp - 1) * shape.routing_parameters
    last = 0 if shape.fused_adapters else shape.adapted_last_projection
    return shape.multiplied_in_a_layer - shape.adapter_parameters + more, shape.recomputed_in_a_layer + more + last


def _later_weights(request: EstimateRequest, parallel: Parallelism) -> int:
    """Weights of a layer that a zero-bubble pipeline computes gradients of later, as `_multiplied` counts them."""
    shape = request.shape
    weights = sum(product.inputs * product.outputs for product in later_products(shape))
    return weights + (parallel.tp - 1) * shape.routing_parameters if weights else 0


def memory_rate(request: EstimateRequest) -> float:
    """Return the bytes per second that memory-bound operations read and write."""
    return request.cluster.memory_bandwidth * request.constants.memory_efficiency


def ring_bandwidth(cluster: Cluster, devices: int, stride: int = 1) -> float:
    """Return the bandwidth of a ring of devices, in bytes per second.

    A ring that leaves the node does so once, over the network adapters of all its devices in the node.

    Args:
        cluster: Cluster of the devices.
        devices: Number of devices in the ring.
        stride: Distance between neighbors, which is the size of the groups within.
    """
    if devices * stride <= cluster.devices_per_node:
        return cluster.node_bandwidth
    return min(cluster.network_bandwidth * max(cluster.devices_per_node // stride, 1), cluster.node_bandwidth)


def _context_seconds(request: EstimateRequest, parallel: Parallelism, attention_seconds: float) -> tuple[float, float]:
    """Return the exposed communication time of context parallelism, and the time to merge partial outputs.

    A ring sends keys and values while attention runs, and merges an output at each step.
    """
    shape, bandwidth = request.shape, ring_bandwidth(request.cluster, parallel.cp, parallel.tp)
    tokens = request.seq_len / (parallel.tp * parallel.cp)
    product = request.element_bytes.product
    widths = shape.attention
    keys_and_values = tokens * (widths.key + widths.value) * product
    output = tokens * widths.output * product
    steps = parallel.cp - 1
    exposed = max(steps * keys_and_values / bandwidth - attention_seconds, 0.0)
    return exposed, steps * output / request.constants.merged_bytes_per_second


def _expert_exchange_seconds(request: EstimateRequest, parallel: Parallelism) -> float:
    """Return the time to send tokens to the devices of their experts, or to give the results back.

    Parts for devices of the node and of others are sent at the same time.
    """
    groups, cluster = parallel.expert_parallel_size, request.cluster
    tokens = received_tokens(request.shape, request.seq_len, parallel)
    sent = tokens * request.shape.hidden * request.element_bytes.stream
    near = min(groups, max(cluster.devices_per_node // parallel.tp, 1))
    inside, outside = sent * (near - 1) / groups, sent * (groups - near) / groups
    return max(inside / cluster.node_bandwidth, outside / cluster.network_bandwidth)


def streamed_seconds(
    request: EstimateRequest,
    slices: Slices,
    tokens: int,
    times: LayerTimes,
    kept: LayerActivations,
    bandwidth: float,
) -> tuple[float, float]:
    """Return the times of forward and backward as a profiled first step measures them, at alpha 0.

    Each block of keys and values is read during the computation with the block before. Attention to earlier slices
    therefore takes the longer of computing and reading. A layer takes no less time than its copies in one direction.

    Args:
        request: Training to estimate.
        slices: Settings for slices.
        tokens: Tokens of a process.
        times: Times of a layer without slices.
        kept: Saved activations of a layer per token.
        bandwidth: Bandwidth between device and host in each direction, in bytes per second.
    """
    shape = request.shape
    keys_and_values = 2 * shape.kv_heads * shape.head_dim * request.element_bytes.product
    on_host = slices.stream_from_host != "attention"
    gradients = slices.key_value_gradient_bytes(shape) if on_host else 0
    states = shape.hidden * request.element_bytes.stream if slices.states_on_host else 0
    read = tokens_read(tokens, slices.tokens, shape.window)
    share = read / (read + tokens / 2)  # fraction of the pairs of queries and keys
    always = tokens * (kept.input + kept.attention + keys_and_values)
    reading, adding = read * keys_and_values / bandwidth, read * gradients / bandwidth
    passing = tokens * states / bandwidth

    def waited(attention: float, copying: float) -> float:
        return max(copying - share * attention, 0.0)

    forward = times.forward + waited(times.attention_forward, reading)
    backward = times.backward + waited(times.attention_backward, reading + adding)
    return (
        max(forward, always / bandwidth + passing, reading + passing),
        max(backward, always / bandwidth + reading + adding + passing),
    )


def tokens_read(tokens: int, slice_tokens: int, window: int | None) -> int:
    """Count the keys of earlier slices that all slices of a layer call read. Earlier slices are read completely."""
    read = 0
    for start in range(0, tokens, slice_tokens):
        seen = start if window is None else min(start, -(-(window - 1) // slice_tokens) * slice_tokens)
        read += seen
    return read


def head_seconds(request: EstimateRequest, parallel: Parallelism) -> float:
    """Return the time of the head's products, forward and backward, for one sequence."""
    shape = request.shape
    products = 3 if shape.adapters is None else 2  # the weight needs no gradient
    flops = 2 * products * request.seq_len * shape.vocab * shape.hidden / (parallel.tp * parallel.cp)
    return flops / (request.product_flops * request.constants.dense_efficiency)


def loss_seconds(request: EstimateRequest, parallel: Parallelism) -> float:
    """Return the time of the memory-bound operations of loss, embedding and final norm, for one sequence.

    The gradient of the head is the sum of those of all chunks.
    """
    shape, sizes = request.shape, request.element_bytes
    divided, trained = parallel.tp * parallel.cp, shape.adapters is None
    logits = request.seq_len * shape.vocab / divided
    casts = 0 if sizes.product == FP32 else 2 * (sizes.product + FP32)
    moved = logits * (_LOGIT_OPERANDS * FP32 + casts)
    separate = shape.kernels in SINGLE_OPERATIONS
    forward, backward = norm_traffic(shape.hidden, sizes.stream, separate=separate, trained=trained)
    moved += request.seq_len / divided * (2 * forward + backward + 2 * sizes.stream * shape.hidden)
    if trained:
        weights = shape.vocab * shape.hidden / parallel.tp
        chunks = 1.0 if request.has_whole_logits else max(logits * FP32 / CHUNK_BYTES, 1.0)
        moved += weights * chunks * (2 * FP32 + sizes.product) + 2 * weights * sizes.gradient
    return moved / memory_rate(request)


def outside_seconds(request: EstimateRequest, parallel: Parallelism) -> float:
    """Return the time outside the layers for one sequence, without the optimizer."""
    return head_seconds(request, parallel) + loss_seconds(request, parallel)


def optimizer_seconds(request: EstimateRequest, parallel: Parallelism) -> float:
    """Return the time of a fused optimizer, which reads weights, gradients and state, and writes all but gradients."""
    sizes = request.element_bytes
    moved = 2 * (sizes.weight + sizes.optimizer) + sizes.gradient
    groups = device_trained_parameters(request.shape, parallel).by_ranks(parallel)
    updated = sum(weights / (ranks if parallel.zero_stage else 1) for weights, ranks, _ in groups)
    return moved * updated / memory_rate(request)


def data_parallel_seconds(request: EstimateRequest, parallel: Parallelism, compute_seconds: float) -> float:
    """Return the exposed time of synchronizing weights and gradients in a step.

    ZeRO 3 gathers weights for each forward and backward and reduces gradients after each backward. Computation hides
    this communication. Otherwise gradients are reduced once per step, and weights are gathered once per step if the
    optimizer is sharded. In pipelines, the backward of each micro-batch reduces gradients with ZeRO 2, too.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        compute_seconds: Time in a step in which the device computes.
    """
    weights, trained = (count(request.shape, parallel) for count in (device_parameters, device_trained_parameters))
    moves = [
        _moves(request, parallel, count, with_gradient, ranks, distance)
        for (count, ranks, distance), (with_gradient, _, _) in zip(
            weights.by_ranks(parallel), trained.by_ranks(parallel), strict=True
        )
    ]
    once = sum(seconds for seconds, _ in moves)
    moving = request.batch_size // parallel.dp * sum(seconds for _, seconds in moves)
    return once + max(moving - compute_seconds, 0.0)


def _moves(
    request: EstimateRequest, parallel: Parallelism, weights: float, trained: float, ranks: int, distance: int
) -> tuple[float, float]:
    """Times to synchronize some weights: once in a step, and for each sequence."""
    exchange = _exchange(request, parallel, ranks)
    reduced = _exchange_seconds(request, exchange.gradient, trained, ranks, distance)
    gathered = _exchange_seconds(request, exchange.weight, trained, ranks, distance)
    if parallel.zero_stage == 2 and parallel.pp > 1:
        return gathered, reduced
    if parallel.zero_stage < 3:
        return reduced + gathered, 0.0
    near = min(request.zero_shard_size or ranks, ranks)  # experts are on fewer devices
    # Neighbours send each other exact values.
    of_neighbours = exchange.weight if near == ranks else _Sent(request.element_bytes.product)
    again = _exchange_seconds(request, of_neighbours, weights, near, distance)
    return 0.0, reduced + _exchange_seconds(request, exchange.weight, weights, ranks, distance) + again


def _exchange_seconds(request: EstimateRequest, one: _Sent, count: float, ranks: int, distance: int) -> float:
    """Time to gather or to reduce some values among devices."""
    sent = count * one.sent_bytes * (ranks - 1) / ranks / ring_bandwidth(request.cluster, ranks, distance)
    return sent + count * one.moved_bytes / memory_rate(request)


class _Sent(NamedTuple):
    """What it takes to send a value.

    Attributes:
        sent_bytes: Its bytes.
        moved_bytes: Bytes of device memory that are read and written to quantise and to restore it.
    """

    sent_bytes: float
    moved_bytes: float = 0.0


class _Exchange(NamedTuple):
    """What it takes to gather a weight, and to reduce its gradient."""

    weight: _Sent
    gradient: _Sent


def _exchange(request: EstimateRequest, parallel: Parallelism, ranks: int) -> _Exchange:
    sizes = request.element_bytes
    if request.zero_communication == "none":
        return _Exchange(_Sent(sizes.product if parallel.zero_stage else sizes.reduced), _Sent(sizes.reduced))
    weight, gradient = (
        sent_bytes(BLOCK, bits) / BLOCK for bits in (WEIGHT_BITS, GRADIENT_BITS[request.zero_communication])
    )
    return _Exchange(_Sent(weight, _QUANTISE / ranks + _RESTORE_WEIGHT), _Sent(gradient, _QUANTISE + _RESTORE_GRADIENT))


def idle_seconds(request: EstimateRequest, parallel: Parallelism, stage_seconds: float) -> float:
    """Return the time of a step in which a stage waits while the pipeline fills and drains.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        stage_seconds: Time of forward and backward of the layers of a stage for one micro-batch.
    """
    return _idle_blocks(request, parallel, stage_seconds) * stage_seconds / parallel.virtual_pipeline_size


def _idle_blocks(request: EstimateRequest, parallel: Parallelism, stage_seconds: float) -> float:
    """`idle_blocks` of a step. What a stage does beside forwards and gradients of weights is done in backwards."""
    runs = [(run.shape.layers, layer_times(run, parallel)) for run in request.runs(parallel)]
    seconds = max(stage_seconds, sum(layers * (times.forward + times.backward) for layers, times in runs))
    forward = sum(layers * times.forward for layers, times in runs) / seconds
    weights = sum(layers * times.later for layers, times in runs) / seconds if parallel.weights_wait else 0.0
    blocks = parallel.virtual_pipeline_size
    return idle_blocks(parallel.pp, _micro_batches(request, parallel), blocks, forward, weights)


@functools.lru_cache
def idle_blocks(stages: int, micro_batches: int, blocks: int, forward: float = 1 / 3, weights: float = 0.0) -> float:
    """Return how many blocks of layers, forward and backward of a micro-batch, a stage could compute while it waits.

    With one block, or a multiple of `stages` micro-batches, the number is `stages - 1`, or, if gradients of weights
    wait, `(stages - 1) * (1 - 2 * weights)`. Otherwise the order has gaps for micro-batches that do not exist (see
    `stage_order.py`).

    Args:
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        blocks: Number of blocks of layers of each stage.
        forward: Share of a block's time for the forward.
        weights: Share for gradients of weights that are computed later than those of hidden states (zero-bubble order).
    """
    rest = micro_batches % stages
    if (blocks == 1 and not weights) or not rest:
        return (stages - 1) * (1 - 2 * weights)
    count = min(micro_batches, stages + rest)  # more multiples of `stages` change nothing
    orders = [iter(training_order(stage, stages, count, blocks, weights > 0)) for stage in range(stages)]
    waiting, free = [next(order, None) for order in orders], [0.0] * stages
    ends: dict[tuple[int, int, bool], float] = {}  # by micro-batch, block in the order of layers, and backward
    while any(waiting):
        for stage, action in enumerate(waiting):
            if action is None:
                continue
            if action.weights:
                free[stage], waiting[stage] = free[stage] + weights, next(orders[stage], None)
                continue
            number, block, backward = action.micro_batch, action.block * stages + stage, action.backward
            last = block == (stages * blocks - 1 if backward else 0)
            before = (number, block, False) if last else (number, block + (1 if backward else -1), backward)
            if before in ends or (last and not backward):
                of_backward = 1.0 - forward - (weights if stage else 0.0)  # for the first stage, none waits
                seconds = of_backward if backward else forward
                free[stage] = max(free[stage], ends.get(before, 0.0)) + seconds
                ends[number, block, backward], waiting[stage] = free[stage], next(orders[stage], None)
    return max(free) - blocks * count


def message_seconds(request: EstimateRequest, parallel: Parallelism) -> float:
    """Return the time of a step in which stages wait for messages.

    The first micro-batch passes on its hidden states and gets back its gradients at each border of two blocks. A stage
    has as many micro-batches in flight as there are stages behind its input, so that later ones wait for a share of
    this time.
    """
    if parallel.pp == 1:
        return 0.0
    bandwidth = ring_bandwidth(request.cluster, parallel.pp, parallel.devices // parallel.pp)
    there_and_back = (
        2 * (parallel.pp * parallel.virtual_pipeline_size - 1) * _message_bytes(request, parallel) / bandwidth
    )
    return there_and_back * (1 + (_micro_batches(request, parallel) - 1) / parallel.pp)


def pipeline_sentence(request: EstimateRequest, parallel: Parallelism, stage_seconds: float) -> str:
    """Return a sentence about the stages of a pipeline; empty if there is none.

    Args:
        request: Training to estimate.
        parallel: Sizes of the parallelism.
        stage_seconds: Time of forward and backward of the layers of a stage for one micro-batch.
    """
    if parallel.pp == 1:
        return ""
    count, stages, blocks = _micro_batches(request, parallel), parallel.pp, parallel.virtual_pipeline_size
    idle = _idle_blocks(request, parallel, stage_seconds)
    sent = format_bytes(_message_bytes(request, parallel))
    return (
        f"Each of {stages} pipeline stages is idle for {idle / (blocks * count + idle):.0%} of the step, "
        f"with {count} micro-batches of one sequence. For each of them, a device sends {sent} to the next stage "
        f"{f'{blocks} times ' if blocks > 1 else ''}and gets as much back."
    )


def _micro_batches(request: EstimateRequest, parallel: Parallelism) -> int:
    return request.batch_size // parallel.dp


def _message_bytes(request: EstimateRequest, parallel: Parallelism) -> float:
    """Bytes of the hidden states of a micro-batch on one device."""
    tokens = request.seq_len / (parallel.tp * parallel.cp)
    return tokens * request.shape.hidden * request.element_bytes.stream
