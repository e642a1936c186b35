"""Versions of libraries that were not tested are named when training starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import FAMILIES

from lightning_memo import MemoLoop
from lightning_memo.runtime.start_engine import warn_of_untested_versions
from lightning_memo.utils.requirements import required_libraries

REQUIREMENTS = ["torch<2.14,>=2.11", "lightning!=2.6.2,<2.7,>=2.6", 'trl>=1; extra == "trainer"']


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Adds the metadata of an installed distribution."""
    monkeypatch.syspath_prepend(tmp_path)
    required_libraries.cache_clear()

    def add(name: str, version: str, requirements: list[str]) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requirements)]))

    yield add
    required_libraries.cache_clear()


@pytest.mark.parametrize("version", ["2.14.0", "2.14.0.dev20261126+cu130", "2.10.1"])
def test_an_untested_version_is_named_in_one_line(install, version: str) -> None:
    install("lightning_memo", "9", REQUIREMENTS)
    install("torch", version, [])
    install("trl", "0.1", [])
    with pytest.warns(UserWarning, match="not tested") as caught:
        warn_of_untested_versions()
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith(f"torch {version} was not tested with lightning_memo") and "\n" not in text
    assert text.endswith('pip install "torch<2.14,>=2.11"')


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.2+cu130"])
def test_tested_versions_cause_no_warning(install, version: str, recwarn: pytest.WarningsRecorder) -> None:
    install("lightning_memo", "9", REQUIREMENTS)
    install("torch", version, [])
    warn_of_untested_versions()
    assert not recwarn.list


def test_training_begins_with_the_warning(install) -> None:
    install("lightning_memo", "9", REQUIREMENTS)
    install("lightning", "2.7.0", [])
    model = FAMILIES["llama"].build()
    with (
        pytest.warns(UserWarning, match=r"lightning 2\.7\.0 was not tested"),
        MemoLoop(model, torch.optim.SGD(model.parameters()), alpha=0.5),
    ):
        pass
