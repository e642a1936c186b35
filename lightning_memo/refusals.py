"""What cannot go together with the strategy, or not as the user meant it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn


def refuse_averaging(callbacks: Iterable[Callback]) -> None:
    """Several processes can't average weights.

    Raises:
        ValueError: A callback would.
    """
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, and several processes have parts of them: leave "
                "the callback out, or train in one process"
            )


def refuse_gradient_checkpointing(model: nn.Module) -> None:
    """Layers are recomputed by the engine.

    Raises:
        ValueError: The model would do it as well.
    """
    if any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules()):
        raise ValueError(
            "gradient checkpointing is on in the model, and MemoStrategy recomputes by itself: call "
            "model.gradient_checkpointing_disable(), or use MemoStrategy(alpha=0) for full recomputation"
        )


def tell_resting(compiled: Sequence[str]) -> None:
    """Say that compiled code is not used, if there is any."""
    if compiled:
        others = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
        rank_zero_warn(
            f"MemoStrategy: {compiled[0]}{others} run uncompiled, as layers run slice by slice: torch.compile is of "
            "use only for what lies beside the layers, like the head."
        )
