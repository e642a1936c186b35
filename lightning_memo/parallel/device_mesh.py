"""The device mesh `(data_parallel, context_parallel, tensor_parallel)` and its process groups.

With a pipeline, `pipeline_parallel` is its first dimension.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_memo.parallel.context_parallel import ContextGroups, StateExchange
from lightning_memo.parallel.parallel_sizes import ParallelSizes

DATA, CONTEXT, TENSOR = "data_parallel", "context_parallel", "tensor_parallel"
EXPERT, PIPELINE = "expert_parallel", "pipeline_parallel"


@dataclass(frozen=True, slots=True)
class ExpertMeshes:
    """Where the experts of a layer are, if they are divided over data- and context-parallel ranks.

    Attributes:
        homes: The ranks over which the experts of a layer are divided, as a mesh with one dimension: the
            expert-parallel ranks, and for each of them the tensor-parallel ones.
        replicas: The ranks with the same experts, as a mesh with one dimension.
        neighbours: These ranks, as :func:`neighbours` returns them.
        exchange: The expert-parallel ranks, which send each other tokens, as a mesh with one dimension.
        tensor: The tensor-parallel ranks, which get the same tokens, as a mesh with one dimension.
    """

    homes: DeviceMesh
    replicas: DeviceMesh
    neighbours: DeviceMesh | None
    exchange: DeviceMesh
    tensor: DeviceMesh


def build_mesh(sizes: ParallelSizes, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Returns the device mesh.

    Tensor-parallel ranks are neighbours, because links between neighbouring ranks are the fastest. Stages of a
    pipeline, which send each other least, are farthest apart.
    """
    shape, names = (sizes.data, sizes.context, sizes.tensor), (DATA, CONTEXT, TENSOR)
    if sizes.pipeline > 1:
        shape, names = (sizes.pipeline, *shape), (PIPELINE, *names)
    return _mesh(device.type, shape, names, timeout)


def _mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...], timeout: timedelta) -> DeviceMesh:
    return _limit_waits(_cached_mesh(dist.group.WORLD, device_type, shape, names), timeout)


