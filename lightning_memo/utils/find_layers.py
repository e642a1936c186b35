"""Finds the repeated layers of a model, and the Hugging Face models that it contains."""

from __future__ import annotations

import sys

from torch import nn


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


def find_layers(model: nn.Module, name: str | None = None) -> tuple[str, nn.ModuleList]:
    """Find the repeated layers of a model.

    Without a name, this is the `nn.ModuleList` with the most parameters among those with at least two children of the
    same class, and the outermost one among lists that contain the same parameters.

    Args:
        model: The model.
        name: Dotted name of an `nn.ModuleList`, or the end of one; None to search.

    Returns:
        The dotted name of the list, and the list.

    Raises:
        ValueError: There is no such list, or `name` does not name one.
    """
    lists = {path: m for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if name is not None:
        match = next((path for path in lists if path == name or path.endswith(f".{name}")), None)
        if match is None:
            known = ", ".join(lists) or "none"
            raise ValueError(f'layers="{name}" is not an nn.ModuleList of the model; its lists are: {known}')
        return match, lists[match]
    repeated = {path: m for path, m in lists.items() if len(m) >= 2 and len({type(child) for child in m}) == 1}
    if not repeated:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList of at least two modules of the same class, so there is "
            "nothing to swap layer by layer. If the layers are elsewhere, name them: "
            'MemoStrategy(layers="encoder.blocks"). Otherwise use another strategy.'
        )
    path = max(repeated, key=lambda p: sum(w.numel() for w in repeated[p].parameters()))
    return path, repeated[path]
