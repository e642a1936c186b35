"""Intercepts what runs inside a layer: attention calls, and dropout, whose masks must not depend on the slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from typing_extensions import Self

from lightning_memo.engine.forward.autocast import autocast_inputs
from lightning_memo.engine.forward.cut_tokens import take_tokens
from lightning_memo.engine.forward.refuse_checkpointing import refuse_without_grad, refusing_checkpoint
from lightning_memo.engine.memory.saved_storages import gapless_strides
from lightning_memo.kernels import AttentionSpec
from lightning_memo.parallel.batches.token_layout import TokenLayout, with_whole_rows
from lightning_memo.utils.replaced_functions import function_of, replaced

# q, k, v [batch, heads, tokens, head_dim] and the spec -> output of the same shape
AttentionHandler = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]

_handler: ContextVar[AttentionHandler | None] = ContextVar("attention_handler", default=None)
# Told why the layer computes an attention call itself.
_on_leaving: ContextVar[Callable[[str], None] | None] = ContextVar("on_leaving", default=None)
_layout: ContextVar[TokenLayout | None] = ContextVar("token_layout", default=None)
_sdpa: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
DROPOUTS = (F.dropout, torch.dropout)


def current_handler() -> AttentionHandler | None:
    """Return the handler of attention calls: the running slice's, or `None` outside of the engine's layers."""
    return _handler.get()


def running_layout() -> TokenLayout | None:
    """Return where the tokens of the running layer are; `None` if this process holds all of them, or outside."""
    return _layout.get()


@contextmanager
def computing_alone() -> Iterator[None]:
    """Inside, attention calls and recurrences are the model's own: this process has all tokens."""
    tokens = [(variable, variable.set(None)) for variable in (_handler, _on_leaving, _layout)]
    try:
        with with_whole_rows():
            yield
    finally:
        for variable, token in tokens:
            variable.reset(token)  # type: ignore[arg-type]


def leave_to_model(why: str) -> None:
    """Let the layer compute an attention call by ordinary operations, which save what they need for the backward.

    Args:
        why: What the handler does not compute.

    Raises:
        ValueError: Slices or other processes hold some of the tokens.
    """
    on_leaving = _on_leaving.get()
    if on_leaving is not None:
        on_leaving(why)


def _leave(layout: TokenLayout | None, on_leaving: Callable[[str], None] | None, why: str) -> None:
    if layout is not None:
        raise ValueError(
            f"{why}, so that the model needs all tokens at once: train it with {layout.how_to_compute_all}"
        )
    if on_leaving is not None:
        on_leaving(why)


