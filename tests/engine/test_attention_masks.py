"""Classification of mask functions of transformers into patterns, all of which kernels compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.families import FAMILIES, VOCABULARY
from support.harness import EngineUnderTest
from torch import Tensor
from transformers import masking_utils

from lightning_memo.engine.attention.hugging_face import MaskPattern, _classify

TOKENS, BATCH = 40, 2
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

STARTS = ((0, 13), (0, 5, 30))
FIRST_OF_ONE = ((0, 1, 9), (0, 20))


def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= 0) & (k >= 0)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (k > q - 7)


def chunked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (q // 7 == k // 7)


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & ((k == q) | (k == q - 1) | (k % 5 == 0))


def within_documents(mask: MaskFunction, starts: Sequence[Sequence[int]] = STARTS) -> MaskFunction:
    document = torch.stack([torch.searchsorted(torch.tensor(s), torch.arange(TOKENS), right=True) for s in starts])
    return lambda b, h, q, k: mask(b, h, q, k) & (document[b, q] == document[b, k])


@pytest.mark.parametrize(
    ("mask", "local_size", "pattern"),
    [
        (full, None, MaskPattern(False, None)),
        (causal, None, MaskPattern(True, None)),
        (window, 7, MaskPattern(True, 7)),
        (causal, 100, MaskPattern(True, None)),  # a window longer than the sequence
        (within_documents(full), None, MaskPattern(False, None, documents=STARTS)),
        (within_documents(causal), None, MaskPattern(True, None, documents=STARTS)),
        (within_documents(full, FIRST_OF_ONE), None, MaskPattern(False, None, documents=FIRST_OF_ONE)),
        (within_documents(causal, FIRST_OF_ONE), None, MaskPattern(True, None, documents=FIRST_OF_ONE)),
        (within_documents(window), 7, MaskPattern(True, 7, documents=STARTS)),
        # Chunks are documents that happen to be of one length.
        (chunked, 7, MaskPattern(True, 7, documents=((0, 7, 14, 21, 28, 35),) * 2)),
    ],
)
def test_patterns(mask: MaskFunction, local_size: int | None, pattern: MaskPattern) -> None:
    assert _classify(mask, TOKENS, BATCH, local_size) == pattern


@pytest.mark.parametrize(("mask", "local_size"), [(strided, None), (window, None), (window, 6)])
def test_other_masks_are_refused(mask: MaskFunction, local_size: int | None) -> None:
    with pytest.raises(ValueError, match="neither causal, nor a sliding window, nor full") as caught:
        _classify(mask, TOKENS, BATCH, local_size)
    assert "\n" not in str(caught.value)


def test_a_single_token() -> None:
    assert _classify(causal, 1, BATCH, None) == MaskPattern(True, None)


# ---- evaluation


@pytest.mark.parametrize("kind", ["documents", "padding", "causal"])
def test_evaluation_makes_no_mask_of_all_queries_and_keys(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a mask would have 4 GiB for a row of 64K tokens. Logits are those of transformers."""
    torch.manual_seed(0)
    model, (rows, tokens) = FAMILIES["llama_gqa"].build().eval(), (2, 48)
    valid = torch.ones(rows, tokens, dtype=torch.long)
    valid[1, 30:] = 0
    positions = torch.cat([torch.arange(20), torch.arange(28)]).expand(rows, -1)
    given = {"documents": {"position_ids": positions}, "padding": {"attention_mask": valid}, "causal": {}}[kind]
    ids = torch.randint(0, VOCABULARY, (rows, tokens))
    with torch.no_grad():
        expected = model(input_ids=ids, **given).logits
    shapes: list[torch.Size] = []

    def noted(*args: object, **settings: object) -> Tensor | None:
        mask: Tensor | None = sdpa_mask(*args, **settings)
        shapes.extend([] if mask is None else [mask.shape])
        return mask

    sdpa_mask = masking_utils.sdpa_mask
    with EngineUnderTest(model), torch.inference_mode():
        monkeypatch.setattr(masking_utils, "sdpa_mask", noted)
        actual = model(input_ids=ids, **given).logits
    assert shapes == []
    used = valid.bool() if kind == "padding" else torch.ones_like(valid, dtype=torch.bool)
    torch.testing.assert_close(actual[used], expected[used], rtol=0, atol=1e-6)


def test_padding_on_the_left_is_left_to_transformers_in_evaluation() -> None:
    torch.manual_seed(0)
    model = FAMILIES["llama_gqa"].build().eval()
    valid = torch.ones(2, 24, dtype=torch.long)
    valid[0, :5] = 0
    ids = torch.randint(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=valid).logits
        with EngineUnderTest(model):
            actual = model(input_ids=ids, attention_mask=valid).logits
    assert torch.equal(actual[valid.bool()], expected[valid.bool()])
