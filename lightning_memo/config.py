"""The user's settings as one frozen object, which refuses values and combinations that are not supported.

This module imports neither torch nor Lightning.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from lightning_memo.utils.units import parse_bytes, read_length

ATTENTIONS: Final = ("auto", "sdpa", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4", "transformer_engine")
PRECISIONS: Final = ("32-true", "64-true", "bf16-true", "bf16-mixed")
STREAMS: Final = ("auto", "none", "attention", "hidden", "model")
ZERO_COMMUNICATION: Final = ("none", "int8", "int4")
PIPELINE_SCHEDULES: Final = ("1f1b", "zero_bubble")
# The values with which plans may name a place for each kind of tensor.
_LEAST_BYTES: Final = 4096
"""Of a memory. A smaller number is one of GiB whose unit was forgotten."""
_NEEDED_BY_KINDS: Final[dict[str, tuple[Any, ...]]] = {
    "alpha": ("auto",),
    "slice_tokens": ("auto",),
    "stream_from_host": ("auto", "none"),
}

# The values of settings beside which TransformerEngine's modules compute in FP8; last what others of them need.
_ALLOWED_IN_FP8: Final[dict[str, tuple[Any, ...]]] = {
    "context_parallel_size": (1,),
    "tensor_parallel_size": (1,),
    "expert_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "stream_from_host": ("auto", "none"),
    "slice_tokens": ("auto",),
}

# The settings that do nothing without repeated layers, or divide these.
_FOR_LAYERS: Final = (
    "context_parallel_size", "tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size",
    "alpha", "device_memory", "host_memory", "disk_path", "slice_tokens", "stream_from_host",
    "layers", "attention", "plan",
)  # fmt: skip

# The settings of pipelines, and their defaults.
_PIPELINED = {"virtual_pipeline_size": 1, "pipeline_schedule": "1f1b", "pipeline_layers": None, "micro_batch_size": 1}

# The values of settings beside which a pipeline runs.
_ALLOWED_IN_PIPELINES: Final[dict[str, tuple[Any, ...]]] = {
    "offload_state": (False,),
    "slice_tokens": ("auto",),
    "stream_from_host": ("auto", "none"),
    "disk_path": (None,),
    "plan": (None,),
}

# Settings of earlier versions, and what to do instead.
GONE: Final = {
    "spill_path": "set disk_path to the same folder",
    "spill_memory": "set disk_memory to the same size",
    "context_parallel_method": "set ulysses_size to 1 (ring), context_parallel_size (ulysses) or a divisor (usp)",
    "data_parallel_size": "leave it out; it is the number of processes divided by the other sizes",
    "loss_parallel": "leave it out; logits are divided wherever tensor-parallel processes share the head",
    "host_backed": 'set stream_from_host to the same value, or to "hidden" for "all"',
    "schedule": 'for "slice", set stream_from_host="model"; otherwise leave it out',
    "storage": "leave it out; for a plan with a single alpha, give alpha, like alpha=0.5",
    "swap_precision": "leave it out; activations are swapped as they are",
    "check_restored": "leave it out; for errors of memory, see dmesg and nvidia-smi -q -d ECC",
}

_Init = TypeVar("_Init", bound=Callable[..., None])


def check_names(of: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse names that are no settings.

    Args:
        of: The class that has the settings.
        given: The given settings.
        known: Names of all settings.

    Raises:
        ValueError: A setting of an earlier version is given.
        TypeError: Another name is given.
    """
    for name in (name for name in given if name not in known):
        what = f"{name}={given[name]!r} is no setting"
        if name in GONE:
            raise ValueError(f"{what} any more: {GONE[name]}")
        near = difflib.get_close_matches(name, known, n=1)
        raise TypeError(f"{what} of {of}: " + (f"did you mean {near[0]}?" if near else f"give {', '.join(known)}"))


