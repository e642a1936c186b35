"""Shape of a decoder model: widths of attention, mixtures of experts, LoRA adapters, parameters and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lightning_memo.artifacts.json_documents import check_range

_PRODUCTS: Final = ("query", "key", "value", "output", "gate", "up", "down")
"""Projections of a layer with a gated feed-forward."""

_MODULES: Final = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_PEFT_DEFAULT: Final = ("q_proj", "v_proj")
_ALL: Final = "all-linear"
_WITHOUT_BYTES: Final = ("lora_alpha", "use_rslora", "init_lora_weights", "inference_mode", "lora_dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Adapters of each layer.

    Raises:
        ValueError: The rank is below 1.
    """

    rank: int
    products: tuple[str, ...]
    """The projections of `_PRODUCTS` that have an adapter."""

    def __post_init__(self) -> None:
        check_range(self, {"rank": 1})


def adapters_of(settings: Mapping[str, Any]) -> Adapters | None:
    """Adapters for the settings of `model.lora`, which have the names of `peft.LoraConfig`.

    Args:
        settings: `r`, `target_modules` (modules of a Llama layer; by default `q_proj` and `v_proj`, as in peft), and
            settings that do not change memory.

    Returns:
        The adapters; None if `r` is 0.

    Raises:
        ValueError: A setting is invalid or not supported. The message is one line.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"model.lora={settings} is no group of settings: give model.lora.r, the rank, like 8")
    rank = settings.get("r")
    if not rank:
        return None
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"model.lora.r={rank!r} must be an integer of at least 1, or 0 to train all weights")
    for name, value in settings.items():
        if name not in ("r", "target_modules", *_WITHOUT_BYTES) and value:
            raise ValueError(f"model.lora.{str(name)[:40]} is not supported by the estimate; remove it")
    if settings.get("lora_dropout"):
        raise ValueError(
            f"model.lora.lora_dropout={settings['lora_dropout']}: the estimate does not support dropout; set it to 0"
        )
    return Adapters(rank=rank, products=_products(settings.get("target_modules")))


def _products(modules: Any) -> tuple[str, ...]:
    if modules == _ALL:
        return _PRODUCTS
    names = _PEFT_DEFAULT if modules is None else (modules,) if isinstance(modules, str) else tuple(modules)
    for name in names:
        if name not in _MODULES:
            raise ValueError(
                f"model.lora.target_modules: unknown module {str(name)[:40]}; choose from {', '.join(_MODULES)}, "
                f'or "{_ALL}"'
            )
    return tuple(product for module, product in _MODULES.items() if module in names)


RouterKind = Literal["softmax", "softmax_fp32", "chosen_softmax", "gpt_oss", "sigmoid"]
"""Router of a model family of Hugging Face, which determines the tensors that it saves.

- "softmax": probabilities of all experts in fp32; the weights of the chosen ones are cast back (Qwen3-MoE).
- "softmax_fp32": the same, with weights that stay in fp32 (Mixtral).
- "chosen_softmax": probabilities of the chosen experts only, in fp32 (GraniteMoE).
- "gpt_oss": the same in the type of the products; experts have biases and a clamped activation function.
- "sigmoid": scores in fp32, among which groups of experts are chosen first (DeepSeek-V3).
"""
Quantization = Literal["nf4", "nf4_double"]
"""Frozen weights of 4 bits, as bitsandbytes stores them: with a scale in fp32 for each 64 weights, or with scales that
are themselves quantised to 8 bits ("nf4_double", with `bnb_4bit_use_double_quant`)."""
QUANTIZED_BYTES: Final[dict[Quantization, float]] = {"nf4": 1 / 2 + 4 / 64, "nf4_double": 1 / 2 + 1 / 64 + 4 / 64 / 256}
"""Bytes of a weight with its share of the scales."""
Kernels = Literal["llama", "qwen3", "gpt_oss", "gpt_neox", "gpt_neox_parallel", "gpt2"]
"""Implementation of a layer in Hugging Face, which determines the tensors that it saves for the backward.

