"""Modules that treat each token by itself: an output head, a norm. They may be run on a few tokens at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.memory.lazy_tensor import LazyTensor, read_rows
from lightning_memo.engine.saved.wrapper_subclasses import plain_parts
from lightning_memo.parallel.local_tensors import ShardedHandle, local_part

Forward = Callable[[Tensor], Any]


class TokenLocal:
    """A module that treats each token by itself, to be run chunk by chunk.

    Its parameters are stood in for by detached aliases. The gradients of a chunk then end there, and hooks that a user
    registered on a parameter see its whole gradient, once.

    Args:
        module: The module, with the parameters that it has now (FSDP2 exchanges them).
        forward: Its own forward.
    """

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        self._call = _Call(module, forward)
        parameters = dict(self._call.named_parameters())
        self.trained = [p for p in parameters.values() if p.requires_grad]
        self._aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in parameters.items()}
        self._trained_aliases = [alias for alias in self._aliases.values() if alias.requires_grad]
        self._autocast = ambient_autocast(next(iter(parameters.values())).device.type)

    def __call__(self, x: Tensor) -> Any:
        """What the module makes of `x` `[1, tokens, hidden]`, under the autocast in which this object was made."""
        with self._autocast():
            return functional_call(self._call, self._aliases, (x,))

    def gradients(self, y: Tensor, x: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of `x` (if it needs one) and of `trained`, from that of `y`, computed from `x` in a graph."""
        inputs = [x, *self._trained_aliases] if x.requires_grad else self._trained_aliases
        found = list(torch.autograd.grad(y, inputs, gradient, allow_unused=True))
        return (found.pop(0) if x.requires_grad else None), found


class _Call(nn.Module):
    """Calls a module's own forward: without its hooks, which belong to the call that is being run in chunks."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(x)


class GradientSums:
    """Gradients of parameters added up over chunks, in fp32 if they come in half precision."""

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, ShardedHandle | None] | None] = []

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a chunk's gradients; of the same parameters every time."""
        self._sums = self._sums or [None] * len(gradients)
        for n, gradient in enumerate(gradients):
            if gradient is None:
                continue
            part, known = local_part(gradient), self._sums[n]
            if known is not None:
                known[0].add_(part)
                continue
            # A copy: what autograd gives may share memory with another gradient.
            total = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
            layout = ShardedHandle.of(gradient, None) if hasattr(gradient, "device_mesh") else None
            self._sums[n] = (total, layout)

    def take(self, dtypes: Sequence[torch.dtype], factor: Tensor | None = None) -> list[Tensor | None]:
        """The sums, times `factor`, in these types; they are not kept."""
        sums, self._sums = self._sums or [None] * len(dtypes), []
        return [_finished(known, dtype, factor) for known, dtype in zip(sums, dtypes, strict=True)]


def _finished(
    known: tuple[Tensor, ShardedHandle | None] | None, dtype: torch.dtype, factor: Tensor | None
) -> Tensor | None:
    if known is None:
        return None
    total, layout = known
    if factor is not None:
        # A new tensor, born in the backward like all gradients: as such it is planned to live until the next step's.
        total = total * factor if total.dtype == dtype else total.mul_(factor)
    total = total.to(dtype)
    return total if layout is None else layout.wrap(total)


def chunks(x: Tensor, tokens: int) -> Iterator[Tensor]:
    """All tokens of `x` `[..., hidden]` in order, `[1, at most tokens, hidden]`, without history."""
    if isinstance(x, LazyTensor):
        return (rows[None] for rows in read_rows(x, tokens))
    return iter(x.detach().reshape(1, -1, x.shape[-1]).split(tokens, 1))


def chunk_tokens_of(x: Tensor, wished: int) -> int:
    """Tokens of `x` that may be computed with at once, of `wished` ones."""
    return min(wished, x.at_once) if isinstance(x, LazyTensor) else wished


@contextlib.contextmanager
def noting_saved(addresses: set[int]) -> Iterator[None]:
    """Inside, the storages of all tensors that a graph keeps for its backward are added to `addresses`."""

    def note(t: Tensor) -> Tensor:
        addresses.update(part.untyped_storage().data_ptr() for part in plain_parts(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        yield
