import ast
import hashlib
import re
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from lightning_memo import cli

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup_cfg():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def names(requirements):
    return {re.match(r"[\w-]+", line)[0] for line in requirements.split("\n") if line}


def test_all_packages_are_listed(setup_cfg):
    folders = {path.parent for path in (ROOT / "lightning_memo").rglob("*.py")}
    tree = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(setup_cfg["options"]["packages"].split()) == tree | {"lightning_memo.conf"}


def test_everything_imported_is_declared(setup_cfg):
    options = setup_cfg["options"]
    extras = setup_cfg["options.extras_require"]
    declared = names(options["install_requires"]).union(
        *(names(extras[name]) for name in ("flash", "te", "peft", "datasets"))
    )
    imported = set()
    for path in (ROOT / "lightning_memo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    distributions = {"hydra": "hydra-core"}
    own = set(sys.stdlib_module_names) | {"lightning_memo"}
    assert {distributions.get(name, name.replace("_", "-")) for name in imported - own} <= declared


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # setuptools builds inside the source tree, which other tests read.
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "lightning_memo", "conf"):
        (source / name).symlink_to(ROOT / name)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_code_and_configuration(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_memo").rglob("*.py")}
    config = {f"lightning_memo/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert config
    assert code | config <= shipped
    assert not any(name.startswith(("tests", "conf")) for name in shipped)


def test_installed_package_finds_its_configuration(wheel, tmp_path, monkeypatch):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lightning_memo" / "cli.py"))
    assert cli.config_dir() == str(tmp_path / "lightning_memo" / "conf")


def test_checkout_finds_its_configuration():
    assert cli.config_dir() == str(ROOT / "conf")


def test_license_is_the_complete_standard_text():
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