def checking_names(init: _Init) -> _Init:
    """Decorate a constructor that takes the settings: names that are no settings are refused in one line."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        check_names(init.__qualname__.partition(".")[0], kwargs, known)
        init(*args, **kwargs)

    return checked  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoConfig:
    """The checked settings of `MemoStrategy`, whose docstring describes each of them, in the same groups.

    Raises:
        ValueError: A setting is not allowed. The message says in one line what was given, what is allowed and what to
            do.
    """

    # parallelism
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_size: int = 1
    pipeline_schedule: str = "1f1b"
    pipeline_layers: Sequence[int] | None = None
    micro_batch_size: int = 1
    zero_stage: int = 0
    zero_shard_size: int | None = None
    zero_communication: str = "none"
    ulysses_size: int | str = 1
    sequence_parallel: bool = True
    tensor_parallel_plan: Mapping[str, str] | None = None

    # memory
    alpha: float | str = "auto"
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    disk_path: str | None = None
    disk_memory: int | str | None = None
    offload_state: bool = False
    plan_memory: bool = False
    plan: str | None = None

    # slices
    slice_tokens: int | str = "auto"
    stream_from_host: str = "auto"
    loss_chunk_tokens: int | str | None = "auto"

    # model
    layers: str | Sequence[str] | None = None
    attention: str = "auto"
    fused_kernels: bool = True

    # debug
    check_slices: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> MemoConfig:
        """The settings among the given values, and defaults for the others. Paths may be given as `Path`.

        Args:
            given: Values by name. Names that are no settings are ignored.

        Raises:
            ValueError: A setting is not allowed.
        """
        settings = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        paths = {name: str(settings[name]) for name in ("plan", "disk_path") if settings.get(name) is not None}
        return cls(**settings | paths)

    def __post_init__(self) -> None:
        self._check_parallelism()
        _check_choice("attention", self.attention, ATTENTIONS)
        _check_alpha(self.alpha)
        self._check_stream()
        self._read_tokens("slice_tokens", ', or "auto"')
        if self.loss_chunk_tokens is not None:
            self._read_tokens("loss_chunk_tokens", ', "auto", or None for all of them')
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise ValueError(f"{field.name}={getattr(self, field.name)!r} is not a switch: give True or False")
        _check_size("device_memory", self.device_memory)
        _check_size("host_memory", self.host_memory)
        _check_size("disk_memory", self.disk_memory)
        self._check_spill()
        _check_layers(self.layers)
        _check_name("plan", self.plan, 'the path of a saved plan, like "plan.json"')

    def _read_tokens(self, name: str, or_else: str) -> None:
        if (given := getattr(self, name)) != "auto":
            object.__setattr__(self, name, read_length(name, given, or_else))

    def _check_parallelism(self) -> None:
        _check_count("context_parallel_size", self.context_parallel_size)
        _check_count("tensor_parallel_size", self.tensor_parallel_size)
        _check_count("expert_parallel_size", self.expert_parallel_size)
        if type(self.zero_stage) is not int or not 0 <= self.zero_stage <= 3:
            raise ValueError(f"zero_stage={self.zero_stage!r} is not known: give 0, 1, 2 or 3")
        if self.zero_shard_size is not None:
            _check_count("zero_shard_size", self.zero_shard_size, ", or None for all processes")
            if self.zero_shard_size == 1:
                raise ValueError(
                    "zero_shard_size=1 keeps the weights whole between forward and backward: set zero_stage=2, which "
                    "does that, or give at least 2"
                )
            if self.zero_stage != 3:
                raise ValueError(
                    f"zero_shard_size={self.zero_shard_size} is for weights that are gathered again for the backward, "
                    f"and zero_stage={self.zero_stage} keeps them: set zero_stage=3, or zero_shard_size=None"
                )
        self._check_pipeline()
        _check_choice("zero_communication", self.zero_communication, ZERO_COMMUNICATION)
        if self.zero_communication != "none" and self.zero_stage == 0:
            raise ValueError(
                f'zero_communication="{self.zero_communication}" needs shards, and zero_stage=0 has none: set '
                'zero_stage to 1, 2 or 3, or zero_communication="none"'
            )
        if self.ulysses_size != "auto":
            _check_count("ulysses_size", self.ulysses_size, ', or "auto"')
            if self.context_parallel_size % int(self.ulysses_size):
                raise ValueError(
                    f"ulysses_size={self.ulysses_size} does not divide "
                    f"context_parallel_size={self.context_parallel_size}: give a divisor of it"
                )

    def _check_pipeline(self) -> None:
        _check_count("pipeline_parallel_size", self.pipeline_parallel_size)
        _check_choice("pipeline_schedule", self.pipeline_schedule, PIPELINE_SCHEDULES)
        _check_count("virtual_pipeline_size", self.virtual_pipeline_size, of="blocks of layers")
        _check_count("micro_batch_size", self.micro_batch_size, of="rows")
        layers = self.pipeline_layers
        counted = isinstance(layers, Sequence) and all(type(number) is int and number >= 1 for number in layers)
        if layers is not None and (isinstance(layers, str) or not counted):
            raise ValueError(
                f"pipeline_layers={layers!r} is not a list of numbers of layers: give a number of at least 1 for each "
                "stage, like [17, 15], or None"
            )
        stages, every = self.pipeline_parallel_size, self.pipeline_parallel_size * self.virtual_pipeline_size
        if stages == 1:
            for name, default in _PIPELINED.items():
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is for a pipeline, and pipeline_parallel_size=1 is none: set "
                        f"pipeline_parallel_size, or {name}={default!r}"
                    )
            return
        if layers is not None and len(layers) != every:
            raise ValueError(
                f"pipeline_layers={list(layers)} contradicts pipeline_parallel_size={stages} x virtual_pipeline_size="
                f"{self.virtual_pipeline_size}: give {every} numbers"
            )
        if name := self._first_other(_ALLOWED_IN_PIPELINES):
            raise ValueError(
                f"{name}={getattr(self, name)!r} is not supported with pipeline_parallel_size={stages}: set {name}="
                f"{_ALLOWED_IN_PIPELINES[name][0]!r}, or pipeline_parallel_size=1"
            )
        if self.pipeline_schedule == "zero_bubble" and self.zero_stage > 1:
            raise ValueError(
                f'pipeline_schedule="zero_bubble" is for zero_stage=0 and 1, not {self.zero_stage}: set 1, or "1f1b"'
            )

    def _first_other(self, allowed: Mapping[str, tuple[Any, ...]]) -> str:
        """The name of the first setting whose value is not among those that are allowed; empty if there is none."""
        return next((name for name, values in allowed.items() if getattr(self, name) not in values), "")

    @property
    def why_not_fp8(self) -> str:
        """With which setting TransformerEngine's modules do not compute in FP8, and what to set; empty if they do."""
        name = self._first_other(_ALLOWED_IN_FP8)
        return f"{name}={getattr(self, name)!r}: set {name}={_ALLOWED_IN_FP8[name][0]!r}" if name else ""

    def _check_stream(self) -> None:
        _check_choice("stream_from_host", self.stream_from_host, STREAMS)
        if self.streams and self.slice_tokens == "auto":
            raise ValueError(
                f'stream_from_host="{self.stream_from_host}" needs slices: give slice_tokens, the most tokens that a '
                "layer may touch at once, like slice_tokens=8192"
            )
        if self.stream_from_host != "model":
            return
        for name, most in (("context_parallel_size", 1), ("tensor_parallel_size", 1), ("zero_stage", 2)):
            if getattr(self, name) > most:
                raise ValueError(
                    f'stream_from_host="model" contradicts {name}={getattr(self, name)}: every slice would send '
                    f'weights or activations of every layer; set {name}={most}, or stream_from_host="hidden"'
                )

    @property
    def streams(self) -> bool:
        """Whether tensors are to stream from the host for certain."""
        return self.stream_from_host not in ("auto", "none")

    @property
    def needs_layers(self) -> bool:
        """Whether a setting is given that only repeated layers can follow."""
        defaults = {field.name: field.default for field in fields(self)}
        chunks = self.loss_chunk_tokens not in ("auto", None)
        return chunks or any(getattr(self, name) != defaults[name] for name in _FOR_LAYERS)

    @property
    def plans_kinds(self) -> bool:
        """Whether plans name a place for each kind of tensor, if there is one stack of layers that can be cut."""
        return not self._first_other(_NEEDED_BY_KINDS)

    def _check_spill(self) -> None:
        _check_name("disk_path", self.disk_path, 'a folder on a local disk, like "/nvme/activations"')
        if self.disk_path is None and self.disk_memory is not None:
            raise ValueError(f"disk_memory={self.disk_memory!r} is for a disk: give disk_path, the folder there")
        moves_slices = self.slice_tokens != "auto" and self.stream_from_host != "none"
        if self.disk_path is not None and moves_slices:
            raise ValueError(
                f'disk_path="{self.disk_path}" needs activations that leave the device by whole layers, and '
                f"stream_from_host={self.stream_from_host!r} with slice_tokens={self.slice_tokens!r} moves slices: set "
                'stream_from_host="none", or leave disk_path out'
            )

    @property
    def one_stack(self) -> bool:
        """Whether only one stack of layers can be swapped: all layers then get the same tokens in the same slices."""
        sliced = self.slice_tokens != "auto" and self.stream_from_host != "none"
        divided = max(self.context_parallel_size, self.tensor_parallel_size, self.pipeline_parallel_size) > 1
        return sliced or divided

    @property
    def device_memory_bytes(self) -> int | None:
        """Device budget in bytes; `None` if it is to be measured."""
        return None if self.device_memory is None else parse_bytes(self.device_memory)

    @property
    def disk_memory_bytes(self) -> int | None:
        """Disk budget in bytes; `None` if it is to be measured."""
        return None if self.disk_memory is None else parse_bytes(self.disk_memory)

    @property
    def host_memory_bytes(self) -> int | None:
        """Host budget in bytes; `None` if it is to be measured."""
        return None if self.host_memory is None else parse_bytes(self.host_memory)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_count(name: str, value: Any, or_else: str = "", of: str = "processes") -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} is not a number of {of}: give an integer of at least 1{or_else}")


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(f'"{choice}"' for choice in allowed)
        raise ValueError(f"{name}={value!r} is not known: give one of {choices}")


def _check_alpha(alpha: Any) -> None:
    if alpha == "auto" or (_is_number(alpha) and math.isfinite(alpha) and 0.0 <= alpha <= 1.0):
        return
    raise ValueError(f'alpha={alpha!r} is not a fraction of the tokens: give a number from 0.0 to 1.0, or "auto"')


def _check_size(name: str, size: Any) -> None:
    try:
        if size is not None and parse_bytes(size) < _LEAST_BYTES and str(size).strip().isdecimal():
            raise ValueError(f'{size!r} is a size in bytes: did you mean "{str(size).strip()}GiB"? Give that')
    except ValueError as error:
        raise ValueError(f"{name}={error}, or None to measure what is free") from None


def _check_layers(layers: Any) -> None:
    several = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
    what = 'the dotted name of the ModuleList of layers, like "model.layers", or a list of such names'
    for name in [name or "" for name in layers] if several else (layers,):
        _check_name("layers", name, what)


def _check_name(name: str, value: Any, what: str) -> None:
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"{name}={value!r} is not usable: give {what}, or None")