def _answer_sdpa(handler: AttentionHandler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs
    mask = given.get("attn_mask")
    if mask is not None and mask.requires_grad:
        leave_to_model("attention gets a mask that requires grad, such as a learned bias, which no kernel computes")
        return _sdpa(*args, **kwargs)
    if is_functorch_wrapped_tensor(given["query"]):
        leave_to_model("attention is called within torch.vmap or a transform of torch.func, which no kernel supports")
        return _sdpa(*args, **kwargs)
    spec = AttentionSpec(
        causal=given.get("is_causal", False),
        scale=given.get("scale"),
        dropout=given.get("dropout_p", 0.0),
        mask=mask,
    )
    return handler(given["query"], given["key"], given["value"], spec)


def _dispatch_sdpa(own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    handler = _handler.get()
    if handler is not None and own is not _sdpa:
        leave_to_model("torch.nn.functional.scaled_dot_product_attention is a function of the user's")
    return own(*args, **kwargs) if handler is None or own is not _sdpa else _answer_sdpa(handler, args, kwargs)


def is_sdpa_pytorchs() -> bool:
    """Return whether `torch.nn.functional.scaled_dot_product_attention` is PyTorch's, whose formula is known."""
    return function_of(F, "scaled_dot_product_attention") is _sdpa


def _answer(
    handler: AttentionHandler,
    layout: TokenLayout | None,
    trained: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Call a handler, whose own calls are not intercepted again."""
    if trained:
        refuse_without_grad("attention")
    if layout is not None:  # the model knows documents and padding only for its own part of the tokens
        shared = None if layout.placement is None else layout.placement.shared_tokens
        lengths = layout.lengths if layout.uses_padding or not spec.causal else None
        spec = replace(spec, documents=layout.documents, lengths=lengths, shared_tokens=shared)
    token, modes = _handler.set(None), _leave_own_modes()
    try:
        return handler(*autocast_inputs(q, k, v), spec)
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
        _handler.reset(token)


def _leave_own_modes() -> list[TorchFunctionMode]:
    """Leave the innermost modes of this package, which would pass on every call inside a handler; returns them."""
    modes = []
    while isinstance(_get_current_function_mode(), OwnMode):
        modes.append(_pop_mode())
    return modes


@contextmanager
def handling(
    handler: AttentionHandler,
    layer: nn.Module,
    layout: TokenLayout | None = None,
    on_leaving: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Inside, attention calls of this thread go to `handler`, and activation checkpointing of a trained layer raises.

    Args:
        handler: Answers the calls.
        layer: The layer that runs inside.
        layout: Where the tokens of the batch are; `None` if this process holds all of them in order.
        on_leaving: Told why, if the layer computes an attention call itself.

    Raises:
        ValueError: A layer that is trained uses activation checkpointing.

    Note: [How attention is intercepted]
    Hugging Face layers call the attention function that the model names, which asks `current_handler`. Other layers
    call `scaled_dot_product_attention` as an attribute of `torch.nn.functional`, which is replaced here, or by a name
    they imported, which only a `TorchFunctionMode` sees. That mode is off inside composite functions such as
    `multi_head_attention_forward`.
    """
    trained = torch.is_grad_enabled()
    token = _handler.set(functools.partial(_answer, handler, layout, trained))
    leaving = _on_leaving.set(functools.partial(_leave, layout, on_leaving))
    where = _layout.set(layout)
    intercepted = replaced(F, "scaled_dot_product_attention", _dispatch_sdpa)
    try:
        with intercepted, unchanged_by_registration(), refusing_checkpoint(layer) if trained else nullcontext():
            yield
    finally:
        _layout.reset(where)
        _on_leaving.reset(leaving)
        _handler.reset(token)


class OwnMode(TorchFunctionMode):
    """A function mode that can tell its own calls from those inside an attention call or a nested slice."""

    def __init__(self) -> None:
        super().__init__()
        self._own: object = None

    def __enter__(self) -> Self:
        self._own = _handler.get()
        super().__enter__()
        return self

    @property
    def inside(self) -> bool:
        """Whether another handler is active than when the mode was entered."""
        return _handler.get() is not self._own


class _BooleanDropout(torch.autograd.Function):
    """Dropout with a given mask, as PyTorch computes it on CUDA.

    The mask is saved as booleans, and the scale is not rounded to the precision of the input.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(input, mask, scale)  # input * mask * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, mask, ctx.scale), None, None


class LayerMode(OwnMode):
    """Intercepts imported attention functions, and makes dropout use the mask that the whole sequence would have drawn.

    Note: [Dropout and slices]
    A slice draws random numbers for all tokens and uses its own part, and every slice starts from the layer's random
    state. Masks therefore do not depend on the number of slices, and gradients equal those of plain training at every
    alpha.

    Args:
        tokens: Number of tokens in the layer's input.
        start: First token of the slice.
        stop: End of the slice.
        batch: Number of sequences in the layer's input.
        token_dim: Dimension of tokens in the layer's input.
        shards: Number of sequence-parallel shards.
    """

    def __init__(self, tokens: int, start: int, stop: int, batch: int, token_dim: int, shards: int = 1) -> None:
        super().__init__()
        self._tokens, self._start, self._stop, self._shards = tokens, start, stop, shards
        self._batch, self._token_dim = batch, token_dim
        self._trained = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _handler.get()
        if handler is None or self.inside:
            return func(*args, **kwargs)
        if func is _sdpa:
            return _answer_sdpa(handler, args, kwargs)
        if func in DROPOUTS and self._stop - self._start < self._tokens:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **names: Any
    ) -> Tensor:
        training = names.get("train", training)
        if not training or p == 0.0:
            return input
        if self._trained:
            refuse_without_grad("dropout")
        if input.is_cuda and not inplace and p < 1:
            mask = self._part_of_whole(input, lambda whole: torch.native_dropout(whole, p, True)[1])
            return _BooleanDropout.apply(input, mask, 1 / (1 - p))
        mask = self._part_of_whole(input, lambda whole: F.dropout(whole, p))
        return input.mul_(mask) if inplace else input * mask

    def _part_of_whole(self, input: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this slice's part of the mask that `draw` makes from a tensor of ones for all tokens."""
        count = self._stop - self._start
        shape, dim = list(input.shape), self._token_dim
        if input.dim() >= 2 and shape[dim] in (count, count * self._shards) and shape[1 - dim] == self._batch:
            shape[dim] = self._tokens * shape[dim] // count
            whole = input.new_empty_strided(shape, gapless_strides(shape, input)).fill_(1)
            return take_tokens(draw(whole), dim, self._tokens, self._start, self._stop)
        if shape[0] == count * self._batch and dim == 1:
            whole = draw(input.new_ones(self._batch * self._tokens, *shape[1:]))
            part = whole.unflatten(0, (self._batch, self._tokens)).narrow(1, self._start, count)
            return part.flatten(0, 1)
        raise ValueError(
            f"dropout on a tensor of shape {tuple(input.shape)} cannot be cut by token "
            f"(slice of {count} tokens, batch {self._batch})"
        )


def unchanged_by_registration() -> AbstractContextManager[None]:
    """Inside, registering a parametrization does not set a weight to itself, which counts as a change in place."""
    return replaced(parametrize, "_maybe_set", _set_other)


def _set_other(set_to: Callable[..., None], dest: Any, source: Any) -> None:
    if dest is not source:
        set_to(dest, source)
