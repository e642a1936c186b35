"""Memory of plans with `stream_from_host`: each slice swaps into its own slot, and keys and values arrive in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.artifacts.swap_plan import PlanMemory, StoragePlan, StreamFromHost
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, aligned, slice_slot_bytes

STATES: Final = 3
"""Hidden states on the host at the same time: a layer's input and output, or their gradients, and the input of the
final norm."""

BLOCK_TOKENS: Final = 2048
"""Tokens whose keys and values are fetched at once: enough for one kernel call to fill a GPU, and for the copy to
outweigh its launch."""


@dataclass(frozen=True, slots=True)
class SliceBytes:
    """A slice that swaps by itself.

    Attributes:
        tokens: Number of its tokens.
        slot: Bytes that leave the device.
        swapped: Whether these are all of its activations. Otherwise it is recomputed.
    """

    tokens: int
    slot: int
    swapped: bool


@dataclass(frozen=True, slots=True)
class StreamedBytes:
    """Bytes that a plan with `stream_from_host` needs.

    Attributes:
        memory: The memory of the plan.
        slices: The slices of the layer call with the largest slot, in order.
    """

    memory: PlanMemory
    slices: tuple[SliceBytes, ...]


def streamed_bytes(
    calls: Sequence[tuple[Sequence[SavedBytes], int]],
    slices: Sequence[TokenRange],
    stream_from_host: StreamFromHost,
    *,
    gradient_bytes: int,
    block_tokens: int = BLOCK_TOKENS,
    shared: Sequence[SavedBytes] = (),
    segments: Sequence[range] = (),
) -> StreamedBytes:
    """Memory of all slices of all layer calls, alignment included.

    Args:
        calls: For each layer call, the tensors that it saves and the number of tokens for which they were measured.
        slices: Slices of the plan.
        stream_from_host: See :class:`~lightning_memo.artifacts.swap_plan.SwapPlan`; not "none". With "model", the
            gradients of all layers' keys and values are alive at once, and so is one gradient of the last layer's
            output per slice.
        gradient_bytes: Bytes per token of the gradients of keys and values, in the type in which they are accumulated.
        block_tokens: Minimum number of tokens whose keys and values are fetched at once.
        shared: With "model", the arguments that layers receive in addition to their input, for as many tokens as in
            the first call.
        segments: The segments of the layer calls, of which one at a time stores tensors; see
            :class:`~lightning_memo.artifacts.swap_plan.StoragePlan`. If empty, all calls are one.
    """
    distinct = {id(saved): (saved, tokens) for saved, tokens in calls}  # equal calls may share one list of tensors
    slots = {key: slice_slot_bytes(*call, slices) for key, call in distinct.items()}
    totals = {key: sum(sizes) for key, sizes in slots.items()}
    largest = max(sum(slices[n].tokens for n in block) for block in blocks_of(slices, block_tokens))
    block, buffers = largest * max(_per_token(*call, "key", "value") for call in distinct.values()), 2
    gradients = outside = states = 0
    if stream_from_host in ("hidden", "model"):
        block, buffers, gradients = block + gradient_bytes * largest, 3, gradient_bytes * slices[-1].stop
        waiting = max(len(segments) - 1, 0)  # inputs of segments that run again
        states = (STATES + waiting) * max(_per_token(*call, "input") for call in distinct.values()) * slices[-1].stop
    if stream_from_host == "model":
        output = [item for item in calls[-1][0] if item.kind == "input"]
        gradients, states = gradients * len(calls), 0
        outside = sum(slice_slot_bytes([*output, *shared], calls[-1][1], slices))
    of_calls = [totals[id(saved)] for saved, _ in calls]
    stored = max(sum(of_calls[n] for n in part) for part in segments or [range(len(calls))])
    memory = PlanMemory(
        slot=max(max(sizes) for sizes in slots.values()),
        host=stored + outside + gradients + states,
        gradients=gradients,
        states=states,
        staging=buffers * aligned(block),
    )
    largest_call = zip(slices, max(slots.values(), key=max), strict=True)
    return StreamedBytes(
        memory, tuple(SliceBytes(part.tokens, slot, not part.recomputes) for part, slot in largest_call)
    )


def _per_token(saved: Sequence[SavedBytes], tokens: int, *kinds: str) -> int:
    return -(-sum(item.size_bytes for item in saved if item.kind in kinds) // tokens)


def blocks_of(slices: Sequence[TokenRange], least_tokens: int) -> list[range]:
    """Group consecutive slices into blocks that are fetched together.

    Args:
        slices: Slices of a layer call, in order.
        least_tokens: Minimum number of tokens of a block; the last one may have fewer.

    Returns:
        Ranges of indices into `slices`.
    """
    blocks, first, tokens = [], 0, 0
    for n, part in enumerate(slices):
        tokens += part.tokens
        if tokens >= least_tokens or n == len(slices) - 1:
            blocks.append(range(first, n + 1))
            first, tokens = n + 1, 0
    return blocks


def with_longest_segments(plan: StoragePlan, fits: Callable[[StoragePlan], bool]) -> StoragePlan | None:
    """Return a plan with the longest segments that fit, so that as few layer calls as possible run again.

    Args:
        plan: The plan whose tensors are stored within a segment.
        fits: Whether a plan fits the host.

    Returns:
        The plan; None if it fits with no segments.
    """
    sizes = range(len(plan.call_classes) - 1, 0, -1)
    return next(filter(fits, (replace(plan, segment_calls=size) for size in sizes)), None)
