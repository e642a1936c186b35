"""What the backward and the recomputation of a slice need of attention calls and recurrences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_memo.engine.attention.sliced_attention import KeysValuesSource
from lightning_memo.engine.memory.noted_tensors import NotedTensor
from lightning_memo.engine.saved_tensors.offload_group import Handle
from lightning_memo.kernels import AttentionSpec


@dataclass(frozen=True, slots=True)
class NotedCall:
    """An attention call, whose masks have to be in the backward what they were in the forward.

    Note: [Masks that change]
    PyTorch's attention saves a boolean mask as the numbers that it adds, so that a user may fill the mask with other
    values before the backward. The engine keeps the user's own mask.
    """

    _spec: AttentionSpec
    _masks: tuple[NotedTensor, ...]

    @classmethod
    def of(cls, spec: AttentionSpec) -> NotedCall:
        """Note a call in the forward."""
        return cls(spec, tuple(NotedTensor.of(mask) for mask in (spec.mask, spec.whole_mask) if mask is not None))

    def again(self, layer: str) -> AttentionSpec:
        """Return the call.

        Args:
            layer: Name of the layer, for messages.

        Raises:
            RuntimeError: A mask was changed in place since the forward.
        """
        for mask in self._masks:
            mask.check(
                f"the attention mask of {layer} was changed in place between a forward and its backward, which needs "
                "its values: give each forward a mask of its own, or change it after the backward"
            )
        return self._spec


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """Handles of the tensors that the backward of one attention call needs.

    Attributes:
        out: The output; `None` if attention runs again.
        lse: The log-sum-exp of the scores; `None` if attention runs again.
        state: What else the kernel needs.
        query: The queries; `None` if they are recomputed.
        keys_values: The keys and values; `None` if they are recomputed and no later slice needs them.
        call: The attention call.
    """

    out: Handle | None
    lse: Handle | None
    state: Any
    query: Handle | None
    keys_values: KeysValuesSource | None
    call: NotedCall


@dataclass(frozen=True, slots=True)
class StartState:
    """The state at the start of a recurrence, from which a recomputation begins.

    Attributes:
        state: Handle of the state.
        requires_grad: Whether its gradient goes to the slice before.
    """

    state: Handle
    requires_grad: bool
