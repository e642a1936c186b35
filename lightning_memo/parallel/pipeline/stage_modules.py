"""Divides the modules of a model over the stages of a pipeline, runs them there, and gathers all weights again.

Note: [How a stage runs the model's own forward]
Each stage calls the forward of the whole model. Modules of other stages have lost their weights, and have forwards of
this file. Layers before those of the stage return their input, in a tuple if the layers of the model return one, which
the stage before says, and embeddings return NaN of the right shape. The first
layer of the stage gets what the stage before has sent in place of its input. The first layer behind those of the stage
ends the forward: its input is sent to the next stage. Masks and positions are thus computed on each stage by the model.
If a stage has several blocks of layers, a forward runs one of them. Own modules before this block are replaced for as
long as the forward runs, by stand-ins that do what those of other stages do. A forward that does anything else with
what other stages compute is refused, or gives NaN.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from lightning_memo.kernels.rng_state import RngState
from lightning_memo.parallel.batches.loss_arguments import takes_loss_arguments, why_loss_unfit
from lightning_memo.parallel.ranks import gather
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_text_model, select_stacks


class StageEndError(Exception):
    """Ends the forward of a model behind the last layer of a stage.

    Attributes:
        hidden: The input of the first layer of the next stage.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the forward of the stage is over")
        self.hidden = hidden


class StageForward:
    """The forward of a micro-batch on one stage.

    Args:
        model: Name of the model, for messages.
        starts: Number of the first layer of each block of layers of the stage.

    Attributes:
        returned: Number of values in the tuple that the layers of the model return; 0 if they return hidden states
            alone.
    """

    def __init__(self, model: str, starts: Sequence[int]) -> None:
        self._model, self._starts = model, starts
        self._start = starts[0]
        self._runs = self._in_layers = False
        self._stand_ins: list[tuple[int, nn.Module, str, nn.Module]] = []
        self._received: Tensor | None = None
        self.returned = 0

    @property
    def blocks(self) -> int:
        """Number of blocks of layers of the stage."""
        return len(self._starts)

    def add_stand_in(self, number: int, parent: nn.Module, name: str, stand_in: nn.Module) -> None:
        """Add what replaces a child of a module in forwards of blocks behind it.

        Args:
            number: Number of the child among the layers; -1 for a module before them.
            parent: The module.
            name: Name of the child in it.
            stand_in: What replaces it.
        """
        self._stand_ins.append((number, parent, name, stand_in))

    @contextlib.contextmanager
    def running(self, received: Tensor | None, block: int) -> Iterator[None]:
        """Within this context the model's forward runs.

        Args:
            received: What the stage before has sent; `None` for the first block of all.
            block: Number of the block of layers that runs.
        """
        self._runs, self._in_layers, self._received = True, False, received
        self._start = self._starts[block]
        replaced: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for number, parent, name, stand_in in self._stand_ins if block > 0 else ():
                if number < self._start:
                    replaced.append((parent, name, parent.get_submodule(name)))
                    parent._modules[name] = stand_in
            yield
        finally:
            for parent, name, module in replaced:
                parent._modules[name] = module
            self._runs, self._received = False, None

    def is_behind(self, number: int) -> bool:
        """Return whether a layer, by its number, comes behind the first one of the block that runs."""
        return number > self._start

    def before_layers(self, module: nn.Module) -> Tensor:
        """Return what the stage before has sent, where a module of an earlier stage is called.

        Raises:
            ValueError: The module is called by itself, or behind the layers of this stage.
        """
        self._check_runs(module)
        if self._in_layers or self._received is None:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(module)} of an earlier stage is called behind the layers of this "
                f"stage, as {self._model} calls it more than once, or runs its layers in another order: set "
                "pipeline_parallel_size=1"
            )
        return self._received

    def end(self, module: nn.Module, hidden: Any) -> None:
        """End the forward, where the first layer of the next stage is called.

        Raises:
            StageEndError: Always, unless something is wrong.
            ValueError: The layer is called by itself, or before the layers of this stage, or with no hidden states.
        """
        self._check_runs(module)
        if not self._in_layers or not isinstance(hidden, Tensor) or hidden.dim() != 3:
            given = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ValueError(
                f"pipeline_parallel_size: {class_name(module)} of a later stage got {given} in place of the hidden "
                f"states [batch, tokens, hidden] of this stage's layers, as {self._model} computes something else "
                "before or between its layers: set pipeline_parallel_size=1"
            )
        raise StageEndError(hidden)

    def enter_layers(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the first layer of the stage what the stage before has sent: a hook before its forward.

        Raises:
            ValueError: The layer is called by itself or twice, or gets other tensors that are computed from weights.
        """
        self._check_runs(layer)
        (given, *others), rest = args or (kwargs.get("hidden_states"),), kwargs
        if self._in_layers or not isinstance(given, Tensor) or (args == () and "hidden_states" not in kwargs):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} is called more than once in a forward of {self._model}, "
                "or gets no hidden states: set pipeline_parallel_size=1"
            )
        self._in_layers = True
        beside = tree_leaves((others, {name: value for name, value in rest.items() if name != "hidden_states"}))
        if any(isinstance(t, Tensor) and t.requires_grad for t in beside):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} gets tensors beside its hidden states that are computed "
                f"from weights of {self._model}, and stages send hidden states only: set pipeline_parallel_size=1"
            )
        if self._received is None:
            return None
        if given.shape != self._received.shape:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} would get {list(given.shape)} in place of the "
                f"{list(self._received.shape)} that the stage before has sent, as layers of {self._model} return more "
                "than hidden states: set pipeline_parallel_size=1"
            )
        if args:
            return (self._received, *others), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def leave_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note what layers return: a hook behind the first one of the stage.

        Raises:
            ValueError: They return other tensors than hidden states, too, or neither a tensor nor a tuple.
        """
        if not isinstance(output, (Tensor, tuple)):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} returns a {type(output).__name__}, and layers of other "
                "stages return hidden states alone or in a tuple: set pipeline_parallel_size=1"
            )
        others = output[1:] if isinstance(output, tuple) else ()
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(others)):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} returns other tensors beside its hidden states, and "
                "stages send hidden states only: set pipeline_parallel_size=1"
            )
        self.returned = len(output) if isinstance(output, tuple) else 0

    def as_returned(self, hidden: Any) -> Any:
        """Return hidden states as the layers of the model do."""
        return (hidden, *[None] * (self.returned - 1)) if self.returned else hidden

    def _check_runs(self, module: nn.Module) -> None:
        if not self._runs:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(module)} is called by itself, or in a copy of the model, and "
                f"stages have parts of {self._model} only: call the model that is trained with labels, and take its "
                "loss"
            )


