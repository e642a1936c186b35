"""A cell, which is measured in one process, and the file with its result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from circumstances import save_report

Result = dict[str, Any]
"""The content of the JSON file of a cell."""

UNFINISHED: Final = ("error", "unavailable")
"""States that the next run may change, because a bug was fixed or a package was installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Some steps of one method.

    Attributes:
        method: A name in `methods.METHODS`.
        tokens: Length of the sequence; the batch has one sequence.
        model: A file in `conf/model`; its weights are random.
        layers: Number of layers of the model; `None` means all.
        tuning: "full" trains all weights; "lora" trains adapters of rank 16 on all linear layers.
        device: "cuda" or "cpu".
        attention: Kernel of all methods: "sdpa" is PyTorch's flash attention, "cudnn" cuDNN's.
        loss: "chunked" never holds the logits of all tokens; "whole" is Hugging Face's loss.
        allocator: PyTorch's setting for device memory, "native" or "expandable_segments".
        slice_tokens: Longest slice of the methods that use many slices.
        ranks: Number of processes that divide the sequence, and the weights, their gradients and the optimizer's state
            (ZeRO 3).
        context: How they divide the sequence, "ring" or "ulysses".
        precision: Lightning's name; "bf16-mixed" keeps weights in fp32.
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
    ranks: int = 1
    context: str = "ring"
    precision: str = "bf16-true"

    @property
    def group(self) -> str:
        """Name that cells have in common if they are compared at each length."""
        layers = "all" if self.layers is None else self.layers
        usual = {"attention": "sdpa", "loss": "chunked", "allocator": "native", "precision": "bf16-true"}
        special = [f"-{getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        if self.ranks > 1:
            special.append(f"-{self.context}{self.ranks}")
        return f"{self.model}-{layers}-{self.tuning}{''.join(special)}"

    @property
    def path(self) -> Path:
        """Path of the file within the folder of a device."""
        slices = f"-{self.slice_tokens}" if self.method.startswith("memo_slices") else ""
        return Path(self.group) / f"{self.tokens:08d}-{self.method}{slices}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long a cell is measured.

    Attributes:
        warmup: Untimed steps after the first steps, in which a method settles.
        repeats: Timed steps.
        settle_seconds: Longest time for the first steps, in particular for planning memory.
        seconds: Longest time for the cell; it is then ended.
        prime_tokens: Length of a first, shorter sequence that creates the optimizer's state; 0 means none.
        observe: Whether one more step is recorded.
    """

    warmup: int = 2
    repeats: int = 5
    settle_seconds: float = 60.0
    seconds: float = 300.0
    prime_tokens: int = 0
    observe: bool = True


def load(folder: Path, cell: Cell) -> Result | None:
    """Returns the result of a cell in the folder of a device, or `None` if there is none."""
    path = folder / cell.path
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def finished(result: Result | None, seconds: float) -> bool:
    """Returns whether a cell needs no more measuring. A cell that timed out does, if it now has more time."""
    if result is None or result["status"] in UNFINISHED:
        return False
    return bool(result["status"] != "timeout" or result["effort"]["seconds"] >= seconds)


def save(folder: Path, cell: Cell, effort: Effort, result: Result) -> None:
    """Saves the result of a cell.

    Raises:
        OSError: The file cannot be written.
    """
    content = {"cell": asdict(cell), "effort": asdict(effort), **result}
    save_report(folder / cell.path, content)


def load_all(folder: Path) -> list[Result]:
    """Reads all results below a folder, in the order of their paths.

    Raises:
        ValueError: A file is not the result of a cell.
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
