"""Documents of files as rows: what is packed, what is learned from it, and where a run goes on."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.trainer.connectors import data_connector
from support.families import FAMILIES, VOCABULARY
from support.processes import run_in_processes
from support.samples.documents import SEQ_LEN, TEXTS, module, write_jsonl, write_parquet, write_text
from support.samples.models import MODEL, Record
from support.samples.models import run as run_recorded
from support.trainer_harness import make_trainer
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from lightning_memo import MemoStrategy
from lightning_memo.data import DocumentsDataModule, TextDataModule
from lightning_memo.data.document_rows import IGNORED, PackedRows, PaddedRows, best_fit
from lightning_memo.models import CausalLM


def random_documents(lengths: list[int], masked: bool) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    documents = [{"ids": generator.integers(0, VOCABULARY, n).astype(np.int32)} for n in lengths]
    if masked:
        for document in documents:
            counted = generator.random(len(document["ids"])) < 0.5
            counted[1] = True  # a document has a target
            document["counted"] = counted
    return documents


# ---- rows


@settings(max_examples=200)
@given(lengths=st.lists(st.integers(1, 40), max_size=30), seq_len=st.integers(2, 16))
def test_every_token_has_one_place(lengths: list[int], seq_len: int) -> None:
    pieces = best_fit(np.array(lengths, dtype=np.int64), seq_len)
    places = [(d, t) for d, a, b in zip(pieces.document, pieces.start, pieces.stop, strict=True) for t in range(a, b)]
    left_out = {(d, n - 1) for d, n in enumerate(lengths) if n % seq_len == 1}
    assert sorted(places) == sorted({(d, t) for d, n in enumerate(lengths) for t in range(n)} - left_out)
    assert not (pieces.start % seq_len).any(), "only what is longer than a row is cut"
    filled = np.bincount(pieces.row, pieces.stop - pieces.start)
    assert (np.diff(pieces.row) >= 0).all() and (filled <= seq_len).all() and (filled > 0).all()
    # Else the documents of one would lie in the other.
    assert len(filled) < 2 or np.sort(filled)[:2].sum() > seq_len


def test_a_document_goes_where_it_leaves_least_room() -> None:
    pieces = best_fit(np.array([6, 7, 3, 23, 4]), 10)
    rows = [
        [(int(d), int(a), int(b)) for d, a, b, row in zip(*vars(pieces).values(), strict=True) if row == n]
        for n in range(5)
    ]
    assert rows == [[(3, 0, 10)], [(3, 10, 20)], [(1, 0, 7), (2, 0, 3)], [(0, 0, 6), (4, 0, 4)], [(3, 20, 23)]]


def test_a_row_tells_its_documents_apart() -> None:
    documents = [{"ids": np.array([5, 6, 7], np.int32)}, {"ids": np.array([8, 9], np.int32)}]
    (row,) = PackedRows(documents, np.array([3, 2]), 8, pad_id=1)
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 1, 1, 1]
    assert row["labels"].tolist() == [IGNORED, 6, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    long, short = (
        PaddedRows(documents, np.array([3, 2]), 2, pad_id=1)[0],
        PaddedRows(documents, np.array([3, 2]), 4, pad_id=1)[1],
    )
    assert {name: t.tolist() for name, t in long.items()} == {
        "input_ids": [5, 6], "labels": [5, 6], "attention_mask": [1, 1]
    }  # fmt: skip
    assert {name: t.tolist() for name, t in short.items()} == {
        "input_ids": [8, 9, 1, 1], "labels": [8, 9, IGNORED, IGNORED], "attention_mask": [1, 1, 0, 0]
    }  # fmt: skip


def test_parts_without_targets_are_left_out() -> None:
    """Their loss would be the mean of no numbers."""
    document = {"ids": np.arange(12, dtype=np.int32), "counted": np.isin(np.arange(12), [4, 9, 10])}
    rows = PackedRows([document], np.array([12]), 4, pad_id=1)
    assert [row["input_ids"].tolist() for row in rows] == [[8, 9, 10, 11]]
    assert [row["labels"].tolist() for row in rows] == [[IGNORED, 9, 10, IGNORED]]
    assert len(PaddedRows([document], np.array([12]), 4, pad_id=1)) == 0
    (row,) = PaddedRows([document], np.array([12]), 6, pad_id=1)
    assert row["labels"].tolist() == [IGNORED, IGNORED, IGNORED, IGNORED, 4, IGNORED]
    assert PaddedRows([document], np.array([12]), 6, pad_id=1).tokens == 6


# ---- losses


def summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss over all targets of a batch, and their number."""
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    return model(**batch).loss * count, count


