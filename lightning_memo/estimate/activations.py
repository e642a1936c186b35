"""What a layer keeps for its backward, tensor by tensor: S_input, S_attn and S_others of MEMO, section 4.2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.estimate.shape import Kernels, ModelShape

_FP32: Final = 4


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that a layer keeps."""

    name: str
    width: int
    """Elements for each token."""

    element_bytes: int
    kind: Literal["input", "attention", "other"] = "other"

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.element_bytes


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes for each token of what a layer keeps."""

    input: int
    """S_input."""

    attention: int
    """S_attn: the output of attention, and its log-sum-exp."""

    others: int
    """S_others."""

    @property
    def total(self) -> int:
        return self.input + self.attention + self.others


def layer_activations(shape: ModelShape, *, kernels: Kernels, element_bytes: int) -> LayerActivations:
    """What a layer of a model keeps for each token, undivided by any parallelism.

    Args:
        shape: The model.
        kernels: See there.
        element_bytes: 2 where weights and activations are bf16, 4 where they are fp32.
    """
    sums = {"input": 0, "attention": 0, "other": 0}
    for tensor in saved_tensors(shape, kernels=kernels, element_bytes=element_bytes):
        sums[tensor.kind] += tensor.bytes_per_token
    return LayerActivations(sums["input"], sums["attention"], sums["other"])


def saved_tensors(shape: ModelShape, *, kernels: Kernels, element_bytes: int) -> tuple[SavedTensor, ...]:
    """The same tensor by tensor, in the order in which a layer makes them; see `layer_activations`."""
    layer = _Layer(shape, kernels, element_bytes)
    return (
        SavedTensor("input", shape.hidden, element_bytes, "input"),
        *layer.norm("input norm", reads_input=True),
        *layer.attention(),
        *layer.norm("feed-forward norm", reads_input=kernels == "gpt_neox_parallel"),
        *layer.feed_forward(),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: ModelShape
    kernels: Kernels
    element_bytes: int

    def norm(self, name: str, reads_input: bool) -> Iterator[SavedTensor]:
        """A norm, with what it reads, unless that is the layer's input, and with its output, which a product reads."""
        hidden = self.shape.hidden
        if self.kernels in ("llama", "qwen3"):
            yield from self._rms_norm(name, hidden, 1, copies=not reads_input or self.element_bytes != _FP32)
        else:
            if not reads_input:
                yield SavedTensor("residual", hidden, self.element_bytes)
            if self.kernels != "fused":
                yield SavedTensor(f"{name} mean", 1, self.element_bytes)
                yield SavedTensor(f"{name} deviation", 1, self.element_bytes)
        yield SavedTensor(name, hidden, self.element_bytes)

    def attention(self) -> Iterator[SavedTensor]:
        """Queries, keys and values as attention reads them, and what it gives."""
        shape = self.shape
        counts = {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}
        for name, heads in counts.items():
            if self.kernels == "qwen3" and name != "value":
                yield from self._rms_norm(f"{name} norm", heads * shape.head_dim, heads)
            yield SavedTensor(name, heads * shape.head_dim, self.element_bytes)
        yield SavedTensor("attention output", shape.heads * shape.head_dim, self.element_bytes, "attention")
        if self.kernels != "fused":  # the paper leaves it out
            yield SavedTensor("log-sum-exp", shape.heads, _FP32, "attention")

    def feed_forward(self) -> Iterator[SavedTensor]:
        """Outputs of the first products, what activation functions keep, and what the last product reads."""
        names = ["up"]
        if self.shape.gated:
            names = ["gate", "up"] if self.kernels == "fused" else ["gate", "activated gate", "up"]
        elif self.kernels == "gpt2":
            names = ["up", "half of it", "tanh", "1 + tanh"]
        for name in (*names, "activated"):
            yield SavedTensor(name, self.shape.ffn * self.shape.active_experts, self.element_bytes)

    def _rms_norm(self, name: str, width: int, rows: int, copies: bool = True) -> Iterator[SavedTensor]:
        """What `weight * (x * rsqrt(mean(x^2)))` of `rows` rows keeps beside its output."""
        if copies:
            yield SavedTensor(f"{name} input in fp32", width, _FP32)
        yield SavedTensor(f"{name} deviation", rows, _FP32)
        yield SavedTensor(f"{name} unweighted", width, self.element_bytes)