class _AbsentModule:
    """The forward of a module of an earlier stage that is no layer: NaN for an embedding, the input for others.

    Args:
        forward: The forward of the stage.
        module: The module.
        dtype: Type in which the module computes.
        embeds: Whether it is an embedding.
    """

    def __init__(self, forward: StageForward, module: nn.Module, dtype: torch.dtype, embeds: bool) -> None:
        self._forward, self._module, self._dtype, self._embeds = forward, module, dtype, embeds

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        received = self._forward.before_layers(self._module)
        if not self._embeds:
            return x
        # Gradients tell what is computed from an embedding and is no hidden state.
        nan = torch.full((), torch.nan, dtype=self._dtype, device=received.device)
        return nan.requires_grad_(torch.is_grad_enabled()).expand(received.shape)


class _AbsentLayer:
    """The forward of a layer of another stage. It returns its input, or ends the forward behind the layers of this one.

    Args:
        forward: The forward of the stage.
        module: The layer, or a module behind all layers.
        number: Its number among the layers.
    """

    def __init__(self, forward: StageForward, module: nn.Module, number: int) -> None:
        self._forward, self._module, self._number = forward, module, number

    def __call__(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._forward.is_behind(self._number):
            self._forward.end(self._module, hidden_states)
        self._forward.before_layers(self._module)
        return self._forward.as_returned(hidden_states)


_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

STAGE = "_lightning_memo_stage"
"""Attribute of a model that has lost the weights of other stages: the state of its forward."""

_TRIED_TOKENS = 2  # in the forward that finds the modules before the layers


@dataclass(frozen=True)
class StagedModel:
    """A model of transformers as a pipeline sees it.

    Attributes:
        model: The model.
        layers: Its repeated layers, in order.
        before: Modules with weights of their own that the model calls before the layers.
        after: Modules with weights of their own that the model calls behind the layers.
    """

    model: nn.Module
    layers: tuple[nn.Module, ...]
    before: tuple[nn.Module, ...]
    after: tuple[nn.Module, ...]

    @classmethod
    def of(cls, module: nn.Module, layers: str | Sequence[str] | None) -> StagedModel:
        """Return the model inside of a module.

        Args:
            module: The module that is trained.
            layers: As the setting `layers` of the strategy.

        Raises:
            ValueError: The module has parts that cannot be assigned to stages.
        """
        hosts = find_hugging_face(module)
        if len(hosts) != 1 or not takes_loss_arguments(module) or find_text_model(module) is not None:
            held = why_loss_unfit(module) or f"{class_name(module)} holds {', '.join(map(class_name, hosts)) or 'none'}"
            raise ValueError(
                "pipeline_parallel_size divides one causal language model of transformers whose loss takes "
                f"num_items_in_batch, and {held}: set pipeline_parallel_size=1"
            )
        model = hosts[0]
        stack = select_stacks(module, layers, alone=True)[0].layers
        in_layers = {m for layer in stack for m in layer.modules()}
        before = before_layers(model, stack)
        placed = in_layers.union(before)
        after = [m for m in model.modules() if m not in placed and _has_weights(m)]
        _check_parts(module, model, stack, in_layers, {*before, *after})
        return cls(model, stack, tuple(before), tuple(after))

    def divide(self, stages: int, blocks: int, given: Sequence[int] | None) -> tuple[int, ...]:
        """Return the number of layers of each block, in the order in which a micro-batch passes through them.

        Without numbers, layers are divided by their weights, each of which is a multiplication for each token. The
        weights behind the layers (the head) count for the last block; an embedding costs nothing.

        Args:
            stages: Number of stages.
            blocks: Number of blocks of each stage.
            given: The numbers that the user gives; `None` to divide by cost.

        Raises:
            ValueError: There are more blocks than layers, other numbers are given, or a stage has nothing to train.
        """
        count, every = len(self.layers), stages * blocks
        if given is not None and (len(given) != every or sum(given) != count):
            raise ValueError(
                f"pipeline_layers={list(given)} does not divide the {count} layers of {class_name(self.model)} over "
                f"pipeline_parallel_size={stages} x virtual_pipeline_size={blocks}: give {every} numbers whose sum is "
                f"{count}, or None"
            )
        if every > count:
            raise ValueError(
                f"pipeline_parallel_size={stages} x virtual_pipeline_size={blocks} is more than the {count} layers of "
                f"{class_name(self.model)}: give at most {count} blocks of layers"
            )
        head = float(sum(p.numel() for m in self.after for p in m.parameters(recurse=False)))
        costs = [float(sum(p.numel() for p in layer.parameters())) for layer in self.layers]
        counts = tuple(given) if given is not None else stage_layer_counts(costs, every, after=head)
        self._check_trained(stages, counts)
        return counts

    def _check_trained(self, stages: int, counts: Sequence[int]) -> None:
        starts = [0, *itertools.accumulate(counts)]
        parts: list[list[nn.Module]] = [[] for _ in range(stages)]
        for block, (a, b) in enumerate(itertools.pairwise(starts)):
            parts[block % stages] += self.layers[a:b]
        layers = [len(part) for part in parts]
        parts[0] += self.before
        parts[-1] += self.after
        trained = [any(p.requires_grad for m in part for p in m.parameters()) for part in parts]
        if any(trained) and not all(trained):
            stage = trained.index(False)
            raise ValueError(
                f"pipeline_parallel_size={stages}: stage {stage}, with {layers[stage]} layers of "
                f"{class_name(self.model)}, has no weights that are trained, and optimizers need some: give "
                "pipeline_layers so that each stage has some, or set fewer stages"
            )

    def keep(self, stage: int, stages: int, counts: Sequence[int], mixed: bool) -> StageForward:
        """Take the weights of other stages out of the model.

        Args:
            stage: Number of the stage that is kept.
            stages: Number of stages.
            counts: Number of layers of each block of all stages.
            mixed: Whether the model computes in bf16 with fp32 weights.
        """
        starts = [0, *itertools.accumulate(counts)]
        forward = StageForward(class_name(self.model), starts[stage:-1:stages])
        before = self._called_before()
        absent: dict[nn.Module, tuple[int, Any]] = {m: (-1, self._absent(forward, m, mixed)) for m in before}
        absent |= {layer: (n, _AbsentLayer(forward, layer, n)) for n, layer in enumerate(self.layers)}
        own = {layer for block in range(stage, len(counts), stages) for layer in self._block(starts, block)}
        own |= {*before} if stage == 0 else set()
        if forward.blocks > 1:
            for parent, name, m in [(p, name, m) for p in self.model.modules() for name, m in p.named_children()]:
                if m in own:
                    number, its_forward = absent[m]
                    forward.add_stand_in(number, parent, name, _stand_in(m, its_forward))
        for m, (_, its_forward) in absent.items():
            if m not in own:
                _empty(m, its_forward)
        for m in self.after if stage < stages - 1 else ():
            _empty(m, _AbsentLayer(forward, m, len(self.layers)))
        for start in starts[stage:-1:stages]:
            self.layers[start].register_forward_pre_hook(forward.enter_layers, with_kwargs=True)
            self.layers[start].register_forward_hook(forward.leave_layer)
        return forward

    def _called_before(self) -> list[nn.Module]:
        """Return what the model calls before its layers: an embedding with adapters is one module."""
        embedding = self._embedding()
        inside = set() if embedding is None else set(embedding.modules())
        return [*dict.fromkeys(embedding if m in inside else m for m in self.before)]

    def _embedding(self) -> nn.Module | None:
        host: Any = self.model
        with contextlib.suppress(NotImplementedError):  # transformers does not know all models' embeddings
            embedding: nn.Module = host.get_input_embeddings()
            return embedding
        return None

    def _absent(self, forward: StageForward, module: nn.Module, mixed: bool) -> _AbsentModule:
        dtype = torch.bfloat16 if mixed else next(module.parameters()).dtype
        embeds = isinstance(module, nn.Embedding) or module is self._embedding()
        return _AbsentModule(forward, module, dtype, embeds)

    def _block(self, starts: Sequence[int], block: int) -> tuple[nn.Module, ...]:
        return self.layers[starts[block] : starts[block + 1]]


def _check_parts(
    module: nn.Module, model: nn.Module, stack: Sequence[nn.Module], in_layers: set[nn.Module], around: set[nn.Module]
) -> None:
    """Refuse weights that belong to no stage, or to several.

    Raises:
        ValueError: There are such weights.
    """
    users = Counter(p for layer in stack for p in set(layer.parameters()))
    shared = any(count > 1 for count in users.values()) or any(p in users for m in around for p in m.parameters(False))
    what = "weights that several layers use" if shared else ""
    # PEFT's trainable tokens of a tied embedding: the head has the module of the embedding.
    places = Counter(m for _, m in model.named_modules(remove_duplicate=False) if m in around)
    if not what and (twice := [m for m, count in places.items() if count > 1]):
        name = next(name for name, m in module.named_modules() if m is twice[0])
        what = f"weights in {name} that two modules have"
    for name, m in module.named_modules():
        is_known = m in in_layers or (m in around and in_layers.isdisjoint(m.modules()))
        if not what and not is_known and _has_weights(m):
            what = f"weights in {name or class_name(m)}"
    if what:
        raise ValueError(
            f"pipeline_parallel_size: {class_name(module)} has {what}, which belong to no stage: keep weights before, "
            f"in or behind the layers of {class_name(model)}, or set pipeline_parallel_size=1"
        )


def _stand_in(module: nn.Module, forward: Any) -> nn.Module:
    """Return a module with the attributes of another one, without weights, children and hooks, and another forward."""
    stand_in = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules", *_HOOKS):
        setattr(stand_in, table, type(getattr(module, table))())
    stand_in.forward = forward
    return stand_in


def _empty(module: nn.Module, forward: Any) -> None:
    """Take all weights and buffers out of a module, and give it another forward."""
    for m in module.modules():
        for table in (m._parameters, m._buffers):
            for name in table:
                table[name] = None
    module.forward = forward


def stage_layer_counts(costs: Sequence[float], stages: int, after: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the stage that costs most costs as little as possible.

    Among divisions with the same largest cost, the one with the smallest sum of squared costs is taken.

    Args:
        costs: Cost of each layer, in order.
        stages: Number of stages, at most as many as layers.
        after: Cost of what the last stage computes after its layers.
    """
    layers = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + after * (stage == stages - 1)

    # Best division of the first `stop` layers over the first stages: largest cost, sum of squares, number of layers.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extended: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, counts) in best.items():
            for stop in range(start + 1, layers - (stages - 1 - stage) + 1):
                own = cost(stage, start, stop)
                candidate = (max(largest, own), squares + own * own, (*counts, stop - start))
                if stop not in extended or candidate < extended[stop]:
                    extended[stop] = candidate
        best = extended
    return best[layers][2]


class _LayersReachedError(Exception):
    """Ends a forward where it calls a layer."""


def before_layers(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with weights of their own that a model calls before its layers, in the order of registration.

    A forward of two tokens runs up to the first layer. Modules that it does not call come behind the layers, except for
    embeddings that are registered before them: a model may call those for some batches only (token types). If the
    model cannot run such a forward, all modules that are registered before the layers are returned. Forwards of a stage
    notice a wrong answer.

    Args:
        model: A causal language model of transformers.
        layers: Its layers.

    Raises:
        ValueError: The model changes what an embedding has returned, for which later stages have no memory.
    """
    in_layers = {m for layer in layers for m in layer.modules()}
    first = list(_registered_before(model, in_layers))
    called = _called_before(model, set(layers))
    if called is None:
        return first
    kept = called | {m for m in first if isinstance(m, nn.Embedding)}
    return [m for m in model.modules() if m in kept and m not in in_layers and _has_weights(m)]


def _has_weights(module: nn.Module) -> bool:
    """Return whether a module has weights of its own, outside of its children."""
    return any(True for _ in module.parameters(recurse=False))


def _registered_before(model: nn.Module, in_layers: set[nn.Module]) -> Iterator[nn.Module]:
    for m in model.modules():
        if m in in_layers:
            return
        if _has_weights(m):
            yield m


def _called_before(model: nn.Module, layers: set[nn.Module]) -> set[nn.Module] | None:
    """Return the modules that a forward calls before its first layer, with the children of modules without layers.

    `None` if the forward fails, or calls no layer.
    """
    called: set[nn.Module] = set()
    embedded: list[Tensor] = []

    def note(module: nn.Module, args: Any) -> None:
        if module in layers:
            raise _LayersReachedError
        if layers.isdisjoint(module.modules()):
            called.update(module.modules())

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.Embedding) and isinstance(output, Tensor):
            embedded.append(output)

    device = next(model.parameters()).device
    ids = torch.zeros(1, _TRIED_TOKENS, dtype=torch.long, device=device)
    handles = [register_module_forward_pre_hook(note), register_module_forward_hook(keep)]
    reached = False
    try:
        with torch.no_grad(), RngState.capture(device).replayed():
            model.forward(input_ids=ids)
    except _LayersReachedError:
        reached = True
    except Exception:  # models may need other arguments
        reached = False
    finally:
        for handle in handles:
            handle.remove()
    if not reached:
        return None
    _check_unchanged(model, embedded)
    return called


def _check_unchanged(model: nn.Module, embedded: Sequence[Tensor]) -> None:
    if any(t._version > 0 for t in embedded):
        raise ValueError(
            f"pipeline_parallel_size: {class_name(model)} changes the output of an embedding in place, and later "
            "stages have no such output: set pipeline_parallel_size=1"
        )


def is_stage(module: nn.Module) -> bool:
    """Return whether a module has lost the weights of other stages of a pipeline."""
    return any(hasattr(model, STAGE) for model in find_hugging_face(module))


def gather_stages(module: nn.Module) -> dict[str, Any] | None:
    """Gather the state of all stages in the host memory of the first process, one tensor at a time.

    Args:
        module: A module that is divided over stages. All processes call this.

    Returns:
        Full tensors by name on the first process; `None` on the others.
    """
    state = {name: value for name, value in get_model_state_dict(module).items() if isinstance(value, Tensor)}
    everyones = gather({name: (value.shape, value.dtype) for name, value in state.items()})
    owners: dict[str, int] = {}  # the first process that has a tensor
    for rank, shapes in enumerate(everyones):
        for name in shapes:
            owners.setdefault(name, rank)
    own = dist.get_rank()
    whole: dict[str, Tensor] = {}
    for name, value in state.items():
        full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        if owners[name] == own == 0:
            whole[name] = full.cpu()
        elif owners[name] == own:
            dist.send(full.contiguous(), dst=0)
    if own > 0:
        return None
    device = next(module.parameters()).device
    for name, owner in owners.items():
        if owner > 0:
            shape, dtype = everyones[owner][name]
            there = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(there, src=owner)
            whole[name] = there.cpu()
    return whole
