"""Generates the tables of docs/what_fits.md from estimates: the longest sequence and the speed by GPU and model.

    python benchmarks/what_fits.py
    python benchmarks/what_fits.py --check   exits with status 1 if the page is out of date

The tables are computed without measuring, so any machine can generate them in a few minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pages.generated_section import write_or_check
from pages.markdown import table

from lightning_memo.estimate import Cluster, EstimateRequest, constants_of, load_cluster, load_model, longest, search
from lightning_memo.estimate.what_would_fit import longest_in_slices, own_slices
from lightning_memo.shapes.model_shape import Quantization, adapters_of
from lightning_memo.utils.units import format_bytes, two_digits

PAGE: Final = Path(__file__).parents[1] / "docs" / "what_fits.md"
ONE: Final = {
    "t4": "T4", "a10g": "A10G", "l4": "L4", "rtx_4090": "RTX 4090", "rtx_5090": "RTX 5090", "a100_40": "A100 40 GB",
    "l40s": "L40S", "rtx_6000_ada": "RTX 6000 Ada", "rtx_a6000": "RTX A6000", "h100": "H100", "a100_80": "A100 80 GB",
    "gh200": "GH200", "rtx_pro_6000": "RTX PRO 6000", "h200": "H200", "b200": "B200", "gb200": "GB200",
    "mi300x": "MI300X", "b300": "B300",
}  # fmt: skip
EIGHT: Final = {
    "l40s": "8 L40S", "a100_80": "8 A100 80 GB", "h100": "8 H100", "h200": "8 H200", "b200": "8 B200",
    "mi300x": "8 MI300X", "b300": "8 B300",
}  # fmt: skip
MODELS: Final = {"8B": "llama3_8b", "32B": "qwen3_32b", "70B": "llama3_70b"}
_BOTH: Final = ("8B", "70B")
"""Models whose tables for eight GPUs are made, too."""
_LORA: Final = {"r": 16, "target_modules": "all-linear"}
_MULTIPLE: Final = 16 * 1024
_USUAL: Final = 32 * 1024
_SIZES: Final = {"pp": 1}


@dataclass(frozen=True)
class Kind:
    """What is trained, and how the other weights are stored."""

    name: str
    lora: bool
    quantization: Quantization | None = None


KINDS: Final = (Kind("QLoRA", True, "nf4_double"), Kind("LoRA", True), Kind("all weights", False))


@dataclass(frozen=True)
class Cell:
    """The longest sequence that fits, and tokens per second and GPU on sequences of 32K, or on the longest of those."""

    tokens: int
    speed: float

    def __str__(self) -> str:
        return f"{_length(self.tokens)}<br>{two_digits(self.speed)}/s"


def main() -> int:
    """Writes the section of the page, or compares it."""
    return write_or_check("what_fits", __doc__, PAGE, section)


def section() -> str:
    """Returns all tables, with the smallest GPUs before them."""
    one = {model: _cells(ONE, name, 1, KINDS) for model, name in MODELS.items()}
    eight = {model: _cells(EIGHT, MODELS[model], 8, KINDS[1:]) for model in _BOTH}
    smallest = "\n".join(f"- **{model}**: {_smallest(cells)}" for model, cells in one.items())
    tables = [
        f"**{model} on {where}**\n\n{_table(names, cells)}"
        for where, names, found in (("one GPU", ONE, one), ("eight GPUs", EIGHT, eight))
        for model, cells in found.items()
    ]
    return "\n\n".join([smallest, *tables])


def _cells(names: Mapping[str, str], model: str, gpus: int, kinds: tuple[Kind, ...]) -> dict[str, dict[str, Cell]]:
    """The cells that are not empty, by cluster and kind."""
    found: dict[str, dict[str, Cell]] = {}
    for name in names:
        cells = {kind.name: cell(name, model, gpus, kind) for kind in kinds}
        found[name] = {kind: each for kind, each in cells.items() if each is not None}
    return found


def cell(cluster: str, model: str, gpus: int, kind: Kind) -> Cell | None:
    """Returns what fits on a number of GPUs of a cluster; None if nothing does."""
    asked = request(cluster, model, gpus, kind)
    tokens = longest(asked, _SIZES, _MULTIPLE) or 0
    tokens = longest_in_slices(asked, _SIZES, _MULTIPLE, above=tokens) or tokens
    if not tokens:
        return None
    usual = replace(asked, seq_len=min(tokens, _USUAL))
    best = search(usual, _SIZES).best
    if best.status != "ok":
        sliced = own_slices(usual, _SIZES)
        assert sliced is not None
        best = sliced.best
    assert best.tokens_per_gpu_per_second is not None
    return Cell(tokens, best.tokens_per_gpu_per_second)


def request(cluster: str, model: str, gpus: int, kind: Kind) -> EstimateRequest:
    """Returns the training of a cell. One GPU has its share of a node's host memory."""
    hardware = load_cluster(cluster)
    shape = replace(
        load_model(model), adapters=adapters_of(_LORA) if kind.lora else None, quantization=kind.quantization
    )
    return EstimateRequest(
        shape=shape,
        cluster=_alone(hardware) if gpus == 1 else hardware,
        constants=constants_of(cluster),
        method="memo",
        gpus=gpus,
        seq_len=_USUAL,
        batch_size=1,
        precision="bf16-true" if hardware.bf16 else "32-true",
    )


def _alone(cluster: Cluster) -> Cluster:
    return replace(
        cluster,
        devices_per_node=1,
        host_bytes=cluster.host_bytes // cluster.devices_per_node,
        host_bandwidth_shared=cluster.host_bandwidth_of(1),
    )


def _table(names: Mapping[str, str], cells: Mapping[str, Mapping[str, Cell]]) -> str:
    kinds = [kind.name for kind in KINDS if any(kind.name in found for found in cells.values())]
    rows = [
        [f"{names[name]}<br>{format_bytes(load_cluster(name).device_bytes)}", *(str(found.get(k, "-")) for k in kinds)]
        for name, found in cells.items()
        if found
    ]
    return table(["GPU", *kinds], rows)


def _smallest(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """The smallest GPU for each kind that trains 32K tokens."""
    found = []
    for kind in KINDS:
        fitting = [name for name, each in cells.items() if kind.name in each and each[kind.name].tokens >= _USUAL]
        if fitting:
            name = min(fitting, key=lambda name: load_cluster(name).device_bytes)
            found.append(f"{kind.name} from {ONE[name]} ({format_bytes(load_cluster(name).device_bytes)}) on")
        else:
            found.append(f"{kind.name} on none")
    return "; ".join(found)


def _length(tokens: int) -> str:
    """Writes a length with two digits, rounded down, in powers of 1024."""
    value, unit = (tokens / 2**20, "M") if tokens >= 2**20 else (tokens / 2**10, "K")
    digits = 1 if value < 10 else 0
    return f"{int(value * 10**digits) / 10**digits:.{digits}f}{unit}"


if __name__ == "__main__":
    sys.exit(main())
