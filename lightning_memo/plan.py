"""The documents that travel from profiling to planning to execution.

They are plain data, saved as JSON with a version. A file may come from anywhere, so loading checks the type and the
value of every field and runs nothing from it. Pure: imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
import os
import types
import typing
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar

from lightning_memo.files import replacing

VERSION: Final = 1
_LONGEST_TEXT: Final = 2000
_Document = TypeVar("_Document")
HostBacked = Literal["none", "attention", "all"]
Schedule = Literal["layer", "nest", "slice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What a plan is valid for; a plan whose fingerprint differs from the run's must be made again."""

    model: str
    batch: int
    tokens: int
    precision: str
    device: str
    torch: str
    parallel: str

    def __post_init__(self) -> None:
        _check_range(self, {"batch": 1, "tokens": 1})


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """What the layers of one step cost: tuples have one entry per layer call, in the order of execution.

    The byte fields are the S_input, S_attn and S_others of MEMO, section 4.2, for all tokens of the batch.

    Raises:
        ValueError: tuples of different lengths, no layer call, a negative entry, or a bandwidth that is not positive.
    """

    batch: int
    tokens: int
    input_bytes: tuple[int, ...]
    """S_input: the layer's input."""

    attention_bytes: tuple[int, ...]
    """S_attn: the attention output and its log-sum-exp."""

    other_bytes: tuple[int, ...]
    """S_others: every other skeletal activation."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    """Backward without recomputation."""

    recompute_seconds: tuple[float, ...]
    """Recomputing all tokens, attention excluded."""

    outside_seconds: float
    """The step outside the layers: embedding, head, loss, optimizer."""

    offload_bytes_per_second: float
    """Device to host, measured with both directions busy."""

    prefetch_bytes_per_second: float
    """Host to device, measured with both directions busy."""

    fixed_device_bytes: int
    """On the device whatever the plan: parameters, gradients, optimizer state."""

    transient_device_bytes: int
    """Highest peak above fixed bytes and skeletal activations in the forward, the loss and the optimizer."""

    backward_device_bytes: int = 0
    """Highest peak in a layer's backward, above the same and above what the layer recomputed."""

    def __post_init__(self) -> None:
        _check_range(self, {"batch": 1, "tokens": 1})
        lengths = {name: len(value) for name, value in _items(self) if isinstance(value, tuple)}
        if len(set(lengths.values())) != 1 or not self.input_bytes:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"layer calls must be at least 1 and agree in number, but there are: {listed}")
        for name in ("offload_bytes_per_second", "prefetch_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be more than 0")

    @property
    def calls(self) -> int:
        """Number of layer calls in a step."""
        return len(self.input_bytes)

    @property
    def skeletal_bytes(self) -> int:
        """Bytes that plain training keeps on the device for the backward of all layers."""
        return sum(self.input_bytes) + sum(self.attention_bytes) + sum(self.other_bytes)

    def working_bytes(self, recomputed: float) -> int:
        """Highest peak of a step above fixed bytes and what a plan keeps or buffers.

        Args:
            recomputed: fraction of the tokens whose activations a layer recomputes at once.
        """
        largest = max(self.other_bytes)
        return max(self.transient_device_bytes, self.backward_device_bytes + math.ceil(recomputed * largest))

    def swapped_bytes(self, call: int, alpha: float) -> int:
        """Bytes that a layer call swaps: S_input + S_attn + alpha * S_others, rounded up.

        Args:
            call: index of the layer call.
            alpha: fraction of the tokens whose other skeletal activations are swapped.
        """
        return self.input_bytes[call] + self.attention_bytes[call] + math.ceil(alpha * self.other_bytes[call])


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What one process may use: all its device bytes, and host bytes for swapped activations."""

    device_bytes: int
    host_bytes: int

    def __post_init__(self) -> None:
        _check_range(self, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPlan:
    """What is swapped, and how the layers run.

    Raises:
        ValueError: alpha outside 0 to 1, or a negative count.
    """

    mode: Literal["memo", "plain"]
    """"plain": nothing is swapped or recomputed."""

    alpha: float
    """Fraction of the tokens whose skeletal activations are swapped; 0.0 in "plain"."""

    schedule: Schedule
    slice_tokens: int | None
    """Most tokens that run through a layer at once; None: no limit."""

    calls: int
    """Layer calls alive at once: n, or 2n when two forwards precede one backward."""

    slot_bytes: int
    """Bytes of a rounding buffer: what one layer call swaps, or one slice where slices swap for themselves."""

    host_backed: HostBacked = "none"
    """What lives on the host beside what is swapped: "attention": slices swap for themselves, and earlier keys and
    values come back for each of them; "all": their gradients too."""

    streamed_host_bytes: int = 0
    """Host bytes of all layer calls where slices swap for themselves."""

    gradient_host_bytes: int = 0
    """Those of them that are for gradients of keys and values."""

    staging_bytes: int = 0
    """Device bytes of the buffers through which keys and values pass."""

    def __post_init__(self) -> None:
        _check_range(self, {"calls": 1, "slice_tokens": 1})
        if self.alpha > 1.0:
            raise ValueError(f"alpha={self.alpha!r} must be from 0.0 to 1.0")

    @property
    def streamed(self) -> bool:
        """Whether slices swap for themselves, and earlier keys and values come from the host."""
        return self.host_backed != "none"

    @property
    def swapped_calls(self) -> int:
        """Layer calls whose activations leave the device: all but the last two (MEMO, section 4.2), if not streamed."""
        if self.mode == "plain":
            return 0
        return self.calls if self.streamed else max(self.calls - 2, 0)

    @property
    def host_bytes(self) -> int:
        """Host bytes that hold the swapped activations of all layer calls."""
        return self.streamed_host_bytes if self.streamed else self.swapped_calls * self.slot_bytes

    @property
    def buffer_bytes(self) -> int:
        """Device bytes of the two rounding buffers, and of those through which keys and values pass."""
        return 2 * self.slot_bytes + self.staging_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedBytes:
    """Memory of a plan by which slices swap for themselves, and keys and values pass the device in blocks."""

    slot: int
    """Of a rounding buffer: the largest slice."""

    host: int
    """Of all layer calls."""

    gradients: int
    """Those of them that are for gradients of keys and values."""

    staging: int
    """Of the device buffers through which keys and values pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePlacement:
    """The places of what one phase of a step requests, in order.

    Raises:
        ValueError: not one offset for each size, or a negative size.
    """

    name: str
    sizes: tuple[int, ...]
    """Bytes."""

    offsets: tuple[int, ...]
    """Bytes from the start of the arena; -1: the request is left to PyTorch's allocator."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.offsets):
            raise ValueError(f"{len(self.sizes)} sizes and {len(self.offsets)} offsets: one of each is needed")
        if min(self.sizes, default=0) < 0 or min(self.offsets, default=0) < -1:
            raise ValueError("a size is below 0, or an offset below -1")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlacement:
    """A place for every buffer of a training step (MEMO, section 4.3).

    Raises:
        ValueError: a request ends above the peak, or a number is out of range.
    """

    phases: tuple[PhasePlacement, ...]
    peak_bytes: int
    """Size of the arena."""

    lower_bound_bytes: int
    """No placement has a lower peak."""

    min_bytes: int
    """Smaller requests are left to PyTorch's allocator."""

    threads: int
    """Threads that computed: scratch memory depends on them."""

    method: str
    """What found it."""

    seconds: float
    """How long that took."""

    def __post_init__(self) -> None:
        _check_range(self, {"threads": 1})
        if not min(self.peak_bytes, self.requests) <= self.lower_bound_bytes <= self.peak_bytes:
            raise ValueError(
                f"lower_bound_bytes={self.lower_bound_bytes} must be from 1 to peak_bytes={self.peak_bytes}"
            )
        for phase in self.phases:
            for size, offset in zip(phase.sizes, phase.offsets, strict=True):
                if offset >= 0 and offset + size > self.peak_bytes:
                    raise ValueError(f"{phase.name}: {size} bytes at {offset} end above the peak of {self.peak_bytes}")

    @property
    def requests(self) -> int:
        """Requests that have a place."""
        return sum(offset >= 0 for phase in self.phases for offset in phase.offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A swap plan with everything it was made from, and the places of buffers once those are planned."""

    fingerprint: Fingerprint
    costs: LayerCosts
    budget: Budget
    swap: SwapPlan
    step_seconds: float
    """Expected time of a step."""

    reason: str
    """One sentence: why this alpha, or why plain."""

    placement: StepPlacement | None = None
    """None: buffers lie where PyTorch's allocator puts them."""

    version: int = VERSION

    def __post_init__(self) -> None:
        _check_range(self, {})
        if self.version != VERSION:
            raise ValueError(f"version={self.version} is not readable: this lightning_memo reads version {VERSION}")

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not a plan of this version; one line names the field.
        """
        try:
            content = json.loads(text, parse_constant=_refuse_constant)
            _check_version(content)
            return _decode_document(cls, content, "")
        except RecursionError:
            raise ValueError("nested too deeply") from None

    @property
    def device_bytes(self) -> int:
        """Device bytes that the plan needs: model state, the highest transient peak, and the activations kept."""
        return self.costs.fixed_device_bytes + self.working_set_bytes

    @property
    def working_set_bytes(self) -> int:
        """Device bytes beside the model state: the highest transient peak, and the activations kept."""
        if self.swap.mode == "plain":
            return self.costs.working_bytes(0.0) + self.costs.skeletal_bytes
        slice_share = min((self.swap.slice_tokens or self.costs.tokens) / self.costs.tokens, 1.0 - self.swap.alpha)
        return self.costs.working_bytes(slice_share) + self.swap.buffer_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a reader sees the old file or the new one, never a part.

        Args:
            path: the file; its folder is made if missing.
        """
        with replacing(Path(path)) as unfinished, unfinished.open("x", encoding="utf-8") as file:
            file.write(f"{self.to_json()}\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: the file.

        Raises:
            OSError: the file can't be read.
            ValueError: the file is not a plan of this version; one line names the file and the field.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: not a plan: {error}; delete it and let a run make it again") from None


def _items(document: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(document, field.name)) for field in fields(document)]


def _check_range(document: Any, least: dict[str, int]) -> None:
    """Refuse numbers below their least value (0 where `least` names none), NaN and infinity."""
    for name, value in _items(document):
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not least.get(name, 0) <= number < math.inf:
                raise ValueError(f"{name}={number!r} must be finite and at least {least.get(name, 0)}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a plan may hold")


def _check_version(content: Any) -> None:
    """Look at the version before the fields: another version may have other fields."""
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"version is {_brief(version)}, and this lightning_memo reads version {VERSION}")


