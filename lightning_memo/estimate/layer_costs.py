"""What the planner is given: costs of the layer calls of one sequence on one device, and its budget."""

from __future__ import annotations

from lightning_memo.costs import Budget, LayerCosts
from lightning_memo.estimate.activations import layer_activations
from lightning_memo.estimate.answer import Question
from lightning_memo.estimate.device_bytes import (
    backward_bytes,
    gathered_bytes,
    logits_bytes,
    loss_bytes,
    state_of,
)
from lightning_memo.estimate.methods import kernels_of
from lightning_memo.estimate.parallelism import Parallelism
from lightning_memo.estimate.times import BF16, head_seconds, layer_times


def layer_costs(question: Question, parallel: Parallelism) -> LayerCosts:
    """Costs of the layers of one pipeline stage for one sequence, all of them alike."""
    calls = question.shape.layers // parallel.pp
    tokens = question.seq_len // (parallel.tp * parallel.cp)
    kept = layer_activations(question.shape, kernels=kernels_of(question), element_bytes=BF16)
    times = layer_times(question, parallel)
    bandwidth = question.cluster.host_bandwidth_of(devices_of_node(question)) * question.constants.host_efficiency
    return LayerCosts(
        batch=1,
        tokens=tokens,
        input_bytes=(tokens * kept.input,) * calls,
        attention_bytes=(tokens * kept.attention,) * calls,
        other_bytes=(tokens * kept.others,) * calls,
        forward_seconds=(times.forward,) * calls,
        backward_seconds=(times.backward,) * calls,
        recompute_seconds=(times.recompute,) * calls,
        outside_seconds=head_seconds(question, parallel),
        offload_bytes_per_second=bandwidth,
        prefetch_bytes_per_second=bandwidth,
        fixed_device_bytes=round(state_of(question, parallel).total + gathered_bytes(question, parallel)),
        transient_device_bytes=round(logits_bytes(question, parallel) + loss_bytes(question, parallel)),
        backward_device_bytes=backward_bytes(question, parallel),
    )


def budget(question: Question, parallel: Parallelism) -> Budget:
    """What one device may use for one sequence: sequences that are in a pipeline at once share the host."""
    cluster, constants = question.cluster, question.constants
    return Budget(
        device_bytes=int(cluster.device_bytes * constants.device_share),
        host_bytes=int(
            cluster.host_bytes
            * constants.host_share
            / devices_of_node(question)
            / sequences_in_flight(question, parallel)
        ),
    )


def devices_of_node(question: Question) -> int:
    """Devices that share a host."""
    return min(question.gpus, question.cluster.devices_per_node)


def sequences_in_flight(question: Question, parallel: Parallelism) -> int:
    """Sequences of which the first stage of a pipeline holds activations at once."""
    return min(parallel.pp, question.batch_size // parallel.dp)
