"""The highest peaks of a step, from buffers with lifetimes: those of Llama's layers as Hugging Face runs them.

A step recomputes every layer; inputs of layers and what attention gives are in host slots. As in training, peaks count
what is alive above weights, all gradients and the optimizer's state: gradients that are not there yet leave room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.estimate.memory.buffer_lifetimes import Buffers
from lightning_memo.estimate.memory.layer_buffers import LayerBuffers

RNG_STATE_BYTES: Final = 5056
"""Of PyTorch's generator on a CPU; a layer call keeps one."""

CHUNK_BYTES: Final = 512 * 2**20
"""Of the fp32 logits of a chunk, where the loss is chunked: that of `lightning_memo.loss`, which needs torch."""

_LOOKS: Final = 3
"""States of the generator alive when the engine first looks at a layer."""

_FP32, _INT64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class HuggingFaceStep(LayerBuffers):
    """A step of a model of Hugging Face with Llama's layers, with AdamW; see `LayerBuffers`."""

    optimizer_shards: int = 1
    """Devices that share the optimizer."""

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, two moments and a count of steps for each; and frequencies of positions, kept twice."""
        sizes, counts = self.sizes, len(self._trained) * _FP32
        of_trained = (sizes.gradient + sizes.optimizer) * sum(self._trained) + counts
        return sizes.weight * (sum(self._weights) + self.shape.head_dim) + of_trained

    @property
    def outside_bytes(self) -> int:
        """Highest peak in the forward, the loss and the optimizer."""
        of_optimizer = self._optimizer().lower_bound_bytes
        return max(self._forward().lower_bound_bytes, self._peak_of_loss, of_optimizer)

    @property
    def layers_bytes(self) -> int:
        """Highest peak in the backward of the layers: that of the first one, when all others have their gradients."""
        if self.gradients_stay:
            return self._backward().lower_bound_bytes
        missing = self.trained_in_a_layer
        if self.shape.adapters is None and not self.shape.tied:
            missing += self._weights[0]
        return self._backward().lower_bound_bytes - self.sizes.gradient * missing

    @property
    def _weights(self) -> tuple[int, ...]:
        """Elements of each weight, in order."""
        shape = self.shape
        embedding = shape.vocab * shape.hidden // self.tensor_parallel
        head = () if shape.tied else (embedding,)
        layer = (*self.layer_weights, *self.adapter_weights)
        return (embedding, *layer * shape.layers, shape.hidden, *head)

    @property
    def _trained(self) -> tuple[int, ...]:
        """Those of them that get a gradient."""
        return self._weights if self.shape.adapters is None else self.adapter_weights * self.shape.layers

    def _shared(self, calls: int) -> Buffers:
        """What lives through all layers: positions, their cosines and sines, and states of the generator."""
        buffers = Buffers()
        buffers.make(self.tokens * _INT64)
        for _ in ("cosines", "sines"):
            buffers.make(self.tokens * self.shape.head_dim * self.sizes.stream)
        buffers.make(calls * RNG_STATE_BYTES)
        return buffers

    @property
    def _logits(self) -> int:
        """Bytes of logits in fp32; tensor parallelism divides the vocabulary, not the tokens."""
        return self.tokens * self.shape.vocab * _FP32

    @property
    def _chunked(self) -> bool:
        return self._logits > CHUNK_BYTES

    @property
    def _peak_of_loss(self) -> int:
        if self._chunked:
            return self._chunked_loss().lower_bound_bytes
        missing = 0 if self.gradients_stay else self.sizes.gradient * sum(self._trained)
        of_backward = self._loss(backward=True).lower_bound_bytes - missing
        return max(self._loss(backward=False).lower_bound_bytes, of_backward)

    def _loss(self, backward: bool, beside: int = 0) -> Buffers:
        """Loss of all tokens at once, and its backward; gradients of weights excluded. `beside`: other bytes."""
        b, sizes = self._shared(self.shape.layers), self.sizes
        b.make(beside)
        for _ in ("output", "unweighted", "normed"):
            b.make(self.stream)
        if sizes.stream != _FP32:
            b.make(self.tokens * self.shape.hidden * _FP32)  # the norm's copy
        self.copy(b, self.tokens * self.shape.hidden + self._weights[0])
        head_output = b.make(self.product(self.shape.vocab))
        copy = b.make(self._logits) if sizes.product != _FP32 else head_output
        probabilities = b.make(self._logits)
        b.free(*{head_output, copy})
        if not backward:
            return b
        picked = b.make(self._logits)  # the gradient of each token's loss
        gradient = b.make(self._logits)
        b.free(probabilities, picked)
        if sizes.product != _FP32:
            b.make(self.product(self.shape.vocab))
            b.free(gradient)
        return b

    def _chunked_loss(self, beside: int = 0) -> Buffers:
        """A chunk of the loss, whose gradients are made in the forward; what is left of it goes into the backward."""
        b = self._shared(self.shape.layers)
        b.make(beside)
        b.make(self.stream)  # the last layer's output
        b.make(self.stream)  # its gradient
        trained = self.shape.adapters is None
        if trained:
            b.make(self._weights[0] * _FP32)  # the head's gradient, which all chunks add to
        self.copy(b, self._weights[0])
        b.make(CHUNK_BYTES)
        if self.sizes.product != _FP32:
            b.make(CHUNK_BYTES * self.sizes.product // _FP32)
        if trained:
            b.make(self._weights[0] * self.sizes.product)  # the chunk's part of the head's gradient
        return b

    def _optimizer(self) -> Buffers:
        """AdamW, weight after weight: a root and a quotient, the latter lives into the next one's turn."""
        b = self._shared(0)
        last: list[int] = []
        for elements in self._trained:
            root, quotient = (b.make(elements // self.optimizer_shards * self.sizes.optimizer // 2) for _ in range(2))
            b.free(root, *last)
            last = [quotient]
        return b

    def _forward(self) -> Buffers:
        """The engine's first look at a layer, in the first step: the layer runs with what it stores on the device."""
        b = self._shared(_LOOKS)
        b.make(self.stream)  # embeddings, which the model holds
        b.make(self.stream)  # stored: the layer's input
        self.run(b)
        return b

    def _backward(self) -> Buffers:
        b = self._shared(self.shape.layers)
        self.differentiate(b, b.make(self.stream))
        return b
