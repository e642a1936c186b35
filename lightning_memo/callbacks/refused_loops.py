"""Refuses training loops that a pipeline cannot run: those that use gradients early, or those of all weights."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden


def refuse_early_gradients(trainer: pl.Trainer) -> None:
    """Refuse what a pipeline cannot do: it computes gradients in the training step, and gives them in the backward.

    Args:
        trainer: The trainer of the fit.

    Raises:
        ValueError: The module optimizes manually, or something looks at gradients between the two.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            "pipeline_parallel_size: manual optimization may drop gradients that a pipeline computes in the forward: "
            "set automatic_optimization=True, or pipeline_parallel_size=1"
        )
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    found = [f"{type(module).__name__}.{name}" for name in hooks if is_overridden(name, module)]
    for callback in trainer.callbacks:
        if is_overridden(hooks[0], callback, parent=pl.Callback):
            found.append(f"{type(callback).__name__}.{hooks[0]}")
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()):
        found.append("a hook on the gradient of a parameter")
    if found:
        raise ValueError(
            f"pipeline_parallel_size: {found[0]} would see gradients before the backward of the loss: leave it out, or "
            "set pipeline_parallel_size=1"
        )


def refuse_joint_optimizers(trainer: pl.Trainer) -> None:
    """Refuse optimizers whose step depends on all weights together.

    Args:
        trainer: The trainer of the fit.

    Raises:
        ValueError: An optimizer is LBFGS.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise ValueError(
            "pipeline_parallel_size: LBFGS computes a step from the gradients of all weights, and each stage has its "
            "own: take another optimizer, or set pipeline_parallel_size=1"
        )
