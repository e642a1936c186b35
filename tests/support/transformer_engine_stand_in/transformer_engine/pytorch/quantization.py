"""The state of the process, the autocast, and the scales of modules."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.quantized_tensor import written


@dataclass(slots=True)
class FP8GlobalState:
    """The state of the process."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_distributed_group: Any = None
    fp8_parameters: bool = False
    high_precision_init_val: bool = False
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[Any] = field(default_factory=list)
    autocast_arguments: dict[Any, tuple[Recipe, Any]] = field(default_factory=dict)
    skip_fp8_weight_update_tensor: Tensor | None = None


class FP8GlobalStateManager:
    """Reads and changes the state of the process."""

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        cls.quantization_state = FP8GlobalState()

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        return "buffer_index_and_autocast_key"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        forward, autocast_key = key.split("_", 1)
        return forward == "forward", autocast_key

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        if not _has_delayed_scaling_state(fp8_meta):
            return
        info, state = cls.get_buffer_info(), cls.quantization_state
        if info in fp8_meta:
            return
        fp8_meta[info] = []
        for forward in (True, False):
            scaling = fp8_meta.get(cls.get_meta_tensor_key(forward=forward))
            if scaling is None:
                continue
            key = cls.get_key_in_buffer(forward, fp8_meta["recipe"], fp8_meta["fp8_group"])
            state.global_amax_buffer.setdefault(key, []).append(scaling.amax_history[0])
            state.global_amax_history_buffer.setdefault(key, []).append(scaling.amax_history)
            state.global_scale_buffer.setdefault(key, []).append(scaling.scale)
            fp8_meta[info] += [len(state.global_amax_buffer[key]) - 1, key]

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.quantization_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return cls.quantization_state.fp8_parameters

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return cls.quantization_state.fp8_graph_capturing

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        recipe = cls.quantization_state.fp8_recipe
        return DelayedScaling() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        state = cls.quantization_state
        return (
            state.fp8_enabled, state.fp8_calibration, state.fp8_recipe, state.fp8_distributed_group,
            state.is_first_fp8_module, state.fp8_graph_capturing,
        )  # fmt: skip

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        present = cls.quantization_state
        (
            present.fp8_enabled, present.fp8_calibration, present.fp8_recipe, present.fp8_distributed_group,
            present.is_first_fp8_module, present.fp8_graph_capturing,
        ) = state  # fmt: skip

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: Tensor, group: Any) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group, async_op=False)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        state = cls.quantization_state
        for key, amaxes in state.global_amax_buffer.items():
            is_forward, autocast_key = cls.split_key_in_buffer(key)
            if is_forward != forward or not amaxes:
                continue
            recipe, group = state.autocast_arguments[autocast_key]
            contiguous = torch.cat(amaxes)
            many = torch.distributed.is_initialized() and torch.distributed.get_world_size(group=group) > 1
            if recipe.reduce_amax and many:
                cls.reduce_tensor_across_group_op_max(contiguous, group)
            histories, scales = state.global_amax_history_buffer[key], state.global_scale_buffer[key]
            if callable(recipe.amax_compute_algo):
                _unfused_update(contiguous, amaxes, histories, scales, recipe, forward)
            else:
                _fused_update(contiguous, histories, scales, recipe, forward)

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: Any = None) -> str:
        return f"recipe={recipe},group={None if group is None else id(group)}"

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        recipe, state = DelayedScaling() if fp8_recipe is None else fp8_recipe, cls.quantization_state
        key = cls.get_unique_autocast_key(recipe, fp8_group)
        state.autocast_arguments[key] = (recipe, fp8_group)
        state.fp8_enabled, state.fp8_calibration, state.fp8_recipe = enabled, calibrating, recipe
        state.fp8_distributed_group, state.fp8_graph_capturing = fp8_group, _graph
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        state = cls.quantization_state
        state.autocast_depth -= 1
        if enabled and state.autocast_depth == 0 and not _graph and torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        if not _has_delayed_scaling_state(fp8_meta):
            return
        scaling, key = fp8_meta["scaling_fwd"], "global_fp8_buffer_pos_fwd_recompute"
        to_copy = [scaling.amax_history.clone(), scaling.scale.clone()]
        copies = cls.quantization_state.fp8_tensors_recompute_buffer
        if key not in fp8_meta:
            copies.append(deque())
            fp8_meta[key] = len(copies) - 1
        copies[fp8_meta[key]].append(to_copy)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        if not _has_delayed_scaling_state(fp8_meta):
            return
        scaling = fp8_meta["scaling_fwd"]
        fp8_meta["updated_amax_history_fwd"] = scaling.amax_history.clone()
        fp8_meta["updated_scale_fwd"] = scaling.scale.clone()
        position = fp8_meta["global_fp8_buffer_pos_fwd_recompute"]
        history, scale = cls.quantization_state.fp8_tensors_recompute_buffer[position].popleft()
        scaling.amax_history.copy_(history)
        scaling.scale.copy_(scale)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        if not _has_delayed_scaling_state(fp8_meta):
            return
        fp8_meta["scaling_fwd"].amax_history.copy_(fp8_meta["updated_amax_history_fwd"])
        fp8_meta["scaling_fwd"].scale.copy_(fp8_meta["updated_scale_fwd"])


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """Return an autocast. It is the older name, which Lightning calls."""
    warnings.warn("fp8_autocast is deprecated and will be removed", category=DeprecationWarning, stacklevel=2)
    return autocast(
        enabled=enabled, calibrating=calibrating, recipe=fp8_recipe, amax_reduction_group=fp8_group, _graph=_graph
    )


