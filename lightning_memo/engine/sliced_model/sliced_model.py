"""The schedule "slice": the whole model runs on slice 1, then on slice 2, and so on; the backward runs in reverse.

Apart from token ids, nothing on the device has the size of the sequence. The modules after the layers (norm, head,
loss) are differentiated in the forward, slice by slice: the loss is a sum over tokens, so that its gradient
needs no other slice. The backward needs only the gradient of the last layer's output, which waits on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.saved_tensors.offload_group import Handle, OffloadGroup
from lightning_memo.engine.saved_tensors.parked_arguments import SliceArguments
from lightning_memo.engine.sliced_model.model_inputs import (
    IGNORED,
    check_sliceable,
    documents_of,
    named_inputs,
    on_device,
    token_tensor,
    with_labels_by_row,
    without_labels,
)
from lightning_memo.engine.sliced_model.outside_layers import OutsideLayers
from lightning_memo.engine.sliced_model.sequence_run import SequenceRun
from lightning_memo.engine.sliced_model.sequence_services import SequenceServices
from lightning_memo.engine.sliced_model.sliced_layer_calls import slice_by_slice
from lightning_memo.kernels.attention_kernel import sums_dtype
from lightning_memo.parallel.batches.positions import largest_position
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.parallel.zero.fsdp_units import as_one_forward
from lightning_memo.planner.token_slices import TokenRange

_MESSAGE = (
    'with schedule="slice", the logits of a sequence are never held, but the training step uses them: use the loss of '
    'the output only, or schedule="layer"'
)


class SlicedModel:
    """Replaces the forward of a causal language model of transformers that gets its labels.

    Args:
        engine: Runs the model's layers.
        longest: Largest number of tokens in a slice.
    """

    def __init__(self, engine: SequenceServices, longest: int) -> None:
        self._engine = engine
        self._longest = longest
        self._outside = OutsideLayers(engine.layers)

    def __call__(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the model's output with only the loss of all tokens in it.

        Raises:
            ValueError: The call has no labels, or asks for something that needs all tokens at once.
        """
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Also for a batch of a single slice: other processes may have more, and all reduce gradients in the same order.
        with as_one_forward(self._engine.layers):
            return self._run(model, forward, args, kwargs)

    def _run(self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = named_inputs(forward, args, kwargs)
        tokens = token_tensor(inputs)
        if tokens.shape[1] <= self._longest:
            return forward(**on_device(self._engine.device, inputs))
        check_sliceable(model, inputs)
        tail = [p for p in model.parameters() if p.requires_grad]
        inner = {p for layer in self._engine.layers for p in layer.parameters()}
        tail = [p for p in tail if p not in inner]
        checked = functools.partial(self._run_slice, model, forward, tokens.shape[1])
        step = SlicedForward(self._engine, checked, inputs, documents_of(model, inputs, len(tokens)))
        anchor = torch.zeros((), device=self._engine.device, requires_grad=True).clone()
        loss = _SliceBySlice.apply(step, anchor, *tail)
        return step.output_type(loss=loss, logits=AbsentLogits())

    def _run_slice(self, model: nn.Module, forward: Callable[..., Any], tokens: int, **inputs: Any) -> Any:
        output = forward(**inputs)  # first, because layers say themselves what keeps them from running slice by slice
        self._outside.check(model, forward, inputs, tokens)
        return output


class SlicedForward:
    """The forwards and backwards of all slices in one call of the model.

    Args:
        engine: Runs the model's layers.
        forward: The model's own forward.
        inputs: The arguments of the call by name.
        documents: Where the documents of each row start; `None` if rows are not packed.

    Attributes:
        output_type: The type of the model's output.
    """

    def __init__(
        self,
        engine: SequenceServices,
        forward: Callable[..., Any],
        inputs: dict[str, Any],
        documents: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        tokens, inputs = token_tensor(inputs), with_labels_by_row(inputs)
        self._engine, self._forward = engine, forward
        self._inputs, self._count, self._factor = without_labels(inputs)
        self._labels, self._shifted = inputs.get("labels"), inputs.get("shift_labels")
        self._batch, length = tokens.shape[:2]
        self._layout = TokenLayout(length, documents=documents, largest_position=largest_position(inputs, length))
        self._ends: list[tuple[LayerRun, Tensor, OffloadGroup, Handle]] = []
        self._arguments: list[SliceArguments] = []
        self.output_type: type[Any] = type(None)

    def forward(self, tail: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and the gradients of the parameters after the layers."""
        loss: Tensor | None = None
        sums: list[Tensor | None] = [None] * len(tail)
        with slice_by_slice(self._engine, self._layout, self._batch) as sequence:
            for number, part in enumerate(sequence.slices):
                sequence.index = number
                with torch.enable_grad():
                    output = self._forward(**self.inputs_of(part))
                    hidden, token, run = self._end_of_layers(sequence)
                    _refuse_other_losses(output.loss)
                    own, *gradients = torch.autograd.grad(output.loss, [hidden, *tail], allow_unused=True)
                self._keep(run, token, own, sequence.arguments)
                self.output_type = type(output)
                loss = output.loss.detach() if loss is None else loss + output.loss.detach()
                for n in reversed(range(len(tail))):
                    sums[n] = _add(sums[n], gradients.pop())
                del output, hidden, token, run, own  # logits of one slice at a time
        assert loss is not None
        return loss.mul_(self._factor), sums

    def backward(self, gradient: Tensor) -> None:
        """Run the backward of the layers, last slice first."""
        while self._ends:
            run, token, group, handle = self._ends.pop()
            for arguments in self._arguments[:-3:-1]:  # of this slice, and of the next one
                arguments.fetch()
            dy = group.load(handle) * gradient
            group.release()
            run.begin_output_gradient(dy)
            del dy
            torch.autograd.backward(token)
            self._arguments.pop().release()

    def _targets(self, part: TokenRange) -> Tensor:
        """Return the labels of the slice, shifted, `[batch, tokens]`. They are never built for all tokens."""
        if self._shifted is not None:
            return self._shifted[:, part.start : part.stop]
        assert self._labels is not None
        following = self._labels[:, part.start + 1 : part.stop + 1]
        return F.pad(following, (0, part.tokens - following.shape[1]), value=IGNORED)

    def _end_of_layers(self, sequence: SequenceRun) -> tuple[Tensor, Tensor, LayerRun]:
        output, sequence.output = sequence.output, None
        if output is None:
            raise ValueError(
                'schedule="slice" needs every layer to run in each forward: train this model with schedule="layer"'
            )
        return output.hidden, output.token, output.run

    def _keep(self, run: LayerRun, token: Tensor, gradient: Tensor, arguments: SliceArguments) -> None:
        """Start moving what the backward of a slice's layers needs to the host."""
        group = self._engine.offload_groups.open(run.storage.memory, swap=True)
        handle = group.put(gradient)
        self._ends.append((run, token, group, handle))
        group.end_forward()
        arguments.leave()
        if self._arguments:
            self._arguments[-1].settle()  # the copies of the earlier slice had the time of a slice
        self._arguments.append(arguments)

    def inputs_of(self, part: TokenRange) -> dict[str, Any]:
        """Return the model's inputs for a slice, on the device."""
        whole = self._layout.tokens

        def narrow(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != whole:
                return value
            of_slice = value.narrow(1, part.start, part.tokens)
            # Layers get views of it, which a recomputation reads; see Note: [Values that are read later].
            return of_slice.clone() if value.device == self._engine.device else of_slice

        inputs = {name: narrow(value) for name, value in self._inputs.items()}
        labels = self._targets(part).contiguous()  # losses of transformers view them
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = torch.arange(part.start, part.stop, device=self._engine.device)[None]
        # Without a mask, transformers looks for packed documents, for which the host would wait; the layout knows them.
        inputs["attention_mask"] = torch.ones((self._batch, part.tokens), dtype=torch.bool, device=self._engine.device)
        inputs |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": self._count}
        return on_device(self._engine.device, inputs)


class _SliceBySlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: SlicedForward, anchor: Tensor, *tail: nn.Parameter) -> Tensor:
        loss, ctx.sums = step.forward(tail)
        ctx.step, ctx.dtypes, ctx.anchor = step, [p.dtype for p in tail], anchor.grad_fn
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if not torch._C._will_engine_execute_node(ctx.anchor):
            raise RuntimeError(
                'schedule="slice" computes all gradients in one backward(), and none for torch.autograd.grad or '
                'backward(inputs=...): call loss.backward(), or use schedule="layer"'
            )
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "a second backward through the same graph (retain_graph) is not supported: sum the losses, or run a "
                "forward for each"
            )
        ctx.step.backward(gradient)
        scaled = []
        for dtype in reversed(ctx.dtypes):
            total = sums.pop()
            scaled.append(None if total is None else total.mul_(gradient).to(dtype))
        return None, None, *reversed(scaled)


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if part is None:
        return total
    return part.to(sums_dtype(part), copy=True) if total is None else total.add_(part)


def _refuse_other_losses(loss: Tensor) -> None:
    """Check that a slice's loss depends on its layers only through the output of the last one.

    Raises:
        ValueError: The loss depends on another output.
    """
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in ("_GatherBackward", "_StoreBackward"):
            raise ValueError(
                "the model's loss depends on other outputs of its layers than the last one, which no slice can "
                'compute by itself: use schedule="layer"'
            )
        waiting.extend(following for following, _ in node.next_functions)


class AbsentLogits:
    """Raises a `ValueError` wherever it is used."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols that this has not
            raise AttributeError(name)
        raise ValueError(_MESSAGE)

    def __getitem__(self, index: object) -> NoReturn:
        raise ValueError(_MESSAGE)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise ValueError(_MESSAGE)
