"""How much memory slices take that swap for themselves, and which of them come back from the host together.

Pure: imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_memo.artifacts.plan import HostBacked, StreamedBytes
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, aligned, unit_bytes

STATES: Final = 3
"""Hidden states on the host at once: a layer's input and output, or their gradients, and what the last norm was
given."""

BLOCK_TOKENS: Final = 2048
"""Keys and values that come from the host at once: a kernel call should have work for a whole GPU, and a copy be worth
its launch."""


def streamed_sizes(
    calls: Sequence[tuple[Sequence[SavedBytes], int]],
    slices: Sequence[TokenRange],
    host_backed: HostBacked,
    *,
    gradient_bytes: int,
    block_tokens: int = BLOCK_TOKENS,
    schedule: str = "layer",
    shared: Sequence[SavedBytes] = (),
) -> StreamedBytes:
    """Bytes for all slices of all layer calls, alignment included.

    Args:
        calls: What each layer call saves, and for how many tokens.
        slices: The slices to be run.
        host_backed: As in :class:`~lightning_memo.artifacts.plan.SwapPlan`; not "none".
        gradient_bytes: Of a token, in the type in which gradients of keys and values are added up.
        block_tokens: Tokens whose keys and values come from the host at once.
        schedule: "layer", or "slice": gradients of all layers' keys and values are alive at once, and for each slice
            one of the last layer's output.
        shared: With "slice", what layers get beside their input, for as many tokens as the first call's.
    """
    units = {id(saved): unit_bytes(saved, tokens, slices) for saved, tokens in calls}  # alike calls may share theirs
    largest = max(sum(slices[n].tokens for n in block) for block in blocks_of(slices, block_tokens))
    block, buffers = largest * max(_per_token(*call, "key", "value") for call in calls), 2
    gradients = beside = states = 0
    if host_backed == "all":
        block, buffers, gradients = block + gradient_bytes * largest, 3, gradient_bytes * slices[-1].stop
        states = STATES * max(_per_token(*call, "input") for call in calls) * slices[-1].stop
    if schedule == "slice":
        output = [item for item in calls[-1][0] if item.kind == "input"]
        gradients, states = gradients * len(calls), 0
        beside = sum(unit_bytes([*output, *shared], calls[-1][1], slices))
    return StreamedBytes(
        slot=max(max(sizes) for sizes in units.values()),
        host=sum(sum(units[id(saved)]) for saved, _ in calls) + beside + gradients + states,
        gradients=gradients,
        staging=buffers * aligned(block),
        states=states,
    )


def _per_token(saved: Sequence[SavedBytes], tokens: int, *kinds: str) -> int:
    return -(-sum(item.size_bytes for item in saved if item.kind in kinds) // tokens)


def blocks_of(slices: Sequence[TokenRange], least_tokens: int) -> list[range]:
    """Slices that are fetched together: as few as have so many tokens."""
    blocks, first, tokens = [], 0, 0
    for n, part in enumerate(slices):
        tokens += part.tokens
        if tokens >= least_tokens or n == len(slices) - 1:
            blocks.append(range(first, n + 1))
            first, tokens = n + 1, 0
    return blocks
