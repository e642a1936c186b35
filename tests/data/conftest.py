"""An empty cache for each test, and a file of documents."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from support.samples.documents import TEXTS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache instead of the user's."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text, "number": n}) + "\n" for n, text in enumerate(TEXTS)))
    return path
