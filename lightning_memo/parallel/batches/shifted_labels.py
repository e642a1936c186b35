"""The labels of a divided batch, which are not to be shifted again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


class ShiftedLabels(Tensor):
    """Labels `[batch, tokens]`, each of its token's successor, that refuse to be shifted like labels of whole rows.

    Results of operations on them are plain tensors.
    """

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and _drops_first_token(args[1]):
            raise ValueError(
                'batch["labels"][:, 1:] would shift the labels twice, because they were shifted before the batch was '
                'divided: compare the logits of all tokens with batch["shift_labels"], and divide the summed loss by '
                'batch["num_items_in_batch"]'
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _drops_first_token(index: Any) -> bool:
    """Return whether an index is `[:, 1:]` or `[..., 1:]`."""
    if not isinstance(index, tuple) or len(index) != 2 or not all(part is ... or type(part) is slice for part in index):
        return False
    return index in ((..., slice(1, None)), (slice(None), slice(1, None)))
