"""Models whose attention is not simply causal: gradients are those of plain training, or one line refuses the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.attention import attention_models
from support.attention.recorded_training import BOUND, Recording, errors, gradient_errors, plain_training, train
from support.divided_training import RING, ULYSSES, check
from support.families import FAMILIES, VOCABULARY, make_batch
from support.harness import Batch, EngineUnderTest
from support.markers.slow import slow_if
from support.processes import run_in_processes
from support.trainer_harness import batches, fit
from torch import Tensor, nn
from transformers import masking_utils as masks

from lightning_memo import MemoStrategy

IMAGE_TOKENS = 8  # fewer pairs than samples would meet: 28 of 262,144
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
DECODER: dict[str, Any] = SIZES | {"num_key_value_heads": 4, "head_dim": 8, "use_cache": False}
PEGASUS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "use_cache": False,
    "max_position_embeddings": 1024,
}  # fmt: skip


def gemma3() -> nn.Module:
    text = DECODER | {"sliding_window": 64, "sliding_window_pattern": 2}
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    tokens = {"image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4() -> nn.Module:
    """Its last layers attend to keys and values of earlier ones, with slices of masks that leave nothing out."""
    config = transformers.Gemma4TextConfig(
        **DECODER | {"num_key_value_heads": 2, "num_hidden_layers": 6}, global_head_dim=8, num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM(config)


def gemma4_in_fp64() -> nn.Module:
    """Its scores are not scaled: in FP32, other orders of sums change gradients by 1e-5."""
    return gemma4().double()


def llama4() -> nn.Module:
    config = transformers.Llama4TextConfig(
        **DECODER, attention_chunk_size=40, num_local_experts=2, intermediate_size_mlp=64, pad_token_id=0
    )
    return transformers.Llama4ForCausalLM(config)


def modernbert() -> nn.Module:
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**SIZES, **special, local_attention=16))


def qwen2_moe() -> nn.Module:
    """Its attention has windows by its masks only."""
    config = transformers.Qwen2MoeConfig(
        **DECODER, use_sliding_window=True, sliding_window=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


def bigbird_pegasus() -> nn.Module:
    config = transformers.BigBirdPegasusConfig(**PEGASUS, attention_type="original_full")
    return transformers.BigBirdPegasusForCausalLM(config)


def pegasus_x() -> nn.Module:
    config = transformers.PegasusXConfig(**PEGASUS, block_size=16, num_global_tokens=4)
    return transformers.PegasusXForConditionalGeneration(config)


def llama() -> nn.Module:
    return FAMILIES["llama_gqa"].build()


def window() -> nn.Module:
    return FAMILIES["mistral_window"].build()


def eager() -> nn.Module:
    return FAMILIES["llama"].build(attn_implementation="eager")


def bidirectional() -> nn.Module:
    return FAMILIES["llama"].build(is_causal=False)


class OwnMask(nn.Module):
    """Gives its model a mask that it makes by transformers' functions."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        super().__init__()
        self.lm = llama()
        self._functions = functions

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Tensor) -> Any:
        embedded = self.lm.get_input_embeddings()(input_ids)
        mask = masks.create_causal_mask(
            config=self.lm.config, inputs_embeds=embedded, attention_mask=None, past_key_values=None, **self._functions
        )
        return self.lm(input_ids=input_ids, labels=labels, attention_mask=mask, **others)


def prefix_lm() -> nn.Module:
    return OwnMask(or_mask_function=lambda b, h, q, k: k < 20)


def own_window() -> nn.Module:
    return OwnMask(and_mask_function=lambda b, h, q, k: q - k < 20)


def text(tokens: int = 96) -> Batch:
    batch = make_batch(2, tokens)
    return {name: t.clamp(1, 90) for name, t in batch.items()}


def with_image(tokens: int = 512) -> Batch:
    types = torch.zeros(2, tokens, dtype=torch.long)
    types[:, 100 : 100 + IMAGE_TOKENS] = 1
    return text(tokens) | {"token_type_ids": types}


