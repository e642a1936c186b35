"""Which cells are measured, in which order, and for how long.

Methods at one length run one after the other, and short lengths first, so that the results of an interrupted run can be
compared. Longer steps are repeated less often.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from cells.cell import Cell, Effort

Work = tuple[Cell, Effort]

MAIN: Final = (
    "plain", "checkpointing", "selective", "selective_products", "checkpointing_save_on_cpu", "async_offload",
    "checkpointing_async_offload", "alst", "memo_auto",
)  # fmt: skip
SWEEP: Final = tuple(f"memo_alpha_{alpha}" for alpha in ("0", "0.125", "0.25", "0.5", "0.75", "1"))
ALPHAS: Final = (*SWEEP, "memo_auto_unplanned")
_HEADLINE: Final = ("checkpointing", "selective", "selective_liger", "memo_auto_unplanned", "memo_auto_without_triton")
ALST: Final = ("alst", "alst_freed", "alst_reentrant")
LIGER: Final = tuple(
    f"{method}_liger"
    for method in ("plain", "checkpointing", "selective", "selective_products", "checkpointing_async_offload")
)
ALL: Final = tuple(
    dict.fromkeys(
        (
            *MAIN,
            *ALST,
            *LIGER,
            *ALPHAS,
            "memo_auto_without_triton",
            "memo_slices",
            "memo_slices_hidden",
            "memo_slice_schedule",
        )
    )
)
BOUND_LAYERS: Final = (1, 2)
"""Numbers of layers with which plain training fits; the difference is the least time of one layer."""

BOUND_METHODS: Final = ("plain", "plain_liger")
"""Methods that show the least time of a layer: plain training, with the usual kernels and with fused ones."""

_K: Final = 1024
FITS: Final = Effort(warmup=0, repeats=1, settle_seconds=1, seconds=560, prime_tokens=4 * _K, observe=False)
"""Steps that show whether a length fits, including the optimizer's state."""


def grid(
    cells: Iterable[Cell], methods: Sequence[str], lengths: Sequence[int], effort: Effort | None = None
) -> Iterator[Work]:
    """Returns every cell, for each method at each length.

    Args:
        cells: Cells whose method and length are replaced.
        methods: The methods, in the order in which they run.
        lengths: Sequence lengths in tokens.
        effort: How long a cell is measured; `None` chooses by length.
    """
    cells = list(cells)
    for tokens in sorted(lengths):
        for cell in cells:
            for method in methods:
                yield replace(cell, method=method, tokens=tokens), effort or effort_at(tokens)


def bounds(
    cell: Cell, lengths: Sequence[int], effort: Effort | None = None, methods: Sequence[str] = ("plain",)
) -> Iterator[Work]:
    """Returns the cells that determine the shortest possible step of a cell's model."""
    few = [replace(cell, layers=layers) for layers in BOUND_LAYERS]
    return grid(few, methods, lengths, effort)


def effort_at(tokens: int) -> Effort:
    """Returns how long a cell of a length is measured."""
    if tokens <= 32 * _K:
        return Effort()
    if tokens <= 128 * _K:
        return Effort(warmup=1, repeats=3, settle_seconds=90)
    return Effort(warmup=0, repeats=1, settle_seconds=30, seconds=400, prime_tokens=4 * _K)


def most_important() -> list[Work]:
    """Returns the most important cells for a rented GPU, the most important first.

    A quarter of an hour, in commands of ten and of four minutes, is enough for bounds, the default with planned memory,
    its peers, and the default without planned memory, with both allocators. A command ends within a cell, which is
    lost, so the cells around the tenth minute are short.
    """
    few, whole = Cell(method="", tokens=0, model="llama3_8b", layers=8), Cell(method="", tokens=0, model="llama3_2_1b")
    allocators = ("native", "expandable_segments")
    adapters = replace(few, layers=None, tuning="lora", attention="cudnn")
    expandable = replace(adapters, allocator="expandable_segments")
    effort = Effort(warmup=1, repeats=2, settle_seconds=180, seconds=300)
    default = "memo_auto_unplanned"
    work = [
        *bounds(adapters, [64 * _K], effort, BOUND_METHODS),
        *grid([adapters], ("selective_liger", "memo_auto", "selective"), [64 * _K], effort),
        *grid([expandable], (default,), [64 * _K], effort),
        *bounds(adapters, [128 * _K], effort, BOUND_METHODS),
        *grid([adapters], ("checkpointing", default, "memo_auto_without_triton"), [64 * _K], effort),
        *grid([replace(adapters, layers=8)], (default, "selective_liger"), [128 * _K], effort),
        *grid([adapters], _HEADLINE, [128 * _K], replace(effort, repeats=1)),
    ]
    for tokens in (64 * _K, 128 * _K):
        work += [*grid([few], MAIN, [tokens]), *bounds(few, [tokens])]
    work += grid([few], ALPHAS, [64 * _K])
    work += grid([few], MAIN, [4 * _K, 16 * _K])
    work += grid([replace(few, allocator=name) for name in allocators], ("checkpointing", default), [64 * _K])
    work += [*grid([few], MAIN, [256 * _K]), *bounds(few, [256 * _K])]
    work += grid([few], ("memo_slices",), [64 * _K])
    work += grid([replace(few, tuning="lora"), whole, replace(few, model="llama3_2_3b")], MAIN, [16 * _K, 64 * _K])
    work += grid([few], ALPHAS, [128 * _K])
    work += grid([replace(whole, tuning="lora")], MAIN, [16 * _K, 64 * _K])
    return list(dict(work).items())


def smoke() -> list[Work]:
    """Returns cells with a tiny model for all methods on a CPU, which take two minutes."""
    cell = Cell(method="", tokens=0, model="llama_tiny", layers=4, device="cpu", slice_tokens=64)
    effort = Effort(warmup=1, repeats=2, settle_seconds=5, seconds=60)
    adapters = replace(cell, tuning="lora")
    work = [*grid([cell], ALL, [128], effort), *bounds(cell, [128], effort)]
    return [*work, *grid([cell, adapters], ("plain", "memo_alpha_0.5"), [256], effort)]
