"""Times of a layer that runs in slices and reads the keys and values of earlier slices from the host."""

from __future__ import annotations

from lightning_memo.estimate.memory.activations import LayerActivations
from lightning_memo.estimate.memory.slice_settings import Slices
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes
from lightning_memo.estimate.times.layer_times import LayerTimes


def streamed_seconds(
    question: Question, slices: Slices, times: LayerTimes, kept: LayerActivations, bandwidth: float
) -> tuple[float, float]:
    """Return the times of forward and backward as a profiled first step measures them, at alpha 0.

    Each block of keys and values is read during the computation with the block before. Attention to earlier slices
    therefore takes the longer of computing and reading. A layer takes no less time than its copies in one direction.

    Args:
        question: Question that was asked.
        slices: Settings for slices.
        times: Times of a layer without slices.
        kept: Saved activations of a layer per token.
        bandwidth: Bandwidth between device and host in each direction, in bytes per second.
    """
    shape, tokens = question.shape, question.seq_len
    keys_and_values = 2 * shape.kv_heads * shape.head_dim * element_bytes(question).product
    on_host = slices.host_backed == "all"
    gradients = slices.key_value_gradient_bytes(shape) if on_host else 0
    states = shape.hidden * element_bytes(question).stream if slices.states_on_host else 0
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
