"""How processes share the tokens of a batch, and how each cuts its tokens into slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.layers.check_token_layout import check_tokens, divided_by_slices
from lightning_memo.engine.modules.layer_forward import read_call
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.modules.requested_settings import RequestedSettings
from lightning_memo.engine.recurrence.handed_states import HandedStates
from lightning_memo.parallel.batches.current_layout import CurrentLayout
from lightning_memo.parallel.batches.token_layout import TokenLayout, slice_multiple
from lightning_memo.parallel.context.context_groups import ContextGroups
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner.token_slices import TokenRange, slice_tokens_by_alpha


@dataclass(frozen=True, slots=True)
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

    @property
    def divided(self) -> bool:
        """Whether this process holds only some of the tokens of its sequences."""
        return self.context is not None or self.shards > 1

    def read_call(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, LayerCall]:
        """Return a layer's input and the rest of its call.

        Raises:
            ValueError: The tokens of the input are not those of the batch that was divided.
        """
        x, call = read_call(layer, forward, args, kwargs, self.shards, self.current_layout.layout)
        if self.divided:
            check_tokens(call.layout, call.tokens * self.shards)
        return x, call

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
        for number, why in enumerate((traits.why_whole, traits.why_nest)):
            if why:
                found[number].fill_(1)  # for a list of numbers, the host would wait
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.ranks.in_step)
        whole, nest = found.tolist()
        if whole and not traits.why_whole:
            why = "a process that shares experts with this one got arguments with which the layer cannot be cut"
            traits = replace(traits, why_whole=why)
        if nest and not traits.why_nest:
            why = "attention on a process that shares experts with this one needs all tokens at once"
            traits = replace(traits, why_nest=why)
        return traits

    def handed_states(self, layout: TokenLayout | None) -> HandedStates:
        """Return the states of a layer call, which come from other processes if these share the tokens of a batch."""
        exchange = None if self.context is None or layout is None else self.context.states
        return HandedStates(exchange, by_slice=divided_by_slices(layout))


class SequenceCutter:
    """Cuts the tokens of this process into slices.

    Args:
        sharing: The processes that share tokens.
        settings: The settings that were requested.

    Attributes:
        outside: Whether slices are ranges of the whole sequence, each of which context-parallel processes share.
    """

    def __init__(self, sharing: TokenSharing, settings: RequestedSettings) -> None:
        self.outside = sharing.context is not None and settings.may_stream
        self._multiple = 1
        if sharing.context is not None and self.outside:
            self._multiple = slice_multiple(sharing.context.ring_size, sharing.context.ulysses_size, sharing.shards)

    def cut(self, tokens: int, alpha: float, longest: int | None) -> tuple[TokenRange, ...]:
        """Return slices of `tokens` tokens, swapped up to `alpha`, each of at most `longest` tokens."""
        return slice_tokens_by_alpha(tokens, alpha, longest, self._multiple)
