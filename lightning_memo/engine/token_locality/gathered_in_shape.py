"""Stands in for modules that run on the tokens of all processes, while their layer runs on fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memo.engine.attention.mask_patterns import MaskPattern
from lightning_memo.engine.forward.cut_tokens import token_dim_of
from lightning_memo.engine.forward.intercept import computing_alone
from lightning_memo.engine.token_locality.fake_run import TrialMode
from lightning_memo.engine.token_locality.operator_rules import TOKENS, TokensMixed, holds_tokens
from lightning_memo.engine.token_locality.token_tracker import OperationLog, TokenTracker, Whereabouts


@dataclass(frozen=True, slots=True)
class GatheredInShape:
    """Runs modules on as many tokens as all processes have, and cuts their outputs to those of the layer's input.

    Attributes:
        paths: Dotted names of the modules.
        tokens: Number of tokens of the layer's input.
        all_tokens: Number of tokens of all processes.
        rows: Number of sequences.
        mode: Makes fake tensors.
        log: Notes operations.
        whereabouts: Knows which module runs.
    """

    paths: frozenset[str]
    tokens: int
    all_tokens: int
    rows: int
    mode: TrialMode
    log: OperationLog
    whereabouts: Whereabouts

    def forward_of(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """Return the forward of a module inside the layer."""
        if path not in self.paths:
            return self.whereabouts.noting(path, module.forward)
        return functools.partial(self._run, path, module.forward)

    def _run(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        failed = self.whereabouts.failed
        try:
            arguments = tree_map(self._grown, (args, kwargs))
            with self.log.unfollowed(), computing_alone(), torch.no_grad():
                output = forward(*arguments[0], **arguments[1])
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            result = tree_map(functools.partial(self._cut, inputs), output)
        except Exception:
            self.whereabouts.failed = failed  # not in a module inside of this one, but in the one around it
            self.whereabouts.note_failure()
            raise
        step = "gathered", (path,)
        self.log.operations.append(step)
        if isinstance(self.log, TokenTracker):
            self.log.steps.append(step)
        return result

    def _grown(self, value: Any) -> Any:
        if isinstance(value, MaskPattern):
            return value.plain()
        if type(value) is int and value == self.tokens:
            raise TokensMixed("a module that needs the tokens of all processes gets the number of this process's")
        if not isinstance(value, Tensor):
            return value
        dim = token_dim_of(value, self.tokens, self.rows, 1)
        if isinstance(self.log, TokenTracker):
            dims = list(self.log.dims(value))
            if holds_tokens(dims) and (dim is None or dims.pop(dim) != (TOKENS,) or holds_tokens(dims)):
                raise TokensMixed("a module that needs the tokens of all processes gets them in several dimensions")
        if dim is None:
            return value
        return self.mode.input([*value.shape[:dim], self.all_tokens, *value.shape[dim + 1 :]], value)

    def _cut(self, inputs: Sequence[Tensor], value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape, dim = list(value.shape), token_dim_of(value, self.all_tokens, self.rows, 1)
        if dim is not None:
            shape[dim] = self.tokens
        elif shape and shape[0] == self.rows * self.all_tokens:
            dim, shape[0] = 0, self.rows * self.tokens
        with self.log.unfollowed():
            trained = inputs if value.is_floating_point() else ()
            made: Tensor = _InShape.apply(shape, value, *trained)
        if isinstance(self.log, TokenTracker):
            dims = [self.log.sizes.without_tokens(size) for size in shape]
            if dim is not None:
                dims[dim] = self.log.sizes.of_size(shape[dim])
            self.log.mark(made, tuple(dims))
        return made


class _InShape(torch.autograd.Function):
    """Has the shape of an output of a module, and depends on its inputs."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], like: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return like.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *(torch.empty_like(t) for t in ctx.saved_tensors)
