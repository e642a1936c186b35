"""How processes share the tokens of a batch, and how each cuts its tokens into slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memo.artifacts.swap_plan import StoragePlan
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.modules.gathered_modules import GatheredModules, cached_by_identity, own_of, whole_of
from lightning_memo.engine.modules.layer_classes import RequestedSettings
from lightning_memo.engine.modules.layer_forward import read_call
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.recurrence import RecurrentStates
from lightning_memo.parallel.batches.gathered_tokens import GatheredTokens
from lightning_memo.parallel.batches.token_layout import CurrentLayout, TokenLayout, slice_multiple
from lightning_memo.parallel.context_parallel import ContextGroups
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner.token_slices import TokenRange, plan_of_alpha, slices_of


@dataclass(frozen=True)
class TokenSharing:
    """The processes that share the tokens of a batch with this one.

    Attributes:
        context: The processes that share the tokens of a sequence (context parallelism); `None` if none do.
        shards: Number of processes that share the tokens between the blocks of a layer (sequence parallelism).
        ranks: The processes that have to agree on an attention kernel; `None` if there is one process.
        current_layout: Holds the layout of the batch that the model is given.
    """

    context: ContextGroups | None = None
    shards: int = 1
    ranks: Ranks | None = None
    current_layout: CurrentLayout = field(default_factory=CurrentLayout)

    @functools.cached_property
    def gathered(self) -> GatheredModules:
        """The modules that run on the tokens of all processes."""
        return GatheredModules(self.context)

    @property
    def divided(self) -> bool:
        """Whether this process holds only some of the tokens of its sequences."""
        return self.context is not None or self.shards > 1

    @property
    def divides_now(self) -> bool:
        """Whether this process holds only some of the tokens in the running forward."""
        return self.divided and not self.current_layout.is_whole

    def read_call(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, LayerCall]:
        """Return a layer's input and the rest of its call.

        Raises:
            ValueError: The tokens of the input are not those of the batch that was divided.
        """
        x, call = read_call(layer, forward, args, kwargs, self.shards, self.current_layout.layout)
        if self.divided:
            check_tokens(call, x.shape, self.shards)
        forward = self.gathered.of(layer, forward)
        return x, replace(call, forward=forward, documents=self.current_layout.documents)

    def divide_call(
        self, run: Callable[..., Any], layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer on this process's tokens of its input, and gather its output, if layers are to be divided.

        Args:
            run: Runs the layer on some of the tokens.
            layer: The layer.
            forward: The layer's own forward.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        layout_of = self.current_layout.of_layers
        if layout_of is None:
            return run(layer, forward, *args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        x = next((t for t in tensors if t.dim() > 2 and t.is_floating_point()), None)
        if x is None or not torch.is_grad_enabled():  # a process may evaluate by itself
            return forward(*args, **kwargs)
        assert self.context is not None and self.context.everyone is not None
        tokens = GatheredTokens(layout_of(*x.shape[:2]), self.context.everyone)
        own = cached_by_identity(functools.partial(own_of, tokens=tokens, rows=x.shape[0]))
        with self.current_layout.of_layer(tokens.layout):
            arguments = tree_map(own, (args, kwargs))
            output = run(layer, forward, *arguments[0], **arguments[1])
        return tree_map(functools.partial(whole_of, tokens=tokens, rows=x.shape[0], is_output=True), output)

    def agreed(self, traits: LayerTraits, device: torch.device) -> LayerTraits:
        """Return the traits by which all processes that share experts run a layer in the same slices.

        Each slice sends tokens, and a process may be the only one whose layer gets a mask that does not allow slices.
        This is a collective of these processes, and does nothing if there are none.

        Args:
            traits: The traits of the layer on this process.
            device: The device of this process.
        """
        if self.ranks is None or not self.ranks.shares_experts:
            return traits
        found = torch.zeros(2, dtype=torch.int32, device=device)
        for number, why in enumerate((traits.unsliceable, traits.needs_full_attention)):
            if why:
                found[number].fill_(1)  # for a list of numbers, the host would wait
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.ranks.slice_group)
        whole, nest = found.tolist()
        if whole and not traits.unsliceable:
            why = "a process that shares experts with this one got arguments with which the layer cannot be cut"
            traits = replace(traits, unsliceable=why)
        if nest and not traits.needs_full_attention:
            why = "attention on a process that shares experts with this one needs all tokens at once"
            traits = replace(traits, needs_full_attention=why)
        return traits

    def handed_states(self, layout: TokenLayout | None) -> RecurrentStates:
        """Return the states of a layer call, which come from other processes if these share the tokens of a batch."""
        exchange = None if self.context is None or layout is None else self.context.states
        return RecurrentStates(exchange, by_slice=has_global_slices(layout))


class SequenceCutter:
    """Cuts the tokens of this process into slices.

    Args:
        sharing: The processes that share tokens.
        settings: The settings that were requested.

    Attributes:
        global_slices: Whether slices are ranges of the whole sequence, each of which context-parallel processes share.
        multiple: Slices begin at multiples of this many tokens.
    """

    def __init__(self, sharing: TokenSharing, settings: RequestedSettings) -> None:
        self.global_slices = sharing.context is not None and settings.may_stream
        self.multiple = 1
        if sharing.context is not None and self.global_slices:
            self.multiple = slice_multiple(sharing.context.ring_size, sharing.context.ulysses_size, sharing.shards)

    def slices(self, plan: StoragePlan, tokens: int, call: int = 0) -> tuple[TokenRange, ...]:
        """Return the slices of a layer call with `tokens` tokens by a plan."""
        return slices_of(plan, call, tokens, self.multiple)

    def recomputed(self, tokens: int, longest: int | None) -> tuple[TokenRange, ...]:
        """Return the slices of a step without a plan, which recomputes all tokens, at most `longest` at once."""
        return self.slices(plan_of_alpha(tokens, 0.0, slice_tokens=longest, multiple=self.multiple), tokens)


def check_tokens(call: LayerCall, shape: torch.Size, shards: int) -> None:
    """Check that a layer's input holds the tokens of the divided batch.

    Args:
        call: The layer's call.
        shape: Shape of its input.
        shards: Number of processes that share the tokens between the blocks of a layer.

    Raises:
        ValueError: The input belongs to another batch, or its tokens are in another dimension.
    """
    layout, tokens = call.layout, call.tokens * shards
    if layout is None or tokens != layout.local_tokens:
        if layout is not None and layout.local_tokens // shards in shape[2:-1]:
            raise ValueError(
                f"{call.name} gets hidden states {list(shape)}, and processes divide the tokens of [batch, tokens, "
                f"...] only: train this model with {layout.how_to_compute_all}"
            )
        expected = "no batch was" if layout is None else f"the last batch was divided into {layout.local_tokens}"
        raise ValueError(
            f"a forward of {tokens} tokens, but {expected}: where processes share tokens, run the model on the batches "
            "that its steps are given, and generate text in one process"
        )


def has_global_slices(layout: TokenLayout | None) -> bool:
    """Return whether the batch is laid out slice by slice, which layers without gradients have to follow, too."""
    return layout is not None and layout.global_slices and len(layout.bounds) > 1


def check_bounds(layout: TokenLayout | None, slices: Sequence[TokenRange]) -> None:
    """Check the slices of a layer against the layout. A batch that was laid out for other slices is in another order.

    Args:
        layout: The layout of the batch; `None` if no batch was divided.
        slices: The slices in which the layer runs.

    Raises:
        RuntimeError: The batch was laid out for other slices.
    """
    if layout is None or (layout.shards == 1 and not layout.global_slices):
        return
    laid_out = layout.bounds or (slices[-1].stop,)
    if laid_out != tuple(part.stop for part in slices):
        raise RuntimeError(
            f"the batch was laid out for slices that end at {laid_out}, but layers run slices that end at "
            f"{tuple(part.stop for part in slices)}: give every forward of a step the batch that the step was given"
        )
