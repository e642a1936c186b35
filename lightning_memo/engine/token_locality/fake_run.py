"""Runs modules on fake tensors, which have shapes but no values, and leaves no trace of it.

A run on fake tensors does not show code of a user: hooks on modules and parameters, and backward functions.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lightning_memo.engine.forward.cut_tokens import token_dim_of
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.recurrence import StateCall, StateHandler, handing
from lightning_memo.engine.saved_tensors.side_effects import (
    LIFTS,
    KeptStorages,
    address_of,
    kept_elsewhere,
    remains,
    written_by,
)
from lightning_memo.engine.state.held_state import HeldState
from lightning_memo.engine.state.layer_state import why_not_written
from lightning_memo.engine.state.random_states import OtherGenerators
from lightning_memo.engine.state.users_code import (
    GLOBAL_HOOKS,
    home_of,
    hook_tables,
    hooks_of_users,
    is_of_a_library,
)
from lightning_memo.engine.token_locality.operator_rules import Dim, TokensMixed
from lightning_memo.engine.token_locality.stand_ins import (
    LocalFunctions,
    Unusable,
    forward_in_shape,
    kernels_in_shape,
    refuse,
)
from lightning_memo.engine.token_locality.token_tracker import TokenTracker
from lightning_memo.planner.token_slices import KEPT, TokenRange
from lightning_memo.utils.around_forward import without_saved_tensors_hooks
from lightning_memo.utils.operator_values import tensors_in
from lightning_memo.utils.user_errors import RefusedAtAnyLength


def hooked_module(layer: nn.Module) -> str:
    """Return the name of a module inside a layer on which a user has registered hooks; empty if there is none."""
    if hooks_of_users(GLOBAL_HOOKS):
        return "all modules"
    for name, module in layer.named_modules():
        if module is not layer and has_hooks(module):
            return name
    return ""


def has_hooks(module: nn.Module) -> bool:
    """Return whether a user has registered hooks on a module."""
    return bool(hooks_of_users(hook_tables(module)))


def without_hooks(layer: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context without a user's hooks on modules inside a layer: they may keep what they see."""
    tables = [table for module in layer.modules() if module is not layer for table in hook_tables(module)]
    return _without(tables, lambda hook: not is_of_a_library(hook))


def without_parameter_hooks(layer: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context without hooks on the parameters of a layer: they are to see whole gradients only."""
    return _without([p._backward_hooks for p in layer.parameters() if p._backward_hooks], lambda hook: True)


def without_global_hooks() -> contextlib.AbstractContextManager[None]:
    """Return a context without hooks that libraries call for all modules: PyTorch's counters of FLOPs keep tensors."""
    return _without(GLOBAL_HOOKS[:2], is_of_a_library)


@contextlib.contextmanager
def _without(tables: Sequence[dict[int, Any]], leaves_out: Callable[[Any], bool]) -> Iterator[None]:
    """Inside this context, some of the hooks in the tables are not called."""
    before = [(table, dict(table)) for table in tables if any(map(leaves_out, table.values()))]
    try:
        for table, hooks in before:
            for number in [number for number, hook in hooks.items() if leaves_out(hook)]:
                del table[number]
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


@contextlib.contextmanager
def _refusing_python_draws(state: HeldState) -> Iterator[None]:
    """Refuse a proof of code that draws numbers outside of torch or sets context variables; undo the draws.

    Args:
        state: What the modules and arguments of the layer hold.

    Raises:
        TokensMixed: The layer does so: another number may lead it another way, and each slice would set the variable.
    """
    generators, variables = OtherGenerators.of(state), copy_context()
    try:
        yield
        if drawn := [g for g in generators.drawn() if not isinstance(g, torch.Generator)]:
            raise TokensMixed(f"draws numbers of {type(drawn[0]).__module__}.{type(drawn[0]).__name__}")
        if any(value is not variables.get(variable) for variable, value in copy_context().items()):
            raise TokensMixed("sets a context variable")
    finally:
        generators.restore()


def hooked_parameter(model: nn.Module) -> str:
    """Return the name of a parameter on which a user has registered hooks; empty if there is none."""
    for name, p in model.named_parameters():
        for table in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)):
            if table and any(home_of(hook) != "torch" for hook in table.values()):
                return name
    return ""


