"""Layers that count in global variables, closures, slots or deep containers count once, as in plain training."""

from __future__ import annotations

import functools
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.architectures import counters
from support.architectures.acting_blocks import block_that, home
from support.attention.recorded_training import Recording, blocks, compare
from support.families import PlainBlock, PlainModel, make_batch
from support.markers.slow import slow_if
from support.trainer_harness import batches, fit
from torch import Tensor, nn

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

COUNT = 0.0
LIST, DICT, QUEUE, ARRAY = [0], {"calls": {"all": 0}}, deque([0], maxlen=1), np.zeros(2)
SPACE, COUNTER = SimpleNamespace(inner=SimpleNamespace(count=0)), counters.Counter()
NUMBERED = {0: 0}
USER_DICT, USER_LIST = UserDict(calls=0), UserList([0])
EMPTY: dict[int, dict[str, int]] = {}
TABLES: dict[int, tuple[Tensor, Tensor]] = {}
TABLE: Tensor | None = None
NESTED: dict[str, dict[int, Any]] = {}
BY_DEFAULT: dict[str, dict[int, Tensor]] = defaultdict(dict)


class Slotted:
    __slots__ = ("count",)
    count: int


class FrozenSlots(Slotted):
    """Has slots and attributes, and lets neither be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


SLOTTED = FrozenSlots()


def begin(block: Any) -> None:
    """Let all counts be zero, and give a block its own."""
    global COUNT, TABLE
    COUNT = counters.COUNT = counters.COUNTS["calls"] = counters.Counter.count = 0
    LIST[0] = DICT["calls"]["all"] = SPACE.inner.count = ARRAY[1] = 0
    QUEUE.append(0)
    NUMBERED.clear()
    NUMBERED[0] = 0
    EMPTY.clear()
    USER_DICT["calls"] = USER_LIST[0] = 0
    globals().pop("MADE", None)
    CALLED.count = decorated.count = 0  # type: ignore[attr-defined]
    TABLES.clear()
    NESTED.clear()
    BY_DEFAULT.clear()
    TABLE = None
    block.slotted = Slotted()
    block.slotted.count = 0
    object.__setattr__(SLOTTED, "count", 0)
    block.deep = {"a": [{"b": ({"c": [{"count": 0}]},)}]}
    block.closed = counting()
    block.partial = functools.partial(count_in, [0])
    block.bound = counters.Counter().step


def counting() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def count_in(counts: list[int], defaults: list[int] = []) -> int:  # noqa: B006
    counts[0] += 1
    return counts[0] + len(defaults)


def count_in_a_default(block: Any, counts: dict[int, int] = {}) -> int:  # noqa: B006
    counts[id(block)] = counts.get(id(block), 0) + 1
    return counts[id(block)]


def in_a_global(block: Any) -> float:
    global COUNT
    COUNT += 1
    return COUNT


def in_a_list(block: Any) -> int:
    LIST[0] += 1
    return LIST[0]


def in_a_dict(block: Any) -> int:
    DICT["calls"]["all"] += 1
    return DICT["calls"]["all"]


def in_new_keys(block: Any) -> int:
    NUMBERED[len(NUMBERED)] = 0  # a value that it holds already
    return len(NUMBERED)


def in_empty_dicts(block: Any) -> int:
    EMPTY[len(EMPTY)] = {}
    return len(EMPTY)


def in_a_user_dict(block: Any) -> int:
    USER_DICT["calls"] += 1
    return USER_DICT["calls"]


def in_a_user_list(block: Any) -> int:
    USER_LIST[0] += 1
    return USER_LIST[0]


def in_globals(block: Any) -> int:
    globals()["MADE"] = globals().get("MADE", 0) + 1
    return int(globals()["MADE"])


def in_a_queue(block: Any) -> int:
    QUEUE.append(QUEUE[0] + 1)
    return QUEUE[0]


def in_an_array(block: Any) -> float:
    ARRAY[1] += 1
    return float(ARRAY[1])


def in_a_namespace(block: Any) -> int:
    SPACE.inner.count += 1
    return SPACE.inner.count


def in_a_class(block: Any) -> int:
    return COUNTER.step()


def in_slots(block: Any) -> int:
    block.slotted.count += 1
    return block.slotted.count


def in_frozen_slots(block: Any) -> int:
    object.__setattr__(SLOTTED, "count", SLOTTED.count + 1)
    return SLOTTED.count


def in_a_deep_container(block: Any) -> int:
    place = block.deep["a"][0]["b"][0]["c"][0]
    place["count"] += 1
    return place["count"]


def in_a_closure(block: Any) -> int:
    return block.closed()


def in_a_partial(block: Any) -> int:
    return block.partial()


def in_a_bound_method(block: Any) -> int:
    return block.bound()


def in_what_is_decorated(block: Any) -> int:
    return decorated()


@torch.no_grad()
def decorated() -> int:
    return SLOW.step()


def in_a_call(block: Any) -> int:
    return CALLED()


class Called:
    count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


SLOW, CALLED = counters.Counter(), Called()


def in_an_attribute_of_a_function(block: Any) -> int:
    decorated.count = getattr(decorated, "count", 0) + 1  # type: ignore[attr-defined]
    return int(decorated.count)  # type: ignore[attr-defined]


def in_a_module_that_it_imports(block: Any) -> int:
    import support.architectures.counters as own

    return own.step()


class Setting:
    @property
    def value(self) -> int:
        return LIST[0]

    @value.setter
    def value(self, number: int) -> None:
        LIST[0] = number


SETTING = Setting()


def in_a_setter(block: Any) -> int:
    SETTING.value += 1
    return SETTING.value


def in_another_module(block: Any) -> int:
    return counters.step()


def in_a_variable_of_another_module(block: Any) -> int:
    counters.COUNT += 1
    return counters.COUNT


def in_a_dict_of_another_module(block: Any) -> int:
    counters.COUNTS["calls"] += 1
    return counters.COUNTS["calls"]


COUNTS = {
    in_a_global: "test_values_by_name.COUNT",
    in_a_list: "a list of .*test_values_by_name.LIST",
    in_a_dict: "test_values_by_name.DICT.all",
    in_new_keys: "test_values_by_name.NUMBERED.1",
    in_empty_dicts: "test_values_by_name.EMPTY.0",
    in_a_user_dict: "UserDict.calls",
    in_a_user_list: "a list of UserList",
    in_globals: "test_values_by_name.MADE",
    in_a_queue: "a deque of .*test_values_by_name.QUEUE",
    in_an_array: "test_values_by_name.ARRAY",
    in_a_namespace: "SimpleNamespace.count",
    in_a_class: "the class attribute Counter.count",
    in_slots: "Slotted.count",
    in_frozen_slots: "FrozenSlots.count",
    in_a_deep_container: "Acting.deep.count",
    in_a_closure: "counting.count",
    in_a_partial: "a list of",
    in_a_bound_method: "the class attribute Counter.count",
    in_what_is_decorated: "the class attribute Counter.count",
    in_a_call: "Called.count",
    in_an_attribute_of_a_function: "decorated.count",
    in_a_module_that_it_imports: "support.architectures.counters.COUNT",
    in_a_setter: "a list of .*test_values_by_name.LIST",
    in_another_module: "support.architectures.counters.COUNT",
    in_a_variable_of_another_module: "support.architectures.counters.COUNT",
    in_a_dict_of_another_module: "support.architectures.counters.COUNTS.calls",
}
# What the first operation of a layer counts, in `make test`. The others count after it there.
QUICK_BEFORE = (
    in_new_keys, in_empty_dicts, in_a_user_list, in_globals, in_a_namespace, in_frozen_slots, in_a_deep_container,
    in_a_bound_method, in_what_is_decorated, in_a_call, in_a_module_that_it_imports, in_a_setter,
    in_a_variable_of_another_module, in_a_dict_of_another_module,
)  # fmt: skip


@slow_if(lambda count, alpha: alpha != 0.5 or count in QUICK_BEFORE)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("count", "why"), COUNTS.items())
def test_counts(count: Callable[[Any], float], why: str, alpha: float) -> None:
    def acts(block: Any, x: Tensor) -> Tensor:
        return x * (1 + count(block) / 10)

    kind = home(block_that(acts, begin))
    if alpha != 0.5:
        compare(kind, {"alpha": alpha})
        return
    with pytest.warns(UserWarning, match=f"layers run as one slice.*writes to {why}"):
        compare(kind, {"alpha": alpha})


def counting_first(count: Callable[[Any], float]) -> type[PlainBlock]:
    """Return a class of blocks that count before they compute, so that a recomputation does so, too."""

    class First(PlainBlock):
        def __init__(self) -> None:
            super().__init__()
            begin(self)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (1 + count(self) / 10))

    return First


@slow_if(lambda count, alpha: alpha == 0.5 or count not in QUICK_BEFORE)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("count", COUNTS)
def test_counts_before_anything_else(count: Callable[[Any], float], alpha: float) -> None:
    compare(blocks(counting_first(count)), {"alpha": alpha})


# ---- what changes while training

GROWING: list[int] = []


def grows(block: Any) -> float:
    GROWING.append(0)
    return len(GROWING) / 100


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_list_that_grows_long(alpha: float) -> None:
    def build() -> nn.Module:
        GROWING[:] = [0] * 1020
        return blocks(counting_first(grows))()

    compare(build, {"alpha": alpha})


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


# ---- generators

GENERATOR = torch.Generator()


class Dropping(PlainBlock):
    """Scales by a number that a function draws from a generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + torch.rand((), generator=drawing()) / 2))


