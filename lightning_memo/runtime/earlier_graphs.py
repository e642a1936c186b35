"""Explains errors of a backward that reaches the graph of an earlier forward, or of a recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from lightning_memo.engine.slices.recomputation import NEVER_DIFFERENTIATED

_SIGNS: Final = ("Trying to backward through the graph a second time", NEVER_DIFFERENTIATED)


@contextlib.contextmanager
def explaining_earlier_graphs() -> Iterator[None]:
    """Inside, PyTorch's error about a graph that a backward has already used becomes one line.

    A probe finds layers that keep tensors elsewhere, but not those that begin to do so in a later step.

    Raises:
        ValueError: The loss depends on tensors of an earlier forward, or of a recomputation.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        raise ValueError(
            "the loss depends on tensors of an earlier forward, or of a layer that ran again in a backward: if a layer "
            "keeps tensors outside of its modules, arguments and return value (in a global list, for example), let it "
            "return them, or keep them in attributes of its modules; detach() what is kept from one step to the next"
        ) from error
