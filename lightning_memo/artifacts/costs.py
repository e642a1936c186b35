"""Costs of a step: of its layer calls as wholes, and of storing or recomputing each kind of tensor of a call.

Each kind of tensor may be stored for some tokens; for the other tokens it is recomputed in the backward. The kinds are

- "input": the layer's input. It is stored for all tokens.
- "attention": the attention output and its log-sum-exp. Tokens for which it is not stored run the attention forward
  again. In causal attention the first tokens attend to the fewest keys and are therefore the ones to recompute.
- a product, by its name: the output of one matrix product. Recomputation of the layer reads it where it is stored.
- "other": every other tensor that plain training saves (S_others of MEMO, section 4.2). Nothing is recomputed for these
  tokens. A token is therefore stored either in "other" or in products, and in "other" only with its attention output.

MEMO's single alpha is a special case: input and attention are swapped for all tokens, and "other" for a fraction alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Literal, TypeVar

from lightning_memo.artifacts.json_documents import check_range, items

_RESIDENT_CALLS: Final = 2
_T = TypeVar("_T")


def resident_calls(calls: int, in_flight: int | None) -> int:
    """Number of last layer calls whose activations never leave the device.

    Usually two: their backward comes first (MEMO, section 4.1). With several micro-batches in flight, the backward of
    another one comes between, and takes their rounding buffers.

    Args:
        calls: Number of layer calls that are alive at once.
        in_flight: Number of micro-batches that they belong to; None without a pipeline.
    """
    return min(_RESIDENT_CALLS, calls) if in_flight in (None, 1) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Bytes and seconds of the layers of one step. Tuples have one entry per layer call, in execution order.

    The byte fields are S_input, S_attn and S_others of MEMO, section 4.2, for all tokens of the batch.

    Raises:
        ValueError: The tuples differ in length or are empty, an entry is negative, or a bandwidth is not positive.
    """

    batch: int
    """Sequences of the batch."""

    tokens: int
    """Tokens of a sequence."""

    input_bytes: tuple[int, ...]
    """S_input: bytes of the layer's input."""

    attention_bytes: tuple[int, ...]
    """S_attn: bytes of the attention output and its log-sum-exp."""

    other_bytes: tuple[int, ...]
    """S_others: bytes of every other skeletal activation."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    """Seconds of the backward without recomputation."""

    recompute_seconds: tuple[float, ...]
    """Seconds to recompute all tokens, attention excluded."""

    outside_seconds: float
    """Seconds of the step outside the layers: embedding, head, loss, optimizer."""

    offload_bytes_per_second: float
    """Bandwidth from device to host, measured with both directions busy."""

    prefetch_bytes_per_second: float
    """Bandwidth from host to device, measured with both directions busy."""

    fixed_device_bytes: int
    """Device bytes that do not depend on the plan: parameters, gradients, optimizer state."""

    transient_device_bytes: int
    """Highest peak in forward, loss and optimizer above the fixed bytes and the skeletal activations."""

    backward_device_bytes: int = 0
    """Highest peak in a layer's backward above the fixed bytes, the skeletal and the recomputed activations."""

    disk_write_bytes_per_second: float = 0.0
    """Bandwidth from device to disk, measured with both directions busy; 0 if there is no disk."""

    disk_read_bytes_per_second: float = 0.0
    """Bandwidth from disk to device, measured with both directions busy."""

    launch_seconds: float = 0.0
    """Seconds that the host takes to launch the forward of a layer call, or of one of its slices."""

    in_flight: int | None = None
    """On a stage of a pipeline, number of micro-batches whose layer calls these are: forwards of later ones run before
    the backward of the first one. `outside_seconds` is 0 then. None without a pipeline."""

    def __post_init__(self) -> None:
        check_range(self, {"batch": 1, "tokens": 1, "in_flight": 1})
        lengths = {name: len(value) for name, value in items(self) if isinstance(value, tuple)}
        if len(set(lengths.values())) != 1 or not self.input_bytes:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"the numbers of layer calls must be equal and at least 1, but are: {listed}")
        for name in ("offload_bytes_per_second", "prefetch_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be greater than 0")

    @property
    def calls(self) -> int:
        """Number of layer calls in a step."""
        return len(self.input_bytes)

    @property
    def swapped_calls(self) -> int:
        """Number of layer calls whose activations leave the device."""
        return self.calls - resident_calls(self.calls, self.in_flight)

    @property
    def skeletal_bytes(self) -> int:
        """Device bytes of the activations that plain training keeps for the backward of all layers."""
        return sum(self.input_bytes) + sum(self.attention_bytes) + sum(self.other_bytes)

    def working_bytes(self, recomputed: float) -> int:
        """Highest peak of a step above the fixed bytes and the plan's buffers and kept activations.

        Args:
            recomputed: Fraction of the tokens whose activations a layer recomputes at once.
        """
        return self.working_bytes_with(math.ceil(recomputed * max(self.other_bytes)))

    def working_bytes_with(self, recomputed_bytes: int) -> int:
        """`working_bytes`, given the largest number of bytes that a layer recomputes at once."""
        return max(self.transient_device_bytes, self.backward_device_bytes + recomputed_bytes)

    def swapped_bytes(self, call: int, alpha: float) -> int:
        """Bytes that a layer call swaps: S_input + S_attn + alpha * S_others, rounded up.

        Args:
            call: Index of the layer call.
            alpha: Fraction of the tokens whose other skeletal activations are swapped.
        """
        return self.input_bytes[call] + self.attention_bytes[call] + math.ceil(alpha * self.other_bytes[call])


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Memory that one process may use: all its device bytes, and host and disk bytes for swapped activations."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        check_range(self, {})


