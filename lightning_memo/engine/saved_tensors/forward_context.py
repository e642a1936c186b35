"""The conditions under which a layer's forward ran, apart from its inputs and weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memo.engine.forward.python_state import AttributeValues
from lightning_memo.engine.saved_tensors.mutated_buffers import MutatedBuffers
from lightning_memo.kernels import RngState


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a recomputation has to restore so that it computes the same as the forward did.

    Attributes:
        rng: The random state before the forward.
        buffers: The values that the layer's changing buffers had before the forward.
        attributes: The values of attributes that the layer's forward writes.
        autocast: A factory of the autocast context that was active in the forward.
    """

    rng: RngState
    buffers: MutatedBuffers
    attributes: AttributeValues
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore the conditions and enable gradients inside the context; put the present state back afterwards."""
        with (
            self.rng.replayed(), self.buffers.replayed(), self.attributes.replayed(), torch.enable_grad(),
            self.autocast(),
        ):  # fmt: skip
            yield
