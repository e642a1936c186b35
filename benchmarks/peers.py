"""Training methods of other projects for long sequences. Each is put around a Hugging Face model and removed again.

Packages of other projects are optional; if one is missing, `Unavailable` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from circumstances import simulated_machine
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy, create_selective_checkpoint_contexts

from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks

_IGNORED = -100  # label without a loss, as in transformers
_LOGITS_BYTES = 2**30  # fp32 logits of a tile of ALST's loss, as in ArcticTraining
_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


class Unavailable(RuntimeError):
    """A method cannot be used here; the message is one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What a step needs while a method is active.

    Attributes:
        step: A context for a step, from its forward to its backward pass; `None` if none is needed.
        loss: Computes the loss of a batch together with the gradients of the head; `None` if the model does.
        packages: The packages that implement the method, with versions.
    """

    step: AbstractContextManager[Any] | None = None
    loss: Callable[[dict[str, Tensor]], Tensor] | None = None
    packages: tuple[str, ...] = ()


Attach = Callable[[nn.Module, ExitStack], Peer]
"""Puts a method around a model; the stack removes it again."""


@contextmanager
def checkpointing(model: nn.Module, reentrant: bool = False, **settings: Any) -> Iterator[None]:
    """Hugging Face's gradient checkpointing: each layer saves its input and runs again in the backward pass.

    Args:
        model: The model.
        reentrant: Whether PyTorch's reentrant variant is used.
        settings: Further arguments of `torch.utils.checkpoint.checkpoint`.
    """
    # The second names are from older releases of transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant, **settings})
    if reentrant:  # the first layer needs an input with a gradient, although its embedding is frozen
        model.enable_input_require_grads()
    try:
        yield
    finally:
        (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
        model.disable_input_require_grads()


def attach_plain(model: nn.Module, stack: ExitStack) -> Peer:
    """Does nothing."""
    return Peer()


def attach_checkpointing(model: nn.Module, stack: ExitStack) -> Peer:
    stack.enter_context(checkpointing(model))
    return Peer(packages=named("transformers"))


def attach_selective(model: nn.Module, stack: ExitStack) -> Peer:
    """Checkpointing that saves the outputs of attention: PyTorch's selective activation checkpointing."""
    contexts = partial(create_selective_checkpoint_contexts, list(_ATTENTION))
    stack.enter_context(checkpointing(model, context_fn=contexts))
    return Peer(packages=named("torch", "transformers"))


def attach_selective_products(model: nn.Module, stack: ExitStack) -> Peer:
    """The same, which also saves the output of every second matrix product of a layer (torchtitan's rule)."""
    stack.enter_context(checkpointing(model, context_fn=_saving_every_second_product))
    return Peer(packages=named("torch", "transformers"))


def _saving_every_second_product() -> Any:
    """Returns the contexts of a layer's forward and of its recomputation, which count products alike."""
    counts = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in _ATTENTION
        if op in _PRODUCTS:
            counts[context.is_recompute] += 1
            saved = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def attach_save_on_cpu(model: nn.Module, stack: ExitStack) -> Peer:
    """Checkpointing whose layer inputs are copied to pinned memory by PyTorch's own hooks, on the compute stream."""
    stack.enter_context(checkpointing(model))
    _around_layers(model, stack, lambda: save_on_cpu(pin_memory=True))
    return Peer(packages=named("torch"))


def attach_async_offload(model: nn.Module, stack: ExitStack) -> Peer:
    """Copies every saved tensor of the layers to pinned memory on a separate stream (torchtune)."""
    _need_cuda("activations are offloaded on a CUDA stream")
    hooks_of, packages = _async_hooks()
    hooks = hooks_of(model)
    _around_layers(model, stack, lambda: hooks)
    return Peer(packages=packages)


def attach_checkpointing_async_offload(model: nn.Module, stack: ExitStack) -> Peer:
    """The same with checkpointing, as torchtune recommends for long sequences."""
    peer = attach_async_offload(model, stack)
    stack.enter_context(checkpointing(model))
    return peer


def attach_alst(model: nn.Module, stack: ExitStack) -> Peer:
    """DeepSpeed's ALST in one process: tiled feed-forward, tiled loss, layer inputs on the host by DeepSpeed's hooks.

    The hooks (0.19.8) keep every layer input that came back on the device until the step has ended.
    """
    tiled = _tile(model, stack)
    stack.enter_context(checkpointing(model))
    return replace(tiled, step=_hidden_states_offload())


def attach_alst_freed(model: nn.Module, stack: ExitStack) -> Peer:
    """The same, except that the hooks drop a layer input once it has been handed to its layer."""
    tiled = _tile(model, stack)
    stack.enter_context(checkpointing(model))
    hooks = _hidden_states_offload()
    restored = hooks.unpack_hook

    def unpack(saved: Any) -> Any:
        tensor = restored(saved)
        hooks._restored.clear()  # is there for graphs that are used twice
        return tensor

    hooks.unpack_hook = unpack
    return replace(tiled, step=hooks)


def attach_alst_reentrant(model: nn.Module, stack: ExitStack) -> Peer:
    """ALST as it was published: reentrant checkpoints, whose inputs ArcticTraining copies to memory that is not locked.

    ArcticTraining replaces the same class of PyTorch, and makes the same copies.
    """
    tiled = _tile(model, stack)
    stack.enter_context(checkpointing(model, reentrant=True))
    stack.callback(setattr, torch.utils.checkpoint, "CheckpointFunction", torch.utils.checkpoint.CheckpointFunction)
    setattr(torch.utils.checkpoint, "CheckpointFunction", _CheckpointOnHost)  # noqa: B010  mypy forbids to assign to it
    return tiled


