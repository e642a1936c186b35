"""Proves, without values, that a layer computes each token alike and by itself outside attention.

The layer runs on fake tensors, which have shapes but no values, for two numbers of tokens. A rule for each operator
says whether tokens stay apart, and both runs have to make the same operations with the same numbers. The proof
therefore holds for all weights and all inputs. A layer of which that cannot be proven is taken for one that mixes
tokens.

Modules outside of the layers (heads, last norms, embeddings and rotary modules) run in chunks, without the services
that layers have: nothing repeats their random numbers, and nothing undoes what they write. It is proven of them, too,
that they draw nothing and write nothing.

Note: [Attributes that differ]
Layers that are alike, as most layers of a model are, share one proof. Layers of one class may differ by plain
attributes, for example by their position in the model. The proof for one of them holds for another one if it uses none
of the attributes that differ. In that proof they are therefore replaced by objects that raise when they are used. A
value that may be compared by identity (`None`, flags, functions) or that torch takes as it is (a `torch.Generator`)
cannot be replaced so: layers that differ in it have proofs of their own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from lightning_memo.engine.attention.mask_patterns import AllTokensNeeded
from lightning_memo.engine.forward.collected_outputs import TokenPlace, split_output
from lightning_memo.engine.forward.cut_tokens import token_dim_of
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.recurrence import StateCall
from lightning_memo.engine.state.users_code import is_of_a_library
from lightning_memo.engine.token_locality.fake_run import (
    Place,
    TrialMode,
    fake_like,
    first_line,
    has_custom_functions,
    hooked_module,
    running,
    trial,
    trial_error,
)
from lightning_memo.engine.token_locality.gathered_in_shape import GatheredInShape
from lightning_memo.engine.token_locality.operator_rules import TOKENS, Dims, TokensMixed, holds_tokens
from lightning_memo.engine.token_locality.stand_ins import attend_in_shape, attended, hand_in_shape, handed
from lightning_memo.engine.token_locality.token_tracker import (
    ForwardTracker,
    OperationLog,
    Step,
    TokenTracker,
    Whereabouts,
    difference_of,
    step_of_attention,
    step_of_recurrence,
)
from lightning_memo.kernels import AttentionSpec
from lightning_memo.planner.token_slices import KEPT, TokenRange
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.containers import copied, entries_of, size_of
from lightning_memo.utils.python_objects import package_of
from lightning_memo.utils.state_functions import STATE_FUNCTIONS
from lightning_memo.utils.user_errors import RefusedAtAnyLength

_SHORT_TOKENS = 5
_TABLES = set(vars(nn.Module()))
# FSDP2's own notes on a module are objects of that module, and decide nothing that the module computes.
_NOTES = "__composable_api_state_key"
_STYLES = "lightning_memo.parallel.tensor."  # each module has an object of its own
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_CHANGING = (list, dict, set)
_REPLACEABLE = (int, float, str, tuple, list, dict)
_MOST_PROOFS = 8  # of layers that are alike but for attributes that they use


@dataclass(frozen=True, slots=True)
class Locality:
    """The result of a proof.

    Attributes:
        why_not: Why a layer may mix tokens outside attention; empty if it is proven that it does not.
        side_places: Where each side value holds the tokens; `None` for one that is the same for all tokens.
        unused: Attributes without which the proof was made.
        operations: The operations of the proof.
        lengths: Numbers of tokens at which the layer is known to make the operations of the proof.
        where: Dotted name of the module that may mix tokens; empty for the layer itself.
        gathered: Dotted names of the modules that run on the tokens of all processes; `None` if none might.
    """

    why_not: str
    side_places: tuple[TokenPlace | None, ...] = ()
    unused: frozenset[Place] = frozenset()
    operations: list[Step] = field(default_factory=list, compare=False)
    lengths: set[int] = field(default_factory=set, compare=False)
    where: str = ""
    gathered: frozenset[str] | None = None

    @property
    def hands_states(self) -> bool:
        """Whether the layer hands a state from token to token."""
        return any(name in STATE_FUNCTIONS for name, _ in self.operations)


class LocalityProofs:
    """Proves for each layer whether it keeps tokens apart, and reuses proofs; see Note: [Attributes that differ].

    Args:
        layers: The model's layers. The first proof does without the attributes that differ among them.
    """

    def __init__(self, layers: Sequence[nn.Module] = ()) -> None:
        self._layers = layers
        self._proofs: dict[object, list[_Proof]] = {}

    def forget(self) -> None:
        """Forget all proofs."""
        self._proofs.clear()

    def of(self, call: LayerCall, x: Tensor, kind: object, gathers: bool = False) -> Locality:
        """Return whether a layer computes each token by itself outside attention.

        Args:
            call: The layer and its arguments.
            x: The layer's input.
            kind: What the layer and the call have in common with others: classes of modules, shapes of parameters, and
                the form of the call.
            gathers: Whether modules that mix tokens may run on the tokens of all processes.
        """
        if hooked_module(call.layer):
            return prove_locality(call, x)
        attributes = _attributes_of(call.layer) | _weights_of(call.layer)
        proofs = self._proofs.setdefault(kind, [])
        alike = [(p, unlike) for p in proofs if (unlike := _unlike(attributes, p.attributes)) is not None]
        for proof, unlike in alike:
            if unlike <= proof.unused:
                return proof.locality
        if alike:
            proof, unlike = min(alike, key=lambda each: len(each[1] - each[0].unused))
            unused = proof.unused | unlike
        else:
            unused = self._unlike_others(call.layer)
        none = frozenset[str]() if gathers else None
        locality = prove_locality(call, x, unused, none)
        if locality.why_not and unused:
            differing, unused = unused, frozenset()
            locality = prove_locality(call, x, gathered=none)
            if locality.why_not and gathers:
                locality = _gathering(call, x, locality)
                whole = "" in (locality.gathered or ())
                again = locality if whole else prove_locality(call, x, differing, locality.gathered)
                unused, locality = (differing, again) if not again.why_not else (unused, locality)
        elif locality.why_not and gathers:
            locality = _gathering(call, x, locality)
        self._proofs[kind] = [*proofs, _Proof(attributes, unused, locality)][-_MOST_PROOFS:]
        return locality

    def _unlike_others(self, layer: nn.Module) -> frozenset[Place]:
        """Return the attributes of a layer that differ in other layers of its class, for example its position.

        Weights are left out: those of other layers may be sharded while this layer runs.
        """
        attributes = _attributes_of(layer)
        others = [_attributes_of(each) for each in self._layers if type(each) is type(layer) and each is not layer]
        return frozenset().union(*(_unlike(attributes, each) or () for each in others))


@dataclass(frozen=True, slots=True)
class _Proof:
    """A proof for a layer with these attributes, which uses none of the attributes in `unused`."""

    attributes: dict[Place, Any]
    unused: frozenset[Place]
    locality: Locality


class _Weight(NamedTuple):
    """The kind of a parameter."""

    type: type
    dtype: torch.dtype
    requires_grad: bool


def _attributes_of(layer: nn.Module) -> dict[Place, Any]:
    """Return the attributes of a layer's modules, apart from parameters and buffers."""
    attributes: dict[Place, Any] = {}
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            ours = name == "forward" and package_of(type(value)) == "lightning_memo"
            if name not in _TABLES and not name.startswith(_NOTES) and not ours:
                own = type(value) is MethodType and value.__self__ is module
                # Containers as they are now: users change them in place.
                attributes[path, name] = value.__func__ if own else value.copy() if type(value) in _CHANGING else value
    return attributes


