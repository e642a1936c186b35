"""Rows that are computed at the same time cost about the same; every row comes once, and runs resume."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples.documents import module

from lightning_memo.data.document_rows import PackedRows
from lightning_memo.data.resumable_loader import EpochSampler, ResumableLoader, balanced_order

SEQ_LEN = 512


def long_tailed(count: int, seed: int = 0) -> PackedRows:
    """Rows of documents whose lengths differ by 100 times."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(3.5, 1.5, count)), 4, SEQ_LEN).astype(np.int64)
    return PackedRows([{"ids": np.full(n, d % 256)} for d, n in enumerate(lengths)], lengths, SEQ_LEN, 256)


def attention_work(row: dict) -> int:
    """Number of keys that the queries of a row see."""
    return int((row["position_ids"] + 1).sum())


@given(st.lists(st.integers(1, 1000)), st.integers(1, 9), st.integers(0, 99))
def test_an_order_holds_each_row_once(costs, batch_size, seed):
    order = balanced_order(np.array(costs, float), batch_size, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(costs)))


def test_costs_are_the_work_of_attention():
    rows = long_tailed(300)
    work = np.array([attention_work(rows[n]) for n in range(len(rows))])
    # Each query also sees itself, which the squared lengths leave out.
    assert np.allclose(rows.costs, 2 * work - SEQ_LEN)


def slowest(orders: list[list[int]], costs: np.ndarray) -> float:
    """Cost of the slowest rank of each step, relative to the mean."""
    by_rank = costs[np.array(orders)]
    return float(by_rank.max(0).sum() / by_rank.mean(0).sum())


def test_processes_get_rows_of_the_same_cost():
    rows, count = long_tailed(6000), 8
    assert len(rows) > 500

    def orders(costs: np.ndarray | None) -> list[list[int]]:
        return [list(EpochSampler(len(rows), 0, rank, count, costs)) for rank in range(count)]

    assert slowest(orders(None), rows.costs) > 1.5
    balanced = orders(rows.costs)
    assert slowest(balanced, rows.costs) < 1.05
    assert len({n for order in balanced for n in order}) == len(rows) // count * count
    # Steps of all costs alternate.
    steps = rows.costs[np.array(balanced[0])]
    assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1]) < 0.3


def test_the_global_batches_are_those_of_other_processes():
    rows = long_tailed(1500)
    alone = [sorted(map(str, batch["input_ids"])) for batch in ResumableLoader(rows, 4, seed=5)]
    pairs = [ResumableLoader(rows, 2, seed=5, rank=rank, count=2) for rank in (0, 1)]
    together = [sorted([*map(str, a["input_ids"]), *map(str, b["input_ids"])]) for a, b in zip(*pairs, strict=True)]
    assert together == alone


def test_another_order_does_not_resume():
    rows = long_tailed(300)
    state = ResumableLoader(rows, 2, seed=0).state_dict()
    with pytest.raises(ValueError, match=r"balance=True, now it is .*balance=False; resume with the same"):
        ResumableLoader(rows, 2, seed=0, balance=False).load_state_dict(state)


def write(path: Path) -> Path:
    random = np.random.default_rng(1)
    lengths = np.clip(np.exp(random.normal(3.5, 1.5, 2000)), 4, SEQ_LEN - 2).astype(int)
    path.write_text("".join(f'{{"text": "{"x" * n}"}}\n' for n in lengths))
    return path


@pytest.mark.slow
def test_the_processes_of_a_stream_get_rows_of_similar_costs(tmp_path: Path):
    settings = {"seq_len": SEQ_LEN, "streaming": True, "val_documents": 2, "buffer_rows": 24, "batch_size": 1}
    path, count = write(tmp_path / "documents.jsonl"), 4

    def work(balance: bool) -> np.ndarray:
        data = module(path, **settings, balance=balance)
        data.setup()
        streams = [data._loaded.train.rows(None, rank, count) for rank in range(count)]
        return np.array([[attention_work(row) for _, row in islice(stream, 240)] for stream in streams])

    shuffled, balanced = work(False), work(True)
    assert sorted(shuffled.ravel()) == sorted(balanced.ravel())
    assert shuffled.max(0).sum() / shuffled.mean(0).sum() > 1.4
    assert balanced.max(0).sum() / balanced.mean(0).sum() < 1.2