Place = Literal["device", "host", "disk"]
"""Where a tensor is stored: on the device, in host memory, or on a disk."""

PLACES: Final[tuple[Place, ...]] = ("device", "host", "disk")
MOVED: Final[tuple[Place, ...]] = ("host", "disk")
"""The places for which tensors leave the device, through a rounding buffer."""
INPUT: Final = "input"
ATTENTION: Final = "attention"
OTHER: Final = "other"
_NO_PRODUCTS: Final = {INPUT, ATTENTION, OTHER, "out", "lse", "query", "key", "value", "shared", "state"}


def is_product(kind: str) -> bool:
    """Return whether a kind of tensor is the output of a matrix product, which has the name that the layer gives it."""
    return kind not in _NO_PRODUCTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product of a layer."""

    name: str
    size_bytes: int
    """Bytes of its output."""

    seconds: float
    """Seconds to recompute it."""

    def __post_init__(self) -> None:
        check_range(self, {})
        if not is_product(self.name):
            raise ValueError(
                f'a product is named "{self.name}", which is the name of another kind of tensor: give it another name'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCosts:
    """Bytes and seconds of one layer call, for all tokens of the batch.

    Raises:
        ValueError: A number is negative, or two products have the same name.
    """

    input_bytes: int
    attention_bytes: int
    other_bytes: int
    """Bytes of all tensors of the kind "other", which include the products."""

    products: tuple[Product, ...]
    forward_seconds: float
    backward_seconds: float
    """Seconds of the backward without recomputation."""

    attention_seconds: float
    """Seconds of the attention forward alone."""

    elementwise_seconds: float
    """Seconds to recompute everything except attention and products. Processes that share experts send tokens again."""

    window_tokens: int | None = None
    """Maximum number of keys that a query attends to, itself included; None for all up to its own. 1 stands for
    attention that is not causal, in which all tokens cost the same."""

    def __post_init__(self) -> None:
        check_range(self, {"window_tokens": 1})
        names = [product.name for product in self.products]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f'products must have different names, but several are named "{twice}"')

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of all kinds of tensors."""
        return (INPUT, ATTENTION, OTHER, *(product.name for product in self.products))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each kind of tensor, in the order of `kinds`."""
        own = self.input_bytes, self.attention_bytes, self.other_bytes
        return (*own, *(product.size_bytes for product in self.products))

    @property
    def recompute_seconds(self) -> float:
        """Seconds to recompute all tokens, attention excluded."""
        return self.elementwise_seconds + sum(product.seconds for product in self.products)

    def attention_share(self, tokens: float, of: int) -> float:
        """Share of the attention forward that the first `tokens` of `of` tokens take; (tokens / of)^2 if causal."""
        return self._pairs(tokens, of) / self._pairs(of, of)

    def attention_slope(self, tokens: float, of: int) -> float:
        """Derivative of `attention_share` with respect to `tokens`."""
        return min(tokens, self.window_tokens or of) / self._pairs(of, of)

    def _pairs(self, tokens: float, of: int) -> float:
        """Number of pairs of a query and a key among the first tokens."""
        full = min(tokens, self.window_tokens or of)
        return full * (tokens - full / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageCosts:
    """Bytes and seconds of the layer calls of a step. Equal calls share a class, and therefore a plan.

    Raises:
        ValueError: There is no layer call, a call's class does not exist, a number is negative, or a bandwidth is 0.
    """

    tokens: int
    """Tokens of a layer call."""

    classes: tuple[CallCosts, ...]
    call_classes: tuple[int, ...]
    """Index into `classes` of each layer call, in execution order."""

    outside_seconds: float
    """Seconds of the step outside the layers: embedding, head, loss, optimizer."""

    offload_bytes_per_second: float
    prefetch_bytes_per_second: float
    fixed_device_bytes: int
    """Device bytes that do not depend on the plan: parameters, gradients, optimizer state."""

    transient_device_bytes: int
    """Highest peak above the fixed bytes and the stored tensors, if layers recompute all that they do not have to
    store."""

    recomputed_device_bytes: int = 0
    """Part of `transient_device_bytes` for tensors that layers recompute: it is not needed if they are stored."""

    disk_write_bytes_per_second: float = 0.0
    """Bandwidth from device to disk; 0 if there is no disk."""

    disk_read_bytes_per_second: float = 0.0
    launch_seconds: float = 0.0
    """Seconds that the host takes to launch the forward of a layer call, or of one of its slices."""

    in_flight: int | None = None
    """On a stage of a pipeline, number of micro-batches whose layer calls these are; see `LayerCosts`."""

    def __post_init__(self) -> None:
        check_range(self, {"tokens": 1, "in_flight": 1})
        if set(self.call_classes) != set(range(len(self.classes))) or not self.classes:
            raise ValueError(
                f"call_classes must refer to each of the {len(self.classes)} classes of layer calls, and to no others"
            )
        largest = min(self.transient_device_bytes, max(call.other_bytes for call in self.classes))
        if self.recomputed_device_bytes > largest:
            raise ValueError(
                f"recomputed_device_bytes={self.recomputed_device_bytes} must be at most {largest}: it is a part of "
                "transient_device_bytes, and of a layer's other_bytes"
            )
        for name in ("offload_bytes_per_second", "prefetch_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be greater than 0")

    @classmethod
    def of_calls(cls, calls: Sequence[CallCosts], **step: Any) -> StorageCosts:
        """Group layer calls of the same sizes into classes, with the median of their times.

        In a first step single calls are slow. The median is the time of each call once warm.

        Args:
            calls: Measured costs of the layer calls, in execution order.
            step: The other fields.
        """
        alike: dict[object, list[CallCosts]] = {}
        keys = [(call.kinds, call.sizes, call.window_tokens) for call in calls]
        for key, call in zip(keys, calls, strict=True):
            alike.setdefault(key, []).append(call)
        places = {key: place for place, key in enumerate(alike)}
        classes = tuple(_typical(members) for members in alike.values())
        return cls(classes=classes, call_classes=tuple(places[key] for key in keys), **step)

    @classmethod
    def of_step(cls, calls: Sequence[CallCosts], step: LayerCosts) -> StorageCosts:
        """Group the layer calls of a step, see `of_calls`.

        Args:
            calls: Costs of the layer calls, in execution order.
            step: All other costs of the step.
        """
        return cls.of_calls(
            calls,
            tokens=step.tokens,
            outside_seconds=step.outside_seconds,
            offload_bytes_per_second=step.offload_bytes_per_second,
            prefetch_bytes_per_second=step.prefetch_bytes_per_second,
            fixed_device_bytes=step.fixed_device_bytes,
            transient_device_bytes=step.working_bytes(1.0),
            recomputed_device_bytes=step.working_bytes(1.0) - step.working_bytes(0.0),
            disk_write_bytes_per_second=step.disk_write_bytes_per_second,
            disk_read_bytes_per_second=step.disk_read_bytes_per_second,
            launch_seconds=step.launch_seconds,
            in_flight=step.in_flight,
        )

    @classmethod
    def of_layers(cls, step: LayerCosts) -> StorageCosts:
        """Return the costs of a step of whose recomputation only the sum is known, without that of attention.

        Args:
            step: All costs of the step.
        """
        calls = [
            CallCosts(
                input_bytes=step.input_bytes[n],
                attention_bytes=step.attention_bytes[n],
                other_bytes=step.other_bytes[n],
                products=(),
                forward_seconds=step.forward_seconds[n],
                backward_seconds=step.backward_seconds[n],
                attention_seconds=0.0,
                elementwise_seconds=step.recompute_seconds[n],
            )
            for n in range(step.calls)
        ]
        return cls.of_step(calls, step)

    def of_micro_batches(self, in_flight: int) -> StorageCosts:
        """Return the costs of several micro-batches in flight on a stage of a pipeline.

        Args:
            in_flight: Number of micro-batches, whose layer calls follow one another.
        """
        seconds = in_flight * self.outside_seconds
        return replace(self, call_classes=self.call_classes * in_flight, in_flight=in_flight, outside_seconds=seconds)

    def of_plan(self, call_classes: Sequence[int]) -> StorageCosts:
        """Return the same costs with the classes of a plan, which has several plans for the calls of a class.

        Args:
            call_classes: The class in the plan of each layer call; calls of one class are of one class here, too.
        """
        firsts = [list(call_classes).index(number) for number in range(max(call_classes) + 1)]
        classes = tuple(self.classes[self.call_classes[first]] for first in firsts)
        return replace(self, classes=classes, call_classes=tuple(call_classes))

    @property
    def calls(self) -> int:
        """Number of layer calls in a step."""
        return len(self.call_classes)

    def working_bytes_with(self, recomputed_bytes: int) -> int:
        """Highest peak above the fixed bytes and the stored tensors.

        Args:
            recomputed_bytes: Largest number of bytes that a layer recomputes at once.
        """
        less = max(call.other_bytes for call in self.classes) - recomputed_bytes
        return self.transient_device_bytes - min(less, self.recomputed_device_bytes)

    @property
    def class_calls(self) -> tuple[int, ...]:
        """Number of layer calls of each class."""
        return tuple(self.call_classes.count(number) for number in range(len(self.classes)))

    @property
    def swapped_calls(self) -> int:
        """Number of layer calls that leave the device, which are the first ones."""
        return self.calls - resident_calls(self.calls, self.in_flight)

    @property
    def class_copies(self) -> tuple[int, ...]:
        """Number of layer calls of each class that leave the device."""
        leaving = self.call_classes[: self.swapped_calls]
        return tuple(leaving.count(number) for number in range(len(self.classes)))

    def pairs(self, of_calls: Sequence[_T]) -> list[tuple[_T, _T]]:
        """Return the sorts of each call that is copied and of the next call, which computes meanwhile.

        If all calls leave, the first call of a later micro-batch follows the last one.

        Args:
            of_calls: The sort of each layer call, such as its class.
        """
        leaving, following = of_calls[: self.swapped_calls], [*of_calls[1:], of_calls[0]]
        return list(zip(leaving, following, strict=False))

    def unpaired(self, of_calls: Sequence[_T]) -> tuple[_T, ...]:
        """Return the sorts of the calls that compute while nothing is copied: of the first and the last one, or none.

        Args:
            of_calls: The sort of each layer call.
        """
        return () if self.swapped_calls == self.calls else tuple(of_calls[n] for n in {0, self.calls - 1})


def _typical(calls: Sequence[CallCosts]) -> CallCosts:
    products = zip(*(call.products for call in calls), strict=True)
    return replace(
        calls[0],
        products=tuple(replace(alike[0], seconds=median(product.seconds for product in alike)) for alike in products),
        forward_seconds=median(call.forward_seconds for call in calls),
        backward_seconds=median(call.backward_seconds for call in calls),
        attention_seconds=median(call.attention_seconds for call in calls),
        elementwise_seconds=median(call.elementwise_seconds for call in calls),
    )
