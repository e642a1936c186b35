"""Gets what the CUDA back end's tests need from PyPI: headers and two small libraries of torch's CUDA builds.

    python tests/support/cuda_stub/fetch.py [VERSION ...]     # into .cuda/, about 25 MB for each version

`.cuda/VERSION/` has the folders that `pip install torch==VERSION` creates, `.cuda/toolkit/` those of a CUDA toolkit.
The wheels have hundreds of megabytes, so only the needed parts of them are read.
"""

from __future__ import annotations

import io
import os
import re
import sys
import urllib.request
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[3] / ".cuda"
# By version of torch, the version of Triton that it requires.
TORCH_VERSIONS = {"2.11.0": "3.6.0", "2.12.1": "3.7.1", "2.13.0": "3.7.1", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}
RUNTIME, RUNTIME_INTERNALS = ("nvidia-cuda-runtime", "13.0.96"), ("nvidia-cuda-crt", "13.0.88")
TORCH_PARTS = re.compile(r"torch/(include/(c10|torch/headeronly)/.*\.h|lib/libc10(_cuda)?\.so)$")
CUDA_HEADERS = re.compile(r"(nvidia/cu13|triton/backends/nvidia)/include/.*\.(h|hpp)$")


class RemoteFile(io.RawIOBase):
    """A file on a web server that is read in parts."""

    PART_BYTES = 1 << 20

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = 0
        self._parts: dict[int, bytes] = {}
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        index, begin = divmod(self._position, self.PART_BYTES)
        found = self._part(index)[begin : begin + len(buffer)] if self._position < self._size else b""
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _part(self, index: int) -> bytes:
        if index not in self._parts:
            first = index * self.PART_BYTES
            last = min(first + self.PART_BYTES, self._size) - 1
            request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                if answer.status != 206:
                    raise OSError(f"{self._url}: the server does not send parts of files")
                self._parts[index] = answer.read()
        return self._parts[index]


def wheel_url(project: str, version: str, tags: str) -> str:
    """The address of a wheel, from the index that pip would ask."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    with urllib.request.urlopen(f"{index}/{project}/", timeout=60) as answer:
        page = answer.read().decode()
    pattern = rf'href="([^"#]*/{project.replace("-", "_")}-{re.escape(version)}-{tags}\.whl)'
    if not (found := re.search(pattern, page)):
        raise OSError(f"{index} has no wheel of {project} {version} for this machine")
    return found.group(1)


def extract(project: str, version: str, tags: str, parts: re.Pattern[str], target: Path) -> None:
    """Unpacks the parts of a wheel whose names match."""
    url = wheel_url(project, version, tags)
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), 1 << 16)) as wheel:
        for name in filter(parts.match, wheel.namelist()):
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(wheel.read(name))


def main(versions: tuple[str, ...]) -> None:
    if unknown := set(versions) - TORCH_VERSIONS.keys():
        sys.exit(f"torch {', '.join(unknown)}: not one of {', '.join(TORCH_VERSIONS)}")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    any_python, cpython = (rf"{tags}-manylinux[^\"]*x86_64" for tags in ("py3-none", "cp311-cp311"))
    for project, version in (RUNTIME, RUNTIME_INTERNALS):
        extract(project, version, any_python, CUDA_HEADERS, FOLDER / "toolkit")
    for version in versions:
        target = FOLDER / version
        extract(*RUNTIME, any_python, CUDA_HEADERS, target)
        extract("triton", TORCH_VERSIONS[version], cpython, CUDA_HEADERS, target)
        extract("torch", version, cpython, TORCH_PARTS, target)
        (target / "torch" / "complete").touch()
        sys.stdout.write(f"{target}\n")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or tuple(TORCH_VERSIONS))
