"""Gets what the CUDA back end's tests need from PyPI: headers and two small libraries of torch's CUDA builds.

    python tests/support/cuda_stub/fetch.py [VERSION ...]     # into .cuda/, about 15 MB for each version

The wheels have hundreds of megabytes, so only the needed parts of them are read.
"""

from __future__ import annotations

import io
import os
import re
import sys
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[3] / ".cuda"
TORCH_VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
# The runtime that those builds of torch are made with; newer headers of the same major version would do as well. They
# are put where pip puts them, beside torch.
CUDA_WHEELS = (("nvidia-cuda-runtime", "13.0.96"), ("nvidia-cuda-crt", "13.0.88"))
TORCH_PARTS = re.compile(r"torch/(include/(c10|torch/headeronly)/.*\.h|lib/libc10(_cuda)?\.so)$")
HEADERS = re.compile(r".*/include/.*\.(h|hpp)$")


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


def extract(url: str, target: Path, wanted: Callable[[str], str | None]) -> None:
    """Unpacks the files for which `wanted` gives a path below the target."""
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), 1 << 16)) as wheel:
        for name in wheel.namelist():
            if path := wanted(name):
                file = target / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(wheel.read(name))


def main(versions: tuple[str, ...]) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    for project, version in CUDA_WHEELS:
        url = wheel_url(project, version, r"py3-none-manylinux[^\"]*x86_64")
        extract(
            url,
            FOLDER / "nvidia" / "cu13" / "include",
            lambda name: name.split("/include/")[1] if HEADERS.match(name) else None,
        )
    for version in versions:
        url = wheel_url("torch", version, r"cp311-cp311-manylinux[^\"]*x86_64")
        extract(url, FOLDER, lambda name, v=version: v + name[5:] if TORCH_PARTS.match(name) else None)
        (FOLDER / version / "complete").touch()
        sys.stdout.write(f"{FOLDER / version}\n")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or TORCH_VERSIONS)
