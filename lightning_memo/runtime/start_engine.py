"""Checks that the engine can run a model, builds it from the user's settings, and attaches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_memo.artifacts.swap_plan import Attention, StreamFromHost
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine, RequestedSettings, TestMode, TokenSharing
from lightning_memo.engine.forward.refuse_checkpointing import TURN_IT_OFF
from lightning_memo.engine.fp8_modules import FP8_WEIGHTS, UNSUPPORTED, is_norm, refused_beside
from lightning_memo.engine.fp8_state import is_in_fp8, te_modules
from lightning_memo.engine.memory.disk import open_unnamed
from lightning_memo.engine.modules.layer_forward import LayerForward
from lightning_memo.kernels.select_kernel import check_available
from lightning_memo.parallel.zero_sharding import gathers_itself
from lightning_memo.profiler.measured_costs import host_budget
from lightning_memo.runtime.training_run import ProcessesOfRun
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks, select_stacks
from lightning_memo.utils.messages import tell
from lightning_memo.utils.requirements import required_libraries


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


def refuse_float16(dtype: torch.dtype) -> None:
    """Refuse a type in which layers run.

    Raises:
        ValueError: It is float16, whose gradients need to be scaled.
    """
    if dtype is torch.float16:
        raise ValueError("layers run in float16, which is not supported: use bfloat16")


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
    tell(
        f"the layers of {', '.join(stack.name for stack in chosen)} are swapped, and those of "
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
    if found := te_modules(model):
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
    found = next((m for m in te_modules(model) if getattr(m, "primary_weights_in_fp8", False)), None)
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
    found = [class_name(m) for m in te_modules(model)]

    def refuse(*call: Any) -> None:
        if is_in_fp8():
            raise refused_beside(found[0], why_not)

    if not found:
        return
    inside = {m for layer in layers() for m in layer.modules()}
    outside = [m for m in te_modules(model) if m not in inside and not is_norm(m)]  # of a model of a user's own
    for called in (*find_hugging_face(model), *outside):
        until.callback(called.register_forward_pre_hook(refuse).remove)


def _runs_by_liger(module: nn.Module) -> bool:
    return (getattr(module.forward, "__module__", None) or "").startswith("liger_kernel.")


def announce_fused_loss(model: nn.Module) -> None:
    """Say so if liger-kernel computes the loss of the model, without the head's logits."""
    if any(_runs_by_liger(host) for host in find_hugging_face(model)):
        tell(
            "the loss is liger-kernel's fused one, and loss_chunk_tokens is not used in training; "
            "apply liger-kernel with fused_linear_cross_entropy=False to have the loss in chunks instead."
        )


def check_machine(config: MemoConfig) -> None:
    """Refuse settings that this machine cannot follow.

    Raises:
        ValueError: The attention kernel is not installed, the plan does not exist, or the disk cannot be used.
    """
    check_available(config.attention)
    if config.plan is not None and not Path(config.plan).is_file():
        raise ValueError(f'plan="{config.plan}": no such file; give one that Plan.save wrote, or None to profile')
    if config.disk_path is not None:
        open_unnamed(Path(config.disk_path)).close()


def start_engine(
    model: nn.Module,
    config: MemoConfig,
    device: torch.device,
    processes: ProcessesOfRun | None,
    trains: bool,
    test_mode: TestMode | None = None,
) -> Engine:
    """An engine that is attached to the layers of a model.

    Args:
        model: The model.
        config: The settings of the strategy.
        device: The device on which the layers run.
        processes: The processes of the run; `None` if there is only one.
        trains: Whether the model is trained, rather than evaluated.
        test_mode: Delays and poisoned buffers, which reveal copy races in tests.

    Raises:
        ValueError: The model has no repeated layers, or the engine cannot run them: see the checks above.
    """
    warn_of_untested_versions()
    refuse_fsdp1(model)
    stacks = select_stacks(model, config.layers, config.one_stack)
    layers = [layer for stack in stacks for layer in stack.layers]
    if trains and config.layers is None:
        announce_other_stacks(model, config.one_stack)
    refuse_attached(layers)
    refuse_gradient_checkpointing(model, layers)
    refuse_scripted_modules(layers)
    refuse_sharded_parts(layers)
    if trains and config.loss_chunk_tokens is not None:
        announce_fused_loss(model)
    on_this_node = 1 if processes is None else processes.ranks.on_this_node
    settings = _requested(config, len(stacks), on_this_node, test_mode)
    sharing = None
    if processes is not None:
        sharing = TokenSharing(
            processes.context_groups, processes.sizes.shards, processes.ranks, processes.current_layout
        )
    engine = Engine(model, layers, device, settings, sharing)
    try:
        engine.attach()
    except BaseException:
        engine.detach()  # the caller has no engine yet, and the model has to be as before
        raise
    return engine


def _requested(config: MemoConfig, stacks: int, on_this_node: int, test_mode: TestMode | None) -> RequestedSettings:
    return RequestedSettings(
        attention=cast(Attention | Literal["auto"], config.attention),
        slice_tokens=None if config.slice_tokens == "auto" else int(config.slice_tokens),
        stream_from_host=cast(StreamFromHost | Literal["auto"], config.stream_from_host),
        joint_attention=test_mode is not None and test_mode.joint_attention,
        # Places of tensors are given for one number of tokens, and each stack may have its own.
        by_kind=config.plans_kinds and stacks == 1 and not (test_mode is not None and test_mode.plans == "alpha"),
        stacks=stacks,
        disk_path=None if config.disk_path is None else Path(config.disk_path),
        test_mode=test_mode,
        fused_kernels=config.fused_kernels,
        check_slices=config.check_slices,
        why_not_fp8=config.why_not_fp8,
        host_limit=lambda held_bytes: host_budget(config, held_bytes, on_this_node),
    )


def warn_of_untested_versions() -> None:
    """Warn of each library whose installed version is not one that the requirements of this package allow.

    pip installs allowed versions only, but later commands may replace them.
    """
    for library in required_libraries():
        # Parts of this package need what is not installed, and say so.
        if not library.extra and library.version is not None and not library.is_tested:
            requirement = library.requirement
            rank_zero_warn(
                f"{requirement.name} {library.version} was not tested with lightning_memo, which uses parts of it that "
                f'may change between versions: if training fails, pip install "{requirement}"'
            )
