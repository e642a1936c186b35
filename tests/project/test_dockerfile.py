"""The Dockerfile names files, packages, extras and a command that exist. Building the image needs Docker."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.paths import ROOT

from lightning_memo.utils.native_build import _COMPILERS

INSTRUCTIONS = {"CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "WORKDIR"}


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Names and arguments, with continued lines joined."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [(name, arguments) for name, _, arguments in (line.partition(" ") for line in lines)]
    assert {name for name, _ in found} == INSTRUCTIONS and found[0][0] == "FROM"
    return found


@pytest.fixture(scope="module")
def setup_cfg() -> ConfigParser:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def commands(instructions: list[tuple[str, str]]) -> list[list[str]]:
    """The words of each command that RUN runs."""
    return [shlex.split(part) for name, text in instructions if name == "RUN" for part in text.split("&&")]


def copied(instructions: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Sources and targets of COPY."""
    pairs = []
    for name, arguments in instructions:
        if name == "COPY":
            *sources, target = arguments.split()
            pairs += [(source, f"{target}{source}" if target.endswith("/") else target) for source in sources]
    return pairs


@pytest.mark.slow
def test_the_package_can_be_built_from_what_is_copied(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    for source, target in copied(instructions):
        assert target == f"/source/{source}"
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        (tmp_path / "source").mkdir(exist_ok=True)
        copy(ROOT / source, tmp_path / "source" / source)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "source", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for path in (*ROOT.glob("lightning_memo/**/csrc/*"), *ROOT.glob("lightning_memo/**/*.py")):
        assert str(path.relative_to(ROOT)) in names
    assert "lightning_memo/conf/train.yaml" in names and any(name.endswith("licenses/LICENSE") for name in names)


def test_pip_installs_an_allowed_torch_and_extras_that_exist(
    instructions: list[tuple[str, str]], setup_cfg: ConfigParser
) -> None:
    first, second = (words for words in commands(instructions) if words[:2] == ["pip", "install"])
    pinned = Requirement(first[-1])
    lines = setup_cfg["options"]["install_requires"].split()
    (allowed,) = (Requirement(line) for line in lines if re.match(r"torch\b", line))
    assert allowed.specifier.contains(str(pinned.specifier).removeprefix("=="))
    folder, _, extras = second[-1].rstrip("]").partition("[")
    assert folder == "/source"
    assert set(extras.split(",")) <= set(setup_cfg["options.extras_require"])


def test_the_image_has_a_compiler_and_starts_the_command(
    instructions: list[tuple[str, str]], setup_cfg: ConfigParser
) -> None:
    (packages,) = (words for words in commands(instructions) if words[:2] == ["apt-get", "install"])
    assert set(_COMPILERS) & set(packages)
    found = dict(instructions)
    (entry,) = json.loads(found["ENTRYPOINT"])
    assert entry in setup_cfg["options.entry_points"]["console_scripts"].split()
    assert json.loads(found["CMD"]) == ["--help"]
