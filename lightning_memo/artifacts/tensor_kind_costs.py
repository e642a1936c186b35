"""What a layer call could store for its backward: costs kind by kind, and the budget.

A kind is one sort of tensor of a layer call. Tokens of it that have a place are stored there; the others are
recomputed in the backward.

- "input": the layer's input. All of its tokens have a place.
- "attention": the attention output and its log-sum-exp. Tokens without a place run the attention forward again; in
  causal attention the first tokens see the fewest keys, so these are the ones to drop.
- a product, by its name: the output of one matrix product. Where it is stored, recomputation reads it and goes on.
- "all": every other tensor that plain training saves (S_others of MEMO, section 4.2). Nothing of these tokens is
  recomputed, so it excludes products of the same tokens, and their attention output has a place.

MEMO's single alpha is one such plan: input and attention swapped, and "all" of a fraction alpha of the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Literal

from lightning_memo.artifacts.json_documents import check_range

Place = Literal["keep", "swap", "spill"]
"""On the device, in host memory, or on NVMe."""

PLACES: Final[tuple[Place, ...]] = ("keep", "swap", "spill")
INPUT: Final = "input"
ATTENTION: Final = "attention"
ALL: Final = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix product of a layer."""

    name: str
    size_bytes: int
    """Its output."""

    seconds: float
    """Computing it again."""

    def __post_init__(self) -> None:
        check_range(self, {})
        if self.name in (INPUT, ATTENTION, ALL):
            raise ValueError(f'a product is named "{self.name}", which is the name of another kind: give another name')


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCosts:
    """Bytes and seconds of one layer call, for all tokens of the batch.

    Raises:
        ValueError: a negative number, or two products of one name.
    """

    input_bytes: int
    attention_bytes: int
    other_bytes: int
    """Everything that "all" stores; products are part of it."""

    products: tuple[Product, ...]
    forward_seconds: float
    backward_seconds: float
    """Backward without recomputation."""

    attention_seconds: float
    """The attention forward alone."""

    elementwise_seconds: float
    """Recomputing what is neither attention nor a product."""

    window_tokens: int | None = None
    """Keys that a query sees at most, itself included; None: all up to its own. 1 stands for attention that is not
    causal, where all tokens cost the same."""

    def __post_init__(self) -> None:
        check_range(self, {"window_tokens": 1})
        names = [product.name for product in self.products]
        if len(set(names)) < len(names):
            raise ValueError(f"products must have different names, but they are: {', '.join(names)}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of all kinds."""
        return (INPUT, ATTENTION, ALL, *(product.name for product in self.products))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each of `kinds`."""
        own = self.input_bytes, self.attention_bytes, self.other_bytes
        return (*own, *(product.size_bytes for product in self.products))

    @property
    def recompute_seconds(self) -> float:
        """Recomputing all tokens, attention excluded."""
        return self.elementwise_seconds + sum(product.seconds for product in self.products)

    def attention_share(self, tokens: float, of: int) -> float:
        """Share of the attention forward that the first `tokens` of `of` tokens take: (tokens / of)^2 if causal."""
        return self._pairs(tokens, of) / self._pairs(of, of)

    def attention_slope(self, tokens: float, of: int) -> float:
        """Derivative of `attention_share` by `tokens`."""
        return min(tokens, self.window_tokens or of) / self._pairs(of, of)

    def _pairs(self, tokens: float, of: int) -> float:
        """Pairs of a query and a key among the first tokens."""
        full = min(tokens, self.window_tokens or of)
        return full * (tokens - full / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageCosts:
    """What the layer calls of a step cost. Calls that are alike share a class, and so will share a plan.

    Raises:
        ValueError: no layer call, a call of a class that does not exist, a negative number, or no bandwidth.
    """

    tokens: int
    classes: tuple[CallCosts, ...]
    call_classes: tuple[int, ...]
    """For each layer call, in the order of execution, its place in `classes`."""

    outside_seconds: float
    """The step outside the layers: embedding, head, loss, optimizer."""

    offload_bytes_per_second: float
    prefetch_bytes_per_second: float
    fixed_device_bytes: int
    """On the device whatever the plan: parameters, gradients, optimizer state."""

    transient_device_bytes: int
    """Highest peak above fixed bytes and what is stored."""

    def __post_init__(self) -> None:
        check_range(self, {"tokens": 1})
        if set(self.call_classes) != set(range(len(self.classes))) or not self.classes:
            raise ValueError(
                f"call_classes must name each of the {len(self.classes)} classes of layer calls, no others"
            )
        for name in ("offload_bytes_per_second", "prefetch_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be more than 0")

    @classmethod
    def of_calls(cls, calls: Sequence[CallCosts], **step: Any) -> StorageCosts:
        """Put layer calls of the same sizes into one class, with the median of their times.

        The first step is cold, and that falls on single calls; the median is what each takes once warm.

        Args:
            calls: as measured, in the order of execution.
            step: the other fields.
        """
        alike: dict[object, list[CallCosts]] = {}
        keys = [(call.kinds, call.sizes, call.window_tokens) for call in calls]
        for key, call in zip(keys, calls, strict=True):
            alike.setdefault(key, []).append(call)
        places = {key: place for place, key in enumerate(alike)}
        classes = tuple(_typical(members) for members in alike.values())
        return cls(classes=classes, call_classes=tuple(places[key] for key in keys), **step)

    @property
    def calls(self) -> int:
        """Number of layer calls in a step."""
        return len(self.call_classes)

    @property
    def class_calls(self) -> tuple[int, ...]:
        """Layer calls of each class."""
        return tuple(self.call_classes.count(number) for number in range(len(self.classes)))

    @property
    def class_copies(self) -> tuple[int, ...]:
        """Layer calls of each class that leave the device: the last two of the step never do (MEMO, section 4.2)."""
        leaving = self.call_classes[:-2]
        return tuple(leaving.count(number) for number in range(len(self.classes)))

    @property
    def pairs(self) -> Counter[tuple[int, int]]:
        """How often bytes of a call of one class are copied while a call of another class, the next one, computes."""
        return Counter(zip(self.call_classes[:-2], self.call_classes[1:], strict=False))


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