def _weights_of(layer: nn.Module) -> dict[Place, Any]:
    """Return the kinds of the parameters of a layer."""
    parameters = ((path, name, p) for path, m in layer.named_modules() for name, p in m._parameters.items())
    return {(path, name): _Weight(type(p), p.dtype, p.requires_grad) for path, name, p in parameters if p is not None}


def _unlike(a: dict[Place, Any], b: dict[Place, Any]) -> frozenset[Place] | None:
    """Return where two layers hold different values; `None` if no stand-in would notice some of the differences.

    Only the use of a value can be noticed: not `is None`, and not what torch does with an object of its own.
    """
    if a.keys() != b.keys():
        return None
    unlike = frozenset(place for place, value in a.items() if not _same(value, b[place]))
    return unlike if all(type(a[p]) is type(b[p]) and type(a[p]) in _REPLACEABLE for p in unlike) else None


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are certainly the same."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _PLAIN or issubclass(kind, Placement):
        return bool(a == b)
    if kind.__module__.startswith(_STYLES):
        return _same(vars(a), vars(b))
    if issubclass(kind, (tuple, list)):  # read without methods of a user's class, as in the following
        return size_of(a) == size_of(b) and all(map(_same, entries_of(a), entries_of(b)))
    if issubclass(kind, dict):
        a, b = copied(a), copied(b)
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if kind is functools.partial:
        return all(map(_same, (a.func, a.args, a.keywords), (b.func, b.args, b.keywords)))
    if kind is FunctionType:
        cells = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b))
        defaults = ((f.__defaults__, f.__kwdefaults__) for f in (a, b))
        return a.__code__ is b.__code__ and _same(*defaults) and all(map(_same, *cells))
    return False


