"""Runs modules inside of divided layers on the tokens of all processes; see Note: [Gathered tokens]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memo.engine.attention.mask_patterns import AllTokensNeeded, MaskPattern, refuse_explicit, whole_mask
from lightning_memo.engine.forward.cut_tokens import token_dim_of
from lightning_memo.engine.forward.intercept import computing_alone, running_layout
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.kernels import RngState
from lightning_memo.parallel.batches.gathered_tokens import GatheredTokens
from lightning_memo.parallel.context_parallel import ContextGroups
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.messages import tell

T = TypeVar("T")


class GatheredModules:
    """The modules that run on the tokens of all processes.

    Args:
        context: The processes that share the tokens of a sequence; `None` if none do.
    """

    def __init__(self, context: ContextGroups | None) -> None:
        self._context = context
        self._layers: set[nn.Module] = set()
        self._inner: dict[nn.Module, Callable[[], None]] = {}
        self._drawn: set[tuple[nn.Module, bool]] = set()
        self._told: set[str] = set()
        self._has_asked = False

    @property
    def may_need_padding(self) -> bool:
        """Whether a module may relate tokens to padding: one runs on the tokens of all processes, or none has run."""
        return not self._has_asked or bool(self._layers or self._inner)

    def why_not(self, call: LayerCall) -> str:
        """Return why no module of a layer can run on the tokens of all processes; empty if it can."""
        if self._context is None or call.layout is None:
            return "no processes share the tokens of a sequence"
        if call.shards > 1:
            return "sequence_parallel=True divides the tokens of each slice"
        return "" if call.token_dim == 1 else "the layer takes tokens before sequences"

    def use(self, layer: nn.Module, paths: Collection[str]) -> None:
        """Run modules of a layer on the tokens of all processes from now on.

        Args:
            layer: The layer.
            paths: Dotted names of the modules; empty for the layer itself.
        """
        self._has_asked = True
        for path in paths:
            module = layer.get_submodule(path)
            if module is layer:
                self._layers.add(layer)
            elif module not in self._inner:
                self._inner[module] = replace_forward(module, self._run)
            self._tell(layer, module)

    def _tell(self, layer: nn.Module, module: nn.Module) -> None:
        name = class_name(layer) if module is layer else f"{class_name(module)} of {class_name(layer)}"
        if name not in self._told:
            self._told.add(name)
            tell(
                f"{name} relates tokens in a way that is not divided: each process computes it for the "
                "tokens of all, which is slower and takes the memory of all of them while it runs; what is stored "
                "between layers stays divided."
            )

    def of(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward, which runs on the tokens of all processes if that is found to be needed."""
        return forward if self._context is None else functools.partial(self._run_layer, layer, forward)

    def close(self) -> None:
        """Restore the forward methods."""
        for undo in self._inner.values():
            undo()
        self._inner.clear()
        self._layers.clear()

    def _run_layer(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if layer not in self._layers:
            return forward(*args, **kwargs)
        return self._run(layer, forward, *args, **kwargs)

    def _run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module on the tokens of all processes, and return its output for those of this process.

        Raises:
            ValueError: It gets other tokens than this process's, or draws random numbers, which would differ.
        """
        layout = running_layout()
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if layout is None or any(isinstance(t, FakeTensor) for t in tensors):
            return forward(*args, **kwargs)
        if layout.placement is not None and layout.placement.lengths is not None:
            raise ValueError(
                f"{class_name(module)} runs on the tokens of all processes, which no layer before it did, and padding "
                "was left out of the batch: give rows of one length, or set context_parallel_size=1"
            )
        assert self._context is not None and self._context.everyone is not None
        rows = next((t.shape[0] for t in tensors if t.dim() > 1 and t.shape[1] == layout.local_tokens), None)
        if rows is None:
            raise ValueError(
                f"{class_name(module)} runs on the tokens of all processes, and got none of the {layout.local_tokens} "
                "tokens that this one holds: give all its inputs one entry for each token, or set "
                "context_parallel_size=1"
            )
        tokens = GatheredTokens(layout, self._context.everyone)
        whole = functools.partial(whole_of, tokens=tokens, rows=rows)
        arguments = tree_map(cached_by_identity(whole), (args, kwargs))
        with computing_alone():
            output = self._check_draws(module, lambda: forward(*arguments[0], **arguments[1]))
        return tree_map(functools.partial(own_of, tokens=tokens, rows=tokens.rows(rows), is_output=True), output)

    def _check_draws(self, module: nn.Module, run: Callable[[], T]) -> T:
        state = (module, module.training)
        if state in self._drawn:
            return run()
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        before = RngState.capture(device)
        output = run()
        if not RngState.capture(device).same(before):
            raise ValueError(
                f"{class_name(module)} runs on the tokens of all processes and draws random numbers, which differ "
                "between them: set its dropout to 0, or context_parallel_size=1"
            )
        self._drawn.add(state)
        return output


def cached_by_identity(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls another one once for each object: a module may get a tensor twice."""
    known: dict[int, Any] = {}

    def call(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = function(value)
        return known[id(value)]

    return call


def whole_of(value: Any, tokens: GatheredTokens, rows: int, is_output: bool = False) -> Any:
    """Return an argument or an output of a module for the tokens of all processes.

    Args:
        value: The argument for this process's tokens.
        tokens: Gathers tokens.
        rows: Number of sequences.
        is_output: Whether it is an output, whose first dimension may be that of the tokens of all rows.

    Raises:
        ValueError: It is not known where a tensor has the tokens.
    """
    if isinstance(value, MaskPattern):
        return value.plain()
    if not isinstance(value, Tensor):
        return value
    local = tokens.layout.local_tokens
    dim = token_dim_of(value, local, rows, 1)
    if dim == 0 and tokens.tokens in value.shape[1:]:  # position biases of all tokens: [rows * heads, 1, tokens]
        return value
    if dim is not None:
        return tokens.whole(value, dim)
    if is_output and value.dim() and value.shape[0] == rows * local:  # as the logits of routers
        return tokens.whole(value.unflatten(0, (rows, local)), 1).flatten(0, 1)
    if local in value.shape:
        raise AllTokensNeeded(
            f"a module that needs the tokens of all processes gets or returns a tensor {list(value.shape)}, and it is "
            f"not known where that has the {local} tokens of this process: set context_parallel_size=1"
        )
    return value


def own_of(value: Any, tokens: GatheredTokens, rows: int, is_output: bool = False) -> Any:
    """Return an argument or an output of a module for the tokens of this process; see :func:`whole_of`."""
    if isinstance(value, MaskPattern):
        return _divided_mask(value, tokens)
    if not isinstance(value, Tensor):
        return value
    dim = token_dim_of(value, tokens.tokens, rows, 1)
    if dim is None and is_output and value.dim() and value.shape[0] == rows * tokens.tokens:
        return tokens.own(value.unflatten(0, (rows, tokens.tokens)), 1).flatten(0, 1)
    if dim is None and value.dim() == 4 and value.shape[1:] == (1, tokens.tokens, tokens.tokens):
        return whole_mask(tokens.layout, value.detach())
    return value if dim is None else tokens.own(value, dim)


def _divided_mask(mask: MaskPattern, tokens: GatheredTokens) -> MaskPattern:
    """Return a mask of whole rows for a layer that runs on some of their tokens."""
    if mask.documents is not None or mask.lengths is not None:  # those of the batch, which the layout does not know
        return whole_mask(tokens.layout, mask.tensor())
    return replace(mask, explicit=refuse_explicit(tokens.layout), of_all_tokens=mask.explicit)
