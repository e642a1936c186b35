"""Compiles the C++ of this package on first use, and keeps the result for later runs.

Nothing here imports torch, so that pure code can be compiled without it.
"""

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from lightning_memo.utils.files import replacing, user_cache

SOURCE_FOLDER: Final = Path(__file__).parents[1] / "kernels" / "csrc"
# Not -march=native: home folders, and so this cache, are often shared by machines with different processors.
_FLAGS: Final = ("-std=c++20", "-O3", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
_COMPILERS: Final = ("c++", "g++", "clang++")


class BuildError(RuntimeError):
    """A C++ library could not be built or loaded; the message is one line that says what to do."""


def build(name: str, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """Compiles C++ sources to a shared library, unless an earlier run did so already.

    The library lies in ``$XDG_CACHE_HOME/lightning_memo/native`` (``~/.cache`` if that is not set), under a name that
    depends on the sources, the headers beside them, the compiler and the flags. Several processes build it once.

    Args:
        name: What the library is called.
        sources: The ``.cpp`` files. All ``.h`` files of their folders count as parts of them.
        flags: For the compiler, after those that every library gets. Put versions of included software here too.

    Returns:
        The shared library.

    Raises:
        BuildError: no compiler, a source that does not compile, or a cache folder that can't be written.
    """
    try:
        folder = user_cache("native")
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{name}-{_source_key(sources, flags)}"
        try:
            compiler = find_compiler()
        except BuildError:
            # Compiled on another machine with the same home folder, perhaps: nodes of a cluster often have no compiler.
            if built := sorted(folder.glob(f"{stem}-*.so")):
                return built[0]
            raise
        library = folder / f"{stem}-{_compiler_key(compiler)}.so"
        if not library.exists():
            with _locked(library.with_suffix(".lock")):
                for abandoned in folder.glob(f".*.{library.name}"):  # by a process that ended while it compiled
                    abandoned.unlink(missing_ok=True)
                if not library.exists():
                    _compile(name, [*compiler, *_FLAGS, *map(str, sources), *flags], library)
    except OSError as error:
        raise BuildError(
            f"{name}: can't be built ({error}): give XDG_CACHE_HOME a folder that can be written to"
        ) from error
    return library


def load(name: str, sources: Sequence[Path], flags: Sequence[str] = (), *, keep_gil: bool = False) -> ctypes.CDLL:
    """Builds a library if necessary, and loads it.

    Args:
        name: What the library is called.
        sources: The ``.cpp`` files.
        flags: For the compiler; see `build`.
        keep_gil: Calls hold the interpreter's lock. Right for functions that return within a microsecond.

    Returns:
        The loaded library.

    Raises:
        BuildError: the library can't be built or loaded.
    """
    path = build(name, sources, flags)
    try:
        return (ctypes.PyDLL if keep_gil else ctypes.CDLL)(str(path))
    except OSError as error:
        raise BuildError(f"{name}: {path} can't be loaded ({error}): delete it, and it will be built again") from error


def find_compiler() -> list[str]:
    """The C++ compiler to call, with arguments if ``CXX`` has some.

    Raises:
        BuildError: ``CXX`` names no program, or it is not set and no compiler is on the PATH.
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
    """Flags for a source that includes the headers of torch's core library, c10.

    Args:
        cuda: The source also includes c10's CUDA headers and those of the CUDA runtime.

    Returns:
        Include folders, macros and libraries. torch's version is among the macros, so that each has its own build.

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
    """The folder of the installed torch package.

    Raises:
        BuildError: torch is not installed.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed: pip install torch")
    return Path(found.origin).parent


def cuda_include_folders(torch_root: Path) -> list[Path]:
    """Folders with the headers of the CUDA runtime: of pip's packages beside torch, else of an installed toolkit.

    Raises:
        BuildError: there are none.
    """
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    # Wheels of CUDA 13 share one folder, those of CUDA 12 have one each.
    candidates = [*sorted((torch_root.parent / "nvidia").glob("*/include"), reverse=True), toolkit / "include"]
    found = [folder for folder in candidates if (folder / "cuda_runtime_api.h").is_file()]
    if not found:
        raise BuildError("cuda_runtime_api.h is not found: install nvidia-cuda-runtime by pip, or set CUDA_HOME")
    return found[:1]


def _cxx11_abi(torch_root: Path) -> str:
    """Which of the two layouts of the standard library's strings torch was built with: "0" or "1"."""
    config = torch_root / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    stated = re.search(r"_GLIBCXX_USE_CXX11_ABI=([01])", config.read_text()) if config.is_file() else None
    return stated.group(1) if stated else "1"


def _source_key(sources: Sequence[Path], flags: Sequence[str]) -> str:
    """A digest of what is compiled, and how."""
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
    """Holds a lock file, so that other processes wait for the build instead of building too."""
    with path.open("w") as file:
        # Some network file systems have no locks: then several processes build, and the last rename wins.
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
        raise BuildError(f"{name}: the C++ compiler failed: {_first_error(done.stderr)} (all of it: {log})")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it says nothing")
