"""Inputs of a model that are changed in place while the engine still has to read them, against plain training.

Loops write the next batch into the buffers of the last one, and models write prompts into embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.devices import DEVICE
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest, Step, gradients_of
from torch import Tensor, nn

TOKENS = 61
PLANS: dict[str, dict[str, Any]] = {
    "layers": {},
    "attention": {"slice_tokens": 16, "stream_from_host": "attention"},
    "all": {"slice_tokens": 16, "stream_from_host": "hidden"},
    "slice": {"stream_from_host": "model", "slice_tokens": 16},
}


def build(frozen: bool = True) -> nn.Module:
    """A model with frozen embeddings: plain training does not read ids in the backward."""
    torch.manual_seed(0)
    model = FAMILIES["llama"].build().train().to(DEVICE)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.2)  # positions matter
    model.model.embed_tokens.requires_grad_(not frozen)
    return model


# Returns a loss, and another tensor that is trained, if any.
Run = Callable[[nn.Module], tuple[Tensor, Tensor | None]]


def assert_trains_as_plain(model: nn.Module, plan: str, *runs: Run, batch: dict[str, Tensor] | None = None) -> None:
    def step(run: Run) -> Step:
        model.zero_grad()
        loss, other = run(model)
        loss.backward()
        others = {} if other is None or other.grad is None else {"other": other.grad}
        return Step(loss.detach(), gradients_of(model) | others)

    plain = list(map(step, runs))
    with EngineUnderTest(model, **PLANS[plan]) as under_test:
        under_test.profile_step(batch or inputs_of())
        for alpha in (0.0, 0.5):
            under_test.load(alpha)
            for run, expected in zip(runs, plain, strict=True):
                found = step(run)
                assert found.gradients.keys() == expected.gradients.keys()
                assert found.distance(expected) <= 2e-6
            under_test.assert_empty()


def inputs_of(**others: Tensor) -> dict[str, Tensor]:
    return {name: t.clone().to(DEVICE) for name, t in (make_batch(2, TOKENS) | others).items()}


POSITIONS = (torch.arange(TOKENS) + 5).repeat(2, 1)
MASK = torch.ones(2, TOKENS, dtype=torch.bool).index_fill_(1, torch.tensor([60]), False)
BUFFERS = {
    "positions": inputs_of(position_ids=POSITIONS),
    "documents": inputs_of(position_ids=torch.cat([torch.arange(30), torch.arange(31)])[None]),
    "mask": inputs_of(attention_mask=MASK, labels=make_batch(2, TOKENS)["labels"].masked_fill(~MASK, -100)),
}


def written(batch: dict[str, Tensor], write: Callable[[Tensor], object]) -> Run:
    def run(model: nn.Module) -> tuple[Tensor, None]:
        buffers = {name: t.clone() for name, t in batch.items()}
        loss = model(**buffers).loss
        for t in buffers.values():
            write(t)
        return loss, None

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("plan", PLANS)
def test_buffers_that_are_used_again_before_the_backward(plan: str, name: str) -> None:
    # PyTorch does not count the second one, nor any that numpy makes.
    writes = (Tensor.zero_, lambda t: t.data.fill_(1), lambda t: t.view(-1)[3:].zero_())
    assert_trains_as_plain(build(), plan, *(written(BUFFERS[name], write) for write in writes))


@pytest.mark.slow
def test_ids_that_change_between_embeddings_and_layers() -> None:
    def run(model: nn.Module) -> tuple[Tensor, None]:
        batch = inputs_of()
        embeds = model.get_input_embeddings()(batch["input_ids"])
        batch["input_ids"].zero_()
        return model(inputs_embeds=embeds, labels=batch["labels"]).loss, None

    assert_trains_as_plain(build(), "all", run)


class OwnAttention(nn.Module):
    """Attention as code that comes with a checkpoint may compute it: it adds the mask itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **_: Any) -> tuple[Tensor, None]:
        q, k, v = self.qkv(hidden_states).chunk(3, -1)
        scores = torch.where(attention_mask[:, 0], q @ k.transpose(1, 2), -1e9)
        return scores.softmax(-1) @ v, None


def test_masks_of_layers_that_compute_attention_themselves() -> None:
    """Their recomputation builds the mask once more."""
    model = build()
    for layer in model.model.layers:
        layer.self_attn = OwnAttention().to(DEVICE)
    run = written(BUFFERS["mask"], lambda t: t.view(-1)[:20].zero_())
    assert_trains_as_plain(model, "layers", run, batch=BUFFERS["mask"])


# ---- embeddings into which a model writes


def prompt(embeds: Tensor, trained: Tensor) -> Tensor:
    embeds[:, :5] = trained[:, :5]
    return embeds


def scaled(embeds: Tensor, trained: Tensor) -> Tensor:
    embeds[:, :5].mul_(3)
    embeds.narrow(1, 20, 4).fill_(0.1)
    return embeds


def images(embeds: Tensor, trained: Tensor) -> Tensor:
    mask = torch.zeros(2, TOKENS, 1, dtype=torch.bool, device=embeds.device)
    mask[:, 7:15] = True
    embeds.masked_scatter_(mask.expand_as(embeds), trained.flatten())
    return embeds


def joined(embeds: Tensor, trained: Tensor) -> Tensor:
    embeds.select(1, 8).mul_(2)
    return torch.cat([trained[:, :5], embeds[:, 5:]], 1)


def in_a_hook(embeds: Tensor, trained: Tensor) -> Tensor:
    with torch.no_grad():
        embeds.detach().transpose(0, 1)[3:9].zero_()
    return embeds.mul_(trained[:, :1])


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_writes_into_embeddings(frozen: bool) -> None:
    def written_by(write: Callable[[Tensor, Tensor], Tensor]) -> Run:
        def run(model: nn.Module) -> tuple[Tensor, Tensor]:
            trained = torch.linspace(-1, 1, 2 * 8 * 32, device=DEVICE).view(2, 8, 32).requires_grad_()
            embedding = model.get_input_embeddings()
            handle = embedding.register_forward_hook(lambda module, args, embeds: write(embeds, trained))
            try:
                return model(**inputs_of()).loss, trained
            finally:
                handle.remove()

        return run

    assert_trains_as_plain(build(frozen), "all", *map(written_by, (prompt, scaled, images, joined, in_a_hook)))


@pytest.mark.slow
def test_writes_into_hidden_states_between_layers() -> None:
    def double(module: nn.Module, args: Any, hidden: Tensor) -> None:
        hidden[:, :5].mul_(2)

    def double_input(module: nn.Module, args: Any) -> None:
        args[0].select(1, 3).mul_(2)

    def run(model: nn.Module) -> tuple[Tensor, None]:
        of_layer = model.model.layers[1].register_forward_hook(double)
        of_norm = model.model.norm.register_forward_pre_hook(double_input)
        try:
            return model(**inputs_of()).loss, None
        finally:
            of_layer.remove()
            of_norm.remove()

    assert_trains_as_plain(build(), "all", run)
