"""The schedule "slice": the whole model runs on slice 1, then on slice 2, ..., and backward in reverse.

Nothing of the sequence's size but its tokens stays on the device. What follows the layers (norm, head, loss) is
differentiated at once, slice by slice: the loss is a sum over tokens, so its gradient needs no other slice. What the
backward needs of it is a gradient of the last layer's output, which waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.engine.attention.streamed_attention import StreamedAttention, StreamedUlysses
from lightning_memo.engine.layers.layer_run import LayerCall, LayerRun
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved.offload_group import Handle, Unit
from lightning_memo.engine.saved.parked_arguments import SliceArguments
from lightning_memo.engine.sequence.model_inputs import (
    IGNORED,
    check_sliceable,
    named_inputs,
    on_device,
    token_tensor,
    without_labels,
)
from lightning_memo.kernels import RngState
from lightning_memo.kernels.attention_kernel import sums_dtype
from lightning_memo.parallel.batches.positions import largest_position, packed_documents
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.parallel.zero_sharding import as_one_forward
from lightning_memo.planner.token_slices import TokenRange

if TYPE_CHECKING:
    from lightning_memo.engine.engine import Engine


@dataclass(slots=True)
class SliceOutput:
    """What the layers left of one slice.

    Attributes:
        run: The last layer's.
        token: Where the backward of the slice's layers begins, `[]`.
        hidden: The last layer's output, without history.
    """

    run: LayerRun
    token: Tensor
    hidden: Tensor


class SequenceRun:
    """A forward of the model slice by slice: which slice runs, and what attention knows of those before.

    Args:
        engine: Runs the layers.
        slices: Token ranges that cover the sequence.
        batch: Sequences.
    """

    def __init__(self, engine: Engine, slices: Sequence[TokenRange], batch: int) -> None:
        self.engine, self.slices, self.batch = engine, tuple(slices), batch
        self.index = 0
        self.output: SliceOutput | None = None
        self.all_arguments: list[SliceArguments] = []
        self._rng_state: RngState | None = None
        self._called: set[nn.Module] = set()
        self._cores: dict[nn.Module, list[StreamedAttention | StreamedUlysses]] = {}

    @property
    def tokens(self) -> int:
        return self.slices[-1].stop

    @property
    def slice(self) -> TokenRange:
        """The slice that runs."""
        return self.slices[self.index]

    @property
    def arguments(self) -> SliceArguments:
        """What the layers of the slice that runs share."""
        return self.all_arguments[self.index]

    def enter(self, call: LayerCall, memory: SlotMemory) -> None:
        """A layer is called on the slice that runs.

        Raises:
            ValueError: It was called before.
        """
        if len(self.all_arguments) == self.index:
            self.all_arguments.append(SliceArguments(memory, self.slice))
            self._called.clear()
        if call.layer in self._called or self.output is not None:
            raise ValueError(
                f'{type(call.layer).__name__} runs twice in a forward, or after the last layer: use schedule="layer"'
            )
        self._called.add(call.layer)
        self.arguments.add((call.args, call.kwargs))

    def capture_rng(self, device: torch.device) -> RngState:
        """The random state; one for all slices and layers where none draws."""
        self._rng_state = RngState.capture(device, self._rng_state)
        return self._rng_state

    def cores(self, layer: nn.Module) -> list[StreamedAttention | StreamedUlysses]:
        """The cores of a layer's attention calls, which all slices share."""
        return self._cores.setdefault(layer, [])


