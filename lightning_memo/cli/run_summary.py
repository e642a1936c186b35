"""What is left of a training run: one small JSON file, which the report of a sweep reads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lightning_memo.utils.files import replacing

FILE_NAME = "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The settings and results of one run; what was not measured is None."""

    overrides: Sequence[str]
    """What the command line changed, as ``name=value``."""
    status: Literal["ok", "failed"]
    message: str = ""
    """Why the run failed, in one line."""
    processes: int = 1
    """Of all nodes. Times and bytes are those of the first one; tokens and losses those of all."""
    seq_len: int | None = None
    batch_size: int | None = None
    """Of one data-parallel process."""
    alpha: float | None = None
    """Fraction of the tokens whose activations were swapped; None where the strategy swaps nothing."""
    step_seconds: float | None = None
    """Median time of an optimizer step."""
    tokens_per_second: float | None = None
    peak_device_bytes: int | None = None
    """Peak of a step above parameters and optimizer state."""
    host_bytes: int | None = None
    """Host memory that holds swapped activations."""
    spill_bytes: int | None = None
    """Disk space that holds those for which the host has no room."""
    arena_bytes: int | None = None
    """Memory in which every buffer of a step has a place; None where none was planned."""
    train_loss: float | None = None
    """Mean of the last steps, nats per token."""
    val_loss: float | None = None
    unigram_entropy: float | None = None
    """The lowest loss without context, nats per token of the training text."""

    def save(self, folder: Path) -> None:
        """Writes the summary into a run's folder."""
        with replacing(folder / FILE_NAME) as path:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "RunSummary":
        """Reads what :meth:`save` wrote.

        Raises:
            OSError: There is no summary in the folder.
        """
        return cls(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
