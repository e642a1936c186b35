import contextlib
import gc
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it when it is imported, which Lightning does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import seed_everything
from support.benchmark_modules import benchmark_modules
from support.commands import TINY_RUN, WITHOUT_REPORT
from support.trainer_harness import shorten_measurements


def pytest_collection_finish():
    """Exempts what has been imported from garbage collection, which would otherwise take a second at each call."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(request, tmp_path_factory):
    """Tests neither see nor fill the user's cache. Workers share one, and libraries are kept for later test runs."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    if request.config.pluginmanager.has_plugin("cacheprovider"):
        (cache / "lightning_memo").mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another worker was first
            (cache / "lightning_memo" / "native").symlink_to(request.config.cache.mkdir("native"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    seed_everything(0, verbose=False)


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    """Runs leave their files in a fresh folder, and measure this machine for a moment only."""
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)


@pytest.fixture
def in_process(monkeypatch, tmp_path, capfd):
    """Runs the main of a command in this process and a fresh folder; returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it; this takes it back afterwards
    shorten_measurements(monkeypatch)

    def run(main, *arguments):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        capfd.readouterr()
        try:
            main()
        except SystemExit as end:
            return (end.code, *capfd.readouterr())
        return (0, *capfd.readouterr())

    return run


@pytest.fixture
def train(in_process):
    """Runs the training command with settings that make it small, by default without a report; see `in_process`."""
    from lightning_memo.train import main

    def run(*overrides, report=False):
        tiny = TINY_RUN if report else (*TINY_RUN, *WITHOUT_REPORT)
        flags = [argument for argument in overrides if argument.startswith("-")]  # argparse wants them first
        return in_process(main, *flags, *tiny, *(each for each in overrides if each not in flags))

    return run


@pytest.fixture(scope="module")
def own_modules():
    """Where the benchmarks' own modules can be imported, for all tests of a file."""
    with benchmark_modules():
        yield
