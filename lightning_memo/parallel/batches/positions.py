"""Positions, padding and packed documents of a batch, and models that take no positions, or mix documents.

Note: [Documents that see each other]
transformers' mask functions confine attention to documents if they are given positions, which restart at 0 in each
document, and no key-value cache. Recurrent layers, convolutions over tokens and linear attention know documents only
with some CUDA kernels, if at all.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face

_RECURRENT_TYPES = frozenset(
    {
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    }
)
"""Entries of `layer_types` in configurations of transformers."""


def why_positions_unknown(model: nn.Module) -> str:
    """Returns why a model cannot be told the positions of some of its tokens, as a clause; empty if it can."""
    parts = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    if not any("position_ids" in inspect.signature(part.forward).parameters for part in parts):
        return "takes no position_ids"
    if any(_counts_padding(module) for module in model.modules()):
        return "counts positions by the padding tokens among all tokens"
    return ""


def _counts_padding(module: nn.Module) -> bool:
    """Returns whether a module's positions begin after the id of the padding token, like RoBERTa's and fairseq's."""
    table = getattr(module, "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        return True
    return hasattr(module, "create_position_ids_from_input_ids") and getattr(module, "padding_idx", None) is not None


def largest_position(batch: Mapping[str, Any], tokens: int) -> int:
    """Returns the largest position of a batch. Without `position_ids`, positions count from 0."""
    positions = batch.get("position_ids")
    return tokens - 1 if positions is None else int(positions.max())


def right_padded_lengths(attention_mask: Tensor) -> tuple[int, ...] | None:
    """Returns the number of valid tokens in each row of a padding mask `[batch, tokens]`; `None` if all are valid.

    Raises:
        ValueError: Padding is not on the right, or a row has no valid token.
    """
    valid = attention_mask.bool()
    lengths = valid.sum(-1)
    on_the_right = torch.arange(valid.shape[-1], device=valid.device) < lengths[:, None]
    wrong = (valid != on_the_right).any() | (lengths == 0).any()
    is_wrong, *counts = torch.cat([wrong[None].to(lengths.dtype), lengths]).tolist()  # the host waits once for all
    if is_wrong:
        raise ValueError(
            "attention_mask has padding that is not on the right, or a row without valid tokens: pad on the right "
            '(tokenizer.padding_side = "right")'
        )
    return None if min(counts) == valid.shape[-1] else tuple(counts)


def valid_ranges(attention_mask: Tensor) -> list[tuple[int, int]] | None:
    """Returns the first and the end of the valid tokens of each row of a padding mask `[batch, tokens]`.

    A row without valid tokens begins and ends after its last token. The result is empty if all tokens are valid, and
    `None` if the valid tokens of a row do not follow one another.
    """
    valid = attention_mask.bool()
    first, count = first_and_count(valid)
    # The host waits once for all.
    rows = list(zip(*torch.stack([first, first + count, valid.any(-1)]).tolist(), strict=True))
    tokens = valid.shape[-1]
    if any(start == stop and some for start, stop, some in rows):
        return None
    if all((start, stop) == (0, tokens) for start, stop, _ in rows):
        return []
    return [(start, stop) if some else (tokens, tokens) for start, stop, some in rows]


def first_and_count(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first true entry of each row of a boolean `[..., entries]`, and the number of true entries.

    The number is 0 if the true entries of a row do not follow one another, or if there are none.
    """
    entries = valid.view(torch.uint8)  # sums of booleans take much longer
    runs = (valid[..., 1:] > valid[..., :-1]).view(torch.uint8).sum(-1, dtype=torch.int32) + entries[..., 0]
    return entries.argmax(-1), torch.where(runs == 1, entries.sum(-1, dtype=torch.int32), 0)


def packed_documents(batch: Mapping[str, Any], rows: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the positions at which packed documents start in each row; `None` if rows are not packed.

    As in transformers, a document starts where position ids do not increase by one and the batch has no attention mask.

    Args:
        batch: Batch with `position_ids` `[rows or 1, tokens]`, if any. Those of several axes tell of documents if the
            first of four axes has the positions in the text.
        rows: Number of rows of the batch.
    """
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return None
    if positions.ndim == 3:
        if len(positions) != 4:
            return None
        positions = positions[0]
    jumps = (positions.diff() != 1).cpu()
    if not jumps.any():
        return None
    starts = tuple((0, *(row.nonzero()[:, 0] + 1).tolist()) for row in jumps)
    return starts * (rows // len(starts))


def separate_documents(
    model: nn.Module, batch: Mapping[str, Any], rows: int, makes_cache: bool | None = None
) -> tuple[tuple[int, ...], ...] | None:
    """Return the positions at which packed documents start in each row; `None` if rows are not packed.

    Args:
        model: The model that gets the batch.
        batch: Batch with `position_ids` `[rows or 1, tokens]`, if any.
        rows: Number of rows of the batch.
        makes_cache: Whether the model makes a key-value cache; `None` if its configuration decides.

    Raises:
        ValueError: Rows are packed, and plain training would let their documents see each other.
    """
    documents = packed_documents(batch, rows)
    if documents is not None and batch["position_ids"].ndim == 2 and _has_axes(model):
        raise ValueError(
            "position_ids tell that rows hold several documents, and positions of this model have several axes "
            "(M-RoPE): give position_ids [4, batch, tokens], the positions in the text first, or pass one document in "
            "each row"
        )
    mixed = None if documents is None else find_mixed_documents(model, makes_cache)
    if mixed is not None:
        raise ValueError(
            f"position_ids tell that rows hold several documents, and {mixed.why}, so that documents would see each "
            f"other: {mixed.what_to_do}pass one document in each row, or an attention_mask of ones to let them see "
            "each other"
        )
    return documents


@dataclass(frozen=True, slots=True)
class MixedDocuments:
    """Why the documents of a packed row see each other.

    Attributes:
        why: What the model does.
        what_to_do: How to keep documents apart, followed by ", or "; empty if the model cannot.
    """

    why: str
    what_to_do: str = ""


def find_mixed_documents(model: nn.Module, makes_cache: bool | None = None) -> MixedDocuments | None:
    """Return why the documents of a packed row see each other; `None` if they are kept apart.

    See Note: [Documents that see each other].

    Args:
        model: The model.
        makes_cache: Whether the model makes a key-value cache; `None` if its configuration decides.
    """
    caching = None
    for module in model.modules():
        name = class_name(module)
        if _is_recurrent(module):
            return MixedDocuments(f"{name} passes information from token to token outside attention")
        masks, positions = _mask_calls(type(module)) if hasattr(module, "config") else (False, False)
        if masks and not positions:
            return MixedDocuments(f"{name} makes its attention masks without position_ids")
        if masks and (getattr(module.config, "use_cache", False) if makes_cache is None else makes_cache):
            caching = MixedDocuments(f"{name} makes a key-value cache", "set model.config.use_cache = False, or ")
    return caching


def _has_axes(model: nn.Module) -> bool:
    """Return whether positions of a model of transformers are those in time, height and width."""
    configs = (host.config.get_text_config() for host in find_hugging_face(model))  # type: ignore[union-attr, operator]
    return any("mrope_section" in (getattr(config, "rope_parameters", None) or ()) for config in configs)


def _is_recurrent(module: nn.Module) -> bool:
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return (
        bool(getattr(module, "_is_stateful", False))  # set by transformers' recurrent models
        or not _RECURRENT_TYPES.isdisjoint(types)
        or isinstance(module, nn.RNNBase)
        or (isinstance(module, nn.Conv1d) and module.groups == module.in_channels and module.kernel_size[0] > 1)
    )


@functools.cache
def _mask_calls(kind: type[nn.Module]) -> tuple[bool, bool]:
    """Return whether a model of transformers calls functions for causal masks, and whether with `position_ids`.

    The source is read because a run would need weights, which may be divided over processes or on the meta device.
    """
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False, False  # made at run time
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    aliases = [node for node in nodes if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)]
    names = {
        target.id
        for node in aliases
        if _names_mask(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    masks = [call for call in calls if call.func.id in names or _names_mask(call.func)]  # type: ignore[attr-defined]
    given: set[object] = {keyword.arg for call in masks for keyword in call.keywords}
    for node in nodes:
        if isinstance(node, ast.Dict):  # gathers the arguments of several masks
            given |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return bool(masks), "position_ids" in given


def _names_mask(node: ast.AST) -> bool:
    """Return whether an expression names a function for causal masks."""
    return any(isinstance(each, ast.Name) and each.id.endswith("causal_mask") for each in ast.walk(node))
