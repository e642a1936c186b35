"""Runs of a model's layers on a few random tokens, which show what their linear layers compute from.

The layers are copies with random weights in fp32 on the CPU: weights that begin at zero would hide what they are
multiplied with.
"""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memo.parallel.tensor.experts import is_stacked
from lightning_memo.parallel.tensor.linear_layers import is_floating_linear, matrix_of

_ROWS, _TOKENS = 2, 16
_SELECTING = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "nonzero", "multinomial")


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A call of a layer in a forward of the model.

    Attributes:
        layer: Copy of the layer.
        args: Positional arguments.
        kwargs: Arguments by name.
        unused: Which floating-point results of the layer, by number, the model computes nothing from, such as the
            weights of attention.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unused: frozenset[int] = frozenset()

    def fresh(self) -> LayerCall:
        """Returns the same call, whose tensors are leaves of a graph of their own."""
        args, kwargs = _leaves((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def leaves(self) -> list[Tensor]:
        """Returns the tensors among the arguments that require gradients."""
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor) and t.requires_grad]

    def run(self) -> list[Tensor]:
        """Runs the layer. Returns the results that the model computes with.

        What the layer puts into its arguments, such as keys and values for later layers, counts as results.
        """
        before = {id(t) for t in _floats((self.args, self.kwargs))}
        returned = _floats(self.layer(*self.args, **self.kwargs))
        put = [t for t in _floats((self.args, self.kwargs)) if id(t) not in before]
        return [t for number, t in enumerate(returned) if number not in self.unused] + put


def _leaves(values: Any) -> Any:
    values = tree_map_only(UserDict, dict, values)  # PyTorch does not look into these
    return tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), values)


def _floats(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]


class _ReachedHead(Exception):
    """All layers have run."""


def capture_calls(model: nn.Module, kinds: Sequence[Sequence[nn.Module]]) -> dict[nn.Module, LayerCall]:
    """Run a copy of a Hugging Face model on random token ids, without dropout, and record the calls of its layers.

    Args:
        model: The model.
        kinds: Its layers, equal ones together. In the copy the first one stands for the others.

    Returns:
        A call of the first layer of each kind that is called.

    Raises:
        Exception: Whatever the model raises if it does not accept token ids alone.
    """
    copied = _Copy(model, kinds)
    originals = {copied.of(kind[0]): kind[0] for kind in kinds}
    calls: dict[nn.Module, LayerCall] = {}
    used: set[Any] = set()
    flow = _DataFlow()

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        used.update(flow.origins((args, kwargs)))
        calls.setdefault(originals[layer], LayerCall(layer, *_leaves((args, kwargs))))

    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for number, t in enumerate(_floats(output)):
            flow.begin(t, (layer, number))

    def end(head: nn.Module, args: tuple[Any, ...]) -> None:
        used.update(flow.origins(args))
        raise _ReachedHead

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in originals]
    hooks += [layer.register_forward_hook(leave) for layer in originals]
    hooks += [] if copied.head is None else [copied.head.register_forward_pre_hook(end)]
    modules = list(copied.model.modules())
    try:
        with contextlib.suppress(_ReachedHead), torch.random.fork_rng(devices=[]), torch.enable_grad(), flow:
            torch.manual_seed(0)
            used.update(flow.origins(copied.model(input_ids=_token_ids(model))))
    finally:
        for hook in hooks:
            hook.remove()
    if modules != list(copied.model.modules()):
        raise TypeError("the model replaces modules while it runs")
    return {layer: _without_unused(call, used) for layer, call in calls.items()}


def _without_unused(call: LayerCall, used: Collection[Any]) -> LayerCall:
    number_of_results = len(call.fresh().run())
    unused = (number for number in range(number_of_results) if (call.layer, number) not in used)
    return replace(call, unused=frozenset(unused))


class _Copy:
    """A copy of a model with random weights, in which the first layer of each kind stands for all of them.

    Args:
        model: The model.
        kinds: Its layers, equal ones together.
    """

    def __init__(self, model: nn.Module, kinds: Sequence[Sequence[nn.Module]]) -> None:
        self._copies: dict[int, Any] = {}
        self._generator = torch.Generator().manual_seed(0)
        head = _head_of(model)
        # They are not run: their weights may be large.
        for m in model.modules():
            if is_stacked(m) or m is head:
                self._copies |= {id(p): nn.Parameter(torch.empty(p.shape, device="meta")) for p in m.parameters()}
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        for p in () if embedding is None else embedding.parameters():
            self._copies.pop(id(p), None)  # the head may have the same weight
        first = {id(p) for kind in kinds for p in kind[0].parameters()}
        self._left_out = {id(p) for kind in kinds for layer in kind[1:] for p in layer.parameters()} - first
        for kind in kinds:
            twin = self._copy(kind[0])
            self._copies |= {id(layer): twin for layer in kind}
        self.model = self._copy(model)
        self.head = None if head is None else self.of(head)
        for name, m in list(self.model.named_modules()):
            if hasattr(m, "base_layer"):  # adapters are divided like the layer inside
                self.model.set_submodule(name, m.base_layer)
            if is_stacked(m):
                m.forward = partial(_stand_in_for_experts, int(m.num_experts))
            if hasattr(getattr(m, "config", None), "use_cache"):
                m.config.use_cache = False
        if "flash" in str(getattr(self.model.config, "_attn_implementation", "")):
            self.model.set_attn_implementation("sdpa")  # its kernels run on GPUs only
        self.model.eval()

    def of(self, m: nn.Module) -> nn.Module:
        """Returns the copy of a module."""
        found: nn.Module = self._copies[id(m)]
        return found

    def _copy(self, m: nn.Module) -> Any:
        for p in m.parameters():
            if id(p) not in self._copies and id(p) not in self._left_out:
                weight = _random(p.shape, self._generator) if p.is_floating_point() else p.detach().cpu().clone()
                self._copies[id(p)] = nn.Parameter(weight, requires_grad=p.is_floating_point())
        for buffer in m.buffers():
            moved = buffer.detach().cpu().clone()
            self._copies.setdefault(id(buffer), moved.float() if moved.is_floating_point() else moved)
        return copy.deepcopy(m, self._copies)


