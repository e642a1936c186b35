"""The highest peaks of a profiled step, from buffers with lifetimes: those of Llama's layers as Hugging Face runs them.

A profiled step recomputes every layer; inputs of layers and what attention gives are in host slots. As training does,
peaks count what is alive above weights, all gradients and the optimizer's state: gradients that are not there yet leave
room.

Buffers are told in the order of the operations that make and free them. Operations between which nothing large lives
are left out; norms, say, take more than what they keep for a moment, and never more than a feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.estimate.activations import saved_tensors
from lightning_memo.estimate.buffers import Buffers
from lightning_memo.estimate.shape import ModelShape

RNG_STATE_BYTES: Final = 5056
"""Of PyTorch's generator on a CPU; a layer call keeps one."""

_LOOKS: Final = 3
"""States of the generator alive when the engine first looks at a layer."""

_FP32, _INT64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class HuggingFaceStep:
    """A step of a model of Hugging Face with Llama's layers, on one device, with AdamW.

    Raises:
        ValueError: layers that are not those of Llama, or experts.
    """

    shape: ModelShape
    element_bytes: int
    """Of weights and activations."""

    tokens: int

    def __post_init__(self) -> None:
        if self.shape.kernels != "llama" or self.shape.experts > 1:
            raise ValueError(f"{self.shape.name} has no layers of Llama, the only ones whose buffers are known")

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, two moments and a count of steps for each; and frequencies of positions, kept twice."""
        counts = len(self._weights) * _FP32
        return 4 * self.element_bytes * sum(self._weights) + counts + self.shape.head_dim * self.element_bytes

    @property
    def outside_bytes(self) -> int:
        """Highest peak in the forward, the loss and the optimizer."""
        gradients = self.element_bytes * sum(self._weights)
        loss = self._loss(backward=False).lower_bound_bytes
        of_loss = self._loss(backward=True).lower_bound_bytes - gradients
        return max(self._forward().lower_bound_bytes, loss, of_loss, self._optimizer().lower_bound_bytes)

    @property
    def layers_bytes(self) -> int:
        """Highest peak in the backward of the layers: that of the first one, when all others have their gradients."""
        missing = sum(self._layer_weights) + (0 if self.shape.tied else self._weights[0])
        return self._backward().lower_bound_bytes - self.element_bytes * missing

    @property
    def _weights(self) -> tuple[int, ...]:
        """Elements of each weight, in order."""
        shape = self.shape
        embedding = shape.vocab * shape.hidden
        head = () if shape.tied else (embedding,)
        return (embedding, *self._layer_weights * shape.layers, shape.hidden, *head)

    @property
    def _layer_weights(self) -> tuple[int, ...]:
        shape = self.shape
        query, key = (shape.hidden * shape.head_dim * heads for heads in (shape.heads, shape.kv_heads))
        ffn = shape.hidden * shape.ffn
        return (query, key, key, query, ffn, ffn, ffn, shape.hidden, shape.hidden)

    def _bytes(self, width: int) -> int:
        """Of a tensor with so many elements for each token."""
        return self.tokens * width * self.element_bytes

    @property
    def _hidden(self) -> int:
        return self._bytes(self.shape.hidden)

    @property
    def _ffn(self) -> int:
        return self._bytes(self.shape.ffn)

    @property
    def _query(self) -> int:
        return self._bytes(self.shape.heads * self.shape.head_dim)

    @property
    def _key(self) -> int:
        return self._bytes(self.shape.kv_heads * self.shape.head_dim)

    def _shared(self, calls: int) -> Buffers:
        """What lives through all layers: positions, their cosines and sines, and states of the generator."""
        buffers = Buffers()
        buffers.make(self.tokens * _INT64)
        for _ in ("cosines", "sines"):
            buffers.make(self._bytes(self.shape.head_dim))
        buffers.make(calls * RNG_STATE_BYTES)
        return buffers

    def _forward(self) -> Buffers:
        """The engine's first look at a layer, in the first step: the layer runs with what it stores on the device."""
        b = self._shared(_LOOKS)
        b.make(self._hidden)  # embeddings, which the model holds
        b.make(self._hidden)  # stored: the layer's input
        normed = b.make(self._hidden)
        query, key, value = b.make(self._query), b.make(self._key), b.make(self._key)
        rotated_query = self._rotate(b, self._query)
        rotated_key = self._rotate(b, self._key)
        b.free(query, key)
        b.make(self._query)  # stored: attention's output
        projected = b.make(self._hidden)
        b.free(rotated_query, rotated_key, value, normed)
        b.make(self._hidden)  # the residual
        b.free(projected)
        b.make(self._hidden)  # normed
        gate = b.make(self._ffn)
        activated = b.make(self._ffn)
        b.free(gate)
        up = b.make(self._ffn)
        product = b.make(self._ffn)
        b.free(activated, up)
        b.make(self._hidden)
        b.free(product)
        return b

    @staticmethod
    def _rotate(b: Buffers, size_bytes: int) -> int:
        """`x * cos + rotated * sin`, forward or backward: three of the size at once, of which one stays."""
        first, second, result = (b.make(size_bytes) for _ in range(3))
        b.free(first, second)
        return result

    def _loss(self, backward: bool) -> Buffers:
        """Loss of all tokens at once, and its backward; gradients of weights excluded."""
        b = self._shared(self.shape.layers)
        logits = self.tokens * self.shape.vocab * _FP32
        for _ in ("output", "unweighted", "normed"):
            b.make(self._hidden)
        if self.element_bytes != _FP32:
            b.make(self.tokens * self.shape.hidden * _FP32)  # the norm's copy
        head_output = b.make(self._bytes(self.shape.vocab))
        copy = b.make(logits) if self.element_bytes != _FP32 else head_output
        probabilities = b.make(logits)
        b.free(*{head_output, copy})
        if not backward:
            return b
        picked = b.make(logits)  # the gradient of each token's loss
        gradient = b.make(logits)
        b.free(probabilities, picked)
        if self.element_bytes != _FP32:
            b.make(self._bytes(self.shape.vocab))
            b.free(gradient)
        return b

    def _optimizer(self) -> Buffers:
        """AdamW, weight after weight: a root and a quotient, the latter lives into the next one's turn."""
        b = self._shared(0)
        last: list[int] = []
        for elements in self._weights:
            root, quotient = (b.make(elements * self.element_bytes) for _ in range(2))
            b.free(root, *last)
            last = [quotient]
        return b

    def _backward(self) -> Buffers:
        """A layer recomputed and differentiated, gradients of its weights included."""
        b = self._shared(self.shape.layers)
        query, key, _, output, gate_weight, up_weight, down_weight, *_ = (
            elements * self.element_bytes for elements in self._layer_weights
        )
        dy = b.make(self._hidden)
        recomputed = saved_tensors(self.shape, kernels="llama", element_bytes=self.element_bytes)
        saved = {t.name: b.make(self.tokens * t.bytes_per_token) for t in recomputed if t.kind == "other"}
        b.make(down_weight)
        d_product = b.make(self._ffn)
        b.free(saved["activated"])
        d_activated, d_up = b.make(self._ffn), b.make(self._ffn)
        b.free(saved["activated gate"], saved["up"], d_product)
        b.make(up_weight)
        of_up = b.make(self._hidden)
        b.free(d_up)
        d_gate = b.make(self._ffn)
        b.free(saved["gate"], d_activated)
        b.make(gate_weight)
        of_gate = b.make(self._hidden)
        b.free(saved["feed-forward norm"], d_gate)
        d_normed = b.make(self._hidden)
        b.free(of_up, of_gate)
        d_residual = b.make(self._hidden)
        b.free(d_normed, dy, saved["feed-forward norm unweighted"])
        of_norm = [b.make(self.tokens * self.shape.hidden * _FP32) for _ in range(4)]
        b.free(*of_norm, saved["feed-forward norm input in fp32"], saved["feed-forward norm deviation"])
        b.make(output)
        d_attended = b.make(self._query)
        d_query, d_key, d_value = (b.make(size) for size in (self._query, self._key, self._key))
        b.free(d_attended)
        rotated = [self._rotate(b, self._key)]
        b.free(d_key)
        rotated.append(self._rotate(b, self._query))
        b.free(d_query)
        for weight in (query, key, key):
            b.make(weight)
        b.free(d_residual, d_value, *rotated)
        return b
