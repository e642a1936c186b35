"""The release command, and the workflows of GitHub."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from support.markers.extras import extra
from support.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def steps_of(workflow: Path):
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from job.get("steps", ())


def test_workflows_run_targets_of_the_makefile() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]
    runs = [step["run"] for path in WORKFLOWS for step in steps_of(path) if "run" in step]
    targets = [target for run in runs for target in re.findall(r"^make ([\w-]+)$", run, re.MULTILINE)]
    assert set(targets) == {"lint", "cuda-headers", "test", "docs", "dist"}
    assert not [target for target in targets if not re.search(rf"^{target}\b.*:", MAKEFILE, re.MULTILINE)]
    pinned = re.search(r"pip install (torch==\S+)", MAKEFILE)[1]
    assert {found for run in runs for found in re.findall(r"torch==\S+", run)} == {pinned}


def test_workflows_run_the_supported_versions_of_python() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    supported = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert tests["jobs"]["test"]["strategy"]["matrix"]["python"] == supported


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of what a release needs, with a remote."""
    folder = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("lightning_memo", "conf", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "newest_torch.txt", folder / "tests")  # which the Makefile reads
    (folder / ".gitignore").write_text("*.egg-info/\nbuild/\ndist/\n")
    git(tmp_path, "init", "--quiet", "--bare", "remote.git")
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "First")
    git(folder, "remote", "add", "origin", str(tmp_path / "remote.git"))
    return folder


def environment() -> dict[str, str]:
    names = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
    people = dict.fromkeys(names, "nobody@example.org")
    # The packages of this interpreter build, and nothing is installed first.
    return {**os.environ, **people, "MAKEFLAGS": f"INSTALLED= RUN={sys.executable}"}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    return done.stdout


def release(folder: Path, version: str) -> tuple[int, str]:
    command = ["make", "release", f"VERSION={version}"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_release_is_built_and_pushed(checkout: Path, tmp_path: Path) -> None:
    extra("build", "dev")
    status, err = release(checkout, "7.8.9")
    assert status == 0, err
    assert {path.name for path in (checkout / "dist").iterdir()} == {
        "lightning_memo-7.8.9-py3-none-any.whl",
        "lightning_memo-7.8.9.tar.gz",
    }
    assert git(checkout, "status", "--porcelain") == ""
    pushed = tmp_path / "remote.git"
    assert git(pushed, "log", "--format=%s", "main").split("\n")[0] == "Release 7.8.9"
    assert git(pushed, "rev-parse", "v7.8.9^{commit}") == git(pushed, "rev-parse", "main")
    changelog = git(pushed, "show", "main:CHANGELOG.md")
    assert re.search(r"## Unreleased\n\n## 7\.8\.9 - \d{4}-\d\d-\d\d\n", changelog)
    status, err = release(checkout, "7.8.9")
    assert status == 2 and "release: v7.8.9 exists: give another VERSION" in err


def test_what_is_refused(checkout: Path) -> None:
    def refused(version: str) -> str:
        status, err = release(checkout, version)
        assert status == 2
        return err.splitlines()[0]

    assert refused("") == "release: VERSION=: give a version such as 0.2.0 or 0.2.0rc1"
    assert refused("v1") == "release: VERSION=v1: give a version such as 0.2.0 or 0.2.0rc1"
    (checkout / "note.txt").touch()
    assert refused("7.8.9") == "release: the checkout has changes: commit or remove them"
    git(checkout, "switch", "--quiet", "--create", "other")
    assert refused("7.8.9") == "release: on branch other: switch to main"
    assert git(checkout, "tag") == ""


@pytest.mark.slow
def test_a_failed_build_changes_nothing(checkout: Path) -> None:
    extra("build", "dev")
    (checkout / "setup.cfg").write_text("[options]\npackages = no_such_package\n")
    git(checkout, "commit", "--quiet", "--all", "--message", "Break the build")
    status, err = release(checkout, "7.8.9")
    assert status == 2, err
    assert git(checkout, "status", "--porcelain") == "" and git(checkout, "tag") == ""
