"""FLOPs of a training step: those that the model needs, and those that a method makes the hardware compute.

By the usual convention, attention is causal, and its backward pass counts twice its forward pass. Frozen weights have
no gradient: with adapters, a token is multiplied by a weight twice instead of three times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cells.cell import Cell
from lightning_memo.estimate.cluster import load_model
from lightning_memo.shapes.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of a step.

    Attributes:
        model: Without recomputed operations; MFU is this number divided by the time and the peak.
        hardware: With recomputed operations; `None` if they are not known.
    """

    model: float
    hardware: float | None


def shape_of(cell: Cell) -> ModelShape:
    """Returns the shape of the cell's model, with the number of layers of the cell."""
    shape = load_model(cell.model)
    return shape if cell.layers is None else replace(shape, layers=cell.layers)


def step_flops(cell: Cell, trained: float = 1.0, alpha: float | None = None, by_kind: bool = False) -> StepFlops:
    """Returns the FLOPs of a step of a cell.

    Args:
        cell: The cell.
        trained: Share of the weights that have a gradient.
        alpha: Alpha of the active plan; `None` if the engine swaps and recomputes nothing.
        by_kind: Whether the plan decides by kind of tensor what is recomputed.
    """
    shape = shape_of(cell)
    model = shape.model_flops(cell.tokens, trained)
    return StepFlops(model, None if by_kind else model + _recomputed(cell.method, shape, cell.tokens, alpha))


def _recomputed(method: str, shape: ModelShape, tokens: int, alpha: float | None) -> float:
    """Returns the FLOPs that the layers recompute."""
    if alpha is not None:
        return (1.0 - alpha) * shape.recomputed_flops(tokens)
    attention = shape.layers * shape.attention_flops(tokens)
    if method.startswith("alst"):  # tiles of the feed-forward run in the layer's recomputation, and again in their own
        tiles = 2.0 * tokens * shape.active_experts * shape.ffn_parameters
        return attention + shape.layers * (2.0 * tokens * shape.multiplied_in_a_layer + tiles)
    if not method.startswith("checkpointing"):
        return 0.0
    last = 2.0 * tokens * shape.layers * shape.adapted_last_projection
    return attention + shape.recomputed_flops(tokens) + last
