"""Times of a layer and of data-parallel communication, for one sequence on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.estimate.inputs.cluster import Cluster
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import METHOD_TRAITS, element_bytes, layer_kernels
from lightning_memo.estimate.times.memory_bound import traffic_of_layer
from lightning_memo.shapes.model_shape import ModelShape

BACKWARD_OF_ATTENTION: Final = 2.5
"""FLOPs of attention's backward relative to its forward: five matrix products instead of two."""

_FORWARD_COLLECTIVES: Final = 4
_BACKWARD_COLLECTIVES: Final = 6
_BACKWARD_CONTEXTS: Final = 2
"""Context-parallel communication of the backward, relative to the forward."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times of one layer call in seconds, for a sequence that is divided over several devices."""

    dense: float
    """Forward of the matrix products with weights."""

    dense_backward: float
    """Backward of these products: gradients of their inputs and of trained weights."""

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

    network: float
    """Part of the forward that waits for the network between nodes."""

    @property
    def forward(self) -> float:
        """Forward, with an all-gather before and a reduce-scatter after both attention and feed-forward."""
        computing = self.dense + self.memory_bound + self.attention_forward
        return computing + _FORWARD_COLLECTIVES * self.collective + self.context

    @property
    def backward(self) -> float:
        """Backward without recomputation. The inputs of both parts are gathered again for the gradients of weights."""
        communication = _BACKWARD_COLLECTIVES * self.collective + _BACKWARD_CONTEXTS * self.context
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
    def computing(self) -> float:
        """Forward and backward without communication."""
        return self.forward + self.backward - self.tensor_parallel - self.context_parallel

    @property
    def recompute(self) -> float:
        """Recomputation of everything but attention and the last product, for all tokens."""
        return self.recomputed_dense + self.recomputed_memory_bound + 3 * self.collective

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
    traffic = traffic_of_layer(shape, kernels=layer_kernels(question), sizes=sizes)
    moving = tokens / divided / memory_rate(question)
    adapters = shape.adapter_parameters  # whose products are bound by memory
    trained = shape.multiplied_in_a_layer if shape.adapters is None else 0
    return LayerTimes(
        dense=2 * tokens * (shape.multiplied_in_a_layer - adapters) / dense_rate,
        dense_backward=2 * tokens * (shape.multiplied_in_a_layer - adapters + trained) / dense_rate,
        recomputed_dense=2 * tokens * shape.recomputed_in_a_layer / dense_rate,
        memory_bound=traffic.forward * moving,
        memory_bound_backward=traffic.backward * moving,
        recomputed_memory_bound=traffic.again * moving,
        attention_forward=attention_forward,
        attention_backward=BACKWARD_OF_ATTENTION * attention_at_peak / constants.attention_backward_efficiency,
        collective=collective,
        context=exchanging + merging,
        network=(4 * collective if parallel.tp > cluster.devices_per_node else 0.0)
        + (exchanging if parallel.tp * parallel.cp > cluster.devices_per_node else 0.0),
    )


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
    keys_and_values = 2 * tokens * shape.kv_heads * shape.head_dim * product
    output = tokens * shape.heads * shape.head_dim * product
    if METHOD_TRAITS[question.method].ulysses:
        return (keys_and_values + 2 * output) * (parallel.cp - 1) / parallel.cp / bandwidth, 0.0
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
    reduced once per step, and weights are gathered once per step if the optimizer is sharded.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        compute_seconds: Computation time of all layers in a step.
    """
    ranks = parallel.dp * parallel.cp
    if ranks == 1:
        return 0.0
    sent = (ranks - 1) / ranks
    weights = device_parameters(question.shape, parallel) * sent
    trained = device_trained_parameters(question.shape, parallel) * sent
    bandwidth = ring_bandwidth(question.cluster, ranks, parallel.tp)
    sizes = element_bytes(question)
    if parallel.zero_stage == 3:
        sequences = question.batch_size // parallel.dp
        moving = sequences * (weights * 2 * sizes.product + trained * sizes.reduced) / bandwidth
        return moving if question.constants.published else max(moving - compute_seconds, 0.0)
    return trained * (sizes.reduced + (sizes.product if parallel.zero_stage else sizes.reduced)) / bandwidth


def device_parameters(shape: ModelShape, parallel: Parallelism) -> float:
    """Count the weights of the fullest device before ZeRO shards them: its layers, and the embedding or the head."""
    layers = shape.layers // parallel.pp * shape.layer_parameters
    embeddings = shape.vocab * shape.hidden * (2 if parallel.pp == 1 and not shape.tied else 1)
    return (layers + embeddings) / parallel.tp


def device_trained_parameters(shape: ModelShape, parallel: Parallelism) -> float:
    """Count the weights of the fullest device that get a gradient."""
    if shape.adapters is None:
        return device_parameters(shape, parallel)
    return shape.layers // parallel.pp * shape.trained_layer_parameters / parallel.tp
