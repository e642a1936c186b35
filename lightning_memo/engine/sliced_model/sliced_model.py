"""`stream_from_host="model"`: the whole model runs on slice 1, then on slice 2, and so on; the backward in reverse.

First, the inputs of the model are checked: slices have to be able to compute with them. Apart from token ids, nothing
on the device has the size of the sequence. The modules after the layers (norm, head, loss) are differentiated in the
forward, slice by slice: the loss is a sum over tokens, so that its gradient needs no other slice. The backward needs
only the gradient of the last layer's output, which waits on the host.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine.fp8_modules import why_scaled_together
from lightning_memo.engine.layers.call_meter import EngineServices
from lightning_memo.engine.layers.layer_run import LayerRun, SequenceRun
from lightning_memo.engine.layers.token_sharing import SequenceCutter
from lightning_memo.engine.modules.layer_classes import RequestedSettings
from lightning_memo.engine.saved_tensors.call_arguments import SliceArguments
from lightning_memo.engine.saved_tensors.offload_group import Handle, OffloadGroup
from lightning_memo.engine.sliced_model.outside_layers import OutsideLayers
from lightning_memo.engine.slices.slice_schedules import LAYER_OUTPUTS
from lightning_memo.engine.token_locality.fake_run import hooked_parameter
from lightning_memo.kernels.attention_kernel import sums_dtype, to_device_async
from lightning_memo.parallel.batches.loss_arguments import takes_loss_arguments, why_loss_unfit
from lightning_memo.parallel.batches.packed_documents import separate_documents
from lightning_memo.parallel.batches.token_layout import (
    TokenLayout,
    largest_position,
    right_padded_lengths,
    why_positions_unknown,
)
from lightning_memo.parallel.fsdp_units import as_one_forward
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.cache_names import CACHE_NAMES, given_cache
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face
from lightning_memo.utils.user_errors import is_own_refusal

_IGNORED = -100


class SequenceServices(EngineServices, Protocol):
    """The part of the engine that a forward of the model slice by slice sees.

    Attributes:
        layers: The model's layers, in order.
        device: Where the layers run.
        settings: The settings that were requested.
        cutter: Cuts sequences into slices.
        swap: The plan; `None` before the first step.
        sequence: The forward that runs slice by slice; `None` if there is none.
    """

    layers: list[nn.Module]
    device: torch.device
    settings: RequestedSettings
    cutter: SequenceCutter
    swap: SwapPlan | None
    sequence: SequenceRun | None

    def profiles(self, batch: int, tokens: int) -> bool:
        """Return whether a step with such a batch is going to be profiled."""

    def reset(self) -> None:
        """Give back what an interrupted step still holds."""


def find_causal_lm(model: nn.Module) -> nn.Module:
    """Return the causal language model that runs slice by slice.

    Raises:
        ValueError: `model` contains none, or it cannot run slice by slice.
    """
    found = next(iter(find_hugging_face(model)), None)
    if found is None:
        raise ValueError(
            'stream_from_host="model" runs a causal language model of transformers slice by slice, but '
            f'{class_name(model)} has none: use stream_from_host="hidden"'
        )
    if not takes_loss_arguments(found):
        why = f"the forward of {class_name(found)} takes neither shift_labels nor num_items_in_batch"
        raise ValueError(
            'stream_from_host="model" shifts labels and counts tokens once for all slices, but '
            f'{why_loss_unfit(found) or why}: use stream_from_host="hidden"'
        )
    if why := why_positions_unknown(found):
        raise ValueError(
            f'stream_from_host="model" runs the model slice after slice, but {class_name(found)} {why}, and would '
            'count the tokens of each slice from 0: use stream_from_host="hidden"'
        )
    if why := why_scaled_together(found):
        raise ValueError(
            f'stream_from_host="model" runs the model slice after slice, but {why}: use stream_from_host="hidden"'
        )
    return found


@contextlib.contextmanager
def slice_by_slice(engine: SequenceServices, layout: TokenLayout, batch: int) -> Iterator[SequenceRun]:
    """Make the engine's layers run on one slice of the sequence after the other inside the context.

    Args:
        engine: Runs the layers.
        layout: The layout of the sequence.
        batch: Number of sequences.

    Raises:
        ValueError: An earlier forward waits for its backward.
    """
    if engine.calls.interrupted:
        engine.reset()
    if engine.calls:
        raise ValueError(
            'stream_from_host="model" takes one forward of the model before its backward, and there is another: run '
            'the backward first, or use stream_from_host="hidden"'
        )
    planned = None if engine.profiles(batch, layout.tokens) else engine.swap
    if planned is None:
        slices = engine.cutter.recomputed(layout.tokens, engine.settings.slice_tokens)
    else:
        slices = engine.cutter.slices(planned.storage, layout.tokens)
    engine.sequence = SequenceRun(slices)
    current = engine.sharing.current_layout
    current.layout = layout
    try:
        yield engine.sequence
    finally:
        engine.sequence = None
        current.clear()


def _named_inputs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in `forward`."""
    names = list(inspect.signature(forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def _token_tensor(inputs: dict[str, Any]) -> Tensor:
    """Return `input_ids` `[batch, tokens]`, or `inputs_embeds` `[batch, tokens, hidden]`.

    Raises:
        ValueError: The inputs have neither, or it has another number of dimensions.
    """
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        tokens = inputs.get(name)
        if isinstance(tokens, Tensor):
            if tokens.dim() != dims:
                shape = "[batch, tokens]" if dims == 2 else "[batch, tokens, hidden]"
                raise ValueError(
                    f'stream_from_host="model" takes {name} {shape}, but the model got {list(tokens.shape)}'
                )
            return tokens
    raise ValueError('stream_from_host="model" cuts input_ids or inputs_embeds into slices, but the model got neither')


def _on_device(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs on the device. A batch may be on the host, from which one slice is sent at a time."""
    return {name: to_device_async(t, device) if isinstance(t, Tensor) else t for name, t in inputs.items()}


def _documents_of(model: nn.Module, inputs: dict[str, Any], rows: int) -> tuple[tuple[int, ...], ...] | None:
    """Return where the documents of each row start, as the model would find them; `None` if it would find none.

    Raises:
        ValueError: Position ids tell where documents start, and the model lets documents see each other.
    """
    if given_cache(inputs) is not None:
        return None  # transformers looks for documents only if it gets no cache
    return separate_documents(model, inputs, rows, inputs.get("use_cache"))


def _setting(model: nn.Module, inputs: dict[str, Any], name: str) -> Any:
    """Return an argument of a call; if it is not given, what the model's configuration says."""
    if inputs.get(name) is not None:
        return inputs[name]
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, name, None)


def _check_sliceable(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Check that slices can be computed one by one.

    Args:
        model: The causal language model.
        inputs: Its inputs by name.

    Raises:
        ValueError: The inputs ask for something that needs all tokens at once.
    """
    name = class_name(model)
    cache = given_cache(inputs)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f'{name} got keys and values of a prefix, which stream_from_host="model" does not take: use '
            'stream_from_host="hidden"'
        )
    _check_shapes(name, inputs)
    if inputs.get("labels") is None and inputs.get("shift_labels") is None:
        raise ValueError(
            f'stream_from_host="model" computes the loss of each slice by itself, but {name} got no labels: pass '
            'labels, or use stream_from_host="hidden"'
        )
    if inputs.get("ignore_index", _IGNORED) != _IGNORED:
        raise ValueError(
            f'{name} is called with ignore_index={inputs["ignore_index"]}, but stream_from_host="model" ignores '
            f'labels of {_IGNORED}: set those labels to {_IGNORED}, or use stream_from_host="hidden"'
        )
    if not all(p.is_leaf for p in model.parameters()):
        raise ValueError(
            f"{name} runs with weights that are computed from others (functional_call), whose graph would be needed "
            'in each slice: use stream_from_host="hidden"'
        )
    if hooked := hooked_parameter(model):
        raise ValueError(
            f"{name} has hooks on its parameter {hooked}, which would get the gradient of each slice instead of their "
            "sum: change gradients before the optimizer steps (on_before_optimizer_step), or use "
            'stream_from_host="hidden"'
        )
    for setting, refused in (("return_dict", False), ("output_hidden_states", True)):
        if _setting(model, inputs, setting) is refused:
            raise ValueError(
                f'{name} is called with {setting}={refused}, but stream_from_host="model" returns the loss only: set '
                f'{setting}={not refused}, or use stream_from_host="hidden"'
            )
    if inputs.get("output_router_logits", getattr(getattr(model, "config", None), "output_router_logits", False)):
        raise ValueError(
            f"{name} has an auxiliary loss over the routers of all tokens, which no slice can compute: set "
            'output_router_logits=False, or use stream_from_host="hidden"'
        )


def _check_shapes(name: str, inputs: dict[str, Any]) -> None:
    """Check that each input of a model of this name has an entry for each token.

    Labels only have to be as many as tokens, as in the loss of transformers.
    """
    embeds = inputs.get("inputs_embeds")
    if embeds is not None and embeds.requires_grad:
        raise ValueError(
            f'{name} got inputs_embeds that require grad: stream_from_host="model" takes input_ids, or embeddings '
            'without gradient; for others use stream_from_host="hidden"'
        )
    rows, tokens = _token_tensor(inputs).shape[:2]
    for other, t in inputs.items():
        if not isinstance(t, Tensor) or t.dim() == 0:
            continue
        taken = "text only"
        if other in ("labels", "shift_labels"):
            fits, taken = t.numel() == rows * tokens, f"{other} {[rows, tokens]}"
        elif other in ("attention_mask", "position_ids"):
            entries = (1, tokens) if other == "position_ids" else (tokens,)
            fits, taken = t.dim() == 2 and _fits(t, rows, entries), f"{other} {[rows, tokens]}"
        elif t.is_floating_point():
            fits = t.shape[:2] == (rows, tokens)
        else:  # also numbers of images or documents
            fits = t.dim() < 2 or t.shape[0] not in (1, rows) or _fits(t, rows, (1, tokens))
        if not fits:
            raise ValueError(
                f"{name} got {other} {list(t.shape)}, which does not have one entry for each of the "
                f'{tokens} tokens of a row: stream_from_host="model" takes {taken}; use stream_from_host="hidden"'
            )


def _fits(t: Tensor, rows: int, entries: tuple[int, ...]) -> bool:
    """Return whether a tensor has as many rows as the batch, or one for all, and one of some numbers of entries."""
    return t.shape[0] in (1, rows) and t.shape[1] in entries


def _with_labels_by_row(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with labels `[batch, tokens]`.

    The loss of transformers takes labels of any shape, shifts them along their last dimension, and flattens them.
    """
    labels, shifted, shape = inputs.get("labels"), inputs.get("shift_labels"), _token_tensor(inputs).shape[:2]
    if shifted is None and labels is not None and labels.shape != shape:
        shifted = F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
    return inputs if shifted is None else inputs | {"shift_labels": shifted.reshape(shape)}


def _without_labels(inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | int, Tensor | float]:
    """Return the inputs apart from those of the loss, the number of labels, and a factor for the loss of all slices.

    A batch without any label has a loss of NaN and a gradient of zero, like a mean. The factor makes the loss NaN;
    0 / 0 in every slice would make the gradient NaN, too. Padding on the right is dropped: no other token sees it.

    Raises:
        ValueError: Padding is not on the right, or it has labels.
    """
    rest = dict(inputs)
    count, factor = rest.pop("num_items_in_batch", None), 1.0
    shifted = inputs.get("shift_labels")
    counted = (inputs["labels"][:, 1:] if shifted is None else shifted) != _IGNORED
    if count is None:
        count = counted.sum()
        factor = torch.where(count > 0, 1.0, torch.nan)
        count = count.clamp_min(1)
    mask = rest.pop("attention_mask", None)
    if mask is not None:
        right_padded_lengths(mask)
        if (counted & ~mask[:, : counted.shape[1]].bool()).any():
            raise ValueError(
                'padding has labels, which stream_from_host="model" does not take, as it drops the padding mask: set '
                'the labels of padding to -100, or use stream_from_host="hidden"'
            )
    for name in ("labels", "shift_labels", *CACHE_NAMES):
        rest.pop(name, None)
    return rest | {"use_cache": False}, count, factor


_MESSAGE = (
    'with stream_from_host="model", the logits of a sequence are never held, but the training step uses them: use '
    'the loss of the output only, or stream_from_host="hidden"'
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
        inputs = _named_inputs(forward, args, kwargs)
        tokens = _token_tensor(inputs)
        if tokens.shape[1] <= self._longest:
            return forward(**_on_device(self._engine.device, inputs))
        _check_sliceable(model, inputs)
        self._outside.refuse_hooks(model)
        tail = [p for p in model.parameters() if p.requires_grad]
        inner = {p for layer in self._engine.layers for p in layer.parameters()}
        tail = [p for p in tail if p not in inner]
        checked = functools.partial(self._run_slice, model, forward, tokens.shape[1])
        step = SlicedForward(self._engine, checked, inputs, _documents_of(model, inputs, len(tokens)))
        anchor = torch.zeros((), device=self._engine.device, requires_grad=True).clone()
        loss = _SliceBySlice.apply(step, anchor, *tail)
        return step.output_type(loss=loss, logits=AbsentLogits())

    def _run_slice(self, model: nn.Module, forward: Callable[..., Any], tokens: int, **inputs: Any) -> Any:
        try:
            output = forward(**inputs)  # first, because layers say what keeps them from running slice by slice
        except Exception as error:
            if not is_own_refusal(error):  # the model may not take as few tokens
                self._outside.check(model, forward, inputs, tokens)
            raise
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
        tokens, inputs = _token_tensor(inputs), _with_labels_by_row(inputs)
        self._engine, self._forward = engine, forward
        self._inputs, self._count, self._factor = _without_labels(inputs)
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
        return F.pad(following, (0, part.tokens - following.shape[1]), value=_IGNORED)

    def _end_of_layers(self, sequence: SequenceRun) -> tuple[Tensor, Tensor, LayerRun]:
        output, sequence.output = sequence.output, None
        if output is None:
            raise ValueError(
                'stream_from_host="model" needs every layer to run in each forward: train this model with '
                'stream_from_host="hidden"'
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
        return _on_device(self._engine.device, inputs)


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
                'stream_from_host="model" computes all gradients in one backward(), and none for torch.autograd.grad '
                'or backward(inputs=...): call loss.backward(), or use stream_from_host="hidden"'
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
        if node.name() in LAYER_OUTPUTS:
            raise ValueError(
                "the model's loss depends on other outputs of its layers than the last one, which no slice can "
                'compute by itself: use stream_from_host="hidden"'
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
