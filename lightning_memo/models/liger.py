"""liger-kernel in Hugging Face models: faster norms, rotary positions and feed-forwards that save fewer tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import nn
from transformers import PreTrainedModel

_PACKAGE: Final = RequirementCache("liger-kernel>=0.8")
_ROPE: Final = "apply_rotary_pos_emb"
_rotary_of: dict[ModuleType, Callable[..., Any]] = {}
"""Original rotary functions of transformers modules. Layers look the function up in the module, so replacing it
affects all models."""


def check_liger(device: torch.device) -> None:
    """Check that liger-kernel can run.

    Args:
        device: Device on which the model will run.

    Raises:
        ValueError: The package is missing, or Triton does not compile for the device.
    """
    if not _PACKAGE:
        raise ValueError(
            "model.liger=true needs liger-kernel 0.8 or later, which is not installed: "
            "pip install 'lightning-memo[liger]', or set it to false"
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            f"model.liger=true needs a GPU, and this model runs on {device}: set it to false (its kernels are Triton's)"
        )


def apply_liger(model: PreTrainedModel) -> None:
    """Replace the parts of a transformers model for which liger-kernel has kernels, except the loss.

    The loss is computed according to `loss_chunk_tokens`. Rotary positions are replaced for all models of this type in
    the process, until a model is built without liger-kernel.

    Raises:
        ValueError: liger-kernel has no kernels for this model type.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # the function that transformers calls
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"model.liger=true: liger-kernel has no kernels for models of type {kind}; set it to false, or use one of "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    changed = {name: value for name, value in before.items() if getattr(module, name) is not value}
    if _ROPE in changed:
        _rotary_of.setdefault(module, changed.pop(_ROPE))
    for name, value in changed.items():  # restore classes for models that are built later
        setattr(module, name, value)


def restore_rotary(model: nn.Module) -> None:
    """Restore transformers' rotary positions for models of this type, if `apply_liger` replaced them."""
    module = sys.modules[type(model).__module__]
    if module in _rotary_of:
        setattr(module, _ROPE, _rotary_of.pop(module))
