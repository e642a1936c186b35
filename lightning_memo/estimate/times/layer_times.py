"""Times of a layer and of data-parallel communication, for one sequence on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from lightning_memo.artifacts.compressed_layout import BLOCK
from lightning_memo.estimate.inputs.cluster import Cluster
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import ElementBytes
from lightning_memo.estimate.memory.device_weights import device_parameters, device_trained_parameters
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import METHOD_TRAITS, element_bytes, layer_kernels, runs_here
from lightning_memo.estimate.times.expert_exchange import exchange_seconds
from lightning_memo.estimate.times.layer_products import later_products
from lightning_memo.estimate.times.memory_bound import traffic_of_layer
from lightning_memo.parallel.zero.quantised_bytes import GRADIENT_BITS, WEIGHT_BITS, sent_bytes
from lightning_memo.shapes.model_shape import ModelShape

BACKWARD_OF_ATTENTION: Final = 2.5
"""FLOPs of attention's backward relative to its forward: five matrix products instead of two."""

_FORWARD_COLLECTIVES: Final = 4
_BACKWARD_COLLECTIVES: Final = 6
_EXCHANGES: Final = 2
"""All-to-alls of expert parallelism in the forward, and of gradients in the backward."""

_BACKWARD_CONTEXTS: Final = 2
"""Context-parallel communication of the backward, relative to the forward."""

# Bytes of device memory that the operations of parallel/zero/quantised_collectives.py read and write for each value.
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

    @property
    def recompute_all(self) -> float:
        return self.forward


def layer_times(question: Question, parallel: Parallelism) -> LayerTimes:
    """Compute the times of a layer call.

    Matrix products and attention run at a fraction of the device's peak, all other operations at a fraction of the
    bandwidth of its memory, collectives at the bandwidth of the links.
    """
    shape, cluster, constants = question.shape, question.cluster, question.constants
    tokens, divided = question.seq_len, parallel.tp * parallel.cp
    sizes = element_bytes(question)
    peak = cluster.peak_flops * sizes.rate
    dense_rate = peak * constants.dense_efficiency * divided
    attention_at_peak = shape.attention_flops(tokens) / divided / peak
    if constants.published:
        attention_at_peak *= METHOD_TRAITS[question.method].attention_time
    attention_forward = attention_at_peak / constants.attention_forward_efficiency
    hidden_bytes = tokens / parallel.cp * shape.hidden * sizes.stream
    collective = hidden_bytes * (parallel.tp - 1) / parallel.tp / ring_bandwidth(cluster, parallel.tp)
    exchanging, merging = _context_seconds(question, parallel, attention_forward)
    traffic = traffic_of_layer(shape, kernels=layer_kernels(question), sizes=sizes, tensor_parallel=parallel.tp)
    moving = tokens / divided / memory_rate(question)
    products, recomputed = _multiplied(shape, parallel, sizes)
    trained, later = (products, _later_weights(question, parallel)) if shape.adapters is None else (0, 0)
    return LayerTimes(
        dense=2 * tokens * products / dense_rate,
        dense_backward=2 * tokens * (products + trained) / dense_rate,
        later=2 * tokens * later / dense_rate,
        recomputed_dense=2 * tokens * recomputed / dense_rate,
        memory_bound=traffic.forward * moving,
        memory_bound_backward=traffic.backward * moving,
        recomputed_memory_bound=traffic.again * moving,
        attention_forward=attention_forward,
        attention_backward=BACKWARD_OF_ATTENTION * attention_at_peak / constants.attention_backward_efficiency,
        collective=collective,
        context=exchanging + merging,
        exchange=exchange_seconds(question, parallel),
        network=(4 * collective if parallel.tp > cluster.devices_per_node else 0.0)
        + (exchanging if parallel.tp * parallel.cp > cluster.devices_per_node else 0.0),
    )


def _multiplied(shape: ModelShape, parallel: Parallelism, sizes: ElementBytes) -> tuple[float, float]:
    """Weights that each token is multiplied with in the forward, and in a recomputation.

    Adapters are left out, as memory bounds their products. Autocast does not cast for experts, which count as often as
    they are slower. Each tensor-parallel device multiplies the tokens of all with the router and the shared experts,
    and computes the last projection again if it has an adapter, which comes behind it.
    """
    slower = sizes.stream // sizes.product - 1 if shape.experts > 1 else 0
    more = slower * shape.active_experts * shape.ffn_parameters + (parallel.tp - 1) * shape.routing_parameters
    last = shape.adapted_last_projection if parallel.tp > 1 else 0
    return shape.multiplied_in_a_layer - shape.adapter_parameters + more, shape.recomputed_in_a_layer + more + last