@pytest.mark.parametrize("family", ["llama_gqa", "mistral_window"])
@pytest.mark.parametrize("rows_of", [PackedRows, PaddedRows])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_teach_what_their_documents_teach_alone(family: str, rows_of: Callable[..., Any], masked: bool) -> None:
    """Rows and documents alone differ by the order of sums: 1e-6 of a gradient's norm, as everywhere."""
    torch.manual_seed(0)
    model, lengths = FAMILIES[family].build().train(), [30, 17, 9, 5, 25, 2, 40, 31]
    documents = random_documents(lengths, masked)
    rows = rows_of(documents, np.array(lengths), SEQ_LEN, pad_id=0)
    loss, count = summed_loss(model, torch.utils.data.default_collate([rows[n] for n in range(len(rows))]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    parts = []
    for document in documents:
        ids = torch.from_numpy(document["ids"]).long()[None]
        counted = torch.from_numpy(document.get("counted", np.full(ids.shape[1], True)))
        parts.append(summed_loss(model, {"input_ids": ids, "labels": ids.masked_fill(~counted, IGNORED)}))
    expected = sum(part for part, _ in parts)
    assert count == sum(number for _, number in parts)
    assert masked or count == sum(lengths) - len(lengths)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        assert (mine - theirs).norm() <= 2e-6 * theirs.norm()


def losses_of(path: Path, packing: bool, cache: Path, **strategy: Any) -> list[float]:
    """Losses of three steps, in this process as one of those of the environment."""
    datasets.config.HF_DATASETS_CACHE = cache
    record, processes = Record(), int(os.environ.get("WORLD_SIZE", "1"))
    own = MemoStrategy(**strategy) if strategy else "auto"
    trainer = make_trainer(own, devices=processes, max_steps=3, callbacks=[record], limit_val_batches=1)
    torch.manual_seed(0)
    rows = module(path, packing=packing, seq_len=45)
    trainer.fit(CausalLM({"config": MODEL | {"attention_dropout": 0.0}}, lr=1e-2), datamodule=rows)
    return [loss for *_, loss, _ in record.batches]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_strategy_trains_documents_as_lightning_does(packing: bool, masked: bool, jsonl: Path, cache: Path) -> None:
    if masked:
        pairs = [{"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]} for text in TEXTS]
        jsonl.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    expected = losses_of(jsonl, packing, cache)
    assert losses_of(jsonl, packing, cache, alpha=0.5) == pytest.approx(expected, rel=1e-6)
    sharded = run_in_processes(2, losses_of, jsonl, packing, cache, alpha=0.5, context_parallel_size=2)
    assert [sum(losses) / 2 for losses in zip(*sharded, strict=True)] == pytest.approx(expected, rel=1e-6)


# ---- the data module


def texts_of(data: DocumentsDataModule) -> tuple[list[str], list[str]]:
    """Documents of training and validation, which the last token of each, the 256th, divides."""
    data.setup()
    return _texts(data._loaded.train), _texts(data._loaded.val)


def _texts(rows: Any) -> list[str]:
    tokens = [t for n in range(len(rows)) for t in rows[n]["input_ids"].tolist()]
    ends = [-1, *(n for n, t in enumerate(tokens) if t == 256)]
    return sorted(bytes(tokens[a + 1 : b]).decode() for a, b in pairwise(ends) if b > a + 1)


@pytest.mark.parametrize("write", [write_text, write_parquet, write_jsonl])
def test_every_format_gives_its_documents(write: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    write(folder)
    train, val = texts_of(module(folder, seq_len=300, batch_size=1))
    assert sorted(train + val) == sorted(TEXTS) and len(val) == 5


@pytest.mark.parametrize("name", ["own.txt", "own.jsonl"])
def test_a_single_document_is_cut_for_validation(name: str, tmp_path: Path) -> None:
    text = "0123456789" * 20
    (tmp_path / name).write_text(text if name == "own.txt" else json.dumps({"text": text}))
    data = module(tmp_path / name, seq_len=300, batch_size=1)
    data.setup()
    assert data._loaded is not None
    (train,), (val,) = data._loaded.train, data._loaded.val
    assert bytes(train["input_ids"][:161].tolist()) + bytes(val["input_ids"][:39].tolist()) == text.encode()
    assert val["input_ids"][39] == 256


def test_seed_chooses_the_split(jsonl: Path) -> None:
    splits = [texts_of(module(jsonl, seq_len=300, batch_size=1, seed=seed))[1] for seed in (1, 1, 2)]
    assert splits[0] == splits[1] != splits[2]


def test_tokens_are_read_again_where_tokenizer_or_files_changed(jsonl: Path, tmp_path: Path) -> None:
    def ids(**changes: Any) -> list[int]:
        data = module(jsonl, **changes)
        data.setup()
        rows = data._loaded.train
        return [t for n in range(len(rows)) for t in rows[n]["input_ids"].tolist()]

    def save_tokenizer(words: dict[str, int]) -> str:
        backend = BackendTokenizer(WordLevel({"[UNK]": 0, "[EOS]": 1} | words, unk_token="[UNK]"))
        backend.pre_tokenizer = Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]").save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    first = ids(tokenizer=save_tokenizer({"3": 2}))
    assert set(first) == {0, 1, 2}
    assert ids(tokenizer=save_tokenizer({"3": 2})) == first
    assert set(ids(tokenizer=save_tokenizer({"5": 2, "3": 3}))) == {0, 1, 2, 3}
    assert 256 in ids()
    jsonl.write_text("".join(json.dumps({"text": "new " * 50}) + "\n" for _ in range(9)))
    assert ids()[:4] == list(b"new ")


def test_processes_that_tokenize_change_nothing(jsonl: Path) -> None:
    one, two = (module(jsonl, num_workers=workers) for workers in (0, 2))
    assert texts_of(one) == texts_of(two)


@pytest.mark.parametrize("changes", [{}, {"packing": False}], ids=["packed", "padded"])
def test_a_resumed_run_goes_on_within_the_epoch(changes: dict[str, Any], jsonl: Path, tmp_path: Path) -> None:
    def data() -> DocumentsDataModule:
        return module(jsonl, **changes)

    whole = run_recorded(tmp_path / "whole", data())
    assert len({epoch for epoch, *_ in whole}) > 1 and any(batch > 0 for _, batch, *_ in whole)
    rest = run_recorded(tmp_path / "resumed", data(), ckpt_path=tmp_path / "whole" / "step=8.ckpt")
    assert rest == whole[8:]


def test_other_data_settings_do_not_resume(jsonl: Path) -> None:
    states = []
    for packing in (True, False):
        data = module(jsonl, packing=packing)
        data.setup()
        states.append(data.train_dataloader().state_dict())
    with pytest.raises(ValueError, match="resume with the same data settings"):
        data.train_dataloader().load_state_dict(states[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": None}, r"^path: give the file or folder of your documents"),
        ({"path": "nowhere"}, r"path=nowhere: no such file or folder; give"),
        ({"path": "nowhere", "tokenizer": "nowhere"}, r"path=nowhere: no such file or folder; give"),
        ({"num_workers": -1}, r"num_workers=-1: give 0 or more"),
        ({"batch_size": 1.5}, r"batch_size=1.5: give 1 or more"),
        ({"path": "empty"}, r"path=empty: no file there ends with \.jsonl, .*; set suffix"),
        (
            {"path": "several"},
            r"path=several: files of several formats \(a.jsonl, b.txt\); choose one",
        ),
        ({"path": "broken.jsonl"}, r"path=broken.jsonl, line 2: not readable as json: JSON parse error"),
        ({"path": "nothing.jsonl"}, r"^path=nothing.jsonl: no documents in it; give a file"),
        ({"path": "lines.jsonl"}, r"^path=lines.jsonl: no documents in it; give a file"),
        ({"path": "list.json"}, r"^path=list.json: no documents in it; give a file"),
        ({"seq_len": "many"}, r"^seq_len='many' is not a number of tokens .* 128K or 1M"),
        ({"path": "blank.jsonl"}, r"path=blank.jsonl: none of 2 document\(s\) has anything in field=text; give"),
        ({"path": "short.txt"}, r"path=short.txt: one document of 2 tokens, which .* by val_fraction=0.2; give more"),
        ({"field": "body"}, r"field=body: the documents of path=documents.jsonl have number, text; give the one"),
        ({"path": "other.jsonl"}, r"^field: the documents of path=other.jsonl have body; give field=body$"),
        ({"field": "number"}, r"documents.jsonl, line 1: field=number holds int, not text; give a field with text"),
        ({"path": "several.jsonl"}, r"^field: .* have completion, prompt, text; give field=completion or field=text$"),
        ({"path": "neither.jsonl"}, r"^field: .* have body, prompt; give the one that holds the documents$"),
        ({"path": "pair.jsonl"}, r"^path=pair.jsonl, line 2: field=prompt holds int, not text; give"),
        ({"path": "pair.jsonl", "num_workers": 2}, r"^path=pair.jsonl, line 2: field=prompt holds int, not text; give"),
        ({"path": "mixed.jsonl"}, r"path=mixed.jsonl, line 2: field=text holds list, not text"),
        ({"path": "mixed_broken.jsonl"}, r"path=mixed_broken.jsonl, line 3: not readable as json"),
        (
            {"seq_len": 5000},
            r"seq_len=5000 x batch_size=2: one batch needs 10000 tokens, the training",
        ),
        ({"val_fraction": 1.0}, r"val_fraction=1.0: give a number between 0 and 1"),
        ({"tokenizer": "nowhere"}, r"tokenizer=nowhere: no such folder; give"),
        ({"tokenizer": "several"}, r"tokenizer=several: not a Hugging Face tokenizer"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(f"{name}-{each}" for name, each in value.items()),
)
def test_mistakes_are_named_in_one_line(
    changes: dict[str, Any],
    message: str,
    jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(jsonl.parent)
    for folder in ("empty", "several"):
        Path(folder).mkdir()
    Path("several/a.jsonl").write_text('{"text": "a"}\n')
    Path("several/b.txt").write_text("b")
    for name, content in {"nothing.jsonl": "", "lines.jsonl": "\n\n", "list.json": "[]"}.items():
        Path(name).write_text(content)
    Path("other.jsonl").write_text('{"body": "a"}\n')
    Path("several.jsonl").write_text('{"text": "a", "prompt": "b", "completion": "c"}\n')
    Path("neither.jsonl").write_text('{"prompt": "a", "body": "b"}\n')
    Path("pair.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 1, "completion": "b"}\n')
    Path("broken.jsonl").write_text('{"text": "a"}\n{"te')
    Path("mixed.jsonl").write_text('{"text": "a"}\n{"text": ["b"]}\n{"text": "c"}')
    Path("mixed_broken.jsonl").write_text('{"text": "a"}\n{"text": ["b"]}\n{"te')
    Path("blank.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", None)))
    Path("short.txt").write_text("a")
    with pytest.raises(ValueError, match=message) as caught:
        module(changes.pop("path", jsonl.name), **changes).setup()
    assert "\n" not in str(caught.value)
    assert "ERROR" not in capfd.readouterr().err, "datasets tells it as well"


def test_lengths_are_numbers_or_words(jsonl: Path) -> None:
    assert module(jsonl, seq_len="128K").seq_len == 131072
    assert TextDataModule(seq_len="1m").seq_len == 2**20


def test_a_model_with_a_tokenizer_gets_no_bytes(jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer=None: .* has a tokenizer of its own; give tokenizer=") as caught:
        make_trainer("auto").fit(CausalLM({"path": str(tmp_path)}), datamodule=module(jsonl))
    assert "\n" not in str(caught.value)


def test_parts_of_this_package_warn_of_nothing_in_each_other(jsonl: Path) -> None:
    data_connector.warning_cache.clear()  # of earlier tests
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "You have overridden")
        make_trainer("auto", max_steps=1, limit_val_batches=1).fit(
            CausalLM({"config": MODEL}), datamodule=module(jsonl)
        )


def test_documents_without_text_are_counted_with_their_field(jsonl: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jsonl.open("a") as file:
        file.write(json.dumps({"body": "text", "number": 0}) + "\n")
    module(jsonl).setup()
    assert f"1 of {len(TEXTS) + 1} documents have nothing in field=text, and are left out." in caplog.text


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_process_shows_progress(
    rank: str, jsonl: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    try:
        module(jsonl).setup()
    finally:
        datasets.enable_progress_bars()
    assert ("tokenize" in capfd.readouterr().err) == (rank == "0")


def test_without_the_library_a_line_tells_how_to_get_it(jsonl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memo.data.document_source._DATASETS", False)
    with pytest.raises(ValueError, match=r"pip install 'lightning-memo\[datasets\]'"):
        module(jsonl).setup()


def test_rows_that_stay_empty_are_told_of(jsonl: Path, caplog: pytest.LogCaptureFixture) -> None:
    module(jsonl, seq_len=2**16, batch_size=1).setup()
    assert "% of 1 row(s) of 65536 tokens, and the rest is computed in vain; lower seq_len" in caplog.text
