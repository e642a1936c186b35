"""Passes the positions and loss arguments of a divided batch to a Hugging Face model, and shares its loss.

A process computes the loss of its own labels, and gradients are averaged over the processes. A function of the loss,
such as its square, has the right gradient only where it is taken at the loss of all labels.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memo.parallel.batches.positions import why_positions_unknown
from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face

_LOSS_ARGUMENTS = ("shift_labels", "num_items_in_batch")
_ADDED = ("position_ids", *_LOSS_ARGUMENTS)


class LossArguments:
    """Adds missing arguments of a model call from the batch of the step.

    A step that calls `self.model(input_ids=batch["input_ids"], labels=batch["labels"])` omits the entries that were
    added when the batch was divided. Positions would be wrong, labels would be shifted twice, and the loss would be
    weighted by this rank's tokens. In addition, FSDP2 casts floating-point arguments, but the item count must be exact.

    The loss that such a call returns has the value of the loss of all processes.

    Args:
        current: Holds the layout of the batch; it has one if the batch was divided by tokens.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current
        self._batch: Mapping[str, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._running: nn.Module | None = None
        self._shares_loss = False

    def use(self, batch: Any, group: dist.ProcessGroup | None = None) -> None:
        """Set the divided batch of the next step, or `None`, and the processes that share its loss, if several do."""
        self._batch = batch if isinstance(batch, Mapping) else {}
        self._group = group

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Complete the arguments of every call of `model`. Returns a function that undoes this."""
        complete = functools.partial(self._complete, why_positions_unknown(model))
        handles = [
            model.register_forward_pre_hook(complete, with_kwargs=True),
            model.register_forward_hook(self._finish, always_call=True),
        ]
        base = getattr(model, "base_model", model)
        if base is not model:
            handles.append(base.register_forward_pre_hook(self._check_base, with_kwargs=True))

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

    def _complete(
        self, why_unknown: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._running, self._shares_loss = model, False
        batch, labels = self._batch, kwargs.get("labels")
        cut = self._current.layout is not None
        positions_cut = cut and self._current.text_model is None
        if cut and why_unknown:
            raise ValueError(
                f"{class_name(model)} {why_unknown}, and would count the tokens that each process holds "
                "from 0: train this model with context_parallel_size=1 and sequence_parallel=False"
            )
        names = [name for name in _ADDED if batch.get(name) is not None]
        if labels is None or labels is not batch.get("labels"):
            names = [name for name in names if name == "position_ids" and positions_cut]
        if cut and labels is not None and labels is not batch.get("labels"):
            raise ValueError(
                f"{class_name(model)} got labels other than the batch's, which were shifted before the batch "
                'was divided: pass batch["labels"] unchanged, or compute the loss from logits and batch["shift_labels"]'
            )
        positions = kwargs.get("position_ids")
        if positions_cut and positions is not None and not _same(positions, batch.get("position_ids")):
            raise ValueError(
                f"{class_name(model)} got position_ids other than the batch's, which belong to this process's "
                "tokens: omit them, or let the loader put position_ids [batch, tokens] into the batch"
            )
        added = {name: batch[name] for name in names}
        self._shares_loss = self._group is not None and "num_items_in_batch" in added
        return args, kwargs | added | ({"labels": added["shift_labels"]} if "shift_labels" in added else {})

    def _finish(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._running, shares_loss = None, self._shares_loss
        if not shares_loss or output is None:  # after an exception
            return None
        assert self._group is not None
        return _with_whole_loss(output, self._group)

    def _check_base(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        divided = self._current.layout is not None and self._current.text_model is None
        if divided and self._running is None and kwargs.get("position_ids") is None:
            raise ValueError(
                f"{class_name(base)} was called by itself and got no position_ids, without which it would count the "
                'tokens that each process holds from 0: pass batch["position_ids"], and expect hidden states of this '
                "process's tokens; or call the whole model"
            )


def _same(positions: Tensor, of_batch: Tensor | None) -> bool:
    """Whether positions equal those of the batch, possibly expanded to all rows."""
    if of_batch is None or positions is of_batch:
        return True
    return positions.shape[-1] == of_batch.shape[-1] and bool((positions == of_batch).all())


def _with_whole_loss(output: Any, group: dist.ProcessGroup) -> Any:
    """Return the output of a Hugging Face model whose loss has the value of the mean over processes.

    Its gradient stays that of this process's loss.

    Args:
        output: Output with a `loss`, a tuple that begins with it, or the loss.
        group: The processes that share the loss; all of them call this, except for a loss without a gradient, which
            stays that of this process.
    """
    if isinstance(output, tuple):
        return _mean_over_processes(output[0], group), *output[1:]
    if isinstance(output, Tensor):
        return _mean_over_processes(output, group)
    if isinstance(getattr(output, "loss", None), Tensor):
        output.loss = _mean_over_processes(output.loss, group)
    return output


def _mean_over_processes(loss: Any, group: dist.ProcessGroup) -> Any:
    # A forward without gradients may run on one process only, to log something, for example.
    is_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad
    return _MeanOverProcesses.apply(loss, group) if is_loss else loss


class _MeanOverProcesses(torch.autograd.Function):
    """The mean of a number over processes, with the gradient of a process's own number."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = loss.to(torch.promote_types(loss.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=group)
        return (total / dist.get_world_size(group)).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def why_loss_unfit(model: nn.Module) -> str:
    """Return why a loss takes no loss arguments, as a clause; empty if the model's loss function is transformers'."""
    host: Any = next(iter(find_hugging_face(model)), None)
    if coefficient := _mean_beside_loss(host):
        return (
            f"{class_name(host)} adds a mean over tokens to its loss, without num_items_in_batch (z_loss_coefficient="
            f"{coefficient}; 0 leaves it out)"
        )
    function = None if host is None else host.loss_function  # of models without a known type: the one of causal models
    if function is None or str(getattr(function, "__module__", "")).startswith("transformers."):
        return ""
    missing = [name for name in _LOSS_ARGUMENTS if name not in inspect.signature(function).parameters]
    name = getattr(function, "__name__", class_name(function))
    if missing:
        return f"the loss function {name} of {class_name(host)} takes no {' and no '.join(missing)}"
    if _ignores_count(host, function):
        return f"the loss function {name} of {class_name(host)} does not divide by num_items_in_batch"
    return ""


def takes_loss_arguments(model: nn.Module) -> bool:
    """Whether `shift_labels` and `num_items_in_batch` reach the loss of a Hugging Face model inside `model`.

    They do in causal language models whose forward passes unknown arguments to the loss, also inside PEFT's wrappers.
    Some models accept them but compute the loss without transformers' loss function.
    """
    host: Any = next(iter(find_hugging_face(model)), None)
    if host is None or host.config.is_encoder_decoder:
        return False
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(host.forward).parameters.values())
    # Some models refuse counts from transformers' Trainer, and pass all arguments on.
    accepts = getattr(host, "accepts_loss_kwargs", True) or _passes_all_to_loss(host)
    return (
        passes_on
        and not why_loss_unfit(model)
        and any(map(_calls_loss_function, host.modules()))
        and accepts
        and set(_LOSS_ARGUMENTS) <= inspect.signature(host.loss_function).parameters.keys()
    )


