"""Memory of the loss in chunks of tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.families import make_batch
from support.samples.chunked_models import CHUNK, LARGE, SOFTCAP, VocabularyWatch, build, chunked

from lightning_memo.profiler.memory_meter import PeakMeter


@pytest.mark.parametrize(
    ("config", "settings", "dtype", "bytes_each"),
    [
        ("LlamaConfig", {}, torch.float32, 4),
        ("LlamaConfig", {"tie_word_embeddings": True}, torch.float32, 4),
        ("LlamaConfig", {}, torch.bfloat16, 6),
        ("GraniteConfig", {"logits_scaling": 8.0}, torch.float32, 8),
        ("Gemma2Config", SOFTCAP, torch.float32, 16),
    ],
)
def test_one_chunk_of_logits_is_alive(
    config: str, settings: dict[str, Any], dtype: torch.dtype, bytes_each: int
) -> None:
    model = build(config, vocab_size=LARGE, **settings).to(dtype)
    batch = make_batch(2, 45)
    with chunked(model), VocabularyWatch() as watch:
        model(**batch).loss.backward()
    assert watch.largest_tokens == CHUNK
    assert watch.peak_bytes == bytes_each * CHUNK * LARGE
    with VocabularyWatch() as watch:
        model(**batch).loss.backward()
    assert watch.largest_tokens == 90


def test_peak_memory_grows_by_one_chunk_of_logits() -> None:
    model, batch, peaks = build("LlamaConfig", vocab_size=4096), make_batch(1, 256), []
    for tokens in (16, 32, 64):
        model.zero_grad()
        with chunked(model, tokens), PeakMeter(torch.device("cpu")) as meter:
            model(**batch).loss.backward()
        peaks.append(meter.peak_bytes)
    for tokens, (smaller, larger) in zip((16, 32), itertools.pairwise(peaks), strict=True):
        assert larger - smaller == pytest.approx(4 * tokens * 4096, rel=0.05)
