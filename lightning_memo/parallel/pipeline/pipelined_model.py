"""A pipeline seen from one of its stages: each call of the model runs as one, micro-batch after micro-batch.

Note: [A pipeline inside of the model's call]
The training step of the user calls the model once, with a batch, on every stage. Within this call, the forwards and the
backwards of all micro-batches run. The call returns the loss of the whole batch, on every stage, so that whatever the
training step does with it (logs it, scales it, adds to it) is the same on all of them. The gradients wait for the
backward of this loss: see `pipeline_gradients.py`. So that random numbers that the training step draws afterwards
are the same on all stages, these leave the call with one random state, whatever their layers have drawn.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from lightning_memo.config import MemoConfig
from lightning_memo.kernels.rng_state import RngState
from lightning_memo.parallel.batches.shard_batch import IGNORED
from lightning_memo.parallel.batches.token_layout import CurrentLayout, TokenLayout, largest_position
from lightning_memo.parallel.device_mesh import ends_group, pipeline_groups, readers_group
from lightning_memo.parallel.fsdp_units import UnitsInFlight
from lightning_memo.parallel.local_tensors import local_part, resolve_partial
from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.pipeline.pipeline_gradients import (
    GradientPlace,
    Gradients,
    HeldGradients,
    WeightGradients,
    gradient_places,
)
from lightning_memo.parallel.pipeline.pipeline_messages import BatchAgreement, StageMessages
from lightning_memo.parallel.pipeline.stage_modules import STAGE, StagedModel, StageEndError, StageForward
from lightning_memo.parallel.pipeline.stage_order import (
    StageAction,
    forwards_only,
    most_in_flight,
    most_waiting,
    one_by_one,
    training_order,
)
from lightning_memo.parallel.sharded_checkpoint import WHOLE_NAMES, WholeNames
from lightning_memo.utils.cache_names import CACHE_NAMES
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face

_ABSENT = ("logits", "hidden_states", "attentions", *CACHE_NAMES)
_ASKED = ("output_hidden_states", "output_attentions", "output_router_logits", *CACHE_NAMES, "inputs_embeds")
_BY_ROW: Final = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "token_type_ids")
_ITEM_COUNT: Final = "num_items_in_batch"


class _StageEngine(Protocol):
    """What runs the layers of a stage."""

    def profiles(self, batch: int, tokens: int) -> bool:
        """Return whether a micro-batch has to run alone, to be profiled.

        Args:
            batch: Number of its sequences.
            tokens: Number of tokens of each of them that this process holds between the blocks of a layer.
        """

    def profile_again(self) -> None:
        """Forget the plan: the next micro-batch has to be profiled."""

    def begin_micro_batch(self, number: int, block: int, backward: bool, alone: bool) -> None:
        """Begin the forward or the backward of a micro-batch through a block of layers.

        Args:
            number: Its number in the batch.
            block: Number of the block of layers among those of the stage.
            backward: Whether the backward begins.
            alone: Whether no other one is in flight.
        """

    def buffer_owner(self, t: Tensor) -> object | None:
        """Return what lies in the memory of a tensor until something else is written there; `None` if nothing is."""

    def note_waiting(self, size_bytes: int) -> None:
        """Take note of the memory that a backward leaves for the gradients of weights."""


class NothingButLossError(ValueError, AttributeError):
    """The output of a model on a stage was asked for more than the loss. `hasattr` says that there is none."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"pipeline_parallel_size: the model's {name} are not there, as each stage has parts of the micro-batches: "
            "use the loss alone, or set pipeline_parallel_size=1"
        )


