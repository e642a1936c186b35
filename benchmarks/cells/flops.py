"""FLOPs of a training step: what the model needs, and what a method has the hardware do.

By the usual convention attention is causal, and its backward takes twice its forward. Frozen weights have no gradient:
with adapters, a token is multiplied by a weight twice, not three times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cells.cell import Cell
from lightning_memo.estimate.inputs.presets import load_model
from lightning_memo.shapes.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of a step.

    Attributes:
        model: Nothing recomputed; MFU is this over the time and the peak.
        hardware: With what is recomputed; `None` where that is not known.
    """

    model: float
    hardware: float | None


def shape_of(cell: Cell) -> ModelShape:
    """Of the cell's model, with as many layers as the cell has."""
    shape = load_model(cell.model)
    return shape if cell.layers is None else replace(shape, layers=cell.layers)


def step_flops(cell: Cell, trained: float = 1.0, alpha: float | None = None, by_kind: bool = False) -> StepFlops:
    """FLOPs of a step of a cell.

    Args:
        cell: What is trained, and how.
        trained: Share of the weights that get a gradient.
        alpha: Of the plan in force; `None` if nothing is swapped or recomputed by the engine.
        by_kind: Whether the plan says kind by kind what is recomputed.
    """
    shape = shape_of(cell)
    model = shape.model_flops(cell.tokens, trained)
    return StepFlops(model, None if by_kind else model + _recomputed(cell.method, shape, cell.tokens, alpha))


def _recomputed(method: str, shape: ModelShape, tokens: int, alpha: float | None) -> float:
    """FLOPs of what the layers compute again."""
    if alpha is not None:
        return (1.0 - alpha) * shape.recomputed_flops(tokens)
    attention = shape.layers * shape.attention_flops(tokens)
    if method == "alst":  # tiles of the feed-forward run in the layer's recomputation, and again in their own
        tiles = 2.0 * tokens * shape.active_experts * shape.ffn_parameters
        return attention + shape.layers * (2.0 * tokens * shape.multiplied_in_a_layer + tiles)
    return attention + shape.recomputed_flops(tokens) if method.startswith("checkpointing") else 0.0
