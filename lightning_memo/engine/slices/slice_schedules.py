"""The order in which the slices of a layer run, forward and backward.

Note: [Schedules]
Slice by slice: slice 1 runs, then slice 2, ... Under a causal mask a slice needs only its own and earlier keys. A
scalar token passes through `_BeginLayer`, `_SliceInput` and `_SliceOutput` of each slice, and `_EndLayer`, so that the
backward begins with the last slice and finishes each slice before it begins the one before.

With `stream_from_host="model"`, each layer call gets one slice of the sequence; see `sliced_model/sliced_model.py`.

Joint attention: the forward of slice 2 runs inside the attention call of slice 1, and so on. It runs once over all
tokens, and then the calls return in reverse order. This is for attention that is not causal or that draws dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.forward.collected_outputs import (
    ExtraOutputs,
    TokenPlace,
    collect_joined,
    collecting_apart,
    split_output,
)
from lightning_memo.engine.layers.layer_run import LayerRun, SliceOutput
from lightning_memo.engine.slices.slice_run import NotedCall, SliceRun
from lightning_memo.kernels import AttentionResult, AttentionSpec, RngState, token_major
from lightning_memo.kernels.attention_kernel import detached, gradient_of_sinks, merge_sinks


def run_layer_schedule(run: LayerRun, x: Tensor) -> Any:
    """Run a layer slice after slice, and return what the layer returns."""
    token, sides = run_forward(run, x)
    return with_sides(_EndLayer.apply(run, token), sides, run)


def run_last_layer(run: LayerRun, x: Tensor) -> tuple[Any, SliceOutput]:
    """Run a layer like `run_layer_schedule`, but return an output without history.

    The backward of the layer begins at the token in the returned `SliceOutput`.
    """
    token, sides = run_forward(run, x)
    y = run.take_output().requires_grad_()
    return with_sides(y, sides, run), SliceOutput(run, token, y)


def run_without_backward(run: LayerRun, x: Tensor) -> Any:
    """Run a layer slice after slice without gradients, and return what the layer returns."""
    y, sides = forward_only(run, x)
    return with_sides(y, sides, run)


@torch.no_grad()
def forward_only(run: LayerRun, x: Tensor) -> tuple[Tensor, list[ExtraOutputs]]:
    """Run a layer slice after slice without gradients, and return its output and what else its slices return.

    Keys and values that later slices need are held until the end of the call.
    """
    parts, sides = [], []
    for number, (token_range, x_part) in enumerate(zip(run.slices, run.states.inputs(x), strict=True)):
        part = SliceRun(run, number, token_range, x_part)
        run.forward_context.restore_random()
        with part.running(part.attend):
            y, side = _call(part, x_part)
        run.states.write_output(part.range, y)
        part.end_forward()
        parts.append(part)
        sides.append(side)
    while parts:
        parts.pop().end_backward()
    run.attention.release()
    return run.take_output(), sides


def run_forward(run: LayerRun, x: Tensor) -> tuple[Tensor, list[ExtraOutputs]]:
    """Run a layer slice after slice; return the scalar at which its backward begins, and what else slices return."""
    anchor = x if x.requires_grad else torch.zeros((), device=x.device, requires_grad=True)
    token, sides = _BeginLayer.apply(run, anchor), []
    for number, (token_range, x_part) in enumerate(zip(run.slices, run.states.inputs(x), strict=True)):
        with run.meter.computing_slice(number):
            part = SliceRun(run, number, token_range, x_part)
            if not run.whole:
                run.forward_context.restore_random()
            token, side = _run_slice(part, x_part, token)
            sides.append(side)
            part.end_forward()
    return token, sides


def _run_slice(part: SliceRun, x: Tensor, token: Tensor) -> tuple[Tensor, ExtraOutputs]:
    """Run a slice. Its input requires grad if the layer's input does, as layers may ask for that."""
    before: Tensor | None = None
    if part.run.states.x_requires_grad:
        x = _SliceInput.apply(part, x, token)
    else:  # autograd goes back along `before` last, as it is older than all that the slice computes
        before = _SliceInput.apply(part, token, token)
    with part.running(part.attend):
        y, side = _call(part, x)
    return _SliceOutput.apply(part, y, before), side


def _call(part: SliceRun, x: Tensor) -> tuple[Tensor, ExtraOutputs]:
    if part.run.whole:
        return split_output(part.call(x), x, part.run.call.layer)
    with collecting_apart() as collected:
        output = part.call(x)
    y, side = split_output(output, x, part.run.call.layer)
    return y, replace(side, collected=collected)


def run_nested(run: LayerRun, x: Tensor) -> Any:
    """Run a layer with its slices nested in one attention call, and return what the layer returns."""
    parts = x.detach().split([part.tokens for part in run.slices], run.call.token_dim)
    slices = [SliceRun(run, n, each, part) for n, (each, part) in enumerate(zip(run.slices, parts, strict=True))]
    before: Tensor | None = None
    if x.requires_grad:
        x = _Enter.apply(slices, x)
    else:  # as in `_run_slice`
        before = _Enter.apply(slices, torch.zeros((), device=x.device, requires_grad=True))
    nest = _Nest(slices, x.split([part.tokens for part in run.slices], run.call.token_dim))
    nest.run(0)
    y = _Leave.apply(run, torch.cat(nest.outputs, run.call.token_dim), before)
    return with_sides(y, nest.sides, run)


