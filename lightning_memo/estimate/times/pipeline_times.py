"""How long the stages of a pipeline wait for each other, and what they send. A micro-batch is one sequence."""

from __future__ import annotations

import functools

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, runs_here
from lightning_memo.estimate.times.layer_times import layer_times, ring_bandwidth
from lightning_memo.parallel.pipeline.stage_order import training_order
from lightning_memo.utils.units import format_bytes


def idle_seconds(question: Question, parallel: Parallelism, stage_seconds: float) -> float:
    """Return the time of a step in which a stage waits while the pipeline fills and drains.

    Stages of the papers' programs interleave: each waits for one layer of the others.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        stage_seconds: Time of forward and backward of the layers of a stage for one micro-batch.
    """
    if not runs_here(question):
        return (parallel.pp - 1) * stage_seconds / (question.shape.layers // parallel.pp)
    return _idle_blocks(question, parallel, stage_seconds) * stage_seconds / parallel.virtual_pipeline_size


def _idle_blocks(question: Question, parallel: Parallelism, stage_seconds: float) -> float:
    """`idle_blocks` of a step. What a stage does beside forwards and gradients of weights is done in backwards."""
    runs = [(run.shape.layers, layer_times(run, parallel)) for run in question.runs(parallel)]
    seconds = max(stage_seconds, sum(layers * (times.forward + times.backward) for layers, times in runs))
    forward = sum(layers * times.forward for layers, times in runs) / seconds
    weights = sum(layers * times.later for layers, times in runs) / seconds if parallel.weights_wait else 0.0
    blocks = parallel.virtual_pipeline_size
    return idle_blocks(parallel.pp, _micro_batches(question, parallel), blocks, forward, weights)


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


def message_seconds(question: Question, parallel: Parallelism) -> float:
    """Return the time of a step in which stages wait for messages; zero for the papers' programs.

    The first micro-batch passes on its hidden states and gets back its gradients at each border of two blocks. A stage
    has as many micro-batches in flight as there are stages behind its input, so that later ones wait for a share of
    this time.
    """
    if parallel.pp == 1 or not runs_here(question):
        return 0.0
    bandwidth = ring_bandwidth(question.cluster, parallel.pp, parallel.devices // parallel.pp)
    there_and_back = (
        2 * (parallel.pp * parallel.virtual_pipeline_size - 1) * _message_bytes(question, parallel) / bandwidth
    )
    return there_and_back * (1 + (_micro_batches(question, parallel) - 1) / parallel.pp)


def pipeline_sentence(question: Question, parallel: Parallelism, stage_seconds: float) -> str:
    """Return a sentence about the stages of a pipeline; empty if there is none, or a paper's program has it.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        stage_seconds: Time of forward and backward of the layers of a stage for one micro-batch.
    """
    if parallel.pp == 1 or not runs_here(question):
        return ""
    count, stages, blocks = _micro_batches(question, parallel), parallel.pp, parallel.virtual_pipeline_size
    idle = _idle_blocks(question, parallel, stage_seconds)
    sent = format_bytes(_message_bytes(question, parallel))
    return (
        f"Each of {stages} pipeline stages is idle for {idle / (blocks * count + idle):.0%} of the step, "
        f"with {count} micro-batches of one sequence. For each of them, a device sends {sent} to the next stage "
        f"{f'{blocks} times ' if blocks > 1 else ''}and gets as much back."
    )


def _micro_batches(question: Question, parallel: Parallelism) -> int:
    return question.batch_size // parallel.dp


def _message_bytes(question: Question, parallel: Parallelism) -> float:
    """Bytes of the hidden states of a micro-batch on one device."""
    tokens = question.seq_len / (parallel.tp * parallel.cp)
    return tokens * question.shape.hidden * element_bytes(question).stream
