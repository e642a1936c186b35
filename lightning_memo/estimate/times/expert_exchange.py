"""All-to-all of expert parallelism: how many tokens processes send to those that have their experts, and its time."""

from __future__ import annotations

from math import comb

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes


def received_tokens(question: Question, parallel: Parallelism) -> float:
    """Return the number of tokens that a device gets for its experts, if all choices are equally probable.

    A token is sent once to each device that has experts of it. Tensor-parallel devices have the same tokens, and send
    each of them to devices with experts of their own share. Zero without expert parallelism.
    """
    shape, groups = question.shape, parallel.expert_parallel_size
    if shape.experts == 1 or groups == 1:
        return 0.0
    others = shape.experts - shape.experts // (groups * parallel.tp)
    missed = comb(others, shape.active_experts) / comb(shape.experts, shape.active_experts)
    return question.seq_len / parallel.cp * groups * (1.0 - missed)


def exchange_seconds(question: Question, parallel: Parallelism) -> float:
    """Return the time to send tokens to the devices of their experts, or to give the results back.

    Parts for devices of the node and of others are sent at the same time.
    """
    groups, cluster = parallel.expert_parallel_size, question.cluster
    sent = received_tokens(question, parallel) * question.shape.hidden * element_bytes(question).stream
    near = min(groups, max(cluster.devices_per_node // parallel.tp, 1))
    inside, outside = sent * (near - 1) / groups, sent * (groups - near) / groups
    return max(inside / cluster.node_bandwidth, outside / cluster.network_bandwidth)
