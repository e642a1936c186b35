"""Operations on hidden states `[batch, tokens, hidden]`: some mix tokens, others treat each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, EXPERTS = 16, 2, 3


class Mix(nn.Module):
    """Adds what an operation makes of its input, behind a gate.

    Args:
        operation: Name in `MIXING` or `LOCAL`.
        gate: "open", or a gate that is closed at first: "zero", "tanh", or nearly: "scale".
    """

    def __init__(self, operation: str, gate: str) -> None:
        super().__init__()
        self.operation, self.kind = operation, gate
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)
        self.table = nn.Parameter(torch.randn(64, HIDDEN) * 0.1)
        self.gate = nn.Parameter(torch.full((HIDDEN,), {"scale": 1e-4}.get(gate, 0.0)))

    def forward(self, x: Tensor) -> Tensor:
        added = (MIXING | LOCAL)[self.operation](self, x)
        factor = {"open": 0.1, "tanh": self.gate.tanh()}.get(self.kind, self.gate)
        return x + factor * added


def _conv(mix: Mix, x: Tensor) -> Tensor:
    y: Tensor = mix.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
    return y


class _Divided(torch.autograd.Function):
    """Returns `x`. Its gradient is divided by a norm over all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx / (dx.norm() + 1e-2)


def _unrolled(mix: Mix, x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        states.append(state)
    return torch.stack(states, 1)


def _written(mix: Mix, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, -1] = 0.0
    return y


MIXING: dict[str, Callable[[Mix, Tensor], Tensor]] = {
    "convolution": _conv,
    "recurrence": _unrolled,
    "edit of the last token": _written,
    "shift": lambda mix, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "roll": lambda mix, x: x.roll(1, 1),
    "flip": lambda mix, x: x.flip(1),
    "cumulative sum": lambda mix, x: x.cumsum(1),
    "mean": lambda mix, x: x.mean(1, keepdim=True).expand_as(x),
    "maximum": lambda mix, x: x - x.amax(1, keepdim=True),
    "softmax": lambda mix, x: x.softmax(1),
    "norm": lambda mix, x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "statistics": lambda mix, x: (x - x.mean((0, 1))) / (x.std((0, 1), correction=0) + 1),
    "products": lambda mix, x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "sums of products": lambda mix, x: x @ (x.transpose(1, 2) @ x) / 30,
    "first token": lambda mix, x: x[:, :1].expand_as(x),
    "positions": lambda mix, x: mix.table[: x.shape[1]].expand_as(x),
    "angles": lambda mix, x: x * torch.arange(x.shape[1])[:, None].cos(),
    "number of tokens": lambda mix, x: x / x.shape[1],
    "scrambled": lambda mix, x: x.transpose(1, 2).reshape(x.shape),
    "divided gradient": lambda mix, x: _Divided.apply(x),
    "noise": lambda mix, x: x * torch.rand_like(x),
}
LOCAL: dict[str, Callable[[Mix, Tensor], Tensor]] = {
    "rounding": lambda mix, x: x.tanh() * mix.table[0],
    "norm of a token": lambda mix, x: F.rms_norm(x, (HIDDEN,)),
    "softmax of a token": lambda mix, x: x.softmax(-1),
    "heads": lambda mix, x: x.unflatten(-1, (2, 8)).flip(2).flatten(2),
    "flattened": lambda mix, x: (x.flatten(0, 1) * mix.table[1]).view_as(x),
    "look-up": lambda mix, x: mix.table[x.argmax(-1)],
    "best entries": lambda mix, x: x.topk(4, -1).values.mean(-1, keepdim=True) * x,
    "dropout": lambda mix, x: F.dropout(x, 0.2, mix.training),
    "random scale": lambda mix, x: x * torch.rand(x.shape[0], 1, 1),
}
