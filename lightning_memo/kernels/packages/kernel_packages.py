"""Optional packages of attention kernels, and their supported versions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package.

    Attributes:
        distribution: Name of the package on PyPI.
        install: What installs it.
        first: First supported release line, `(major, minor)`.
        last: Last supported release line.
    """

    distribution: str
    install: str
    first: tuple[int, int]
    last: tuple[int, int]

    def release(self) -> tuple[int, int] | None:
        """Return the major and minor number of the installed version; `None` if the package is not installed."""
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None
        numbers = re.match(r"(\d+)\.(\d+)", version)
        return (int(numbers[1]), int(numbers[2])) if numbers else None

    def check(self, choice: str) -> None:
        """Check that a supported version is installed.

        Args:
            choice: The setting of `attention` that needs the package.

        Raises:
            ValueError: The package is not installed, or its version is not supported.
        """
        release = self.release()
        if release is None:
            raise ValueError(
                f'attention="{choice}" needs the package {self.distribution}, which is not installed: '
                f'{self.install}, or use attention="auto"'
            )
        if not self.first <= release <= self.last:
            first, last, found = (".".join(map(str, numbers)) for numbers in (self.first, self.last, release))
            raise ValueError(
                f'attention="{choice}" supports {self.distribution} {first} to {last}, but {found} is installed: '
                'install a supported version, or use attention="auto"'
            )


# The kernels call functions of these packages that are not public API, so untested release lines are refused.
FLASH_ATTN = Package("flash-attn", 'pip install "lightning_memo[flash]"', first=(2, 7), last=(2, 8))
FLASH_ATTN_3 = Package("flash_attn_3", "build it from hopper/ of Dao-AILab/flash-attention", first=(3, 0), last=(3, 0))
FLASH_ATTN_4 = Package("flash-attn-4", "pip install flash-attn-4", first=(4, 0), last=(4, 0))
TRANSFORMER_ENGINE = Package("transformer-engine", 'pip install "lightning_memo[te]"', first=(2, 0), last=(2, 20))
