"""Documents that are read, tokenized and packed as training goes on: each once, always alike, from any place on."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from support.processes import run_in_processes
from support.samples.documents import SEQ_LEN, TEXTS, module, write_jsonl, write_parquet, write_text
from support.samples.models import run as run_recorded
from torch import Tensor

from lightning_memo import MemoStrategy
from lightning_memo.data import DocumentsDataModule
from lightning_memo.data.document_rows import PackedRows

STREAM = {"streaming": True, "val_documents": 6, "buffer_rows": 3, "batch_size": 1}


def stream(path: Path, **changes: Any) -> DocumentsDataModule:
    data = module(path, **STREAM | changes)
    data.setup()
    return data


def rows_of_rank(data: DocumentsDataModule, rank: int = 0, count: int = 1) -> Iterator[dict[str, Tensor]]:
    return (row for _, row in data._loaded.train.rows(None, rank, count))


def texts(rows: Iterator[dict[str, Tensor]]) -> Counter[str]:
    """Documents of rows that hold whole ones: the last token of each is the 256th."""
    tokens = [t for row in rows for t in row["input_ids"].tolist()]
    ends = [-1, *(n for n, t in enumerate(tokens) if t == 256)]
    return Counter(bytes(tokens[a + 1 : b]).decode() for a, b in pairwise(ends) if b > a + 1)


def rounds(data: DocumentsDataModule, number: int, rank: int = 0, count: int = 1) -> list[dict[str, Tensor]]:
    """The rows of a round over all documents, of a stream whose windows have one row."""
    assert data._loaded.train.window == 1
    found = []
    for place, row in data._loaded.train.rows(None, rank, count):
        if place["round"] > number:
            return found
        if place["round"] == number:
            found.append(row)
    raise AssertionError


def validation(data: DocumentsDataModule) -> Counter[str]:
    return texts(data._loaded.val[n] for n in range(len(data._loaded.val)))


def assert_equal(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


# ---- rows


@pytest.mark.parametrize("write", [write_text, write_parquet, write_jsonl])
@pytest.mark.parametrize("packing", [True, False])
def test_each_document_comes_once_in_a_round(write: Callable[[Path], None], packing: bool, tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    write(folder)
    data = stream(folder, seq_len=300, packing=packing, buffer_rows=1)
    kept = validation(data)
    assert kept.total() == 6
    first, second = rounds(data, 0), rounds(data, 1)
    assert texts(first) + kept == texts(second) + kept == Counter(TEXTS)


def test_rounds_have_other_orders(jsonl: Path) -> None:
    count = len(rounds(stream(jsonl, buffer_rows=1), 0)) // 3 * 3
    rows = list(islice(rows_of_rank(stream(jsonl)), 2 * count))
    assert [str(row) for row in rows[:count]] != [str(row) for row in rows[count:]]


def test_a_block_is_packed_as_all_documents_are_without_streaming(jsonl: Path) -> None:
    documents = [{"ids": np.array([*text.encode(), 256])} for text in TEXTS[STREAM["val_documents"] :]]
    whole = PackedRows(documents, np.array([len(document["ids"]) for document in documents]), SEQ_LEN, 256)
    rows = list(islice(rows_of_rank(stream(jsonl, buffer_rows=3 * len(whole))), 3 * len(whole)))
    assert Counter(str(row) for row in rows) == Counter(3 * [str(whole[n]) for n in range(len(whole))])


def test_the_seed_chooses_rows(jsonl: Path) -> None:
    first, again, other = (list(islice(rows_of_rank(stream(jsonl, seed=seed)), 40)) for seed in (1, 1, 2))
    for mine, expected in zip(again, first, strict=True):
        assert_equal(mine, expected)
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, other, strict=True))


def test_the_seed_chooses_the_order_of_files(tmp_path: Path) -> None:
    write_text(tmp_path)
    first, again, other = (validation(stream(tmp_path, seq_len=300, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("count", [2, 3])
def test_groups_share_the_documents(count: int, jsonl: Path) -> None:
    data = stream(jsonl, seq_len=300, buffer_rows=1)
    shares = [texts(rounds(data, 0, rank, count)) for rank in range(count)]
    assert sum(shares, Counter()) + validation(data) == Counter(TEXTS)
    assert all(max(share.values()) == 1 for share in shares)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_text, write_parquet, write_jsonl])
def test_rows_go_on_at_every_place(write: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    write(folder)
    data = stream(folder)
    whole = list(islice(data._loaded.train.rows(None, 1, 2), 45))
    assert whole[-1][0]["round"] > 0
    for number in range(0, 40, 3):
        place = json.loads(json.dumps(whole[number][0]))
        resumed = stream(folder)._loaded.train.rows(place, 1, 2)
        for (expected_place, expected), (mine_place, mine) in zip(whole[number + 1 :], resumed, strict=False):
            assert mine_place == expected_place
            assert_equal(mine, expected)


def test_reading_files_needs_no_network(jsonl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look_up(*address: Any, **_: Any) -> None:
        asked.append(address)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    stream(jsonl)
    assert not asked


# ---- training


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "changes", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 5}], ids=["plain", "accumulation", "short"]
)
def test_a_resumed_run_goes_on(num_workers: int, changes: dict[str, Any], jsonl: Path, tmp_path: Path) -> None:
    def data() -> DocumentsDataModule:
        return module(jsonl, **STREAM | {"num_workers": num_workers, "batch_size": 2})

    whole = run_recorded(tmp_path / "whole", data(), **changes)
    rest = run_recorded(tmp_path / "resumed", data(), ckpt_path=tmp_path / "whole" / "step=8.ckpt", **changes)
    assert rest == whole[-len(rest) :] and len(rest) == len(whole) // 2


def steps_of_group(path: Path, folder: Path, ckpt_path: Path | None) -> list[Any]:
    strategy = MemoStrategy(alpha=0.5)
    return run_recorded(folder, module(path, **STREAM), ckpt_path, strategy=strategy, devices=2)


@pytest.mark.slow
def test_groups_go_on_each_with_its_own(jsonl: Path, tmp_path: Path) -> None:
    whole = run_in_processes(2, steps_of_group, jsonl, tmp_path / "whole", None)
    rest = run_in_processes(2, steps_of_group, jsonl, tmp_path / "rest", tmp_path / "whole" / "step=8.ckpt")
    for group, resumed in zip(whole, rest, strict=True):
        assert resumed == group[8:]
    assert not any(a[2] == b[2] for a, b in zip(*whole, strict=True))


def test_the_length_of_a_run_is_the_trainers(jsonl: Path) -> None:
    def batches(**settings: Any) -> int:
        data = stream(jsonl)
        data.trainer = Trainer(**{"logger": False, "accelerator": "cpu"} | settings)
        return len(data.train_dataloader())

    assert batches(max_steps=7, accumulate_grad_batches=2) == 14
    assert batches(max_epochs=3, limit_train_batches=5) == 5
    with pytest.raises(ValueError, match=r"streaming=True: a stream has no end; give trainer.max_steps"):
        batches(max_epochs=3)


# ---- mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": 2}, r"num_workers=2: with streaming=True give 0, or 1"),
        ({"buffer_rows": 0}, r"buffer_rows=0: give 1 or more"),
        ({"val_documents": 0}, r"val_documents=0: give 1 or more"),
        (
            {"val_documents": 24},
            r"24 document\(s\) in field=text, but validation takes 24, and training",
        ),
        ({"field": "body"}, r"field=body: the documents of path=documents.jsonl have number, text; give"),
        ({"path": "nowhere"}, r"path=nowhere: no such file or folder; give"),
        ({"path": "empty.jsonl"}, r"path=empty.jsonl: no documents in it"),
        ({"path": "broken.jsonl"}, r"path=broken.jsonl, line 2: not readable as json: JSON parse error"),
        ({"path": "number.jsonl"}, r"path=number.jsonl, line 2: field=text holds int, not text"),
        ({"path": "mixed_broken.jsonl"}, r"path=mixed_broken.jsonl, line 3: not readable as json"),
        ({"path": "broken.parquet"}, r"path=broken.parquet: not readable as parquet"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, *value.items())),
)
def test_mistakes_are_named_in_one_line(
    changes: dict[str, Any], message: str, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jsonl.parent)
    Path("empty.jsonl").touch()
    Path("broken.jsonl").write_text('{"text": "a"}\n{"te')
    Path("number.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    Path("mixed_broken.jsonl").write_text('{"text": "a"}\n{"text": ["b"]}\n{"te')
    Path("broken.parquet").write_text("no")
    with pytest.raises(ValueError, match=message) as caught:
        stream(Path(changes.pop("path", jsonl.name)), **changes)
    assert "\n" not in str(caught.value) and " in row " not in str(caught.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mistake_that_comes_late_is_named_in_one_line(num_workers: int, jsonl: Path) -> None:
    (jsonl.parent / "last.jsonl").write_text('{"text": "a"}\n{"te')
    seed = next(seed for seed in range(9) if np.random.default_rng(seed).permutation(2)[0] == 0)
    data = stream(jsonl.parent, num_workers=num_workers, seed=seed)
    with pytest.raises(
        ValueError, match=r"path=.*/last.jsonl, line 2: not readable as json: JSON parse error"
    ) as caught:
        list(islice(data.train_dataloader(), 200))
    assert "\n" not in str(caught.value)


def test_other_settings_do_not_resume(jsonl: Path) -> None:
    def state(**changes: Any) -> dict[str, Any]:
        data = module(jsonl, **{"val_fraction": 0.2} | changes)
        data.setup()
        next(iter(data.train_dataloader()))
        return data.state_dict()

    data = stream(jsonl)
    data.train_dataloader()
    data.load_state_dict(state(**STREAM))
    with pytest.raises(ValueError, match=r"resume with the same data settings and as many data-parallel groups"):
        data.load_state_dict(state(**STREAM | {"seed": 3}))
    with pytest.raises(ValueError, match=r"saved with streaming=False, now it is True; resume"):
        data.load_state_dict(state())
