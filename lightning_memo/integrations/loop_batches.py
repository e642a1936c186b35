"""Finds the batches of a training loop, and passes them on to the runtime."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.integrations.loop_run import LoopRun
from lightning_memo.loss.lazy_logits import LazyLogits
from lightning_memo.runtime.training_runtime import TrainingRuntime
from lightning_memo.utils.class_names import class_name


class LoopBatches:
    """Drives the runtime by what a loop calls: the model, a backward, and the optimizers.

    A batch begins with a forward of the model that builds a graph. It ends when all optimizers have stepped after its
    backward, or before the next forward after a backward. A batch may have several forwards, for example of chosen and
    of rejected answers. Forwards under `torch.no_grad()` belong to no batch.

    Args:
        model: The model, to which the engine is attached.
        layer: The first of its layers.
        optimizers: Its optimizers.
        runtime: The runtime of the run.
        run: The run.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Module,
        optimizers: Sequence[Optimizer],
        runtime: TrainingRuntime,
        run: LoopRun,
    ) -> None:
        self._model, self._layer, self._optimizers, self._runtime, self._run = model, layer, optimizers, runtime, run
        self._attached = contextlib.ExitStack()
        self._is_open = False
        self._forwards = 0  # of this batch
        self._in_backward = self._had_backward = False
        self._retried_outside = False  # inside of `retried`, which runs all forwards of a batch again
        self._have_stepped: set[int] = set()

    def attach(self) -> None:
        """Begin to watch the model and the optimizers."""
        self._attached.callback(replace_forward(self._model, self._forward))
        self._attached.callback(self._layer.register_forward_pre_hook(_OwnHook(self._note_precision)).remove)
        for optimizer in self._optimizers:
            self._attached.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._attached.callback(optimizer.register_step_post_hook(self._after_step).remove)

    def detach(self) -> None:
        """Stop watching."""
        self._attached.close()

    def retried(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> Tensor:
        """Run the forward and the backward of a batch, again if they run out of device memory.

        Args:
            forward: Computes the loss.
            backward: Runs the backward of the loss.
        """
        self._begin()

        def attempt() -> Tensor:
            self._forwards, self._in_backward, self._had_backward = 0, False, False
            loss = self._runtime.forward(forward)
            self._runtime.backward(lambda: backward(loss))
            return loss

        self._retried_outside = True
        try:
            return self._runtime.step(attempt)
        finally:
            self._retried_outside = False

    def end(self) -> None:
        """End the present batch, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        self._end_backward()
        self._runtime.end_batch()

    # ---- what the loop calls

    def _forward(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _is_in_backward():
            return forward(*args, **kwargs)
        if not self._retried_outside:
            self._begin()
        self._forwards += 1
        if self._retried_outside or self._forwards > 1:  # the graphs of earlier forwards stay as they are
            output = forward(*args, **kwargs)
        else:
            output = self._runtime.forward(lambda: forward(*args, **kwargs))
        begin = weakref.WeakMethod(self._begin_backward)  # a graph may outlive the loop

        def begins(gradients: tuple[Tensor, ...]) -> None:
            if (call := begin()) is not None:
                call()

        for t in tree_leaves(output):
            t = t.hidden_states if isinstance(t, LazyLogits) else t
            if isinstance(t, Tensor) and t.grad_fn is not None:
                t.grad_fn.register_prehook(begins)
        return output

    def _note_precision(self, layer: nn.Module, inputs: Any) -> None:
        weight = next(layer.parameters(), None)
        if weight is not None:
            self._run.note_precision(weight.dtype, weight.device.type)

    def _begin(self) -> None:
        if self._had_backward:
            self.end()
        if not self._is_open:
            self._is_open, self._forwards = True, 0
            self._in_backward = self._had_backward = False
            self._have_stepped.clear()
            self._run.begin_batch()
            self._runtime.begin_batch()

    def _begin_backward(self) -> None:
        """Gradients have reached an output of the model."""
        if self._is_open and not self._in_backward:
            self._in_backward = self._had_backward = True
            self._runtime.before_backward(None)

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._runtime.after_backward()

    def _before_step(self, *_: Any) -> None:
        if not _is_in_backward():  # some optimizers step while gradients are computed
            self._end_backward()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._run.count_step()
        if self._run.step == 1 and self._run.batch == 0:
            rank_zero_warn(
                "lightning_memo: all layers are recomputed, because an optimizer has stepped, and "
                f"{class_name(self._model)}, which MemoLoop was given, has not been called with gradients: give it the "
                "module that the loop calls"
            )
        self._have_stepped.add(id(optimizer))
        stepped = len(self._have_stepped) == len(self._optimizers)
        if stepped and not _is_in_backward():
            self.end()


class _OwnHook:
    """A hook on a module that its copies, saved ones too, have without an effect."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., None]]]:
        return _OwnHook, (_ignored,)


def _ignored(*_: Any) -> None:
    """Does nothing."""


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
