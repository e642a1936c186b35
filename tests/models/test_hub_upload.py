"""Exported models are given to huggingface_hub, and what goes wrong there is said in one line."""

from __future__ import annotations

import inspect
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi
from support.trainer_harness import LanguageModel, fit

from lightning_memo import MemoStrategy
from lightning_memo.export import main
from lightning_memo.models import CausalLM
from lightning_memo.models.export_hugging_face import create_repository

LLAMA = {
    "model_type": "llama", "vocab_size": 33, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2,
    "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a LoRA run on a saved model."""
    base = CausalLM({"config": LLAMA})
    base.configure_model()
    base.model.save_pretrained(tmp_path / "base")
    module = CausalLM({"path": str(tmp_path / "base"), "lora": {"r": 2, "target_modules": ["q_proj"]}})
    module.configure_model()
    path = tmp_path / "c.ckpt"
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, path)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], set[str]]]:
    """Calls of huggingface_hub in place of uploads, bound to the real signatures, with the files that were there."""
    found = []

    def note(method: str) -> None:
        signature = inspect.signature(getattr(HfApi, method))

        def called(*arguments: Any, **named: Any) -> None:
            bound = signature.bind(*arguments, **named).arguments
            del bound["self"]
            folder = bound.pop("folder_path", None)
            found.append((method, bound, {path.name for path in Path(folder).iterdir()} if folder else set()))

        monkeypatch.setattr(HfApi, method, called)

    note("create_repo")
    note("upload_folder")
    return found


def test_the_command_uploads_the_adapter(tmp_path: Path, checkpoint: Path, calls: list[Any], capsys: Any) -> None:
    assert main([str(checkpoint), str(tmp_path / "out"), "--push-to-hub", "org/name", "--private"]) == 0
    (created, create, _), (uploaded, upload, files) = calls
    assert (created, create) == ("create_repo", {"repo_id": "org/name", "private": True, "exist_ok": True})
    assert (uploaded, upload) == (
        "upload_folder",
        {"repo_id": "org/name", "commit_message": "Upload by lightning_memo"},
    )
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "uploaded to https://huggingface.co/org/name" in capsys.readouterr().out


def test_the_strategy_uploads_the_model_of_the_run(calls: list[Any]) -> None:
    result = fit(MemoStrategy(alpha=0.5), LanguageModel("llama"), max_steps=2)
    result.trainer.strategy.push_to_hub("org/name")
    assert [name for name, _, _ in calls] == ["create_repo", "upload_folder"]
    assert calls[0][1] == {"repo_id": "org/name", "private": None, "exist_ok": True}
    assert {"config.json", "model.safetensors"} <= calls[1][2]


@pytest.fixture
def refusal(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command that must refuse before it writes anything, and returns what it says."""

    def run(repository: str) -> str:
        assert main([str(checkpoint), str(tmp_path / "out"), "--push-to-hub", repository]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"error: push_to_hub={repository}: ")
        assert not (tmp_path / "out").exists()
        return err

    return run


@pytest.mark.parametrize("name", ["my model", "a/b/c", "org/-name", "https://huggingface.co/org/name"])
def test_wrong_names(refusal: Any, name: str) -> None:
    assert "give ORGANISATION/NAME or USER/NAME" in refusal(name)


def test_private_without_an_upload(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint), str(tmp_path / "out"), "--private"]) == 2
    assert capsys.readouterr().err.startswith("error: --private: nothing is uploaded: give --push-to-hub")


def test_not_logged_in(refusal: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "you are not logged in to the Hugging Face Hub: run `hf auth login`" in refusal("org/name")


def test_no_network(refusal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    assert "cannot be reached (ConnectError): export without push_to_hub" in refusal("org/name")


def test_offline_mode(refusal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()  # the next one reads the constant
    try:
        assert "cannot be reached (OfflineModeIsEnabled)" in refusal("org/name")
    finally:
        huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "does not know your token"), (403, "does not let you write there"), (503, "answered with status 503")],
)
def test_what_the_hub_refuses(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/api/repos/create" and self.headers["Authorization"] == "Bearer hf_of_nobody"
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(status)

        def do_GET(self) -> None:
            self.answer(404)  # the repository does not exist

        def answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ValueError, match=f"push_to_hub=org/name: the Hugging Face Hub {said}"):
            create_repository("org/name")
        server.shutdown()