Llama's norms consist of single operations and save an fp32 copy of their input. "qwen3" also has norms of queries and
keys, and "gpt_oss" multiplies norms with their weights in fp32. "gpt_neox_parallel" adds attention and feed-forward to
the same residual. "gpt2" computes its activation function with single operations.
"""
SINGLE_OPERATIONS: Final = ("llama", "qwen3", "gpt_oss")
"""Kernels whose norms and positions consist of single operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Latent attention of DeepSeek: low-rank projections before queries, and before keys and values.

    Raises:
        ValueError: A size is below 1, or `query_rank` is negative.
    """

    query_rank: int
    """Width between the two projections of queries; 0 for a single projection."""

    kv_rank: int
    """Width between the two projections of keys and values."""

    rotated: int
    """Elements of a head that are rotated by position. All heads share those of keys."""

    unrotated: int
    """All other elements of a head of queries and keys."""

    value: int
    """Elements of a head of values."""

    def __post_init__(self) -> None:
        check_range(self, dict.fromkeys(("kv_rank", "rotated", "unrotated", "value"), 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A product of attention with a weight: its module, its role, and its input and output width."""

    name: str
    role: str
    inputs: int
    outputs: int
    first: bool = True
    """Whether it reads the layer's hidden states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWidths:
    """Elements per token of the tensors that attention reads and writes."""

    query: int
    key: int
    value: int
    output: int
    projections: tuple[Projection, ...]

    @property
    def readers(self) -> tuple[str, ...]:
        """Roles of the projections that read the layer's hidden states."""
        return tuple(each.role for each in self.projections if each.first)

    @property
    def parameters(self) -> int:
        """Number of weights of the projections."""
        return sum(each.inputs * each.outputs for each in self.projections)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """What a mixture of experts has in addition to its experts.

    Raises:
        ValueError: A number is negative.
    """

    router: RouterKind = "softmax"
    normalized: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""

    groups: int = 1
    """Groups of experts of a "sigmoid" router."""

    chosen_groups: int = 1
    shared_ffn: int = 0
    """Width of the shared experts together, which process all tokens; 0 if there are none."""

    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by a gate of its own (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        check_range(self, {"groups": 1, "chosen_groups": 1})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder: layers of attention and feed-forward between an embedding and a head.

    Raises:
        ValueError: A size is below 1, there are fewer experts than active ones, the number of heads is not a multiple
            of the number of key-value heads, or the parts have another number of layers.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    """Width of the feed-forward, or of one expert."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    """Whether the feed-forward is gated (SwiGLU) and thus has three matrices instead of two."""

    tied: bool
    """Whether head and embedding share their weight."""

    experts: int = 1
    active_experts: int = 1
    """Number of experts that process a token, without the shared ones."""

    expert_layer: ExpertLayer = field(default_factory=ExpertLayer)
    """Router and shared experts, if there are several experts."""

    latent: LatentAttention | None = None
    """Low-rank projections of DeepSeek's attention; None for heads that share keys and values in groups."""

    parts: tuple[ModelShape, ...] = ()
    """Shapes of the consecutive equal layers, in order, if layers differ. The sizes of this shape are then those of the
    layers with experts and without a window."""

    window: int | None = None
    """Maximum number of keys that a query attends to, itself included; None for all up to its own."""

    kernels: Kernels
    """Implementation of the layers."""

    fused: bool = False
    """Whether norms, gated feed-forwards, rotary positions and products with adapters run by fused kernels in place of
    single operations; see `fused_kernels` of `MemoStrategy`."""

    adapters: Adapters | None = None
    """LoRA adapters, which are the only trained weights; None if all weights are trained."""

    quantization: Quantization | None = None
    """How the frozen weights of the layers' products are stored; None for the type of all others."""

    input_gradient: bool = True
    """Whether the input of the layers requires a gradient, as it does in all layers but the first one if only adapters
    are trained."""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "experts", "active_experts")
        check_range(self, dict.fromkeys(sizes, 1))
        if self.active_experts > self.experts:
            raise ValueError(f"active_experts={self.active_experts} must be at most experts={self.experts}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.parts and sum(part.layers for part in self.parts) != self.layers:
            raise ValueError(f"layers={self.layers} must be the sum of the layers of all parts")
        dense = self.kernels in ("llama", "qwen3") and self.experts == 1 and self.latent is None
        if self.adapters is not None and not (dense and not self.parts):
            raise ValueError("adapters (model.lora) are supported for dense Llama and Qwen3 models only; set r to 0")
        if self.quantization is not None and self.adapters is None:
            raise ValueError(f"quantization={self.quantization} is for frozen weights: give model.lora.r, or null")

    @property
    def separate_norms(self) -> bool:
        """Whether norms of the hidden states consist of single operations."""
        return self.kernels in SINGLE_OPERATIONS and not self.fused

    @property
    def fused_gates(self) -> bool:
        """Whether a kernel computes the activation of a gated feed-forward that is dense, times its other product."""
        return self.fused and self.kernels in ("llama", "qwen3")

    @property
    def fused_adapters(self) -> bool:
        """Whether products and their adapters are one operation. PEFT's modules for quantised weights are others."""
        return self.fused and self.quantization is None

    @property
    def quantized_in_a_layer(self) -> int:
        """Number of weights of a layer that are quantised."""
        return 0 if self.quantization is None else self.attention.parameters + self.ffn_parameters

    @property
    def runs(self) -> tuple[ModelShape, ...]:
        """Shapes of the consecutive equal layers, in order."""
        return self.parts or (self,)

    @property
    def attention(self) -> AttentionWidths:
        """Widths of attention's tensors and products."""
        if self.latent is not None:
            return _latent_widths(self.hidden, self.heads, self.latent)
        return _grouped_widths(self.hidden, self.heads, self.kv_heads, self.head_dim)

    @property
    def ffn_parameters(self) -> int:
        """Number of weights of the feed-forward, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def routing_parameters(self) -> int:
        """Number of weights of the router and of the shared experts."""
        if self.experts == 1:
            return 0
        shared = self.expert_layer.shared_ffn * (3 if self.gated else 2) + self.expert_layer.shared_gate
        return self.hidden * (self.experts + shared)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Input and output size of each projection of a layer with a gated feed-forward and without experts."""
        hidden, ffn = self.hidden, self.ffn
        sizes = [(each.inputs, each.outputs) for each in self.attention.projections]
        sizes += [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
        return dict(zip(_PRODUCTS, sizes, strict=True))

    def adapts(self, product: str) -> bool:
        """Whether a projection has an adapter."""
        return self.adapters is not None and product in self.adapters.products

    @property
    def adapter_weights(self) -> tuple[int, ...]:
        """Number of elements of each adapter weight of a layer, two per projection."""
        if self.adapters is None:
            return ()
        return tuple(self.adapters.rank * width for name in self.adapters.products for width in self.products[name])

    @property
    def adapter_parameters(self) -> int:
        """Number of adapter weights of a layer."""
        return sum(self.adapter_weights)

    @property
    def layer_parameters(self) -> int:
        """Number of weights of a layer, including its two norms."""
        products = self.attention.parameters + self.experts * self.ffn_parameters + self.routing_parameters
        return products + 2 * self.hidden + self.adapter_parameters

    @property
    def trained_layer_parameters(self) -> int:
        """Number of weights of a layer that are trained."""
        return self.layer_parameters if self.adapters is None else self.adapter_parameters

    @property
    def parameters(self) -> int:
        """Number of weights of the model, without the few biases."""
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        return sum(part.layers * part.layer_parameters for part in self.runs) + embeddings + self.hidden

    @property
    def active_parameters(self) -> int:
        """Number of weights without the experts that do not process a token."""
        idle = (part.layers * (part.experts - part.active_experts) * part.ffn_parameters for part in self.runs)
        return self.parameters - sum(idle)

    @property
    def multiplied_in_a_layer(self) -> int:
        """Number of weights of a layer that each token is multiplied with."""
        products = self.attention.parameters + self.active_experts * self.ffn_parameters + self.routing_parameters
        return products + self.adapter_parameters

    @property
    def recomputed_in_a_layer(self) -> int:
        """Number of these weights, without adapters, that recomputation needs.

        The output of the last projection is unused, and the projection therefore not needed. Those of experts are, as
        their outputs are weighted.
        """
        last = self.hidden * self.ffn
        if self.experts > 1:
            last = 0 if self.expert_layer.shared_gate else self.hidden * self.expert_layer.shared_ffn
        return self.multiplied_in_a_layer - self.adapter_parameters - last

    @property
    def adapted_last_projection(self) -> int:
        """Weights of the last projection if it has an adapter, behind which checkpointing ends its recomputation."""
        return self.hidden * self.ffn if self.experts == 1 and self.adapts("down") else 0

    @property
    def multiplied_again(self) -> int:
        """Number of these weights that recomputation needs, with adapters. Of the last projection's only one does."""
        unused = self.adapters.rank * self.hidden if self.adapters is not None and self.adapts("down") else 0
        return self.recomputed_in_a_layer + self.adapter_parameters - unused

    @property
    def multiplied_parameters(self) -> int:
        """Number of weights that each token is multiplied with: P in MEMO's FLOPs, `12 n h^2 + V h` for a GPT."""
        return sum(part.layers * part.multiplied_in_a_layer for part in self.runs) + self.vocab * self.hidden

    @property
    def trained_share(self) -> float:
        """Share of the multiplied weights that are trained."""
        if self.adapters is None:
            return 1.0
        return self.layers * self.adapter_parameters / self.multiplied_parameters

    def model_flops(self, tokens: int, trained: float | None = None) -> float:
        """FLOPs of forward and backward of one sequence with causal attention and without recomputation.

        These are MEMO's `6 s P + 6 n h s^2`; with a window, only pairs of tokens within the window count.

        Args:
            tokens: Length s of the sequence.
            trained: Share of the weights that are trained, for which a third of the products is needed; None for the
                share of this shape.
        """
        products = (
            (4.0 + 2.0 * (self.trained_share if trained is None else trained)) * tokens * self.multiplied_parameters
        )
        return products + 3.0 * sum(part.layers * part.attention_flops(tokens) for part in self.runs)

    def recomputed_flops(self, tokens: int) -> float:
        """FLOPs of MEMO's recomputation: the layers' forward without attention and the last projection.

        Args:
            tokens: Length of the sequence.
        """
        return 2.0 * tokens * sum(part.multiplied_again * part.layers for part in self.runs)

    def forward_flops(self, tokens: int, with_attention: bool = True) -> float:
        """FLOPs of the forward of all layers.

        Args:
            tokens: Length of the sequence.
            with_attention: Whether those of attention count.
        """
        return sum(
            part.layers * (2.0 * tokens * part.multiplied_in_a_layer + part.attention_flops(tokens) * with_attention)
            for part in self.runs
        )

    def attention_flops(self, tokens: int) -> float:
        """FLOPs of the forward of one layer's attention: two products of `s^2 / 2` pairs, or `2 h s^2`.

        Layers that differ have their own, see `runs`.

        Args:
            tokens: Length s of the sequence.
        """
        seen = min(tokens, self.window or tokens)
        pairs = seen * (tokens - seen / 2)
        return 2.0 * pairs * (self.attention.query + self.attention.output)


def _grouped_widths(hidden: int, heads: int, kv_heads: int, head_dim: int) -> AttentionWidths:
    """Return the widths of attention whose heads share keys and values in groups."""
    queries, keys = heads * head_dim, kv_heads * head_dim
    return AttentionWidths(
        query=queries,
        key=keys,
        value=keys,
        output=queries,
        projections=(
            Projection(name="q_proj", role="query", inputs=hidden, outputs=queries),
            Projection(name="k_proj", role="key", inputs=hidden, outputs=keys),
            Projection(name="v_proj", role="value", inputs=hidden, outputs=keys),
            Projection(name="o_proj", role="output", inputs=queries, outputs=hidden, first=False),
        ),
    )


def _latent_widths(hidden: int, heads: int, latent: LatentAttention) -> AttentionWidths:
    """Return the widths of latent attention. Each head has its own keys and values then."""
    queries, values = heads * (latent.unrotated + latent.rotated), heads * latent.value
    rank, keys = latent.query_rank, heads * latent.unrotated + values
    one = (Projection(name="q_proj", role="query", inputs=hidden, outputs=queries),)
    two = (
        Projection(name="q_a_proj", role="query latent", inputs=hidden, outputs=rank),
        Projection(name="q_b_proj", role="query", inputs=rank, outputs=queries, first=False),
    )
    both = latent.kv_rank + latent.rotated
    return AttentionWidths(
        query=queries,
        key=queries,
        value=values,
        output=values,
        projections=(
            *(two if rank else one),
            Projection(name="kv_a_proj_with_mqa", role="key latent", inputs=hidden, outputs=both),
            Projection(name="kv_b_proj", role="key", inputs=latent.kv_rank, outputs=keys, first=False),
            Projection(name="o_proj", role="output", inputs=values, outputs=hidden, first=False),
        ),
    )
