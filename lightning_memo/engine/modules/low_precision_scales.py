"""Layers that compute in 8 bits or fewer by modules of other packages, and the tokens that share their scales."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_memo.utils.class_names import class_name

# Fields of torchao's configuration that describe how a tensor of tokens is cast.
_CASTS_OF_TOKENS = (
    "cast_config_input", "cast_config_grad_output", "cast_config_input_for_grad_weight",
    "cast_config_grad_output_for_grad_weight",
)  # fmt: skip


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


def _scales_tensors(config: Any) -> bool:
    """Whether a configuration of torchao's float8 has one scale for a whole tensor of tokens."""
    casts = [cast for cast in (getattr(config, name, None) for name in _CASTS_OF_TOKENS) if cast is not None]
    return any(cast.scaling_type.name != "DISABLED" and cast.scaling_granularity.name == "TENSORWISE" for cast in casts)


def _package(m: nn.Module) -> str:
    return type(m).__module__.partition(".")[0]
