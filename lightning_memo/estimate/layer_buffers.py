"""Buffers of a Llama or Qwen3 layer in the implementation of Hugging Face, in its forward, recomputation and backward.

Buffers are recorded with lifetimes, in the order of the operations that allocate and free them. Operations that cannot
reach the peak are left out. Norms, for example, need temporary buffers that are never larger than those of the
feed-forward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from lightning_memo.estimate.layer_operations import fuses_positions
from lightning_memo.estimate.saved_tensors import FP32, ElementBytes, SavedTensor, saved_tensors
from lightning_memo.planner.placement import Problem
from lightning_memo.shapes.model_shape import ModelShape


@dataclass(slots=True)
class Buffers:
    """Collects buffers. A buffer that is not freed lives until the end."""

    _size: list[int] = field(default_factory=list)
    _birth: list[int] = field(default_factory=list)
    _death: dict[int, int] = field(default_factory=dict)

    def make(self, size_bytes: int) -> int:
        """Allocates a buffer, and returns its number for `free`."""
        self._birth.append(len(self._birth))
        self._size.append(size_bytes)
        return len(self._size) - 1

    def free(self, *numbers: int) -> None:
        """Frees buffers, before the next one is allocated."""
        self._death.update(dict.fromkeys(numbers, len(self._birth)))

    def free_after_next(self, number: int) -> None:
        """Frees a buffer after the next one is allocated."""
        self._death[number] = len(self._birth) + 1

    @property
    def lower_bound_bytes(self) -> int:
        """Largest sum of live buffers, below which no placement has its peak. Training uses the same bound."""
        death = [self._death.get(number, len(self._birth)) for number in range(len(self._size))]
        problem = Problem(
            lower=np.array(self._birth, np.int64), upper=np.array(death, np.int64), size=np.array(self._size, np.int64)
        )
        return problem.lower_bound_bytes


@dataclass(frozen=True, kw_only=True)
class LayerBuffers:
    """Buffers of a layer that runs on a number of tokens.

    Raises:
        ValueError: The layers are neither Llama nor Qwen3 layers, or have experts.
    """

    shape: ModelShape
    sizes: ElementBytes
    tokens: int
    """Number of tokens whose hidden states are on the device."""

    tensor_parallel: int = 1
    """Number of tensor-parallel devices. Matrix products gather the hidden states of all of them."""

    ring: bool = False
    """Whether keys and values pass around a ring of devices."""

    blocks: bool = False
    """Whether keys and values of earlier slices are read block by block."""

    gradients_stay: bool = False
    """Whether gradients exist before the backward, which adds to them at once."""

    def __post_init__(self) -> None:
        if not has_known_buffers(self.shape):
            raise ValueError(f"{self.shape.name}: buffers are known for dense layers of Llama and Qwen3 only")

    @property
    def layer_weights(self) -> tuple[int, ...]:
        shape = self.shape
        query, key = (
            shape.hidden * shape.head_dim * heads // self.tensor_parallel for heads in (shape.heads, shape.kv_heads)
        )
        ffn = shape.hidden * shape.ffn // self.tensor_parallel
        return (query, key, key, query, ffn, ffn, ffn, shape.hidden, shape.hidden)

    @property
    def adapter_weights(self) -> tuple[int, ...]:
        return tuple(elements // self.tensor_parallel for elements in self.shape.adapter_weights)

    @property
    def trained_in_a_layer(self) -> int:
        return sum(self.layer_weights if self.shape.adapters is None else self.adapter_weights)

    @property
    def stream(self) -> int:
        """Bytes of the hidden states on the device."""
        return self.tokens * self.shape.hidden * self.sizes.stream

    def product(self, width: int) -> int:
        """Bytes of a product's input or output with `width` elements per token."""
        return self.tokens * width * self.sizes.product

    @property
    def _ffn(self) -> int:
        return self.product(self.shape.ffn)

    @property
    def _query(self) -> int:
        return self.product(self.shape.heads * self.shape.head_dim)

    @property
    def _key(self) -> int:
        return self.product(self.shape.kv_heads * self.shape.head_dim)

    @property
    def gathered(self) -> int:
        """Bytes of hidden states gathered from all tensor-parallel devices, or 0 without tensor parallelism."""
        return self.product(self.shape.hidden) * self.tensor_parallel if self.tensor_parallel > 1 else 0

    @property
    def autocast(self) -> bool:
        return self.sizes.stream != self.sizes.product

    @property
    def _saved(self) -> tuple[SavedTensor, ...]:
        return saved_tensors(self.shape, sizes=self.sizes)

    def saved_bytes(self, tokens: int, names: Collection[str]) -> int:
        """Bytes of some of the tensors that the layer saves for a number of tokens."""
        return sum(tokens * t.bytes_per_token for t in self._saved if t.name in names)

    def copy(self, b: Buffers, weights: int) -> int:
        """Allocates autocast's copy of weights, which is empty without autocast."""
        return b.make(weights * self.sizes.product if self.autocast else 0)

    def weight(self, b: Buffers, elements: int) -> int:
        """Allocates what a product makes of its weight: autocast's copy, which stays, or the dequantised weight.

        The latter lives as long as the next buffer is allocated, the output of the product.
        """
        if self.shape.quantization is None:
            return self.copy(b, elements)
        made = b.make(elements * self.sizes.product)
        b.free_after_next(made)
        return made

    def run(self, b: Buffers, saves: bool = True) -> None:
        """Records the forward up to its peak. The layer's input already exists.

        Args:
            b: Buffers, to which those of the layer are added.
            saves: Whether attention's output stays.
        """
        normed = [b.make(self.stream), b.make(self.gathered)]
        query = self._run(b, "query", self._query)
        key, value = (self._run(b, name, self._key) for name in ("key", "value"))
        rotated_query = self._rotate(b, self._query)
        rotated_key = self._rotate(b, self._key)
        b.free(query, key)
        attended = b.make(self._query)
        if self.ring:
            b.free(b.make(4 * self._key))  # keys and values of two other devices: one is used, one is received
        projected = self._run(b, "output", self.product(self.shape.hidden))
        b.free(rotated_query, rotated_key, value, *normed, *(() if saves else (attended,)))
        b.make(self.stream)  # residual
        b.free(projected)
        b.make(self.stream)  # output of the norm
        b.make(self.gathered)
        gate = activated = self._run(b, "gate", self._ffn)
        if not self.shape.fused_gates:
            activated = b.make(self._ffn)
            b.free(gate)
        copies = [self.copy(b, self.tokens * self.shape.hidden), self.weight(b, self.layer_weights[4])]
        up = self._run(b, "up", self._ffn)
        b.free(*copies)
        product = b.make(self._ffn)
        b.free(activated, up)
        b.make(self.stream)
        b.free(product)

    def _run(self, b: Buffers, product: str, size_bytes: int) -> int:
        """Records a product. Unless it is fused, the output of an adapter is scaled and added by itself."""
        result = b.make(size_bytes)
        if not self.shape.adapts(product) or self.shape.fused_adapters:
            return result
        adapted, scaled = b.make(size_bytes), b.make(size_bytes)
        b.free(adapted)
        total = b.make(size_bytes)
        b.free(result, scaled)
        return total

    def _rotate(self, b: Buffers, size_bytes: int) -> int:
        """Records `x * cos + rotated * sin`, forward or backward: unless fused, three buffers, one of which stays."""
        if fuses_positions(self.shape, self.sizes):
            return b.make(size_bytes)
        size_bytes = size_bytes * self.sizes.stream // self.sizes.product
        first, second, result = (b.make(size_bytes) for _ in range(3))
        b.free(first, second)
        return result

    def _gradients(self, b: Buffers, product: str, elements: int) -> None:
        """Records the gradients of a product's weight, or of its adapter's two weights."""
        if self.shape.adapters is None:
            self._gradient(b, elements)
        elif self.shape.adapts(product):
            for width in self.shape.products[product]:
                self._gradient(b, self.shape.adapters.rank * width // self.tensor_parallel)

    def _gradient(self, b: Buffers, elements: int) -> None:
        """Records the gradient of a weight, which is new or added to an existing one."""
        made = b.make(elements * self.sizes.product) if self.autocast or self.gradients_stay else None
        if not self.gradients_stay:
            b.make(elements * self.sizes.gradient)
        if made is not None:
            b.free(made)

    def differentiate(
        self, b: Buffers, dy: int, recomputed: Collection[str] | None = None, others_bytes: int = 0
    ) -> None:
        """Records the recomputation and the backward of the layer, including gradients of its weights.

        Args:
            b: Buffers, to which those of the layer are added.
            dy: Number of the buffer with the gradient of the layer's output, which is freed.
            recomputed: Names of the saved tensors that are recomputed; None for all but layer inputs and attention.
            others_bytes: Bytes that earlier slices make when the backward of attention needs their keys and values.
        """
        saved = {
            t.name: b.make(self.tokens * t.bytes_per_token)
            for t in self._saved
            if (t.kind == "other" if recomputed is None else t.name in recomputed)
        }
        attention_input = b.make(self.gathered)
        feed_forward_input = b.make(self.gathered)
        d_residual, copies = self._backward_of_feed_forward(b, dy, saved, feed_forward_input)
        b.make(others_bytes)
        self._backward_of_attention(b, d_residual, copies, attention_input)
        self._backward_of_input_norm(b, saved)

    def _backward_of_feed_forward(
        self, b: Buffers, dy: int, saved: dict[str, int], gathered: int
    ) -> tuple[int, list[int]]:
        """Returns the gradient of the residual, and autocast's copies of weights, which stay."""
        hidden = self.product(self.shape.hidden)
        *_, gate_weight, up_weight, down_weight, _, _ = self.layer_weights

        def drop(*names: str) -> None:
            b.free(*(saved.pop(name) for name in names if name in saved))

        if self.autocast:  # end of the recomputation: the norm's output, and casts of the output and of weights
            weights = down_weight + (sum(self.layer_weights) if self.shape.quantization is None else 0)
            ends = [b.make(self.stream), b.make(hidden), self.weight(b, weights)]
            if self.shape.adapts("down") and not self.shape.fused_adapters:  # peft casts the adapter's input to fp32
                ends += [b.make(self._ffn), b.make(self._ffn * FP32 // self.sizes.product)]
            b.free(*ends)
        d_output = b.make(hidden if self.autocast else self.gathered)
        copies = [self.weight(b, down_weight)]
        self._gradients(b, "down", down_weight)
        d_product = b.make(self._ffn)
        drop("activated")
        b.free(d_output)
        d_gate = d_activated = b.make(self._ffn)  # of the gate itself, if a kernel computes it with the other one
        d_up = b.make(self._ffn)
        drop("activated gate", "up", *(("gate",) if self.shape.fused_gates else ()))
        b.free(d_product)
        copies.append(self.weight(b, up_weight))
        self._gradients(b, "up", up_weight)
        of_up = b.make(self.stream * self.tensor_parallel)
        b.free(d_up)
        if not self.shape.fused_gates:
            d_gate = b.make(self._ffn)
            drop("gate")
            b.free(d_activated)
        copies.append(self.weight(b, gate_weight))
        self._gradients(b, "gate", gate_weight)
        of_gate = b.make(self.stream * self.tensor_parallel)
        drop("feed-forward norm", "feed-forward norm for gate", "feed-forward norm for up")
        b.free(d_gate, gathered)
        d_normed = b.make(self.stream)
        b.free(of_up, of_gate)
        d_residual = b.make(self.stream)
        b.free(d_normed, dy)
        drop("feed-forward norm unweighted")
        self._backward_of_norm(b, 4)
        drop("residual", "feed-forward norm input in fp32", "feed-forward norm deviation")
        return d_residual, copies

    def _backward_of_attention(self, b: Buffers, d_residual: int, copies: list[int], gathered: int) -> None:
        query, key, _, output, *_ = self.layer_weights
        copies = [*copies, self.weight(b, output)]
        self._gradients(b, "output", output)
        d_attended = b.make(self._query)
        if self.blocks:  # the sum of the queries' gradients, and the gradients of a block
            b.free(b.make(self.tokens * self.shape.heads * self.shape.head_dim * FP32 + self._query + 2 * self._key))
        if self.ring:
            b.free(b.make(6 * self._key))  # keys and values of another device, and fp32 gradients in communication
        d_query, d_key, d_value = (b.make(size) for size in (self._query, self._key, self._key))
        b.free(d_attended)
        rotated = [self._rotate(b, self._key)]
        b.free(d_key)
        rotated.append(self._rotate(b, self._query))
        b.free(d_query)
        if self.shape.kernels == "qwen3" and (self.shape.separate_norms or self.autocast):  # norms of queries and keys
            b.free(*[b.make(self._query * FP32 // self.sizes.product) for _ in range(4)])
        for name, weight in (("query", query), ("key", key), ("value", key)):
            copies.append(self.weight(b, weight))
            self._gradients(b, name, weight)
        if self.tensor_parallel > 1:
            b.free(b.make(2 * self.gathered))
        b.free(d_residual, d_value, gathered, *rotated, *copies)

    def _backward_of_input_norm(self, b: Buffers, saved: dict[str, int]) -> None:
        """Records the end of a slice's backward, in which queries, keys and values are still alive."""
        names = [
            "input norm",
            "input norm unweighted",
            *(f"input norm for {name}" for name in ("query", "key", "value")),
        ]
        b.free(*(saved.pop(name) for name in names if name in saved))
        b.make(self.stream)  # gradient of the residual
        self._backward_of_norm(b, 5)

    def _backward_of_norm(self, b: Buffers, copies: int) -> None:
        """Records the temporary buffers of a norm of single operations, in fp32."""
        if self.shape.separate_norms:
            b.free(*[b.make(self.tokens * self.shape.hidden * FP32) for _ in range(copies)])


def has_known_buffers(shape: ModelShape) -> bool:
    """Whether the buffers of a model's layers are known, which holds for equal dense layers of Llama and Qwen3."""
    alike = not shape.parts and shape.latent is None
    return shape.kernels in ("llama", "qwen3") and shape.experts == 1 and alike
