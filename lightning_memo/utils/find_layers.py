"""Finds the repeated layers of a model, and the Hugging Face models that it contains."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import nn

from lightning_memo.utils.class_names import class_name

LayersOf: TypeAlias = Callable[[nn.Module], list[nn.Module]]


class NoLayersError(ValueError):
    """A model has no repeated layers.

    Args:
        why: Why none are found.
        remedy: What to change in the model.
    """

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}: {remedy}")
        self.why, self.remedy = why, remedy


# Smaller stacks, by this factor in parameters, are trained plainly: each host slot has the size of the largest layer.
SMALL_STACK: Final = 4
_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_hugging_face(module: nn.Module) -> list[nn.Module]:
    """The outermost transformers models of a module. Does not import transformers.

    Args:
        module: Module to search, itself included.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    hosts = [m for m in module.modules() if isinstance(m, transformers.PreTrainedModel)]
    inner = {m for host in hosts for m in host.modules() if m is not host}
    return [host for host in hosts if host not in inner]


def find_text_model(model: nn.Module) -> nn.Module | None:
    """Return the text model inside a multimodal decoder of transformers; `None` if the model takes nothing but text."""
    host: Any = next(iter(find_hugging_face(model)), None)
    if host is None or host.config.is_encoder_decoder:
        return None
    config = host.config.get_text_config()
    if config is host.config:
        return None
    found: nn.Module | None = None
    for module in host.modules():
        is_text = hasattr(module, "set_attn_implementation") and type(module.config) is type(config)
        if is_text and module is not host and (found is None or module in set(found.modules())):
            found = module
    return found


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers of a model that are kept in one container.

    Attributes:
        name: Dotted name of the container.
        layers: Its layers in order, each of them once.
    """

    name: str
    layers: tuple[nn.Module, ...]

    @property
    def parameters(self) -> int:
        """Number of their parameters."""
        return sum(p.numel() for p in {p for layer in self.layers for p in layer.parameters()})

    @property
    def is_trained(self) -> bool:
        """Whether a parameter requires a gradient. Gradients may pass through layers that are not trained, too."""
        return any(p.requires_grad for layer in self.layers for p in layer.parameters())


def find_stacks(model: nn.Module) -> list[LayerStack]:
    """Find the repeated layers of a model.

    They are the children of the outermost `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` whose children are alike,
    or of such containers in a container. Children of an `nn.ModuleList` may have several classes, if one of them occurs
    more than once, or if there is a single child, which may be called many times. Children of an `nn.ModuleDict` are no
    layers if they have stacks themselves.

    Args:
        model: The model.

    Returns:
        The stacks of layers, the one with the most parameters first.

    Raises:
        NoLayersError: There are none, or their blocks are lists or dicts, which are never called themselves.
    """
    stacks = list(_stacks_in("", model, _children_with_modules)) or list(_stacks_in("", model, _children_alike))
    if not stacks:
        _refuse_uncalled(model)
        raise NoLayersError(
            f"{class_name(model)} has no nn.ModuleList, nn.ModuleDict or nn.Sequential of repeated layers, so there "
            "is nothing to swap layer by layer",
            f"{_way_out(model)}, or train without lightning_memo",
        )
    return _largest_first(stacks)


def _largest_first(stacks: Iterable[LayerStack]) -> list[LayerStack]:
    """Order stacks by size, each layer in one of them: models can be held twice, also compiled and as they are."""
    ordered: list[LayerStack] = []
    taken: set[nn.Module] = set()
    for stack in sorted(stacks, key=lambda stack: -stack.parameters):
        if taken.isdisjoint(stack.layers):
            taken.update(stack.layers)
            ordered.append(stack)
    return ordered


def _way_out(model: nn.Module) -> str:
    """What to do with a model in which no stack is found."""
    move = "put its layers into an nn.ModuleList over which its forward loops"
    lists = [path for path, m in model.named_modules() if path and isinstance(m, _CONTAINERS) and _may_be_layers(m)]
    if not lists:
        return move
    return f'if the children of {" or ".join(lists[:3])} are its layers, set layers="{lists[0]}"; otherwise {move}'


def _may_be_layers(container: nn.Module) -> bool:
    """Return whether a container has children of which some are made of modules; an MLP is none of layers."""
    children = list(container.children())
    return len(children) > 1 and any(any(child.children()) for child in children)


def select_stacks(model: nn.Module, names: str | Sequence[str] | None, alone: bool) -> list[LayerStack]:
    """Return the stacks of layers to swap, the one with the most parameters first.

    Without names, these are all stacks that have a quarter of the parameters of the largest trained one, or more. A
    single one is a stack of the text model, if there is one.

    Args:
        model: The model.
        names: Dotted names of containers, or the ends of names; `None` to search.
        alone: Whether only one stack can be swapped. Without names, it is the largest trained one.

    Raises:
        NoLayersError: No names are given, and there are no stacks.
        ValueError: A name names no container of the model, or there are too many names.
    """
    if names is None:
        stacks = find_stacks(model)
        text = find_text_model(model) if alone else None
        if text is not None:
            inside = set(text.modules())
            stacks = [stack for stack in stacks if inside.issuperset(stack.layers)] or stacks
        largest = next((stack for stack in stacks if stack.is_trained), stacks[0])
        return [largest] if alone else [s for s in stacks if s.parameters * SMALL_STACK >= largest.parameters]
    names = [names] if isinstance(names, str) else names
    if alone and len(names) > 1:
        raise ValueError(
            f"layers={list(names)} names several stacks, but slices on the host and divided "
            "tokens work on one: give one name, or leave these settings out"
        )
    return _largest_first(_named(model, name) for name in names)


def select_layers(model: nn.Module, names: str | Sequence[str] | None, alone: bool) -> list[nn.Module]:
    """Return the layers of the stacks that `select_stacks` returns."""
    return [layer for stack in select_stacks(model, names, alone) for layer in stack.layers]


def _named(model: nn.Module, name: str) -> LayerStack:
    containers = {path: m for path, m in model.named_modules() if isinstance(m, _CONTAINERS)}
    match = next((path for path in containers if path == name or path.endswith(f".{name}")), None)
    if match is None:
        known = ", ".join(path for path, m in containers.items() if not isinstance(m, nn.Sequential)) or "none"
        raise ValueError(
            f'layers="{name}" is not an nn.ModuleList, nn.ModuleDict or nn.Sequential of the model; its lists are: '
            f"{known}"
        )
    layers = _layers_within(containers[match], _children_with_modules) or list(containers[match].children())
    if layers and not any(map(_has_forward, layers)):
        raise _uncalled(match, layers[0])
    return LayerStack(match, tuple(dict.fromkeys(layers)))


def _stacks_in(name: str, module: nn.Module, layers_of: LayersOf) -> Iterator[LayerStack]:
    """The outermost stacks of a module, itself included."""
    if layers := _layers_within(module, layers_of):
        yield LayerStack(name, tuple(dict.fromkeys(layers)))
        return
    for child_name, child in module.named_children():
        yield from _stacks_in(f"{name}.{child_name}".lstrip("."), child, layers_of)


def _layers_within(module: nn.Module, layers_of: LayersOf) -> list[nn.Module]:
    """The layers of a container, or of a list of such containers; empty if it has none."""
    if not isinstance(module, _CONTAINERS):
        return []
    parts = () if isinstance(module, nn.ModuleDict) else module.children()  # the parts of a dict are named, not alike
    inner = [_layers_within(part, layers_of) for part in parts]
    if inner and all(inner):
        return [layer for layers in inner for layer in layers]
    return layers_of(module)


def _children_with_modules(container: nn.Module) -> list[nn.Module]:
    """The children that may be layers, with modules of their own; empty if the container is no stack."""
    hosts = set(find_hugging_face(container))
    children = [m for m in container._modules.values() if m is not None and m not in hosts and _is_compound(m)]
    repeated = [m for m in children if sum(type(m) is type(other) for other in children) > 1]
    if isinstance(container, nn.ModuleList):
        return children if repeated or len(children) == 1 else []
    if isinstance(container, nn.ModuleDict):  # it often holds whole models, like a student and a teacher
        return [m for m in repeated if not any(_stacks_in("", m, _children_with_modules))]
    return repeated


def _is_compound(module: nn.Module) -> bool:
    """Whether a module may be a layer: it has a forward, and modules of its own."""
    return _has_forward(module) and any(True for child in module.children() for _ in child.parameters())


def _has_forward(module: nn.Module) -> bool:
    """Whether a module may be called; lists and dicts of modules only hold them."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is not nn.Module.forward


def _refuse_uncalled(model: nn.Module) -> None:
    """Refuse a model whose blocks are never called themselves.

    Raises:
        NoLayersError: It has a list of lists or dicts of modules.
    """
    for name, module in model.named_modules():
        blocks = list(module.children()) if isinstance(module, nn.ModuleList) else []
        if len(blocks) > 1 and not any(map(_has_forward, blocks)) and any(True for _ in module.parameters()):
            raise _uncalled(name, blocks[0])


def _uncalled(name: str, block: nn.Module) -> NoLayersError:
    return NoLayersError(
        f"the children of {name} are no layers, because {class_name(block)} is never called itself",
        "make each block a module with a forward",
    )


def _children_alike(container: nn.Module) -> list[nn.Module]:
    """The children of a list that all have the same class, and parameters; empty if the container is no such list."""
    children = list(container.children()) if isinstance(container, nn.ModuleList) else []
    alike = len(children) > 1 and len({type(m) for m in children}) == 1 and _has_forward(children[0])
    return children if alike and any(True for _ in container.parameters()) else []
