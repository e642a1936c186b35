"""Which modules of a model are called before its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memo.kernels.rng_state import RngState
from lightning_memo.utils.class_names import class_name

_TOKENS = 2


class _LayersReachedError(Exception):
    """Ends a forward where it calls a layer."""


def before_layers(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with weights of their own that a model calls before its layers, in the order of registration.

    A forward of two tokens runs up to the first layer. Modules that it does not call come behind the layers, except for
    embeddings that are registered before them: a model may call those for some batches only (token types). If the
    model cannot run such a forward, all modules that are registered before the layers are returned. Forwards of a stage
    notice a wrong answer.

    Args:
        model: A causal language model of transformers.
        layers: Its layers.

    Raises:
        ValueError: The model changes what an embedding has returned, for which later stages have no memory.
    """
    in_layers = {m for layer in layers for m in layer.modules()}
    first = list(_registered_before(model, in_layers))
    called = _called_before(model, set(layers))
    if called is None:
        return first
    kept = called | {m for m in first if isinstance(m, nn.Embedding)}
    return [m for m in model.modules() if m in kept and m not in in_layers and has_weights(m)]


def has_weights(module: nn.Module) -> bool:
    """Return whether a module has weights of its own, outside of its children."""
    return any(True for _ in module.parameters(recurse=False))


def _registered_before(model: nn.Module, in_layers: set[nn.Module]) -> Iterator[nn.Module]:
    for m in model.modules():
        if m in in_layers:
            return
        if has_weights(m):
            yield m


def _called_before(model: nn.Module, layers: set[nn.Module]) -> set[nn.Module] | None:
    """Return what a forward calls before its first layer, with the children of what holds no layers.

    `None` if the forward fails, or calls no layer.
    """
    called: set[nn.Module] = set()
    embedded: list[Tensor] = []

    def note(module: nn.Module, args: Any) -> None:
        if module in layers:
            raise _LayersReachedError
        if layers.isdisjoint(module.modules()):
            called.update(module.modules())

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.Embedding) and isinstance(output, Tensor):
            embedded.append(output)

    device = next(model.parameters()).device
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    handles = [register_module_forward_pre_hook(note), register_module_forward_hook(keep)]
    reached = False
    try:
        with torch.no_grad(), RngState.capture(device).replayed():
            model.forward(input_ids=ids)
    except _LayersReachedError:
        reached = True
    except Exception:  # whatever a model needs that this forward does not give
        reached = False
    finally:
        for handle in handles:
            handle.remove()
    if not reached:
        return None
    _check_unchanged(model, embedded)
    return called


def _check_unchanged(model: nn.Module, embedded: Sequence[Tensor]) -> None:
    if any(t._version > 0 for t in embedded):
        raise ValueError(
            f"pipeline_parallel_size: {class_name(model)} changes the output of an embedding in place, and later "
            "stages have no such output: set pipeline_parallel_size=1"
        )
