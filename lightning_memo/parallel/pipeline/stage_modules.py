"""Which modules of a model belong to which stage of a pipeline, and what a stage keeps of the others."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from lightning_memo.parallel.batches.loss_arguments import takes_loss_arguments, why_loss_unfit
from lightning_memo.parallel.pipeline.call_order import before_layers, has_weights
from lightning_memo.parallel.pipeline.divide_layers import divide_layers
from lightning_memo.parallel.pipeline.stage_forward import AbsentLayer, AbsentModule, StageForward
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_text_model, select_stacks

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class StagedModel:
    """A model of transformers as a pipeline sees it.

    Attributes:
        model: The model.
        layers: Its repeated layers, in order.
        before: Modules with weights of their own that the model calls before the layers.
        after: Those that it calls behind the layers.
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
        after = [m for m in model.modules() if m not in placed and has_weights(m)]
        _check_parts(module, model, stack, in_layers, {*before, *after})
        return cls(model, stack, tuple(before), tuple(after))

    @property
    def tied(self) -> bool:
        """Whether a module before the layers and one behind them share a weight."""
        first = {id(p) for m in self.before for p in m.parameters(recurse=False)}
        return any(id(p) in first for m in self.after for p in m.parameters(recurse=False))

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
        counts = tuple(given) if given is not None else divide_layers(costs, every, after=head)
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
        absent |= {layer: (n, AbsentLayer(forward, layer, n)) for n, layer in enumerate(self.layers)}
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
            _empty(m, AbsentLayer(forward, m, len(self.layers)))
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

    def _absent(self, forward: StageForward, module: nn.Module, mixed: bool) -> AbsentModule:
        dtype = torch.bfloat16 if mixed else next(module.parameters()).dtype
        embeds = isinstance(module, nn.Embedding) or module is self._embedding()
        return AbsentModule(forward, module, dtype, embeds)

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
        if not what and not is_known and has_weights(m):
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