class autocast(contextlib.AbstractContextManager[Any]):
    """Modules compute in FP8 inside."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._enabled, self._calibrating, self._recipe = enabled, calibrating, recipe
        self._amax_reduction_group, self._graph = amax_reduction_group, _graph
        self._fp8_state: tuple[Any, ...] | None = None

    def __enter__(self) -> autocast:
        self._fp8_state = FP8GlobalStateManager.get_autocast_state()
        FP8GlobalStateManager.autocast_enter(
            enabled=self._enabled,
            calibrating=self._calibrating,
            fp8_recipe=self._recipe,
            fp8_group=self._amax_reduction_group,
            _graph=self._graph,
        )
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        assert self._fp8_state is not None
        FP8GlobalStateManager.set_autocast_state(self._fp8_state)
        FP8GlobalStateManager.autocast_exit(self._enabled, _graph=self._graph)
        self._fp8_state = None


def _fused_update(
    amaxes: Tensor, histories: list[Tensor], scales: list[Tensor], recipe: DelayedScaling, forward: bool
) -> None:
    """Compute what the kernel of `common/recipe/delayed_scaling.cu` computes: a history without a new maximum stays."""
    largest = _fp8_max(recipe, forward) * 2.0**-recipe.margin
    for history, scale, reduced in zip(histories, scales, amaxes.split([s.numel() for s in scales]), strict=True):
        last = torch.where(reduced != 0, reduced, history[0])
        rolled = torch.cat([history[1:], last[None]])
        most = rolled.amax(0) if recipe.amax_compute_algo == "max" else last
        amax = torch.where(last != 0, most, torch.zeros_like(last))
        rolled[0] = 0
        written(history, torch.where(last != 0, rolled, history))
        written(scale, _finite(torch.where(amax.isfinite() & (amax > 0), largest / amax, scale)))


def _unfused_update(
    amaxes: Tensor, newest: list[Tensor], histories: list[Tensor], scales: list[Tensor], recipe: Any, forward: bool
) -> None:
    torch._foreach_copy_(newest, amaxes.split([t.numel() for t in newest]))
    for history, scale in zip(histories, scales, strict=True):
        amax = recipe.amax_compute_algo(history)
        history.copy_(torch.roll(history, -1, 0))
        history[0].fill_(0.0)
        new = (_fp8_max(recipe, forward) / amax) / 2**recipe.margin
        scale.copy_(_finite(torch.where((amax > 0) & amax.isfinite(), new, scale)))


def _finite(scale: Tensor) -> Tensor:
    return torch.where(scale.isinf(), torch.full_like(scale, torch.finfo(torch.float32).max), scale)


def _fp8_max(recipe: Any, forward: bool) -> float:
    return recipe.fp8_format.value.max_fwd if forward else recipe.fp8_format.value.max_bwd


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """Return the dtype of forward or backward."""
    return torch.float8_e4m3fn if _fp8_max(fp8_recipe, fprop_tensor) == 448 else torch.float8_e5m2


def _has_delayed_scaling_state(fp8_meta: dict[str, Any]) -> bool:
    return fp8_meta["recipe"].delayed()


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether the device computes in FP8. Here, any device does, by all recipes."""
    return (True, "") if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_fp8_available
