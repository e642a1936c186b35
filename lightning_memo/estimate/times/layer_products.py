"""The matrix products of a layer with its weights, by the names that training has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.shapes.model_shape import Kernels, ModelShape

_NAMES: Final = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_FUSED_NAMES: Final = {
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "gpt_neox": ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}


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

    def recomputed_name(self, shape: ModelShape) -> str:
        """Name of the product if a recomputation computes it, as it does the last one only for an adapter's sake."""
        if shape.adapts(self.role):
            return f"{self.name}.base_layer"
        return "" if self.last else self.name

    def adapters(self, shape: ModelShape) -> tuple[tuple[str, int], ...]:
        """Names and output sizes of the two products of its LoRA adapter, if it has one."""
        if shape.adapters is None or not shape.adapts(self.role):
            return ()
        sizes = shape.adapters.rank, self.outputs
        return tuple(zip((f"{self.name}.lora_A.default", f"{self.name}.lora_B.default"), sizes, strict=True))


def layer_products(shape: ModelShape, kernels: Kernels) -> tuple[LayerProduct, ...]:
    """Return the products of a layer in their order. Those of experts are left out: a plan does not name them."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if kernels in ("llama", "qwen3"):
        names = [role for role in _NAMES if shape.experts == 1 or role in ("query", "key", "value", "output")]
        return tuple(LayerProduct(_NAMES[role], role, *shape.products[role], last=role == "down") for role in names)
    joined, output, up, down = _FUSED_NAMES["gpt2" if kernels == "gpt2" else "gpt_neox"]
    return (
        LayerProduct(joined, "query", shape.hidden, queries + 2 * keys),
        LayerProduct(output, "output", queries, shape.hidden),
        LayerProduct(up, "up", shape.hidden, shape.ffn),
        LayerProduct(down, "down", shape.ffn, shape.hidden, last=True),
    )
