"""Prompts and completions: the loss is on the completion, and runs resume as with other documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.samples.chats import labels_of_trl, pairs, tokenizer
from support.samples.documents import module
from support.samples.models import run as run_recorded

from lightning_memo.data.document_rows import IGNORED


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Settings of a file of pairs, and of the folder of a tokenizer."""
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs(60)))
    return {"path": path, "tokenizer": str(tmp_path / "tokenizer")}


def test_labels_are_those_of_trl(files: dict[str, Any]) -> None:
    data = module(**files, packing=False, seq_len=200, batch_size=1, num_workers=2)
    data.setup()
    assert data._loaded is not None
    rows = [data._loaded.train[n] for n in range(len(data._loaded.train))]
    rows += [data._loaded.val[n] for n in range(len(data._loaded.val))]
    mine = []
    for row in rows:
        size = int(row["attention_mask"].sum())
        assert (row["labels"][size:] == IGNORED).all()
        mine.append((row["input_ids"][:size].tolist(), row["labels"][:size].tolist()))
    theirs = labels_of_trl(pairs(60), tokenizer())
    assert sorted(mine) == sorted(theirs)
    assert any(labels[0] == IGNORED for _, labels in theirs) and len(theirs) == 60


@pytest.mark.parametrize("changes", [{}, {"streaming": True, "val_documents": 12, "buffer_rows": 3}])
def test_a_resumed_run_goes_on(changes: dict[str, Any], files: dict[str, Any], tmp_path: Path) -> None:
    def run(name: str, ckpt_path: Path | None = None) -> Any:
        return run_recorded(tmp_path / name, module(**files | changes), ckpt_path, model={"vocab_size": 600})

    whole = run("whole")
    assert run("resumed", tmp_path / "whole" / "step=8.ckpt") == whole[8:]
