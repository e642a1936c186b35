"""Key-value caches, which Hugging Face models make by default: layers in training neither fill nor read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from support.attention.recorded_training import Recording, compare, train
from support.families import make_batch
from support.markers.slow import slow_if
from torch import Tensor, nn
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("own_folder")

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "pad_token_id": 0,
}  # fmt: skip
HYBRIDS = {
    "BambaConfig": {
        "attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    },
    "Lfm2Config": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "JambaConfig": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}  # fmt: skip


def llama() -> nn.Module:
    return made("LlamaConfig")


def made(config: str, **others: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES | others))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("config", HYBRIDS)
def test_hybrid_models_with_their_default_settings(config: str, alpha: float) -> None:
    model = made(config, **HYBRIDS[config])
    assert model.config.use_cache
    compare(lambda: copy.deepcopy(model), {"alpha": alpha}, steps=2)


class TwoParts(Recording):
    """Trains on the second half of a sequence, with a cache of the first."""

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        first, second = batch["input_ids"].chunk(2, 1)
        loss: Tensor = self.model(input_ids=second, past_key_values=self.cache_of(first), labels=second).loss
        return loss

    def cache_of(self, tokens: Tensor) -> Any:
        return self.model(input_ids=tokens, use_cache=True).past_key_values


class OwnCache(TwoParts):
    def cache_of(self, tokens: Tensor) -> Any:
        cache = DynamicCache()
        self.model(input_ids=tokens, past_key_values=cache)
        return cache


class CopiedCache(TwoParts):
    def cache_of(self, tokens: Tensor) -> Any:
        return copy.deepcopy(super().cache_of(tokens))


class WithoutGradients(TwoParts):
    @torch.no_grad()
    def cache_of(self, tokens: Tensor) -> Any:
        return super().cache_of(tokens)


SETTINGS: list[dict[str, Any]] = [{"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 1.0, "slice_tokens": 8}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("module", [TwoParts, OwnCache, CopiedCache])
def test_a_cache_of_an_earlier_forward_is_refused(module: Callable[..., Recording], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LlamaDecoderLayer gets a key-value cache of an earlier forward"):
        compare(llama, settings, module, steps=1)


def prefix_tuning() -> nn.Module:
    return peft.get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


class AlsoWithout(Recording):
    """Runs a forward without a cache as well, whose layers are swapped or recomputed."""

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        with self.model.disable_adapter():
            beside: Tensor = self.model(**batch, use_cache=False).logits.logsumexp(-1).mean()
        loss: Tensor = self.model(**batch).loss
        return loss + 0.1 * beside


@slow_if(lambda settings: settings != {"alpha": 0.5})
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("build", "module"), [(llama, WithoutGradients), (prefix_tuning, Recording), (prefix_tuning, AlsoWithout)]
)
def test_layers_that_read_a_cache_run_as_in_plain_training(
    build: Callable[[], nn.Module], module: Callable[..., Recording], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = build()
    with pytest.warns(UserWarning, match="LlamaDecoderLayer runs as in plain training, because it gets a key-value"):
        compare(lambda: copy.deepcopy(model), settings, module, steps=3)


@pytest.mark.slow
def test_two_forwards_with_caches_of_their_own() -> None:
    class Twice(Recording):
        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            first, second = batch["input_ids"].chunk(2, 1)
            loss: Tensor = sum(self.model(input_ids=part, labels=part).loss for part in (first, second))
            return loss

    compare(llama, {"alpha": 0.5}, Twice)


def test_an_evaluation_may_fill_a_cache() -> None:
    module = train(llama, [make_batch(2, 48)], alpha=0.5)
    tokens = make_batch(1, 8)["input_ids"]
    model = module.model.eval()
    generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        generated, model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False, pad_token_id=0)
    )
