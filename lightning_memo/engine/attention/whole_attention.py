"""Attention of layers that run on all their tokens at once, without an engine's storage."""

from __future__ import annotations

from torch import Tensor

from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.engine.attention.sliced_attention import attend
from lightning_memo.kernels import AttentionSpec
from lightning_memo.parallel.batches.token_layout import TokenLayout


class WholeAttention:
    """Answers the attention calls of layers without gradients, and of all layers of a plain plan.

    The other layers of a step may run in slices. Tokens that are gathered from sequence-parallel shards are then in
    another order than attention needs.

    Args:
        selector: Selects attention kernels.
        layout: The layout of the batch; `None` if no batch was divided.
    """

    def __init__(self, selector: AttentionSelector, layout: TokenLayout | None) -> None:
        self._selector = selector
        self._layout = layout if layout is not None and layout.shards > 1 and len(layout.bounds) > 1 else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the output, `[batch, heads, tokens, head_dim]`, of tokens in the order in which they were gathered."""
        layout = self._layout
        if layout is not None:
            q, k, v = (layout.as_attended(t, 2) for t in (q, k, v))
        out = attend(self._selector.backend(q, k, v, spec), q, k, v, spec)
        return out if layout is None else layout.as_fed(out, 2)
