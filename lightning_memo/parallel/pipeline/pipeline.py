"""The pipeline of a run, seen from one of its stages, and the weights that its first and its last stage share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_memo.config import MemoConfig
from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.parallel.checkpoints.parameter_names import WHOLE_NAMES, WholeNames
from lightning_memo.parallel.device_mesh import ends_group, pipeline_groups, readers_group
from lightning_memo.parallel.local_tensors import local_part, resolve_partial
from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.pipeline.micro_batch_gradients import Gradients, gradient_places
from lightning_memo.parallel.pipeline.pipeline_messages import BatchAgreement, StageMessages
from lightning_memo.parallel.pipeline.pipelined_model import PipelinedModel, StageEngine
from lightning_memo.parallel.pipeline.stage_forward import StageForward
from lightning_memo.parallel.pipeline.stage_modules import STAGE, StagedModel
from lightning_memo.parallel.pipeline.stage_order import most_in_flight, most_waiting
from lightning_memo.parallel.zero.fsdp_units import UnitsInFlight
from lightning_memo.utils.find_layers import find_hugging_face


class Pipeline:
    """Divides a model over the stages of a pipeline, and runs its calls.

    Args:
        config: The user's settings.
        sizes: Sizes of the kinds of parallelism.
        mesh: Device mesh, whose first dimension are the stages.
        device: Device of this process.
        current_layout: Holds the layout of the batch.
        timeout: How long a process waits for the other stages.

    Attributes:
        stage: Number of the stage of this process.
    """

    def __init__(
        self,
        config: MemoConfig,
        sizes: ParallelSizes,
        mesh: DeviceMesh,
        device: torch.device,
        current_layout: CurrentLayout,
        timeout: timedelta,
    ) -> None:
        self._config, self._sizes, self._current = config, sizes, current_layout
        self._agreement = BatchAgreement(readers_group(mesh, timeout), config.zero_stage, sizes, device)
        self._messages = StageMessages(pipeline_groups(mesh, timeout, 2 if sizes.blocks == 1 else 4), device)
        self.stage = self._messages.stage
        self._zero_bubble = config.pipeline_schedule == "zero_bubble"
        self._tied = _TiedWeights(ends_group(mesh, timeout))
        self._staged: StagedModel | None = None
        self._run: PipelinedModel | None = None
        self._gradients: Gradients = {}

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Largest number of micro-batches that are in flight, for each block of layers of this stage."""
        return most_in_flight(self.stage, self._sizes.pipeline, self._sizes.blocks)

    @property
    def waiting(self) -> int:
        """Largest number of backwards of a block of layers of this stage whose gradients of weights wait."""
        return most_waiting(self.stage) if self._zero_bubble else 0

    def prepare(self, module: nn.Module) -> None:
        """Find out what belongs to which stage, while each process can run the whole model. Sends nothing.

        Args:
            module: The module, of which nothing is divided yet.

        Raises:
            ValueError: The module cannot be divided over the stages.
        """
        self._staged = StagedModel.of(module, self._config.layers)

    def divide(self, module: nn.Module, mixed: bool) -> None:
        """Take the weights of other stages out of a module, for which `prepare` was called.

        Args:
            module: The module.
            mixed: Whether it computes in bf16 with fp32 weights.

        Raises:
            ValueError: The layers cannot be divided over the stages.
        """
        staged, self._staged = self._staged, None
        assert staged is not None
        counts = staged.divide(self._sizes.pipeline, self._sizes.blocks, self._config.pipeline_layers)
        self._tied.find(staged, self.stage, self._sizes.pipeline)
        setattr(module, WHOLE_NAMES, WholeNames.of(module))
        setattr(staged.model, STAGE, staged.keep(self.stage, self._sizes.pipeline, counts, mixed))

    def run_of(self, module: nn.Module) -> tuple[nn.Module, PipelinedModel]:
        """Return the model inside of a divided module, and what is to be called in place of its forward."""
        model = find_hugging_face(module)[0]
        forward: StageForward = getattr(model, STAGE)
        zero_stage = self._config.zero_stage
        gradients = self._gradients = gradient_places(module, reduced=zero_stage >= 2)
        self._run = PipelinedModel(
            model,
            forward,
            self._messages,
            self._config.micro_batch_size,
            self._current,
            list(dict.fromkeys(gradients.values())),
            units=UnitsInFlight(module, zero_stage),
            agreement=self._agreement,
            after_backward=functools.partial(self._tied.add_gradients, gradients),
            zero_bubble=self._zero_bubble,
        )
        return model, self._run

    def train(
        self, engine: StageEngine, before_backward: Callable[[], None], drops_gradients: Callable[[], bool]
    ) -> None:
        """Prepare the run of the model for training.

        Args:
            engine: Runs the layers of this stage.
            before_backward: Called before the first backward of a batch.
            drops_gradients: Returns whether the gradients that parameters have now are dropped before the next
                backward.
        """
        assert self._run is not None
        self._run.engine = engine
        self._run.before_backward, self._run.drops_gradients = before_backward, drops_gradients

    def after_step(self) -> None:
        """Make tied weights equal again after an optimizer's step. All stages call this."""
        self._tied.share_values(self._gradients)

    def holders(self, parameter: nn.Parameter) -> int:
        """Return the number of processes that hold a parameter or a part of it."""
        return self._sizes.stage_processes * (2 if parameter in self._tied else 1)


class _TiedWeights:
    """The tied weights of this process: an embedding that is also the head.

    Both stages begin with equal values, add up their gradients, and step alike.

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
