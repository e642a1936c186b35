"""Command line `python -m lightning_memo.doctor`: whether this machine can train, by what, and what is missing."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from lightning_memo.cli.processes import finish_imports, prepare_process

    prepare_process()

import argparse
import platform
import signal
import sys
import textwrap
from collections.abc import Iterator

from packaging.version import Version

import lightning_memo
from lightning_memo.utils.findings import Finding
from lightning_memo.utils.requirements import PACKAGE, Library, required_libraries
from lightning_memo.utils.user_errors import one_line

_SHOWN = ("torch", "lightning", "transformers")
# The other extras are for sweeps on SLURM, and for those who develop this package.
_EXTRAS = ("peft", "datasets", "trainer", "quantized", "liger", "flash", "te")
_WIDTH, _NAME = 80, 16


def main(arguments: list[str] | None = None) -> int:
    """Print what is found, line by line.

    Args:
        arguments: Arguments of the command line, or None for those in `sys.argv`.

    Returns:
        The exit status: 0 if training can run, otherwise 1.
    """
    _parser().parse_args(arguments)
    broken = []
    for finding in _findings():
        _print(finding.name, finding.text)
        if finding.prevents_training:
            broken.append(finding.name)
    missing = [extra for extra in _EXTRAS if any(not each.version for each in _libraries(extra))]
    if missing:
        _print("not installed", f'{", ".join(missing)}: pip install "{PACKAGE}[{missing[0]}]" adds one of these extras')
    print(f"\nTraining cannot run: see {', '.join(broken)}." if broken else "\nTraining can run.")  # noqa: T201
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m lightning_memo.doctor",
        description="Says which libraries, GPUs and memory are found, trains a few steps of a small model, and names "
        "the kernels that were used and what is missing. The exit status is 0 if training can run, and 1 if not.",
    )


def _print(name: str, text: str) -> None:
    for line in textwrap.wrap(text, _WIDTH - _NAME, break_long_words=False, break_on_hyphens=False):
        print(f"{name:{_NAME}}{line}", flush=True)  # noqa: T201
        name = ""


def _findings() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    yield Finding(PACKAGE, f"{lightning_memo.__version__}, Python {platform.python_version()}, {system}")
    yield from _versions()
    try:
        from lightning_memo.trials.machine_check import check_machine

        yield from check_machine()
    except Exception as error:  # drivers, and libraries whose parts do not fit together, may raise anything
        yield Finding("failed", f"{type(error).__name__}: {one_line(str(error))}", prevents_training=True)


def _libraries(extra: str) -> list[Library]:
    return [each for each in required_libraries() if each.extra == extra]


def _versions() -> Iterator[Finding]:
    """Tell of the libraries that the package needs, and of those of extras that are installed."""
    if not required_libraries():
        yield Finding("metadata", f"{PACKAGE} is not installed, so that versions are not compared: pip install -e .")
        return
    others = []
    for library in _libraries(""):
        requirement, version = library.requirement, library.version
        if version is None:
            text = f'not installed: pip install "{requirement}"'
        elif not library.is_tested:
            text = f'{version} is not tested: pip install "{requirement}"'
        elif requirement.name in _SHOWN:
            tested = sorted(requirement.specifier, key=lambda each: Version(each.version))
            text = f"{version}, tested with {','.join(map(str, tested))}"
        else:
            others.append(f"{requirement.name} {version}")
            continue
        yield Finding(requirement.name, text, prevents_training=version is None)
    yield Finding("also needed", f"{len(others)} libraries, as required")
    extras = {each.requirement.name: each.version for name in _EXTRAS for each in _libraries(name) if each.version}
    if extras:
        yield Finding("extras", ", ".join(f"{name} {version}" for name, version in extras.items()))


if __name__ == "__main__":
    finish_imports()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `doctor | head`
    sys.exit(main())
