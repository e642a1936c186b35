"""What the backward and the recomputation of a slice need of attention calls and recurrences."""

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


@dataclass(frozen=True, slots=True)
class StartState:
    """The state at the start of a recurrence, from which a recomputation begins.

    Attributes:
        state: Handle of the state.
        requires_grad: Whether its gradient goes to the slice before.
    """

    state: Handle
    requires_grad: bool
