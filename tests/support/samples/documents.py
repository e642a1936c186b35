"""Documents in files, and data modules that read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets

from lightning_memo.data import DocumentsDataModule

SEQ_LEN = 48

TEXTS = [f"{number} " * (1 + number * 3 % 29) for number in range(24)]


def module(path: Path | str | None, **changes: Any) -> DocumentsDataModule:
    chosen = {"path": path and str(path), "seq_len": SEQ_LEN, "batch_size": 2, "val_fraction": 0.2}
    return DocumentsDataModule(**chosen | changes)


def write_text(folder: Path) -> None:
    (folder / "inner").mkdir()
    for n, text in enumerate(TEXTS):
        (folder / ("inner" if n % 2 else ".") / f"{n:02}.txt").write_text(text)


def write_parquet(folder: Path) -> None:
    for part in range(2):
        datasets.Dataset.from_dict({"text": TEXTS[part::2]}).to_parquet(folder / f"{part}.parquet")


def write_jsonl(folder: Path) -> None:
    with gzip.open(folder / "all.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text, "other": None}) + "\n" for text in [*TEXTS, "", " \n", None])
