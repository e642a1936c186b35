"""Proves that a module outside of the layers may run on some of the tokens at a time, now and again later.

Heads, last norms, embeddings and rotary modules run in chunks, without the services that layers have: nothing repeats
their random numbers, and nothing undoes what they write. They must therefore compute each token alike and by itself,
draw nothing and write nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.state.user_objects import is_of_a_library
from lightning_memo.engine.token_locality.fake_run import TrialMode, fake_like, running, trial
from lightning_memo.engine.token_locality.prove_locality import unlike_other_sizes
from lightning_memo.engine.token_locality.token_dims import TOKENS, Dims, TokensMixed
from lightning_memo.engine.token_locality.token_tracker import Step, TokenTracker, difference_of
from lightning_memo.engine.token_locality.user_code import has_custom_functions, trial_error
from lightning_memo.kernels import AttentionSpec
from lightning_memo.utils.class_names import class_name

_PLAIN = frozenset({bool, int, float, str, type(None)})
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
        values = tuple((name, value) for name, value in vars(m).items() if type(value) in _PLAIN)
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
    tracker = _Tracker(tokens, unread)
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


class _Tracker(TokenTracker):
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