def images_in_both_halves() -> Batch:
    types = torch.zeros(2, 512, dtype=torch.long)
    types[:, 100::200] = 1
    return text(512) | {"token_type_ids": types}


def without_image(tokens: int = 512) -> Batch:
    return text(tokens) | {"token_type_ids": torch.zeros(2, tokens, dtype=torch.long)}


def right_padded() -> Batch:
    return make_batch(2, 96, padded=True)


def left_padded() -> Batch:
    batch = text()
    valid = torch.ones(2, 96, dtype=torch.long)
    valid[0, :37] = valid[1, :3] = 0
    return batch | {"attention_mask": valid, "labels": batch["labels"].masked_fill(valid == 0, -100)}


def holes() -> Batch:
    batch = text()
    valid = torch.ones(2, 96, dtype=torch.long)
    valid[0, 37:40] = 0
    return batch | {"attention_mask": valid, "labels": batch["labels"].masked_fill(valid == 0, -100)}


def given_mask(additive: bool = False) -> Batch:
    seen = torch.ones(96, 96, dtype=torch.bool).tril()
    seen[:30, :30] = True
    mask = torch.zeros(96, 96).masked_fill(~seen, torch.finfo(torch.float32).min) if additive else seen
    return text() | {"attention_mask": mask.expand(2, 1, -1, -1)}


def given_additive_mask() -> Batch:
    return given_mask(additive=True)


MODELS: list[tuple[Callable[[], nn.Module], Callable[[], Batch]]] = [
    (gemma3, with_image), (gemma3, without_image), (prefix_lm, text), (own_window, text), (modernbert, text),
    (modernbert, left_padded), (llama, left_padded), (window, left_padded), (llama, holes), (llama4, text),
    (llama4, left_padded), (gemma4, text), (bigbird_pegasus, text), (pegasus_x, text), (llama, given_mask),
    (llama, given_additive_mask), (eager, text), (bidirectional, text), (bidirectional, right_padded),
    (bidirectional, left_padded), (eager, left_padded), (bigbird_pegasus, left_padded),
    (attention_models.gpt_oss, left_padded), (attention_models.gemma2, left_padded),
    # eager attention adds a boolean mask, others hide keys
    (eager, given_mask), (attention_models.gemma2, given_mask), (eager, given_additive_mask),
]  # fmt: skip


# Each kind of mask; of models with the same mask, one.
QUICK = (
    "gemma3-with_image-0.5", "prefix_lm-text-0.5", "own_window-text-0.5", "modernbert-text-0.5",
    "window-left_padded-0.5", "llama-holes-0.5", "llama4-left_padded-0.5", "pegasus_x-text-0.5",
    "llama-given_additive_mask-0.5", "bidirectional-right_padded-0.5", "gpt_oss-left_padded-0.5",
)  # fmt: skip


@slow_if(lambda case_id: case_id not in QUICK)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("build", "batch"), MODELS)
def test_gradients_are_those_of_plain_training(
    build: Callable[[], nn.Module], batch: Callable[[], Batch], alpha: float
) -> None:
    found = errors(train(build, [batch()] * 2, alpha=alpha), plain_training(build, batch))
    assert max(found.values()) < BOUND, found