def _gathering(call: LayerCall, x: Tensor, locality: Locality) -> Locality:
    """Return a proof for a layer of which some modules run on the tokens of all processes.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        locality: The proof that has failed, in one of these modules.
    """
    gathered: frozenset[str] = frozenset()
    while locality.why_not:
        where = locality.where
        if not where or where in gathered:
            return Locality("", gathered=frozenset({""}))
        gathered = frozenset({where, *(path for path in gathered if not path.startswith(f"{where}."))})
        locality = prove_locality(call, x, (), gathered)
    # Processes would wait for each other's states and tokens in orders that autograd may choose unlike.
    return Locality("", gathered=frozenset({""})) if locality.hands_states else locality


def prove_locality(
    call: LayerCall, x: Tensor, unused: Collection[Place] = (), gathered: frozenset[str] | None = None
) -> Locality:
    """Return whether a layer computes each token by itself outside attention.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        unused: Attributes of the layer's modules, by dotted name of the module and name, without which the proof has to
            do.
        gathered: Dotted names of the modules that run on the tokens of all processes; `None` if none may.

    Raises:
        ValueError: The layer keeps or changes tensors where a run cannot be undone, saves tensors before they are
            filled, or is refused at any number of tokens.
    """
    return trial(call.name, functools.partial(_prove, call, x, unused, gathered))


def _prove(
    call: LayerCall, x: Tensor, unused: Collection[Place], gathered: frozenset[str] | None, mode: TrialMode
) -> Locality:
    name, whereabouts = call.name, Whereabouts()
    trackers = [ForwardTracker(tokens, whereabouts) for tokens in unlike_other_sizes(call, call.tokens, x)]
    try:
        locality = _compared(call, x, trackers, unused, gathered, whereabouts, mode)
    except AllTokensNeeded as needed:
        if gathered is None:
            raise
        locality = Locality(str(needed))
    except (torch.OutOfMemoryError, RefusedAtAnyLength):
        raise  # the first says nothing of the layer
    except Exception as error:  # whatever a layer raises on tensors without values, it is not proven
        locality = Locality(f"{name} may not compute each token by itself outside attention: {trial_error(error)}")
    if any(step.startswith("aten.rrelu_with_noise") for tracker in trackers for step, _ in tracker.steps):
        raise ValueError(
            f"{name} calls rrelu, which fills a tensor after autograd has saved it, so that it can be neither swapped "
            "nor recomputed: use leaky_relu"
        )
    return replace(locality, where=whereabouts.failed or "") if locality.why_not else locality


