"""Activation checkpointing, by which TransformerEngine recomputes by itself, and which unit of FSDP2 a module is in."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast

_IN_ACTIVATION_RECOMPUTE_REGION = False
_ACTIVATION_RECOMPUTE_PHASE = False


class activation_recompute_forward(contextlib.AbstractContextManager[Any]):
    """Modules note their scales inside, or return to those that they have noted."""

    _is_first_fp8_module: ClassVar[list[bool]] = []

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.activation_recompute, self.recompute_phase = activation_recompute, recompute_phase

    def __enter__(self) -> None:
        global _IN_ACTIVATION_RECOMPUTE_REGION, _ACTIVATION_RECOMPUTE_PHASE
        _IN_ACTIVATION_RECOMPUTE_REGION = self.activation_recompute
        _ACTIVATION_RECOMPUTE_PHASE = self.recompute_phase
        state, first = FP8GlobalStateManager.quantization_state, activation_recompute_forward._is_first_fp8_module
        if self.activation_recompute and not self.recompute_phase:
            first.append(state.is_first_fp8_module)
        if self.activation_recompute and self.recompute_phase:
            state.is_first_fp8_module = first.pop(0)

    def __exit__(self, *exc_details: Any) -> None:
        global _IN_ACTIVATION_RECOMPUTE_REGION, _ACTIVATION_RECOMPUTE_PHASE
        _IN_ACTIVATION_RECOMPUTE_REGION = _ACTIVATION_RECOMPUTE_PHASE = False


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether modules note their scales now."""
    return _IN_ACTIVATION_RECOMPUTE_REGION and FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether modules run again now."""
    return _ACTIVATION_RECOMPUTE_PHASE


class _CheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run_function: Any, *args: torch.Tensor) -> torch.Tensor:
        ctx.run_function = run_function
        noting: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if any(ctx.needs_input_grad):
            noting = activation_recompute_forward(activation_recompute=True, recompute_phase=False)
        with torch.no_grad(), noting:
            outputs = run_function(*args)
        ctx.save_for_backward(*args)
        ctx.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        ctx.fp8_recipe = FP8GlobalStateManager.get_fp8_recipe() if ctx.fp8 else None
        return outputs

    @staticmethod
    def backward(ctx: Any, *args: torch.Tensor) -> tuple[Any, ...]:
        detached = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        again = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        with torch.enable_grad(), again, autocast(enabled=ctx.fp8, recipe=ctx.fp8_recipe):
            outputs = ctx.run_function(*detached)
        torch.autograd.backward(outputs, args)
        return (None, *(t.grad for t in detached))


def checkpoint(function: Any, *args: torch.Tensor) -> torch.Tensor:
    """Run a function, and run it again in the backward."""
    if not torch.is_grad_enabled():
        return function(*args)
    return _CheckpointFunction.apply(function, *args)


def _get_module_fsdp_state(module: nn.Module) -> Any:
    """Return the state of the smallest unit of FSDP2 that a module is in; `replicate` makes such units as well."""
    if hasattr(module, "_get_fsdp_state"):
        return module._get_fsdp_state()  # type: ignore[operator]
    if getattr(module, "_te_cached_parent_fsdp_state", None) is not None:
        return module._te_cached_parent_fsdp_state
    around = [unit for unit in _module_state_mapping if any(m is module for m in unit.modules())]
    if not around:
        raise RuntimeError("Module is not FSDP-wrapped and does not have any FSDP-wrapped parent modules.")
    state = min(around, key=lambda unit: len(list(unit.modules())))._get_fsdp_state()  # type: ignore[operator]
    module._te_cached_parent_fsdp_state = state
    return state
