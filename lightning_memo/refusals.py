"""What cannot go together with the strategy, or not as the user meant it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from lightning_memo.engine.forward.activation_checkpointing import TURN_IT_OFF
from lightning_memo.utils.find_layers import find_hugging_face


def refuse_averaging(callbacks: Iterable[Callback]) -> None:
    """Several processes can't average weights.

    Raises:
        ValueError: A callback would.
    """
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, and several processes have parts of them: leave "
                "the callback out, or train in one process"
            )


def refuse_gradient_checkpointing(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Layers are recomputed by the engine; what lies beside them may be checkpointed.

    What only shows when a layer runs is refused there: see `engine/checkpointed.py`.

    Raises:
        ValueError: A layer, something in it, or something around it would be recomputed as well.
    """
    for module in _in_and_around(model, layers):
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                "gradient checkpointing is on in the model (model.gradient_checkpointing_disable()): " + TURN_IT_OFF
            )
        if isinstance(module, CheckpointWrapper):
            inner = type(module._checkpoint_wrapped_module).__name__
            raise ValueError(f"activation checkpointing is wrapped around {inner} (CheckpointWrapper): {TURN_IT_OFF}")


def _in_and_around(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All modules but those beside the layers."""
    inside = {module for layer in layers for module in layer.modules()}
    yield from inside
    yield from (m for m in model.modules() if m not in inside and not inside.isdisjoint(m.modules()))


def tell_resting(compiled: Sequence[str]) -> None:
    """Say that compiled code is not used, if there is any."""
    if compiled:
        others = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
        rank_zero_warn(
            f"MemoStrategy: {compiled[0]}{others} run uncompiled, as layers run slice by slice: torch.compile is of "
            "use only for what lies beside the layers, like the head."
        )


def refuse_liger_shards(model: nn.Module) -> None:
    """Kernels of liger-kernel take whole weights.

    Raises:
        ValueError: Some module of a model whose weights are going to be shared runs by them.
    """
    found = next((type(m).__name__ for m in model.modules() if _runs_by_liger(m)), None)
    if found is not None:
        raise ValueError(
            f"{found} runs by a kernel of liger-kernel, which takes no part of a weight: set tensor_parallel_size=1, "
            "or train without liger-kernel"
        )


def _runs_by_liger(module: nn.Module) -> bool:
    return (getattr(module.forward, "__module__", None) or "").startswith("liger_kernel.")


def tell_fused_loss(model: nn.Module) -> None:
    """Say whose loss is in force where a model was changed by liger-kernel, which computes it without the head."""
    if any(_runs_by_liger(host) for host in find_hugging_face(model)):
        rank_zero_info(
            "MemoStrategy: the loss is liger-kernel's fused one, and loss_chunk_tokens is not used in training; apply "
            "liger-kernel with fused_linear_cross_entropy=False to have the loss in chunks instead."
        )