def _brief(value: Any) -> str:
    return text if len(text := repr(value)) <= 60 else f"{text[:57]}..."


def _decode_document(kind: type[_Document], content: Any, where: str) -> _Document:
    if not isinstance(content, dict):
        raise ValueError(f"{where or 'the file'} is {_brief(content)}, expected an object")
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(kind)
    required = {field.name for field in fields(kind) if field.default is MISSING}  # type: ignore[arg-type]
    for name in sorted(required - content.keys()):
        raise ValueError(f"{prefix}{name} is missing")
    for name in content.keys() - hints.keys():
        raise ValueError(f"{prefix}{_brief(name)} is not a field of a plan")
    values = {name: _decode(hints[name], value, prefix + name) for name, value in content.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Turn a JSON value into what a field's annotation asks for, or refuse it."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return _decode_document(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(options[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is types.UnionType:
        return None if value is None else _decode(options[0], value, where)
    if origin is Literal and isinstance(value, str) and value in options:
        return value
    if kind in (int, float) and isinstance(value, (int, kind)) and not isinstance(value, bool) and abs(value) < 2**63:
        return kind(value)
    # Text ends up on terminals, where control characters could act.
    if kind is str and isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_TEXT:
        return value
    raise ValueError(f"{where} is {_brief(value)}, expected {_expected(kind)}")


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(f'"{option}"' for option in typing.get_args(kind))
    names = {int: "an integer", float: "a number", str: "printable text"}
    return names.get(kind, "a list")
