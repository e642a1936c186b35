"""Tensors that a layer saves for its backward (S_input, S_attn and S_others of MEMO, section 4.2), and their sizes.

The experts of a mixture run as grouped products, which transformers uses by default: a row for each pair of a token and
a chosen expert, sorted by expert. The sums over all experts do not depend on how evenly they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_memo.shapes.model_shape import SINGLE_OPERATIONS, LatentAttention, ModelShape

Precision = Literal["bf16-true", "bf16-mixed", "32-true"]

BF16: Final = 2
FP32: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes per element of the model state and of activations."""

    weight: int
    gradient: int
    optimizer: int
    """Optimizer state per weight: two moments, and an fp32 weight if the model's weights are not in fp32."""

    product: int
    """Inputs, outputs and weights of matrix products."""

    stream: int
    """Hidden states of the residual stream, and norms."""

    reduced: int
    """Gradients in communication between devices."""

    whole_copies: bool
    """Whether FSDP2 shards the state from ZeRO 1 on and holds full copies of weights in addition to the shards."""

    @property
    def copies_weights(self) -> bool:
        """Whether each product casts a copy of its weight to the type of the computation."""
        return self.weight != self.product


def bytes_of(precision: Precision, devices: int) -> ElementBytes:
    """Return the sizes of training with this package and AdamW.

    Args:
        precision: Precision of Lightning. On one device, bf16-mixed is autocast and hidden states stay in fp32. On
            several devices, FSDP2 casts weights and inputs.
        devices: Number of devices.
    """
    if precision == "bf16-mixed":
        stream = FP32 if devices == 1 else BF16
        size, product = FP32, BF16
    else:
        size = product = stream = BF16 if precision == "bf16-true" else FP32
    return ElementBytes(
        weight=size,
        gradient=size,
        optimizer=2 * size,
        product=product,
        stream=stream,
        reduced=FP32,
        whole_copies=devices > 1,
    )


INT64 = 8
_BOOL = 1
GPT_OSS_TENSORS = ("gate", "up", "clamped gate", "sigmoid", "activated gate", "up + 1", "activated")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a layer saves for its backward."""

    name: str
    width: int
    """Elements per token."""

    element_bytes: int
    kind: Literal["input", "attention", "other"] = "other"

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.element_bytes


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes per token of the tensors that a layer saves."""

    input: int
    """S_input."""

    attention: int
    """S_attn: the output of attention and its log-sum-exp."""

    others: int
    """S_others."""

    @property
    def total(self) -> int:
        return self.input + self.attention + self.others


def layer_activations(shape: ModelShape, *, sizes: ElementBytes, tensor_parallel: int = 1) -> LayerActivations:
    """Return the bytes that a layer saves, per token that a device keeps between layers.

    Args:
        shape: Shape of the model.
        sizes: Sizes of elements.
        tensor_parallel: Number of tensor-parallel devices. Each of them routes the tokens of all.
    """
    sums = {"input": 0, "attention": 0, "other": 0}
    for tensor in saved_tensors(shape, sizes=sizes, tensor_parallel=tensor_parallel):
        sums[tensor.kind] += tensor.bytes_per_token
    return LayerActivations(sums["input"], sums["attention"], sums["other"])


