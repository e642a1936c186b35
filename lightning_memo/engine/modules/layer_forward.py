"""Replaces the `forward` of a layer, reads its calls, and lets layers run as they were written.

Layers that are swapped or recomputed neither read nor fill the key-value caches of Hugging Face models, and
`torch.compile` is disabled in modules whose own code the engine runs slice by slice.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.layer_call import THE_INPUT, LayerCall
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.parallel.local_tensors import awaited
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.python_objects import dict_of

_MARK = "_memo_calls"  # an attribute of caches: the inputs of layers that have not filled them, by call


class LayerForward:
    """Replaces a layer's `forward` while the engine is attached. Copies, saved ones too, have what was replaced."""

    def __init__(self, run: Callable[..., Any], layer: nn.Module, own: Callable[..., Any] | None) -> None:
        self._run, self._layer, self._own = run, layer, own
        self._of_class = type(layer).forward
        self._original: Callable[..., Any] = own or self._of_class.__get__(layer)
        self.__signature__ = inspect.signature(self._original)

    @property
    def original(self) -> Callable[..., Any]:
        """What was replaced: a function of the layer's own, else its class's, which a user may change meanwhile."""
        if self._own is None and type(self._layer).forward is not self._of_class:
            self._of_class = type(self._layer).forward
            self._original = self._of_class.__get__(self._layer)
        return self._original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._layer, self.original, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _itself, (self.original,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied: Callable[..., Any] = copy.deepcopy(self.original, memo)  # a method is then one of the copied layer
        return copied


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def replace_forward(layer: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Direct calls of a layer to `run(layer, forward, *args, **kwargs)`. Returns a function that undoes this."""
    own = vars(layer).get("forward")
    if own is None and not isinstance(type(layer).forward, FunctionType):  # a descriptor, as TorchScript's
        own = layer.forward
    layer.forward = LayerForward(run, layer, own)
    return functools.partial(_restore_forward, layer, own)


def _restore_forward(layer: nn.Module, own: Callable[..., Any] | None) -> None:
    if own is None:
        del layer.forward
    else:
        layer.forward = own


def innermost_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward as it was before it was replaced."""
    forward: Callable[..., Any] = module.forward
    while isinstance(forward, LayerForward):
        forward = forward.original
    return forward


def needs_grad(layer: nn.Module, arguments: Any) -> bool:
    """Return whether anything that the layer computes needs a gradient."""
    if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(arguments)):
        return True
    return any(p.requires_grad for p in layer.parameters())


def read_call(
    layer: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shards: int,
    layout: TokenLayout | None,
) -> tuple[Tensor, LayerCall]:
    """Return the layer's input, and the rest of its call without key-value caches, which training does not fill.

    Args:
        layer: The layer.
        forward: The layer's own forward.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        shards: Number of sequence-parallel shards.
        layout: The layout of the batch; `None` if this process holds all tokens in order.

    Raises:
        ValueError: The layer's first argument is no tensor, it gets a key-value cache of an earlier forward, or it is
            called within a transform of functions.
    """
    kwargs, keyword = dict(kwargs), ""
    if args:
        x, *rest = args
    else:
        keyword, rest = next(iter(inspect.signature(forward).parameters), ""), []
        x = kwargs.pop(keyword, None)
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{class_name(layer)} got {type(x).__name__} as its first argument: layers get their hidden states "
            "there, as a tensor or in a tuple, dict or list; change its forward, or name other layers: "
            'layers="..."'
        )
    if is_functorch_wrapped_tensor(x):
        raise ValueError(
            f"{class_name(layer)} is called within torch.vmap or a transform of torch.func, where nothing can be "
            "swapped or recomputed: call the model with a batch, or train it without lightning_memo"
        )
    rest, kwargs = _without_caches(layer, x, rest, kwargs)
    rest = [THE_INPUT if t is x else t for t in rest]
    kwargs = {name: THE_INPUT if t is x else t for name, t in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    dim = 0 if x.dim() == 2 else _token_dim(layer)
    batch = 1 if x.dim() == 2 else x.shape[1 - dim]
    call = LayerCall(layer, forward, tuple(rest), kwargs, x.shape[dim], batch, dim, shards, layout, keyword)
    return awaited(x), call


def _token_dim(layer: nn.Module) -> int:
    """Return 1 for a layer that takes `[batch, tokens, hidden]`, 0 for `[tokens, batch, hidden]`.

    Layers of vision towers may take `[tokens, hidden]`, the patches of all images.
    """
    attentions = [m for m in layer.modules() if isinstance(m, nn.MultiheadAttention)]
    return 0 if any(not m.batch_first for m in attentions) else 1


def _without_caches(
    layer: nn.Module, x: Tensor, rest: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a layer with `None` in place of key-value caches.

    Args:
        layer: The layer.
        x: Its input.
        rest: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ValueError: A cache holds tokens, or would hold them if an earlier forward had filled it.
    """
    caches = [value for value in (*rest, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return rest, kwargs
    numbers = tuple(value for value in (*rest, *kwargs.values()) if type(value) is int)  # rounds of looped models
    if _is_filled(caches[0], layer) or _was_given(caches[0], (id(layer), *numbers), x):
        raise ValueError(
            f"{class_name(layer)} gets a key-value cache of an earlier forward, as in prefix tuning, but layers that "
            "are swapped or recomputed neither fill nor read caches: pass all tokens in one forward, use another "
            "method, for example LoRA, or train this model without lightning_memo"
        )
    rest = [None if _is_cache(value) else value for value in rest]
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return rest, kwargs


def why_reads_cache(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why a layer has to run as in plain training, because a key-value cache holds tokens for it.

    Args:
        layer: The layer.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if any(_is_cache(value) and _is_filled(value, layer) for value in (*args, *kwargs.values())):
        return (
            "it gets a key-value cache of an earlier forward, as in prefix tuning, and layers that are swapped or "
            "recomputed neither fill nor read caches"
        )
    return ""


def _is_cache(value: object) -> bool:
    """Return whether an argument is a key-value cache of transformers."""
    return hasattr(type(value), "get_seq_length") and hasattr(type(value), "update")


def _is_filled(cache: Any, layer: nn.Module) -> bool:
    """Return whether a cache holds something for a layer. Frozen layers before it may fill theirs."""
    index = next((m.layer_idx for m in layer.modules() if isinstance(getattr(m, "layer_idx", None), int)), None)
    for holds in ("get_seq_length", "has_previous_state") if index is not None else ():
        # Layers of a cache have keys and values, a recurrent state, or both, and raise if asked for what they lack.
        with contextlib.suppress(ValueError, AttributeError):
            if getattr(cache, holds)(index):
                return True
    return False


def _was_given(cache: Any, call: tuple[int, ...], x: Tensor) -> bool:
    """Return whether a call with another input got this cache before, and mark it. Copies of a cache have its marks."""
    inputs: dict[tuple[int, ...], weakref.ref[Tensor]] = vars(cache).setdefault(_MARK, {})
    before = inputs.setdefault(call, weakref.ref(x))
    return before() is not x


def disable_compile(
    model: nn.Module, layers: Sequence[nn.Module], everywhere: bool, tell: Callable[[nn.Module], None]
) -> tuple[list[str], list[Callable[[], None]]]:
    """Make layers, their submodules and the modules around them run as they were written.

    `torch.compile` would trace the engine's hooks, modes and attention as a part of a compiled layer. Other modules
    stay compiled, as long as their inputs are ordinary tensors.

    Args:
        model: The module that contains the layers.
        layers: The layers that the engine runs.
        everywhere: Whether all modules run as they were written: they get hidden states that are on the host.
        tell: Gets a module around the layers each time that compiled code outside of the model calls it.

    Returns:
        The names of the modules that were compiled and of functions in layers that are, and functions that enable
        compilation again. Functions are not replaced: `run_eager` runs them.
    """
    inside = {module for layer in layers for module in layer.modules()}
    names, undo = [], []
    for name, module in model.named_modules():
        around = module not in inside and not inside.isdisjoint(module.modules())
        if everywhere or module in inside or around:
            undone = list(_rest(module))
            names += [name or class_name(module._modules.get("_orig_mod") or module)] * bool(undone)
            undo += undone
        if around and type(module).forward is not nn.Module.forward:  # lists of modules are not called
            undo.append(replace_forward(module, untraced(_run_as_it_is, tell)))
    functions = {name for module in inside for name in _compiled_functions(module)}
    return names + sorted(functions), undo


def warn_of_uncompiled(names: Sequence[str]) -> None:
    """Warn that compiled modules and functions, given by their names, run uncompiled."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    rank_zero_warn(
        f"lightning_memo: torch.compile is off for {names[0]}{others}, because layers run slice by slice: leave it "
        "out, or compile only modules outside of the layers, such as the head"
    )


def untraced(run: Callable[..., Any], tell: Callable[[nn.Module], None]) -> Callable[..., Any]:
    """Return a replacement of forward methods (see `replace_forward`) that compiled code calls without tracing it.

    Args:
        run: The replacement.
        tell: Gets the module each time that compiled code calls it.
    """
    reason = "lightning_memo runs layers slice by slice, without torch.compile: leave fullgraph=True out"
    run, tell = torch.compiler.disable(run, reason=reason), torch.compiler.disable(tell, reason=reason)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            tell(module)
        return run(module, *args, **kwargs)

    return call


def _run_as_it_is(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _compiled_functions(module: nn.Module) -> Iterator[str]:
    """Iterate over names of functions that `torch.compile` returned, among a module's attributes and in its forward."""
    forward = inspect.unwrap(type(module).forward)
    known = getattr(forward, "__globals__", {})
    used = [(name, known.get(name)) for name in getattr(getattr(forward, "__code__", None), "co_names", ())]
    for name, value in (*used, *vars(module).items()):
        if not issubclass(type(value), nn.Module) and _is_compiled(value):
            yield name


def _rest(module: nn.Module) -> Iterator[Callable[[], None]]:
    if module._compiled_call_impl is not None:  # by module.compile()
        yield functools.partial(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
        module._compiled_call_impl = None
    original = module._modules.get("_orig_mod")
    if original is not None and hasattr(module, "dynamo_ctx"):  # by torch.compile(module)
        yield functools.partial(setattr, module, "forward", module.forward)
        module.forward = _as_written(original)
    elif _is_compiled(module.forward):  # by torch.compile(module.forward), or in its class
        own = vars(module).get("forward")
        yield functools.partial(_restore_forward, module, own)
        written = module.forward._torchdynamo_orig_callable
        module.forward = MethodType(written, module) if own is None else written


def _is_compiled(function: Any) -> bool:
    """Return whether `torch.compile` returned a function, or that of a method."""
    found = dict_of(function.__func__ if type(function) is MethodType else function) or {}
    # Functions of `torch.compiler.disable` have the first mark, too.
    return "_torchdynamo_orig_callable" in found and "_torchdynamo_disable" not in found


def _as_written(module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return forward


# The stance of the compiler is one for all threads: the first that enters sets it, and the last one sets it back.
_lock = threading.Lock()
_inside = 0
_stance: Any = None


def run_eager(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside of which nothing is compiled, and which no compiled code traces."""
    if "torch._dynamo" not in sys.modules:  # without which nothing is compiled
        return function(*args, **kwargs)
    return _untraced()(function, *args, **kwargs)


@functools.cache
def _untraced() -> Callable[..., Any]:
    untraced: Callable[..., Any] = torch.compiler.disable(_run_eagerly)  # which imports the compiler
    return untraced


def _run_eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _inside, _stance
    with _lock:
        if _inside == 0:
            _stance = torch.compiler.set_stance("force_eager")
        _inside += 1
    try:
        return function(*args, **kwargs)
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _stance.__exit__(None, None, None)
                _stance = None
