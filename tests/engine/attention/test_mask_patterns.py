"""Masks of transformers as patterns that kernels compute: the pattern of a mask holds for all pairs of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.families import FAMILIES, VOCABULARY
from support.harness import EngineUnderTest
from torch import Tensor
from transformers import masking_utils as masks

from lightning_memo.engine.attention.hugging_face import _check_among_processes, _Host, _mask, _pattern
from lightning_memo.engine.attention.mask_patterns import MaskPattern
from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.attention_kernel import block_mask
from lightning_memo.parallel.batches.token_layout import CurrentLayout, TokenLayout

TOKENS, BATCH = 40, 2
DIVIDED = TokenLayout(TOKENS, ulysses=2)
CPU = torch.device("cpu")
MaskFunction = Callable[..., Any]

STARTS = ((0, 13), (0, 5, 30))
FIRST_OF_ONE = ((0, 1, 9), (0, 20))


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & ((k == q) | (k == q - 1) | (k % 5 == 0))


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) | (k < 6)


def document_numbers(starts: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack([torch.searchsorted(torch.tensor(s), torch.arange(TOKENS), right=True) for s in starts])


def positions_in(numbers: Tensor) -> Tensor:
    """Return the position of each token in its document."""
    same = numbers[:, :, None] == numbers[:, None, :]
    return same.tril().sum(-1) - 1


def within_documents(mask: MaskFunction, starts: Sequence[Sequence[int]] = STARTS) -> MaskFunction:
    numbers = document_numbers(starts)
    return packed(mask, positions_in(numbers), numbers)


def packed(mask: MaskFunction, positions: Tensor, numbers: Tensor) -> MaskFunction:
    """Return the mask that transformers makes of rows with several documents."""
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)  # since transformers 5.23
    own = mask if remap is None else remap(mask, positions)
    return masks.and_masks(masks.packed_sequence_mask_function(numbers), own)


def unknown(mask: MaskFunction) -> MaskFunction:
    """Return a function whose code is not transformers' own."""
    return lambda *arguments: mask(*arguments)


full, causal, window = (
    masks.bidirectional_mask_function,
    masks.causal_mask_function,
    masks.sliding_window_causal_mask_function(7),
)
chunked = masks.chunked_causal_mask_function(7, torch.zeros(BATCH, dtype=torch.long))
no_blocks = masks.blockwise_overlay(torch.full((BATCH, TOKENS), -1))
PATTERNS = [
    (full, MaskPattern(False, None)),
    (causal, MaskPattern(True, None)),
    (window, MaskPattern(True, 7)),
    (masks.sliding_window_causal_mask_function(100), MaskPattern(True, None)),  # longer than the sequence
    (masks.or_masks(causal, no_blocks), MaskPattern(True, None)),  # a multimodal model without images
    (masks.and_masks(masks.or_masks(causal, no_blocks), masks.sliding_window_overlay(7)), MaskPattern(True, 7)),
    (within_documents(full), MaskPattern(False, None, documents=STARTS)),
    (within_documents(causal), MaskPattern(True, None, documents=STARTS)),
    (within_documents(full, FIRST_OF_ONE), MaskPattern(False, None, documents=FIRST_OF_ONE)),
    (within_documents(causal, FIRST_OF_ONE), MaskPattern(True, None, documents=FIRST_OF_ONE)),
    (within_documents(window), MaskPattern(True, 7, documents=STARTS)),
    (chunked, MaskPattern(True, None, documents=((0, 7, 14, 21, 28, 35),) * 2)),
]


@pytest.mark.parametrize(("mask", "pattern"), PATTERNS)
def test_patterns_are_read_and_measured(mask: MaskFunction, pattern: MaskPattern) -> None:
    assert _pattern(mask, BATCH, TOKENS, CPU, use_vmap=False) == pattern
    assert _pattern(unknown(mask), BATCH, TOKENS, CPU, use_vmap=False) == pattern


@pytest.mark.parametrize("mask", [strided, prefix, masks.sliding_window_bidirectional_mask_function(7)])
def test_other_masks_have_no_pattern(mask: MaskFunction) -> None:
    assert _pattern(mask, BATCH, TOKENS, CPU, use_vmap=False) is None


