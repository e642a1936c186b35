"""Modules that treat each token by itself, for example an output head or a norm. They can run on a few tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.memory.lazy_tensor import LazyTensor, read_rows
from lightning_memo.engine.memory.noted_tensors import NotedTensor
from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts
from lightning_memo.engine.state.forward_state import ForwardState
from lightning_memo.parallel.local_tensors import ShardedHandle, local_part
from lightning_memo.utils.class_names import class_name

Forward = Callable[[Tensor], Any]


class TokenLocal:
    """Runs a module that treats each token by itself, chunk by chunk.

    Detached aliases replace its parameters. The gradients of a chunk end at the aliases, and hooks that a user has
    registered on a parameter are called once, with the whole gradient. Every chunk, also one that a backward computes
    again, sees the attributes that the module has now.

    Args:
        module: The module, with its present parameters (FSDP2 exchanges them).
        forward: The module's own forward.
        state: What the module reads; `None` for its present state.
    """

    def __init__(self, module: nn.Module, forward: Forward, state: ForwardState | None = None) -> None:
        self._state = state or ForwardState(module, (), most_copied=0)  # as aliases replace the parameters
        self._call, self._name = _Call(module, forward), class_name(module)
        parameters = dict(self._call.named_parameters())
        self.trained = [p for p in parameters.values() if p.requires_grad]
        self._aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in parameters.items()}
        self._read = [(p, self._aliases[name], NotedTensor.of(local_part(p))) for name, p in parameters.items()]
        self._trained_aliases = [alias for alias in self._aliases.values() if alias.requires_grad]
        self._autocast = ambient_autocast(next(iter(parameters.values())).device.type)

    def __call__(self, x: Tensor) -> Any:
        """Return the module's output for `x` `[1, tokens, hidden]`, under the autocast of `__init__`."""
        with self._state.replayed(), self._autocast():
            return functional_call(self._call, self._aliases, (x,))

    def check_unchanged(self) -> None:
        """Check that the weights are still those that a forward has read.

        Raises:
            RuntimeError: A weight was changed since.
        """
        for p, alias, noted in self._read:
            if noted.changed or address_of(local_part(p)) != address_of(local_part(alias)):
                raise RuntimeError(
                    f"a weight of {self._name}, of shape {list(p.shape)}, was changed between a forward and its "
                    "backward, which needs its value: change it after the backward"
                )

    def gradients(self, y: Tensor, x: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of `x` (`None` if it needs none) and of `trained`.

        Args:
            y: The module's output, computed from `x` in a graph.
            x: The module's input.
            gradient: The gradient of `y`.
        """
        inputs = [x, *self._trained_aliases] if x.requires_grad else self._trained_aliases
        found = list(torch.autograd.grad(y, inputs, gradient, allow_unused=True))
        return (found.pop(0) if x.requires_grad else None), found


class _Call(nn.Module):
    """Calls a module's own forward without its hooks, which belong to the call that runs in chunks."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(x)


class GradientSums:
    """Sums the gradients of parameters over chunks, in fp32 if they are in half precision."""

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, ShardedHandle | None] | None] = []

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a chunk's gradients, of the same parameters in every call."""
        self._sums = self._sums or [None] * len(gradients)
        for n, gradient in enumerate(gradients):
            if gradient is None:
                continue
            part, known = local_part(gradient), self._sums[n]
            if known is not None:
                known[0].add_(part)
                continue
            # A copy, because autograd's tensor may share memory with another gradient.
            total = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
            layout = ShardedHandle.of(gradient, None) if hasattr(gradient, "device_mesh") else None
            self._sums[n] = (total, layout)

    def copy(self) -> GradientSums:
        """Return the same sums in memory of their own."""
        copied = GradientSums()
        copied._sums = [None if known is None else (known[0].clone(), known[1]) for known in self._sums]
        return copied

    def take(self, dtypes: Sequence[torch.dtype], factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the sums in these dtypes, multiplied by `factor`, and hold them no longer."""
        sums, self._sums = self._sums or [None] * len(dtypes), []
        return [_finished(known, dtype, factor) for known, dtype in zip(sums, dtypes, strict=True)]


def _finished(
    known: tuple[Tensor, ShardedHandle | None] | None, dtype: torch.dtype, factor: Tensor | None
) -> Tensor | None:
    if known is None:
        return None
    total, layout = known
    if factor is not None:
        # A new tensor, allocated in the backward like all gradients: memory plans let it live until the next step's.
        total = total * factor if total.dtype == dtype else total.mul_(factor)
    total = total.to(dtype)
    return total if layout is None else layout.wrap(total)


def chunks(x: Tensor, tokens: int) -> Iterator[Tensor]:
    """Return the tokens of `x` `[..., hidden]` in chunks `[1, at most tokens, hidden]`, without history."""
    if isinstance(x, LazyTensor):
        return (rows[None] for rows in read_rows(x, tokens))
    return iter(x.detach().reshape(1, -1, x.shape[-1]).split(tokens, 1))


def chunk_tokens_of(x: Tensor, requested: int) -> int:
    """Return how many tokens of `x` are computed at once, at most `requested`."""
    return min(requested, x.at_once) if isinstance(x, LazyTensor) else requested


@contextlib.contextmanager
def noting_saved(addresses: set[int]) -> Iterator[None]:
    """Add the storages of all tensors that a graph saves inside the context to `addresses`."""

    def note(t: Tensor) -> Tensor:
        addresses.update(part.untyped_storage().data_ptr() for part in plain_parts(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        yield
