"""Stages have the modules around the layers by the order in which a model calls them, not by that of registration."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.architectures.older_models import make_older
from support.parallel_training import Run, train_alone, train_together
from support.samples.configurations import BOUND
from torch import nn

from lightning_memo.parallel.pipeline.stage_modules import StagedModel, StageForward, before_layers

NARROW = {"word_embed_proj_dim": 16}  # embeddings narrower than the layers, and projections before and behind these
TRAINED = [
    ("OPT", {}),
    ("OPT", {"tie_word_embeddings": False}),
    ("OPT", NARROW),
    ("OPT", NARROW | {"do_layer_norm_before": False}),
    *[(name, {}) for name in ("GPT2", "GPTBigCode", "GPTJ", "CodeGen", "Falcon", "Phi", "Starcoder2", "XGLM")],
    *[(name, {}) for name in ("BioGpt", "Bert", "GPTNeoX")],
]


def names_before(model: nn.Module, layers: nn.ModuleList) -> list[str]:
    names = {m: name for name, m in model.named_modules()}
    return [names[m].rpartition(".")[2] for m in before_layers(model, list(layers))]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("name", "others"), TRAINED, ids=str)
def test_trains_as_one_process(name: str, others: dict[str, Any], blocks: int) -> None:
    """Biases of keys have gradients of rounding alone, so that weights take other steps in Adam."""
    run = Run(family=functools.partial(make_older, name, **others), tokens=45, batch=4, steps=3, layers=4)
    settings = {"pipeline_parallel_size": 2, "virtual_pipeline_size": blocks, "alpha": 0.5}
    errors = train_together(2, run, settings).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


def test_modules_behind_the_layers_may_be_registered_before_them() -> None:
    model: Any = make_older("OPT", **NARROW)
    decoder = model.model.decoder
    staged = StagedModel.of(model, None)
    assert set(staged.before) == {decoder.embed_tokens, decoder.embed_positions, decoder.project_in}
    assert set(staged.after) == {decoder.final_layer_norm, decoder.project_out, model.lm_head}


def test_modules_before_the_layers_may_be_registered_behind_them() -> None:
    model: Any = make_older("Bloom")
    norm = model.transformer.word_embeddings_layernorm
    del model.transformer.word_embeddings_layernorm
    model.transformer.word_embeddings_layernorm = norm
    assert names_before(model, model.transformer.h) == ["word_embeddings", "word_embeddings_layernorm"]


def test_embeddings_for_some_batches_come_before_the_layers() -> None:
    """The model calls one for token types only if it gets them."""

    class WithTypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.types, self.norm = nn.Embedding(4, 2), nn.Embedding(4, 2), nn.LayerNorm(2)
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, input_ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
            x = self.words(input_ids)
            return self.norm(self.layers[0](x if types is None else x + self.types(types)))

    model = WithTypes()
    assert names_before(model, model.layers) == ["words", "types"]


def test_where_calls_are_not_known_the_order_of_registration_counts() -> None:
    class NeedsMore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layers, self.norm = nn.Embedding(4, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.LayerNorm(2)

        def forward(self, input_ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layers[0](self.words(input_ids) + other))

    model = NeedsMore()
    assert names_before(model, model.layers) == ["words"]


def test_finding_the_order_draws_no_random_numbers_and_leaves_no_hooks() -> None:
    model: Any = make_older("GPT2", embd_pdrop=0.5).train()
    before = torch.get_rng_state()
    before_layers(model, list(model.transformer.h))
    assert torch.equal(before, torch.get_rng_state())
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.shape[:2] == (1, 3)


def test_models_that_change_an_embedding_in_place_are_refused() -> None:
    with pytest.raises(ValueError, match="CTRLLMHeadModel changes the output of an embedding in place") as caught:
        StagedModel.of(make_older("CTRL"), None)
    assert "\n" not in str(caught.value)


def test_layers_that_return_lists_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear returns a list, and layers of other stages return") as caught:
        StageForward("Model", [0]).leave_layer(nn.Linear(2, 2), (), [torch.ones(2)])
    assert "\n" not in str(caught.value)
