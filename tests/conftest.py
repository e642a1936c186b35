# ruff: noqa: E402
import contextlib
import gc
import logging
import os
import sys

import pytest

gc.disable()  # until all tests are collected: collections would visit all imported objects repeatedly

import torch

if not torch.cuda.is_available():  # Lightning imports Triton, which then reads this variable
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import torch.distributed as dist
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import seed_everything
from support.benchmark_modules import benchmark_modules
from support.commands import TINY_RUN, WITHOUT_REPORT
from support.devices import DEVICE, nothing_hidden
from support.markers.part import Part
from support.markers.slow import COLLECTED, mark_slow
from support.trainer_harness import shorten_measurements
from support.warm import exempt_from_collection, look_up_once, use_libyaml

from lightning_memo.engine.attention import attention_selector

hypothesis.settings.register_profile("no deadline", deadline=None)  # other programs may keep the machine busy
hypothesis.settings.load_profile("no deadline")
use_libyaml()
look_up_once()


def pytest_addoption(parser):
    parser.addoption("--part", type=Part.parse, metavar="K/N", help="run only one of N parts of the cases")


def pytest_configure():
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("TEST_DEVICE=cuda, but PyTorch sees no CUDA device: run `make test-cuda`")


@pytest.hookimpl(wrapper=True)  # within, cases are selected by markers
def pytest_collection_modifyitems(config, items):
    mark_slow(items)
    config.stash[COLLECTED] = list(items)
    yield
    if (part := config.getoption("part")) is not None:
        part.select(config, items)


def pytest_collection_finish():
    exempt_from_collection()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_have_left():
    exempt_from_collection()


@pytest.fixture(scope="session", autouse=True)
def same_kernel():
    """On an emulated GPU the fastest kernel is a matter of chance, and runs that are compared would differ."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cuda":
            patch.setattr(attention_selector, "fastest_kernel", lambda trials: trials[0].name)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(request, tmp_path_factory):
    """Keep tests away from the user's cache. Workers share a cache, and later test runs reuse compiled libraries."""
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


@pytest.fixture(autouse=True)
def no_process_group():
    """Lightning leaves the process group of a trainer to the end of the process, where the next test would meet it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def short_measurements():
    with pytest.MonkeyPatch.context() as patch:
        shorten_measurements(patch)
        yield


@pytest.fixture(autouse=True)
def honest(request):
    """On the emulated device, a test fails if something hid what it looks for; tests of the device itself may hide."""
    with contextlib.nullcontext() if request.path.name == "test_device.py" else nothing_hidden():
        yield


@pytest.fixture
def device():
    """The CUDA device, for tests that need one."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    """Run the test in a new folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_process(monkeypatch, tmp_path, capfd):
    """Run the main function of a command in this process and a new folder; returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    for logger in (logging.getLogger(), *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):  # commands disable loggers
            monkeypatch.setattr(logger, "disabled", logger.disabled)
            monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it, and this restores it afterwards

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
    """Run the training command with settings that make it small, by default without a report; see `in_process`."""
    from lightning_memo.train import main

    def run(*overrides, report=False):
        tiny = TINY_RUN if report else (*TINY_RUN, *WITHOUT_REPORT)
        flags = [argument for argument in overrides if argument.startswith("-")]  # argparse expects flags first
        return in_process(main, *flags, *tiny, *(each for each in overrides if each not in flags))

    return run


@pytest.fixture(scope="module")
def own_modules():
    """Make the benchmarks' own modules importable in all tests of a file."""
    with benchmark_modules():
        yield
