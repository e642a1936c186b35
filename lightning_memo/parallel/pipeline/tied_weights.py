"""Weights that the first and the last stage of a pipeline share: an embedding that is also the head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_memo.parallel.clip_gradients import resolve_partial
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.pipeline.stage_modules import StagedModel
from lightning_memo.parallel.zero.gradient_places import Gradients


class TiedWeights:
    """The tied weights of this process. Both stages begin with equal values, add up their gradients, and step alike.

    Args:
        ends: This process and the one with the other copy; `None` between the first and the last stage.
    """

    def __init__(self, ends: dist.ProcessGroup | None) -> None:
        self._ends = ends
        self._places: list[tuple[nn.Module, str]] = []

    def find(self, staged: StagedModel, stage: int, stages: int) -> None:
        """Find the tied weights of a model, before other stages' weights are taken out of it."""
        kept = {0: staged.before, stages - 1: staged.after}.get(stage, ())
        others = staged.after if stage == 0 else staged.before
        shared = {id(p) for m in others for p in m.parameters(recurse=False)}
        self._places = [(m, name) for m in kept for name, p in m.named_parameters(recurse=False) if id(p) in shared]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return any(getattr(m, name) is parameter for m, name in self._places)

    def add_gradients(self, gradients: Gradients) -> None:
        """Give both copies of each weight the sum of their gradients. Both stages call this.

        Args:
            gradients: The gradients, whole or this process's shards, which are those of the other copy.
        """
        for place in self._places:
            of = gradients[place]
            if of.parameter.requires_grad:
                of.fill()
                resolve_partial([of])
                dist.all_reduce(local_part(of.grad), group=self._ends)

    @torch.no_grad()
    def share_values(self, gradients: Gradients) -> None:
        """Give the last stage's copy of each weight the values of the first one's. Both stages call this.

        An optimizer may have them in groups with other settings, as it knows the last stage's copy by another name.

        Args:
            gradients: The gradients, which know their parameters.
        """
        for place in self._places:
            parameter = gradients[place].parameter
            if parameter.requires_grad:
                dist.broadcast(local_part(parameter.detach()), group=self._ends, group_src=0)
