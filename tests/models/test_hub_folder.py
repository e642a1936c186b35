"""Ids of models on the Hub take the place of folders. No test uses a network: a model is in a cache, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from support.commands import run as run_process

from lightning_memo.data.tokenizer import load_tokenizer
from lightning_memo.estimate.cluster import model_of
from lightning_memo.models import ModelConfig, build_model
from lightning_memo.shapes.hf_config import MODEL_FILES, hub_folder

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
COMMAND = "run `hf download some-org/some-model --local-dir some-model`"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of huggingface_hub, with a model that was downloaded before; there is no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_folder.cache_clear()
    model = tmp_path / "models--some-org--some-model"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(snapshot.name)
    build_model(ModelConfig(config=LLAMA)).save_pretrained(snapshot)
    return snapshot


def test_a_model_on_the_hub_is_loaded_and_estimated(cached: Path) -> None:
    model = ModelConfig(path="some-org/some-model")
    assert model.folder == str(cached)
    shape = model_of({"path": model.path}, "unused")
    assert sum(p.numel() for p in build_model(model).parameters()) == shape.parameters
    assert (shape.name, shape.hidden) == ("some-org/some-model", LLAMA["hidden_size"])


def test_a_folder_is_never_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some-org" / "some-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hub_folder.cache_clear()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the network was used"))
    for path in ("some-org/some-model", "nowhere", "/no/where", "./no/where", "no/where/at-all"):
        assert hub_folder(path, MODEL_FILES, "model.path") == Path(path)


def response(status: int) -> Any:
    class Response:
        status_code, headers, request, text = status, {}, None, ""

    return Response()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            GatedRepoError("gated", response=response(403)),
            "its terms have to be accepted at https://huggingface.co/some-org",
        ),
        (RepositoryNotFoundError("none", response=response(404)), "the Hub has no such model"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    hub_folder.cache_clear()
    with pytest.raises(ValueError, match=words) as raised:
        hub_folder("some-org/some-model", MODEL_FILES, "model.path")
    assert COMMAND in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("load", "setting"),
    [
        (lambda path: ModelConfig(path=path).folder, "model.path"),
        (lambda path: model_of({"path": path}, ""), "model.path"),
        (load_tokenizer, "tokenizer"),
    ],
    ids=["model", "shape", "tokenizer"],
)
def test_without_a_network_the_message_has_the_command(
    cached: Path, load: Callable[[str], object], setting: str
) -> None:
    with pytest.raises(ValueError, match=f"{setting}=other/model: no such folder, .*HF_HUB_OFFLINE is set") as raised:
        load("other/model")
    assert "run `hf download other/model --local-dir model`" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["estimate", "train"])
def test_commands_end_with_the_line(tmp_path: Path, command: str) -> None:
    arguments = ["python", "-m", f"lightning_memo.{command}", "model.path=some-org/some-model"]
    status, _, err = run_process(arguments, tmp_path, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "cache"))
    assert status == 2
    assert err.startswith("error: model.path=some-org/some-model: no such folder, ") and err.count("\n") == 1
    assert COMMAND in err
