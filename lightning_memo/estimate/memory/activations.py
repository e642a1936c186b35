"""Tensors that a layer saves for its backward: S_input, S_attn and S_others of MEMO, section 4.2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_memo.estimate.inputs.precision_bytes import FP32, ElementBytes
from lightning_memo.estimate.memory.saved_by_experts import readers_of_norm, saved_by_experts
from lightning_memo.estimate.memory.saved_tensor import SavedTensor
from lightning_memo.shapes.attention_widths import LatentAttention
from lightning_memo.shapes.model_shape import SINGLE_OPERATIONS, Kernels, ModelShape


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes per token of the tensors that a layer saves."""

    input: int
    """S_input."""

    attention: int
    """S_attn: the output of attention and its log-sum-exp."""

    others: int
    """S_others."""

    compressible: int = 0
    """Part of S_others that `swap_precision="fp8"` compresses."""

    compressed: int = 0
    """Bytes of this part when it is compressed."""

    restored: int = 0
    """Bytes of the two largest tensors of this part, which one operation of the backward may read."""

    @property
    def total(self) -> int:
        return self.input + self.attention + self.others


def layer_activations(
    shape: ModelShape, *, kernels: Kernels, sizes: ElementBytes, tensor_parallel: int = 1
) -> LayerActivations:
    """Return the bytes that a layer saves, per token that a device keeps between layers.

    Args:
        shape: Shape of the model.
        kernels: Implementation of the layers.
        sizes: Sizes of elements.
        tensor_parallel: Number of tensor-parallel devices. Each of them routes the tokens of all.
    """
    sums = {"input": 0, "attention": 0, "other": 0}
    compressible, compressed = [0], 0
    for tensor in saved_tensors(shape, kernels=kernels, sizes=sizes, tensor_parallel=tensor_parallel):
        sums[tensor.kind] += tensor.bytes_per_token
        size = tensor.compressed_bytes_per_token(shape.hidden)
        if size is not None:
            compressible.append(tensor.bytes_per_token)
            compressed += size
    return LayerActivations(
        sums["input"],
        sums["attention"],
        sums["other"],
        compressible=sum(compressible),
        compressed=compressed,
        restored=sum(sorted(compressible)[-2:]),
    )


def saved_tensors(
    shape: ModelShape, *, kernels: Kernels, sizes: ElementBytes, tensor_parallel: int = 1
) -> tuple[SavedTensor, ...]:
    """Return the tensors that a layer saves, in the order of its operations. See `layer_activations`."""
    layer = _Layer(shape, kernels, sizes)
    return (
        SavedTensor("input", shape.hidden, sizes.stream, "input"),
        *layer.adapters(),
        *layer.norm("input norm", layer.readers, reads_input=True),
        *layer.attention(),
        *layer.norm("feed-forward norm", readers_of_norm(shape), reads_input=kernels == "gpt_neox_parallel"),
        *(layer.feed_forward() if shape.experts == 1 else saved_by_experts(shape, sizes, tensor_parallel)),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: ModelShape
    kernels: Kernels
    sizes: ElementBytes

    @property
    def readers(self) -> list[str]:
        """Projections that read the output of the first norm."""
        return list(self.shape.attention.readers)

    def adapters(self) -> Iterator[SavedTensor]:
        """Intermediate results of the adapters, and the copy of attention's output for the output adapter."""
        adapters, product = self.shape.adapters, self.sizes.product
        if adapters is None:
            return
        for name in adapters.products:
            yield SavedTensor(f"within the adapter of {name}", adapters.rank, product)
        if self.shape.adapts("output") and self.sizes.stream != product:
            yield SavedTensor("attention output for output", self.shape.attention.output, product)

    def reads(self, product: str) -> bool:
        """Whether a product saves its input for the gradient of its weight or of its adapter."""
        return self.shape.adapters is None or self.shape.adapts(product)

    def norm(self, name: str, products: Sequence[str], reads_input: bool) -> Iterator[SavedTensor]:
        """A norm: its input, unless that is the layer's input, its statistics, and its output for the products."""
        hidden, stream = self.shape.hidden, self.sizes.stream
        separate = self.kernels in SINGLE_OPERATIONS
        without_gradient = reads_input and not self.shape.input_gradient
        if without_gradient:  # and without that of a weight: only adapters are trained
            pass
        elif separate:
            yield from self._rms_norm(name, hidden, 1, stream, copies=not reads_input or stream != FP32)
        else:
            if not reads_input:
                yield SavedTensor("residual", hidden, stream)
            if self.kernels != "fused":
                yield SavedTensor(f"{name} mean", 1, stream)
                yield SavedTensor(f"{name} deviation", 1, stream)
        if separate and stream != self.sizes.product:  # each product casts a copy of its own
            for product in filter(self.reads, products):
                yield SavedTensor(f"{name} for {product}", hidden, self.sizes.product)
        elif any(map(self.reads, products)):
            yield SavedTensor(name, hidden, self.sizes.product)

    def attention(self) -> Iterator[SavedTensor]:
        """Queries, keys and values as attention reads them, and its output."""
        shape, product, widths = self.shape, self.sizes.product, self.shape.attention
        if shape.latent is not None and self.kernels != "fused":
            yield from self._latents(shape.latent)
        for name, width, heads in (
            ("query", widths.query, shape.heads), ("key", widths.key, shape.kv_heads), ("value", widths.value, 0)
        ):  # fmt: skip
            if self.kernels == "qwen3" and heads:
                yield from self._rms_norm(f"{name} norm", width, heads, product)
            yield SavedTensor(name, width, product)
        yield SavedTensor("attention output", widths.output, product, "attention")
        if self.kernels != "fused":  # the paper does not count it
            yield SavedTensor("log-sum-exp", shape.heads, FP32, "attention")

    def feed_forward(self) -> Iterator[SavedTensor]:
        """Outputs of the first products, tensors saved by the activation, and the input of the last product."""
        names = ["up"]
        if self.shape.gated:
            names = ["gate", "up"] if self.kernels == "fused" else ["gate", "activated gate", "up"]
        elif self.kernels == "gpt2":
            names = ["up", "half of it", "tanh", "1 + tanh"]
        if self.reads("down"):
            names.append("activated")
        for name in names:
            yield SavedTensor(name, self.shape.ffn, self.sizes.product)

    def _latents(self, latent: LatentAttention) -> Iterator[SavedTensor]:
        """Norms of the latents, and their outputs, which products read."""
        product = self.sizes.product
        for name, width in (("query latent", latent.query_rank), ("key latent", latent.kv_rank)):
            if width:
                yield from self._rms_norm(f"{name} norm", width, 1, product)
                yield SavedTensor(name, width, product)

    def _rms_norm(
        self, name: str, width: int, rows: int, element_bytes: int, copies: bool = True
    ) -> Iterator[SavedTensor]:
        """Tensors that `weight * (x * rsqrt(mean(x^2)))` saves in addition to its output."""
        if copies:
            yield SavedTensor(f"{name} input in fp32", width, FP32)
        yield SavedTensor(f"{name} deviation", rows, FP32)
        if self.shape.adapters is None:  # needed for the gradient of the weight
            wide = self.kernels == "gpt_oss"  # weights in fp32, and casts the result
            yield SavedTensor(f"{name} unweighted", width, FP32 if wide else element_bytes)
