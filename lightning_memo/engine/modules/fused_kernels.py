"""Modules of layers that are computed by fewer kernels than they call themselves."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_memo.engine.forward.adapted_linear import AdaptedLinear, adapted_modules
from lightning_memo.engine.forward.autocast import autocast_type
from lightning_memo.engine.forward.fused_functions import (
    GatedActivation,
    Rotation,
    can_gate,
    can_rotate,
    gated_activation,
    rotation,
)
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.state.users_code import GLOBAL_HOOKS, hooks_of_users
from lightning_memo.utils.around_forward import without_saved_tensors_hooks
from lightning_memo.utils.replaced_functions import replaced


def attach_fused(layers: Sequence[nn.Module], device: torch.device) -> list[Callable[[], None]]:
    """Compute modules of layers by fewer kernels, where gradients are computed.

    Linear modules that LoRA adapts run as they are if they have several active adapters or a variant of LoRA (DoRA), if
    their forward or parts are a user's own or have hooks, or if their weights are quantised or divided. So do adapters
    in fp64 beside weights of another type, whose products that type would round, and in fp32 beside fp16.

    Norms of transformers run by PyTorch's kernel for root mean squares, which exists on GPUs, and their gated
    feed-forwards and rotary positions by Triton's kernels, if the class or the function agrees with the kernel up to
    rounding, forward and backward.

    Args:
        layers: The layers.
        device: Their device.

    Returns:
        Functions that undo this. An exception undoes it.
    """
    undo: list[Callable[[], None]] = []
    try:
        undo.extend(_attached(layers, device))
    except BaseException:
        for each in reversed(undo):
            each()
        raise
    return undo


def _attached(layers: Sequence[nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    modules = list(dict.fromkeys(m for layer in layers for m in layer.modules() if m is not layer))
    for _, module in itertools.chain.from_iterable(map(adapted_modules, layers)):
        if "forward" not in vars(module):
            yield replace_forward(module, _run_adapted)
    if device.type == "cuda":
        yield from _attach_norms(modules, device)
    if runs_triton(device):
        yield from _attach_feed_forwards(modules, device)
        yield from _attach_rotations(modules, device)


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton compiles kernels for a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


# ---- comparisons

_AGREEING = 4.0
"""Largest distance of results and gradients to fp64, in units of the precision. It is about one, and two for the
gradient of GELU in transformers."""
_Function = Callable[..., tuple[Tensor, ...]]


def _agree(own: _Function, fused: _Function, exact: _Function, given: Sequence[Tensor]) -> bool:
    """Return whether functions of some tensors compute the same up to rounding, forward and backward.

    Args:
        own: A function of transformers.
        fused: By fewer kernels.
        exact: The same in fp64.
        given: The tensors.
    """
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.to(dtype) for t in given]
        right = _with_gradients(exact, [t.double() for t in inputs])
        try:
            found = _with_gradients(own, inputs)
        except Exception:  # it computes something else, of something else
            return False
        if not _are_near(found, right, dtype):
            return False
        try:
            found = _with_gradients(fused, inputs)
        except Exception as error:  # Triton compiles kernels when they first run
            why = "".join(str(error).strip().splitlines()[-1:])
            warnings.warn(
                f"lightning_memo: layers run without a fused kernel, which fails ({type(error).__name__}: {why}): "
                "Triton needs a C compiler (gcc); or set fused_kernels=False",
                stacklevel=2,
            )
            return False
        if not _are_near(found, right, dtype):
            return False
    return True


def _with_gradients(function: _Function, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.enable_grad(), without_saved_tensors_hooks():
        inputs = [t.detach().requires_grad_() for t in given]
        results = function(*inputs)
        gradients = [_waves(71 + n, *y.shape, device=y.device).to(y.dtype) for n, y in enumerate(results)]
        return *results, *torch.autograd.grad(results, inputs, gradients)


def _are_near(found: Sequence[Tensor], right: Sequence[Tensor], dtype: torch.dtype) -> bool:
    if [(t.shape, t.dtype) for t in found] != [(t.shape, dtype) for t in right]:
        return False
    bound = _AGREEING * torch.finfo(dtype).eps
    return all((a - b).norm() <= bound * b.norm() for a, b in zip(found, right, strict=True))


def _is_of_transformers(function: Any) -> bool:
    """Return whether a function is one of transformers, and not a user's around it, which may do more."""
    home = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", "")
    return home.startswith("transformers.")


def _waves(factor: float, *shape: int, device: torch.device) -> Tensor:
    numbers = torch.linspace(-3, 4, math.prod(shape), dtype=torch.float32, device=device)
    return numbers.mul(factor).sin().view(shape)


# ---- norms


