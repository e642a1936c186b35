"""What a model is made of, as far as bytes and FLOPs depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.shapes.adapters import PRODUCTS, Adapters

Kernels = Literal["fused", "llama", "qwen3", "gpt_neox", "gpt_neox_parallel", "gpt2"]
"""Which tensors a layer keeps depends on its code.

- "fused": norms, residual and activation functions keep only their inputs, as in Megatron-LM and in MEMO's tables: 16
  units of hidden for a GPT.
- The others are Hugging Face's layers. Norms of Llama are made of single operations, and keep an fp32 copy of their
  input. "qwen3" also has norms of queries and keys; "gpt_neox_parallel" adds attention and feed-forward to the same
  residual; "gpt2" computes its activation function by single operations.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder: layers of attention and feed-forward that are alike, between an embedding and a head.

    Raises:
        ValueError: a size below 1, fewer experts than active ones, or query heads that key and value heads don't
            divide.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    """Width of the feed-forward; of one expert, where there are several."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    """Whether the feed-forward multiplies two projections (SwiGLU): three matrices, not two."""

    tied: bool
    """Whether the head's weight is the embedding's."""

    experts: int = 1
    active_experts: int = 1
    """Experts that a token passes through."""

    window: int | None = None
    """Keys that a query sees at most, itself included; None: all up to its own."""

    kernels: Kernels = "fused"
    """Of its layers where Hugging Face's code runs them; programs with kernels of their own take them fused."""

    adapters: Adapters | None = None
    """LoRA, which alone is trained; None: all weights are."""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "experts", "active_experts")
        check_range(self, dict.fromkeys(sizes, 1))
        if self.active_experts > self.experts:
            raise ValueError(f"active_experts={self.active_experts} must be at most experts={self.experts}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.adapters is not None and (self.kernels not in ("llama", "qwen3") or self.experts > 1):
            raise ValueError("adapters (model.lora) are estimated for dense Llama and Qwen3 models only; set r to 0")

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's four projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def ffn_parameters(self) -> int:
        """Weights of one expert's projections."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def router_parameters(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each product of a layer with a gated feed-forward, and without experts."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, ffn = self.hidden, self.ffn
        sizes = (
            (hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden),
            (hidden, ffn), (hidden, ffn), (ffn, hidden),
        )  # fmt: skip
        return dict(zip(PRODUCTS, sizes, strict=True))

    def adapts(self, product: str) -> bool:
        """Whether a product has an adapter."""
        return self.adapters is not None and product in self.adapters.products

    @property
    def adapter_weights(self) -> tuple[int, ...]:
        """Elements of each of a layer's adapter weights: two for a product."""
        if self.adapters is None:
            return ()
        return tuple(self.adapters.rank * width for name in self.adapters.products for width in self.products[name])

    @property
    def adapter_parameters(self) -> int:
        """Of a layer."""
        return sum(self.adapter_weights)

    @property
    def layer_parameters(self) -> int:
        """All weights of a layer, with its two norms."""
        products = self.attention_parameters + self.experts * self.ffn_parameters + self.router_parameters
        return products + 2 * self.hidden + self.adapter_parameters

    @property
    def trained_layer_parameters(self) -> int:
        """Those of them that get a gradient."""
        return self.layer_parameters if self.adapters is None else self.adapter_parameters

    @property
    def parameters(self) -> int:
        """All weights; biases, which are few, are left out."""
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def multiplied_in_a_layer(self) -> int:
        """Weights of a layer that each token is multiplied by."""
        products = self.attention_parameters + self.active_experts * self.ffn_parameters + self.router_parameters
        return products + self.adapter_parameters

    @property
    def trained_in_a_layer(self) -> int:
        """Those of them that get a gradient."""
        return self.multiplied_in_a_layer if self.adapters is None else self.adapter_parameters

    @property
    def multiplied_again(self) -> int:
        """Those of them that MEMO's recomputation needs: all but the last product's, whose output nobody reads."""
        return self.multiplied_in_a_layer - self.active_experts * self.hidden * self.ffn

    @property
    def multiplied_parameters(self) -> int:
        """Weights that each token is multiplied by: P of MEMO's FLOPs, `12 n h^2 + V h` for a GPT."""
        return self.layers * self.multiplied_in_a_layer + self.vocab * self.hidden

    @property
    def trained_share(self) -> float:
        """Of the multiplied weights, those that get a gradient."""
        if self.adapters is None:
            return 1.0
        return self.layers * self.adapter_parameters / self.multiplied_parameters

    def model_flops(self, tokens: int, trained: float | None = None) -> float:
        """FLOPs of forward and backward of one sequence, nothing recomputed, attention causal.

        `6 s P + 6 n h s^2` as MEMO counts them; with a window, only the pairs in it.

        Args:
            tokens: s, of the sequence.
            trained: share of the weights that get a gradient: a third of the products is for that; None: the shape's.
        """
        products = (
            (4.0 + 2.0 * (self.trained_share if trained is None else trained)) * tokens * self.multiplied_parameters
        )
        return products + 3.0 * self.layers * self.attention_flops(tokens)

    def recomputed_flops(self, tokens: int) -> float:
        """FLOPs of the layers' forward for one sequence without attention and the last product: MEMO's recomputation.

        Args:
            tokens: of the sequence.
        """
        return 2.0 * tokens * self.multiplied_again * self.layers

    def attention_flops(self, tokens: int) -> float:
        """FLOPs of the forward of one layer's attention over a sequence: two products of `s^2 / 2` pairs, `2 h s^2`."""
        seen = min(tokens, self.window or tokens)
        pairs = seen * (tokens - seen / 2)
        return 4.0 * pairs * self.heads * self.head_dim
