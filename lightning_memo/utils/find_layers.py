"""Finds the repeated layers of a model, and Hugging Face's models in it."""

from __future__ import annotations

import sys

from torch import nn


def find_hugging_face(module: nn.Module) -> list[nn.Module]:
    """The models of transformers in a module that are not within another one; transformers is not imported for it."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    hosts = [m for m in module.modules() if isinstance(m, transformers.PreTrainedModel)]
    inner = {m for host in hosts for m in host.modules() if m is not host}
    return [host for host in hosts if host not in inner]


def find_layers(model: nn.Module, name: str | None = None) -> tuple[str, nn.ModuleList]:
    """The model's repeated layers, and their dotted name.

    Without a name: of all `nn.ModuleList`s with at least two children of one class, the one with most parameters; the
    outermost if several hold the same ones.

    Raises:
        ValueError: There is no such list, or `name` is not one.
    """
    lists = {path: m for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if name is not None:
        match = next((path for path in lists if path == name or path.endswith(f".{name}")), None)
        if match is None:
            known = ", ".join(lists) or "none"
            raise ValueError(f'layers="{name}" is not an nn.ModuleList of the model: its lists are {known}')
        return match, lists[match]
    repeated = {path: m for path, m in lists.items() if len(m) >= 2 and len({type(child) for child in m}) == 1}
    if not repeated:
        raise ValueError(
            f"{type(model).__name__} has no repeated layers (an nn.ModuleList of at least two modules of one class): "
            'give their dotted name as layers="..."'
        )
    path = max(repeated, key=lambda p: sum(w.numel() for w in repeated[p].parameters()))
    return path, repeated[path]
