"""Checks, before training starts, that the engine can run the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_memo.engine.forward.refuse_checkpointing import TURN_IT_OFF
from lightning_memo.engine.fp8_modules import FP8_WEIGHTS, UNSUPPORTED, is_norm, refused_beside
from lightning_memo.engine.fp8_state import engine_modules, is_in_fp8
from lightning_memo.engine.modules.layer_forward import LayerForward
from lightning_memo.parallel.zero_sharding import gathers_itself
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks, select_stacks


def refuse_gradient_checkpointing(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Refuse activation checkpointing in or around the layers, which the engine recomputes itself.

    Modules outside of the layers may be checkpointed. What shows only when a layer runs is refused there: see
    `engine/forward/refuse_checkpointing.py`.

    Raises:
        ValueError: A layer, a module in it, or a module around it would be recomputed as well.
    """
    for module in _in_and_around(model, layers):
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                "gradient checkpointing is on in the model (model.gradient_checkpointing_disable()): " + TURN_IT_OFF
            )
        if isinstance(module, CheckpointWrapper):
            inner = class_name(module._checkpoint_wrapped_module)
            raise ValueError(f"activation checkpointing is wrapped around {inner} (CheckpointWrapper): {TURN_IT_OFF}")


def refuse_attached(layers: Iterable[nn.Module]) -> None:
    """Refuse layers that another engine runs.

    Raises:
        ValueError: A strategy or a loop has the model, and has not ended.
    """
    for layer in layers:
        if isinstance(vars(layer).get("forward"), LayerForward):
            raise ValueError(
                f"another MemoLoop, MemoCallback or MemoStrategy runs the {class_name(layer)} modules of this model: "
                "leave its context, or end its training, before this one begins"
            )


