"""Documents that are packed in the rows of a batch: where they start, and whether a model keeps them apart.

Note: [Documents that see each other]
transformers' mask functions confine attention to documents if they are given positions, which restart at 0 in each
document, and no key-value cache. Recurrences and convolutions over tokens know documents only with some CUDA kernels,
if at all. Those whose functions the engine intercepts begin anew in each document: see
Note: [States of packed documents]. Others are refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from lightning_memo.parallel.batches.place_documents import Documents
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import NoLayersError, find_hugging_face, find_stacks, find_text_model
from lightning_memo.utils.state_functions import JOINED_FUNCTIONS, STATE_FUNCTIONS

DOCUMENT_ARGUMENTS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that tell kernels of other packages where documents start."""

# Entries of `layer_types` in configurations of transformers: layers with states, and with keys of several tokens.
_STATE_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_COMPRESSED_TYPES = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
# Ends of the names of methods with which caches of transformers keep states.
_CACHED_STATES = ("_conv_state", "_recurrent_state", "_linear_cache")
# Further functions of mixers: for one token of a text that is generated, and for padding.
_OTHER_FUNCTIONS = frozenset(
    {
        "apply_mask_to_padding_states",
        "causal_conv1d_update",
        "mamba2_selective_state_update",
        "recurrent_kimi_delta_attention",
        "torch_recurrent_gated_delta_rule",
    }
)


def packed_documents(batch: Mapping[str, Any], rows: int) -> Documents | None:
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
) -> Documents | None:
    """Return the positions at which packed documents start in each row; `None` if rows are not packed.

    Args:
        model: The model that gets the batch, whose states begin anew in each document where they can.
        batch: Batch with `position_ids` `[rows or 1, tokens]`, if any.
        rows: Number of rows of the batch.
        makes_cache: Whether the model makes a key-value cache; `None` if its configuration decides.

    Raises:
        ValueError: Rows are packed, and plain training would let their documents see each other; or arguments for
            kernels tell a model with recurrences of other documents than the positions do.
    """
    documents = packed_documents(batch, rows)
    if any(batch.get(name) is not None for name in DOCUMENT_ARGUMENTS) and has_recurrences(model):
        _check_document_arguments(batch, rows, documents)
    if documents is not None and batch["position_ids"].ndim == 2 and has_axes(model) and not _keeps_axis(model):
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


def _check_document_arguments(batch: Mapping[str, Any], rows: int, documents: Documents | None) -> None:
    """Check that arguments for kernels tell of the documents of which the positions tell.

    Raises:
        ValueError: They do not.
    """
    given = {name: batch[name] for name in ("seq_idx", "cu_seq_lens_q") if isinstance(batch.get(name), Tensor)}
    tokens = next((t.shape[1] for name in ("input_ids", "inputs_embeds") if (t := batch.get(name)) is not None), 0)
    of_rows = documents or ((0,),) * rows
    told = {row * tokens + start for row, starts in enumerate(of_rows) for start in starts}
    for name, t in given.items():
        if name == "seq_idx":
            jumps = t.diff(prepend=t[:, :1] - 1).expand(rows, -1)
            starts = jumps.flatten().nonzero()[:, 0].tolist()
        else:
            starts = t[:-1].tolist()
        if told != set(starts):
            raise ValueError(
                f"{name} and position_ids tell of other documents: give position_ids that restart at 0 in each "
                "document, and no attention_mask"
            )


@dataclass(frozen=True, slots=True)
class MixedDocuments:
    """Why the documents of a packed row see each other.

    Attributes:
        why: What the model does.
        what_to_do: How to keep documents apart, followed by ", or "; empty if the model cannot.
    """

    why: str
    what_to_do: str = ""


def find_mixed_documents(
    model: nn.Module, makes_cache: bool | None = None, resets_states: bool = True
) -> MixedDocuments | None:
    """Return why the documents of a packed row see each other; `None` if they are kept apart.

    See Note: [Documents that see each other].

    Args:
        model: The model.
        makes_cache: Whether the model makes a key-value cache; `None` if its configuration decides.
        resets_states: Whether states of recurrences begin anew in each document where they can.
    """
    modules = _beside_towers(model)
    mixing = next(_recurrences(modules, resets_states), None)
    if mixing is not None:
        return MixedDocuments(f"{class_name(mixing)} passes information from token to token outside attention")
    caching, without_masks = None, _without_masks(model)
    for module in modules:
        name = class_name(module)
        masks, positions = _mask_calls(type(module)) if hasattr(module, "config") else (False, False)
        if (masks and not positions) or module in without_masks:
            return MixedDocuments(f"{name} makes its attention masks without position_ids")
        if masks and (getattr(module.config, "use_cache", False) if makes_cache is None else makes_cache):
            caching = MixedDocuments(f"{name} makes a key-value cache", "set model.config.use_cache = False, or ")
    return caching


def has_recurrences(model: nn.Module) -> bool:
    """Return whether the layers of a model have recurrences, or convolutions over tokens."""
    try:
        layers = find_stacks(model)[0].layers
    except NoLayersError:
        layers = [model]
    stateful = getattr(model, "_is_stateful", False)  # set by transformers' recurrent models
    return bool(stateful) or any(next(_recurrences(list(layer.modules()), False), None) for layer in layers)