def with_liger(attach: Attach) -> Attach:
    """Returns the same method for a model with liger-kernel's norms, rotary positions and feed-forwards."""

    def attach_to_patched(model: nn.Module, stack: ExitStack) -> Peer:
        _need_cuda("liger-kernel's kernels are Triton's")
        liger = _module("liger_kernel.transformers.monkey_patch", "liger-kernel")
        (host,) = find_hugging_face(model)
        if host.config.model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise Unavailable(f"liger-kernel has no kernels for models of type {host.config.model_type}")
        for changed in (sys.modules[type(host).__module__], *host.modules()):
            stack.enter_context(patch.dict(vars(changed)))  # to put back what is there now
        dense = not hasattr(host.config, "num_experts")
        liger._apply_liger_kernel_to_instance(
            model=host,
            fused_linear_cross_entropy=False,
            cross_entropy=False,
            # The simulated device has no times for its products of experts, so that experts keep those of transformers.
            swiglu=dense or simulated_machine() is None,
        )
        peer = attach(model, stack)
        return replace(peer, packages=(*peer.packages, *named("liger-kernel")))

    return attach_to_patched


def named(*packages: str) -> tuple[str, ...]:
    """Returns the packages with their versions."""
    return tuple(f"{package} {version(package)}" for package in packages)


def _tile(model: nn.Module, stack: ExitStack) -> Peer:
    """Tiles the feed-forward layers and the loss by DeepSpeed."""
    ulysses = _module("deepspeed.runtime.sequence_parallel.ulysses_sp", "deepspeed")
    for layer in find_stacks(model)[0].layers:
        mlp = getattr(layer, "mlp", None)
        if not isinstance(mlp, nn.Module):
            raise Unavailable(f"{type(layer).__name__} has no feed-forward called mlp, which DeepSpeed could tile")
        stack.callback(replace_forward(mlp, _TiledFeedForward(ulysses.TiledMLP)))
    return Peer(loss=_TiledLoss(model, ulysses.TiledFusedLogitsLoss), packages=named("deepspeed"))


def _hidden_states_offload() -> Any:
    """Returns DeepSpeed's hooks for a step, with its own settings."""
    offload = _module("deepspeed.runtime.activation_checkpointing.offload_activations", "deepspeed")
    return offload.get_checkpoint_hidden_states_offloading_ctx_manager()


class _CheckpointOnHost:
    """Stands in for PyTorch's reentrant checkpoint, and keeps its tensor arguments in memory that is not locked."""

    _original = CheckpointFunction

    @classmethod
    def apply(cls, *args: Any) -> Any:
        with save_on_cpu(pin_memory=False):
            return cls._original.apply(*args)


class _TiledFeedForward:
    """A feed-forward layer on one tile of tokens after the other, as many as features (DeepSpeed's own rule)."""

    def __init__(self, tiled: Any) -> None:
        self._tiled = tiled

    def __call__(self, module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        tiles = -(-x.shape[-2] // x.shape[-1])
        out: Tensor = self._tiled.apply(lambda _, tile: forward(tile), module, x, tiles, list(module.parameters()))
        return out


class _TiledLoss:
    """The loss of a causal language model in tiles of tokens, computed together with its gradients."""

    def __init__(self, model: nn.Module, tiled: Any) -> None:
        (self._model,) = find_hugging_face(model)
        self._tiled = tiled

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        head = self._model.get_output_embeddings()
        hidden = self._model.get_decoder()(input_ids=batch["input_ids"]).last_hidden_state
        labels = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=_IGNORED)
        count = (labels != _IGNORED).sum()
        tiles = -(-labels.numel() * head.weight.shape[0] * 4 // _LOGITS_BYTES)

        def loss_of(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(head(x).float(), y, ignore_index=_IGNORED, reduction="sum") / count

        loss: Tensor = self._tiled.apply(
            loss_of, head, hidden, labels, None, tiles, [p for p in head.parameters() if p.requires_grad], "sum"
        )
        return loss


def _around_layers(model: nn.Module, stack: ExitStack, hooks: Callable[[], saved_tensors_hooks]) -> None:
    """Puts hooks for saved tensors around the layers only, because they would just slow down the loss."""
    (host,) = find_hugging_face(model)

    def run(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with hooks():
            return forward(*args, **kwargs)

    stack.callback(replace_forward(host.get_decoder(), run))


def _async_hooks() -> tuple[Callable[[nn.Module], saved_tensors_hooks], tuple[str, ...]]:
    """Returns torchtune's hooks; torchtune is no longer developed, and trl now contains them."""
    try:
        torchtune = _module("torchtune.training", "torchtune")
        return lambda model: torchtune.OffloadActivations(), named("torchtune")
    except Unavailable as missing:
        try:
            trl = _module("trl.models.activation_offloading", "trl")
        except Unavailable as also:
            raise Unavailable(f"{missing}; {also}") from None

    def hooks_of(model: nn.Module) -> saved_tensors_hooks:
        hooks = trl.OffloadActivations()
        hooks.update_model_params(model)
        return hooks

    return hooks_of, named("trl")


def _module(name: str, package: str) -> Any:
    try:
        version(package)
        return import_module(name)
    except PackageNotFoundError:
        raise Unavailable(f"{package} is not installed") from None
    except ImportError as error:
        raise Unavailable(f"{package} {version(package)} is installed but does not import: {error}") from error


def _need_cuda(why: str) -> None:
    if not torch.cuda.is_available():
        raise Unavailable(f"needs a GPU: {why}")