@slow_if(lambda build, stream_from_host: build is own_window or (build is llama and stream_from_host == "none"))
@pytest.mark.parametrize(
    ("build", "batch", "stream_from_host"),
    [
        (llama, left_padded, "none"),
        (llama, left_padded, "hidden"),
        (window, left_padded, "hidden"),
        (gemma4, text, "attention"),
        (gemma4, left_padded, "hidden"),
        (llama4, left_padded, "none"),
        (own_window, text, "hidden"),
    ],
)
def test_slices(build: Callable[[], nn.Module], batch: Callable[[], Batch], stream_from_host: str) -> None:
    trained = train(build, [batch()] * 2, alpha=0.5, slice_tokens=32, stream_from_host=stream_from_host)
    found = errors(trained, plain_training(build, batch))
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize(
    ("build", "data", "settings", "message"),
    [
        (
            eager,
            [left_padded()],
            {"slice_tokens": 32, "stream_from_host": "hidden"},
            "LlamaDecoderLayer gets an attention mask of all tokens, which is a tensor",
        ),
        (
            llama4,
            [text()],
            {"slice_tokens": 32, "stream_from_host": "model"},
            "neither causal, nor a sliding window, nor full",
        ),
        (llama, [left_padded()], {"slice_tokens": 32, "stream_from_host": "model"}, "padding that is not on the right"),
    ],
)
def test_refusals(build: Callable[[], nn.Module], data: list[Batch], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        train(build, data, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("images", [(False, True), (True, False)])
def test_steps_with_and_without_images(images: tuple[bool, bool]) -> None:
    """The layers are cut in the steps without images only."""
    data = [with_image if image else without_image for image in images]
    trained = train(gemma3, [batch() for batch in data], alpha=0.5)
    for step, batch in enumerate(data):
        expected = plain_training(gemma3, batch)
        found = gradient_errors(trained.gradients[step], expected.gradients[step])
        assert max(found.values()) < BOUND, (step, found)


@pytest.mark.slow
def test_windows_by_masks_only_in_slices_of_the_model() -> None:
    result = train(qwen2_moe, [text(), text()], alpha=0.5, slice_tokens=32, stream_from_host="model")
    found = errors(result, plain_training(qwen2_moe, text))
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize(("build", "batch"), [(llama4, text), (prefix_lm, text)])
def test_masks_that_need_all_tokens_among_processes(build: Callable[[], nn.Module], batch: Callable[[], Batch]) -> None:
    """The first step runs once more, with whole rows outside of the layers."""
    check(build, [batch()] * 2, RING | {"alpha": 0.0})


def divided_loss(build: Callable[[], nn.Module], batch: Callable[[], Batch]) -> float:
    """Return the loss of one of two processes, each of which has half of the tokens."""
    return fit(
        MemoStrategy(context_parallel_size=2), Recording(build), batches([batch()]), max_steps=1, devices=2
    ).losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "batch"), [(gemma3, without_image), (gemma3, images_in_both_halves), (eager, text)])
def test_masks_among_processes(build: Callable[[], nn.Module], batch: Callable[[], Batch]) -> None:
    parts = run_in_processes(2, divided_loss, build, batch)
    assert sum(parts) / 2 == pytest.approx(plain_training(build, batch).losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("slices", [{}, {"slice_tokens": 32, "stream_from_host": "hidden"}], ids=["whole", "slices"])
@pytest.mark.parametrize("division", [RING, ULYSSES], ids=["ring", "ulysses"])
def test_keys_of_earlier_layers_among_processes(division: dict[str, Any], slices: dict[str, Any]) -> None:
    check(gemma4_in_fp64, [text()] * 2, {**division, "alpha": 0.5, **slices})


@pytest.mark.slow
def test_attention_implementations_come_back() -> None:
    model = gemma3()
    model.model.vision_tower.set_attn_implementation("eager")
    before = [m.config._attn_implementation for m in model.modules() if hasattr(m, "set_attn_implementation")]
    assert "eager" in before and "sdpa" in before
    train(lambda: model, [with_image()], alpha=0.0)
    assert [m.config._attn_implementation for m in model.modules() if hasattr(m, "set_attn_implementation")] == before


@pytest.mark.parametrize(
    ("build", "batch"),
    [(bigbird_pegasus, text), (eager, left_padded), (bidirectional, left_padded), (gemma3, with_image)],
)
def test_evaluation(build: Callable[[], nn.Module], batch: Callable[[], Batch]) -> None:
    torch.manual_seed(0)
    model, given = build().eval(), batch()
    with torch.no_grad():
        expected = model(**given).logits
        with EngineUnderTest(model):
            actual = model(**given).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