def _later_weights(question: Question, parallel: Parallelism) -> int:
    """Weights of a layer that a zero-bubble pipeline computes gradients of later, as `_multiplied` counts them."""
    shape = question.shape
    weights = sum(product.inputs * product.outputs for product in later_products(shape, layer_kernels(question)))
    return weights + (parallel.tp - 1) * shape.routing_parameters if weights else 0


def memory_rate(question: Question) -> float:
    """Return the bytes per second that memory-bound operations read and write."""
    return question.cluster.memory_bandwidth * question.constants.memory_efficiency


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


def _context_seconds(question: Question, parallel: Parallelism, attention_seconds: float) -> tuple[float, float]:
    """Return the exposed communication time of context parallelism, and the time to merge partial outputs.

    A ring sends keys and values while attention runs, and merges an output at each step.

    Ulysses exchanges queries, keys, values and outputs, which no computation hides.
    """
    shape, bandwidth = question.shape, ring_bandwidth(question.cluster, parallel.cp, parallel.tp)
    tokens = question.seq_len / (parallel.tp * parallel.cp)
    product = element_bytes(question).product
    widths = shape.attention
    keys_and_values = tokens * (widths.key + widths.value) * product
    output = tokens * widths.output * product
    if METHOD_TRAITS[question.method].ulysses:
        return (keys_and_values + tokens * widths.query * product + output) * (
            parallel.cp - 1
        ) / parallel.cp / bandwidth, 0.0
    steps = parallel.cp - 1
    exposed = max(steps * keys_and_values / bandwidth - attention_seconds, 0.0)
    return exposed, steps * output / question.constants.merged_bytes_per_second


def has_whole_logits(question: Question) -> bool:
    """Whether the logits of all tokens exist at once."""
    return METHOD_TRAITS[question.method].whole_logits or question.constants.published


def data_parallel_seconds(question: Question, parallel: Parallelism, compute_seconds: float) -> float:
    """Return the exposed time of synchronizing weights and gradients in a step.

    ZeRO 3 gathers weights for each forward and backward and reduces gradients after each backward. Computation hides
    this communication, except in the papers' DeepSpeed, as its times for short sequences show. Otherwise gradients are
    reduced once per step, and weights are gathered once per step if the optimizer is sharded. In this package's
    pipelines, the backward of each micro-batch reduces gradients with ZeRO 2, too.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        compute_seconds: Time in a step in which the device computes.
    """
    weights, trained = (count(question.shape, parallel) for count in (device_parameters, device_trained_parameters))
    moves = [
        _moves(question, parallel, count, with_gradient, ranks, distance)
        for (count, ranks, distance), (with_gradient, _, _) in zip(
            weights.by_ranks(parallel), trained.by_ranks(parallel), strict=True
        )
    ]
    once = sum(seconds for seconds, _ in moves)
    moving = question.batch_size // parallel.dp * sum(seconds for _, seconds in moves)
    return once + (moving if question.constants.published else max(moving - compute_seconds, 0.0))


def _moves(
    question: Question, parallel: Parallelism, weights: float, trained: float, ranks: int, distance: int
) -> tuple[float, float]:
    """Times to synchronize some weights: once in a step, and for each sequence."""
    exchange = _exchange(question, parallel, ranks)
    reduced = _exchange_seconds(question, exchange.gradient, trained, ranks, distance)
    gathered = _exchange_seconds(question, exchange.weight, trained, ranks, distance)
    if parallel.zero_stage == 2 and parallel.pp > 1 and runs_here(question):
        return gathered, reduced
    if parallel.zero_stage < 3:
        return reduced + gathered, 0.0
    near = min(question.zero_shard_size or ranks, ranks)  # experts are on fewer devices
    # Neighbours send each other exact values.
    of_neighbours = exchange.weight if near == ranks else _Sent(element_bytes(question).product)
    again = _exchange_seconds(question, of_neighbours, weights, near, distance)
    return 0.0, reduced + _exchange_seconds(question, exchange.weight, weights, ranks, distance) + again


def _exchange_seconds(question: Question, one: _Sent, count: float, ranks: int, distance: int) -> float:
    """Time to gather or to reduce some values among devices."""
    sent = count * one.sent_bytes * (ranks - 1) / ranks / ring_bandwidth(question.cluster, ranks, distance)
    return sent + count * one.moved_bytes / memory_rate(question)


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


def _exchange(question: Question, parallel: Parallelism, ranks: int) -> _Exchange:
    sizes = element_bytes(question)
    if question.zero_communication == "none":
        return _Exchange(_Sent(sizes.product if parallel.zero_stage else sizes.reduced), _Sent(sizes.reduced))
    weight, gradient = (
        sent_bytes(BLOCK, bits) / BLOCK for bits in (WEIGHT_BITS, GRADIENT_BITS[question.zero_communication])
    )
    return _Exchange(_Sent(weight, _QUANTISE / ranks + _RESTORE_WEIGHT), _Sent(gradient, _QUANTISE + _RESTORE_GRADIENT))
