"""The tensors and settings that the backward of an attention call needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_memo.engine.attention.keys_values import KeysValuesSource
from lightning_memo.engine.saved_tensors.offload_group import Handle
from lightning_memo.kernels import AttentionSpec


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """Handles of the tensors that the backward of one attention call needs.

    Attributes:
        out: The output; `None` if attention runs again.
        lse: The log-sum-exp of the scores; `None` if attention runs again.
        state: What else the kernel needs.
        query: The queries; `None` if they are recomputed.
        keys_values: The keys and values; `None` if they are recomputed and no later slice needs them.
        spec: The attention call.
    """

    out: Handle | None
    lse: Handle | None
    state: Any
    query: Handle | None
    keys_values: KeysValuesSource | None
    spec: AttentionSpec
