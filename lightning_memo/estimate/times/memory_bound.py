"""Bytes that the memory-bound operations of a Hugging Face layer read and write: norms, positions, activations, casts.

Each operation of PyTorch reads its operands and writes its result once. Operations are those of the code that
transformers runs without compilation, so a norm is seven of them. Biases, dropout and the weights that autocast copies
are left out, and so are the positions of GPT-NeoX, which rotate a part of each head only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_memo.estimate.inputs.precision_bytes import FP32, ElementBytes
from lightning_memo.estimate.times.layer_products import layer_products
from lightning_memo.shapes.model_shape import SINGLE_OPERATIONS, Kernels, ModelShape


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per token that a group of operations moves."""

    name: str
    """Name of the group, or of a matrix product whose time its bytes determine."""

    forward: float
    backward: float
    again: bool = True
    """Whether a recomputation runs the forward."""


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """Sums of the groups of a layer, in bytes per token."""

    forward: float
    backward: float
    again: float


def layer_traffic(
    shape: ModelShape, *, kernels: Kernels, sizes: ElementBytes, tensor_parallel: int = 1
) -> tuple[Traffic, ...]:
    """Return the memory-bound operations of a layer; none for fused kernels, whose time is that of their products.

    Args:
        shape: Shape of the model.
        kernels: Implementation of the layers.
        sizes: Sizes of elements.
        tensor_parallel: Number of tensor-parallel devices. Each of them routes the tokens of all.
    """
    return () if kernels == "fused" else tuple(_Layer(shape, kernels, sizes, tensor_parallel).groups())


def traffic_of_layer(
    shape: ModelShape, *, kernels: Kernels, sizes: ElementBytes, tensor_parallel: int = 1
) -> LayerTraffic:
    """Return the bytes per token of all memory-bound operations of a layer, see `layer_traffic`."""
    groups = layer_traffic(shape, kernels=kernels, sizes=sizes, tensor_parallel=tensor_parallel)
    return LayerTraffic(
        forward=sum(group.forward for group in groups),
        backward=sum(group.backward for group in groups),
        again=sum(group.forward for group in groups if group.again),
    )


def norm_traffic(width: int, element_bytes: int, *, separate: bool, trained: bool) -> tuple[float, float]:
    """Bytes per token of a norm's forward and backward.

    Args:
        width: Elements per token.
        element_bytes: Size of the elements of its input and output.
        separate: Whether the norm consists of single operations in fp32, as in Llama, or is one kernel.
        trained: Whether its weight gets a gradient.
    """
    e = element_bytes
    if not separate:
        return 2 * e * width, (5 if trained else 3) * e * width
    casts = 0 if e == FP32 else 2 * (e + FP32)
    # square, mean, times deviation; then times weight
    forward = 5 * FP32 + 2 * e + casts
    # weight; its gradient (product and sum); 17 operands of the operations above
    backward = 17 * FP32 + 2 * e + (4 * e if trained else 0) + casts
    return forward * width, backward * width


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: ModelShape
    kernels: Kernels
    sizes: ElementBytes
    tensor_parallel: int

    def groups(self) -> Iterator[Traffic]:
        yield from self._norms()
        yield from self._positions()
        yield from self._activation() if self.shape.experts == 1 else self._mixture()
        yield from self._sums()
        yield from self._casts()
        yield from self._adapters()

    @property
    def _separate(self) -> bool:
        return self.kernels in SINGLE_OPERATIONS

    def _norms(self) -> Iterator[Traffic]:
        shape, trained = self.shape, self.shape.adapters is None
        widths = {
            "input norm": (shape.hidden, self.sizes.stream),
            "feed-forward norm": (shape.hidden, self.sizes.stream),
        }
        if self.kernels == "qwen3":
            for name, heads in (("query norm", shape.heads), ("key norm", shape.kv_heads)):
                widths[name] = heads * shape.head_dim, self.sizes.product
        if shape.latent is not None:
            widths["query latent norm"] = shape.latent.query_rank, self.sizes.product
            widths["key latent norm"] = shape.latent.kv_rank, self.sizes.product
        for name, (width, size) in widths.items():
            yield Traffic(name, *norm_traffic(width, size, separate=self._separate, trained=trained))

    def _positions(self) -> Iterator[Traffic]:
        """`x * cos + rotated * sin` of queries and keys, whose gradients are then copied into the order of tokens."""
        rows = (self.shape.heads + self.shape.kv_heads) * self.shape.head_dim
        copies = 2 * self.sizes.product * rows
        if self._separate:
            yield Traffic("positions", 10 * self.sizes.stream * rows, 15 * self.sizes.stream * rows + copies)
        else:
            yield Traffic("positions", 0, copies)

    def _activation(self) -> Iterator[Traffic]:
        width = self.shape.ffn * self.sizes.product
        if self.shape.gated:  # SiLU, times up
            yield Traffic("activation", 5 * width, 9 * width)
        elif self.kernels == "gpt2":  # eight operations
            yield Traffic("activation", 18 * width, 27 * width)
        else:
            yield Traffic("activation", 2 * width, 3 * width)

    def _mixture(self) -> Iterator[Traffic]:
        """Router, rows for each pair of a token and a chosen expert, and activation functions.

        Rows are gathered, weighted, put into the order of tokens and added. In the backward, gathers are scattered.
        """
        shape, many = self.shape, self.tensor_parallel
        layer, row = shape.expert_layer, shape.active_experts * shape.hidden * self.sizes.stream
        width = shape.active_experts * shape.ffn * self.sizes.stream
        yield Traffic("router", 4 * FP32 * shape.experts * many, 6 * FP32 * shape.experts * many)
        yield Traffic("rows", 7 * row, 11 * row)
        forward, backward = (16, 25) if layer.router == "gpt_oss" else (5, 9)
        yield Traffic("activation", forward * width, backward * width)
        shared = layer.shared_ffn * self.sizes.product * many
        yield Traffic("shared activation", 5 * shared, 9 * shared)

    def _sums(self) -> Iterator[Traffic]:
        """The residual, and sums of the gradients of a tensor that several products read."""
        hidden, stream = self.shape.hidden, self.sizes.stream
        yield Traffic("residual of attention", 3 * stream * hidden, 3 * stream * hidden)
        yield Traffic("residual of feed-forward", 3 * stream * hidden, 3 * stream * hidden, again=False)
        readers = (2 if self._separate else 0) + (1 if self.shape.gated else 0)
        yield Traffic("sums of gradients", 0, 3 * readers * self.sizes.product * hidden)

    def _casts(self) -> Iterator[Traffic]:
        """With autocast, each product copies its input, and its gradient is copied back."""
        if self.sizes.stream == self.sizes.product:
            return
        both = self.sizes.stream + self.sizes.product
        readers = (3 if self._separate else 1) + (2 if self.shape.gated else 1)
        yield Traffic("casts", readers * both * self.shape.hidden, readers * both * self.shape.hidden)

    def _adapters(self) -> Iterator[Traffic]:
        """Adapters: two products, whose rank is too low for the speed of the device to matter, and a scaled sum."""
        size = self.sizes.product
        for product in layer_products(self.shape, self.kernels):
            width = product.inputs
            for number, (name, outputs) in enumerate(product.adapters(self.shape)):
                moved = size * (width + outputs)
                yield Traffic(name, moved, 2 * moved, again=not product.last or number == 0)
                width = outputs
            if self.shape.adapts(product.role):
                backward = size * (2 * product.outputs + 3 * product.inputs)
                yield Traffic(product.sum_name, 5 * size * product.outputs, backward, again=not product.last)
