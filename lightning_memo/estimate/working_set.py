"""The highest peaks of a step, from buffers with lifetimes: those of Llama's layers as Hugging Face runs them.

A step recomputes every layer; inputs of layers and what attention gives are in host slots. As in training, peaks count
what is alive above weights, all gradients and the optimizer's state: gradients that are not there yet leave room.

Buffers are told in the order of the operations that make and free them. Operations between which nothing large lives
are left out; norms, say, take more than what they keep for a moment, and never more than a feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.estimate.activations import saved_tensors
from lightning_memo.estimate.buffers import Buffers
from lightning_memo.estimate.precision import ElementBytes
from lightning_memo.estimate.shape import ModelShape

RNG_STATE_BYTES: Final = 5056
"""Of PyTorch's generator on a CPU; a layer call keeps one."""

CHUNK_BYTES: Final = 512 * 2**20
"""Of the fp32 logits of a chunk, where the loss is chunked: that of `lightning_memo.loss`, which needs torch."""

_LOOKS: Final = 3
"""States of the generator alive when the engine first looks at a layer."""

_FP32, _INT64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class HuggingFaceStep:
    """A step of a model of Hugging Face with Llama's layers, with AdamW.

    Raises:
        ValueError: layers that are not those of Llama, or experts.
    """

    shape: ModelShape
    sizes: ElementBytes
    tokens: int
    """Of the hidden states on the device."""

    tensor_parallel: int = 1
    """Devices that share each layer; products of one gather the hidden states of all."""

    ring: bool = False
    """Whether keys and values of other devices come by."""

    gradients_stay: bool = False
    """Whether gradients are there before the backward, and what it makes is added to them at once."""

    optimizer_shards: int = 1
    """Devices that share the optimizer."""

    def __post_init__(self) -> None:
        if not knows(self.shape):
            raise ValueError(f"{self.shape.name} has no layers of Llama, the only ones whose buffers are known")

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, two moments and a count of steps for each; and frequencies of positions, kept twice."""
        sizes, counts = self.sizes, len(self._trained) * _FP32
        of_trained = (sizes.gradient + sizes.optimizer) * sum(self._trained) + counts
        return sizes.weight * (sum(self._weights) + self.shape.head_dim) + of_trained

    @property
    def outside_bytes(self) -> int:
        """Highest peak in the forward, the loss and the optimizer."""
        peaks = [self._forward().lower_bound_bytes, self._optimizer().lower_bound_bytes]
        if self._chunked:
            return max(*peaks, self._chunked_loss().lower_bound_bytes)
        missing = 0 if self.gradients_stay else self.sizes.gradient * sum(self._trained)
        of_loss = self._loss(backward=True).lower_bound_bytes - missing
        return max(*peaks, self._loss(backward=False).lower_bound_bytes, of_loss)

    @property
    def layers_bytes(self) -> int:
        """Highest peak in the backward of the layers: that of the first one, when all others have their gradients."""
        if self.gradients_stay:
            return self._backward().lower_bound_bytes
        missing = self._trained_in_a_layer
        if self.shape.adapters is None and not self.shape.tied:
            missing += self._weights[0]
        return self._backward().lower_bound_bytes - self.sizes.gradient * missing

    # ---- sizes

    @property
    def _weights(self) -> tuple[int, ...]:
        """Elements of each weight, in order."""
        shape = self.shape
        embedding = shape.vocab * shape.hidden // self.tensor_parallel
        head = () if shape.tied else (embedding,)
        layer = (*self._layer_weights, *self._adapter_weights)
        return (embedding, *layer * shape.layers, shape.hidden, *head)

    @property
    def _trained(self) -> tuple[int, ...]:
        """Those of them that get a gradient."""
        return self._weights if self.shape.adapters is None else self._adapter_weights * self.shape.layers

    @property
    def _trained_in_a_layer(self) -> int:
        return sum(self._layer_weights if self.shape.adapters is None else self._adapter_weights)

    @property
    def _adapter_weights(self) -> tuple[int, ...]:
        return tuple(elements // self.tensor_parallel for elements in self.shape.adapter_weights)

    @property
    def _layer_weights(self) -> tuple[int, ...]:
        shape = self.shape
        query, key = (
            shape.hidden * shape.head_dim * heads // self.tensor_parallel for heads in (shape.heads, shape.kv_heads)
        )
        ffn = shape.hidden * shape.ffn // self.tensor_parallel
        return (query, key, key, query, ffn, ffn, ffn, shape.hidden, shape.hidden)

    @property
    def _stream(self) -> int:
        """Bytes of hidden states."""
        return self.tokens * self.shape.hidden * self.sizes.stream

    def _product(self, width: int) -> int:
        """Bytes of what a product reads or gives, with so many elements for each token."""
        return self.tokens * width * self.sizes.product

    @property
    def _ffn(self) -> int:
        return self._product(self.shape.ffn)

    @property
    def _query(self) -> int:
        return self._product(self.shape.heads * self.shape.head_dim)

    @property
    def _key(self) -> int:
        return self._product(self.shape.kv_heads * self.shape.head_dim)

    @property
    def _gathered(self) -> int:
        """Bytes of hidden states that products read on a device, where they come from several."""
        return self._product(self.shape.hidden) * self.tensor_parallel if self.tensor_parallel > 1 else 0

    @property
    def _autocast(self) -> bool:
        return self.sizes.stream != self.sizes.product

    def _copy(self, b: Buffers, weights: int) -> int:
        """Autocast's copy of some weights; nothing without autocast."""
        return b.make(weights * self.sizes.product if self._autocast else 0)

    # ---- forward

    def _shared(self, calls: int) -> Buffers:
        """What lives through all layers: positions, their cosines and sines, and states of the generator."""
        buffers = Buffers()
        buffers.make(self.tokens * _INT64)
        for _ in ("cosines", "sines"):
            buffers.make(self.tokens * self.shape.head_dim * self.sizes.stream)
        buffers.make(calls * RNG_STATE_BYTES)
        return buffers

    def _forward(self) -> Buffers:
        """The engine's first look at a layer, in the first step: the layer runs with what it stores on the device."""
        b = self._shared(_LOOKS)
        b.make(self._stream)  # embeddings, which the model holds
        b.make(self._stream)  # stored: the layer's input
        normed = [b.make(self._stream), b.make(self._gathered)]
        query = self._run(b, "query", self._query)
        key, value = (self._run(b, name, self._key) for name in ("key", "value"))
        rotated_query = self._rotate(b, self._query)
        rotated_key = self._rotate(b, self._key)
        b.free(query, key)
        b.make(self._query)  # stored: attention's output
        if self.ring:
            b.free(b.make(4 * self._key))  # keys and values of two other devices: one is read, one comes
        projected = self._run(b, "output", self._product(self.shape.hidden))
        b.free(rotated_query, rotated_key, value, *normed)
        b.make(self._stream)  # the residual
        b.free(projected)
        b.make(self._stream)  # normed
        b.make(self._gathered)
        gate = self._run(b, "gate", self._ffn)
        activated = b.make(self._ffn)
        b.free(gate)
        copies = [self._copy(b, self.tokens * self.shape.hidden), self._copy(b, self._layer_weights[4])]
        up = self._run(b, "up", self._ffn)
        b.free(*copies)
        product = b.make(self._ffn)
        b.free(activated, up)
        b.make(self._stream)
        b.free(product)
        return b

    def _run(self, b: Buffers, product: str, size_bytes: int) -> int:
        """What a product gives: where it has an adapter, what that gives is scaled and added."""
        result = b.make(size_bytes)
        if not self.shape.adapts(product):
            return result
        adapted, scaled = b.make(size_bytes), b.make(size_bytes)
        b.free(adapted)
        total = b.make(size_bytes)
        b.free(result, scaled)
        return total

    def _rotate(self, b: Buffers, size_bytes: int) -> int:
        """`x * cos + rotated * sin`, forward or backward: three of the size at once, of which one stays."""
        size_bytes = size_bytes * self.sizes.stream // self.sizes.product
        first, second, result = (b.make(size_bytes) for _ in range(3))
        b.free(first, second)
        return result

    # ---- loss

    @property
    def _logits(self) -> int:
        """Bytes of logits in fp32; tensor parallelism divides the vocabulary, not the tokens."""
        return self.tokens * self.shape.vocab * _FP32

    @property
    def _chunked(self) -> bool:
        return self._logits > CHUNK_BYTES

    def _loss(self, backward: bool) -> Buffers:
        """Loss of all tokens at once, and its backward; gradients of weights excluded."""
        b, sizes = self._shared(self.shape.layers), self.sizes
        for _ in ("output", "unweighted", "normed"):
            b.make(self._stream)
        if sizes.stream != _FP32:
            b.make(self.tokens * self.shape.hidden * _FP32)  # the norm's copy
        self._copy(b, self.tokens * self.shape.hidden + self._weights[0])
        head_output = b.make(self._product(self.shape.vocab))
        copy = b.make(self._logits) if sizes.product != _FP32 else head_output
        probabilities = b.make(self._logits)
        b.free(*{head_output, copy})
        if not backward:
            return b
        picked = b.make(self._logits)  # the gradient of each token's loss
        gradient = b.make(self._logits)
        b.free(probabilities, picked)
        if sizes.product != _FP32:
            b.make(self._product(self.shape.vocab))
            b.free(gradient)
        return b

    def _chunked_loss(self) -> Buffers:
        """A chunk of the loss, whose gradients are made in the forward; what is left of it goes into the backward."""
        b = self._shared(self.shape.layers)
        b.make(self._stream)  # the last layer's output
        b.make(self._stream)  # its gradient
        trained = self.shape.adapters is None
        if trained:
            b.make(self._weights[0] * _FP32)  # the head's gradient, which all chunks add to
        self._copy(b, self._weights[0])
        b.make(CHUNK_BYTES)
        if self.sizes.product != _FP32:
            b.make(CHUNK_BYTES * self.sizes.product // _FP32)
        if trained:
            b.make(self._weights[0] * self.sizes.product)  # the chunk's part of the head's gradient
        return b

    # ---- optimizer

    def _optimizer(self) -> Buffers:
        """AdamW, weight after weight: a root and a quotient, the latter lives into the next one's turn."""
        b = self._shared(0)
        last: list[int] = []
        for elements in self._trained:
            root, quotient = (b.make(elements // self.optimizer_shards * self.sizes.optimizer // 2) for _ in range(2))
            b.free(root, *last)
            last = [quotient]
        return b

    # ---- backward

    def _gradients(self, b: Buffers, product: str, elements: int) -> None:
        """Those of a product's weight, or of its adapter's two."""
        if self.shape.adapters is None:
            self._gradient(b, elements)
        elif self.shape.adapts(product):
            for width in self.shape.products[product]:
                self._gradient(b, self.shape.adapters.rank * width // self.tensor_parallel)

    def _gradient(self, b: Buffers, elements: int) -> None:
        """The gradient of a weight: new, or added to what is there."""
        made = b.make(elements * self.sizes.product) if self._autocast or self.gradients_stay else None
        if not self.gradients_stay:
            b.make(elements * self.sizes.gradient)
        if made is not None:
            b.free(made)

    def _backward(self) -> Buffers:
        """A layer recomputed and differentiated, gradients of its weights included."""
        b = self._shared(self.shape.layers)
        dy = b.make(self._stream)
        recomputed = saved_tensors(self.shape, kernels="llama", sizes=self.sizes)
        saved = {t.name: b.make(self.tokens * t.bytes_per_token) for t in recomputed if t.kind == "other"}
        of_attention = b.make(self._gathered)
        of_feed_forward = b.make(self._gathered)
        d_residual, copies = self._backward_of_feed_forward(b, dy, saved, of_feed_forward)
        self._backward_of_attention(b, d_residual, copies, of_attention)
        return b

    def _backward_of_feed_forward(
        self, b: Buffers, dy: int, saved: dict[str, int], gathered: int
    ) -> tuple[int, list[int]]:
        """The gradient that the residual hands on, and autocast's copies of weights, which stay."""
        hidden = self._product(self.shape.hidden)
        *_, gate_weight, up_weight, down_weight, _, _ = self._layer_weights

        def drop(*names: str) -> None:
            b.free(*(saved.pop(name) for name in names if name in saved))

        if self._autocast:  # at the end of the recomputation: the norm's output, the output's copy and those of weights
            ends = [b.make(self._stream), b.make(hidden), self._copy(b, sum(self._layer_weights) + down_weight)]
            if self.shape.adapts("down"):  # peft gives the adapter a copy in fp32 of what the product reads
                ends += [b.make(self._ffn), b.make(self._ffn * _FP32 // self.sizes.product)]
            b.free(*ends)
        d_output = b.make(hidden if self._autocast else self._gathered)
        copies = [self._copy(b, down_weight)]
        self._gradients(b, "down", down_weight)
        d_product = b.make(self._ffn)
        drop("activated")
        b.free(d_output)
        d_activated, d_up = b.make(self._ffn), b.make(self._ffn)
        drop("activated gate", "up")
        b.free(d_product)
        copies.append(self._copy(b, up_weight))
        self._gradients(b, "up", up_weight)
        of_up = b.make(self._stream * self.tensor_parallel)
        b.free(d_up)
        d_gate = b.make(self._ffn)
        drop("gate")
        b.free(d_activated)
        copies.append(self._copy(b, gate_weight))
        self._gradients(b, "gate", gate_weight)
        of_gate = b.make(self._stream * self.tensor_parallel)
        drop("feed-forward norm", "feed-forward norm for gate", "feed-forward norm for up")
        b.free(d_gate, gathered)
        d_normed = b.make(self._stream)
        b.free(of_up, of_gate)
        d_residual = b.make(self._stream)
        b.free(d_normed, dy)
        drop("feed-forward norm unweighted")
        of_norm = [b.make(self.tokens * self.shape.hidden * _FP32) for _ in range(4)]
        b.free(*of_norm)
        drop("feed-forward norm input in fp32", "feed-forward norm deviation")
        return d_residual, copies

    def _backward_of_attention(self, b: Buffers, d_residual: int, copies: list[int], gathered: int) -> None:
        query, key, _, output, *_ = self._layer_weights
        copies = [*copies, self._copy(b, output)]
        self._gradients(b, "output", output)
        d_attended = b.make(self._query)
        if self.ring:
            b.free(b.make(6 * self._key))  # keys and values of another device, and gradients in fp32 on their way
        d_query, d_key, d_value = (b.make(size) for size in (self._query, self._key, self._key))
        b.free(d_attended)
        rotated = [self._rotate(b, self._key)]
        b.free(d_key)
        rotated.append(self._rotate(b, self._query))
        b.free(d_query)
        for name, weight in (("query", query), ("key", key), ("value", key)):
            copies.append(self._copy(b, weight))
            self._gradients(b, name, weight)
        if self.tensor_parallel > 1:
            b.free(b.make(2 * self._gathered))
        b.free(d_residual, d_value, gathered, *rotated, *copies)


def knows(shape: ModelShape) -> bool:
    """Whether the buffers of a model's layers are known: those of Llama, without experts."""
    return shape.kernels == "llama" and shape.experts == 1