class PipelineOutput:
    """What a model returns on every stage: the loss of the batch.

    Attributes:
        loss: The loss, a scalar.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __contains__(self, key: object) -> bool:
        return key == "loss"

    def __getitem__(self, key: int | str) -> Tensor:
        if key in (0, "loss"):
            return self.loss
        raise NothingButLossError(str(key))

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise NothingButLossError(name)
        raise AttributeError(name)

    def get(self, key: str, default: Any = None) -> Any:
        return self.loss if key == "loss" else default


class _PipelinedModel:
    """Runs the calls of a model on one stage.

    Args:
        model: The model.
        forward: The state of its forward.
        messages: Sends hidden states and gradients.
        micro_batch_size: Rows of a micro-batch.
        current_layout: Holds the layout of the batch.
        gradients: Where backwards leave the gradients of parameters.
        units: The units of FSDP2.
        agreement: Compares numbers of the processes.
        after_backward: Called after the last backward of a batch, with its gradients in their places.
        zero_bubble: Whether gradients of weights are computed later than those of hidden states.

    Attributes:
        engine: Runs the layers; `None` if nothing is trained.
        before_backward: Called before the first backward of a batch.
        drops_gradients: Returns whether the gradients that parameters have now are dropped before the next backward.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: StageForward,
        messages: StageMessages,
        micro_batch_size: int,
        current_layout: CurrentLayout,
        gradients: Sequence[GradientPlace],
        units: UnitsInFlight,
        agreement: BatchAgreement,
        after_backward: Callable[[], None],
        zero_bubble: bool,
    ) -> None:
        self._model, self._forward, self._messages = model, forward, messages
        self._micro_batch_size, self._current, self._gradients = micro_batch_size, current_layout, gradients
        self._units, self._agreement, self._after_backward = units, agreement, after_backward
        # On the first stage, none waits for another stage.
        self._weights = WeightGradients(self._buffer_owner) if zero_bubble and messages.stage else None
        self._frozen: set[nn.Parameter] = set()
        self.engine: _StageEngine | None = None
        self.before_backward: Callable[[], None] = lambda: None
        self.drops_gradients: Callable[[], bool] = lambda: False
        self._alive: dict[tuple[int, int], tuple[Tensor, Tensor | None, list[Any]]] = {}

    @property
    def _sizes(self) -> tuple[int, int]:
        """Number of stages, and of blocks of layers of each."""
        return self._messages.stages, self._forward.blocks

    def _begins(self, action: StageAction) -> bool:
        """Return whether the block of layers is the first one of all."""
        return self._messages.stage == 0 and action.block == 0

    def _ends(self, action: StageAction) -> bool:
        """Return whether the block of layers is the last one of all, and the loss comes behind it."""
        return self._messages.is_last and action.block == self._forward.blocks - 1

    def __call__(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> PipelineOutput:
        """Run a call of the model, in place of its own forward.

        Raises:
            ValueError: The call asks for more than the loss, or its arguments cannot be divided.
        """
        arguments = dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs
        self._check(arguments)
        micro_batches = micro_batches_of(arguments, self._micro_batch_size)
        whole = functools.partial(largest_position, arguments, _batch_size(arguments)[1])
        with self._current.of_rows(functools.cache(whole)):
            return self._run_batch(forward, micro_batches)

    def _run_batch(self, forward: Callable[..., Any], micro_batches: Sequence[dict[str, Any]]) -> PipelineOutput:
        before = RngState.capture(self._messages.device)
        run = functools.partial(self._run_action, forward, micro_batches, self._current.layout)
        self._alive.clear()
        self._agreement.check_micro_batches(len(micro_batches), torch.is_grad_enabled())
        self._messages.begin(() if self._current.layout is None else self._current.layout.bounds_of_order)
        if not torch.is_grad_enabled():
            return PipelineOutput(self._share(self._run(forwards_only(len(micro_batches), *self._sizes), run), before))
        alone = self._profiles(micro_batches[0])
        order = self._order(len(micro_batches), alone)
        held = HeldGradients(self._gradients, self._agreement.check_factor)
        if self.drops_gradients():
            for place in self._gradients:
                place.grad = place.parameter.grad = None
        weights = nullcontext() if self._weights is None else self._weights.computing_linear()
        with self._units.accumulating(), held.collecting(), weights:
            value = self._share(self._run(order, functools.partial(run, alone=alone)), before)
            self._after_backward()
        return PipelineOutput(held.loss(value))

    def _check(self, arguments: dict[str, Any]) -> None:
        config: Any = self._model.config
        if arguments.get("labels") is None:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(self._model)} was called without labels, and stages return the "
                "loss only: pass labels, or set pipeline_parallel_size=1"
            )
        if arguments.get("return_dict", getattr(config, "return_dict", None)) is False:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(self._model)} got return_dict=False, and stages return an output "
                "with the loss: leave return_dict out of the call and of the model's config, and take .loss, or set "
                "pipeline_parallel_size=1"
            )
        for name in _ASKED:
            if arguments.get(name, getattr(config, name, None)) not in (None, False):
                raise ValueError(
                    f"pipeline_parallel_size: {class_name(self._model)} got {name}, and stages return the loss of "
                    f"input_ids only: leave {name} out of the call and of the model's config, or set "
                    "pipeline_parallel_size=1"
                )

    def _order(self, micro_batches: int, alone: bool) -> list[StageAction]:
        (stages, blocks), weights_wait = self._sizes, self._weights is not None
        if alone:
            return one_by_one(micro_batches, blocks, weights_wait)
        return training_order(self._messages.stage, stages, micro_batches, blocks, weights_wait)

    def _buffer_owner(self, t: Tensor) -> object | None:
        return None if self.engine is None else self.engine.buffer_owner(t)

    def _profiles(self, micro_batch: dict[str, Any]) -> bool:
        """Return whether any process has to profile a micro-batch. Then all of them run one at a time.

        If weights of any stage are trained that were frozen before, other stages may have more gradients, too.
        """
        assert self.engine is not None
        rows, tokens = _batch_size(micro_batch)
        shards = 1 if self._current.layout is None else self._current.layout.shards
        frozen = {p for p in self._model.parameters() if not p.requires_grad}
        thawed, self._frozen = any(p.requires_grad for p in self._frozen), frozen
        needed = self._agreement.most(2 if thawed else int(self.engine.profiles(rows, tokens // shards)))
        if needed == 2:
            self.engine.profile_again()
        return needed > 0

    # ---- one batch

    def _run(self, order: Sequence[StageAction], run: Callable[[StageAction], Tensor | None]) -> Tensor:
        """Run the forwards and backwards of a batch, and return its loss on the last stage, on others zero."""
        losses = []
        first_backward = next((action for action in order if action.backward), None)
        for action in order:
            if action == first_backward:
                self.before_backward()
            loss = run(action)
            if loss is not None:
                losses.append(loss)
        self._messages.settle()
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self._messages.device)
        return total.float()

    def _share(self, loss: Tensor, before: RngState) -> Tensor:
        """Return the loss on all stages, and give them a common random state.

        If no stage has drawn random numbers, it is the state before the call, as in one process. Otherwise the state
        before decides it: layers of stages draw different amounts.
        """
        drawn = RngState.capture(self._messages.device, before) is not before
        loss, drawn = self._messages.share(loss, drawn)
        if drawn:
            before.branch()
        return loss

    def _run_action(
        self,
        forward: Callable[..., Any],
        micro_batches: Sequence[dict[str, Any]],
        layout: TokenLayout | None,
        action: StageAction,
        alone: bool = True,
    ) -> Tensor | None:
        """Run a forward, a backward or what a backward has left. Returns the loss of a forward on the last stage."""
        if action.weights:
            self._run_weights(action, alone)
            return None
        if self.engine is not None and torch.is_grad_enabled():
            self.engine.begin_micro_batch(action.micro_batch, action.block, action.backward, alone)
        arguments = micro_batches[action.micro_batch]
        rows, _ = _batch_size(arguments)
        # A recomputation in the backward reads the layout, too.
        self._current.layout = None if layout is None else layout.of_rows(action.micro_batch * rows, rows)
        try:
            if not action.backward:
                return self._run_forward(forward, arguments, action)
            self._run_backward(action)
            return None
        finally:
            self._current.layout = layout

    def _run_forward(
        self, forward: Callable[..., Any], arguments: dict[str, Any], action: StageAction
    ) -> Tensor | None:
        received = None
        if not self._begins(action):
            received, self._forward.returned = self._messages.receive_hidden()
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        loss = None
        try:
            with self._forward.running(received, action.block):
                loss = forward(**arguments).loss
        except StageEndError as end:
            hidden = end.hidden
            self._messages.send_hidden(hidden, self._forward.returned)
        if loss is not None:
            hidden = loss
        if torch.is_grad_enabled():
            self._alive[action.micro_batch, action.block] = hidden, received, self._units.take_forward()
        return None if loss is None else loss.detach()

    def _run_backward(self, action: StageAction) -> None:
        hidden, received, forward = self._alive.pop((action.micro_batch, action.block))
        gradient = None if self._ends(action) else self._messages.receive_gradient(hidden)
        if hidden.requires_grad:
            # As in plain training, where an autocast context of the training step has ended before the backward.
            place = action.micro_batch, action.block
            waiting = nullcontext() if self._weights is None else self._weights.waiting(place, hidden)
            with torch.autocast(hidden.device.type, enabled=False), self._units.backward(forward), waiting:
                torch.autograd.backward(hidden, gradient)
        for place in self._gradients:
            place.add_up()
        if received is not None:
            own = received.grad if received.grad is not None else torch.zeros_like(received)
            self._messages.send_gradient(own)

    def _run_weights(self, action: StageAction, alone: bool) -> None:
        assert self._weights is not None and self.engine is not None
        place = action.micro_batch, action.block
        if alone:
            self.engine.note_waiting(self._weights.nbytes(place))
        self._weights.compute(place)
        for gradient in self._gradients:
            gradient.add_up()


def _batch_size(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and the tokens of each row of a model call.

    Raises:
        ValueError: The call has no `input_ids` `[batch, tokens]`.
    """
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        given = "none" if ids is None else list(getattr(ids, "shape", ()))
        raise ValueError(
            f"pipeline_parallel_size: the model got input_ids {given}: give input_ids [batch, tokens], whose rows are "
            "divided into micro-batches"
        )
    return ids.shape[0], ids.shape[1]


def micro_batch_rows(rows: int, micro_batch_size: int) -> int:
    """Return the rows of each micro-batch of a batch.

    Args:
        rows: Rows of the batch.
        micro_batch_size: Rows of a micro-batch as the user gives them. If they do not divide those of the batch,
            micro-batches have the greatest common divisor of both.
    """
    return math.gcd(rows, micro_batch_size)


def micro_batches_of(arguments: Mapping[str, Any], micro_batch_size: int) -> list[dict[str, Any]]:
    """Return the arguments of a model call for each micro-batch.

    Each loss is divided by the labels of the whole batch.

    Args:
        arguments: The arguments by name, with `labels` `[batch, tokens]`.
        micro_batch_size: As for `micro_batch_rows`.

    Raises:
        ValueError: It is not known how to divide an argument.
    """
    rows, _ = _batch_size(arguments)
    arguments = {**arguments, _ITEM_COUNT: _item_count(arguments)}
    size = micro_batch_rows(rows, micro_batch_size)
    starts = range(0, rows, size)
    return [{name: _rows(name, value, rows, start, size) for name, value in arguments.items()} for start in starts]


def _rows(name: str, value: Any, rows: int, start: int, size: int) -> Any:
    """Return some rows of an argument, or all of it if it is no tensor or the same for all rows."""
    if name == _ITEM_COUNT or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        return value
    if not isinstance(value, Tensor) or name not in _BY_ROW or value.dim() < 2 or value.shape[0] not in (1, rows):
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"pipeline_parallel_size: it is not known how to divide the argument {name} {given} of the "
            f"model into micro-batches: give {', '.join(_BY_ROW)} [batch, tokens] only, or set pipeline_parallel_size=1"
        )
    return value if value.shape[0] < rows else value[start : start + size]


def _item_count(arguments: Mapping[str, Any]) -> Tensor:
    """Return the number by which losses are divided, an fp32 scalar."""
    given: Tensor | None = arguments.get(_ITEM_COUNT)
    if given is not None:
        return given
    shifted = arguments.get("shift_labels")
    targets = arguments["labels"][..., 1:] if shifted is None else shifted
    ignored = arguments.get("ignore_index", IGNORED)
    # A batch without any label has loss 0, not 0 / 0.
    return (targets != ignored).sum().clamp(min=1).to(torch.float32)


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
        self._run: _PipelinedModel | None = None
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

    def run_of(self, module: nn.Module) -> tuple[nn.Module, _PipelinedModel]:
        """Return the model inside of a divided module, and what is to be called in place of its forward."""
        model = find_hugging_face(module)[0]
        forward: StageForward = getattr(model, STAGE)
        zero_stage = self._config.zero_stage
        gradients = self._gradients = gradient_places(module, reduced=zero_stage >= 2)
        self._run = _PipelinedModel(
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
        self, engine: _StageEngine, before_backward: Callable[[], None], drops_gradients: Callable[[], bool]
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