@functools.cache
def _cached_mesh(
    world: dist.ProcessGroup, device_type: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    # Process groups hold threads or communicators, and PyTorch never destroys those of a mesh. A process that trains
    # again with the same sizes reuses them.
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def _limit_waits(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Set how long a rank waits for the others in the groups of a mesh. PyTorch gives them a default of its own.

    A dimension that has all ranks is the first group, which whoever has made it may have given another timeout.
    """
    for group in (group for group in mesh.get_all_groups() if group is not dist.group.WORLD):
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)
    return mesh


def replicas(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Returns the ranks with the same weights and different tokens, as a mesh with one dimension."""
    return _limit_waits(mesh[DATA, CONTEXT]._flatten("replicas"), timeout)


def neighbours(mesh: DeviceMesh, size: int | None, timeout: timedelta, experts: int = 1) -> DeviceMesh | None:
    """Returns the ranks with the same weights in groups of neighbours, the last one of two dimensions.

    Args:
        mesh: Device mesh of :func:`build_mesh`.
        size: Number of ranks in each group.
        timeout: How long a rank waits for the others.
        experts: Expert-parallel size, if the weights are those of experts.

    Returns:
        The mesh; `None` if there would be only one group, or groups would not be equally large.
    """
    *stages, data, context, tensor = mesh.shape
    ranks = data * context // experts
    if size is None or size >= ranks or ranks % size:
        return None
    shape = (*stages, ranks // size, size, experts * tensor)
    names = ("across_neighbours", "neighbours")
    return _mesh(mesh.device_type, shape, (*(PIPELINE for _ in stages), *names, "other_weights"), timeout)[names]


def expert_meshes(mesh: DeviceMesh, experts: int, shard_size: int | None, timeout: timedelta) -> ExpertMeshes:
    """Returns where the experts of a layer are.

    Expert-parallel ranks are neighbours in one stage of a pipeline: those of a sequence first, then those of
    neighbouring data-parallel ranks.

    Args:
        mesh: Device mesh of :func:`build_mesh`.
        experts: Expert-parallel size.
        shard_size: Number of neighbours over which weights are sharded between forward and backward; `None` for all.
        timeout: How long a rank waits for the others.
    """
    *stages, data, context, tensor = mesh.shape
    shape, names = (*stages, data * context // experts), (*(PIPELINE for _ in stages), "expert_replicas")
    homes = _mesh(mesh.device_type, (*shape, experts * tensor), (*names, "expert_homes"), timeout)
    split = _mesh(mesh.device_type, (*shape, experts, tensor), (*names, EXPERT, TENSOR), timeout)
    near = neighbours(mesh, shard_size, timeout, experts)
    return ExpertMeshes(homes["expert_homes"], homes["expert_replicas"], near, split[EXPERT], mesh[TENSOR])


def stage_group(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Returns the ranks of this rank's pipeline stage, as a mesh with one dimension."""
    return _limit_waits(mesh[DATA, CONTEXT, TENSOR]._flatten("stage"), timeout)


def across_stages(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the ranks that are the stages of this rank's pipeline, for what they agree on between batches."""
    return mesh[PIPELINE].get_group()


def pipeline_groups(mesh: DeviceMesh, timeout: timedelta, groups: int) -> tuple[dist.ProcessGroup, ...]:
    """Returns several groups of the ranks that are the stages of this rank's pipeline, in order."""
    return _pipeline_groups(dist.group.WORLD, mesh, timeout, groups)


@functools.cache
def _pipeline_groups(
    world: dist.ProcessGroup, mesh: DeviceMesh, timeout: timedelta, groups: int
) -> tuple[dist.ProcessGroup, ...]:
    everyones = mesh.mesh.movedim(0, -1).flatten(0, -2).tolist()
    return tuple(dist.new_subgroups_by_enumeration(everyones, timeout)[0] for _ in range(groups))


def ends_group(mesh: DeviceMesh, timeout: timedelta) -> dist.ProcessGroup | None:
    """Returns the ranks of the first and the last stage of this rank's pipeline; `None` between them."""
    return _ends_group(dist.group.WORLD, mesh, timeout)


@functools.cache
def _ends_group(world: dist.ProcessGroup, mesh: DeviceMesh, timeout: timedelta) -> dist.ProcessGroup | None:
    pipelines = mesh.mesh.movedim(0, -1).flatten(0, -2).tolist()
    ends, _ = dist.new_subgroups_by_enumeration([[ranks[0], ranks[-1]] for ranks in pipelines], timeout)
    return ends


def readers_group(mesh: DeviceMesh, timeout: timedelta) -> dist.ProcessGroup:
    """Returns the ranks that read the same batches: those that compute the same sequences, on all stages."""
    return _readers_group(dist.group.WORLD, mesh, timeout)


@functools.cache
def _readers_group(world: dist.ProcessGroup, mesh: DeviceMesh, timeout: timedelta) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.movedim(-3, 0).flatten(1).tolist(), timeout)
    return group


def sequence_group(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Returns the ranks that compute the same sequences, as a mesh with one dimension."""
    return _limit_waits(mesh[CONTEXT, TENSOR]._flatten("sequence"), timeout)


def context_groups(mesh: DeviceMesh, ulysses: int, hands_states: bool, timeout: timedelta) -> ContextGroups | None:
    """Returns the process groups for context-parallel attention, or `None` if the context-parallel size is 1.

    Args:
        mesh: Device mesh of :func:`build_mesh`.
        ulysses: Number of ranks in each all-to-all group. They are neighbours, because an all-to-all sends more data
            at once than a ring.
        hands_states: Whether layers hand states from token to token.
        timeout: How long a rank waits for the others.
    """
    *stages, data, context, tensor = mesh.shape
    if context == 1:
        return None
    ring = context // ulysses
    shape, names = (
        (*stages, data, ring, ulysses, tensor),
        (*(PIPELINE for _ in stages), DATA, "ring", "ulysses", TENSOR),
    )
    split = _mesh(mesh.device_type, shape, names, timeout)
    return ContextGroups(
        ring=split["ring"].get_group() if ring > 1 else None,
        ulysses=split["ulysses"].get_group() if ulysses > 1 else None,
        states=StateExchange(*_state_groups(dist.group.WORLD, mesh, timeout)) if hands_states else None,
        everyone=mesh[CONTEXT].get_group(),
    )


@functools.cache
def _state_groups(
    world: dist.ProcessGroup, mesh: DeviceMesh, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns two groups of this rank's context-parallel ranks, in which nothing but states is sent.

    PyTorch gives dimensions of a mesh with the same ranks one group.
    """
    everyones = mesh.mesh.movedim(-2, -1).flatten(0, -2).tolist()
    onward, _ = dist.new_subgroups_by_enumeration(everyones, timeout)
    around, _ = dist.new_subgroups_by_enumeration(everyones, timeout)
    return onward, around
