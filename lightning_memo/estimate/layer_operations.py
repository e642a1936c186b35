"""Operations of a Hugging Face layer: matrix products with its weights, and the bytes that all others read and write.

Each operation of PyTorch reads its operands and writes its result once. Operations are those of the code that
transformers runs without compilation, so a norm is seven of them. Biases, dropout and the weights that autocast copies
are left out, and so are the positions of GPT-NeoX, which rotate a part of each head only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightning_memo.estimate.saved_tensors import FP32, ElementBytes
from lightning_memo.shapes.model_shape import SINGLE_OPERATIONS, ModelShape

_FUSED_NAMES: Final = {
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "gpt_neox": ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}
_ROUTERS: Final = {"chosen_softmax": "block_sparse_moe.router", "gpt_oss": "mlp.router"}


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """A product of hidden states with a weight."""

    name: str
    """Name of its module in the layer."""

    role: str
    """Its name among the projections of a layer, see `lightning_memo.shapes.model_shape`."""

    inputs: int
    outputs: int
    last: bool = False
    """Whether it is the last one of the layer, whose output no recomputation needs."""

    def recomputed_name(self, shape: ModelShape) -> str:
        """Name of the product, or of the one to which its adapter's is added, if a recomputation computes it.

        Products with quantised weights have none: they are operations of bitsandbytes, whose outputs no plan stores.
        """
        if shape.quantization is not None:
            return ""
        if shape.adapts(self.role) and not shape.fused_adapters:
            return f"{self.name}.base_layer"  # also of the last one, which its adapter follows
        return "" if self.last else self.name

    @property
    def divides_inputs(self) -> bool:
        """Whether tensor-parallel devices divide the features of its input."""
        return self.role in ("output", "down")

    @property
    def divides_outputs(self) -> bool:
        """Whether tensor-parallel devices divide the features of its output."""
        return self.role in ("query", "key", "value", "gate", "up")

    @property
    def adapter_names(self) -> tuple[str, str]:
        """Names of the two products of its LoRA adapter, if it has one."""
        return f"{self.name}.lora_A.default", f"{self.name}.lora_B.default"


def layer_products(shape: ModelShape) -> tuple[LayerProduct, ...]:
    """Return the products of a layer in their order. Those of experts are left out: a plan does not name them."""
    if shape.kernels in SINGLE_OPERATIONS:
        attention = (
            LayerProduct(f"self_attn.{p.name}", p.role, p.inputs, p.outputs) for p in shape.attention.projections
        )
        return (*attention, *(_feed_forward(shape) if shape.experts == 1 else _routing(shape)))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    joined, output, up, down = _FUSED_NAMES["gpt2" if shape.kernels == "gpt2" else "gpt_neox"]
    return (
        LayerProduct(joined, "query", shape.hidden, queries + 2 * keys),
        LayerProduct(output, "output", queries, shape.hidden),
        LayerProduct(up, "up", shape.hidden, shape.ffn),
        LayerProduct(down, "down", shape.ffn, shape.hidden, last=True),
    )


def later_products(shape: ModelShape) -> tuple[LayerProduct, ...]:
    """Return the products whose gradients of weights a zero-bubble pipeline computes later: those of linear layers.

    Layers of GPT-2 have no linear layers of PyTorch. Weights of experts get their gradients in the backward.
    """
    return () if shape.kernels == "gpt2" else layer_products(shape)


def _feed_forward(shape: ModelShape) -> list[LayerProduct]:
    hidden, ffn = shape.hidden, shape.ffn
    return [
        LayerProduct("mlp.gate_proj", "gate", hidden, ffn),
        LayerProduct("mlp.up_proj", "up", hidden, ffn),
        LayerProduct("mlp.down_proj", "down", ffn, hidden, last=True),
    ]


def _routing(shape: ModelShape) -> list[LayerProduct]:
    """The router and the shared experts."""
    hidden, ffn, gated = shape.hidden, shape.expert_layer.shared_ffn, shape.expert_layer.shared_gate
    products = [LayerProduct(_ROUTERS.get(shape.expert_layer.router, "mlp.gate"), "router", hidden, shape.experts)]
    if not ffn:
        return products
    module = "mlp.shared_expert" if gated else "mlp.shared_experts"
    products += [
        LayerProduct(f"{module}.gate_proj", "shared gate", hidden, ffn),
        LayerProduct(f"{module}.up_proj", "shared up", hidden, ffn),
        LayerProduct(f"{module}.down_proj", "shared output", ffn, hidden, last=not gated),
    ]
    return [*products, LayerProduct("mlp.shared_expert_gate", "gate of the shared", hidden, 1)] if gated else products


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


def layer_traffic(shape: ModelShape, *, sizes: ElementBytes, tensor_parallel: int = 1) -> tuple[Traffic, ...]:
    """Return the memory-bound operations of a layer.

    Args:
        shape: Shape of the model.
        sizes: Sizes of elements.
        tensor_parallel: Number of tensor-parallel devices. Each of them routes the tokens of all.
    """
    return tuple(_Layer(shape, sizes, tensor_parallel).groups())


def traffic_of_layer(shape: ModelShape, *, sizes: ElementBytes, tensor_parallel: int = 1) -> LayerTraffic:
    """Return the bytes per token of all memory-bound operations of a layer, see `layer_traffic`."""
    groups = layer_traffic(shape, sizes=sizes, tensor_parallel=tensor_parallel)
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


def fuses_positions(shape: ModelShape, sizes: ElementBytes) -> bool:
    """Whether a kernel rotates queries and keys: with angles of the same type, as they have without autocast."""
    return shape.fused_gates and shape.latent is None and sizes.stream == sizes.product


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: ModelShape
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
        return self.shape.kernels in SINGLE_OPERATIONS

    def _norms(self) -> Iterator[Traffic]:
        shape, trained = self.shape, self.shape.adapters is None
        widths = {
            "input norm": (shape.hidden, self.sizes.stream),
            "feed-forward norm": (shape.hidden, self.sizes.stream),
        }
        if self.shape.kernels == "qwen3":
            for name, heads in (("query norm", shape.heads), ("key norm", shape.kv_heads)):
                widths[name] = heads * shape.head_dim, self.sizes.product
        if shape.latent is not None:
            widths["query latent norm"] = shape.latent.query_rank, self.sizes.product
            widths["key latent norm"] = shape.latent.kv_rank, self.sizes.product
        for name, (width, size) in widths.items():
            # A kernel does not cast its weight.
            separate = shape.separate_norms or (self._separate and size != self.sizes.stream)
            yield Traffic(name, *norm_traffic(width, size, separate=separate, trained=trained))

    def _positions(self) -> Iterator[Traffic]:
        """`x * cos + rotated * sin` of queries and keys, whose gradients are then copied into the order of tokens."""
        rows = (self.shape.heads + self.shape.kv_heads) * self.shape.head_dim
        copies = 2 * self.sizes.product * rows
        if fuses_positions(self.shape, self.sizes):
            yield Traffic("positions", copies, copies)
        elif self._separate:
            yield Traffic("positions", 10 * self.sizes.stream * rows, 15 * self.sizes.stream * rows + copies)
        else:
            yield Traffic("positions", 0, copies)

    def _activation(self) -> Iterator[Traffic]:
        width = self.shape.ffn * self.sizes.product
        if self.shape.gated:
            yield self._gated("activation", width)
        elif self.shape.kernels == "gpt2":  # eight operations
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
        yield self._gated("shared activation", layer.shared_ffn * self.sizes.product * many)

    def _gated(self, name: str, width: int) -> Traffic:
        """SiLU, times up."""
        forward, backward = (3, 5) if self.shape.fused_gates else (5, 9)
        return Traffic(name, forward * width, backward * width)

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
        """Adapters: two products, whose rank is too low for the speed of the device to matter.

        A fused one adds to the output of the product, and to the gradient of its input. Otherwise PEFT scales and adds
        the output by itself, and autograd the gradients.
        """
        adapters, size, separate = self.shape.adapters, self.sizes.product, not self.shape.fused_adapters
        for product in layer_products(self.shape):
            if adapters is None or not self.shape.adapts(product.role):
                continue
            rank, inputs, outputs = adapters.rank, product.inputs, product.outputs
            (a, b), scaled, summed = product.adapter_names, separate * outputs, separate * inputs
            yield Traffic(a, size * (inputs + rank), size * (3 * inputs + 2 * (rank + summed)))
            backward = size * 2 * (outputs + rank + scaled)
            yield Traffic(b, size * (2 * outputs + rank + 4 * scaled), backward, again=not product.last)
