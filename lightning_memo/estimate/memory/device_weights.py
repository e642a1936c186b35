"""Weights of the fullest device before ZeRO shards them. Those of experts have fewer ranks to be sharded over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.shapes.model_shape import ModelShape


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