def _compared(
    call: LayerCall,
    x: Tensor,
    trackers: Sequence[ForwardTracker],
    unused: Collection[Place],
    gathered: frozenset[str] | None,
    whereabouts: Whereabouts,
    mode: TrialMode,
) -> Locality:
    """Run a layer on few and on many tokens.

    Raises:
        TokensMixed: The layer relates tokens to each other, or cannot be shown not to.
    """
    name = call.name
    if hooked := hooked_module(call.layer):
        raise TokensMixed(f"hooks on {hooked} would see the tokens of one slice only")
    sides, sides_of_more = [_run(call, x, tracker, unused, gathered, whereabouts, mode) for tracker in trackers]
    short, long = trackers
    if why := difference_of(short.steps, long.steps):
        return Locality(f"{name} computes otherwise with more tokens: {why}")
    if sides != sides_of_more:
        return Locality(f"{name} returns something else with more tokens")
    places = tuple(side if isinstance(side, TokenPlace) else None for side in sides)
    locality = Locality("", places, frozenset(unused), short.operations, gathered=gathered)
    lengths = {call.tokens} if call.layout is None else {call.tokens, call.layout.tokens}
    if why := _why_other_at(call, x, lengths, locality, mode):
        return Locality(why)
    locality.lengths.update(lengths)
    return locality


def why_other_at(call: LayerCall, x: Tensor, lengths: Collection[int], proven: Locality) -> str:
    """Return why a layer may compute otherwise at some numbers of tokens than in a proof; empty if it does not.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        lengths: The numbers of tokens.
        proven: The proof.
    """
    return trial(call.name, functools.partial(_why_other_at, call, x, lengths, proven))


def _why_other_at(call: LayerCall, x: Tensor, lengths: Collection[int], proven: Locality, mode: TrialMode) -> str:
    try:
        for tokens in sorted(lengths):
            if why := difference_of(proven.operations, _operations_at(call, x, tokens, proven, mode)):
                return f"{call.name} computes otherwise for {tokens} tokens: {why}"
    except RefusedAtAnyLength:
        raise
    except Exception as error:  # as in a proof
        return f"{call.name} may compute otherwise for other numbers of tokens: {first_line(error)}"
    return ""


def _operations_at(call: LayerCall, x: Tensor, tokens: int, proven: Locality, mode: TrialMode) -> list[Step]:
    """Run a layer on fake tensors of some number of tokens, and return its operations."""
    log = OperationLog()

    def make(t: Tensor) -> Tensor:
        n, shape = token_dim_of(t, call.tokens, call.batch, call.token_dim, call.shards), list(t.shape)
        if n is not None:
            shape[n] = shape[n] // call.tokens * tokens
        return mode.input(shape, t)

    attend = log.noting(step_of_attention, lambda q, k, v, spec: attended(q, k, v))
    hand = log.noting(step_of_recurrence, handed)
    arguments = tree_map_only(Tensor, make, (call.args, call.kwargs))
    fake_call = replace(call, args=arguments[0], kwargs=arguments[1], tokens=tokens, shards=1, layout=None)
    fake_x = make(x).requires_grad_(x.requires_grad)
    forward_of = _forward_of(call, tokens, proven.gathered, Whereabouts(), log, mode)
    with running(fake_call, None, mode, proven.unused, attend, hand=hand, forward_of=forward_of), mode, log:
        fake_call.run(fake_x.clone(), TokenRange(0, tokens, KEPT))
    return log.operations


