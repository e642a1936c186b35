"""What is measured in one process, and the file that its result is kept in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning_memo.utils.files import replacing

Result = dict[str, Any]
"""What the JSON file of a cell holds."""

UNFINISHED: Final = ("error", "unavailable")
"""States that the next run may change: a bug is mended, a package installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Some steps of one method.

    Attributes:
        method: A name of `methods.METHODS`.
        tokens: Of the sequence; the batch is one sequence.
        model: A file of `conf/model`; its weights are random.
        layers: How many of its layers; `None`: all.
        tuning: "full": all weights are trained; "lora": adapters of rank 16 on all linear layers.
        device: "cuda" or "cpu".
        attention: The kernel, the same for all methods: "sdpa" is PyTorch's flash attention, "cudnn" cuDNN's.
        loss: "chunked": no method ever holds the logits of all tokens; "whole": as Hugging Face computes it.
        allocator: Of PyTorch's settings for the device's memory, "native" or "expandable_segments".
        slice_tokens: Longest slice of the methods that run many.
    """

    method: str
    tokens: int
    model: str
    layers: int | None = None
    tuning: str = "full"
    device: str = "cuda"
    attention: str = "sdpa"
    loss: str = "chunked"
    allocator: str = "native"
    slice_tokens: int = 16384

    @property
    def group(self) -> str:
        """What is compared has this in common, and its length."""
        layers = "all" if self.layers is None else self.layers
        usual = {"attention": "sdpa", "loss": "chunked", "allocator": "native"}
        special = [f"-{getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        return f"{self.model}-{layers}-{self.tuning}{''.join(special)}"

    @property
    def path(self) -> Path:
        """Of its file within the folder of a device."""
        slices = f"-{self.slice_tokens}" if self.method == "memo_slices" else ""
        return Path(self.group) / f"{self.tokens:08d}-{self.method}{slices}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long a cell is measured.

    Attributes:
        warmup: Untimed steps, once what a method does in its first ones is over.
        repeats: Timed steps.
        settle_seconds: How long a method may take for its first ones, planning of memory above all.
        seconds: The whole cell; it is ended then.
        prime_tokens: Of a first, shorter sequence, which brings the optimizer's state to be; 0: there is none.
        observe: Whether one more step is recorded.
    """

    warmup: int = 2
    repeats: int = 5
    settle_seconds: float = 60.0
    seconds: float = 300.0
    prime_tokens: int = 0
    observe: bool = True


def load(folder: Path, cell: Cell) -> Result | None:
    """The result of a cell in the folder of a device; `None` if there is none."""
    path = folder / cell.path
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def finished(result: Result | None, seconds: float) -> bool:
    """Whether a cell needs no more measuring; one that took too long does where it may take longer now."""
    if result is None or result["status"] in UNFINISHED:
        return False
    return bool(result["status"] != "timeout" or result["effort"]["seconds"] >= seconds)


def save(folder: Path, cell: Cell, effort: Effort, result: Result) -> None:
    """Keep the result of a cell.

    Raises:
        OSError: The file can't be written.
    """
    content = {"cell": asdict(cell), "effort": asdict(effort), **result}
    with replacing(folder / cell.path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_all(folder: Path) -> list[Result]:
    """All results below a folder, in the order of their paths.

    Raises:
        ValueError: A file is no result of a cell.
    """
    results = []
    for path in sorted(folder.glob("*/*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            Cell(**result["cell"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no result of benchmarks/gpu.py ({error}); remove it") from None
        results.append(result)
    return results
