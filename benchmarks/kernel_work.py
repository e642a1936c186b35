"""The work that benchmarks/kernel_times.py measures: attention by a kernel, and a layer, ready to run."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.engine.modules.fused_kernels import attach_fused
from lightning_memo.estimate.cluster import load_model, load_preset
from lightning_memo.kernels import AttentionBackend, AttentionSpec
from lightning_memo.kernels.fallback_kernels import Replay
from lightning_memo.kernels.select_kernel import candidate_kernels
from lightning_memo.models import ModelConfig, build_model
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks
from lightning_memo.utils.replaced_functions import replaced

_WORDS = 256  # vocabulary of the model; its embedding and head are not measured
Works = Iterator[tuple[str, str, Callable[[], "Work"]]]
"""What is measured ("attention" or "layer"), its name, and a function that prepares it."""


class Work(Protocol):
    """A forward and a backward pass that run alternately; `kept_bytes` is what the last forward pass saved."""

    kept_bytes: int

    def forward(self) -> None: ...

    def backward(self) -> None: ...


def attention_works(model: str, tokens: int, dtype: torch.dtype, device: torch.device) -> Works:
    """Returns causal attention by every available kernel, PyTorch's own first, and by a replay."""
    shape = load_model(model)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, tokens, n, shape.head_dim, generator=generator, dtype=dtype, device=device).transpose(1, 2)
        for n in heads
    )
    makers = {**candidate_kernels(q, k, v, AttentionSpec()), "replay": Replay}
    for name, make in makers.items():
        yield "attention", name, functools.partial(_Attention.of, make, q, k, v, dout)


class _Attention:
    def __init__(self, backend: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self._backend, self._inputs, self._dout = backend, (q, k, v), dout
        self._result: Any = None
        self.kept_bytes = 0

    @classmethod
    def of(cls, make: Callable[[], AttentionBackend], *tensors: Tensor) -> _Attention:
        return cls(make(), *tensors)

    def forward(self) -> None:
        self._result = self._backend.forward(*self._inputs, AttentionSpec())
        self.kept_bytes = sum(t.nbytes for t in (*self._inputs, self._result.out, self._result.lse))

    def backward(self) -> None:
        self._backend.backward(self._dout, *self._inputs, self._result, AttentionSpec())
        self._result = None


def layer_works(model: str, tokens: int, dtype: torch.dtype, device: torch.device) -> Works:
    """Returns a layer as it is in transformers, by `fused_kernels` and by liger-kernel's kernels."""
    for name, patch in (("transformers", None), ("fused_kernels", _fuse), ("liger-kernel", _apply_liger)):
        yield "layer", name, functools.partial(_Layer.of, model, tokens, dtype, device, patch)


_Patched = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which the layer of a patched model runs."""


def _fuse(model: nn.Module) -> _Patched:
    layer = find_stacks(model)[0].layers[0]
    attach_fused([layer], next(layer.parameters()).device)
    return contextlib.nullcontext


def _apply_liger(model: nn.Module) -> _Patched:
    """Patches a model as its users do. Nothing is left of it for other models."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # the function that transformers calls
    except ImportError as missing:
        raise ValueError("liger-kernel is not installed: pip install 'lightning-memo[liger]'") from missing
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    rotate = module.apply_rotary_pos_emb
    for name, value in before.items():
        setattr(module, name, value)
    return functools.partial(replaced, module, "apply_rotary_pos_emb", lambda _, *args: rotate(*args))


class _Layer:
    """Returns a layer, and the arguments of its call in the model."""

    def __init__(
        self, layer: nn.Module, patched: _Patched, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._layer, self._patched, self._x = layer, patched, x.requires_grad_()
        self._args, self._kwargs = args, kwargs
        self._dy = torch.randn_like(x)
        self._y: Tensor | None = None
        self._weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        self.kept_bytes = 0

    @classmethod
    def of(
        cls,
        model: str,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        patch: Callable[[nn.Module], _Patched] | None,
    ) -> _Layer:
        torch.manual_seed(0)
        config = {**load_preset("model", model)["config"], "num_hidden_layers": 2, "vocab_size": _WORDS}
        config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config["max_position_embeddings"] = max(config["max_position_embeddings"], tokens)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                network = build_model(ModelConfig(config=config))
                x = torch.randn(1, tokens, network.config.hidden_size)
        finally:
            torch.set_default_dtype(before)
        layer, patched = find_stacks(network)[0].layers[0], contextlib.nullcontext if patch is None else patch(network)
        return cls(layer, patched, x, *_arguments(network, layer, x))

    def forward(self) -> None:
        kept: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in self._weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with saved_tensors_hooks(note, lambda t: t), self._patched():
            y = self._layer(self._x, *self._args, **self._kwargs)
        self._y = y[0] if isinstance(y, tuple) else y
        self.kept_bytes = sum(kept.values())

    def backward(self) -> None:
        assert self._y is not None
        self._y.backward(self._dy)
        self._y = self._x.grad = None
        self._layer.zero_grad(set_to_none=True)


class _FoundError(Exception):
    """Raised when the layer is called."""


def _arguments(model: nn.Module, layer: nn.Module, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that a layer receives in addition to its input when the model runs."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))
        raise _FoundError

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    (host,) = find_hugging_face(model)
    with contextlib.suppress(_FoundError):
        host.get_decoder()(inputs_embeds=x)
    handle.remove()
    return found[0]