def _ignores_count(host: Any, function: Callable[..., Any]) -> bool:
    """Whether the loss of some made up logits shows that a user's function does not divide by the number of labels."""
    vocabulary, count = host.config.get_text_config().vocab_size, 4
    random = torch.Generator("cpu").manual_seed(0)
    logits = torch.randn(1, count, vocabulary, generator=random, device="cpu", dtype=torch.float32)
    labels = torch.arange(count, device="cpu")[None] % vocabulary
    arguments = {"logits": logits, "labels": labels, "shift_labels": labels, "vocab_size": vocabulary}
    try:
        with torch.no_grad():
            one, half = (
                float(function(**arguments, num_items_in_batch=torch.tensor(float(n), device="cpu")))
                for n in (count, 2 * count)
            )
    except Exception:  # a function may need what it gets in a model, like tensors of its own on the device
        return False
    return not math.isclose(one, 2 * half, rel_tol=1e-3)


def _mean_beside_loss(host: Any) -> float:
    """The factor of a mean that a model of transformers adds to the value of its loss function, as Bamba may."""
    return float(getattr(host, "z_loss_coefficient", None) or 0.0)


def _calls_loss_function(module: nn.Module) -> bool:
    return any("loss_function" in forward.__code__.co_names for forward in _forwards(module))


def _passes_all_to_loss(module: nn.Module) -> bool:
    """Whether each call of the loss function in a module's own forward gets all keyword arguments."""
    forward = next(_forwards(module), None)
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(forward))) if forward is not None else None
    except OSError:
        return False  # made at run time
    nodes = [] if source is None else [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    calls = [call for call in nodes if isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function"]
    return bool(calls) and all(any(keyword.arg is None for keyword in call.keywords) for call in calls)


def _forwards(module: nn.Module) -> Iterator[Any]:
    forwards = (inspect.unwrap(kind.forward) for kind in type(module).__mro__ if "forward" in vars(kind))
    return (forward for forward in forwards if hasattr(forward, "__code__"))