def has_custom_functions(t: Tensor) -> bool:
    """Return whether a tensor was computed by autograd functions of a user, whose backward may do anything."""
    nodes, seen = [t.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
        if function is not None and not is_of_a_library(function):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def trial_error(error: Exception) -> str:
    """Return why a run on fake tensors that ended with an error proves nothing."""
    if isinstance(error, TokensMixed):
        return str(error)
    if "Cannot access data pointer" in str(error):
        return "it runs a kernel of its own, of Triton or of an extension, which may relate any tokens"
    return f"a trial run with other numbers of tokens, and without values, ended with: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__


# An attribute: the dotted name of its module, and its own.
Place = tuple[str, str]
Result = TypeVar("Result")
_aten = torch.ops.aten
# Views that PyTorch computes anew each time, and as which it knows `view`, of which it keeps the result.
_VIEWS = (_aten._reshape_alias.default, _aten._unsafe_view.default)
_WITH_VALUES = (Tensor, nn.Parameter)
_MOST_ENTRIES = 2**22  # of a constant


def trial(name: str, run: Callable[[TrialMode], Result]) -> Result:
    """Run something on fake tensors, of which none is left behind, and return its result, which holds no tensors.

    Constants that it keeps elsewhere get values. It then runs once more, as it does from then on.

    Args:
        name: Name of the layer, module or model, for messages.
        run: Runs it.

    Raises:
        RefusedAtAnyLength: It keeps tensors elsewhere that are no constants.
    """
    result = run(mode := TrialMode())
    if mode.settle(name):
        result = run(mode := TrialMode())
        mode.settle(name)
    return result


def _refuse_state(call: StateCall) -> NoReturn:
    raise TokensMixed(f"{call.name} hands a state from token to token")


@contextlib.contextmanager
def running(
    call: LayerCall,
    tracker: TokenTracker | None,
    mode: TrialMode,
    unused: Collection[Place],
    attend: Callable[..., Tensor],
    on_leaving: Callable[[str], None] = refuse,
    hand: StateHandler = _refuse_state,
    forward_of: Callable[[str, nn.Module], Callable[..., Any]] | None = None,
) -> Iterator[LocalFunctions]:
    """Inside this context, a layer runs on fake tensors and leaves no trace.

    Args:
        call: The layer and its arguments.
        tracker: Knows where tensors hold tokens; `None` if that is not followed.
        mode: Makes fake tensors.
        unused: Attributes without which the layer has to do.
        attend: Answers attention calls.
        on_leaving: Told why, if the layer computes an attention call or a recurrence itself.
        hand: Answers calls of functions that hand a state from token to token. By default they are refused.
        forward_of: Returns what stands for the forward of a module inside of the layer, by its dotted name; `None` if
            modules run by their own.

    Raises:
        TokensMixed: The layer writes to an attribute or to an argument, which slices would do more than once.
        RefusedAtAnyLength: The layer writes into a tensor for which this cannot be undone.
    """
    with (
        _disable_current_modes(),  # a user's, which count operations, for example
        torch.enable_grad(),
        without_saved_tensors_hooks(),
        without_global_hooks(),
        _without_log(),
        _without_autocast_cache(),
        _prepared(call, tracker, mode, unused, forward_of),
        handling(attend, call.layer, on_leaving=on_leaving),
        handing(call.layer, hand, on_leaving),
        call.mode(TokenRange(0, call.tokens, KEPT)),
        without_parameter_hooks(call.layer),
        kernels_in_shape(),
        _without_gradients(call.layer),
        LocalFunctions(tracker, call.batch, call.token_dim, mode.set_data) as functions,
    ):
        yield functions


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Keep PyTorch from logging that an operation does not run on tensors without values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keep autocast from giving later forwards the fake copies of weights."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def _without_gradients(layer: nn.Module) -> Iterator[None]:
    """Keep autograd functions that run a backward of their own from adding to the gradients of weights."""
    before = [(p, p.grad) for p in layer.parameters()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient


@contextlib.contextmanager
def _prepared(
    call: LayerCall,
    tracker: TokenTracker | None,
    mode: TrialMode,
    unused: Collection[Place],
    forward_of: Callable[[str, nn.Module], Callable[..., Any]] | None,
) -> Iterator[None]:
    """Prepare the modules of a layer for fake tensors, and undo that and the writes of a forward."""
    before = HeldState(call.layer, ())
    try:
        for path, name in unused:
            vars(call.layer.get_submodule(path))[name] = Unusable()
        for m in call.layer.modules():
            m._buffers.update({name: None if t is None else mode.buffer(t) for name, t in m._buffers.items()})
            if (forward := forward_in_shape(m, tracker)) is not None:
                m.forward = forward
        for path, m in call.layer.named_modules() if forward_of is not None else ():
            if m is not call.layer:
                m.forward = forward_of(path, m)
        known = HeldState(call.layer, (call.args, call.kwargs))
        try:
            try:
                with _refusing_python_draws(known):
                    yield
            finally:  # also if tokens were mixed
                written = _first_of(mode.written, call, known)
            if written := known.first_written() or written:
                raise TokensMixed(f"writes to {written}")
        finally:
            known.restore()
    finally:
        before.restore()


def _first_of(written: Collection[Tensor], call: LayerCall, state: HeldState) -> str:
    """Return the name of the first of some tensors that a layer writes into; empty if there is none.

    Raises:
        RefusedAtAnyLength: It cannot be undone.
    """
    buffers = set(map(id, call.layer.buffers()))
    for t in written:
        if why := why_not_written(call, state, buffers, t):
            raise RefusedAtAnyLength(why)
    addresses = set(map(address_of, written))
    return next((held.name for held in state.tensors if address_of(held.tensor) in addresses), "")


def fake_like(tracker: TokenTracker, mode: TrialMode, call: LayerCall, t: Tensor) -> Tensor:
    """Return a fake tensor in which another number of tokens replaces that of the call."""
    n = token_dim_of(t, call.tokens, call.batch, call.token_dim, call.shards)
    dims: list[Dim] = [tracker.sizes.without_tokens(size) for size in t.shape]
    if n is not None:
        dims[n] = tracker.sizes.of_size(t.shape[n] // call.tokens * tracker.sizes.tokens)
    return tracker.mark(mode.input(list(map(tracker.sizes.size, dims)), t), tuple(dims))


class TrialMode(FakeTensorMode):
    """Makes fake tensors, and notes the tensors that runs on them leave behind.

    Attributes:
        written: The tensors with values into which an operation would have written. Their values are as before.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # A kernel of Triton or of a C++ extension would get the address 0, and a GPU would then be lost to the process.
        self._allow_unsafe_data_ptr_access = False
        self.written: list[Tensor] = []
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # tensors with values and their fakes, by id
        self._stand_for: dict[int, Tensor] = {}  # tensors with values by the address of the fake one
        self._made = KeptStorages()
        self._constants = KeptConstants()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _VIEWS:
            func, args = _aten.view.default, args[:2]
        given = tensors_in(args, kwargs)
        if func not in LIFTS and any(type(t) in _WITH_VALUES for t in given):
            args, kwargs = tree_map_only(Tensor, self._fake_of, (args, kwargs))
            given = tensors_in(args, kwargs)
        written = written_by(func, args, kwargs)
        for t in written:
            if address_of(t) in self._stand_for:
                self.written.append(self._stand_for[address_of(t)])
        with _keeping_random() if func.namespace == "c10d" else contextlib.nullcontext():
            result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [t for t in tensors_in(result) if isinstance(t, FakeTensor)]
        self._constants.note(func, args, kwargs, made, given, written)
        for t in made:
            self._made.add(t)
        return result

    def input(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a fake tensor that stands for an input, and is no constant."""
        with self:
            made = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._constants.forget(made)
        return made

    def buffer(self, t: Tensor) -> Tensor:
        """Return a fake tensor that stands for a buffer, which may be written."""
        made = self.from_tensor(t)
        self._note_stand_in(t, made)
        return made

    def set_data(self, t: Tensor, data: Tensor) -> bool:
        """Note `t.data = data`, and return whether it must be left out, because `t` has values."""
        if isinstance(t, FakeTensor):
            return False
        if address_of(data) != address_of(t) and self._stand_for.get(address_of(data)) is not t:
            self.written.append(t)
        return True

    def settle(self, name: str) -> bool:
        """Give constants that something has kept their values, and return whether there are any.

        Args:
            name: Name of the layer, module or model that ran, for messages.

        Raises:
            RefusedAtAnyLength: Something has kept tensors that are no constants.
        """
        self._stand_ins.clear()
        kept: list[FakeTensor] = []

        def holds_others() -> bool:
            kept.clear()  # or this list would hold them
            kept.extend(self._kept())
            return any(t not in self._constants for t in kept)

        if remains(holds_others, sent=False):
            raise RefusedAtAnyLength(kept_elsewhere(name))
        if kept:
            self._constants.give_values(kept)
        return bool(kept)

    def _kept(self) -> list[FakeTensor]:
        """Return the tensors of this run that something still holds."""
        alive = self._made.alive()
        return [t for t in gc.get_objects() if type(t) is FakeTensor and address_of(t) in alive] if alive else []

    def _fake_of(self, t: Tensor) -> Tensor:
        if type(t) not in _WITH_VALUES:
            return t
        if id(t) not in self._stand_ins:
            made = self.from_tensor(t.detach())
            self._stand_ins[id(t)] = t, made
            self._stand_for[address_of(made)] = t
            self._note_stand_in(t, made)
        return self._stand_ins[id(t)][1]

    def _note_stand_in(self, t: Tensor, made: Tensor) -> None:
        self._made.add(made)
        self._constants.give(made, t)


@contextlib.contextmanager
def _keeping_random() -> Iterator[None]:
    """Give back the numbers of fake collectives, which PyTorch draws from Python's generator."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


class KeptConstants:
    """Constants that a layer makes once and keeps, for example in a global dict, if it first makes them in a trial run.

    Slopes of ALiBi, inverse frequencies and masks often live in a cache that many layers share. Fake tensors in it
    would be of no use to any later forward. How fake tensors are made that depend on no input and on no weight is
    therefore noted. Those that are still alive after a trial run are made again, with values. All others take no
    memory.
    """

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._given: dict[int, Tensor] = {}  # what stands for a tensor with values, by address
        self._known: set[int] = set()

    def give(self, fake: Tensor, real: Tensor) -> None:
        """Note that a fake tensor stands for a tensor whose values do not change, for example a buffer."""
        plain = type(real) is Tensor and not real.requires_grad and real.layout is torch.strided
        if plain and real.numel() <= _MOST_ENTRIES and real.stride() == fake.stride():
            self._given[address_of(fake)] = real

    def forget(self, t: Tensor) -> None:
        """Note that the values of a tensor are not known."""
        self._known.discard(address_of(t))

    def note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: Sequence[FakeTensor],
        given: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        """Note an operation and its results, if all that it reads is known.

        Args:
            func: The operator.
            args: Its arguments by place.
            kwargs: Its arguments by name.
            outs: The fake tensors that it returned.
            given: The tensors among its arguments.
            written: Those that it wrote into.
        """
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        known = func in LIFTS or all(isinstance(t, FakeTensor) and t in self for t in given)
        known = known and not any(address_of(t) in self._given for t in written)
        if outs and known and not drawn and all(t.numel() <= _MOST_ENTRIES for t in outs):
            views = [_View.of(t) for t in outs]
            self._made.append(_Made(func, tree_map_only(FakeTensor, _View.of, (args, kwargs)), views))
            self._known.update(view.address for view in views)
        else:  # something else may now be in it
            self._known.difference_update(map(address_of, written))

    def __contains__(self, t: Tensor) -> bool:
        return address_of(t) in self._known or address_of(t) in self._given

    @torch.no_grad()
    def give_values(self, kept: Collection[Tensor]) -> None:
        """Give constants their values. Those of one storage share one again."""
        with _disable_current_modes():
            storages = self._storages({address_of(t) for t in kept})
            values = [_View.of(t).take(storages[address_of(t)]) for t in kept]
        for t, real in zip(kept, values, strict=True):
            # Whatever refers to the tensor is not known, so that the tensor itself becomes the other one.
            vars(t).clear()
            t.__class__ = Tensor
            torch._C._swap_tensor_impl(t, real)  # type: ignore[attr-defined]

    def _storages(self, wanted: set[int]) -> dict[int, Tensor]:
        """Return tensors with the storages at these addresses, by address."""
        needed: list[_Made] = []
        for made in reversed(self._made):
            if not wanted.isdisjoint(view.address for view in made.views):
                needed.append(made)
                wanted |= {leaf.address for leaf in _views_in(made.arguments)}
        storages = dict(self._given)
        for made in reversed(needed):
            args, kwargs = tree_map_only(_View, lambda view: view.take(storages[view.address]), made.arguments)
            values = tensors_in(made.func(*args, **kwargs))
            for view, value in zip(made.views, values, strict=True):
                assert (view.stride, view.offset) == (value.stride(), value.storage_offset()), made.func
                storages.setdefault(view.address, value)
        return storages


@dataclass(frozen=True, slots=True)
class _View:
    """Stands for a fake tensor: a view of a storage."""

    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor) -> _View:
        return cls(address_of(t), t.dtype, t.shape, t.stride(), t.storage_offset())

    def take(self, whole: Tensor) -> Tensor:
        """Return this view of the storage of another tensor."""
        empty = torch.empty(0, dtype=self.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), self.offset, self.shape, self.stride)


class _Made(NamedTuple):
    """An operation that made or changed constants."""

    func: Any
    arguments: Any
    views: list[_View]


def _views_in(arguments: Any) -> list[_View]:
    found: list[_View] = []
    tree_map_only(_View, found.append, arguments)
    return found