def _run(
    call: LayerCall,
    x: Tensor,
    tracker: ForwardTracker,
    unused: Collection[Place],
    gathered: frozenset[str] | None,
    whereabouts: Whereabouts,
    mode: TrialMode,
) -> list[object]:
    """Run a layer on fake tensors of the tracker's number of tokens, to the end of its forward.

    Returns:
        The places of the tokens in the side values, or the values themselves.

    Raises:
        TokensMixed: The layer relates tokens to each other, or cannot be shown not to.
    """
    tokens, make = tracker.sizes.tokens, functools.partial(fake_like, tracker, mode, call)
    arguments = tree_map_only(Tensor, make, (call.args, call.kwargs))
    fake_call = replace(call, args=arguments[0], kwargs=arguments[1], tokens=tokens, shards=1, layout=None)
    attend = tracker.noting(step_of_attention, functools.partial(attend_in_shape, tracker, call.shards))
    hand = tracker.noting(step_of_recurrence, functools.partial(_hand, tracker, call))
    forward_of = _forward_of(call, tokens, gathered, whereabouts, tracker, mode)
    with running(fake_call, tracker, mode, unused, attend, tracker.refuse, hand, forward_of) as functions:
        fake_x = make(x).requires_grad_(x.requires_grad)
        with mode, tracker, _first_reason(tracker):
            output = fake_call.run(fake_x.clone(), TokenRange(0, tokens, KEPT))  # it may change its input
        hidden, sides = split_output(output, fake_x, call.layer)
        if tracker.dims(hidden) != tracker.dims(fake_x):
            raise TokensMixed("the hidden states do not hold the tokens of the input")
        places = [_side(value, tracker) for value in sides.values]
        outputs = [t for t in (hidden, *sides.values) if isinstance(t, Tensor) and t.requires_grad]
        if functions.hooked or any(map(has_custom_functions, outputs)):
            with mode, tracker, tracker.backward(), _first_reason(tracker):
                _check_backward(outputs, fake_x, call.layer, tracker)
        return places


def _forward_of(
    call: LayerCall,
    tokens: int,
    gathered: frozenset[str] | None,
    whereabouts: Whereabouts,
    log: OperationLog,
    mode: TrialMode,
) -> Callable[[str, nn.Module], Callable[..., Any]] | None:
    """Return what stands for the forwards of modules, if some may run on the tokens of all processes."""
    if gathered is None or call.layout is None:
        return None
    return GatheredInShape(gathered, tokens, call.layout.row_tokens, call.batch, mode, log, whereabouts).forward_of


def _hand(tracker: TokenTracker, call: LayerCall, state_call: StateCall) -> Tensor:
    if call.shards > 1:
        tracker.refuse(
            f"{state_call.name} hands a state from token to token, and sequence_parallel=True divides the tokens of "
            "each slice"
        )
    return hand_in_shape(tracker, state_call)


@contextlib.contextmanager
def _first_reason(tracker: ForwardTracker) -> Iterator[None]:
    """End the proof after what runs inside the context, by the first reason, whatever has happened since.

    Raises:
        TokensMixed: Tokens may be mixed.
    """
    try:
        yield
    except RefusedAtAnyLength:
        raise
    except Exception:
        if not tracker.why_mixed:
            raise
    if tracker.why_mixed:
        raise TokensMixed(tracker.why_mixed)


def _check_backward(outputs: Sequence[Tensor], x: Tensor, layer: nn.Module, tracker: TokenTracker) -> None:
    """Run the backward pass of a layer, and check its gradients.

    Raises:
        TokensMixed: The gradient of the input is not computed token by token, or that of a weight is no sum over them.
    """
    gradients = [tracker.mark(torch.empty_like(t), tracker.dims(t)) for t in outputs]
    weights = [p for p in layer.parameters() if p.requires_grad]
    inputs = [x, *weights] if x.requires_grad else weights
    found = list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))
    dx = found.pop(0) if x.requires_grad else None
    if dx is not None and (tracker.dims(dx) != tracker.dims(x) or tracker.is_sum(dx)):
        raise TokensMixed("the gradient of the input does not hold its tokens")
    for gradient in found:
        if gradient is not None and holds_tokens(tracker.dims(gradient)):
            raise TokensMixed("the gradient of a weight holds tokens")


def _side(value: Any, tracker: TokenTracker) -> object:
    """Return where a side value holds the tokens; if it holds none, its dims or the value itself.

    Raises:
        TokensMixed: It may hold anything.
    """
    if isinstance(value, Tensor):
        dims = tracker.dims(value)
        n = next((n for n, dim in enumerate(dims) if TOKENS in dim), None)
        if n is None:
            return dims
        place = dims[n].index(TOKENS)
        sizes = (tracker.sizes.size(part) for part in (dims[n][:place], dims[n][place + 1 :]))
        return TokenPlace(n, *sizes)
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    raise TokensMixed(f"returns an object of type {type(value).__name__}")


