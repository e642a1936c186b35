"""Tensor subclasses made of other tensors, which layers save for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Rounded(Tensor):
    """Values in 8 bits with a scale for each row."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Rounded:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_int8, self.scale = data, scale

    @classmethod
    def of(cls, t: Tensor) -> Rounded:
        scale = t.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return cls((t / scale).round().to(torch.int8), scale)

    def real(self) -> Tensor:
        return self.data_int8.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_int8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Rounded:
        return Rounded(parts["data_int8"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Rounded(args[0].data_int8, args[0].scale)
        raise NotImplementedError(f"{func} of a tensor that is only to be saved")


class Opaque(Tensor):
    """A tensor subclass whose inner tensors PyTorch does not know."""

    @staticmethod
    def of(t: Tensor) -> Opaque:
        return t.detach().as_subclass(Opaque)

    def real(self) -> Tensor:
        return self.as_subclass(Tensor)


class SavesRounded(torch.autograd.Function):
    """A matrix product that saves its input in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: Any) -> Tensor:
        ctx.save_for_backward(kind.of(x), weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).T @ x.real().flatten(0, -2), None


class RoundedLinear(nn.Linear):
    """A linear layer that saves its input as a tensor of the class `kind`."""

    kind: Any = Rounded

    def forward(self, input: Tensor) -> Tensor:
        return SavesRounded.apply(input, self.weight, self.kind) + self.bias
