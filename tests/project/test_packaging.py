import ast
import hashlib
import json
import re
import site
import subprocess
import sys
import tarfile
import venv
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import commands
from support.paths import ROOT

import lightning_memo
from lightning_memo.__main__ import COMMANDS
from lightning_memo.cli import hydra_command as cli

# What a clone has, beside hidden files and what running leaves.
SOURCES = (
    "benchmarks", "conf", "docker", "docs", "examples", "lightning_memo", "tests", "CHANGELOG.md", "CONTRIBUTING.md",
    "LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml", "setup.cfg",
)  # fmt: skip


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
        *(names(extras[name]) for name in ("flash", "te", "peft", "datasets", "trainer"))
    )
    imported = set()
    for path in (ROOT / "lightning_memo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    distributions = {"hydra": "hydra-core", "triton": "torch"}  # a CUDA build of torch requires it
    own = set(sys.stdlib_module_names) | {"lightning_memo"}
    assert {distributions.get(name, name.replace("_", "-")) for name in imported - own} <= declared


def test_the_versions_that_are_tested_with_are_allowed(setup_cfg):
    lines = setup_cfg["options"]["install_requires"].split("\n") + setup_cfg["options.extras_require"]["trainer"].split(
        "\n"
    )
    allowed = [Requirement(line) for line in lines if line]
    assert not [str(each) for each in allowed if not each.specifier.contains(metadata.version(each.name))]


def test_upper_bounds_are_those_of_the_page(setup_cfg):
    extras = setup_cfg["options.extras_require"]
    lines = [setup_cfg["options"]["install_requires"], *(extras[name] for name in ("flash", "te", "liger", "trainer"))]
    bounded = {line for line in "\n".join(lines).split("\n") if "<" in line}
    rows = re.findall(r"^\| ([\w-]+) \| `(\S*<\S*)` \|", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    assert {name + allowed for name, allowed in rows} == {line.replace("[pytorch]", "") for line in bounded}


def test_libraries_of_which_private_modules_are_imported_have_an_upper_bound(setup_cfg):
    lines = [setup_cfg["options"]["install_requires"], *setup_cfg["options.extras_require"].values()]
    bounded = names("\n".join(line for line in "\n".join(lines).split("\n") if "<" in line))
    private = set()
    for path in (ROOT / "lightning_memo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                parts = [*node.module.split("."), *(alias.name for alias in node.names)]
                if any(part[0] == "_" and not part.startswith("__") for part in parts):
                    private.add(parts[0])
    assert "torch" in private
    assert {name.replace("_", "-") for name in private - {"lightning_memo"}} <= bounded


def built(kind, source, folder):
    """A distribution of the sources in a folder, made as `python -m build --no-isolation` makes it."""
    build = f"from setuptools import build_meta; import sys; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (path,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    source.mkdir()
    # setuptools writes into the source tree, which other tests read.
    for name in SOURCES:
        (source / name).symlink_to(ROOT / name)
    return built("sdist", source, folder)


@pytest.fixture(scope="module")
def unpacked(sdist):
    """The files of the source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # missing in early releases of 3.10, 3.11
        archive.extractall(sdist.parent)
    return sdist.with_name(sdist.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """Made from the source distribution, so that one that lacks something makes a wheel that lacks it."""
    return built("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder into which the wheel alone is installed."""
    folder = tmp_path_factory.mktemp("installed")
    pip_install("--target", folder, wheel)
    return folder


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def environment(request, tmp_path_factory):
    """A new virtual environment into which a distribution is installed. The libraries are those of this interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Only the folders are added: the editable installation in them, which is a .pth file itself, is not followed.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    pip_install("--ignore-installed", request.getfixturevalue(request.param), python=folder / "bin" / "python")
    return folder


def pip_install(*arguments, python=sys.executable):
    """Without a network, so that libraries have to be there."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, *arguments], check=True, capture_output=True)


def files_of(folder, below=""):
    """Paths of the files in a folder, caches left out."""
    files = (path for path in (folder / below).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in files}


def test_wheel_holds_the_package_and_its_configuration_alone(installed):
    config = {f"lightning_memo/{path}" for path in files_of(ROOT, "conf")}
    shipped = {path for path in files_of(installed) if ".dist-info/" not in path}
    assert shipped == files_of(ROOT, "lightning_memo") | config | {"bin/lightning-memo"}
    assert {Path(path).suffix for path in shipped} == {"", ".py", ".yaml", ".html", ".json", ".cpp", ".h", ".typed"}
    assert len([path for path in files_of(installed) if path.endswith("licenses/LICENSE")]) == 1


@pytest.mark.slow
def test_pip_installs_all_files_from_each_distribution(environment, installed):
    (packages,) = environment.glob("lib/python*/site-packages")
    assert files_of(packages, "lightning_memo") == files_of(installed, "lightning_memo")


@pytest.fixture
def console(environment, tmp_path, monkeypatch):
    """Runs the console command of an environment in an empty folder, as a shell does."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words):
        command = [environment / "bin" / "lightning-memo", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    return run


@pytest.mark.slow
def test_the_console_command(console):
    assert set(COMMANDS) < set(console("--help").split())
    assert "usage: python -m lightning_memo.place" in console("place", "--help")
    told = json.loads(console("estimate", "model=llama3_8b", "cluster=h100", "output=json"))
    assert told["status"] == "ok"
    assert console("--version") == f"lightning-memo {lightning_memo.__version__}\n"
    assert console("doctor").endswith("Training can run.\n")


@pytest.mark.slow
def test_the_console_command_trains(console, tmp_path):
    out = console("train", "experiment=demo", "trainer.max_steps=2", "compare=false")
    assert "unigram entropy of the text" in out and "memory is not planned" not in out
    assert len(list(tmp_path.glob("outputs/demo/runs/*/csv/report.html"))) == 1


@pytest.mark.parametrize("folder", ["conf", "docker", "docs", "examples", "lightning_memo", "tests"])
def test_source_distribution_holds_all_that_is_in_the_tree(unpacked, folder):
    assert files_of(ROOT, folder) <= files_of(unpacked, folder)


def test_the_version_is_told_once(wheel):
    assert wheel.name == f"lightning_memo-{lightning_memo.__version__}-py3-none-any.whl"


@pytest.fixture
def command(installed, tmp_path):
    """Runs a module of the installed package from an empty folder, where nothing of the sources is seen."""

    def run(*words):
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        status, out, err = commands.run(["python", *words], folder, bare=True, PYTHONPATH=str(installed))
        assert status == 0, err
        return out

    return run


def test_the_installed_package_is_what_runs(command, installed):
    out = command(
        "-c",
        "import lightning_memo, lightning_memo.cli.hydra_command as c; print(lightning_memo.__file__, c.config_dir())",
    )
    assert out.split() == [str(installed / "lightning_memo" / name) for name in ("__init__.py", "conf")]


@pytest.mark.slow
def test_installed_package_runs_a_sweep_and_reports(command, tmp_path):
    command("-m", "lightning_memo.train", "-m", *commands.TINY_RUN, "data.seq_len=16,32")
    (sweep,) = (tmp_path / "empty").glob("outputs/*/sweeps/last")
    assert (sweep / "sweep.png").stat().st_size > 0
    assert len(list(sweep.glob("*/csv/report.html"))) == 2


@pytest.mark.slow
def test_installed_package_estimates_and_places(command, tmp_path):
    told = json.loads(command("-m", "lightning_memo.estimate", "model=llama3_8b", "cluster=h100", "output=json"))
    assert told["status"] == "ok"
    command("-c", "from pathlib import Path; Path('in.csv').write_text('id,lower,upper,size\\na,0,3,4\\nb,2,5,4\\n')")
    assert "peak         8 bytes" in command("-m", "lightning_memo.place", "in.csv", "out.csv")


def test_installed_package_compiles_the_planned_allocator(command):
    code = (
        "import torch; from lightning_memo.allocator import PlannedAllocator as A; print(A(torch.device(%r)).stats())"
    )
    assert "hits=0" in command("-c", code % "cpu")


def test_checkout_finds_its_configuration():
    assert cli.config_dir() == str(ROOT / "conf")


def test_license_is_the_complete_standard_text():
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
