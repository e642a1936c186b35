"""What all modules have in common: their FP8 state, and how it is prepared for a forward."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch import cpu_offload  # noqa: F401  (as TransformerEngine's modules do)
from transformer_engine.pytorch.distributed import (
    _get_module_fsdp_state,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, _has_delayed_scaling_state
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.recipe_states import RecipeState


class WeightGradStore:
    """Whether weight gradients are computed later."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        self._delay_wgrad_compute = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self._delay_wgrad_compute


class TransformerEngineBaseModule(nn.Module):
    """Base of the modules."""

    def __init__(
        self, delay_wgrad_compute: bool = False, fuse_wgrad_accumulation: bool = False, tp_size: int = 1
    ) -> None:
        super().__init__()
        self.fp8_initialized = self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group, self.tp_size, self.sequence_parallel = None, tp_size, False
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()
        self._fp8_workspaces: dict[str, Any] = {}
        self.activation_dtype: torch.dtype | None = None
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    @property
    def is_fsdp2(self) -> bool:
        if not hasattr(self, "_is_fsdp2"):
            try:
                _get_module_fsdp_state(self)
                self._is_fsdp2 = True
            except RuntimeError:
                self._is_fsdp2 = False
        return self._is_fsdp2

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        key = "scaling_fwd" if fwd else "scaling_bwd"
        if self.fp8_meta_tensors_initialized and type(self.fp8_meta[key].recipe) is type(recipe):
            return
        number = self.fp8_meta["num_gemms"] * (3 if fwd else 2)
        state = RecipeState.create(recipe, mode="forward" if fwd else "backward", num_quantizers=number)
        self.fp8_meta[key] = state
        self.quantizers[key] = state.make_quantizers()

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        self.set_meta_tensor(True, recipe)
        self.set_meta_tensor(False, recipe)
        self.fast_setattr("fp8_meta_tensors_initialized", True)

    def get_extra_state(self) -> Tensor:
        state: dict[str, Any] = {}
        if self.fp8_meta["fp8_checkpoint"] and self.fp8_meta["recipe"].delayed():
            state["recipe"] = self.fp8_meta["recipe"]
            for key in ("scaling_fwd", "scaling_bwd"):
                state[key] = self.fp8_meta[key].scale.cpu().clone(), self.fp8_meta[key].amax_history.cpu().clone()
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        state = pickle.loads(state.numpy().tobytes())
        if not state:
            return
        self.fp8_meta.setdefault("num_gemms", state["scaling_fwd"][0].numel() // 3)
        self.init_fp8_meta_tensors(state["recipe"])
        for key in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta[key].scale.copy_(state[key][0])
            self.fp8_meta[key].amax_history.copy_(state[key][1])

    def set_activation_dtype(self, inp: Tensor) -> None:
        cast = torch.is_autocast_enabled(inp.device.type)
        self.fast_setattr("activation_dtype", torch.get_autocast_dtype(inp.device.type) if cast else inp.dtype)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        meta, fp8 = self.fp8_meta, FP8GlobalStateManager.is_fp8_enabled()
        self.fast_setattr("fp8_parameters", FP8GlobalStateManager.with_fp8_parameters())
        self.fast_setattr("fp8", fp8)
        self.fast_setattr("fp8_calibration", FP8GlobalStateManager.is_fp8_calibration())
        meta["fp8_checkpoint"] = fp8
        if not (fp8 or self.fp8_parameters):
            self.fast_setattr("fp8_initialized", False)
            return
        if self.fp8_initialized and FP8GlobalStateManager.get_fp8_recipe() == meta.get("recipe"):
            return
        meta["recipe"] = FP8GlobalStateManager.get_fp8_recipe()
        meta["num_gemms"] = num_gemms
        if self.fp8_parameters and not self.fp8_initialized:
            self.init_fp8_meta_tensors(meta["recipe"])
        if not fp8:
            return
        meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
        self.init_fp8_meta_tensors(meta["recipe"])
        self.fast_setattr("fp8_initialized", True)

    def prepare_forward(self, inp: Tensor, num_gemms: int = 1) -> Tensor:
        self.fast_setattr("forwarded_at_least_once", True)
        if self.fp8 and in_fp8_activation_recompute_phase():
            delayed_scaling_recipe = _has_delayed_scaling_state(self.fp8_meta)
            FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(self.fp8_meta)
        else:
            self.set_activation_dtype(inp)
            self.init_fp8_metadata(num_gemms=num_gemms)
            delayed_scaling_recipe = self.fp8 and _has_delayed_scaling_state(self.fp8_meta)
            if delayed_scaling_recipe:
                if not FP8GlobalStateManager.fp8_graph_capturing():
                    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
                if is_fp8_activation_recompute_enabled():
                    FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(self.fp8_meta)
        return inp.contiguous()

    def end_forward(self) -> None:
        if self.fp8 and _has_delayed_scaling_state(self.fp8_meta) and in_fp8_activation_recompute_phase():
            FP8GlobalStateManager.restore_fp8_meta_tensors(self.fp8_meta)


def grad_output_preprocess(fp8: bool, grad_output: Tensor, use_bias: bool, quantizer: Any) -> tuple[Any, Tensor | None]:
    """Return the gradient of the output as products read it, and that of the bias."""
    grad_output = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
    grad_bias = grad_output.sum(dim=0) if use_bias else None
    if not fp8:
        return grad_output, grad_bias
    quantizer.set_usage(rowwise=True, columnwise=True)
    return quantizer(grad_output), grad_bias


def quantize_weight(*, tensor: Tensor, quantizer: Any, workspaces: dict[str, Any], name: str | None) -> Any:
    """Quantize a weight, or return what is cached of it."""
    if name is None:
        return quantizer(tensor)
    if name not in workspaces:
        workspaces[name] = quantizer(tensor)
    return workspaces[name]


def weight_for_dgrad(saved: Any, weight: Tensor, quantizer: Any) -> Any:
    """Return a weight as the gradient of the input needs it: what was saved of it, or the gathered one, quantized now.

    With delayed scaling, the scale is no longer that of the forward, and the maximum goes into the next history.
    """
    if saved is None and quantizer is not None:
        quantizer.set_usage(rowwise=True, columnwise=True)
        saved = quantizer(weight)
    if isinstance(saved, QuantizedTensorStorage):
        saved.update_usage(columnwise_usage=True)
    return saved


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """Refuse sizes that products in FP8 do not take."""
    for t in tensors:
        rows = t.shape[:-1].numel()
        assert rows % 8 == 0 and t.shape[-1] % 16 == 0, (
            "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last "
            f"dimension to be divisible by 16, but got tensor with dims={list(t.shape)}"
        )


def general_gemm(
    A: Any, B: Any, out_dtype: torch.dtype | None, layout: str = "TN", bias: Tensor | None = None
) -> Tensor:
    """Return a product: "TN" is `B A^T` (the output), "NN" is `B A` (a gradient), "NT" is `B^T A` (a weight's)."""
    if isinstance(A, QuantizedTensorStorage):
        a, b = A.rowwise() if layout == "TN" else A.columnwise(), B.columnwise() if layout == "NT" else B.rowwise()
    else:
        a, b = A, B
    product = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()
    return (product if bias is None else product + bias).to(out_dtype)


def cast_if_needed(t: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a tensor of a dtype."""
    return t if t is None else t.to(dtype)
