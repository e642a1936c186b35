"""Data sets of the Hub give the rows that their files give, and what is wrong with one is said in one line."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.hub import hub_with
from support.samples.documents import TEXTS, module

SETTINGS = {"seq_len": 48, "batch_size": 1, "val_fraction": 0.2, "val_documents": 6, "buffer_rows": 3}
READ = """
import json, sys
from data.test_hub_documents import read
for settings in json.loads(sys.argv[1]):
    print(json.dumps(read(**settings)))
"""
"""A client reads the address of the Hub when it is imported."""


def read(**settings: Any) -> Any:
    """Three batches, and those from the second on by another module that resumes; or the line of a refusal."""
    try:
        data, other = module(**SETTINGS | settings), module(**SETTINGS | settings)
        data.setup()
        batches = iter(data.train_dataloader())
        found = [next(batches)["input_ids"].tolist()]
        state = data.state_dict()
        found += [batch["input_ids"].tolist() for batch in islice(batches, 2)]
        other.setup()
        other.load_state_dict(state)
        return found, [batch["input_ids"].tolist() for batch in islice(other.train_dataloader(), 2)]
    except ValueError as error:
        return str(error)


def read_by_client(folder: Path, client: dict[str, str], settings: list[dict[str, Any]]) -> list[Any]:
    variables = {"HF_HOME": str(folder / "home"), "PYTHONPATH": str(Path(__file__).parents[1])} | client
    status, out, err = run(["python", "-c", READ, json.dumps(settings)], folder, cold=True, **variables)
    assert status == 0 and "Traceback" not in err, err
    return [json.loads(line) for line in out.splitlines()]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"path": "org/nothing"}, "path=org/nothing: no such file or folder, and the Hub has no such data set, or it is"),
    ({"split": "dev"}, "path=org/texts: Unknown split \"dev\". Should be one of ['train']; choose by subset and split"),
    ({"split": "dev", "streaming": True}, "path=org/texts: Bad split: dev. Available splits: ['train']; choose by"),
    ({"subset": "de"}, "path=org/texts: BuilderConfig 'de' not found. Available: ['default']; choose by subset"),
    ({"field": "body"}, "field=body: the documents of path=org/texts have text; give field=text"),
    ({"field": "body", "streaming": True}, "field=body: the documents of path=org/texts have text; give field=text"),
]


def test_a_data_set_gives_the_rows_of_its_files(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    right = [{"streaming": streaming} for streaming in (False, True)]
    with hub_with("org/texts", {"train.jsonl": file.read_bytes()}) as client:
        settings = [{"path": "org/texts"} | each for each in [*right, *(changes for changes, _ in WRONG)]]
        found = read_by_client(tmp_path, client, settings)
    for mine, changes in zip(found, right, strict=False):
        expected = read(path=file, **changes)
        assert mine == [*expected]
        assert expected[0][1:] == expected[1] and len(expected[0]) == 3
    for said, (_, message) in zip(found[len(right) :], WRONG, strict=True):
        assert said.startswith(message) and "\n" not in said


def test_without_a_network_a_line_tells_what_to_do(tmp_path: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # where nothing listens
    (said,) = read_by_client(tmp_path, nowhere, [{"path": "org/texts"}])
    assert said.startswith("path=org/texts: no such file or folder, and the Hub cannot be reached (")
    assert "run `hf download org/texts --repo-type dataset --local-dir texts`" in said and said.endswith("path=texts")


def test_files_have_no_subsets(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"^subset=None, split=test: path=.*a.txt is no data set of the Hub"):
        module(tmp_path / "a.txt", split="test").setup()
