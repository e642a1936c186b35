"""Refuses packed documents for models in which the documents of a row see each other."""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn

from lightning_memo.utils.class_names import class_name

_RECURRENT_TYPES = frozenset(
    {"linear_attention", "conv", "hybrid", "hybrid_sliding", "compressed_sparse_attention",
     "heavily_compressed_attention"}
)  # fmt: skip
"""Entries of `layer_types` in configurations of transformers."""


def refuse_mixed_documents(model: nn.Module) -> None:
    """Refuse a model that does not keep the documents of a packed row apart.

    transformers' mask functions confine attention to documents if they are given positions, which restart at 0 in each
    document. Recurrent layers, convolutions over tokens and linear attention know documents only with some CUDA
    kernels, if at all.

    Raises:
        ValueError: The model has such layers, or makes its masks without positions.
    """
    for module in model.modules():
        why = ""
        if _is_recurrent(module):
            why = "passes information from token to token outside attention"
        elif _masks_lack_positions(module):
            why = "makes its attention masks without position_ids"
        if why:
            raise ValueError(
                f"packing=True puts several documents into a row, and {class_name(module)} {why}, so that documents "
                "would see each other: give packing=False"
            )


def _is_recurrent(module: nn.Module) -> bool:
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return (
        bool(getattr(module, "_is_stateful", False))  # set by transformers' recurrent models
        or not _RECURRENT_TYPES.isdisjoint(types)
        or isinstance(module, nn.RNNBase)
        or (isinstance(module, nn.Conv1d) and module.groups == module.in_channels and module.kernel_size[0] > 1)
    )


def _masks_lack_positions(module: nn.Module) -> bool:
    """Return whether the forward of a model of transformers calls a function for causal masks without `position_ids`.

    The source is read because a run would need weights, which may be divided over processes or on the meta device.
    """
    if not hasattr(module, "config"):
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False  # made at run time
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    masks = [call for call in calls if call.func.id.endswith("causal_mask")]  # type: ignore[attr-defined]
    given: set[object] = {keyword.arg for call in masks for keyword in call.keywords}
    for node in nodes:
        if isinstance(node, ast.Dict):  # gathers the arguments of several masks
            given |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return bool(masks) and "position_ids" not in given
