"""Layers that compute in 8 bits or fewer by modules of other packages, and the tokens that share their scales."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lightning_memo.utils.class_names import class_name

# Fields of torchao's configuration that describe how a tensor of tokens is cast.
_CASTS_OF_TOKENS = (
    "cast_config_input", "cast_config_grad_output", "cast_config_input_for_grad_weight",
    "cast_config_grad_output_for_grad_weight",
)  # fmt: skip
_STATE_OF_TRANSFORMER_ENGINE = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")


def why_scaled_together(module: nn.Module) -> str:
    """Return why some tokens cannot be computed without the others; empty if they can.

    A comparison in half precision would not show it: fp8 rounds as coarsely as a few operations in bf16.
    """
    for name, m in module.named_modules():
        if _package(m) == "torchao" and _scales_tensors(getattr(m, "config", None)):
            where = f"{name} of {class_name(module)}" if name else class_name(module)
            return (
                f'{where} has one float8 scale for all tokens (torchao\'s recipe "tensorwise"; with "rowwise" or '
                '"rowwise_with_gw_hp" each token has its own)'
            )
    return ""


def refuse_changing_scales(module: nn.Module) -> None:
    """Refuse TransformerEngine's modules if they compute in FP8.

    They keep scales and maxima outside of buffers and change them in each forward. A recomputation would change them
    again, and would not run in FP8 because their autocast is over by then.

    Raises:
        ValueError: A module of TransformerEngine computes in FP8.
    """
    for m in module.modules():
        if _package(m) == "transformer_engine" and _transformer_engine_is_in_fp8():
            raise ValueError(
                f"{class_name(m)} of {class_name(module)} is TransformerEngine's and computes in FP8, which "
                "changes its scales in each forward, but lightning_memo runs layers more than once: leave its autocast "
                "out, or take torchao's float8 training"
            )


def _scales_tensors(config: Any) -> bool:
    """Whether a configuration of torchao's float8 has one scale for a whole tensor of tokens."""
    casts = [cast for cast in (getattr(config, name, None) for name in _CASTS_OF_TOKENS) if cast is not None]
    return any(cast.scaling_type.name != "DISABLED" and cast.scaling_granularity.name == "TENSORWISE" for cast in casts)


def _transformer_engine_is_in_fp8() -> bool:
    for name in _STATE_OF_TRANSFORMER_ENGINE:  # the second one before 2.9
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            return bool(manager.is_fp8_enabled())
    return False


def _package(m: nn.Module) -> str:
    return type(m).__module__.partition(".")[0]