def _attach_norms(modules: Sequence[nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    kinds: dict[Any, bool] = {}
    for norm in filter(_is_norm, modules):
        kind = type(norm), norm.weight.shape, _eps(norm)
        if kind not in kinds:
            kinds[kind] = _norm_agrees(norm, device)
        if kinds[kind]:
            yield replace_forward(norm, functools.partial(_run_norm, type(norm).forward))


def _run_norm(compared: Callable[..., Any], module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    weight = module._parameters.get("weight")
    usual = _may_fuse(args, kwargs) and forward.__func__ is compared and type(weight) is nn.Parameter
    if not usual or not _types_agree(args[0], weight):
        return forward(*args, **kwargs)
    return F.rms_norm(args[0], weight.shape, weight, _eps(module))


def _types_agree(x: Tensor, weight: Tensor) -> bool:
    # Autocast casts the input of the kernel to fp32. Transformers computes in fp32 in fp64 models, too.
    types = (torch.float32,) if autocast_type(x) else (torch.float32, torch.bfloat16, torch.float16)
    return x.dtype == weight.dtype in types


def _eps(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _is_norm(module: nn.Module) -> bool:
    kind, eps = type(module), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = kind.__module__.startswith("transformers.") and kind.__name__.endswith("RMSNorm")
    weights = [name for name, p in module.named_parameters() if p.dim() == 1] if named else []
    own = "forward" not in vars(module) and _is_of_transformers(kind.forward)
    return weights == ["weight"] and isinstance(eps, float) and own


def _norm_agrees(norm: nn.Module, device: torch.device) -> bool:
    norm, eps, width = copy.copy(norm), _eps(norm), norm.weight.shape[0]
    norm._parameters = {}

    def own(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        norm.weight = weight
        return (type(norm).forward(norm, x),)

    def fused(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (F.rms_norm(x, weight.shape, weight, eps),)

    x, weight = _waves(99, 8, width, device=device), 1 + _waves(7, width, device=device) / 2
    # The tokens' squares are larger and smaller than eps.
    return all(_agree(own, fused, fused, [x * size, weight]) for size in (1e6, 1, 1e-3, 1e-5))


# ---- feed-forwards

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _attach_feed_forwards(modules: Sequence[nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    kinds: dict[Any, bool | None] = {}
    for module in filter(_is_feed_forward, modules):
        settings = _settings(module)
        activation = type(module.act_fn), repr(module.act_fn)  # which has the approximation of GELU
        kind = type(module), *activation, *((k, v) for k, v in settings.items() if k != "act_fn")
        if kind not in kinds:
            agreeing = (tanh for tanh in (False, True) if _feed_forward_agrees(module, tanh, device))
            kinds[kind] = next(agreeing, None)
        if (tanh := kinds[kind]) is not None:
            yield replace_forward(module, functools.partial(_run_feed_forward, type(module).forward, settings, tanh))


def _run_feed_forward(
    compared: Any, settings: Any, tanh: bool, module: Any, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    usual = _may_fuse(args, kwargs) and forward.__func__ is compared and _settings(module) == settings
    if not usual or not _is_untouched(module.act_fn) or hooks_of_users(GLOBAL_HOOKS):
        return forward(*args, **kwargs)
    gate, up = module.gate_proj(args[0]), module.up_proj(args[0])
    if can_gate(gate, up):
        return module.down_proj(GatedActivation.apply(gate, up, tanh))
    return module.down_proj(module.act_fn(gate) * up)


def _settings(module: Any) -> dict[str, Any]:
    """Return what the forward of a feed-forward may read besides its projections."""
    read = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "forward"}
    read |= {"training": None, "act_fn": module.act_fn}
    return {name: value if isinstance(value, (int, float, str)) else id(value) for name, value in read.items()}


def _is_feed_forward(module: nn.Module) -> bool:
    known = type(module).__module__.startswith("transformers.") and _is_of_transformers(type(module).forward)
    parts = [module._modules.get(name) for name in ("act_fn", *_PROJECTIONS)]
    if not known or "forward" in vars(module) or None in parts:
        return False
    activation: nn.Module = module.act_fn
    return type(activation).__module__ in ("transformers.activations", nn.SiLU.__module__) and _is_untouched(activation)


def _feed_forward_agrees(module: nn.Module, tanh: bool, device: torch.device) -> bool:
    """Compare a feed-forward whose projections return given tensors."""
    module, activation, x = copy.copy(module), module.act_fn, object()

    def own(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        projections = {x: gate}.__getitem__, {x: up}.__getitem__, lambda y: found.append(y) or found
        module._modules = {"act_fn": activation, **dict(zip(_PROJECTIONS, projections, strict=True))}
        if type(module).forward(module, x) is not found or not torch.equal(found[0], activation(gate) * up):
            raise ValueError
        return tuple(found)

    def fused(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (GatedActivation.apply(gate, up, tanh),)

    def exact(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (gated_activation(gate, up, tanh),)

    given = [_waves(f, 8, 96, device=device) for f in (99, 83)]
    return all(_agree(own, fused, exact, [t * size for t in given]) for size in (6, 1e6))  # some classes clamp


# ---- rotary positions

_ROTARY = "apply_rotary_pos_emb"


def _attach_rotations(modules: Sequence[nn.Module], device: torch.device) -> Iterator[Callable[[], None]]:
    agreeing: dict[Any, bool] = {}
    for module in modules:
        code = inspect.unwrap(type(module).forward)
        home = sys.modules.get(getattr(code, "__module__", ""))
        function = getattr(home, _ROTARY, None)
        if function is None or _ROTARY not in getattr(getattr(code, "__code__", None), "co_names", ()):
            continue
        if function not in agreeing:
            agreeing[function] = _is_of_transformers(function) and _rotation_agrees(function, device)
        if agreeing[function]:
            yield replace_forward(module, functools.partial(_run_rotating, home, function))


def _run_rotating(home: Any, compared: Any, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    with replaced(home, _ROTARY, functools.partial(_rotate, compared)):
        return forward(*args, **kwargs)


def _rotate(compared: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
    usual = own is compared and len(args) == 4 and not kwargs and torch.is_grad_enabled()
    return Rotation.apply(*args) if usual and can_rotate(*args) else own(*args, **kwargs)


def _rotation_agrees(function: Any, device: torch.device) -> bool:
    cos, sin = (_waves(factor, 2, 5, 16, device=device).bfloat16() for factor in (59, 47))  # rounded once for all

    def own(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(q, k, cos.to(q.dtype), sin.to(q.dtype)))

    def fused(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return Rotation.apply(q, k, cos.to(q.dtype), sin.to(q.dtype))

    def exact(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(rotation(x, cos.to(x.dtype), sin.to(x.dtype)) for x in (q, k))

    given = [_waves(99, 2, heads, 5, 16, device=device) for heads in (4, 2)]
    return all(_agree(own, fused, exact, [t * size for t in given]) for size in (1, 1e6))


# ---- adapters


def _run_adapted(module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    # Zero-bubble pipelines replace the function, as do users.
    usual = F.linear is torch._C._nn.linear and _may_fuse(args, kwargs)
    if not usual or not _is_plain(module, forward, *args):
        return forward(*args, **kwargs)
    (x,), (adapter,) = args, module.active_adapters
    base, a, b = module.base_layer, module.lora_A[adapter], module.lora_B[adapter]
    dropout, dropped, scaling = module.lora_dropout[adapter], x, module.scaling[adapter]
    if type(dropout) is nn.Dropout and dropout.training:
        # Random numbers depend on the type. As the scale is a factor of a product, nothing is rounded to another type.
        dtype = module._cast_input_dtype(x.new_empty(0), a.weight.dtype).dtype
        dropped, scaling = x * (dropout(torch.ones_like(x, dtype=dtype)) != 0), scaling / (1 - dropout.p or 1)
    return AdaptedLinear.apply(module, scaling, x, dropped, base.weight, base.bias, a.weight, b.weight)


def _is_plain(module: Any, forward: Any, x: Tensor) -> bool:
    own = sys.modules["peft.tuners.lora.layer"].Linear
    if forward.__func__ is not own.forward or forward.__module__ != own.__module__ or hooks_of_users(GLOBAL_HOOKS):
        return False
    if module.disable_adapters or module.merged or len(module.active_adapters) != 1:
        return False
    (adapter,) = module.active_adapters
    if adapter not in module.lora_A or adapter in module.lora_variant:
        return False
    _, a, b = parts = module.base_layer, module.lora_A[adapter], module.lora_B[adapter]
    dropout = module.lora_dropout[adapter]
    return (
        all(map(_has_own_weight, parts))
        and all(map(_is_untouched, (*parts, dropout)))
        and a.bias is b.bias is None
        and isinstance(module.scaling[adapter], (int, float))
        and _leaves_input(dropout)
        and _types_fit(x, *(part.weight for part in parts))
    )


def _types_fit(x: Tensor, base: Tensor, a: Tensor, b: Tensor) -> bool:
    types, cast = {x.dtype, base.dtype, a.dtype, b.dtype}, autocast_type(x) is not None
    if torch.float64 in types:  # autocast leaves it as it is
        return len(types) == 1 and not cast
    if cast:
        return True
    # Gradients of adapters in fp32 may be larger than the largest number of fp16.
    return x.dtype == base.dtype and (x.dtype != torch.float16 or len(types) == 1)


def _leaves_input(dropout: nn.Module) -> bool:
    return type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not dropout.inplace)


def _has_own_weight(part: nn.Module) -> bool:
    weight = part._parameters.get("weight")  # a parametrization computes it
    return type(part) is nn.Linear and type(weight) is nn.Parameter and weight.dtype.is_floating_point


def _is_untouched(part: nn.Module) -> bool:
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    return not any(hooks) and "forward" not in vars(part)


def _may_fuse(args: tuple[Any, ...], kwargs: Any) -> bool:
    alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    return alone and torch.is_grad_enabled() and not is_functorch_wrapped_tensor(args[0])
