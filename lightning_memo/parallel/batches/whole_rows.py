"""Divides the tokens of a Hugging Face model's forwards among processes that all call it with the same whole rows.

Note: [Whole rows in, whole rows out]
A loop of the user's own calls a model with whole rows, and may compute any loss from what it returns. All processes of
a group therefore make the same call. Tokens are divided where the text model begins, and its hidden states are gathered
where it ends. Each process then computes the same loss of whole rows.

The gradient of gathered hidden states is the sum over the processes, each of which has the whole one. Gradients of what
a process computes on its own tokens are therefore as many times too large as there are processes, and those of the head
are the whole ones. The mean over all processes, which DistributedDataParallel and FSDP2 take, is the gradient of one
process in both cases. That of whole `inputs_embeds` is averaged over the group in the backward, because nothing else
may do it.

A forward that computes no gradients in evaluation mode is not divided: each process may have rows of its own, or be the
only one that makes the call. Neither is a forward with a key-value cache, which generates text.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from lightning_memo.parallel.batches.gathered_tokens import GatheredTokens
from lightning_memo.parallel.batches.loss_arguments import RouterLosses
from lightning_memo.parallel.batches.packed_documents import DOCUMENT_ARGUMENTS
from lightning_memo.parallel.batches.shard_batch import (
    Batch,
    TextModelInputs,
    has_rows_of_tokens,
    shifted,
    token_tensor,
)
from lightning_memo.parallel.batches.token_layout import (
    CurrentLayout,
    TokenLayout,
    takes_attention_functions,
    why_positions_unknown,
)
from lightning_memo.utils.cache_names import CACHE_NAMES, given_cache
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_text_model
from lightning_memo.utils.retained_graph import first_derivative

LayoutOf = Callable[[Batch, Tensor | None, bool], TokenLayout]
_OF_LAYOUT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", *DOCUMENT_ARGUMENTS)


class WholeRows:
    """Divides the tokens of each forward of a model, and gathers the hidden states; see the note above.

    Args:
        model: The model that a loop trains. It contains one Hugging Face model.
        layers: Its repeated layers.
        current: Holds the layout of the running forward.
        router_losses: Computes load-balancing losses.
        group: The processes that share the tokens of a row, in the order of their context-parallel ranks.

    Attributes:
        text_model: The module whose tokens are divided.

    Raises:
        ValueError: The tokens of the model cannot be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        current: CurrentLayout,
        router_losses: RouterLosses,
        group: dist.ProcessGroup,
    ) -> None:
        hosts: list[Any] = find_hugging_face(model)
        if len(hosts) != 1:
            found = f"holds {len(hosts)} of them" if hosts else "holds none"
            raise ValueError(
                f"context_parallel_size divides the tokens of one model of transformers, and {class_name(model)} "
                f"{found}: train one, or set context_parallel_size=1"
            )
        host = hosts[0]
        if host.config.is_encoder_decoder:
            raise ValueError(f"{class_name(host)} has an encoder and a decoder: set context_parallel_size=1")
        if why := why_positions_unknown(host):
            raise ValueError(
                f"{class_name(host)} {why}, and would count the tokens that each process holds from 0: set "
                "context_parallel_size=1"
            )
        self._host, self._model = host, model
        self.text_model: nn.Module = find_text_model(model) or _innermost(host, layers)
        if not takes_attention_functions(self.text_model):
            raise ValueError(
                f"{class_name(self.text_model)} makes attention masks of all tokens itself, and loops divide all of a "
                "model: set context_parallel_size=1, or train it with MemoStrategy, which divides its layers"
            )
        self._current, self._router_losses, self._group = current, router_losses, group
        self._is_sharded = _averages_shards(model)
        self._running: nn.Module | None = None

    def attach(self, layout_of: LayoutOf, stack: contextlib.ExitStack) -> None:
        """Divide the tokens of all forwards until `stack` is closed.

        Args:
            layout_of: Returns the layout of a call's tokens, as :meth:`BatchSharder.layout_of` does. All processes of
                the group call it together.
            stack: Undoes everything when it is closed.
        """

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._running is None:
                self._running = module
                self._begin(module, args, kwargs, layout_of)

        def end(module: nn.Module, *_: Any) -> None:
            if self._running is module:
                self._running = None
                self._current.clear()
                self._router_losses.use(None)

        # A loss may call the text model without its head.
        for module in dict.fromkeys((self._host, self.text_model)):
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
        stack.callback(self.text_model.register_forward_pre_hook(self._average_embeds, with_kwargs=True).remove)
        stack.callback(TextModelInputs(self._current).attach(self.text_model))
        stack.callback(self.text_model.register_forward_hook(self._gather).remove)
        stack.callback(self._router_losses.attach(self._host))
        for module in dict.fromkeys((self.text_model, self._host)):
            stack.callback(module.register_forward_hook(self._gather_routers).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)

    def _begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layout_of: LayoutOf,
    ) -> None:
        given = _by_name(module, args, kwargs)
        trains, cached = torch.is_grad_enabled(), given_cache(given) is not None
        self._current.is_whole = not trains and (cached or not module.training)
        if self._current.is_whole:
            return
        if cached:
            raise ValueError(
                f"{class_name(module)} was called with a key-value cache and gradients, and no process has the keys of "
                "all tokens: leave the cache out (no prefix tuning), or set context_parallel_size=1"
            )
        if trains:
            self._check_averaged()
        batch = {name: given[name] for name in _OF_LAYOUT if given.get(name) is not None}
        self._current.layout, self._current.sharers = layout_of(batch, *_placing(given)), self._group
        self._router_losses.use(self._group)

    def _average_embeds(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _by_name(module, args, kwargs)
        embeds = given.get("inputs_embeds")
        if self._current.layout is None or embeds is None:
            return None
        return (), given | {"inputs_embeds": _AveragedGradient.apply(embeds, self._group)}

    def _check_averaged(self) -> None:
        """Check that gradients are averaged over all processes.

        Raises:
            ValueError: They are not, as far as is known.
        """
        wrapper = DistributedDataParallel._get_active_ddp_module()
        replicated = wrapper is not None and dist.get_world_size(wrapper.process_group) == dist.get_world_size()
        if not (self._is_sharded or replicated):
            raise ValueError(
                f"context_parallel_size={dist.get_world_size(self._group)}: each process has the gradients of its own "
                f"tokens, and nothing averages them over all {dist.get_world_size()} processes: wrap the model by "
                "DistributedDataParallel or fully_shard over all of them, and call what wraps it"
            )

    def _gather(self, text_model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        layout = self._current.layout
        if layout is None:
            return None
        tokens = GatheredTokens(layout, self._group)

        def whole(t: Tensor) -> Tensor:
            is_hidden = t.dim() == 3 and t.shape[1] == layout.local_tokens
            return tokens.whole(t, 1) if is_hidden else t

        if not isinstance(output, Mapping):
            return tree_map_only(Tensor, whole, output)
        for name in ("attentions", "pooler_output"):
            if output.get(name) is not None:
                raise ValueError(
                    f"{class_name(text_model)} returns {name}, which would be computed from this process's tokens: "
                    "leave them out, or set context_parallel_size=1"
                )
        # A cache has the keys of this process's tokens; the model's own loss sums router logits over the processes.
        kept = {name: value for name, value in output.items() if name not in CACHE_NAMES}
        return type(output)(
            **{k: v if k == "router_logits" else tree_map_only(Tensor, whole, v) for k, v in kept.items()}
        )

    def _gather_routers(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        layout = self._current.layout
        if self._running is not module or layout is None or not isinstance(output, Mapping):
            return None
        if output.get("router_logits") is None:
            return None
        tokens = GatheredTokens(layout, self._group)

        def whole(t: Tensor) -> Tensor:
            return tokens.whole(t.unflatten(0, (-1, layout.local_tokens)), 1).flatten(0, 1)

        return type(output)(**{**output, "router_logits": tree_map_only(Tensor, whole, output["router_logits"])})


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs


def _placing(given: Mapping[str, Any]) -> tuple[Tensor | None, bool]:
    """Return the targets of a call's tokens, if any, and whether nothing in it belongs to rows but tokens."""
    tokens, labels = token_tensor(given), given.get("labels")
    if tokens is None:
        return None, False
    has_targets = isinstance(labels, Tensor) and labels.shape == tokens.shape[:2]
    return shifted(labels) if has_targets else None, has_rows_of_tokens(given, *tokens.shape[:2])


def _innermost(host: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """Return the innermost model of transformers that holds the layers. A host may call it past the one around it."""
    models = [m for m in host.modules() if hasattr(m, "set_attn_implementation")]
    return next((m for m in reversed(models) if set(layers) <= set(m.modules())), host)


def _averages_shards(model: nn.Module) -> bool:
    """Return whether FSDP2 averages the gradients of all trained weights over all processes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return all(isinstance(p, DTensor) and p.device_mesh.size() == dist.get_world_size() for p in trained)


class _AveragedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        mean = gradient / dist.get_world_size(ctx.group)
        dist.all_reduce(mean, group=ctx.group)
        return mean, None