def unlike_other_sizes(call: LayerCall, least: int, *others: Tensor) -> tuple[int, int]:
    """Return two primes that divide no size of the layer: a small one, and one that is at least `least`.

    A layer that computes otherwise from some number of tokens on, which slices may not reach, does so for one of them.
    """
    sizes = {size for t in (*others, *call.layer.parameters(), *call.layer.buffers()) for size in t.shape}
    sizes = sizes - {call.tokens} | {sys.maxsize}  # `x[a:]` slices until there

    def from_(least: int) -> int:
        return next(n for n in itertools.count(least) if _is_prime(n) and all(size % n for size in sizes if size))

    short = from_(_SHORT_TOKENS)
    return short, from_(max(least, short + 1))


def _is_prime(n: int) -> bool:
    return all(n % divisor for divisor in range(2, int(n**0.5) + 1))


_COMPARED = frozenset({bool, int, float, str, type(None)})
_FORWARDS = (nn.Linear.forward, nn.Embedding.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)
_MOST_STATES = 16  # of a module whose attributes change
_TOKENS = 5  # of the call that is proven; the proof itself chooses other numbers


class ModuleProofs:
    """Proves of modules that they may run on some of the tokens, once for each state of their attributes."""

    def __init__(self) -> None:
        self._known: dict[nn.Module, dict[Hashable, str]] = {}

    def why_not(self, module: nn.Module, forward: Callable[..., Any], x: Tensor) -> str:
        """Return why a module may not run on some of the tokens at a time; empty if it may.

        Args:
            module: The module.
            forward: Its own forward.
            x: Its input, `[batch, tokens]` or `[batch, tokens, hidden]`.
        """
        state = x.dim(), x.dtype, torch.is_autocast_enabled(x.device.type), *_state_of(module)
        return self._find(module, state, lambda: _why_not(module, forward, x))

    def why_no_table(
        self, module: nn.Module, forward: Callable[..., Any], like: Tensor, position_ids: Tensor, *rest: Hashable
    ) -> str:
        """Return why a rotary module may not make its tables for some of the positions at a time; empty if it may.

        Args:
            module: The module.
            forward: Its own forward, a function of `like` and `position_ids`.
            like: Tells dtype and device of the tables. Its values must not be read.
            position_ids: Positions, `[batch or 1, tokens]`.
            rest: Further arguments of the forward.
        """
        if any(p.requires_grad for p in module.parameters()):
            return f"{class_name(module)} has trained weights"
        state = like.dtype, position_ids.dtype, rest, *_state_of(module)
        return self._find(
            module, state, lambda: _why_mixed(module, functools.partial(forward, like), position_ids, like)
        )

    def _find(self, module: nn.Module, state: Hashable, prove: Callable[[], str]) -> str:
        known = self._known.setdefault(module, {})
        if state not in known:
            if len(known) == _MOST_STATES:
                return f"{class_name(module)} has other attributes in each forward"
            known[state] = prove()
        return known[state]


def counts_tokens(module: nn.Module) -> bool:
    """Return whether a module is an embedding whose gradient or weight depends on all tokens of a batch."""
    return isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.max_norm is not None)


def _computed_tensors(module: nn.Module) -> list[str]:
    """Return the names of attributes with a graph, such as a pruned weight that a hook computes before each forward."""
    return [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.requires_grad]


def _state_of(module: nn.Module) -> tuple[Hashable, ...]:
    """Return all that may decide how a module computes, apart from the values of tensors."""
    state: list[Hashable] = []
    for m in module.modules():
        values = tuple((name, value) for name, value in vars(m).items() if type(value) in _COMPARED)
        shapes = tuple(None if p is None else p.shape for p in m._parameters.values())
        hooks = *m._forward_hooks, *m._forward_pre_hooks
        state.append((type(m), values, shapes, tuple(m._modules), hooks, *_computed_tensors(m)))
    return tuple(state)