def saved_tensors(shape: ModelShape, *, sizes: ElementBytes, tensor_parallel: int = 1) -> tuple[SavedTensor, ...]:
    """Return the tensors that a layer saves, in the order of its operations. See `layer_activations`."""
    layer = _Layer(shape, sizes)
    return (
        SavedTensor("input", shape.hidden, sizes.stream, "input"),
        *layer.adapters(),
        *layer.norm("input norm", layer.readers, reads_input=True),
        *layer.attention(),
        *layer.norm("feed-forward norm", readers_of_norm(shape), reads_input=shape.kernels == "gpt_neox_parallel"),
        *(layer.feed_forward() if shape.experts == 1 else saved_by_experts(shape, sizes, tensor_parallel)),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: ModelShape
    sizes: ElementBytes

    @property
    def readers(self) -> list[str]:
        """Projections that read the output of the first norm."""
        return list(self.shape.attention.readers)

    def adapters(self) -> Iterator[SavedTensor]:
        """Intermediate results of the adapters, and the copy of attention's output for a separate output adapter."""
        adapters, product = self.shape.adapters, self.sizes.product
        if adapters is None:
            return
        for name in adapters.products:
            yield SavedTensor(f"within the adapter of {name}", adapters.rank, product)
        if self.shape.adapts("output") and self.sizes.stream != product and not self.shape.fused_adapters:
            yield SavedTensor("attention output for output", self.shape.attention.output, product)

    def reads(self, product: str) -> bool:
        """Whether a product saves its input for the gradient of its weight or of its adapter."""
        return self.shape.adapters is None or self.shape.adapts(product)

    def norm(self, name: str, products: Sequence[str], reads_input: bool) -> Iterator[SavedTensor]:
        """A norm: its input, unless that is the layer's input, its statistics, and its output for the products."""
        hidden, stream = self.shape.hidden, self.sizes.stream
        single, separate = self.shape.kernels in SINGLE_OPERATIONS, self.shape.separate_norms
        without_gradient = reads_input and not self.shape.input_gradient
        if without_gradient:  # and without that of a weight: only adapters are trained
            pass
        elif separate:
            yield from self._rms_norm(name, hidden, 1, stream, copies=not reads_input or stream != FP32)
        else:
            if not reads_input:
                yield SavedTensor("residual", hidden, stream)
            if not single:
                yield SavedTensor(f"{name} mean", 1, stream)
            yield SavedTensor(f"{name} deviation", 1, FP32 if single else stream)
        if single and stream != self.sizes.product:  # each product casts a copy of its own
            for product in filter(self.reads, products):
                yield SavedTensor(f"{name} for {product}", hidden, self.sizes.product)
        elif any(map(self.reads, products)):
            yield SavedTensor(name, hidden, self.sizes.product)

    def attention(self) -> Iterator[SavedTensor]:
        """Queries, keys and values as attention reads them, and its output."""
        shape, product, widths = self.shape, self.sizes.product, self.shape.attention
        if shape.latent is not None:
            yield from self._latents(shape.latent)
        for name, width, heads in (
            ("query", widths.query, shape.heads), ("key", widths.key, shape.kv_heads), ("value", widths.value, 0)
        ):  # fmt: skip
            if self.shape.kernels == "qwen3" and heads:
                yield from self._rms_norm(f"{name} norm", width, heads, product)
            yield SavedTensor(name, width, product)
        yield SavedTensor("attention output", widths.output, product, "attention")
        yield SavedTensor("log-sum-exp", shape.heads, FP32, "attention")

    def feed_forward(self) -> Iterator[SavedTensor]:
        """Outputs of the first products, tensors saved by the activation, and the input of the last product."""
        names = ["up"]
        if self.shape.gated:
            names = ["gate", "up"] if self.shape.fused_gates else ["gate", "activated gate", "up"]
        elif self.shape.kernels == "gpt2":
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
        fused = self.shape.fused and element_bytes == self.sizes.stream  # a kernel does not cast its weight
        if fused:
            yield SavedTensor(f"{name} input", width, element_bytes)
        elif copies:
            yield SavedTensor(f"{name} input in fp32", width, FP32)
        yield SavedTensor(f"{name} deviation", rows, FP32)
        if self.shape.adapters is None and not fused:  # needed for the gradient of the weight
            wide = self.shape.kernels == "gpt_oss"  # weights in fp32, and casts the result
            yield SavedTensor(f"{name} unweighted", width, FP32 if wide else element_bytes)


def saved_by_experts(shape: ModelShape, sizes: ElementBytes, tensor_parallel: int) -> Iterator[SavedTensor]:
    """Yield the tensors that the feed-forward of a mixture saves, without those of the norm before it.

    Args:
        shape: Shape of the layer.
        sizes: Sizes of elements.
        tensor_parallel: Number of tensor-parallel devices. Each has rows for its own experts, and routes the tokens of
            all, for which it also has the shared experts.
    """
    for tensor in (*_router(shape, sizes), *_shared(shape, sizes)):
        yield replace(tensor, width=tensor.width * tensor_parallel)
    yield from _rows(shape, sizes)


def readers_of_norm(shape: ModelShape) -> list[str]:
    """Names of the products that read the output of the norm before the feed-forward. Rows of experts are copies."""
    if shape.experts == 1:
        return ["gate", "up"]
    layer = shape.expert_layer
    shared = ("shared gate", "shared up") if layer.shared_ffn else ()
    return ["router", *shared, *(("gate of the shared",) if layer.shared_gate else ())]


def _rows(shape: ModelShape, sizes: ElementBytes) -> Iterator[SavedTensor]:
    """Grouped products are not part of autocast: they read the type of the hidden states."""
    layer, chosen = shape.expert_layer, shape.active_experts
    yield SavedTensor("token of each row", chosen, INT64)
    yield SavedTensor("order of rows", chosen, INT64)
    if layer.router == "gpt_oss":
        yield SavedTensor("expert of each row", chosen, INT64)  # for its bias
    yield SavedTensor("rows", chosen * shape.hidden, sizes.stream)
    for name in GPT_OSS_TENSORS if layer.router == "gpt_oss" else ("gate", "activated gate", "up", "activated"):
        yield SavedTensor(name, chosen * shape.ffn, sizes.stream)
    yield SavedTensor("outputs of rows", chosen * shape.hidden, sizes.stream)
    yield SavedTensor("weights of rows", chosen, _weight_bytes(shape, sizes))
    yield SavedTensor("rows in the order of tokens", chosen, INT64)


def _shared(shape: ModelShape, sizes: ElementBytes) -> Iterator[SavedTensor]:
    layer = shape.expert_layer
    if layer.shared_ffn:
        for name in ("gate", *(() if shape.fused_gates else ("activated gate",)), "up", "activated"):
            yield SavedTensor(f"shared {name}", layer.shared_ffn, sizes.product)
    if layer.shared_gate:
        yield SavedTensor("shared gate's output", 1, sizes.product)
        yield SavedTensor("shared output", shape.hidden, sizes.product)


def _weight_bytes(shape: ModelShape, sizes: ElementBytes) -> int:
    """Size of the weight of a chosen expert."""
    others = {"softmax_fp32": FP32, "chosen_softmax": sizes.stream, "sigmoid": _score_bytes(sizes)}
    return others.get(shape.expert_layer.router, sizes.product)


def _score_bytes(sizes: ElementBytes) -> int:
    """Size of a "sigmoid" router's scores: in fp32, which autocast changes."""
    return FP32 if sizes.stream == sizes.product else sizes.product


def _router(shape: ModelShape, sizes: ElementBytes) -> Iterator[SavedTensor]:
    layer, chosen = shape.expert_layer, shape.active_experts
    kind, score = layer.router, _score_bytes(sizes) if layer.router == "sigmoid" else FP32
    if kind == "sigmoid":
        if sizes.product == sizes.stream == BF16:
            yield SavedTensor("router's input in fp32", shape.hidden, FP32)
        yield SavedTensor("best of groups", 2 * layer.groups, INT64)
        yield SavedTensor("chosen groups", layer.chosen_groups, INT64)
        yield SavedTensor("experts of other groups", shape.experts, _BOOL)
    if kind in ("chosen_softmax", "gpt_oss"):
        yield SavedTensor("weights of experts", chosen, FP32 if kind == "chosen_softmax" else sizes.product)
    else:
        yield SavedTensor("probabilities", shape.experts, score)
    yield SavedTensor("chosen experts", chosen, INT64)
    if layer.normalized and kind not in ("chosen_softmax", "gpt_oss"):
        yield SavedTensor("sum of weights", 1, score)
        yield SavedTensor("weights of experts", chosen, score)
