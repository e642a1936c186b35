"""Models whose attention has sinks, caps, biases, other lengths or other head sizes train as plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.attention import attention_models as models
from support.attention.recorded_training import errors, plain_training, train
from support.markers.slow import slow_if
from torch import nn

BOUND = 1e-5
SLICES = {"slice_tokens": 16, "stream_from_host": "hidden", "alpha": 0.5}
WHOLE: list[dict[str, Any]] = [{"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 1.0}, {}]
CUT: list[dict[str, Any]] = [*WHOLE, SLICES, {"stream_from_host": "model", "slice_tokens": 16}]

TRAINED: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]]]] = {
    "gpt_oss": (models.gpt_oss, CUT),
    "gemma2": (models.gemma2, CUT),
    "deepseek_v3": (models.deepseek_v3, CUT),
    "bart": (models.bart, WHOLE),
    "bart_eager": (models.bart_eager, WHOLE),
    "whisper": (models.whisper, WHOLE),
    "t5": (models.t5, WHOLE),
    "t5_eager": (models.t5_eager, WHOLE),
    "deepseek_v2": (models.deepseek_v2, [SLICES]),
    "FeatureDecoder": (models.FeatureDecoder, WHOLE),
    "FlatDecoder": (models.FlatDecoder, WHOLE),
    "doge": (models.doge, WHOLE),
    "bart_decoder": (models.bart_decoder, WHOLE),  # gradients of key biases are rounding errors
    "bloom": (models.bloom, WHOLE),
    "mpt": (models.mpt, WHOLE),
    "falcon_alibi": (models.falcon_alibi, WHOLE),
    "CrossDecoder": (models.CrossDecoder, WHOLE),
    "ReadingDecoder": (models.ReadingDecoder, WHOLE),
}


def _cases() -> list[Any]:
    return [pytest.param(name, s, id=f"{name}-{s}") for name, (_, settings) in TRAINED.items() for s in settings]


# Attention of these is of a kind that others have.
ALIKE = ("bart_eager", "t5_eager", "whisper", "bart_decoder", "falcon_alibi", "FlatDecoder")


@slow_if(lambda name, settings: name in ALIKE or (settings != {"alpha": 0.5} and name != "gpt_oss"))
@pytest.mark.parametrize(("name", "settings"), _cases())
def test_gradients_are_those_of_plain_training(name: str, settings: dict[str, Any]) -> None:
    build, batch = TRAINED[name][0], models.BATCHES.get(name, models.text)
    module = train(build, [batch(), batch()], **settings)
    worst = errors(module, plain_training(build, batch))
    assert max(worst.values()) <= BOUND, worst


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5, slices": ("t5_eager", SLICES, 'set stream_from_host="none"'),
    "Bloom, slices": ("bloom", SLICES, 'set stream_from_host="none"'),
    "Whisper, slices": ("whisper", SLICES, 'set stream_from_host="none"'),
    "other lengths, slices": ("CrossDecoder", SLICES, 'set stream_from_host="none"'),
    "other tokens, slices": ("ReadingDecoder", SLICES, 'set stream_from_host="none"'),
}


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_refused_in_one_line(name: str, settings: dict[str, Any], words: str) -> None:
    batch = models.BATCHES.get(name, models.text)
    with pytest.raises(ValueError, match=r"may not compute each token by itself|cannot run on some") as caught:
        train(TRAINED[name][0], [batch()], **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (models.bloom, "takes no position_ids"),
        (models.camembert_decoder, "padding tokens"),
        (models.qwen2_audio, "takes neither shift_labels"),
    ],
)
def test_models_that_count_tokens_themselves_are_refused_slice_by_slice(
    build: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        train(build, [models.text()], stream_from_host="model", slice_tokens=16)
    assert 'use stream_from_host="hidden"' in str(caught.value)