def _head_of(model: Any) -> nn.Module | None:
    """Returns the output layer of a model, if transformers knows it."""
    with contextlib.suppress(NotImplementedError):
        head: nn.Module | None = model.get_output_embeddings()
        return head
    return None


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) <= 1:  # biases and scales: of one order of magnitude
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) * shape[1:].numel() ** -0.5


def _stand_in_for_experts(count: int, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Stands for experts, whose weights may be large: each of them returns its input.

    Raises:
        TypeError: The arguments are not the chosen experts of each token and their weights.
    """
    by_token = not index.is_floating_point() and index.shape == weights.shape and index.shape[:-1] == x.shape[:-1]
    if not by_token or not 0 <= int(index.min()) <= int(index.max()) < count:
        raise TypeError("experts are not given their choices by token")
    return x * weights.sum(-1, keepdim=True)


def _token_ids(model: Any) -> Tensor:
    """Returns random ids `[rows, tokens]` without the special tokens of the model."""
    config = model.config.get_text_config()
    named = (value for name, value in vars(config).items() if name.endswith(("token_id", "token_index")))
    special = {token for value in named for token in (value if isinstance(value, list) else [value])}
    known = torch.tensor([token for token in range(min(config.vocab_size, 4096)) if token not in special])
    return known[torch.randint(len(known), (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(1))]


@dataclass(frozen=True, slots=True)
class LinearCalls:
    """What the linear layers of a layer compute from.

    Attributes:
        sources: Linear layers that are called once and compute nothing else, in the order of their calls: the linear
            layers whose outputs reach each of them through no other one, and `None` for what is no such output.
        selecting: Linear layers whose outputs decide which values others compute with.
    """

    sources: dict[nn.Module, frozenset[nn.Module | None]]
    selecting: frozenset[nn.Module | None]


def trace_linear_calls(call: LayerCall) -> LinearCalls:
    """Run a layer and follow the outputs of its linear layers."""
    call = call.fresh()
    flow = _DataFlow()
    sources: dict[nn.Module, frozenset[nn.Module | None]] = {}
    others: set[nn.Module] = set()

    def enter(m: nn.Module, args: tuple[Any, ...]) -> None:
        if m in sources:
            others.add(m)
        sources[m] = flow.origins(args)

    def leave(m: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and torch.allclose(output, _product(m, *args), atol=1e-5):
            flow.begin(output, m)
        else:
            others.add(m)

    linears = [m for m in call.layer.modules() if is_floating_linear(m)]
    hooks = [m.register_forward_pre_hook(enter) for m in linears] + [m.register_forward_hook(leave) for m in linears]
    try:
        for t in tree_leaves((call.args, call.kwargs)):
            if isinstance(t, Tensor) and t.requires_grad:
                flow.begin(t, None)
        with flow:
            call.run()
    finally:
        for hook in hooks:
            hook.remove()
    return LinearCalls({m: found for m, found in sources.items() if m not in others}, frozenset(flow.selecting))


def _product(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, matrix_of(m, m.weight), m.bias)


class _DataFlow(TorchDispatchMode):
    """Follows values through all operations. Views of one memory count as the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.selecting: set[Any] = set()
        self._origins: dict[int, frozenset[Any]] = {}
        self._kept: list[Any] = []  # no address is used twice

    def begin(self, t: Tensor, origin: Any) -> None:
        """Let a value originate here."""
        self._kept.append(t)
        self._origins[_address(t)] = frozenset({origin})

    def origins(self, values: Any) -> frozenset[Any]:
        """Returns where values originate."""
        found = (self._origins.get(_address(t), frozenset()) for t in tree_leaves(values) if isinstance(t, Tensor))
        return frozenset().union(*found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        origins = self.origins((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if origins:
            if func._schema.name.rpartition("::")[2] in _SELECTING:
                self.selecting |= origins
            for t in tree_leaves(result):
                if isinstance(t, Tensor):
                    self._kept.append(t)
                    self._origins[_address(t)] = self._origins.get(_address(t), frozenset()) | origins
        return result


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def kinds_of_layers(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Returns layers that have equal modules, sizes and switches together."""
    kinds: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters(remove_duplicate=False))
        modules = tuple((type(m), *_switches(m)) for m in layer.modules())
        kinds.setdefault((modules, shapes), []).append(layer)
    return list(kinds.values())


def _switches(m: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(m).items() if isinstance(value, (bool, str)) and name != "training"]
