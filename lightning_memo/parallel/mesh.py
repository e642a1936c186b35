"""The device mesh `(data_parallel, context_parallel, tensor_parallel)` and the groups of processes taken from it."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_memo.parallel.context.context_groups import ContextGroups
from lightning_memo.parallel.sizes import ParallelSizes

DATA, CONTEXT, TENSOR = "data_parallel", "context_parallel", "tensor_parallel"


def build_mesh(sizes: ParallelSizes, device: torch.device) -> DeviceMesh:
    """The mesh; processes that share weights of a layer are neighbours, as their links are the fastest."""
    shape = (sizes.data, sizes.context, sizes.tensor)
    return _mesh(dist.group.WORLD, device.type, shape, (DATA, CONTEXT, TENSOR))


@functools.cache
def _mesh(world: dist.ProcessGroup, device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    # Groups hold threads or communicators, and PyTorch never gives up those of a mesh: a process that trains again
    # with the same sizes takes the same ones.
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Processes that hold the same weights and different tokens, as one dimension."""
    return mesh[DATA, CONTEXT]._flatten("replicas")


def sequence_group(mesh: DeviceMesh) -> DeviceMesh:
    """Processes that work on the same sequences, as one dimension."""
    return mesh[CONTEXT, TENSOR]._flatten("sequence")


def context_groups(mesh: DeviceMesh, ulysses: int) -> ContextGroups | None:
    """Groups for attention across the context-parallel processes; `None` for a single one.

    Args:
        mesh: The mesh.
        ulysses: Processes of each all-to-all; neighbours, as it sends more at once than a ring.
    """
    data, context, tensor = mesh.shape
    if context == 1:
        return None
    ring = context // ulysses
    names = (DATA, "ring", "ulysses", TENSOR)
    split = _mesh(dist.group.WORLD, mesh.device_type, (data, ring, ulysses, tensor), names)
    return ContextGroups(
        ring=split["ring"].get_group() if ring > 1 else None,
        ulysses=split["ulysses"].get_group() if ulysses > 1 else None,
    )
