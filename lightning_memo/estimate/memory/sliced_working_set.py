"""Peaks of a step whose layers run slice by slice, with keys and values on the host.

The layers are those of `working_set.py`; the buffers around them are smaller. Buffers that the plan reserves (slots,
and blocks of keys and values) are not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from typing_extensions import override

from lightning_memo.estimate.inputs.precision_bytes import FP32
from lightning_memo.estimate.memory.buffer_lifetimes import Buffers
from lightning_memo.estimate.memory.layer_buffers import LayerBuffers
from lightning_memo.estimate.memory.slice_settings import Slices, tables_bytes
from lightning_memo.estimate.memory.working_set import CHUNK_BYTES, RNG_STATE_BYTES, HuggingFaceStep
from lightning_memo.planner.token_slices import slice_tokens_by_alpha

_INT64 = 8
_NORM_ROWS: Final = 12
"""Number of fp32 copies of a chunk of hidden states in the backward of the last norm, if they are on the host."""

_PROBED_SLICES: Final = 2
"""Number of slices on which the engine first runs a layer, if the sequence is longer."""


@dataclass(frozen=True, kw_only=True)
class SlicedStep(HuggingFaceStep):
    """A step in slices on one device, see `HuggingFaceStep`. `tokens` is the length of the sequence."""

    slices: Slices

    @property
    @override
    def outside_bytes(self) -> int:
        """Highest peak in the forward, the loss and the optimizer."""
        if self.slices.schedule == "slice":
            tail = self._tail().lower_bound_bytes
            return max(self._first_run(1), tail, self._optimizer().lower_bound_bytes)
        peaks = (self._first_run(_PROBED_SLICES), self._run_slice(), self._optimizer().lower_bound_bytes)
        return max(*peaks, self._loss_bytes)

    @property
    @override
    def layers_bytes(self) -> int:
        """Highest peak in the backward of layers, in a slice whose gradients add to those of the slice before."""
        if self.slices.schedule == "slice":
            b = self.shared(self.shape.layers)
            b.make(self._arguments)  # arguments of the next slice
            self._part().differentiate(b, b.make(self._part().stream))
            return b.lower_bound_bytes
        missing = 0
        if not self.gradients_stay and self.shape.adapters is None and not self.shape.tied:
            missing = self._weights[0] * self.sizes.gradient  # the gradient of the embeddings comes last
        if self.slices.host_backed == "attention":
            return self._around_on_device().lower_bound_bytes - missing
        return max(self._around_on_host().lower_bound_bytes - missing, self._embedding_bytes)

    def _around_on_device(self) -> Buffers:
        b = self.shared(self.shape.layers)
        b.make(2 * self.stream)  # gradients of the layer's output and input
        b.make(self.slices.key_value_gradient_bytes(self.shape) * (self._count - 1) * self.slices.tokens)
        self._part().differentiate(b, b.make(0))
        return b

    def _around_on_host(self) -> Buffers:
        b = self.shared(self.shape.layers)
        lengths = [part.tokens for part in slice_tokens_by_alpha(self.tokens, 0.0, self.slices.tokens)]
        # In copies: the gradient of the output of the slice before, and those of the input of two slices after.
        in_copies = max(sum(lengths[max(n - 1, 0) : n]) + sum(lengths[n + 1 : n + 3]) for n in range(len(lengths) - 1))
        b.make(in_copies * self.shape.hidden * self.sizes.stream)
        b.make(tables_bytes(self.shape, self.sizes) * self.slices.tokens)
        self._part().differentiate(b, b.make(self._part().stream))
        return b

    # ---- buffers around a layer

    @property
    def _count(self) -> int:
        """Number of slices."""
        return -(-self.tokens // self.slices.tokens)

    def _part(self, count: int = 1) -> LayerBuffers:
        """A layer on a number of slices, whose gradients add to those of other slices."""
        tokens = min(count * self.slices.tokens, self.tokens)
        return LayerBuffers(shape=self.shape, sizes=self.sizes, tokens=tokens, blocks=True, gradients_stay=True)

    @property
    def _arguments(self) -> int:
        """Bytes of the arguments that all layers of a slice use: position tables, and positions twice."""
        return self.slices.tokens * (tables_bytes(self.shape, self.sizes) + 2 * _INT64)

    @override
    def shared(self, calls: int) -> Buffers:
        if self.slices.schedule == "layer" and self.slices.host_backed == "attention":
            return super().shared(calls)
        b = Buffers()
        if self.slices.schedule == "slice":  # one generator state for all layers and slices
            b.make(self._arguments if calls else 0)
            b.make(RNG_STATE_BYTES if calls else 0)
        else:
            b.make(self.tokens * _INT64)
            b.make(calls * RNG_STATE_BYTES)
        return b

    # ---- forward

    def _first_run(self, count: int) -> int:
        part = self._part(count)
        b = self.shared(3)
        if self.slices.states_on_host:
            b.make(tables_bytes(self.shape, self.sizes) * part.tokens)
        whole = self.slices.schedule == "layer" and self.slices.host_backed == "attention"
        b.make(self.stream if whole else part.stream)  # embeddings
        b.make(part.stream)  # copy of the layer's input
        part.run(b)
        return b.lower_bound_bytes

    def _run_slice(self) -> int:
        """Peak of the forward of a slice, with the layer's input and output."""
        part = self._part()
        b = self.shared(self.shape.layers)
        if self.slices.host_backed == "all":
            b.make(tables_bytes(self.shape, self.sizes) * part.tokens)
            b.make(4 * part.stream)  # this slice, the next one, and outputs that are copied to the host
        else:
            b.make(2 * self.stream)
        part.run(b)
        return b.lower_bound_bytes

    # ---- loss

    @property
    def _loss_bytes(self) -> int:
        if self.slices.host_backed == "attention":
            return self.peak_of_loss
        return max(self._streamed_loss(), self._streamed_norm())

    def _streamed_loss(self) -> int:
        """Peak of a chunk of the loss, with hidden states on the host."""
        b = self.shared(self.shape.layers)
        tokens = self._chunk_tokens
        b.make(6 * tokens * self.shape.hidden * self.sizes.stream)  # the chunk, the next one, and their gradients
        trained = self.shape.adapters is None
        if trained:
            b.make(self._weights[0] * FP32)  # gradient of the head, to which all chunks add
        self.copy(b, self._weights[0])
        b.make(tokens * self.shape.vocab * FP32)
        if self.sizes.product != FP32:
            b.make(tokens * self.shape.vocab * self.sizes.product)
        if trained:
            b.make(self._weights[0] * self.sizes.product)
        return b.lower_bound_bytes

    def _streamed_norm(self) -> int:
        return self.shared(self.shape.layers).lower_bound_bytes + (
            _NORM_ROWS * self._chunk_tokens * self.shape.hidden * FP32
        )

    @property
    def _chunk_tokens(self) -> int:
        return min(self.slices.tokens, CHUNK_BYTES // (self.shape.vocab * FP32))

    @property
    def _embedding_bytes(self) -> int:
        """Bytes of the gradient of the embeddings, to which all slices add in fp32."""
        if self.shape.adapters is not None:
            return 0
        part = self._part()
        summed = FP32 - self.sizes.gradient  # in addition to the final gradient
        return self._weights[0] * (self.sizes.gradient + summed) + 4 * part.stream

    def _tail(self) -> Buffers:
        """Forward and backward of norm, head and loss of a slice."""
        one_slice = replace(self, tokens=self.slices.tokens)
        extra_bytes = self._arguments  # arguments of the slice before
        if self.shape.adapters is None and self.sizes.gradient != FP32:
            extra_bytes += self._weights[0] * FP32  # gradient of the head, summed over slices
        if one_slice._chunked:
            return one_slice._chunked_loss(extra_bytes)
        return one_slice._loss(True, extra_bytes + one_slice.product(self.shape.vocab))  # the model's output has logits
