"""One call of a layer: its forward and its arguments, which can be cut by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_memo.engine.forward.cut_tokens import cut
from lightning_memo.engine.forward.intercept import LayerMode
from lightning_memo.engine.memory.lazy_tensor import LazyTensor
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.planner.token_slices import TokenRange


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's forward and its arguments apart from the input, which is `[batch, tokens, hidden]`.

    Attributes:
        layer: The layer.
        forward: The layer's own forward.
        args: Positional arguments after the input.
        kwargs: Keyword arguments.
        tokens: Number of tokens in the input.
        batch: Number of sequences in the input.
        token_dim: 1, or 0 for a layer that takes `[tokens, batch, hidden]`.
        shards: Number of sequence-parallel shards. The input holds the tokens of one of them, and attention sees the
            same slice of all shards.
        layout: Where the tokens of the batch are; `None` if this process holds all of them in order.
    """

    layer: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int
    batch: int
    token_dim: int = 1
    shards: int = 1
    layout: TokenLayout | None = None

    def run(self, x: Tensor, part: TokenRange) -> Any:
        """Run the layer's own forward on some of the tokens, whose input is `x`."""
        arguments = (self.args, self.kwargs)
        part_of = cut(arguments, self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)
        # Arguments of all tokens may still be lazy, and a layer may pass them to kernels of its own.
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.materialize, part_of)
        return self.forward(x, *args, **kwargs)

    def narrow(self, t: Tensor, part: TokenRange) -> Tensor:
        """Return the tokens of a slice, of a tensor that holds these or all tokens."""
        return t if t.shape[self.token_dim] == part.tokens else t.narrow(self.token_dim, part.start, part.tokens)

    def mode(self, part: TokenRange) -> LayerMode:
        """Return the mode in which the layer runs on some of the tokens."""
        return LayerMode(self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)
