"""State that a layer's code reaches by names is not restored: layers that depend on it are refused in one line.

Names are global variables, those of closures and classes, slots, and what functions hold. State among the attributes of
modules is restored; see also `test_layer_state.py` and `test_layers_with_state.py`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures.acting_blocks import block_that, home
from support.attention.recorded_training import Recording, blocks, compare
from support.families import PlainBlock, PlainModel, make_batch
from support.markers.slow import slow_if
from support.modes import BY_KIND
from support.trainer_harness import batches, fit
from torch import Tensor, nn

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

PLANS: list[dict[str, Any]] = [{"alpha": 0.0}, {"alpha": 0.5}, {"test_mode": BY_KIND, "device_memory": "64KiB"}]
COUNT = 0
LIST, SPACE = [0], SimpleNamespace(inner=SimpleNamespace(count=0))
NUMBERED: dict[int, int] = {}
TABLES: dict[int, Any] = {}
TABLE: Tensor | None = None
NESTED: dict[str, dict[int, Any]] = {}
BY_DEFAULT: dict[str, dict[int, Tensor]] = defaultdict(dict)


@pytest.fixture(autouse=True)
def _empty() -> None:
    global COUNT, TABLE
    COUNT, TABLE = 0, None
    LIST[:] = [0]
    SPACE.inner.count = 0
    for table in (NUMBERED, TABLES, NESTED, BY_DEFAULT, SHARED):
        table.clear()


# ---- what a layer counts with


class First(PlainBlock):
    """Multiplies by a number before anything else, so that a recomputation does so, too."""

    ever = 0
    count: Callable[[Any], float]

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.past, self.by_width = 0, [0], dict[int, int]()
        self.state, self.total = SimpleNamespace(calls=[0]), torch.zeros(())
        self.slotted, self.closed, self.partial = Slotted(), counting(), functools.partial(count_in, [0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + type(self).count(self) / 10))


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def counting() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def count_in(counts: list[int]) -> int:
    counts[0] += 1
    return counts[0]


def in_a_global(block: Any) -> float:
    global COUNT
    COUNT += 1
    return COUNT


def in_a_global_list(block: Any) -> float:
    LIST.append(0)
    return len(LIST)


def in_a_global_dict(block: Any) -> float:
    NUMBERED[len(NUMBERED)] = 0
    return len(NUMBERED)


def in_a_global_object(block: Any) -> float:
    SPACE.inner.count += 1
    return float(SPACE.inner.count)


def in_a_class(block: Any) -> float:
    First.ever += 1
    return First.ever


def in_a_function(block: Any) -> float:
    counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]
    return float(counting.calls)  # type: ignore[attr-defined]


def in_a_closure(block: Any) -> float:
    return float(block.closed())


def in_a_partial(block: Any) -> float:
    return float(block.partial())


def in_slots(block: Any) -> float:
    block.slotted.calls += 1
    return float(block.slotted.calls)


def in_an_attribute(block: Any) -> float:
    block.calls += 1
    return float(block.calls)


def in_a_list(block: Any) -> float:
    block.past.append(0)
    return len(block.past)


def in_a_dict(block: Any) -> float:
    block.by_width[len(block.by_width)] = 0
    return len(block.by_width)


def in_an_object(block: Any) -> float:
    block.state.calls[0] += 1
    return float(block.state.calls[0])


def in_a_tensor(block: Any) -> Tensor:
    block.total += 1
    return block.total.clone()


BY_NAME = [
    in_a_global, in_a_global_list, in_a_global_dict, in_a_global_object, in_a_class, in_a_function, in_a_closure,
    in_a_partial, in_slots,
]  # fmt: skip
HELD = [in_an_attribute, in_a_list, in_a_dict, in_an_object, in_a_tensor]


def counting_by(count: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return blocks(type("First", (First,), {"count": count, "__module__": __name__}))


@slow_if(lambda count, settings: count not in (in_a_global, in_a_closure, in_a_class) and settings != {"alpha": 0.5})
@pytest.mark.parametrize("settings", PLANS, ids=str)
@pytest.mark.parametrize("count", BY_NAME)
def test_counts_that_no_recomputation_can_restore(count: Callable[[Any], Any], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="First gives another output for the same input: ") as caught:
        compare(counting_by(count), settings, steps=2)
    assert "\n" not in str(caught.value)


@slow_if(lambda count, settings: count not in (in_an_attribute, in_a_list) and settings != {"alpha": 0.5})
@pytest.mark.parametrize("settings", PLANS, ids=str)
@pytest.mark.parametrize("count", HELD)
def test_counts_in_attributes(count: Callable[[Any], Any], settings: dict[str, Any]) -> None:
    """Slices would count more than once."""
    told = (
        pytest.warns(UserWarning, match="layers run as one slice.*writes to ")
        if settings.get("alpha", 0.0)
        else nullcontext()
    )
    with told:
        compare(counting_by(count), settings, steps=4)


def test_a_list_that_grows_long() -> None:
    def build() -> nn.Module:
        model = counting_by(in_a_list)()
        for block in model.blocks:
            block.past[:] = [0] * 1022
        return model

    compare(build, {"alpha": 0.0})


@pytest.mark.parametrize("settings", PLANS, ids=str)
@pytest.mark.filterwarnings("error:.*as one slice")
def test_counts_that_no_output_depends_on(settings: dict[str, Any]) -> None:
    """They count each run of a layer, as with `torch.utils.checkpoint`."""

    def counts(block: Any, x: Tensor) -> None:
        in_a_global(block)

    compare(home(block_that(counts)), settings)
    assert COUNT > 2 * 3 * 3


SEEN: list[float] = []


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_hooks_on_inner_modules_count_once(alpha: float) -> None:
    def build() -> nn.Module:
        SEEN.clear()
        model = blocks(PlainBlock)()
        for block in model.blocks:
            block.mlp.register_forward_hook(lambda mlp, _, y: SEEN.append(float(y.detach().mean())))
        return model

    run = Recording(build)
    fit(MemoStrategy(alpha=alpha), run, batches([make_batch(2, 24, seed=n) for n in range(3)]), max_steps=3)
    assert len(SEEN) == 3 * 3


GENERATOR = torch.Generator()


class Dropping(PlainBlock):
    """Scales by a number that a function draws from a generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + torch.rand((), generator=GENERATOR) / 2))


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_generators_that_a_layer_does_not_hold(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Dropping gives another output .*a generator that it does not hold"):
        compare(blocks(Dropping), settings)


# ---- caches


SHARED: dict[str, Tensor] = {}


class Sharing(PlainBlock):
    """Layers share a tensor that the first of them makes, until the end of the model's forward."""

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in SHARED:
            SHARED["scale"] = torch.full((32,), 1 + len(SEEN) / 10)
        return super().forward(x * SHARED["scale"])


class Clearing(PlainModel):
    def forward(self, input_ids: Tensor, labels: Tensor) -> object:  # type: ignore[override]
        result = super().forward(input_ids, labels)
        SHARED.clear()
        SEEN.append(0.0)
        return result


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_a_cache_that_is_cleared_after_the_forward(settings: dict[str, Any]) -> None:
    def build() -> nn.Module:
        SEEN.clear()
        return Clearing([Sharing() for _ in range(3)])

    with pytest.raises(RuntimeError, match="Sharing was recomputed with other values than in its forward"):
        compare(build, settings, steps=2)


def table_by_width(block: Any, x: Tensor) -> Tensor:
    if x.shape[2] not in TABLES:
        TABLES[x.shape[2]] = torch.full((32,), 0.5), torch.zeros(1)
    scale, bias = TABLES[x.shape[2]]
    return x * scale + bias


def table_once(block: Any, x: Tensor) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.full((1, 1, 32), 0.5)
    return x * TABLE


def table_by_device(block: Any, x: Tensor) -> Tensor:
    of_device = NESTED.setdefault(str(x.device), {})
    if x.shape[2] not in of_device:
        of_device[x.shape[2]] = {"scales": [torch.full((32,), 0.5)], "bias": torch.zeros(1)}
    return x * of_device[x.shape[2]]["scales"][0] + of_device[x.shape[2]]["bias"]


def table_by_default(block: Any, x: Tensor) -> Tensor:
    if x.shape[2] not in BY_DEFAULT[x.device.type]:
        BY_DEFAULT[x.device.type][x.shape[2]] = torch.full((32,), 0.5)
    return x * BY_DEFAULT[x.device.type][x.shape[2]]


@pytest.mark.filterwarnings("error:.*as one slice")
@slow_if(lambda acts, settings: acts in (table_by_width, table_by_default) or settings == {"alpha": 0.0})
@pytest.mark.parametrize("settings", PLANS, ids=str)
@pytest.mark.parametrize("acts", [table_by_width, table_once, table_by_device, table_by_default])
def test_caches_in_global_variables(acts: Callable[[Any, Tensor], Tensor], settings: dict[str, Any]) -> None:
    """The layers are cut."""
    compare(home(block_that(acts)), settings)


class Rotated(PlainBlock):
    """Has a table that grows, among its attributes, and counts how often each width was seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.longest = torch.ones(1, 32), 1
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.table = torch.linspace(0.5, 1.5, self.longest)[:, None].expand(-1, 32).cos()
        with torch.no_grad():
            self.seen += x.abs().mean((0, 1))
        return super().forward(x * self.table[: x.shape[1]])


@pytest.mark.filterwarnings("ignore:.*layers run as one slice")
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_tables_that_grow_and_statistics(alpha: float) -> None:
    compare(blocks(Rotated), {"alpha": alpha})
