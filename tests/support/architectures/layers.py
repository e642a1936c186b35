"""A layer by design: attention, operations at several places, experts, and what it keeps, writes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.architectures.operations import EXPERTS, HEADS, HIDDEN, Mix


@dataclass(frozen=True)
class Design:
    """How a layer computes. Every field is drawn; see `draw.py`.

    Attributes:
        attention: "causal", "full", "masked", "cross" or "none".
        positions: "none", "given" as tables, or made "inside".
        mixes: Operation, place ("input", "queries", "keys", "values" or "output") and gate of each operation.
        experts: "none", "chosen" (one for each token) or "limited" (in their capacity).
        loss: Where a balancing loss goes: "none", "returned", "kept", "injected" or "listed"; or "scores" of all tokens
            are returned, the first dimension of which is that of the tokens.
        shared: What goes through a dict that is an argument: "nothing", "first values" or "last values".
        output: Type of the return value: "tensor", "tuple", "dict" or "dataclass".
        hook: A user's hook inside the layer: "none", "keeps", "edits" or "gradient".
        uneven: Whether only every second layer has the operations.
        told: Which layers an argument tells to mix tokens: "none", "uneven" ones, or all, "later" in training.
        dropout: Dropout of the MLP.
    """

    attention: str = "causal"
    positions: str = "none"
    mixes: tuple[tuple[str, str, str], ...] = ()
    experts: str = "none"
    loss: str = "none"
    shared: str = "nothing"
    output: str = "tensor"
    hook: str = "none"
    uneven: bool = False
    told: str = "none"
    dropout: float = 0.0


@dataclass
class Returned:
    """What a layer returns as a dataclass."""

    name: str
    hidden: Tensor
    loss: Tensor | None


class Inject(torch.autograd.Function):
    """Returns `x`, and gives a loss a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, torch.tensor(0.1)


class Layer(nn.Module):
    """A layer. All layers of a model have the same modules."""

    kept: Tensor | None = None

    def __init__(self, design: Design, number: int) -> None:
        super().__init__()
        self.design, self.number = design, number
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Dropout(design.dropout), nn.Linear(24, HIDDEN))
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        mixes = () if design.uneven and number % 2 == 0 else design.mixes
        self.mixes = nn.ModuleList(Mix(operation, gate) for operation, _, gate in design.mixes)
        self.places = [place for _, place, _ in mixes]

    def forward(
        self, x: Tensor, shared: dict[str, Any], tables: tuple[Tensor, Tensor], memory: Tensor, mask: Tensor
    ) -> Any:
        x = self._mixed("input", x)
        if self.design.attention != "none":
            x = x + self._attended(self.norm1(x), shared, tables, memory, mask)
        x = x + 0.1 * x.roll(1, 1) if shared["mixes"] else x
        h = self.norm2(x)
        x = x + (self.mlp(h) if self.design.experts == "none" else self._routed(h))
        return self._returned(self._mixed("output", x), shared)

    def _mixed(self, place: str, x: Tensor) -> Tensor:
        for mix, at in zip(self.mixes, self.places, strict=False):
            x = mix(x) if at == place else x
        return x

    def _attended(self, h: Tensor, shared: Any, tables: Any, memory: Tensor, mask: Tensor) -> Tensor:
        source = memory if self.design.attention == "cross" else h
        q, k, v = self._mixed("queries", self.q(h)), self._mixed("keys", self.k(source)), self.v(source)
        v = self._mixed("values", v)
        if self.design.shared == "first values":
            v = v + 0.3 * shared.setdefault("values", v)
        elif self.design.shared == "last values":
            v = v + 0.3 * shared.get("values", torch.zeros(()))
            shared["values"] = v
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        if self.design.positions != "none":
            cos, sin = tables if self.design.positions == "given" else rotary(h.shape[1])
            q = _rotated(q, cos, sin)
            k = k if self.design.attention == "cross" else _rotated(k, cos, sin)
        masks = {"causal": {"is_causal": True}, "masked": {"attn_mask": mask}}.get(self.design.attention, {})
        attended: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, **masks).transpose(1, 2).flatten(2))
        return attended

    def _routed(self, h: Tensor) -> Tensor:
        weights, chosen = self.router(h).softmax(-1).max(-1)
        kept = F.one_hot(chosen, EXPERTS)
        if self.design.experts == "limited":
            kept = kept * (kept.cumsum(1) <= 6)
        every = torch.stack([expert(h) for expert in self.experts], -2)
        return (every * (kept * weights[..., None])[..., None]).sum(-2)

    def _returned(self, x: Tensor, shared: dict[str, Any]) -> Any:
        loss = None
        if self.design.loss == "scores":
            return x, self.router(x).transpose(0, 1)
        if self.design.loss != "none":
            loss = self.router(x).softmax(-1).mean((0, 1)).square().sum()
        if self.design.loss == "kept":
            self.kept = loss
        elif self.design.loss == "listed":
            shared.setdefault("losses", []).append(loss)
        elif self.design.loss == "injected":
            x = Inject.apply(x, loss)
        returned = loss if self.design.loss == "returned" else None
        if self.design.output == "dataclass":
            return Returned("layer", x, returned)
        if self.design.output == "dict":
            return {"loss": returned, "hidden": x}
        return (x, returned) if self.design.output == "tuple" or returned is not None else x


def rotary(tokens: int) -> tuple[Tensor, Tensor]:
    """Return tables of cosines and sines, `[tokens, head_dim]`."""
    angles = torch.arange(tokens)[:, None] * 0.2 ** torch.arange(HIDDEN // HEADS // 2)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    return t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin
