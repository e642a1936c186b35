"""The conditions under which a layer's forward ran, apart from its inputs and weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.fp8_modules.module_scales import ForwardFp8
from lightning_memo.engine.state.forward_state import ForwardState
from lightning_memo.engine.state.mutated_buffers import BufferVersions, MutatedBuffers
from lightning_memo.engine.state.other_generators import OtherGenerators
from lightning_memo.kernels import RngState


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a recomputation has to restore so that it computes the same as the forward did.

    Attributes:
        rng: The random state before the forward.
        generators: States of other generators before the forward.
        buffers: The values that the layer's changing buffers had before the forward.
        state: What the forward read apart from its inputs; `None` if nothing is recomputed.
        autocast: A factory of the autocast context that was active in the forward.
        versions: Counts of changes of the buffers before the forward; `None` if the layer runs on all tokens at once.
        fp8: The FP8 autocast and scales of the forward; `None` if the layer has none, or nothing is recomputed.
        variables: The context variables (`contextvars`) of the forward. In the backward on a GPU, which has a thread of
            its own, they would have their defaults.
    """

    rng: RngState
    generators: OtherGenerators
    buffers: MutatedBuffers
    state: ForwardState | None
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    versions: BufferVersions | None
    fp8: ForwardFp8 | None = None
    variables: Context = field(default_factory=copy_context)

    @property
    def comparable(self) -> bool:
        """Whether a recomputation saves the same values as the forward."""
        return self.fp8 is None or not self.fp8.pads_scales

    def restore_random(self) -> None:
        """Let the next slice draw the random numbers that the first one drew."""
        self.rng.restore()
        self.generators.restore()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Restore the conditions and enable gradients inside the context; put the present state back afterwards.

        Returns:
            The tensors that are replaced by copies, each with its copy.
        """
        assert self.state is not None
        with (
            self.rng.replayed(), self.generators.replayed(), self.state.replayed() as copies, self.buffers.replayed(),
            torch.enable_grad(), self.autocast(),
            contextlib.nullcontext() if self.fp8 is None else self.fp8.replayed(),
        ):  # fmt: skip
            yield copies
