"""What no data sheet tells: how much of the peaks is reached. Fitted, and kept in files that say how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range, read_json

VERSION: Final = 1
_FOLDER: Final = Path(__file__).parent / "calibrated"
_FOR_OTHERS: Final = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Calibrated numbers of a kind of machine and of the software on it.

    Raises:
        ValueError: an efficiency outside 0 to 1, or a negative number.
    """

    source: str
    """How the file was made."""

    dense_efficiency: float
    """Share of the peak FLOP/s in matrix products."""

    attention_forward_efficiency: float
    """The same in the forward of causal attention, masked pairs not counted."""

    attention_backward_efficiency: float
    """The same in its backward, which has 2.5 times the FLOPs."""

    host_efficiency: float
    """Share of `Cluster.host_bandwidth_of` that copies reach beside computing."""

    merged_bytes_per_second: float
    """Attention outputs that ring attention merges: what each of its steps adds to attention without a ring."""

    reorganised_bytes_per_second: float
    """Skeletal activations that an allocator without a plan moves to other segments, once they are fragmented."""

    device_share: float
    """Share of the device's memory that is left beside the context, communication buffers and libraries."""

    host_share: float
    """Share of the host's memory that copies can use."""

    fragmentation: float
    """What activations take beyond their bytes where memory is not planned, as a share of them."""

    cache_growth: float
    """Free memory below which an allocator without a plan has to reorganise, over what the loss and a layer's backward
    take."""

    program: Literal["lightning_memo", "published"]
    """What runs MEMO: this project, or the paper's program, with whole logits and few alphas (`published_alpha`)."""

    cluster: str = ""
    """Whose peaks they are shares of; empty: any."""

    measurements: tuple[str, ...] = ()
    """What they were fitted to, each with what is left unexplained."""

    version: int = VERSION

    def __post_init__(self) -> None:
        check_range(self, {})
        for name in (
            "dense_efficiency", "attention_forward_efficiency", "attention_backward_efficiency", "host_efficiency",
            "device_share", "host_share",
        ):  # fmt: skip
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and at most 1")

    @property
    def published(self) -> bool:
        return self.program == "published"


def read_constants(path: Path) -> Constants:
    """Constants from a file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no such file; one line names the field.
    """
    try:
        return read_json(Constants, path.read_text(encoding="utf-8"), VERSION)
    except ValueError as error:
        raise ValueError(f"{path}: not a file of constants: {error}") from None


def constants_of(cluster: str) -> Constants:
    """Those that are kept for a cluster by its name; for others, the ones that stand for all."""
    path = _FOLDER / f"{cluster}.json"
    return read_constants(path if path.is_file() else _FOLDER / f"{_FOR_OTHERS}.json")
