"""The methods that are compared, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import peers

from cells.cell import Cell
from lightning_memo import MemoStrategy


@dataclass(frozen=True, slots=True)
class Method:
    """A training method: one of another project, or this project's strategy with some settings.

    Attributes:
        label: Name in tables.
        attach: Puts a method of another project around the model; `None` if the strategy does it.
        settings: Settings of `MemoStrategy`.
        sliced: Whether the slices have the length given by the cell.
        own_loss: Whether the method has its own loss that never holds all logits.
        fused: Whether Triton's kernels fuse norms, rotary positions or feed-forwards of layers.
        triton: Whether Triton can be imported.
    """

    label: str
    attach: peers.Attach | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    sliced: bool = False
    own_loss: bool = False
    fused: bool = False
    triton: bool = True

    @property
    def is_memo(self) -> bool:
        return self.attach is None

    def strategy(self, cell: Cell) -> Any:
        """Returns the strategy for Lightning's Trainer."""
        if not self.is_memo:
            return "auto"
        slices = {"slice_tokens": cell.slice_tokens} if self.sliced else {}
        whole = {"loss_chunk_tokens": None} if cell.loss == "whole" else {}
        divided = {"context_parallel_size": cell.ranks, "zero_stage": 3} if cell.ranks > 1 else {}
        if cell.ranks > 1 and cell.context == "ulysses":
            divided["ulysses_size"] = cell.ranks
        return MemoStrategy(attention=cell.attention, **self.settings, **slices, **whole, **divided)


def _with_liger(label: str, attach: peers.Attach) -> Method:
    return Method(f"{label} + liger-kernel", peers.with_liger(attach), fused=True)


def _memo(label: str, sliced: bool = False, triton: bool = True, **settings: Any) -> Method:
    return Method(label, settings=settings, sliced=sliced, own_loss=True, fused=triton, triton=triton)


METHODS: Final = {
    "plain": Method("plain", peers.attach_plain),
    "checkpointing": Method("checkpointing", peers.attach_checkpointing),
    "selective": Method("selective checkpointing", peers.attach_selective),
    "selective_products": Method("selective checkpointing, every second product", peers.attach_selective_products),
    "checkpointing_save_on_cpu": Method("checkpointing + save_on_cpu", peers.attach_save_on_cpu),
    "async_offload": Method("async offload", peers.attach_async_offload),
    "checkpointing_async_offload": Method("checkpointing + async offload", peers.attach_checkpointing_async_offload),
    "alst": Method("DeepSpeed ALST", peers.attach_alst, own_loss=True),
    "alst_freed": Method("DeepSpeed ALST, inputs freed after use", peers.attach_alst_freed, own_loss=True),
    "alst_reentrant": Method("ALST, reentrant checkpoints", peers.attach_alst_reentrant, own_loss=True),
    "plain_liger": _with_liger("plain", peers.attach_plain),
    "checkpointing_liger": _with_liger("checkpointing", peers.attach_checkpointing),
    "selective_liger": _with_liger("selective checkpointing", peers.attach_selective),
    "selective_products_liger": _with_liger(
        "selective checkpointing, every second product", peers.attach_selective_products
    ),
    "checkpointing_async_offload_liger": _with_liger(
        "checkpointing + async offload", peers.attach_checkpointing_async_offload
    ),
    **{
        f"memo_alpha_{alpha:g}": _memo(f"Memo, alpha {alpha:g}", alpha=alpha)
        for alpha in (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
    },
    "memo_auto_unplanned": _memo("Memo auto"),
    "memo_auto_without_triton": _memo("Memo auto, without Triton", triton=False),
    "memo_auto": _memo("Memo auto, memory planned", plan_memory=True),
    "memo_kinds": _memo("Memo by kinds"),  # of earlier results; it is "memo_auto_unplanned" now
    "memo_slices": _memo("Memo, many slices", sliced=True),
    "memo_slices_hidden": _memo("Memo, many slices, hidden states on the host", sliced=True, stream_from_host="hidden"),
    "memo_slice_schedule": _memo("Memo, slice by slice", sliced=True, stream_from_host="model"),
}


def method_of(cell: Cell) -> Method:
    """Returns the method of a cell.

    Raises:
        ValueError: There is no method of that name.
    """
    if cell.method not in METHODS:
        raise ValueError(f"method {cell.method!r} is not known: give some of {', '.join(METHODS)}")
    return METHODS[cell.method]
