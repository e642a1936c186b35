"""The matrix products of a layer with its weights, by the names that training has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.shapes.model_shape import SINGLE_OPERATIONS, Kernels, ModelShape

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
    """Its name among the projections of a layer, see `lightning_memo.shapes.adapters`."""

    inputs: int
    outputs: int
    last: bool = False
    """Whether it is the last one of the layer, whose output no recomputation needs."""

    @property
    def recomputed_name(self) -> str:
        """Name of the product, or of its sum with an adapter's, if a recomputation computes it."""
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
    def sum_name(self) -> str:
        """Name of the scaled sum with an adapter's output."""
        return f"sum of {self.name}"

    def adapters(self, shape: ModelShape) -> tuple[tuple[str, int], ...]:
        """Names and output sizes of the two products of its LoRA adapter, if it has one."""
        if shape.adapters is None or not shape.adapts(self.role):
            return ()
        sizes = shape.adapters.rank, self.outputs
        return tuple(zip((f"{self.name}.lora_A.default", f"{self.name}.lora_B.default"), sizes, strict=True))


def layer_products(shape: ModelShape, kernels: Kernels) -> tuple[LayerProduct, ...]:
    """Return the products of a layer in their order. Those of experts are left out: a plan does not name them."""
    if kernels in SINGLE_OPERATIONS:
        attention = (
            LayerProduct(f"self_attn.{p.name}", p.role, p.inputs, p.outputs) for p in shape.attention.projections
        )
        return (*attention, *(_feed_forward(shape) if shape.experts == 1 else _routing(shape)))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    joined, output, up, down = _FUSED_NAMES["gpt2" if kernels == "gpt2" else "gpt_neox"]
    return (
        LayerProduct(joined, "query", shape.hidden, queries + 2 * keys),
        LayerProduct(output, "output", queries, shape.hidden),
        LayerProduct(up, "up", shape.hidden, shape.ffn),
        LayerProduct(down, "down", shape.ffn, shape.hidden, last=True),
    )


def later_products(shape: ModelShape, kernels: Kernels) -> tuple[LayerProduct, ...]:
    """Return the products whose gradients of weights a zero-bubble pipeline computes later: those of linear layers.

    Layers of GPT-2 have no linear layers of PyTorch. Weights of experts get their gradients in the backward.
    """
    return () if kernels == "gpt2" else layer_products(shape, kernels)


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
