"""The command that says whether a machine can train."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from support import commands

from lightning_memo import __version__, doctor
from lightning_memo.utils.requirements import PACKAGE, required_libraries

CUDA = torch.cuda.is_available()
COMMAND = ["python", "-m", "lightning_memo.doctor"]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process; returns its status, its lines, and the text of each subject."""

    def run() -> tuple[int, list[str], dict[str, str]]:
        capsys.readouterr()
        status = doctor.main([])
        lines = capsys.readouterr().out.splitlines()
        texts: dict[str, str] = {}
        name = ""
        for line in lines:
            name = line[: doctor._NAME].strip() or name
            texts[name] = f"{texts.get(name, '')} {line[doctor._NAME :].strip()}".strip()
        return status, lines, texts

    return run


def test_one_screen(told) -> None:
    status, lines, texts = told()
    assert status == 0
    assert lines[-1] == "Training can run."
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert texts["lightning-memo"].startswith(f"{__version__}, Python 3.")
    assert texts["torch"].startswith(f"{metadata.version('torch')}, tested with >=2.11,<")
    assert "none" in texts["fused kernels"] or CUDA
    assert "loss" in texts["training"]


def test_what_the_device_computes(told) -> None:
    _, _, texts = told()
    if CUDA:
        assert {texts["bf16 attention"].split(",")[0]} <= {"sdpa", "cudnn"}
        assert "not cut into slices" in texts["fp32 attention"]
        assert texts["fused kernels"] == "LlamaAttention, LlamaMLP, LlamaRMSNorm"
        assert texts["page locks"].startswith("256.0 MiB were locked")
        count = torch.cuda.device_count()
        assert texts["GPU"].startswith(f"{count} x " * (count > 1) + torch.cuda.get_device_name())
    else:
        assert texts["bf16 attention"] == texts["fp32 attention"] == "sdpa"
        assert texts["GPU"].startswith("none")


@pytest.fixture
def require(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Replaces the requirements of this package."""
    monkeypatch.syspath_prepend(tmp_path)

    def replace(*requirements: str) -> None:
        folder = tmp_path / f"{PACKAGE.replace('-', '_')}-9.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {PACKAGE}", "Version: 9"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requirements)]))
        required_libraries.cache_clear()

    yield replace
    required_libraries.cache_clear()


def test_a_missing_library_prevents_training(told, require) -> None:
    require("torch", "no-such-library<3,>=1.5")
    status, lines, texts = told()
    assert status == 1
    assert texts["no-such-library"] == 'not installed: pip install "no-such-library<3,>=1.5"'
    assert lines[-1] == "Training cannot run: see no-such-library."


def test_an_untested_version_and_extras(told, require) -> None:
    require("torch<2.5", 'no-such-library>=1; extra == "peft"', 'numpy; extra == "trainer"')
    status, _, texts = told()
    assert status == 0
    assert "is not tested: pip install" in texts["torch"]
    assert texts["not installed"].startswith('peft: pip install "lightning-memo[peft]"')
    assert texts["extras"].startswith("numpy ")


def test_no_compiler(told, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, _, texts = told()
    assert status == 0
    assert "no such program" in texts["C++ compiler"]
    assert "training runs without it" in texts["not compiled"]


@pytest.mark.slow
def test_a_library_that_fails(tmp_path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise OSError('libbroken.so: cannot open')")
    path = f"{tmp_path}:{commands.environment()['PYTHONPATH']}"
    status, out, err = commands.run(COMMAND, tmp_path, cold=True, PYTHONPATH=path)
    assert status == 1, err
    assert "OSError: libbroken.so: cannot open" in out
    assert out.endswith("Training cannot run: see failed.\n")


def test_the_command_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        doctor.main(["gpu"])
    assert end.value.code == 2
    assert "unrecognized arguments: gpu" in capsys.readouterr().err
