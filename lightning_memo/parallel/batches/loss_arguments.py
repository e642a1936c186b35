"""Passes the positions and loss arguments of a divided batch to a Hugging Face model, and shares its losses.

A process computes the loss of its own labels, and gradients are averaged over the processes. A function of the loss,
such as its square, has the right gradient only where it is taken at the loss of all labels.

Note: [Load-balancing losses]
The loss is a product of two sums over tokens: how often each expert is chosen, and how probable it is. It is therefore
not the mean of the losses of the parts of a batch. Each process computes both sums over its own tokens, and the sums,
not the router logits, are added over the processes: a few numbers, whatever the length.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memo.parallel.batches.token_layout import CurrentLayout, why_positions_unknown
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face
from lightning_memo.utils.replaced_functions import replaced

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
        layout = self._current.layout
        cut = layout is not None
        positions_cut = cut and self._current.text_model is None
        if layout is not None and why_unknown:
            raise ValueError(
                f"{class_name(model)} {why_unknown}, and would count the tokens that each process holds "
                f"from 0: train this model with {layout.how_to_compute_all}"
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


# What all modules of transformers call the function that computes the loss from the router logits.
_NAME = "load_balancing_loss_func"


class RouterLosses:
    """Replaces the functions that compute load-balancing losses, while a model's forward runs.

    Args:
        current: Holds the layout of the batch.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current
        self._group: dist.ProcessGroup | None = None

    def use(self, group: dist.ProcessGroup | None) -> None:
        """Set the processes that share the loss of the next step; `None` for one process."""
        self._group = group

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Watch the forwards of a Hugging Face model. Returns a function that undoes this."""
        functions = {home: getattr(home, _NAME) for home in _homes(model)}
        known = [home for home, function in functions.items() if _is_known(function)]
        foreign = not functions and not type(model).__module__.startswith("transformers.")
        unknown, running = foreign or len(known) < len(functions), contextlib.ExitStack()

        def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._group is None and self._current.layout is None:
                return
            if self._current.of_layers is not None and _asks_for_router_logits(model, kwargs):
                raise ValueError(
                    f"{class_name(model)} computes a loss from its router logits, and only its layers are divided, so "
                    "that each process has those of its own tokens: set output_router_logits=False"
                )
            # Text is generated token by token, and not by all processes alike.
            if not (torch.is_grad_enabled() or kwargs.get("labels") is not None):
                return
            if unknown and _asks_for_router_logits(model, kwargs):
                raise ValueError(
                    f"{class_name(model)} may compute a loss from its router logits, which this process would "
                    "compute over its own tokens: set output_router_logits=False, or train in one process"
                )
            for home in known:
                running.enter_context(replaced(home, _NAME, self._loss))

        def end(*_: Any) -> None:
            running.close()

        handles = [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(end, always_call=True),
        ]

        def undo() -> None:
            end()
            for handle in handles:
                handle.remove()

        return undo

    def _loss(
        self,
        own: Callable[..., Any],
        gate_logits: tuple[Tensor, ...] | None,
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        """Has the signature of the functions of transformers, behind the function itself."""
        if not isinstance(gate_logits, tuple):
            return 0
        mask = attention_mask if self._current.layout is None else self._mask(gate_logits[0])
        return balancing_loss(gate_logits, num_experts, top_k, mask, self._group)

    def _mask(self, logits: Tensor) -> Tensor | None:
        """Return which of this process's tokens are valid, `[batch, local tokens]`; `None` if all are.

        Raises:
            ValueError: The router logits are not those of the batch.
        """
        layout = self._current.layout
        mask = None if layout is None else layout.valid()
        if mask is None:
            return None
        if mask.numel() != logits[..., 0].numel():
            raise ValueError(
                f"a load-balancing loss got router logits {list(logits.shape)} for a batch of {mask.shape[0]} rows and "
                f"{mask.shape[1]} tokens on this process: call the model with the whole batch of the step, or set "
                "output_router_logits=False"
            )
        return mask.to(logits.device)


def balancing_loss(
    gate_logits: tuple[Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the load-balancing loss of transformers (Switch Transformer, equations 4 to 6) over several processes.

    Args:
        gate_logits: Router logits of each layer for this process's tokens, `[batch * tokens, experts]`.
        num_experts: Number of experts.
        top_k: Number of experts that a token is sent to.
        attention_mask: 1 for tokens that count, `[batch, tokens]`; `None` if all do.
        group: The processes. The mean of their gradients is the gradient of the loss.

    Returns:
        A scalar, the same on all processes.
    """
    device, sizes = gate_logits[0].device, (num_experts, num_experts, 1)
    # In fp32 also where new tensors are bf16 by default, which counts no more than 256 tokens.
    counts, probabilities, rows = (torch.zeros(n, dtype=torch.float32, device=device) for n in sizes)
    for logits in gate_logits:
        weights = torch.softmax(logits.to(device), dim=-1)
        chosen = weights.topk(top_k, dim=-1).indices
        counted = weights.new_ones(len(weights), dtype=torch.float32)
        if attention_mask is not None:
            counted = attention_mask.reshape(-1).to(counted)
        counts = counts.index_add(0, chosen.reshape(-1), counted.repeat_interleave(top_k))
        probabilities = probabilities + (weights.float() * counted[:, None]).sum(0)
        rows = rows + counted.sum()
    sums = torch.cat([counts, probabilities, rows])
    if group is not None:
        sums = sum_over_processes(sums, group)
    counts, probabilities, rows = sums.split(sizes)
    return (counts / rows * (probabilities / rows)).sum() * num_experts


def sum_over_processes(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over processes, all of which compute the same loss from it.

    Args:
        t: The tensor.
        group: The processes. The mean of their gradients is the gradient of the loss.
    """
    total: Tensor = _SumOverProcesses.apply(t, group)
    return total


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.processes = dist.get_world_size(group)
        total = t.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradients of parameters are averaged over the processes.
        return gradient * ctx.processes, None


def _homes(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's classes that have a function for the loss."""
    names = {kind.__module__ for m in model.modules() for kind in type(m).__mro__}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), _NAME)]


@functools.cache
def _is_known(function: Callable[..., Any]) -> bool:
    """Whether a function computes what `balancing_loss` computes."""
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=draw, device="cpu") for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], device="cpu")
    try:
        return all(
            torch.allclose(function(logits, 4, 2, m), balancing_loss(logits, 4, 2, m), rtol=1e-4) for m in (None, mask)
        )
    except Exception:  # another signature
        return False


def _asks_for_router_logits(model: Any, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_router_logits")
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked)
