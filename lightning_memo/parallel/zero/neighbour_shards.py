"""Shards weights over neighbours between forward and backward (ZeRO++'s secondary partition)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import Shard

from lightning_memo.parallel.zero.fsdp_units import parameter_groups


def shard_over_neighbours(unit: nn.Module, neighbours: DeviceMesh) -> None:
    """Shard the weights of a unit over neighbours between forward and backward.

    `fully_shard` with a number of ranks would make process groups for each unit. They are made by all processes of a
    run, and stages of a pipeline have different units.

    Args:
        unit: A unit of FSDP2 that frees its weights after the forward.
        neighbours: The ranks that hold the weights, as a mesh with two dimensions, of which the last one is neighbours.
    """
    info = HSDPMeshInfo(neighbours, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in parameter_groups(unit._get_fsdp_state()):
        group.post_forward_mesh_info = info
        for of in group.fsdp_params:
            _NeighbourShard(of, info)


class _NeighbourShard:
    """The part of a weight that this rank keeps for its neighbours between forward and backward.

    FSDP2 gives the module a DTensor of this part. It does not name the tensor-parallel ranks, and gradients of terms of
    the loss that are computed from weights are lost with it. Here the module has the optimizer's shard meanwhile, as
    without neighbours.

    Args:
        of: FSDP2's own description of the parameter, whose transitions are replaced.
        info: The neighbours.
    """

    def __init__(self, of: Any, info: HSDPMeshInfo) -> None:
        self._of, self._info, self._place = of, info, of.fsdp_placement
        of.post_forward_mesh_info = info
        of.to_sharded_post_forward, of.to_unsharded, of.to_sharded = self._keep, self._use, self._drop

    def _keep(self) -> None:
        """Free a whole weight, but not this rank's part of it."""
        of, info = self._of, self._info
        of._sharded_post_forward_param_data = (
            of.all_gather_outputs[0].chunk(info.shard_mesh_size)[info.shard_mesh_rank].clone()
        )
        type(of).to_sharded(of)
        of.sharded_state, of.fsdp_placement = ShardedState.SHARDED_POST_FORWARD, Shard(0)  # parts of it in memory

    def _use(self) -> None:
        """Give the module the whole weight, which has been gathered."""
        type(self._of).to_unsharded(self._of)
        self._of.fsdp_placement = self._place

    def _drop(self) -> None:
        """Free the weight, or the part of it."""
        self._of._sharded_post_forward_param_data, self._of.fsdp_placement = None, self._place
        type(self._of).to_sharded(self._of)