def has_axes(model: nn.Module) -> bool:
    """Return whether positions of a model of transformers are those in time, height and width."""
    configs = (host.config.get_text_config() for host in find_hugging_face(model))  # type: ignore[union-attr, operator]
    return any("mrope_section" in (getattr(config, "rope_parameters", None) or ()) for config in configs)


def _beside_towers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model without those that compute features of images or sounds."""
    towers: set[nn.Module] = set()
    for host in find_hugging_face(model):
        if (text_model := find_text_model(host)) is not None:
            inside = set(text_model.modules())
            towers |= {
                module for module in host.modules() if module not in inside and not inside <= {*module.modules()}
            }
    return [module for module in model.modules() if module not in towers]


def _without_masks(model: nn.Module) -> list[nn.Module]:
    """Return the models of transformers that have attention, and no part that calls functions for causal masks."""
    return [
        host
        for host in find_hugging_face(model)
        if any("Attention" in class_name(module) for module in host.modules())
        and not any(hasattr(module, "config") and _mask_calls(type(module))[0] for module in host.modules())
    ]


def _recurrences(modules: Sequence[nn.Module], resets_states: bool) -> Iterator[nn.Module]:
    """Iterate over modules in which tokens meet outside of attention.

    Args:
        modules: Modules, with those inside of them.
        resets_states: Whether to leave out those in which states can begin anew in each document.
    """
    mixers = {module for module in modules if _convolutions(module) or _keeps_states(type(module))}
    resetting = {module for module in mixers if resets_states and _calls_known_functions(module)}
    for module in modules:
        stateful = bool(getattr(module, "_is_stateful", False))  # set by transformers' recurrent models
        if isinstance(module, nn.RNNBase) or module in mixers - resetting or (stateful and not resetting):
            yield module
        elif hasattr(module, "set_attn_implementation"):
            types = getattr(module.config, "layer_types", None) or ()
            states = sum(each in _STATE_TYPES for each in types)
            if states > len(resetting.intersection(module.modules())) or not _COMPRESSED_TYPES.isdisjoint(types):
                yield module


def _convolutions(module: nn.Module) -> set[str]:
    """Return the names of a module's convolutions over tokens, channel by channel."""
    return {
        name
        for name, child in module.named_children()
        if isinstance(child, nn.Conv1d) and child.groups == child.in_channels and child.kernel_size[0] > 1
    }


@functools.cache
def _keeps_states(kind: type[nn.Module]) -> bool:
    """Return whether a class of transformers keeps states in caches."""
    found = (value for each in _classes_of_transformers(kind) for value in vars(each).values() if callable(value))
    functions = (function for function in map(inspect.unwrap, found) if isinstance(function, FunctionType))
    return any(name.endswith(_CACHED_STATES) for function in functions for name in function.__code__.co_names)


def _calls_known_functions(module: nn.Module) -> bool:
    """Return whether tokens meet in a module only in functions of transformers that the engine intercepts."""
    functions, modules = _calls(type(module))
    others = functions - _OTHER_FUNCTIONS - set(JOINED_FUNCTIONS)
    return bool(others) and others <= STATE_FUNCTIONS.keys() and not _convolutions(module) & modules


@functools.cache
def _calls(kind: type[nn.Module]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the functions of its Python module that a class of transformers calls, and its own modules, by name."""
    functions, modules = set(), set()
    for each in _classes_of_transformers(kind):
        home, tree = sys.modules[each.__module__], ast.parse(textwrap.dedent(inspect.getsource(each)))
        bodies = [line for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for line in node.body]
        for node in (node for line in bodies for node in ast.walk(line)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    modules.add(name)
                case ast.Call(func=ast.Name(id=name)):
                    found = getattr(home, name, None)
                    if callable(found) and not isinstance(found, type):
                        functions.add(name)
    return frozenset(functions), frozenset(modules)


def _classes_of_transformers(kind: type[nn.Module]) -> list[type[nn.Module]]:
    return [each for each in kind.__mro__ if each.__module__.startswith("transformers.models.")]


def _keeps_axis(model: nn.Module) -> bool:
    """Return whether models of transformers take positions of one axis also as those in the text, like Qwen3.5."""
    return all(_expands_to_four(type(find_text_model(host) or _innermost(host))) for host in find_hugging_face(model))


def _innermost(host: nn.Module) -> nn.Module:
    return [module for module in host.modules() if hasattr(module, "set_attn_implementation")][-1]


@functools.cache
def _expands_to_four(kind: type[nn.Module]) -> bool:
    """Return whether the source of a model makes four axes of positions, the first of which is that of the text."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))):
        match node:
            case ast.Call(func=ast.Attribute(attr="expand"), args=[ast.Constant(value=4), *_]):
                return True
    return False


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
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = [(call, call.func.value if isinstance(call.func, ast.Subscript) else call.func) for call in calls]
    masks = [call for call, f in called if isinstance(f, ast.Name) and (f.id in names or _names_mask(f))]
    given: set[object] = {keyword.arg for call in masks for keyword in call.keywords}
    for node in nodes:
        if isinstance(node, ast.Dict):  # gathers the arguments of several masks
            given |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return bool(masks), "position_ids" in given


def _names_mask(node: ast.AST) -> bool:
    """Return whether an expression names a function for causal masks."""
    return any(isinstance(each, ast.Name) and each.id.endswith("causal_mask") for each in ast.walk(node))
