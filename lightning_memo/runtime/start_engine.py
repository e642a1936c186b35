"""Builds the engine from the user's settings, and attaches it to the model."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path
from typing import Literal, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from packaging.requirements import Requirement
from torch import nn

from lightning_memo.artifacts.slot_layouts import SwapPrecision
from lightning_memo.artifacts.swap_plan import Attention, HostBacked
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine, RequestedSettings, TestMode, TokenSharing
from lightning_memo.engine.memory.spill_file import open_unnamed
from lightning_memo.kernels.select_kernel import check_available
from lightning_memo.profiler.measured_costs import host_budget
from lightning_memo.runtime.model_checks import (
    announce_fused_loss,
    announce_other_stacks,
    refuse_attached,
    refuse_fsdp1,
    refuse_gradient_checkpointing,
    refuse_scripted_modules,
    refuse_sharded_parts,
    warn_of_uncompiled,
)
from lightning_memo.runtime.training_run import ProcessesOfRun
from lightning_memo.utils.find_layers import select_stacks

_PACKAGE = "lightning-memo"


def check_machine(config: MemoConfig) -> None:
    """Refuse settings that this machine cannot follow.

    Raises:
        ValueError: The attention kernel is not installed, the plan does not exist, or the disk cannot be used.
    """
    check_available(config.attention)
    if config.plan is not None and not Path(config.plan).is_file():
        raise ValueError(f'plan="{config.plan}": no such file; give one that Plan.save wrote, or None to profile')
    if config.spill_path is not None:
        open_unnamed(Path(config.spill_path)).close()


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
        ValueError: The model has no repeated layers, or the engine cannot run them: see `model_checks.py`.
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
        warn_of_uncompiled(engine.resting)
    except BaseException:
        engine.detach()  # the caller has no engine yet, and the model has to be as before
        raise
    return engine


def _requested(config: MemoConfig, stacks: int, on_this_node: int, test_mode: TestMode | None) -> RequestedSettings:
    # Places of tensors are given for one number of tokens, and each stack may have its own.
    storage = config.storage if config.plans_kinds and stacks == 1 else "alpha"
    return RequestedSettings(
        attention=cast(Attention | Literal["auto"], config.attention),
        schedule=config.schedule,
        slice_tokens=None if config.slice_tokens == "auto" else int(config.slice_tokens),
        host_backed=cast(HostBacked, "all" if config.schedule == "slice" else config.host_backed),
        storage=cast(Literal["auto", "alpha", "kinds"], storage),
        stacks=stacks,
        spill_path=None if config.spill_path is None else Path(config.spill_path),
        test_mode=test_mode,
        check_slices=config.check_slices,
        swap_precision=cast(SwapPrecision, config.swap_precision),
        why_not_fp8=config.why_not_fp8,
        host_limit=lambda: host_budget(config, 0, on_this_node),
    )


def warn_of_untested_versions() -> None:
    """Warn of each library whose installed version is not one that the requirements of this package allow.

    pip installs allowed versions only, but later commands may replace them.
    """
    for requirement, version in untested_versions():
        rank_zero_warn(
            f"{requirement.name} {version} was not tested with lightning_memo, which uses parts of it that may "
            f'change between versions: if training fails, pip install "{requirement}"'
        )


@functools.cache  # reading the metadata of all libraries takes as long as several steps of a small model
def untested_versions() -> list[tuple[Requirement, str]]:
    """Return the libraries whose installed versions the requirements of this package do not allow."""
    try:
        lines = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:  # these are sources that are not installed
        return []
    found = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None:  # of an extra
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:  # parts of this package need it, which say so
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append((requirement, version))
    return found
