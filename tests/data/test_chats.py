"""Chats: the loss is on what the assistant writes, as TRL has it; runs resume; what cannot be right is refused."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from support.samples.chats import TEMPLATES, chats, labels_of_trl, tokenizer, training_template
from support.samples.documents import module
from support.samples.models import run as run_recorded

from lightning_memo.data.document_kinds import kind_of
from lightning_memo.data.document_rows import IGNORED
from lightning_memo.data.tokenizer import load_tokenizer


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def save_tokenizer(folder: Path, template: str | None) -> str:
    tokenizer(template).save_pretrained(folder)
    return str(folder)


def labels_of(records: list[dict[str, Any]], folder: str, chat_template: str | None) -> list[Any]:
    """Ids and labels of documents, each `[tokens]`."""
    loaded = load_tokenizer(folder)
    kind, found = kind_of("", None, records[0], loaded, chat_template), []
    for record in records:
        document = kind.encode(record)
        labels = np.where(document["counted"], document["ids"], IGNORED)
        found.append((document["ids"].tolist(), labels.tolist()))
    return found


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_labels_are_those_of_trl(template: str, tmp_path: Path) -> None:
    """By the templates with marks that TRL trains these tokenizers with."""
    records = chats(200, system=template != "gemma")
    theirs = labels_of_trl(records, tokenizer(TEMPLATES[template]), assistant_only_loss=True)
    folder = save_tokenizer(tmp_path / "own", TEMPLATES[template])
    assert labels_of(records, folder, "trl") == theirs
    (tmp_path / "marked.jinja").write_text(training_template(template))
    assert labels_of(records, folder, str(tmp_path / "marked.jinja")) == theirs
    assert labels_of(records, save_tokenizer(tmp_path / "marked", training_template(template)), None) == theirs


def test_templates_without_marks_give_the_same_labels(template: str, tmp_path: Path) -> None:
    """But for the line break with which Qwen2.5's template asks for a turn, which TRL counts as the assistant's.

    Qwen3's template writes earlier turns otherwise than the last one.
    """
    records = chats(200, system=template != "gemma", turns=1 if template == "qwen3" else 6)
    mine = labels_of(records, save_tokenizer(tmp_path / "own", TEMPLATES[template]), None)
    theirs = labels_of_trl(records, tokenizer(TEMPLATES[template]), assistant_only_loss=True)
    if template == "qwen2_5":
        line = tokenizer().convert_tokens_to_ids("Ċ")
        for _, labels in theirs:
            for n in range(1, len(labels)):
                if labels[n] == line and labels[n - 1] == IGNORED:
                    labels[n] = IGNORED
    assert mine == theirs


@pytest.mark.parametrize("chat_template", ["trl", None])
def test_completions_may_be_messages(template: str, chat_template: str | None, tmp_path: Path) -> None:
    """TRL takes the tokenizer's own template for these."""
    records = [
        {"prompt": record["messages"][:-1], "completion": record["messages"][-1:]}
        for record in chats(60, system=template != "gemma")
    ]
    own = TEMPLATES[template] if chat_template is None else training_template(template)
    mine = labels_of(records, save_tokenizer(tmp_path / "own", TEMPLATES[template]), chat_template)
    assert mine == labels_of_trl(records, tokenizer(own))


@pytest.mark.parametrize("packing", [True, False])
def test_rows_hold_the_labels_of_chats(packing: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", records := chats(40))
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama3"])
    data = module(path, tokenizer=folder, packing=packing, seq_len=1500, batch_size=1, num_workers=2)
    data.setup()
    assert data._loaded is not None
    found = []
    for rows in (data._loaded.train, data._loaded.val):
        for row in (rows[n] for n in range(len(rows))):
            starts = (row["position_ids"] == 0).nonzero()[:, 0].tolist() if packing else [0]
            stops = [*starts[1:], 1500] if packing else [int(row["attention_mask"].sum())]
            for start, stop in zip(starts, stops, strict=True):
                if (row["labels"][start:stop] != IGNORED).any():
                    found.append((row["input_ids"][start:stop].tolist(), row["labels"][start:stop].tolist()))
    assert sorted(found) == sorted(labels_of(records, folder, None))
    counted = np.concatenate([np.array(labels) for _, labels in found])
    assert data.unigram_entropy < np.log(len(np.unique(counted)) - 1)


@pytest.mark.parametrize("changes", [{}, {"streaming": True, "val_documents": 6, "buffer_rows": 3}])
def test_a_resumed_run_goes_on(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", chats(60))
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama3"])

    def run(name: str, ckpt_path: Path | None = None) -> Any:
        data = module(path, tokenizer=folder, seq_len=128, **changes)
        return run_recorded(tmp_path / name, data, ckpt_path, model={"vocab_size": 600})

    whole = run("whole")
    assert run("resumed", tmp_path / "whole" / "step=8.ckpt") == whole[8:]


# ---- mistakes


def chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"the {role}"} for role in roles]}


