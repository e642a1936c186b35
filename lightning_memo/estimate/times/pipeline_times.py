"""How long the stages of a pipeline wait for each other, and what they send. A micro-batch is one sequence."""

from __future__ import annotations

from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, runs_here
from lightning_memo.estimate.times.layer_times import ring_bandwidth
from lightning_memo.utils.units import format_bytes


def idle_seconds(question: Question, parallel: Parallelism, stage_seconds: float) -> float:
    """Return the time of a step in which a stage waits while the pipeline fills and drains.

    In the order 1F1B of this package, a micro-batch passes through a block of layers of each other stage. Stages of the
    papers' programs interleave: each waits for one layer of the others.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        stage_seconds: Time of forward and backward of the layers of a stage for one micro-batch.
    """
    blocks = parallel.virtual_pipeline_size if runs_here(question) else question.shape.layers // parallel.pp
    return (parallel.pp - 1) * stage_seconds / blocks


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


def pipeline_sentence(question: Question, parallel: Parallelism) -> str:
    """Return a sentence about the stages of a pipeline; empty if there is none, or a paper's program has it."""
    if parallel.pp == 1 or not runs_here(question):
        return ""
    count, stages, blocks = _micro_batches(question, parallel), parallel.pp, parallel.virtual_pipeline_size
    sent = format_bytes(_message_bytes(question, parallel))
    return (
        f"Each of {stages} pipeline stages is idle for {(stages - 1) / (blocks * count + stages - 1):.0%} of the step, "
        f"with {count} micro-batches of one sequence. For each of them, a device sends {sent} to the next stage "
        f"{f'{blocks} times ' if blocks > 1 else ''}and gets as much back."
    )


def _micro_batches(question: Question, parallel: Parallelism) -> int:
    return question.batch_size // parallel.dp


def _message_bytes(question: Question, parallel: Parallelism) -> float:
    """Bytes of the hidden states of a micro-batch on one device."""
    tokens = question.seq_len / (parallel.tp * parallel.cp)
    return tokens * question.shape.hidden * element_bytes(question).stream