def test_one_pair_makes_a_difference() -> None:
    """Samples would miss it."""

    def one_more(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | ((q == 1000) & (k == 1500))

    assert _pattern(one_more, 1, 2100, CPU, use_vmap=False) is None
    assert _pattern(unknown(causal), 1, 2100, CPU, use_vmap=False) == MaskPattern(True, None)


def test_positions_with_gaps_have_no_pattern() -> None:
    gaps = torch.arange(TOKENS)[None] + (torch.arange(TOKENS) > 9) * 3
    whole = torch.zeros(1, TOKENS, dtype=torch.long)
    assert _pattern(packed(window, gaps, whole), 1, TOKENS, CPU, False) is None


def test_documents_that_go_on_later_have_no_pattern() -> None:
    numbers = (torch.arange(TOKENS) // 10 % 2)[None]
    assert _pattern(masks.packed_sequence_mask_function(numbers), 1, TOKENS, CPU, use_vmap=False) is None


def test_a_single_token() -> None:
    assert _pattern(causal, BATCH, 1, CPU, use_vmap=False) == MaskPattern(True, None)
    assert _pattern(unknown(causal), BATCH, 1, CPU, use_vmap=False) == MaskPattern(True, None)


# ---- random compositions


def random_function(draw: random.Random) -> MaskFunction:
    left = torch.tensor([draw.randint(0, 9) for _ in range(BATCH)])
    mask = draw.choice([full, causal, causal, window, masks.chunked_causal_mask_function(draw.randint(1, 50), left)])
    if draw.random() < 0.3:
        blocks = torch.full((BATCH, TOKENS), -1)
        for row in range(BATCH):
            start = draw.randint(0, TOKENS)
            blocks[row, start : start + draw.choice([0, 0, 4])] = 0
        mask = masks.or_masks(mask, masks.blockwise_overlay(blocks))
    if draw.random() < 0.3:
        mask = masks.and_masks(mask, masks.sliding_window_overlay(draw.randint(1, 60)))
    if draw.random() < 0.4:
        starts = [(0, *sorted(draw.sample(range(1, TOKENS), draw.randint(0, 4)))) for _ in range(BATCH)]
        mask = within_documents(mask, starts)
    return unknown(mask) if draw.random() < 0.3 else mask


def random_padding(draw: random.Random) -> Tensor | None:
    kind = draw.choice(["none", "none", "ones", "right", "left", "both", "holes"])
    if kind == "none":
        return None
    valid = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    for row in valid:
        if kind in ("right", "both"):
            row[TOKENS - draw.randint(0, 9) :] = False
        if kind in ("left", "both"):
            row[: draw.randint(0, 9)] = False
        if kind == "holes":
            row[draw.randint(1, 38)] = False
    return valid


def dense(pattern: MaskPattern) -> Tensor:
    """Return the mask by which kernels compute a pattern, `[batch, 1, tokens, tokens]`."""
    assert pattern.causal is not None
    spec = AttentionSpec(pattern.causal, None, pattern.window, 0.0, pattern.lengths, documents=pattern.documents)
    mask, flag = block_mask(spec, BATCH, range(TOKENS), range(TOKENS), CPU)
    seen = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    return (seen.tril() if flag else seen) & (seen if mask is None else mask)


def answer(mask: MaskFunction, padding: Tensor | None, always_masked: bool = False, **settings: Any) -> Any:
    host = _Host(CurrentLayout(), always_masked)
    return _mask(host, BATCH, TOKENS, TOKENS, mask_function=mask, attention_mask=padding, **settings)


@pytest.mark.parametrize("seed", range(300))
def test_random_masks_are_those_of_transformers(seed: int) -> None:
    draw = random.Random(seed)
    mask, padding = random_function(draw), random_padding(draw)
    settings = {"allow_is_causal_skip": False, "use_vmap": draw.random() < 0.2}
    expected = masks.sdpa_mask(
        BATCH, TOKENS, TOKENS, mask_function=mask, attention_mask=padding, allow_is_causal_skip=False
    )
    actual = answer(mask, padding, **settings)
    if isinstance(actual, MaskPattern):
        assert torch.equal(actual.tensor(), expected)
        actual = dense(actual)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("always_masked", [False, True])
@pytest.mark.parametrize("padding", [None, torch.ones(BATCH, TOKENS, dtype=torch.bool)])
def test_the_module_decides_only_where_transformers_makes_no_mask(padding: Tensor | None, always_masked: bool) -> None:
    unpadded = answer(causal, padding, always_masked)
    assert unpadded is None if not always_masked else unpadded == MaskPattern(True, None)
    assert answer(causal, padding, always_masked, allow_is_causal_skip=False) == MaskPattern(True, None)
    both = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert answer(full, padding, always_masked, **both) is None
    assert answer(window, padding, always_masked, local_size=7) == MaskPattern(True, 7)


def test_padding_on_the_left_is_a_document_that_starts_late() -> None:
    valid = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    valid[0, :5] = False
    assert answer(causal, valid) == MaskPattern(True, None, documents=((5,), (0,)))
    valid[1, 30:] = False
    assert answer(causal, valid) == MaskPattern(True, None, (40, 30), ((5,), (0,)))
    assert isinstance(answer(full, valid, allow_is_causal_skip=False), Tensor)  # padded queries see keys


# ---- tokens that are divided over processes or slices of the model


@pytest.mark.parametrize(
    "mask",
    [
        unknown(causal),
        chunked,
        masks.sliding_window_bidirectional_mask_function(7),
        masks.or_masks(causal, masks.blockwise_overlay(torch.zeros(BATCH, TOKENS))),
        masks.or_masks(causal, prefix),
    ],
)
def test_other_masks_are_refused_if_tokens_are_divided(mask: MaskFunction) -> None:
    current: Any = CurrentLayout()
    current.layout = DIVIDED
    with pytest.raises(ValueError, match="neither causal, nor a sliding window, nor full") as caught:
        _mask(_Host(current, False), BATCH, TOKENS, TOKENS, mask_function=mask)
    assert str(caught.value).endswith(": train it with context_parallel_size=1")


def test_modules_that_name_another_window_than_their_mask_are_refused() -> None:
    module = torch.nn.Identity()
    for mask in (MaskPattern(None, None), MaskPattern(None, 7), None):
        with pytest.raises(ValueError, match="neither causal, nor a sliding window, nor full"):
            _check_among_processes(DIVIDED, module, object(), mask, 5)
    for window in (None, 5):
        _check_among_processes(DIVIDED, module, object(), MaskPattern(None, 5), window)


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (causal, MaskPattern(None, None)),
        (window, MaskPattern(None, 7)),
        (full, MaskPattern(None, None)),
        (within_documents(window), MaskPattern(None, 7)),  # the layout knows documents
        (masks.or_masks(causal, no_blocks), MaskPattern(None, None)),
    ],
)
def test_masks_if_tokens_are_divided(mask: MaskFunction, pattern: MaskPattern) -> None:
    current: Any = CurrentLayout()
    current.layout = DIVIDED
    found: Any = _mask(_Host(current, False), BATCH, TOKENS, TOKENS, mask_function=mask)
    assert found == pattern
    with pytest.raises(ValueError, match="needs an attention mask of tokens by tokens"):
        torch.zeros(1) + found


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

    sdpa_mask = masks.sdpa_mask
    with EngineUnderTest(model), torch.inference_mode():
        monkeypatch.setattr(masks, "sdpa_mask", noted)
        actual = model(input_ids=ids, **given).logits
    assert shapes == []
    used = valid.bool() if kind == "padding" else torch.ones_like(valid, dtype=torch.bool)
    torch.testing.assert_close(actual[used], expected[used], rtol=0, atol=1e-6)


def test_padding_on_the_left_in_evaluation() -> None:
    torch.manual_seed(0)
    model = FAMILIES["llama_gqa"].build().eval()
    valid = torch.ones(2, 24, dtype=torch.long)
    valid[0, :5] = 0
    ids = torch.randint(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=valid).logits
        with EngineUnderTest(model):
            actual = model(input_ids=ids, attention_mask=valid).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # padded queries see nothing in both


def test_patterns_in_lists_are_masks_for_models_that_join_them() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    pattern = MaskPattern(True, None, explicit=lambda: mask)
    assert torch.equal(torch.cat([pattern, mask], dim=-1), torch.cat([mask, mask], dim=-1))