class SlicedModel:
    """Stands in for the forward of a causal language model of transformers that gets its labels.

    Args:
        engine: Runs the model's layers.
        longest: Most tokens of a slice.
    """

    def __init__(self, engine: Engine, longest: int) -> None:
        self._engine = engine
        self._longest = longest

    def __call__(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's output with the loss of all tokens, and nothing else.

        Raises:
            ValueError: The call has no labels, or asks for what needs all tokens at once.
        """
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Also a batch of a single slice: processes may have others, and reduce gradients in the same order.
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
        step = _Step(self._engine, forward, inputs)
        loss = _SliceBySlice.apply(step, torch.zeros((), device=self._engine.device, requires_grad=True), *tail)
        return step.output_type(loss=loss)


class _Step:
    """The forwards and backwards of one call of the model."""

    def __init__(self, engine: Engine, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        tokens = token_tensor(inputs)
        self._engine, self._forward = engine, forward
        self._inputs, self._count, self._factor = without_labels(inputs)
        self._labels, self._shifted = inputs.get("labels"), inputs.get("shift_labels")
        self._batch, length = tokens.shape[:2]
        self._layout = TokenLayout(
            length, documents=packed_documents(inputs, self._batch), largest_position=largest_position(inputs, length)
        )
        self._ends: list[tuple[LayerRun, Tensor, Unit, Handle]] = []
        self._arguments: list[SliceArguments] = []
        self.output_type: type[Any] = type(None)

    def forward(self, tail: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, and its gradient in what follows the layers."""
        loss: Tensor | None = None
        sums: list[Tensor | None] = [None] * len(tail)
        with self._engine.slice_by_slice(self._layout, self._batch) as sequence:
            for number, part in enumerate(sequence.slices):
                sequence.index = number
                with torch.enable_grad():
                    output = self._forward(**self._cut(part))
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
        """Differentiate the layers, last slice first."""
        while self._ends:
            run, token, unit, handle = self._ends.pop()
            for arguments in self._arguments[:-3:-1]:  # of this slice, and of the next one
                arguments.fetch()
            dy = unit.load(handle) * gradient
            unit.release()
            run.begin_output_gradient(dy)
            del dy
            torch.autograd.backward(token)
            self._arguments.pop().release()

    def _targets(self, part: TokenRange) -> Tensor:
        """The label of each of the slice's tokens' successors, `[batch, tokens]`; never built for all tokens."""
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
        """What the backward of a slice's layers needs leaves for the host."""
        assert run.memory is not None
        unit = self._engine.open_unit(run.memory, swap=True)
        handle = unit.put(gradient)
        if unit.checks is not None:
            unit.checks.note(handle, run.what("output gradient"))
        self._ends.append((run, token, unit, handle))
        unit.end_forward()
        arguments.leave()
        if self._arguments:
            self._arguments[-1].settle()  # the copies of the slice before have had a slice's time
        self._arguments.append(arguments)

    def _cut(self, part: TokenRange) -> dict[str, Any]:
        whole = self._layout.tokens

        def narrow(value: Any) -> Any:
            per_token = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == whole
            return value.narrow(1, part.start, part.tokens) if per_token else value

        inputs = {name: narrow(value) for name, value in self._inputs.items()}
        labels = self._targets(part).contiguous()  # losses of transformers view them
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = torch.arange(part.start, part.stop, device=self._engine.device)[None]
        # Without a mask, transformers looks for packed documents, which the layout knows, and the host waits for that.
        inputs["attention_mask"] = torch.ones((self._batch, part.tokens), dtype=torch.bool, device=self._engine.device)
        inputs |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": self._count}
        return on_device(self._engine.device, inputs)


class _SliceBySlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: _Step, anchor: Tensor, *tail: nn.Parameter) -> Tensor:
        loss, ctx.sums = step.forward(tail)
        ctx.step, ctx.dtypes = step, [p.dtype for p in tail]
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "a second backward through the same graph (retain_graph) is not supported; run the forward again"
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
    """Make sure that a slice's loss depends on its layers by the last one's output alone.

    Raises:
        ValueError: It does not.
    """
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in ("_GatherBackward", "_StoreBackward"):
            raise ValueError(
                "the model's loss takes more from its layers than the output of the last one, which no slice can "
                'compute by itself: use schedule="layer"'
            )
        waiting.extend(following for following, _ in node.next_functions)
