"""Widths of queries, keys and values, and the weights of the projections that make them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.artifacts.json_documents import check_range


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


def grouped_widths(hidden: int, heads: int, kv_heads: int, head_dim: int) -> AttentionWidths:
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


def latent_widths(hidden: int, heads: int, latent: LatentAttention) -> AttentionWidths:
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
