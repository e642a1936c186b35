"""Peaks of a training step with Llama layers of Hugging Face, computed from buffers with lifetimes.

The step recomputes every layer; layer inputs and attention outputs are in host slots. As in training, peaks are
measured above the weights, all gradients and the optimizer state: gradients that do not exist yet are subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.estimate.inputs.precision_bytes import FP32
from lightning_memo.estimate.memory.buffer_lifetimes import Buffers
from lightning_memo.estimate.memory.layer_buffers import LayerBuffers

RNG_STATE_BYTES: Final = 5056
"""Size of the state of PyTorch's CPU generator. Each layer call saves one."""

CHUNK_BYTES: Final = 512 * 2**20
"""Size of the fp32 logits of a chunk, as in `lightning_memo.loss`, which cannot be imported without torch."""

_FIRST_RUN_STATES: Final = 3
"""Number of generator states that exist when the engine first runs a layer."""

_INT64 = 8


@dataclass(frozen=True, kw_only=True)
class HuggingFaceStep(LayerBuffers):
    """A training step of a Hugging Face model with Llama layers and AdamW, see `LayerBuffers`."""

    optimizer_shards: int = 1
    """Number of devices that the optimizer state is sharded over."""

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients, optimizer state with a step count per weight, and rotary frequencies."""
        sizes, counts = self.sizes, len(self._trained) * FP32
        trained_bytes = (sizes.gradient + sizes.optimizer) * sum(self._trained) + counts
        return sizes.weight * (sum(self._weights) + self.shape.head_dim) + trained_bytes

    @property
    def outside_bytes(self) -> int:
        """Highest peak in the forward, the loss and the optimizer."""
        optimizer = self._optimizer().lower_bound_bytes
        return max(self._forward().lower_bound_bytes, self.peak_of_loss, optimizer)

    @property
    def layers_bytes(self) -> int:
        """Highest peak in the backward of layers: in the first layer, when all others have their gradients."""
        if self.gradients_stay:
            return self._backward().lower_bound_bytes
        return self._backward().lower_bound_bytes - self.gradients_missing_before(0)

    def gradients_missing_before(self, layer: int) -> int:
        """Bytes of gradients that do not exist yet when the backward of a layer begins; the first layer is 0."""
        missing = (layer + 1) * self.trained_in_a_layer
        if self.shape.adapters is None and not self.shape.tied:
            missing += self._weights[0]
        return 0 if self.gradients_stay else self.sizes.gradient * missing

    @property
    def optimizer_bytes(self) -> int:
        """Peak in the optimizer."""
        return self._optimizer().lower_bound_bytes

    @property
    def _weights(self) -> tuple[int, ...]:
        """Number of elements of each weight, in order."""
        shape = self.shape
        embedding = shape.vocab * shape.hidden // self.tensor_parallel
        head = () if shape.tied else (embedding,)
        layer = (*self.layer_weights, *self.adapter_weights)
        return (embedding, *layer * shape.layers, shape.hidden, *head)

    @property
    def _trained(self) -> tuple[int, ...]:
        """Number of elements of each weight that gets a gradient."""
        return self._weights if self.shape.adapters is None else self.adapter_weights * self.shape.layers

    def shared(self, calls: int) -> Buffers:
        """Buffers that live through all layers: positions, their cosines and sines, and generator states."""
        buffers = Buffers()
        buffers.make(self.tokens * _INT64)
        for _ in ("cosines", "sines"):
            buffers.make(self.tokens * self.shape.head_dim * self.sizes.stream)
        buffers.make(calls * RNG_STATE_BYTES)
        return buffers

    @property
    def _logits(self) -> int:
        """Bytes of the logits in fp32. Tensor parallelism divides the vocabulary, not the tokens."""
        return self.tokens * self.shape.vocab * FP32

    @property
    def _chunked(self) -> bool:
        return self._logits > CHUNK_BYTES

    @property
    def peak_of_loss(self) -> int:
        """Peak in the loss. In chunks, its gradients are computed in the forward."""
        if self._chunked:
            return self._chunked_loss().lower_bound_bytes
        missing = 0 if self.gradients_stay else self.sizes.gradient * sum(self._trained)
        backward_peak = self._loss(backward=True).lower_bound_bytes - missing
        return max(self._loss(backward=False).lower_bound_bytes, backward_peak)

    def _loss(self, backward: bool, extra_bytes: int = 0) -> Buffers:
        """Loss of all tokens at once and its backward, without gradients of weights."""
        b, sizes = self.shared(self.shape.layers), self.sizes
        b.make(extra_bytes)
        for _ in ("output", "unweighted", "normed"):
            b.make(self.stream)
        if sizes.stream != FP32:
            b.make(self.tokens * self.shape.hidden * FP32)  # fp32 copy of the norm
        self.copy(b, self.tokens * self.shape.hidden + self._weights[0])
        head_output = b.make(self.product(self.shape.vocab))
        copy = b.make(self._logits) if sizes.product != FP32 else head_output
        probabilities = b.make(self._logits)
        b.free(*{head_output, copy})
        if not backward:
            return b
        picked = b.make(self._logits)  # gradient of each token's loss
        gradient = b.make(self._logits)
        b.free(probabilities, picked)
        if sizes.product != FP32:
            b.make(self.product(self.shape.vocab))
            b.free(gradient)
        return b

    def _chunked_loss(self, extra_bytes: int = 0) -> Buffers:
        """A chunk of the loss, whose gradients are computed in the forward."""
        b = self.shared(self.shape.layers)
        b.make(extra_bytes)
        for _ in ("output of the last layer", "output of the norm", "gradient of this output"):
            b.make(self.stream)
        trained = self.shape.adapters is None
        if trained:
            b.make(self._weights[0] * FP32)  # gradient of the head, to which all chunks add
        self.copy(b, self._weights[0])
        b.make(CHUNK_BYTES)
        if self.sizes.product != FP32:
            b.make(CHUNK_BYTES * self.sizes.product // FP32)
        if trained:
            # Gradients of the head from this chunk and from the one before.
            b.make(2 * self._weights[0] * self.sizes.product)
        return b

    def _optimizer(self) -> Buffers:
        """AdamW, weight by weight: a root and a quotient, which lives until the next weight's."""
        b = self.shared(0)
        last: list[int] = []
        for elements in self._trained:
            root, quotient = (b.make(elements // self.optimizer_shards * self.sizes.optimizer // 2) for _ in range(2))
            b.free(root, *last)
            last = [quotient]
        return b

    def _forward(self) -> Buffers:
        """The engine's first run of a layer, in the first step, with saved tensors on the device."""
        b = self.shared(_FIRST_RUN_STATES)
        b.make(self.stream)  # embeddings, referenced by the model
        b.make(self.stream)  # the layer's input, which is saved
        self.run(b)
        return b

    def _backward(self) -> Buffers:
        b = self.shared(self.shape.layers)
        self.differentiate(b, b.make(self.stream))
        return b
