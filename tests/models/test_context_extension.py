"""Rotary positions scaled for longer sequences are those of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from support.samples.models import SAVED, TINY
from support.trainer_harness import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_memo.models import CausalLM, ModelConfig, build_model, load_hf_config

GEMMA = TINY | {"model_type": "gemma3_text", "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that knows 32 positions."""
    folder = tmp_path_factory.mktemp("trained")
    build_model(ModelConfig(config=SAVED)).save_pretrained(folder)
    return str(folder)


def rotary(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of 128 positions."""
    return model.model.rotary_emb(torch.zeros(1, 1, 16), torch.arange(128)[None])


def by_transformers(**rope: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers computes for a configuration that was written with this scaling."""
    settings = {name: value for name, value in SAVED.items() if name != "model_type"}
    config = LlamaConfig(**settings | {"max_position_embeddings": 128}, rope_parameters={"rope_theta": 1e4, **rope})
    return rotary(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (
            {"rope_type": "yarn", "factor": 8, "beta_fast": 20, "attention_factor": 1.5},
            {
                "rope_type": "yarn", "factor": 8.0, "beta_fast": 20, "attention_factor": 1.5,
                "original_max_position_embeddings": 32,
            },
        ),
        (
            "llama3",
            {
                "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
    ids=["linear", "yarn", "yarn-options", "llama3"],
)  # fmt: skip
def test_positions_are_scaled_as_in_transformers(scaling: Any, expected: dict[str, Any], trained: str) -> None:
    plain = build_model(ModelConfig(path=trained))
    scaled = build_model(ModelConfig(path=trained, rope_scaling=scaling, max_position_embeddings=128))
    for mine, unscaled, theirs in zip(rotary(scaled), rotary(plain), by_transformers(**expected), strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, unscaled)
    assert scaled.config.max_position_embeddings == 128
    assert all(torch.equal(p, q) for p, q in zip(scaled.parameters(), plain.parameters(), strict=True))


def test_it_is_saved_with_the_model_and_a_new_scaling_replaces_it(trained: str, tmp_path: Path) -> None:
    first = build_model(ModelConfig(path=trained, rope_scaling={"rope_type": "yarn", "factor": 4}))
    first.save_pretrained(tmp_path)
    assert torch.equal(rotary(build_model(ModelConfig(path=str(tmp_path))))[0], rotary(first)[0])
    again = load_hf_config(ModelConfig(path=str(tmp_path), rope_scaling="yarn", max_position_embeddings=512))
    assert again.rope_parameters["factor"] == 512 / 32


def test_a_model_that_supports_the_length_keeps_its_positions(trained: str, tmp_path: Path) -> None:
    own = build_model(ModelConfig(path=trained, rope_scaling="llama3", max_position_embeddings=128))
    own.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (16, 128):
            kept = load_hf_config(ModelConfig(path=str(tmp_path), rope_scaling="yarn", max_position_embeddings=tokens))
            assert (kept.rope_parameters, kept.max_position_embeddings) == (own.config.rope_parameters, 128)
    with pytest.warns(UserWarning, match="yarn replaces llama3, with which the model was trained on 128 positions"):
        built = build_model(ModelConfig(path=str(tmp_path), rope_scaling="yarn", max_position_embeddings=256))
    longer = built.config
    assert (longer.rope_parameters["rope_type"], longer.rope_parameters["factor"]) == ("yarn", 256 / 32)


def test_positions_may_go_on_unscaled(trained: str) -> None:
    model = build_model(ModelConfig(path=trained, max_position_embeddings=64))
    assert model.config.max_position_embeddings == 64
    assert torch.equal(rotary(model)[0], rotary(build_model(ModelConfig(path=trained)))[0])


def test_full_attention_is_scaled_where_other_layers_have_windows() -> None:
    saved, scaled = (
        load_hf_config(ModelConfig(config=GEMMA, rope_scaling=scaling)).rope_parameters
        for scaling in (None, {"rope_type": "linear", "factor": 8})
    )
    assert scaled["sliding_attention"] == saved["sliding_attention"]
    assert scaled["full_attention"] == saved["full_attention"] | {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": "dynamic"}, r"rope_scaling: rope_type=dynamic: give one of linear, yarn, llama3$"),
        ({"rope_scaling": {"factor": 4}}, r"rope_scaling: rope_type=None: give one of"),
        ({"rope_scaling": "yarn"}, r"rope_scaling=yarn: by how much\? Give its factor, or model.max_pos"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, r"factor=0.5: give 1 or more; .* on 32 positions"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fst": 3}},
            r"yarn has no beta_fst; give any of factor, original_max_position_embeddings, attention_factor, beta_fast",
        ),
        (
            {"rope_scaling": "yarn", "config": {"model_type": "gpt2"}},
            r"model.rope_scaling: models of type gpt2 have no rotary positions to scale",
        ),
        (
            {"max_position_embeddings": 4096, "config": {"model_type": "gpt2"}},
            r"model.max_position_embeddings: models of type gpt2 have no rotary",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_hf_config(ModelConfig(**{"config": SAVED} | settings))


def warned(call: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_sequences_longer_than_a_model_knows_are_told(trained: str) -> None:
    def say(seq_len: int, **model: Any) -> list[str]:
        ids = torch.arange(seq_len) % SAVED["vocab_size"]
        data = LightningDataModule()
        data.seq_len, data.train_dataloader = seq_len, lambda: DataLoader([{"input_ids": ids, "labels": ids}])
        trainer = make_trainer("auto", max_steps=1)
        lines = warned(lambda: trainer.fit(CausalLM(model or {"path": trained}), datamodule=data))
        return [line for line in lines if "seq_len" in line]

    (line,) = say(33)
    assert line == (
        "data.seq_len=33: the model of model.path knows 32 positions, and beyond them the loss starts far too high; "
        "give model.rope_scaling=yarn model.max_position_embeddings=33, or lower data.seq_len"
    )
    assert not say(32)
    assert not say(64, path=trained, rope_scaling="yarn", max_position_embeddings=64)
    assert not say(64, config=SAVED)
