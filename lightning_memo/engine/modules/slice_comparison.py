"""While training, compares now and then layers in slices with whole ones, and recomputed values with the forward's.

A layer runs on a few tokens at once, and on them in two slices. Attention and recurrences are answered alike in both
runs, by tensors that are inputs of the comparison. Queries, keys and values are outputs of it, as well as the arguments
of recurrences, the hidden states and side values. Gradients of all inputs and of some weights, for random gradients of
the outputs, are compared, too.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.collected_outputs import TokenPlace, collecting_nothing, split_output
from lightning_memo.engine.forward.cut_tokens import cut
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.memory.offloaded_tensor import part_of
from lightning_memo.engine.modules.layer_classes import LayerClasses, RequestedSettings
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.recurrence import StateCall, handing
from lightning_memo.engine.saved_tensors.saved_sums import SavedSums
from lightning_memo.engine.saved_tensors.side_effects import HiddenWrites
from lightning_memo.engine.state.layer_state import LayerState
from lightning_memo.engine.token_locality.fake_run import without_parameter_hooks
from lightning_memo.kernels import AttentionSpec
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.tensor.experts import exchanging_nothing
from lightning_memo.planner.token_slices import KEPT, TokenRange
from lightning_memo.utils.operator_values import tensors_in
from lightning_memo.utils.retained_graph import NEVER_DIFFERENTIATED

_EVERY = 64  # steps
_FIRST_BY_PLAN = 2  # after the profiled step, whose times are measured
_MOST_TOKENS = 1024
_PART = 8  # of the tokens, so that a comparison needs less memory than the backward of the layer
# Relative errors. Slices differ from the whole by rounding only; a token that rounding sends to another expert may
# differ, and with it the gradient of that expert.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1
_ROUTED_TOLERANCE = 0.3
_ROUTED_TOKENS = 0.02
# Some gradients are zero but for rounding, as that of a router whose only choice always has the weight one. Gradients
# that are smaller than this part of the largest one of the layer are compared with this part.
_FAINT = 1e-3


class SliceComparison:
    """Compares one layer call in steps 1, 2, 4, 8, ..., 64 of a plan, and then in every 64th, another layer each time.

    Also looks at the values that this layer writes and keeps by name, which a second slice would do again.

    In the same steps, sums of the tensors that any layer recomputes are compared with those of its forward: of all of
    them in the first step by a plan, later of a part of them in turn. The first two steps do so in any case.

    Args:
        layer_classes: The traits of the layers, which run as one slice once a difference is found.
        settings: The settings that were requested.

    Attributes:
        before: Called before each comparison, whose memory is no part of a planned step.
        draws: Whether PyTorch's random state has changed in the forward of a recomputed layer.

    Note: [Comparison of slices]
    The proof holds for the code of a layer as it was. While training, code may take another way, for example because
    the user opens a gate or changes an attribute.
    """

    def __init__(self, layer_classes: LayerClasses, settings: RequestedSettings) -> None:
        self._layer_classes, self._enabled = layer_classes, settings.check_slices
        self._steps = self._turns = self._compared = 0
        self._waits = False  # whether this step's comparison is still to come
        self._in_turn = False  # whether sums are compared in this step
        self.before: Callable[[], None] | None = None
        self.draws = False

    def sums_of(self, key: int) -> SavedSums | None:
        """Return an empty collection of sums for a slice of a layer call that is recomputed; `None` if none is due.

        Args:
            key: Number of the call among those that are alive.
        """
        if not self._in_turn:
            return None
        return SavedSums(None if self._steps == _FIRST_BY_PLAN else key + self._turns)

    def begin_profile(self) -> None:
        """Count steps from the profiled one on, which is the first one."""
        self._steps = 0

    def due(self, key: int, calls: int) -> bool:
        """Return whether a layer call has to be compared.

        Args:
            key: Number of the call among those that are alive. Call 0 begins a step.
            calls: Number of layer calls of a step.
        """
        if key == 0:
            self._steps += 1
            sampled = not (self._steps % _EVERY and self._steps & (self._steps - 1))
            self._waits = self._enabled and sampled
            self._in_turn = sampled and (self._enabled or self._steps <= _FIRST_BY_PLAN)
            self._turns += self._in_turn
        if not self._waits or key != self._compared % max(calls, 1):
            return False
        self._waits = False
        self._compared += 1
        return True

    def ends_slices(
        self, call: LayerCall, x: Tensor, traits: LayerTraits, lengths: Sequence[int], due: bool, needs_slices: bool
    ) -> bool:
        """Return whether the layers must not run in slices any more: a layer computes something else then, or writes.

        Args:
            call: The layer and its arguments.
            x: The layer's input.
            traits: The traits of the layer.
            lengths: Numbers of tokens in the slices, and of all tokens; the first one is that of a slice.
            due: Whether the layer is compared with itself.
            needs_slices: Whether layers cannot run as one slice by the plan.

        Raises:
            ValueError: There is a difference, and layers have to run in slices; or the layer writes or keeps what
                cannot be undone.
        """
        if why := self._layer_classes.why_other_at(call, x, traits, lengths):
            self._end(why, call, traits, needs_slices, "")
            return True
        if not due:
            return False
        if self.before is not None:
            self.before()
        tokens = _unlike_other_sizes(max(2, min(_MOST_TOKENS, call.tokens // _PART, lengths[0])), call)
        start, turn = (call.tokens - tokens) // 2, self._compared
        with collecting_nothing(), exchanging_nothing():
            unlike = difference_in_slices(call, x, traits.locality.side_places, start, tokens, turn)
        if not unlike:
            return False
        why = f"{call.name} does not compute in slices what it computes on all tokens ({unlike})"
        self._end(why, call, traits, needs_slices, "this step and earlier ones may have been wrong")
        return True

    def _end(self, why: str, call: LayerCall, traits: LayerTraits, needs_slices: bool, before: str) -> None:
        """Let layers run as one slice from now on.

        Raises:
            ValueError: They have to run in slices.
        """
        divided = call.layout is not None or any(isinstance(p, DTensor) for p in call.layer.parameters())
        if needs_slices or divided:
            raise ValueError(
                f"{why}, and these settings need slices: {before}{'; ' * bool(before)}train this model without "
                "slice_tokens, and with one process for each sequence"
            )
        warnings.warn(
            f"lightning_memo: {why}. From now on, layers run as one slice{'; ' * bool(before)}{before}.",
            stacklevel=3,
        )
        self._layer_classes.forget()  # what layers do now decides what a recomputation returns to
        self._layer_classes.agree(why, traits.needs_full_attention)


def _unlike_other_sizes(tokens: int, call: LayerCall) -> int:
    """Return a number near `tokens` that is no other size of the arguments, whose dims of tokens are found by size."""
    sizes = {size for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor) for size in t.shape}
    near = itertools.chain(range(tokens, 1, -1), range(tokens + 1, call.tokens + 1))
    return next((n for n in near if n not in sizes | {call.batch}), tokens)


def difference_in_slices(
    call: LayerCall, x: Tensor, side_places: Sequence[TokenPlace | None], start: int, tokens: int, turn: int = 0
) -> str:
    """Return what differs if a layer runs in two slices on some consecutive tokens, or the error that it raises then.

    The text is empty if nothing differs. What the layer writes to differs, too. The layer's state is restored.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        side_places: Where values that the layer returns beside its hidden states hold the tokens.
        start: First token.
        tokens: Number of tokens, at least 2.
        turn: Number of the weight from which on gradients of weights are compared: as many as need no more memory than
            the largest one.

    Raises:
        ValueError: The layer keeps tensors elsewhere, or writes into saved tensors.
    """
    arguments = (call.args, call.kwargs)
    args, kwargs = cut(arguments, call.tokens, start, start + tokens, call.batch, call.token_dim, call.shards)
    part = replace(call, args=args, kwargs=kwargs, tokens=tokens).with_copied_containers()
    x_part = part_of(x.detach(), call.token_dim, start, start + tokens).requires_grad_(x.requires_grad)
    state = LayerState(call, x.device)
    comparison = _Comparison(part, x_part, side_places, _weights_of(call.layer, turn), state)
    halves = [TokenRange(0, tokens // 2, KEPT), TokenRange(tokens // 2, tokens, KEPT)]
    try:
        with torch.enable_grad(), without_parameter_hooks(call.layer):
            with _NotedPrecision() as precision:
                whole = comparison.run(TokenRange(0, tokens, KEPT))
            comparison.writes.refuse()
            if written := state.first_written():
                return f"it writes to {written}, which it did not in its first forward"
            try:
                parts = [comparison.run(half) for half in halves]
            except torch.OutOfMemoryError:  # which says nothing about the layer
                raise
            except (RuntimeError, ValueError, IndexError, AssertionError) as error:
                return (str(error).splitlines() or [""])[0] or type(error).__name__
        return _difference(whole, parts, precision.full)
    finally:
        comparison.ended = True
        state.restore()


@dataclass(slots=True)
class _Value:
    """A tensor of a run, and where it holds the tokens; `None` for the gradient of a weight."""

    name: str
    t: Tensor
    place: TokenPlace | None


@dataclass(slots=True)
class _Values:
    """The tensors that a run on some tokens computes.

    Attributes:
        outputs: Queries, keys, values, arguments of recurrences, hidden states and side values.
        gradients: Gradients of the input, of the answers, and of weights.
        answers: Results of attention and recurrences.
    """

    outputs: list[_Value] = field(default_factory=list)
    gradients: list[_Value] = field(default_factory=list)
    answers: list[_Value] = field(default_factory=list)


class _Comparison:
    """Runs a layer on parts of some tokens, always from the same state and with the same results of attention.

    Args:
        call: The layer and its arguments for these tokens.
        x: The layer's input for these tokens.
        side_places: Where side values hold the tokens.
        weights: The weights whose gradients are compared, by name.
        state: The state from which the layer always runs.

    Attributes:
        writes: What the layer has written into saved tensors.
        ended: Whether no run has a backward any more.
    """

    def __init__(
        self,
        call: LayerCall,
        x: Tensor,
        side_places: Sequence[TokenPlace | None],
        weights: Mapping[str, Tensor],
        state: LayerState,
    ) -> None:
        self._call, self._x, self._side_places, self._weights = call, x, side_places, weights
        self._state = state
        self.writes, self.ended = HiddenWrites(call), False
        self._answers: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._by_head = TokenPlace(2, call.shards, 1)
        self._by_token = TokenPlace(call.token_dim, 1, 1)

    def run(self, part: TokenRange) -> _Values:
        """Run the layer forward and backward on some tokens. The first run is on all of them."""
        call, values = self._call, _Values()
        self._state.restore()
        x = call.narrow(self._x, part).detach().requires_grad_(self._x.requires_grad)
        copy = x.clone()
        attend, hand = functools.partial(self._attend, part, values), functools.partial(self._hand, part, values)
        self.writes.note(copy)  # another layer may have saved it
        saved = saved_tensors_hooks(self._pack, self._unpack)
        handed = handing(call.layer, hand, _raise)
        with saved, handling(attend, call.layer, call.layout), handed, call.mode(part), self.writes:
            y, sides = split_output(call.run(copy, part), x, call.layer)
        values.outputs.append(_Value("hidden states", y, self._by_token))
        places = self._side_places or (None,) * len(sides.values)
        for t, place in zip(sides.values, places, strict=True):
            if isinstance(t, Tensor) and place is not None:
                values.outputs.append(_Value("a side value", t, place))
        self._differentiate(part, values, x)
        return values

    def _pack(self, t: Tensor) -> Tensor:
        self.writes.note(t)
        return t.detach()  # an output that is saved would refer to itself

    def _unpack(self, t: Tensor) -> Tensor:
        if self.ended:  # a loss depends on what the layer has kept elsewhere
            raise RuntimeError(NEVER_DIFFERENTIATED)
        return t

    def _attend(
        self, part: TokenRange, values: _Values, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> Tensor:
        for name, t in (("queries", q), ("keys", k), ("values", v)):
            self._note(values, _Value(name, t, self._by_head))
        trained = q.requires_grad or k.requires_grad or v.requires_grad
        known = functools.partial(torch._C._nn.scaled_dot_product_attention, q, k, v, enable_gqa=True)
        return self._answer(part, values, "attention", self._by_head, trained, known)

    def _hand(self, part: TokenRange, values: _Values, call: StateCall) -> Tensor:
        place = TokenPlace(call.token_dim, 1, 1)
        for t in call.by_token:
            self._note(values, _Value(f"what {call.name} gets", t, place))
        trained = any(t.requires_grad for t in call.arguments if isinstance(t, Tensor))
        return self._answer(part, values, call.name, place, trained, lambda: call.run()[0])

    def _note(self, values: _Values, value: _Value) -> None:
        values.outputs.append(value)
        self.writes.note(value.t)

    def _answer(
        self,
        part: TokenRange,
        values: _Values,
        name: str,
        place: TokenPlace,
        trained: bool,
        compute: Callable[[], Tensor],
    ) -> Tensor:
        """Answer a call that relates tokens by what the run on all tokens has computed."""
        if part.tokens == self._call.tokens:
            with torch.no_grad():
                self._answers.append(compute())
        known = self._answers[len(values.answers)]
        answer = self._take(known, place, part).detach().requires_grad_(trained)
        values.answers.append(_Value(name, answer, place))
        return answer.clone()  # the layer may write into it

    def _take(self, t: Tensor, place: TokenPlace, part: TokenRange) -> Tensor:
        if part.tokens == self._call.tokens:
            return t
        by_token = t.unflatten(place.dim, (place.before, self._call.tokens, place.after))
        return by_token.narrow(place.dim + 1, part.start, part.tokens).flatten(place.dim, place.dim + 2)

    def _differentiate(self, part: TokenRange, values: _Values, x: Tensor) -> None:
        outputs = [value for value in values.outputs if value.t.requires_grad]
        if part.tokens == self._call.tokens:
            self._gradients = [value.t for value in outputs]
        if part.start == 0:  # for the halves once more, because a backward may write into the gradients that it gets
            generator = torch.Generator(x.device).manual_seed(0)
            for n, like in enumerate(self._gradients):
                self._gradients[n] = torch.empty_like(like).normal_(generator=generator)
        pairs = zip(self._gradients, outputs, strict=True)
        given = [self._take(gradient, value.place or self._by_token, part) for gradient, value in pairs]
        inputs = [_Value("the gradient of the input", x, self._by_token)]
        inputs += [replace(value, name=f"the gradient of {value.name}") for value in values.answers]
        inputs += [_Value(f"the gradient of {name}", t, None) for name, t in self._weights.items()]
        inputs = [value for value in inputs if value.t.requires_grad]
        if not (inputs and outputs):  # frozen layers, in slices of the model
            return
        found = torch.autograd.grad([v.t for v in outputs], [v.t for v in inputs], given, allow_unused=True)
        gradients = zip(inputs, found, strict=True)
        values.gradients = [_Value(v.name, local_part(t), v.place) for v, t in gradients if t is not None]


class _NotedPrecision(TorchDispatchMode):
    """Notes whether all operations inside compute in full precision. A layer may enter autocast by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.full = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for t in tensors_in(result):
            if t.is_floating_point() and t.dtype not in (torch.float32, torch.float64):
                self.full = False
        return result


