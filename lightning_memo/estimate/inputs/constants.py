"""Calibrated constants: the fractions of the specified peaks that are reached, fitted to measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range, read_json

VERSION: Final = 2
_FOLDER: Final = Path(__file__).parent / "calibrated"
_DEFAULT: Final = "default"
_NAMES: Final = {"a800": "a800", "h100": "hopper", "h200": "hopper", "gh200": "hopper"}
"""Constants by the name of a cluster. The others have the default constants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Calibrated constants of a kind of machine and its software.

    Raises:
        ValueError: An efficiency is not between 0 and 1, or a number is negative.
    """

    source: str
    """Origin of the constants, as sentences for the user."""

    dense_efficiency: float
    """Fraction of the peak FLOP/s that matrix products reach."""

    attention_forward_efficiency: float
    """Fraction of the peak FLOP/s in the forward of causal attention, without masked pairs."""

    attention_backward_efficiency: float
    """Fraction of the peak FLOP/s in the backward of attention, which has 2.5 times the FLOPs of the forward."""

    memory_efficiency: float
    """Fraction of `Cluster.memory_bandwidth` that memory-bound operations reach."""

    host_efficiency: float
    """Fraction of `Cluster.host_bandwidth_of` that copies reach during computation."""

    merged_bytes_per_second: float
    """Rate at which ring attention merges partial attention outputs, one per step of the ring."""

    reorganised_bytes_per_second: float
    """Rate at which an allocator without a plan reorganizes fragmented skeletal activations."""

    device_share: float
    """Fraction of device memory that is usable next to the CUDA context, communication buffers and libraries."""

    host_share: float
    """Fraction of host memory that is usable for copies."""

    fragmentation: float
    """Memory lost to fragmentation without planned memory, as a fraction of the activations."""

    cache_growth: float
    """Free memory below which an allocator without a plan reorganizes, relative to the memory of the loss and a layer's
    backward."""

    program: Literal["lightning_memo", "published"]
    """Program that runs MEMO: this package, or the paper's, with full logits and few alphas (`published_alpha`)."""

    cluster: str = ""
    """Cluster to whose peaks the efficiencies are relative; empty for any cluster."""

    note: str = ""
    """Short note beside times that these constants give; empty if they were measured on the machine."""

    measurements: tuple[str, ...] = ()
    """Measurements that the constants were fitted to, each with its residual, or the origin of each constant."""

    version: int = VERSION

    def __post_init__(self) -> None:
        check_range(self, {})
        for name in (
            "dense_efficiency", "attention_forward_efficiency", "attention_backward_efficiency",
            "memory_efficiency", "host_efficiency", "device_share", "host_share",
        ):  # fmt: skip
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and at most 1")

    @property
    def published(self) -> bool:
        return self.program == "published"


def read_constants(path: Path) -> Constants:
    """Read constants from a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file does not contain constants. The message names the field.
    """
    try:
        return read_json(Constants, path.read_text(encoding="utf-8"), VERSION)
    except ValueError as error:
        raise ValueError(f"{path}: not a file of constants: {error}") from None


def constants_of(cluster: str) -> Constants:
    """Return the constants of a cluster by its name, or the default constants for other clusters."""
    return read_constants(_FOLDER / f"{_NAMES.get(cluster, _DEFAULT)}.json")