def drawing() -> torch.Generator:
    return GENERATOR


@pytest.mark.parametrize(
    "settings", [{"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 0.5, "slice_tokens": 8, "host_backed": "all"}]
)
def test_generators_that_functions_name(settings: dict[str, Any]) -> None:
    def build() -> nn.Module:
        GENERATOR.manual_seed(3)
        return blocks(Dropping)()

    compare(build, settings)


class Renewing(PlainModel):
    """Has another generator for each forward."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:  # type: ignore[override]
        global GENERATOR
        GENERATOR = torch.Generator().manual_seed(int(input_ids.sum()))
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_generators_that_are_replaced(alpha: float) -> None:
    compare(lambda: Renewing([Dropping() for _ in range(3)]), {"alpha": alpha})


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


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_cache_that_is_cleared_after_the_forward(alpha: float) -> None:
    def build() -> nn.Module:
        SHARED.clear()
        SEEN.clear()
        return Clearing([Sharing() for _ in range(3)])

    compare(build, {"alpha": alpha})


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
@slow_if(lambda acts: acts in (table_by_width, table_by_default))
@pytest.mark.parametrize("acts", [table_by_width, table_once, table_by_device, table_by_default])
def test_caches_in_global_variables(acts: Callable[[Any, Tensor], Tensor]) -> None:
    """The layers are cut."""
    compare(home(block_that(acts, begin)), {"alpha": 0.5})