class _Nest:
    """The slices of a nested run: what they pass to the common attention call, and what they return."""

    def __init__(self, slices: list[SliceRun], inputs: tuple[Tensor, ...]) -> None:
        self._slices = slices
        self._inputs = inputs
        self._qkv: list[tuple[Tensor, Tensor, Tensor]] = []
        self._attended: tuple[Tensor, ...] = ()
        self._after_attention: RngState | None = None
        self._generators = slices[0].run.forward_context.generators
        self.outputs: list[Tensor] = [inputs[0]] * len(inputs)
        self.sides: list[ExtraOutputs] = [ExtraOutputs((), lambda y, _: y)] * len(inputs)

    def run(self, number: int) -> None:
        part = self._slices[number]
        part.run.forward_context.restore_random()

        def handler(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            return self._attend(number, q, k, v, spec)

        with part.running(handler):
            self.outputs[number], self.sides[number] = _call(part, self._inputs[number])
        if number + 1 < len(self._slices) and not self._qkv:  # without attention, slices are not nested
            self.run(number + 1)

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self._qkv.append((q, k, v))
        self._slices[number].note_attention(q, k, v)
        if number + 1 < len(self._inputs):
            self.run(number + 1)
        else:
            self._check_mask(spec)
            flat = [t for parts in zip(*self._qkv, strict=True) for t in parts]
            self._attended = _NestedAttention.apply(self._slices, detached(spec), spec.sinks, *flat)
            self._after_attention = RngState.capture(q.device)
            self._generators = self._generators.present()
        assert self._after_attention is not None
        self._slices[number].rng_after_attention.append(self._after_attention)
        self._after_attention.restore()
        self._generators.restore()
        return self._attended[number]

    def _check_mask(self, spec: AttentionSpec) -> None:
        run = self._slices[0].run
        keys = run.call.tokens * run.call.shards
        if spec.mask is not None and spec.mask.shape[-1] != keys:
            run.check_whole(f"attention gets a mask of {spec.mask.shape[-1]} keys, and there are {keys}")


class _NestedAttention(torch.autograd.Function):
    """Attention over the tokens of all slices at once.

    Inputs are the sinks, if any, the queries of all slices, then keys, then values.
    """

    @staticmethod
    def forward(
        ctx: Any, slices: list[SliceRun], spec: AttentionSpec, sinks: Tensor | None, *qkv: Tensor
    ) -> tuple[Tensor, ...]:
        run, count = slices[0].run, len(slices)
        parts = [qkv[n * count : (n + 1) * count] for n in range(3)]
        q, k, v = (torch.cat(part, 2) for part in parts)
        backend = run.engine.attention.backend(q, k, v, spec)
        with run.engine.recorder.computing("attention"):
            result = merge_sinks(backend.forward(q, k, v, spec), sinks)
        ctx.slices, ctx.call, ctx.backend, ctx.state = slices, NotedCall.of(spec), backend, result.state
        # Each slice gets an output of its own, which its output projection reads without another copy.
        lengths = [part.tokens for part in run.attention.slices]
        outs = tuple(token_major(out) for out in result.out.split(lengths, 2))
        lses, ctx.lse_shape = _in_shares(result.lse, lengths), result.lse.shape
        for n, part in enumerate(slices):
            part.save_attention(*(p[n] for p in parts), AttentionResult(outs[n], lses[n]), spec, nested=True)
        return outs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        slices, run = ctx.slices, ctx.slices[0].run
        spec = ctx.call.again(run.call.name)
        qkv = [part.qkv(0) for part in slices]
        q, k, v = (torch.cat(parts, 2) for parts in zip(*qkv, strict=True))
        out = torch.cat([part.storage.load(part.attentions[0].out).transpose(1, 2) for part in slices], 1).transpose(
            1, 2
        )
        lse = torch.cat([part.storage.load(part.attentions[0].lse) for part in slices]).view(ctx.lse_shape)
        result = AttentionResult(out, lse, ctx.state)
        with run.engine.recorder.computing("attention"):
            dout = torch.cat(douts, 2)
            grads = ctx.backend.backward(dout, q, k, v, result, spec)
            dsinks = None if spec.sinks is None else gradient_of_sinks(dout, result, spec.sinks)
        lengths = [part.tokens for part in run.attention.slices]
        return (None, None, dsinks, *(piece for grad in grads for piece in grad.split(lengths, 2)))


def _in_shares(lse: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Cut a log-sum-exp in proportion to lengths. Where processes exchange heads, it is that of some heads."""
    of_token = lse.numel() // sum(lengths)
    return lse.flatten().split([of_token * length for length in lengths])


def with_sides(y: Tensor, sides: Sequence[ExtraOutputs], run: LayerRun) -> Any:
    """Return the layer's return value, into which the side values of the slices are joined.

    Outputs that hooks have collected in the slices are joined, too.
    """
    if len(sides) == 1:
        return sides[0].build(y, sides[0].values)
    collect_joined([side.collected for side in sides], run.slices, run.call)
    by_value = zip(*(side.values for side in sides), strict=True)
    return sides[-1].build(y, [_join(parts, place) for parts, place in zip(by_value, run.side_places, strict=True)])


def _join(parts: Sequence[Any], place: TokenPlace | None) -> Any:
    return parts[-1] if place is None else place.join(parts)


class _BeginLayer(torch.autograd.Function):
    """Opens the chain of slices. Its backward ends the backward of the layer."""

    @staticmethod
    def forward(ctx: Any, run: LayerRun, anchor: Tensor) -> Tensor:
        ctx.run, ctx.anchor = run, anchor.dim() == 0
        return torch.zeros((), device=anchor.device)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Any, ...]:
        dx = ctx.run.end_backward()
        return None, (token if ctx.anchor else dx)


class _SliceInput(torch.autograd.Function):
    """Passes its input to a slice, and takes the gradient of that input, which ends the backward of the slice."""

    @staticmethod
    def forward(ctx: Any, part: SliceRun, x: Tensor, token: Tensor) -> Tensor:
        ctx.part = part
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Any, ...]:
        _take_input_gradient(ctx.part, dx)
        return None, None, torch.zeros((), device=ctx.part.run.states.device)


class _SliceOutput(torch.autograd.Function):
    """Takes a slice's output, and passes on the gradient of that output."""

    @staticmethod
    def forward(ctx: Any, part: SliceRun, y: Tensor, before: Tensor | None) -> Tensor:
        ctx.part = part
        part.run.states.write_output(part.range, y)
        return torch.zeros((), device=y.device)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Any, ...]:
        ctx.part.begin_backward()
        before = token if ctx.needs_input_grad[2] else None
        return None, ctx.part.run.states.next_output_gradient(), before


class _EndLayer(torch.autograd.Function):
    """Closes the chain of slices with the layer's output. Its backward begins the backward of the layer."""

    @staticmethod
    def forward(ctx: Any, run: LayerRun, token: Tensor) -> Tensor:
        ctx.run = run
        return run.take_output()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ctx.run.begin_output_gradient(dy)
        return None, torch.zeros((), device=dy.device)


LAYER_OUTPUTS = frozenset(function.__name__ + "Backward" for function in (_SliceOutput, _EndLayer))
"""Names of the autograd nodes behind which the slices of a layer lie."""


def _take_input_gradient(part: SliceRun, dx: Tensor | None) -> None:
    run = part.run
    part.end_backward()
    if run.states.x_requires_grad and dx is not None:
        run.states.write_input_gradient(part.range, dx)


class _Enter(torch.autograd.Function):
    """Takes the input of a nested run. Its backward ends the backward of the layer."""

    @staticmethod
    def forward(ctx: Any, slices: list[SliceRun], x: Tensor) -> Tensor:
        ctx.slices = slices
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        run = ctx.slices[0].run
        for part in ctx.slices:
            part.end_backward()
        run.end_backward()
        return None, (dx if run.states.x_requires_grad else None)


class _Leave(torch.autograd.Function):
    """Returns the output of a nested run. Its backward begins the backward of the layer."""

    @staticmethod
    def forward(ctx: Any, run: LayerRun, y: Tensor, before: Tensor | None) -> Tensor:
        ctx.run = run
        run.end_forward()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ctx.run.begin_backward()
        return None, dy, torch.zeros((), device=dy.device) if ctx.needs_input_grad[2] else None


def run_schedule(run: LayerRun, x: Tensor, given: Tensor, nested: bool) -> Any:
    """Run a layer, and return what the layer returns.

    Args:
        run: The layer call.
        x: The layer's input, contiguous.
        given: The tensor that the model has given, of which `x` may be a copy.
        nested: Whether slices are nested.

    Raises:
        ValueError: The layer changes its input in place, and `x` is a copy.
    """
    version = x._version
    output = run_nested(run, x) if nested else run_layer_schedule(run, x)
    if x._version != version:
        if x is not given:
            raise ValueError(
                f"{run.call.name} changes its input in place, which is not contiguous: let the layer compute with a "
                "copy of it (x = x.clone())"
            )
        _Changed.apply(x, torch.zeros((), requires_grad=True), run.call.name)
    return output


class _Changed(torch.autograd.Function):
    """Becomes the history of an input that a layer has changed in place, so that nothing else can be a function of it.

    In plain training, the changed input would be a function of the layer's weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, name: str) -> Tensor:
        ctx.name = name
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        raise ValueError(
            f"{ctx.name} changes its input in place, and the model uses this input afterwards: let the layer compute "
            "with a copy of it (x = x.clone())"
        )
