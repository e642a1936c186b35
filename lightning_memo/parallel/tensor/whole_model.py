"""What a whole model returns under tensor parallelism: a plain loss, and hidden states of all tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from lightning_memo.parallel.tensor.module_styles import Forward, TensorStyle, move


class WholeModel(TensorStyle):
    """A whole Hugging Face model. Users compute with its outputs, and the same on every rank.

    Its loss becomes a plain tensor: that of transformers' loss function at once, because models add losses of their
    routers to it, which are plain. Hidden states between blocks are gathered if each rank has some of the tokens.

    Args:
        stream: Layout of the stream.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        as_tuple = kwargs.get("return_dict") is False
        with self._plain_loss_function(module):
            result = original(*args, **(kwargs | {"return_dict": True} if as_tuple else kwargs))
        if isinstance(getattr(result, "loss", None), Tensor):
            result.loss = _plain(result.loss)
        states = getattr(result, "hidden_states", None)
        if self.stream.is_shard() and isinstance(states, tuple):
            result.hidden_states = tuple(move(t, self.mesh, self.stream, Replicate()) for t in states)
        return result.to_tuple() if as_tuple else result

    @contextmanager
    def _plain_loss_function(self, module: nn.Module) -> Iterator[None]:
        inner, own = getattr(module, "loss_function", None), vars(module).get("_loss_function")
        if inner is None:
            yield
            return

        def loss_function(*args: Any, **kwargs: Any) -> Any:
            loss = inner(*args, **kwargs)
            return _plain(loss) if isinstance(loss, Tensor) else loss

        vars(module)["_loss_function"] = functools.wraps(inner)(loss_function)
        try:
            yield
        finally:
            del vars(module)["_loss_function"]
            if own is not None:
                vars(module)["_loss_function"] = own


def _plain(loss: Tensor) -> Tensor:
    result: Tensor = _PlainGradient.apply(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    return result


class _PlainGradient(torch.autograd.Function):
    """A copy whose gradient is a plain tensor, also if a user adds it to a function of weights or logits."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()  # no view, which `+=` needs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
