"""The layout of tokens over processes: orders are permutations, slices gather, nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memo.parallel.batches.token_layout import TokenLayout, multiple, ring_chunks, slice_multiple


@st.composite
def settings(draw):
    """Sizes, tokens and slice bounds that go together."""
    ring, ulysses, shards = (draw(st.integers(1, 4)) for _ in range(3))
    tokens = multiple(ring, ulysses, shards) * draw(st.integers(1, 6))
    on_shard = tokens // (ring * ulysses * shards)
    inner = draw(st.sets(st.integers(1, on_shard - 1), max_size=4)) if on_shard > 1 else set()
    bounds = draw(st.sampled_from([(), (*sorted(inner), on_shard)]))
    rows = st.lists(st.sets(st.integers(0, tokens - 1)).map(lambda starts: (*sorted(starts | {0}),)), min_size=1)
    documents = draw(st.none() | rows.map(tuple))
    return {
        "tokens": tokens, "ring": ring, "ulysses": ulysses, "shards": shards, "bounds": bounds, "documents": documents
    }  # fmt: skip


def everyone(setting: dict) -> list[TokenLayout]:
    """The layouts of all context ranks, in order."""
    return [
        TokenLayout(**setting, ring_rank=ring_rank, ulysses_rank=ulysses_rank)
        for ring_rank in range(setting["ring"])
        for ulysses_rank in range(setting["ulysses"])
    ]


@given(settings())
def test_all_processes_together_hold_every_token_once(setting):
    for order in (TokenLayout.layer_order, TokenLayout.fed_order):
        held = torch.cat([order(layout) for layout in everyone(setting)])
        assert held.dtype == torch.int64
        assert held.sort().values.equal(torch.arange(setting["tokens"]))


@given(settings())
def test_fed_and_layer_order_hold_the_same_tokens(setting):
    for layout in everyone(setting):
        assert layout.local_tokens == len(layout.fed_order())
        assert layout.fed_order().sort().values.equal(layout.layer_order().sort().values)


@given(settings())
def test_gathering_a_slice_from_all_shards_gives_a_range_of_the_layer_order(setting):
    for layout in everyone(setting):
        shards, layer = layout.fed_order().chunk(layout.shards), layout.layer_order()
        edges = (0, *(layout.bounds or (layout.local_tokens // layout.shards,)))
        for a, b in pairwise(edges):
            gathered = torch.cat([shard[a:b] for shard in shards])
            assert gathered.equal(layer[layout.shards * a : layout.shards * b])


@given(settings())
def test_gathering_all_tokens_gives_the_layer_order_in_another_order(setting):
    for layout in everyone(setting):
        assert layout.as_attended(layout.fed_order(), 0).equal(layout.layer_order())
        columns = layout.layer_order().expand(3, -1)
        assert layout.as_attended(layout.as_fed(columns, 1), 1).equal(columns)


@given(settings())
def test_without_shards_or_slices_the_model_gets_the_layer_order(setting):
    for changed in ({"shards": 1, "bounds": ()}, {"bounds": ()}):
        for layout in everyone(setting | changed):
            assert layout.fed_order().equal(layout.layer_order())


@given(settings())
def test_chunks_are_what_a_ring_rank_holds_in_layer_order(setting):
    layouts = everyone(setting)
    ulysses = setting["ulysses"]
    for ring_rank in range(setting["ring"]):
        chunks = ring_chunks(range(setting["tokens"]), setting["ring"], ring_rank, setting["documents"])
        assert len(chunks) % 2 == 0 if setting["ring"] > 1 else len(chunks) == 1
        held = torch.cat([layout.layer_order() for layout in layouts[ring_rank * ulysses : (ring_rank + 1) * ulysses]])
        assert held.tolist() == [position for chunk in chunks for position in chunk]


def test_zigzag_is_pytorchs_head_tail_order():
    orders = [TokenLayout(16, ring=4, ring_rank=rank).layer_order().tolist() for rank in range(4)]
    assert orders == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_contiguous_ranges_follow_the_ranks():
    setting = {"tokens": 32, "ring": 2, "ulysses": 2, "contiguous": True}
    assert torch.cat([layout.layer_order() for layout in everyone(setting)]).equal(torch.arange(32))
    by_slice = everyone(setting | {"bounds": (2, 8), "global_slices": True})
    assert [layout.layer_order().tolist() for layout in by_slice] == [
        [*range(2 * rank, 2 * rank + 2), *range(8 + 6 * rank, 8 + 6 * rank + 6)] for rank in range(4)
    ]


def work(documents: tuple[tuple[int, ...], ...], tokens: int, ring: int, rank: int) -> int:
    """Number of keys that the queries of a ring rank see, over all rows."""
    held = [position for chunk in ring_chunks(range(tokens), ring, rank, documents) for position in chunk]
    return sum(position - max(s for s in starts if s <= position) + 1 for starts in documents for position in held)


@pytest.mark.parametrize(
    ("documents", "most"),
    [
        (((0, 512),), 1.0),
        (((0, 96, 800, 960),), 1.0),
        (((0, 512), (0, 256, 768)), 1.0),
        (((0, 100, 701, 850, 900),), 1.02),
        (((0, 333, 340, 350, 999),), 1.05),
        ((tuple(range(0, 1024, 8)),), 1.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("ring", [2, 4])
def test_all_ranks_of_a_ring_have_the_same_work_in_packed_documents(documents, most, ring):
    """Exactly, where documents begin at multiples of two chunks; to a few tokens of each document elsewhere."""
    by_rank = [work(documents, 1024, ring, rank) for rank in range(ring)]
    assert max(by_rank) <= most * sum(by_rank) / ring


def test_documents_of_a_slice_are_divided_one_by_one():
    setting = {"tokens": 32, "ring": 2, "bounds": (8, 16), "global_slices": True, "documents": ((0, 8, 24),)}
    orders = [TokenLayout(**setting, ring_rank=rank).layer_order().tolist() for rank in (0, 1)]
    first = [0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 22, 23, 24, 25, 30, 31]
    assert orders == [first, [n for n in range(32) if n not in first]]


@pytest.mark.parametrize("sizes", [{"ulysses": 2}, {"ring": 2}, {"shards": 2, "bounds": (8, 16)}], ids=str)
def test_some_rows_have_their_lengths_and_the_order_of_all(sizes):
    layout = TokenLayout(32, **sizes, lengths=(32, 20, 7, 11))
    part = layout.of_rows(1, 2)
    assert part.lengths == (20, 7)
    assert torch.equal(part.fed_order(), layout.fed_order())


def test_some_rows_have_their_documents_unless_a_ring_is_divided_by_those_of_all():
    documents = ((0, 8), (0,), (0, 24))
    assert TokenLayout(32, ulysses=2, documents=documents).of_rows(1, 2).documents == documents[1:]
    divided = TokenLayout(32, ring=2, documents=documents)
    assert divided.of_rows(0, 3) == divided
    with pytest.raises(ValueError, match="by the documents of all rows") as caught:
        divided.of_rows(0, 1)
    assert "\n" not in str(caught.value)


def test_both_at_once():
    layouts = [TokenLayout(16, ring=2, ring_rank=r, ulysses=2, ulysses_rank=u) for r in (0, 1) for u in (0, 1)]
    orders = [layout.layer_order().tolist() for layout in layouts]
    assert orders == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


@given(settings(), st.data())
def test_slices_outside_are_ranges_that_all_processes_share(setting, data):
    needed = slice_multiple(setting["ring"], setting["ulysses"], setting["shards"])
    parts = setting["ring"] * setting["ulysses"] * setting["shards"]
    inner = data.draw(st.sets(st.integers(1, setting["tokens"] // parts // needed), max_size=4))
    bounds = tuple(sorted({n * needed for n in inner} | {setting["tokens"] // parts}))
    setting["documents"] = None  # others may be cut at documents that end in the slice before
    layouts = everyone(setting | {"bounds": bounds, "global_slices": True})
    for a, b in pairwise((0, *bounds)):
        a, b = a * setting["shards"], b * setting["shards"]
        held = torch.cat([layout.layer_order()[a:b] for layout in layouts])
        context = setting["ring"] * setting["ulysses"]
        assert held.sort().values.tolist() == list(range(a * context, b * context))
        alone = everyone(setting | {"tokens": (b - a) * context, "bounds": (), "documents": None})
        for layout, slice_alone in zip(layouts, alone, strict=True):
            assert layout.layer_order()[a:b].equal(slice_alone.layer_order() + a * context)


def test_shards_hold_their_part_of_every_slice():
    assert TokenLayout(12, shards=2, bounds=(2, 6)).fed_order().tolist() == [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("sizes", "expected"), [((1, 1, 1), 1), ((2, 1, 1), 4), ((2, 3, 1), 12), ((3, 2, 2), 12), ((1, 2, 3), 6)]
)
def test_what_the_length_must_divide_by(sizes, expected):
    assert multiple(*sizes) == expected


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"tokens": 10, "ring": 2}, "10 tokens .* pad to a multiple of 4"),
        ({"tokens": 0}, "0 tokens"),
        ({"tokens": 8, "ring": 2, "ring_rank": 2}, "ring has 2 processes and rank 2"),
        ({"tokens": 8, "ulysses": 0}, "ulysses has 0 processes"),
        ({"tokens": 8, "shards": 0}, "shards has 0"),
        ({"tokens": 8, "bounds": (4, 4, 8)}, r"\(4, 4, 8\) must increase"),
        ({"tokens": 8, "bounds": (0, 8)}, "must increase from above 0"),
        ({"tokens": 8, "shards": 2, "bounds": (2, 8)}, "to 4, the tokens of a shard"),
        ({"tokens": 8, "documents": ((0, 3), (1,))}, r"documents at \(1,\) must start at 0"),
        ({"tokens": 8, "documents": ((),)}, "must start at 0"),
        ({"tokens": 8, "documents": ((0, 8),)}, "below 8 tokens"),
        ({"tokens": 8, "documents": ((0, 5, 3),)}, "increase"),
        ({"tokens": 8, "lengths": (9,)}, "9 valid tokens does not fit in 8"),
        ({"tokens": 8, "lengths": (8,), "documents": ((0,), (0,))}, "documents of 2 batch rows, but lengths of 1"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_in_one_line(setting, complaint):
    with pytest.raises(ValueError, match=complaint) as refused:
        TokenLayout(**setting)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (TokenLayout(8, ring=2), "context_parallel_size=1"),
        (TokenLayout(8, ulysses=2), "context_parallel_size=1"),
        (TokenLayout(8, shards=2), "sequence_parallel=False"),
        (TokenLayout(8, ring=2, shards=2), "context_parallel_size=1 and sequence_parallel=False"),
        (TokenLayout(8), 'stream_from_host="hidden"'),
    ],
)
def test_only_settings_that_divide_tokens_are_named(layout: TokenLayout, settings: str) -> None:
    assert layout.how_to_compute_all == settings
