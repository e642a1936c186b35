"""Compiles the C++ libraries of this package on first use, and caches them for later runs. Does not import torch."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from lightning_memo.utils.files import replacing, user_cache

# Without -march=native, because machines with different processors often share home folders and thus this cache.
_FLAGS: Final = ("-std=c++20", "-O3", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
_COMPILERS: Final = ("c++", "g++", "clang++")


Signature = Sequence[Any]
"""Types of `ctypes` of a function: of the result, `None` if it has none, and of each argument."""


class BuildError(RuntimeError):
    """A C++ library could not be built or loaded. The message is one line with a remedy."""


def build(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """Compile C++ sources to a shared library, unless an earlier run has already done so.

    The library is in the folder ``native`` of :func:`~lightning_memo.utils.files.user_cache`, under a name that depends
    on the sources, the headers in their folders, the compiler and the flags. Concurrent processes build it only once.

    Args:
        name: Name of the library.
        sources: The ``.cpp`` files. Changes of any ``.h`` file in their folders cause a new build.
        flags: Compiler flags in addition to the common ones. They should include versions of included software.

    Returns:
        Path of the shared library.

    Raises:
        BuildError: There is no compiler, a source does not compile, or the cache folder cannot be written.
    """
    try:
        folder = user_cache("native")
        folder.mkdir(exist_ok=True)
        stem = f"{name}-{_source_key(sources, flags)}"
        try:
            compiler = find_compiler()
        except BuildError:
            # Another machine with the same home folder may have compiled it: cluster nodes often have no compiler.
            if built := sorted(folder.glob(f"{stem}-*.so")):
                return built[0]
            raise
        library = folder / f"{stem}-{_compiler_key(compiler)}.so"
        if not library.exists():
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    _compile(name, [*compiler, *_FLAGS, *map(str, sources), *flags], library)
    except OSError as error:
        raise BuildError(f"{name}: cannot be built ({error}): set XDG_CACHE_HOME to a writable folder") from error
    return library


def load(
    name: str,
    sources: Sequence[Path],
    functions: Mapping[str, Signature],
    flags: Sequence[str] = (),
    *,
    keep_gil: bool = False,
) -> ctypes.CDLL:
    """Load a library, and build it first if necessary.

    Args:
        name: Name of the library.
        sources: The ``.cpp`` files.
        functions: Functions of the library that are going to be called.
        flags: Compiler flags; see `build`.
        keep_gil: Whether calls hold the global interpreter lock. Suited to functions that return within a microsecond.

    Returns:
        The loaded library.

    Raises:
        BuildError: The library cannot be built or loaded.
    """
    path = build(name, sources, flags)
    try:
        library = (ctypes.PyDLL if keep_gil else ctypes.CDLL)(str(path))
        for function, (result, *arguments) in functions.items():
            declared = getattr(library, function)
            declared.restype, declared.argtypes = result, arguments
        return library
    except (OSError, AttributeError) as error:  # AttributeError: it lacks a function
        raise BuildError(
            f"{name}: {path} cannot be loaded ({error}): delete it, and the next run will build it again"
        ) from error


def find_compiler() -> list[str]:
    """Command of the C++ compiler, with the arguments in ``CXX`` if there are any.

    Raises:
        BuildError: ``CXX`` does not name a program, or it is not set and no compiler is on the PATH.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"CXX={os.environ['CXX']}: no such program; set CXX to a C++ compiler, or unset it")
        return chosen
    for candidate in _COMPILERS:
        if path := shutil.which(candidate):
            return [path]
    raise BuildError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the PATH; install g++, or set CXX")


def torch_flags(*, cuda: bool = False) -> tuple[str, ...]:
    """Compiler flags for a source that includes the headers of torch's core library, c10.

    Args:
        cuda: Whether the source also includes c10's CUDA headers and those of the CUDA runtime.

    Returns:
        Include folders, macros and libraries. A macro has torch's version, so that each version gets its own build.

    Raises:
        BuildError: torch is not installed, or the headers of the CUDA runtime are not found.
    """
    root = torch_folder()
    libraries = ["-lc10_cuda"] if cuda else []
    return (
        *(f"-isystem{folder}" for folder in (root / "include", *(cuda_include_folders(root) if cuda else ()))),
        f'-DLIGHTNING_MEMO_TORCH="{importlib.metadata.version("torch")}"',
        f"-D_GLIBCXX_USE_CXX11_ABI={_cxx11_abi(root)}",
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        *libraries,
        "-lc10",
    )


def torch_folder() -> Path:
    """Folder of the installed torch package.

    Raises:
        BuildError: torch is not installed.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed: pip install torch")
    return Path(found.origin).parent


def cuda_include_folders(torch_root: Path) -> list[Path]:
    """Folders with the headers of the CUDA runtime, from pip packages next to torch or from an installed toolkit.

    The packages that torch requires lack the folder ``crt``, which those headers include. Triton, which torch requires,
    too, brings it.

    Args:
        torch_root: Folder of the torch package.

    Raises:
        BuildError: The headers are not found.
    """
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda") / "include"
    triton = torch_root.parent / "triton" / "backends" / "nvidia" / "include"
    # Wheels of CUDA 13 share one folder; wheels of CUDA 12 have one folder each.
    wheels = sorted((torch_root.parent / "nvidia").glob("*/include"), reverse=True)
    runtime = _first_with("cuda_runtime_api.h", [*wheels, toolkit], "nvidia-cuda-runtime")
    internal = _first_with("crt/host_defines.h", [runtime, *wheels, triton, toolkit], "nvidia-cuda-crt")
    return [runtime] if internal == runtime else [runtime, internal]


def _first_with(header: str, folders: Sequence[Path], package: str) -> Path:
    for folder in folders:
        if (folder / header).is_file():
            return folder
    raise BuildError(f"{header} not found: pip install {package}, or set CUDA_HOME")


def _cxx11_abi(torch_root: Path) -> str:
    """ABI of the standard library's strings that torch was built with: "0" or "1"."""
    config = torch_root / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    stated = re.search(r"_GLIBCXX_USE_CXX11_ABI=([01])", config.read_text()) if config.is_file() else None
    return stated.group(1) if stated else "1"


def _source_key(sources: Sequence[Path], flags: Sequence[str]) -> str:
    """Digest of sources, headers and flags."""
    digest = hashlib.sha256("\0".join([*_FLAGS, *flags]).encode())
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    for path in (*sources, *sorted(headers)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compiler_key(compiler: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return hashlib.sha256("\0".join([*compiler, version]).encode()).hexdigest()[:8]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that other processes wait for the build instead of building, too."""
    with path.open("w") as file:
        # Without locks, as on some network file systems, several processes build and the last rename wins.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(name: str, command: list[str], library: Path) -> None:
    with replacing(library) as unfinished:
        done = subprocess.run(
            [*command, "-o", str(unfinished)], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode == 0:
            return
        log = library.with_suffix(".log")
        log.write_text(f"{shlex.join(command)}\n\n{done.stderr}")
        raise BuildError(f"{name}: the C++ compiler failed: {_first_error(done.stderr)} (full output: {log})")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no output")
