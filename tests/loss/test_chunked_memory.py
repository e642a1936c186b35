"""Memory of the loss in chunks of tokens."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from support.families import make_batch
from support.samples.chunked_models import (
    CHUNK,
    LLAMA,
    SOFTCAP,
    build,
    chunked,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.profiler.memory_meter import PeakMeter

LARGE = 1999


class VocabularyWatch(TorchDispatchMode):
    """Measures the peak bytes of all storages that hold logits."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.largest_tokens = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, tuple | list) else (out,):
            real = isinstance(t, Tensor) and not t.is_meta and t.dim() > 1
            if real and t.shape[-1] == LARGE and t.shape[-2] != LLAMA["hidden_size"]:
                self._see(t)
        return out

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.largest_tokens = max(self.largest_tokens, t.numel() // LARGE)
        if storage._cdata not in self._alive:
            weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self._alive[storage._cdata] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))


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