def _why_not(module: nn.Module, forward: Callable[..., Any], x: Tensor) -> str:
    name = class_name(module)
    for m in module.modules():
        if is_parametrized(m) or _computed_tensors(m):
            return f"{name} has a weight that is computed in each forward"
        if counts_tokens(m):
            return f"{name} relates tokens by scale_grad_by_freq or max_norm"
    if getattr(forward, "__func__", None) in _FORWARDS:
        return ""
    if any(isinstance(p, DTensor) for p in module.parameters()):  # which fake tensors cannot be mixed with
        return "" if all(is_of_a_library(type(m)) for m in module.modules()) else f"{name} is not known, and divided"
    return _why_mixed(module, forward, x)


def _why_mixed(module: nn.Module, forward: Callable[..., Any], x: Tensor, unread: Tensor | None = None) -> str:
    """Return why a run on fake tensors does not prove that a module keeps tokens apart; empty if it does."""
    return trial(class_name(module), functools.partial(_tell, module, forward, x, unread))


def _tell(module: nn.Module, forward: Callable[..., Any], x: Tensor, unread: Tensor | None, mode: TrialMode) -> str:
    name, call = class_name(module), LayerCall(module, forward, (), {}, _TOKENS, x.shape[0])
    with FakeTensorMode():
        like = torch.empty((x.shape[0], _TOKENS, *x.shape[2:]), dtype=x.dtype, device=x.device)
    try:
        short, long = (_operations(call, like, n, unread, mode) for n in unlike_other_sizes(call, _TOKENS, like))
    except Exception as error:  # whatever a module raises on tensors without values, it is not proven
        return f"{name} may not compute each token by itself: {trial_error(error)}"
    if why := difference_of(short, long):
        return f"{name} computes otherwise with more tokens: {why}"
    return ""


def _operations(call: LayerCall, like: Tensor, tokens: int, unread: Tensor | None, mode: TrialMode) -> list[Step]:
    """Run a module on fake tensors of some number of tokens, and return its operations.

    Raises:
        TokensMixed: It relates tokens, draws random numbers, writes to what it holds, or reads `unread`.
    """
    tracker = _StrictTracker(tokens, unread)
    with running(call, tracker, mode, (), _attend) as functions:
        x = fake_like(tracker, mode, call, like)
        x = x.requires_grad_() if x.is_floating_point() else x
        buffers = [(b, b._version) for b in call.layer.buffers()]
        with mode, tracker:
            outputs = call.forward(x.clone())
        for y in outputs if isinstance(outputs, tuple) else (outputs,):
            if not isinstance(y, Tensor) or [TOKENS in dim for dim in tracker.dims(y)] != [False, True, False]:
                raise TokensMixed("its output does not hold one entry for each token")
            if functions.hooked or has_custom_functions(y):
                raise TokensMixed("it registers hooks or calls autograd functions, whose backward is not known")
        if functions.drops:
            raise TokensMixed("it draws random numbers")
        if any(b._version != version for b, version in buffers):
            raise TokensMixed("it writes to a buffer")
    return tracker.steps


class _StrictTracker(TokenTracker):
    """Also refuses that random numbers are drawn, and that a tensor is read.

    Args:
        tokens: As for every tracker.
        unread: The tensor, if any.
    """

    def __init__(self, tokens: int, unread: Tensor | None) -> None:
        super().__init__(tokens)
        self._unread = unread

    def dims(self, t: Tensor) -> Dims:
        """Return where a tensor holds tokens.

        Raises:
            TokensMixed: The tensor was made by the number of tokens, or must not be read.
        """
        if t is self._unread:
            raise TokensMixed("it reads its first argument")
        return super().dims(t)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TokensMixed("it draws random numbers")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    raise TokensMixed("it calls attention")
