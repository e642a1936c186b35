"""Lets states of recurrences begin anew in each document of packed rows, in the forwards of a Hugging Face model.

Where documents start is read once in a forward, from the arguments of the model, and holds for all that runs inside:
see Note: [States of packed documents]. Layers that are run again later note it (`LayerCall.documents`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.recurrence import RunningDocuments, compute_alone, handing
from lightning_memo.parallel.batches.packed_documents import DOCUMENT_ARGUMENTS, has_recurrences, separate_documents
from lightning_memo.parallel.batches.token_layout import CurrentLayout, has_whole_rows
from lightning_memo.utils.cache_names import given_cache
from lightning_memo.utils.find_layers import find_hugging_face, find_text_model


def attach_documents(model: nn.Module, current: CurrentLayout) -> list[Callable[[], None]]:
    """Let states begin anew in each document in all forwards of Hugging Face models with recurrences inside `model`.

    Args:
        model: The module that contains the models.
        current: Holds the layout of the batches that `model` is given.

    Returns:
        Functions that undo the change.
    """
    run, undo = _PackedRows(current), []
    for host in find_hugging_face(model):
        text_model = find_text_model(host) or host
        if has_recurrences(text_model):
            inside = set(text_model.modules())
            models = (module for module in host.modules() if hasattr(module, "set_attn_implementation"))
            undo += [replace_forward(m, run) for m in models if m in inside or inside <= set(m.modules())]
    return undo


class _PackedRows:
    """Runs a forward of a model with recurrences, or of a part of it.

    Args:
        current: Holds the layout of the batch. The documents of divided tokens are known from it.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current

    def __call__(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = self._current
        # The engine tells recurrences where documents start. Most kernels could not be told.
        rest = {name: value for name, value in kwargs.items() if name not in DOCUMENT_ARGUMENTS}
        if current.layout is not None or current.of_layers is not None or has_whole_rows():
            return forward(*args, **rest)
        given = dict(zip(inspect.signature(forward).parameters, args, strict=False)) | kwargs
        tokens = next((t for name in ("input_ids", "inputs_embeds") if (t := given.get(name)) is not None), None)
        if not isinstance(tokens, Tensor) or given_cache(given) is not None:  # which generates text
            return forward(*args, **kwargs)
        if current.documents is not None and len(current.documents) == len(tokens):  # a pipeline runs some of the rows
            return forward(*args, **rest)
        documents = separate_documents(model, given, len(tokens), given.get("use_cache"))
        if documents is None:
            return forward(*args, **rest)
        running = RunningDocuments(documents)
        with current.of_documents(documents), handing(model, compute_alone, _refuse, running):
            return forward(*args, **rest)


def _refuse(why: str) -> NoReturn:
    raise AssertionError(why)  # calls on packed rows raise before
