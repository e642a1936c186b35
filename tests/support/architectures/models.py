"""Models of designed layers, and their training with and without MemoStrategy."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from support.architectures.layers import Design, Layer, Returned, rotary
from support.architectures.operations import HIDDEN, LOCAL, MIXING
from support.harness import gradients_of
from support.modes import BY_KIND, JOINT
from support.trainer_harness import batches, make_trainer

VOCABULARY = 32


@dataclass(frozen=True)
class Architecture:
    """A model, its data and the settings of the strategy.

    Attributes:
        design: Design of the layers.
        container: "list", "nested" or "sequence in a list": where the layers are.
        tokens: Length of the sequences.
        steps: Number of training steps.
        settings: Arguments of `MemoStrategy`.
    """

    design: Design
    container: str = "list"
    tokens: int = 24
    steps: int = 3
    settings: dict[str, Any] = field(default_factory=dict)


def draw(seed: int) -> Architecture:
    """Return the architecture of a seed."""
    r = random.Random(seed)
    local = r.random() < 0.4
    operations = list(LOCAL) if local else [*MIXING, *LOCAL]
    places = ("input", "queries", "keys", "values", "output")
    gates = ("open", "open", "zero", "tanh", "scale")
    mixes = tuple((r.choice(operations), r.choice(places), r.choice(gates)) for _ in range(r.randint(0, 2)))

    def of(usual: str, *others: str, chance: float = 0.15) -> str:
        return r.choice(others) if not local and r.random() < chance else usual

    loss = of("none", "returned", "kept", "injected", "listed")
    if local:
        loss = r.choice(("none", "none", "scores"))
    design = Design(
        attention=r.choice(("causal",) * 6 + ("full", "masked", "none")),
        positions=r.choice(("none", "given") if local else ("none", "given", "inside")),
        mixes=mixes,
        experts=r.choice(("none", "none", "chosen")) if local else of("none", "chosen", "limited"),
        loss=loss,
        shared=of("nothing", "first values", "last values"),
        output=r.choice(("tensor", "tensor", "tuple", "dict", "dataclass")),
        hook=of("none", "keeps", "edits", "gradient"),
        uneven=r.random() < 0.2,
        told=of("none", "uneven", "later"),
        dropout=r.choice((0.0, 0.0, 0.1)),
    )
    slices = {"slice_tokens": r.randint(1, 20)}
    ways: tuple[dict[str, Any], ...] = (
        {}, {"alpha": "auto", "device_memory": "64KiB"}, {"alpha": 0.0}, {"alpha": 1.0}, {"alpha": r.random()},
        {"alpha": 0.5}, {"alpha": r.random()} | slices, {"alpha": 0.5, "test_mode": JOINT},
        {"test_mode": BY_KIND, "device_memory": "64KiB"},
        {"alpha": 0.5, "stream_from_host": r.choice(("attention", "hidden"))} | slices,
    )  # fmt: skip
    settings = r.choice(ways) | {"plan_memory": r.random() < 0.1}
    container = r.choice(("list", "list", "nested", "sequence in a list"))
    return Architecture(design, container, r.randint(8, 40), r.choice((3, 3, 3, 3, 6, 12)), settings)


class RandomModel(nn.Module):
    """Embeddings, layers and a head."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        design = architecture.design
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        layers = [Layer(design, number) for number in range(4)]
        parts = {"list": layers, "nested": [nn.ModuleList(layers[:2]), nn.ModuleList(layers[2:])]}
        self.layers = nn.ModuleList(parts.get(architecture.container, [nn.Sequential(*layers[:2]), *layers[2:]]))
        self.all = [layers]  # in a list, which hides them
        self.hook, self.told, self.steps = design.hook, design.told, 0
        self._hook()

    def _hook(self) -> None:
        for layer in self.all[0]:
            if self.hook == "keeps":
                layer.mlp.register_forward_hook(
                    lambda mlp, x, y, layer=layer: setattr(layer, "kept", y.square().mean())
                )
            elif self.hook == "edits":
                layer.norm2.register_forward_hook(lambda norm, x, y: torch.cat([y[:, :-1], y[:, -1:] * 0.5], 1))
            elif self.hook == "gradient":
                layer.norm1.register_full_backward_hook(lambda norm, dx, dy: (dx[0] / (1 + dx[0].norm()),))

    def forward(self, ids: Tensor) -> Tensor:
        x, shared, losses = self.embed(ids), dict[str, Any](), []
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        memory = self.embed(ids[:, : max(2, ids.shape[1] // 3)]).tanh()
        for number, layer in enumerate(self.all[0]):
            shared["mixes"] = (self.told == "uneven" and number % 2 == 1) or (self.told == "later" and self.steps > 1)
            output = layer(x, shared, rotary(ids.shape[1]), memory, mask)
            if isinstance(output, Returned):
                output = (output.hidden, output.loss)
            elif isinstance(output, dict):
                output = (output["hidden"], output["loss"])
            x, loss = output if isinstance(output, tuple) else (output, None)
            if loss is not None and loss.dim():  # scores, whose order matters
                loss = (loss * torch.linspace(-1, 1, loss.numel()).view_as(loss)).square().mean()
            losses += [loss, layer.kept]
        self.steps += 1
        losses += shared.get("losses", [])
        total = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return total + 0.1 * sum((loss for loss in losses if loss is not None), torch.zeros(()))


class RandomModule(LightningModule):
    """Trains a random model with SGD, and records the gradients of each step."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = RandomModel(architecture)
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self.model))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(architecture: Architecture, strategy: Any) -> RandomModule:
    """Fit an architecture."""
    module = RandomModule(architecture)
    generator = torch.Generator().manual_seed(1)
    data = [
        torch.randint(0, VOCABULARY, (2, architecture.tokens), generator=generator) for _ in range(architecture.steps)
    ]
    torch.manual_seed(2)
    make_trainer(strategy, max_epochs=1, max_steps=architecture.steps).fit(module, batches(data))
    return module