RIGHT = chat("user", "assistant")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("template", "wrong", "message"),
    [
        ("gemma", chat("user"), r"no message of role=assistant, and only those count in the loss; .*'the user'"),
        ("gemma", chat("system", "user", "assistant"), r"refuses a chat of the roles system, .*: System role not supp"),
        ("gemma", chat("user", "user", "assistant"), r"roles user, assistant: Conversation roles must alternate"),
        ("llama3", {"messages": [{"role": "user", "text": "a"}]}, r"message 1 has role, text; give each a role"),
        ("phi3", chat("user", "assistant", "tool", "assistant"), r"leaves out messages of role=tool; correct the role"),
        ("llama3", chat("assistant", "user"), r"the assistant begins, without .*, or give chat_template=FILE"),
        ("qwen3", chat("user", "assistant", "user", "assistant"), r"writes message 2 otherwise .*chat_template=trl \("),
        ("llama3", {"messages": [{"from": "human", "value": "a"}]}, r"message 1 has from, value; give each a role"),
        ("llama3", {"messages": "a"}, r"field=messages holds str, not a list of messages"),
        ("llama3", {"messages": ["a"]}, r"field=messages: message 1 has str; give each a role"),
        ("llama3", {**RIGHT, "tools": "{"}, r"field=tools holds text that is no JSON; give a list"),
    ],
)  # fmt: skip
def test_a_wrong_chat_is_named_in_one_line(
    template: str, wrong: dict[str, Any], message: str, streaming: bool, tmp_path: Path
) -> None:
    records = [RIGHT, RIGHT, wrong, RIGHT]
    if "tools" in wrong:
        records = [{**record, "tools": None} | record for record in records]
    path = write(tmp_path / "chats.jsonl", records)
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATES[template])
    with pytest.raises(ValueError, match=rf"^path={path}, line 3: .*{message}") as caught:
        module(path, tokenizer=folder, streaming=streaming, val_documents=3).setup()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        (None, {}, r"^tokenizer=.*: it has no chat template; give chat_template=FILE"),
        (None, {"chat_template": "trl"}, r"^chat_template=trl: tokenizer=.* has no chat template; give a file"),
        ("{{ messages }}", {"chat_template": "trl"}, r"^chat_template=trl: TRL has none for the template"),
        (None, {"chat_template": "nowhere.jinja"}, r"^chat_template=nowhere.jinja: no such file; give one"),
        (None, {"tokenizer": None}, r"^tokenizer=None: bytes have no chat template; give the tokenizer of a"),
        ("{% if %}", {}, r"line 1: the chat template refuses .*Expected an expression"),
        ("{% generation %}{% endgeneration %}a", {}, r"line 1: the chat template marks no token of the assistant"),
        ("{{ strftime_now('%d') }}", {"streaming": True}, r"^chat_template: it writes the date, .* streaming=False"),
    ],
)  # fmt: skip
def test_a_wrong_template_is_named_in_one_line(
    template: str | None, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "chats.jsonl", [RIGHT, RIGHT])
    folder = save_tokenizer(tmp_path / "tokenizer", template)
    with pytest.raises(ValueError, match=message) as caught:
        module(path, **{"tokenizer": folder} | changes).setup()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_several_kinds_is_refused(streaming: bool, seed: int, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama3"])
    (tmp_path / "documents").mkdir()
    write(tmp_path / "documents" / "a.jsonl", [RIGHT] * 40)
    write(tmp_path / "documents" / "b.jsonl", [{"text": "abc " * 20}] * 40)
    data = module(tmp_path / "documents", tokenizer=folder, streaming=streaming, val_documents=3, seed=seed)

    def read() -> None:
        loaded = data.load()
        list(islice(loaded.train.rows(None, 0, 1), 200))  # type: ignore[union-attr]

    with pytest.raises(ValueError, match=r"a.jsonl has messages and b.jsonl has text; give files of one") as caught:
        read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_too_short_for_an_answer_are_refused(streaming: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [RIGHT] * 9)
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama3"])
    data = module(path, tokenizer=folder, packing=False, seq_len=4, streaming=streaming, val_documents=2)
    with pytest.raises(ValueError, match=r"^seq_len=4: no row .* has a token that counts in the loss; raise seq_len"):
        data.setup()


def test_a_chat_of_a_table_is_quoted(tmp_path: Path) -> None:
    Dataset.from_list([RIGHT, chat("user", "user")]).to_parquet(tmp_path / "chats.parquet")
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama3"])
    with pytest.raises(ValueError, match=r"chats.parquet: no message of role=assistant.* begins 'the user'\)$"):
        module(tmp_path / "chats.parquet", tokenizer=folder).setup()