def refuse_scripted_modules(layers: Iterable[nn.Module]) -> None:
    """Refuse scripted modules in the layers.

    Raises:
        ValueError: A module of a layer is scripted. TorchScript does not let go of a recomputation that has enough, and
            fuses operations after the first calls, so that other tensors are saved.
    """
    for layer in layers:
        scripted = next((name for name, m in layer.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
        if scripted is not None:
            raise ValueError(
                f"{scripted} of {class_name(layer)} is scripted (torch.jit), and TorchScript cannot be recomputed: use "
                "the module that was scripted"
            )


def refuse_fsdp1(model: nn.Module) -> None:
    """Refuse models that FSDP1 shards.

    Raises:
        ValueError: A module is sharded by FSDP1.
    """
    if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        raise ValueError(
            "the model is sharded by FSDP1 (FullyShardedDataParallel), which frees weights that layers need again: "
            "shard it by FSDP2 (fully_shard; fsdp_version: 2 in the configuration of Accelerate)"
        )


def refuse_sharded_parts(layers: Iterable[nn.Module]) -> None:
    """Refuse layers of which FSDP2 gathers and frees parts by themselves.

    Raises:
        ValueError: A module inside of a layer is sharded.
    """
    for layer in layers:
        inner = next((name for name, m in layer.named_modules() if name and gathers_itself(m)), None)
        if inner is not None:
            raise ValueError(
                f"{inner} of {class_name(layer)} is sharded by itself (fully_shard), and a layer runs more than once: "
                "shard whole layers, fully_shard(layer)"
            )


def _in_and_around(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules of the layers, and the modules that contain a layer."""
    inside = {module for layer in layers for module in layer.modules()}
    yield from inside
    yield from (m for m in model.modules() if m not in inside and not inside.isdisjoint(m.modules()))


def warn_of_uncompiled(compiled: Sequence[str]) -> None:
    """Warn that compiled modules and functions run uncompiled.

    Args:
        compiled: Their names.
    """
    if compiled:
        others = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
        rank_zero_warn(
            f"lightning_memo: {compiled[0]}{others} run uncompiled, because layers run slice by slice. torch.compile "
            "helps only for modules outside of the layers, like the head."
        )


def announce_other_stacks(model: nn.Module, alone: bool) -> None:
    """Name the stacks of layers that are trained plainly, if there are any.

    Args:
        model: The model, whose stacks the user has not named.
        alone: Whether the settings allow only one stack.
    """
    chosen = select_stacks(model, None, alone)
    names = [stack.name for stack in find_stacks(model) if stack not in chosen]
    if not names:
        return
    why = "these settings swap one stack" if alone else "they are small"
    advice = 'choose it with layers="..."' if alone else "layers=[...] swaps those it names"
    rank_zero_info(
        f"lightning_memo: the layers of {', '.join(stack.name for stack in chosen)} are swapped, and those of "
        f"{', '.join(names)} are not, as {why}; {advice}."
    )


def refuse_liger_shards(model: nn.Module) -> None:
    """Refuse liger-kernel's kernels in a model whose weights are going to be sharded.

    Raises:
        ValueError: A module runs by a kernel of liger-kernel, which takes whole weights.
    """
    found = next((class_name(m) for m in model.modules() if _runs_by_liger(m)), None)
    if found is not None:
        raise ValueError(
            f"{found} runs by a kernel of liger-kernel, which takes whole weights, not shards: set "
            "tensor_parallel_size=1, or train without liger-kernel"
        )


def refuse_engine_shards(model: nn.Module) -> None:
    """Refuse TransformerEngine's modules in a model whose weights are going to be sharded.

    The backward of its norms reads the weight anew, outside of the forward in which it is a plain tensor.

    Raises:
        ValueError: A module is TransformerEngine's.
    """
    if found := engine_modules(model):
        raise ValueError(
            f"{class_name(found[0])} is TransformerEngine's, whose kernels take whole weights, not shards: set "
            "tensor_parallel_size=1, or take PyTorch's modules"
        )


def refuse_fp8_weights(model: nn.Module) -> None:
    """Refuse weights in TransformerEngine's FP8 before they are sent to other processes and sharded.

    Layers with such weights are refused when they run, which is later.

    Raises:
        ValueError: A module has such weights.
    """
    found = next((m for m in engine_modules(model) if getattr(m, "primary_weights_in_fp8", False)), None)
    if found is not None:
        raise ValueError(f"{UNSUPPORTED} {class_name(found)} {FP8_WEIGHTS}")


def refuse_fp8_at_calls(
    model: nn.Module, layers: Callable[[], Iterable[nn.Module]], why_not: str, until: ExitStack
) -> None:
    """Refuse TransformerEngine's FP8 whenever the model is called, in all processes alike.

    Otherwise, a stage of a pipeline would wait for one that has refused, and a head outside of the layers would scale
    the tokens of each process by themselves.

    Args:
        model: The model before it is divided, when all processes have the same modules.
        layers: Returns its layers, which are refused when they run.
        why_not: The setting with which FP8 is not supported, and what to set.
        until: Ends this when it is closed.
    """
    found = [class_name(m) for m in engine_modules(model)]

    def refuse(*call: Any) -> None:
        if is_in_fp8():
            raise refused_beside(found[0], why_not)

    if not found:
        return
    inside = {m for layer in layers() for m in layer.modules()}
    outside = [m for m in engine_modules(model) if m not in inside and not is_norm(m)]  # of a model of a user's own
    for called in (*find_hugging_face(model), *outside):
        until.callback(called.register_forward_pre_hook(refuse).remove)


def _runs_by_liger(module: nn.Module) -> bool:
    return (getattr(module.forward, "__module__", None) or "").startswith("liger_kernel.")


def announce_fused_loss(model: nn.Module) -> None:
    """Say so if liger-kernel computes the loss of the model, without the head's logits."""
    if any(_runs_by_liger(host) for host in find_hugging_face(model)):
        rank_zero_info(
            "lightning_memo: the loss is liger-kernel's fused one, and loss_chunk_tokens is not used in training; "
            "apply liger-kernel with fused_linear_cross_entropy=False to have the loss in chunks instead."
        )