def _raise(why: str) -> NoReturn:
    raise ValueError(why)


def _weights_of(layer: nn.Module, turn: int) -> dict[str, Tensor]:
    """Return some of the trained weights, from number `turn` on."""
    trained = [(name, p) for name, p in layer.named_parameters() if p.requires_grad]
    first = turn % max(len(trained), 1)
    room, chosen = max((local_part(p).nbytes for _, p in trained), default=0), {}
    for name, p in trained[first:] + trained[:first]:
        if local_part(p).nbytes <= room:
            room -= local_part(p).nbytes
            chosen[name] = p
    return chosen


def _difference(whole: _Values, parts: Sequence[_Values], exact: bool) -> str:
    """Return the name of the first value that differs by more than rounding; empty if there is none."""
    tolerance = _TOLERANCE if exact else _HALF_TOLERANCE
    routed = False
    faint = _FAINT * _largest_size(whole.gradients)
    for kind in ("outputs", "gradients"):
        expected: list[_Value] = getattr(whole, kind)
        found: list[list[_Value]] = [getattr(part, kind) for part in parts]
        if any([value.name for value in values] != [value.name for value in expected] for values in found):
            return "the operations"
        for number, value in enumerate(expected):
            pieces = [values[number].t.detach() for values in found]
            t = value.t.detach()
            if value.place is None:
                largest = _ROUTED_TOLERANCE if routed or not exact else tolerance
                if _apart(torch.stack(pieces).sum(0)[None], t[None], faint * t.numel() ** 0.5).item() > largest:
                    return value.name
                continue
            apart = _apart(*(_by_token(s, value.place) for s in (value.place.join(pieces), t)))
            unlike = (apart > tolerance).float().mean().item()
            if unlike > _ROUTED_TOKENS:
                return value.name
            routed |= unlike > 0
    return ""


def _by_token(t: Tensor, place: TokenPlace) -> Tensor:
    """Return `t` as `[tokens, everything else]`."""
    by_token = t.unflatten(place.dim, (place.before, -1, place.after))
    return by_token.movedim(place.dim + 1, 0).flatten(1)


def _largest_size(values: Sequence[_Value]) -> float:
    """Return the largest root mean square of some tensors; 0 if there are none. NaN counts as zero."""
    sizes = [v.t.detach().float().nan_to_num().square().mean().sqrt() for v in values if v.t.numel()]
    return float(torch.stack(sizes).max()) if sizes else 0.0


def _apart(a: Tensor, b: Tensor, least: float = 0.0) -> Tensor:
    """Return the distance of each row, relative to the length of an average row, or to `least`. NaN equals NaN."""
    a, b = (local_part(t).float().nan_to_num().reshape(len(t), -1) for t in (a, b))
    average = b.square().sum(1).mean().sqrt().clamp_min(max(least, torch.finfo(torch.float32).tiny))
    return (a - b).square().sum(1).sqrt() / average
