"""Optional packages of attention kernels: which versions' signatures the code here was written for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package.

    Attributes:
        distribution: Its name on PyPI.
        extra: The extra of this project that installs it.
        first: The first release line whose signatures are known, `(major, minor)`.
        last: The last one.
    """

    distribution: str
    extra: str
    first: tuple[int, int]
    last: tuple[int, int]

    def release(self) -> tuple[int, int] | None:
        """Major and minor of the installed version; `None` if it is not installed."""
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None
        numbers = re.match(r"(\d+)\.(\d+)", version)
        return (int(numbers[1]), int(numbers[2])) if numbers else None

    def check(self, choice: str) -> None:
        """Refuse to run without a known version of the package.

        Raises:
            ValueError: It is not installed, or another version is; the text says what to do.
        """
        release = self.release()
        if release is None:
            raise ValueError(
                f'attention="{choice}" needs the package {self.distribution}, which is not installed: '
                f'pip install "lightning_memo[{self.extra}]", or use attention="auto"'
            )
        if not self.first <= release <= self.last:
            first, last, found = (".".join(map(str, numbers)) for numbers in (self.first, self.last, release))
            raise ValueError(
                f'attention="{choice}" knows {self.distribution} {first} to {last}, and {found} is installed: '
                'install one of those, or use attention="auto"'
            )


# Both call functions that are not public API: a release line that was not read is refused, not guessed.
FLASH_ATTN = Package("flash-attn", "flash", first=(2, 7), last=(2, 8))
TRANSFORMER_ENGINE = Package("transformer-engine", "te", first=(2, 0), last=(2, 18))
