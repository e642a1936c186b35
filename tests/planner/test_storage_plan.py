import itertools
import math
import time
from dataclasses import dataclass, fields, replace
from functools import partial

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.alpha_plans import memory_by

from lightning_memo.artifacts.costs import (
    ATTENTION,
    INPUT,
    OTHER,
    PLACES,
    Budget,
    CallCosts,
    LayerCosts,
    Product,
    StorageCosts,
)
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import CallPlan, PlanMemory, StoragePlan, StoredRange, SwapPlan
from lightning_memo.planner import HostMemoryError, Restrictions, make_plan
from lightning_memo.planner.simulate_step import ScheduleError, ScheduleFault, simulate
from lightning_memo.planner.storage_planner import StorageError, needs_of, plan_storage, solve_storage
from lightning_memo.planner.token_slices import slices_of, swapped_tokens

GIB = 2**30
FINGERPRINT = Fingerprint(
    model="any", batch=1, tokens=1000, precision="bf16", device="cuda", torch="2.13", parallel="1"
)


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    ffn: int
    keys: int  # width of k and of v
    vocabulary: int
    parameters: float
    gated: bool = True
    lora: bool = False


@dataclass(frozen=True)
class Machine:
    dense: float  # FLOP/s of matrix products
    attention_forward: float
    attention_backward: float
    link: float  # bytes/s
    hbm: float
    device_gib: int


MODELS = {
    "GPT-7B": Model(32, 4096, 16384, 4096, 50257, 6.65e9, gated=False),
    "Llama-8B LoRA": Model(32, 4096, 14336, 1024, 128256, 8.03e9, lora=True),
    "Llama-8B": Model(32, 4096, 14336, 1024, 128256, 8.03e9),
    "Llama-3B": Model(28, 3072, 8192, 1024, 128256, 3.21e9),
    "Llama-1B": Model(16, 2048, 8192, 512, 128256, 1.24e9),
}
MACHINES = {
    "A100": Machine(230e12, 180e12, 150e12, 24e9, 2.0e12, 79),
    "H100": Machine(600e12, 550e12, 450e12, 53e9, 3.35e12, 79),
    "H200": Machine(600e12, 550e12, 450e12, 53e9, 4.8e12, 139),
    "4090": Machine(150e12, 140e12, 110e12, 22e9, 1.0e12, 23),
}
LENGTHS = (16, 32, 64, 128, 256, 1024)
DISK = 4 * 10**12
DISK_SPEED = {"disk_write_bytes_per_second": 3e9, "disk_read_bytes_per_second": 6e9}


def analytic(model, machine, tokens, host_gib, disk=0):
    """Costs of a model from FLOPs and bytes, in bf16; and a budget. None if the host can't hold the optimizer."""
    unit, h = 2 * tokens, model.hidden
    attended = 2 * tokens**2 * h

    def product(name, inputs, outputs):
        return Product(name=name, size_bytes=unit * outputs, seconds=unit * inputs * outputs / machine.dense)

    if model.gated:
        products = [product("q", h, h), product("k", h, model.keys), product("v", h, model.keys), product("o", h, h)]
        products += [product("gate", h, model.ffn), product("up", h, model.ffn)]
        norms_and_act, moved = 2 * h + model.ffn, 4 * h + 3 * model.ffn
    else:
        products = [product("qkv", h, 3 * h), product("o", h, h), product("up", h, model.ffn)]
        norms_and_act, moved = 2 * h + model.ffn, 4 * h + 2 * model.ffn
    down = unit * h * model.ffn / machine.dense
    dense = sum(p.seconds for p in products) + down
    call = CallCosts(
        input_bytes=unit * h,
        attention_bytes=unit * h + tokens * 4 * h // 128,
        other_bytes=sum(p.size_bytes for p in products) + unit * norms_and_act,
        products=tuple(products),
        forward_seconds=dense + attended / machine.attention_forward,
        backward_seconds=(1 if model.lora else 2) * dense + 2.5 * attended / machine.attention_backward,
        attention_seconds=attended / machine.attention_forward,
        elementwise_seconds=unit * moved / machine.hbm,
    )
    fixed, host = 2 * model.parameters, host_gib * GIB
    if not model.lora:
        fixed = 16 * model.parameters
        if fixed > 0.6 * machine.device_gib * GIB:  # fp32 weights and moments on the host
            fixed, host = 4 * model.parameters, host - 12 * int(model.parameters)
    if host < 0:
        return None
    costs = StorageCosts(
        tokens=tokens,
        classes=(call,),
        call_classes=(0,) * model.layers,
        outside_seconds=(2 if model.lora else 3) * unit * h * model.vocabulary / machine.dense,
        offload_bytes_per_second=machine.link,
        prefetch_bytes_per_second=machine.link,
        fixed_device_bytes=int(fixed),
        transient_device_bytes=10 * unit * h + 6 * model.vocabulary * min(tokens, 8192),
        **DISK_SPEED,
    )
    return costs, Budget(device_bytes=machine.device_gib * GIB, host_bytes=host, disk_bytes=disk)


def layer_costs(costs):
    """Costs in the form of the paper's program."""
    calls = [costs.classes[number] for number in costs.call_classes]
    return LayerCosts(
        batch=1,
        tokens=costs.tokens,
        input_bytes=tuple(call.input_bytes for call in calls),
        attention_bytes=tuple(call.attention_bytes for call in calls),
        other_bytes=tuple(call.other_bytes for call in calls),
        forward_seconds=tuple(call.forward_seconds for call in calls),
        backward_seconds=tuple(call.backward_seconds for call in calls),
        recompute_seconds=tuple(call.elementwise_seconds + sum(p.seconds for p in call.products) for call in calls),
        outside_seconds=costs.outside_seconds,
        offload_bytes_per_second=costs.offload_bytes_per_second,
        prefetch_bytes_per_second=costs.prefetch_bytes_per_second,
        fixed_device_bytes=costs.fixed_device_bytes,
        transient_device_bytes=costs.transient_device_bytes,
    )


def paper_plan(costs, budget):
    """The fastest plan with a single alpha; None if none fits."""
    paper = layer_costs(costs)

    def largest(alpha):
        return max(paper.swapped_bytes(call, alpha) for call in range(paper.calls))

    try:
        made = make_plan(
            paper,
            Budget(device_bytes=budget.device_bytes, host_bytes=budget.host_bytes),
            FINGERPRINT,
            Restrictions(),
            memory_by(largest, paper.swapped_calls),
        )
    except HostMemoryError:
        return None
    return None if made.device_excess_bytes else made


def cases():
    hosts = ((32, 0), (256, 0), (1900, 0), (64, DISK))
    for model, machine, length, (host_gib, disk) in itertools.product(MODELS, MACHINES, LENGTHS, hosts):
        made = analytic(MODELS[model], MACHINES[machine], length * 1024, host_gib, disk)
        if made is not None:
            yield f"{model}, {machine}, {length}K, host {host_gib} GiB, disk {disk > 0}", *made


def planned(costs, budget, **settings):
    try:
        return plan_storage(costs, budget, **settings)
    except StorageError:
        return None


@pytest.mark.slow
def test_no_alpha_is_faster_on_a_grid_of_models_lengths_and_machines():
    begin = time.process_time()
    compared, faster, only_here, long_slices = 0, 0, 0, 0
    for name, costs, budget in cases():
        plan, paper = planned(costs, budget), paper_plan(costs, budget)
        if plan is None:
            assert paper is None, name
            continue
        timeline = simulate(costs, plan.storage, budget)
        assert plan.bound_seconds * (1 - 1e-9) <= timeline.step_seconds <= plan.bound_seconds * 1.003, name
        assert timeline.step_seconds == pytest.approx(plan.needs.step_seconds, rel=1e-9), name
        bounds = plan.storage.calls[0].bounds
        assert all(bound % 128 == 0 for bound in bounds) and len(bounds) <= 7, name
        shortest = min(stop - start for start, stop in itertools.pairwise(bounds))
        long_slices += 1 if shortest >= costs.tokens / 16 else -1
        if paper is None:
            only_here += 1
            continue
        compared += 1
        assert plan.bound_seconds <= paper.step_seconds * (1 + 1e-9), name
        assert plan.needs.step_seconds <= paper.step_seconds * (1 + 1e-3), name  # for fewer and longer slices
        faster += plan.needs.step_seconds < paper.step_seconds * (1 - 1e-6)
    assert compared >= 200 and faster >= compared / 3 and only_here >= 20, (compared, faster, only_here)
    assert long_slices > 100, long_slices
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
@pytest.mark.parametrize("length", [16, 128])
def test_a_single_alpha_is_one_of_the_plans(alpha, length):
    costs, budget = analytic(MODELS["Llama-8B LoRA"], MACHINES["H100"], length * 1024, 10**4)
    first = costs.tokens - swapped_tokens(costs.tokens, alpha)
    ranges = [StoredRange(kind=kind, place="host", start=0, stop=costs.tokens) for kind in (INPUT, ATTENTION)]
    if alpha:
        ranges.append(StoredRange(kind=OTHER, place="host", start=first, stop=costs.tokens))
    plan = plan_of(CallPlan(ranges=tuple(ranges)), of=costs)
    made = needs_of(costs, plan)
    exact = Budget(device_bytes=made.device_bytes, host_bytes=made.host_bytes)
    paper = make_plan(
        layer_costs(costs),
        Budget(device_bytes=0, host_bytes=budget.host_bytes),
        FINGERPRINT,
        Restrictions(alpha=1 - first / costs.tokens),
        memory_by(partial(layer_costs(costs).swapped_bytes, 0), layer_costs(costs).swapped_calls),
    )
    assert made.step_seconds == pytest.approx(paper.step_seconds, rel=1e-12)
    assert (made.device_bytes, made.host_bytes) == (paper.device_bytes, paper.swap.host_bytes)
    assert simulate(costs, plan, exact).step_seconds == pytest.approx(paper.step_seconds, rel=1e-12)
    assert solve_storage(costs, exact, may_drop_attention=False).seconds <= paper.step_seconds * (1 + 1e-9)


# All tokens compute for 4 s forward and 8 s backward, and all bytes take 10 s to copy.
CALL = CallCosts(
    input_bytes=100,
    attention_bytes=100,
    other_bytes=800,
    products=(Product(name="a", size_bytes=300, seconds=2.0), Product(name="b", size_bytes=300, seconds=1.0)),
    forward_seconds=4.0,
    backward_seconds=8.0,
    attention_seconds=2.0,
    elementwise_seconds=1.0,
)


def tiny(n=4, **changes):
    costs = StorageCosts(
        tokens=100,
        classes=(CALL,),
        call_classes=(0,) * n,
        outside_seconds=5.0,
        offload_bytes_per_second=100.0,
        prefetch_bytes_per_second=100.0,
        fixed_device_bytes=1000,
        transient_device_bytes=500,
        disk_write_bytes_per_second=50.0,
        disk_read_bytes_per_second=20.0,
    )
    return replace(costs, **changes)


def ranges_of(*rows):
    return CallPlan(ranges=tuple(StoredRange(kind=k, place=p, start=a, stop=b) for k, p, a, b in rows))


def plan_of(*calls, of):
    """A plan of classes of layer calls, in the order of the layer calls of some costs."""
    tokens = max((of.tokens, *(bound for call in calls for bound in call.bounds)))
    return StoragePlan(tokens=tokens, call_classes=of.call_classes, calls=calls)


AMPLE = Budget(device_bytes=10**6, host_bytes=10**6, disk_bytes=10**6)
EVERYTHING = (("input", "host", 0, 100), ("attention", "host", 0, 100))


def spans(timeline, stream, phase):
    return [(s.call, s.start, s.end) for s in timeline.spans if (s.stream, s.phase) == (stream, phase)]


def test_the_simulator_keeps_the_rules_of_the_schedule():
    whole = ranges_of(*EVERYTHING, ("other", "host", 0, 100))  # 10 s a copy
    timeline = simulate(tiny(), plan_of(whole, of=tiny()), AMPLE)
    assert spans(timeline, "compute", "forward") == [(0, 0, 4), (1, 4, 8), (2, 14, 18), (3, 24, 28)]
    assert spans(timeline, "offload", "forward") == [(0, 4, 14), (1, 14, 24)]
    assert spans(timeline, "compute", "backward") == [(3, 28, 36), (2, 36, 44), (1, 46, 54), (0, 56, 64)]
    assert spans(timeline, "prefetch", "backward") == [(1, 36, 46), (0, 46, 56)]
    assert timeline.step_seconds == 64 + 5
    assert (timeline.peak_device_bytes, timeline.peak_host_bytes, timeline.peak_disk_bytes) == (1500 + 2000, 2000, 0)


def test_the_simulator_recomputes_what_has_no_place():
    # 60 tokens of a, 30 of b, everything elementwise of 80, and the first half of the attention, a quarter of its time.
    part = ranges_of(
        ("input", "device", 0, 100), ("attention", "device", 50, 100),
        ("other", "device", 80, 100), ("a", "device", 60, 80), ("b", "device", 30, 80),
    )  # fmt: skip
    timeline = simulate(tiny(n=1), plan_of(part, of=tiny(n=1)), AMPLE)
    ((_, start, end),) = spans(timeline, "compute", "backward")
    assert end - start == pytest.approx(8 + 0.6 * 2 + 0.3 * 1 + 0.8 * 1 + 0.25 * 2)
    assert timeline.peak_device_bytes == 1500 + 100 + 50 + 160 + 60 + 150


def test_what_is_stored_is_not_recomputed_beside_it():
    half = ranges_of(*EVERYTHING, ("other", "host", 50, 100))  # 400 of 800 bytes are recomputed
    needs = [tiny(recomputed_device_bytes=most) for most in (0, 300, 500)]
    peaks = [simulate(costs, plan_of(half, of=costs), AMPLE).peak_device_bytes for costs in needs]
    assert peaks == [needs_of(costs, plan_of(half, of=costs)).device_bytes for costs in needs]
    assert [peaks[0] - peak for peak in peaks] == [0, 300, 400]
    with pytest.raises(ValueError, match="recomputed_device_bytes=501 must be at most 500"):
        tiny(recomputed_device_bytes=501)


def test_a_slow_disk_holds_up_the_copies():
    spilled = ranges_of(("input", "host", 0, 100), ("attention", "disk", 0, 100))
    timeline = simulate(tiny(n=3), plan_of(spilled, of=tiny(n=3)), AMPLE)
    # 200 bytes take 2 s over the link, 100 of them 2 s to write and 5 s to read
    assert spans(timeline, "spill", "forward") == [(0, 4, 6)]
    assert spans(timeline, "spill", "backward")[0][2] - spans(timeline, "spill", "backward")[0][1] == 5
    assert (timeline.peak_host_bytes, timeline.peak_disk_bytes) == (100, 100)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([("input", "host", 0, 99)], ScheduleFault.INPUT),
        ([("input", "host", 0, 100), ("c", "host", 0, 100)], ScheduleFault.KIND),
        ([("input", "host", 0, 101)], ScheduleFault.RANGE),
        ([("input", "host", 0, 100), ("a", "device", 5, 5)], ScheduleFault.RANGE),
        ([("input", "host", 0, 100), ("input", "device", 99, 100)], ScheduleFault.TWICE),
        (
            [("input", "host", 0, 100), ("attention", "device", 50, 100), ("other", "host", 49, 100)],
            ScheduleFault.ATTENTION,
        ),
        ([*EVERYTHING, ("other", "host", 50, 100), ("b", "device", 0, 51)], ScheduleFault.PRODUCT),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(rows, fault):
    with pytest.raises(ScheduleError) as caught:
        simulate(tiny(), plan_of(ranges_of(*rows), of=tiny()), AMPLE)
    assert caught.value.fault is fault
    assert "\n" not in str(caught.value)


def test_a_plan_of_other_layers_is_refused():
    with pytest.raises(ScheduleError, match="3 classes, 4 calls"):
        simulate(tiny(), plan_of(ranges_of(*EVERYTHING), of=tiny(n=3)), AMPLE)
    spilled = plan_of(ranges_of(("input", "disk", 0, 100)), of=tiny())
    with pytest.raises(ScheduleError, match="without a disk"):
        simulate(tiny(), spilled, replace(AMPLE, disk_bytes=0))


def test_every_memory_is_refused_when_one_byte_over():
    rows = ("input", "host", 0, 100), ("attention", "disk", 0, 100), ("a", "device", 0, 100)
    plan = plan_of(ranges_of(*rows), of=tiny())
    exact = Budget(device_bytes=1500 + 2 * 200 + 4 * 300, host_bytes=200, disk_bytes=200)
    simulate(tiny(), plan, exact)
    for budget, fault in (
        (replace(exact, device_bytes=exact.device_bytes - 1), ScheduleFault.DEVICE),
        (replace(exact, host_bytes=199), ScheduleFault.HOST),
        (replace(exact, disk_bytes=199), ScheduleFault.DISK),
    ):
        with pytest.raises(ScheduleError) as caught:
            simulate(tiny(), plan, budget)
        assert caught.value.fault is fault


def test_the_simulator_takes_milliseconds():
    costs = tiny(n=128)
    plan = plan_of(ranges_of(*EVERYTHING, ("a", "disk", 0, 50)), of=costs)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        simulate(costs, plan, AMPLE)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.02


@st.composite
def calls(draw, products):
    size, seconds = st.integers(0, 2**30), st.floats(0.0, 10.0)
    return CallCosts(
        input_bytes=draw(size),
        attention_bytes=draw(size),
        other_bytes=draw(size),
        products=tuple(Product(name=f"p{n}", size_bytes=draw(size), seconds=draw(seconds)) for n in range(products)),
        forward_seconds=draw(seconds),
        backward_seconds=draw(seconds),
        attention_seconds=draw(seconds),
        elementwise_seconds=draw(seconds),
        window_tokens=draw(st.none() | st.integers(1, 3000)),
    )


@st.composite
def steps(draw):
    products, classes = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    order = [*range(classes), *draw(st.lists(st.integers(0, classes - 1), max_size=6))]
    members = tuple(draw(calls(products)) for _ in range(classes))
    transient = draw(st.integers(0, 2**30))
    most = min(transient, max(call.other_bytes for call in members))
    return StorageCosts(
        tokens=draw(st.integers(1, 3000)),
        classes=members,
        call_classes=tuple(draw(st.permutations(order))),
        outside_seconds=draw(st.floats(0.0, 10.0)),
        offload_bytes_per_second=draw(st.floats(1e6, 1e11)),
        prefetch_bytes_per_second=draw(st.floats(1e6, 1e11)),
        fixed_device_bytes=draw(st.integers(0, 2**30)),
        transient_device_bytes=transient,
        recomputed_device_bytes=draw(st.integers(0, most)),
        disk_write_bytes_per_second=1e8,
        disk_read_bytes_per_second=3e8,
        launch_seconds=draw(st.just(0.0) | st.floats(0.0, 10.0)),
    )


@st.composite
def call_plans(draw, call, tokens):
    """Any valid plan."""

    def lay(kind, start, stop):
        cuts = sorted(draw(st.lists(st.integers(start, stop), min_size=2, max_size=2)))
        edges = [start, *cuts, stop]
        order = draw(st.permutations(PLACES))
        return [
            StoredRange(kind=kind, place=place, start=a, stop=b)
            for place, a, b in zip(order, edges, edges[1:], strict=False)
            if a < b
        ]

    dropped = draw(st.integers(0, tokens))
    whole = draw(st.integers(dropped, tokens))
    ranges = lay(INPUT, 0, tokens) + lay(ATTENTION, dropped, tokens) + lay(OTHER, whole, tokens)
    for product in call.products:
        ranges += lay(product.name, draw(st.integers(0, whole)), whole)
    return CallPlan(ranges=tuple(ranges))


def launching(costs, storage):
    """Seconds in which the host launches a step."""
    slices = [part for call in range(costs.calls) for part in slices_of(storage, call, costs.tokens)]
    return costs.outside_seconds + costs.launch_seconds * sum(2 + part.recomputes for part in slices)


@pytest.mark.slow
@settings(max_examples=120)
@given(st.data())
def test_no_plan_that_fits_beats_the_optimum(data):
    costs = data.draw(steps())
    budget = Budget(device_bytes=2**40, host_bytes=2**40, disk_bytes=2**40)
    any_calls = tuple(data.draw(call_plans(call, costs.tokens)) for call in costs.classes)
    solution = solve_storage(costs, budget, may_drop_attention=True)
    other = needs_of(costs, plan_of(*any_calls, of=costs))
    timeline = simulate(costs, plan_of(*any_calls, of=costs), budget)
    assert max(timeline.step_seconds, launching(costs, plan_of(*any_calls, of=costs))) == pytest.approx(
        other.step_seconds, rel=1e-9
    )
    peaks = timeline.peak_device_bytes, timeline.peak_host_bytes, timeline.peak_disk_bytes
    assert peaks == (other.device_bytes, other.host_bytes, other.disk_bytes)

    exact = Budget(
        device_bytes=other.device_bytes,
        host_bytes=other.host_bytes,
        disk_bytes=other.disk_bytes,
    )
    best = solve_storage(costs, exact, may_drop_attention=True)
    assert best is not None and best.seconds <= other.step_seconds * (1 + 1e-7) + 1e-9
    assert solution.seconds <= best.seconds * (1 + 1e-7) + 1e-9


@settings(max_examples=120)
@given(st.data())
def test_plans_of_any_costs_fit_and_take_what_was_expected(data):
    costs = data.draw(steps())
    size = st.integers(0, 2**34)
    disk_bytes = data.draw(st.just(0) | size)
    budget = Budget(device_bytes=data.draw(size), host_bytes=data.draw(size), disk_bytes=disk_bytes)
    may_drop = data.draw(st.booleans())
    plan = planned(costs, budget, may_drop_attention=may_drop)
    if plan is None:
        # Neither all on the device nor all on the host.
        least = [sum(call.sizes[: 1 if may_drop else 2]) for call in costs.classes]
        kept = sum(least[number] for number in costs.call_classes)
        swapped = sum(least[number] for number in costs.call_classes[:-2])
        room = budget.device_bytes - costs.fixed_device_bytes - costs.transient_device_bytes
        assert kept > room and (2 * max(least) > room or swapped > budget.host_bytes)
        return
    timeline = simulate(costs, plan.storage, budget)
    seconds = max(timeline.step_seconds, launching(costs, plan.storage))
    assert seconds == pytest.approx(plan.needs.step_seconds, rel=1e-9)
    assert plan.bound_seconds <= timeline.step_seconds * (1 + 1e-7) + 1e-9
    assert may_drop or all(call.tokens(ATTENTION) == costs.tokens for call in plan.storage.calls)


def test_what_fits_to_the_byte_is_found():
    """One byte of 330 million is within the tolerance of a linear program."""
    large = CallCosts(
        input_bytes=0, attention_bytes=0, other_bytes=333333334, products=(), forward_seconds=1.0,
        backward_seconds=0.0, attention_seconds=0.0, elementwise_seconds=8.0,
    )  # fmt: skip
    small = replace(large, input_bytes=1, attention_bytes=15, other_bytes=0, forward_seconds=0.0, elementwise_seconds=0)
    costs = StorageCosts(
        tokens=1, classes=(large, small), call_classes=(0, 1, 0, 0, 1, 1), outside_seconds=0.0,
        offload_bytes_per_second=1e6, prefetch_bytes_per_second=1e6, fixed_device_bytes=0, transient_device_bytes=0,
        disk_write_bytes_per_second=1e8, disk_read_bytes_per_second=3e8,
    )  # fmt: skip
    budget = Budget(device_bytes=48, host_bytes=0, disk_bytes=15)
    assert plan_storage(costs, budget, may_drop_attention=False, tile_tokens=1).needs.device_bytes == 48


def limits_of(costs, budget):
    """For each resource, a function that returns the problem with more of it by a given share."""

    def more(document, name, share):
        value = getattr(document, name) * (1 + share)
        return replace(document, **{name: round(value) if name.endswith("_bytes") else value})

    def of_costs(name):
        return lambda share: (more(costs, name, share), budget)

    def of_budget(name):
        return lambda share: (costs, more(budget, name, share))

    changes = {
        "device memory": of_budget("device_bytes"),
        "host memory": of_budget("host_bytes"),
        "offload bandwidth": of_costs("offload_bytes_per_second"),
        "prefetch bandwidth": of_costs("prefetch_bytes_per_second"),
    }
    if budget.disk_bytes:
        changes["disk space"] = of_budget("disk_bytes")
        changes["disk write bandwidth"] = of_costs("disk_write_bytes_per_second")
        changes["disk read bandwidth"] = of_costs("disk_read_bytes_per_second")
    return changes


def problems_with_prices():
    yield from ((costs, budget) for _, costs, budget in itertools.islice(cases(), 0, None, 9))
    # Large numbers, as limits are whole bytes.
    products = tuple(replace(product, size_bytes=product.size_bytes * 10**7) for product in CALL.products)
    large = replace(CALL, input_bytes=10**9, attention_bytes=10**9, other_bytes=8 * 10**9, products=products)
    costs = replace(tiny(n=8), classes=(large,), offload_bytes_per_second=1e9, prefetch_bytes_per_second=0.25e9)
    memory = Budget(device_bytes=11 * 10**9, host_bytes=10**12)
    yield costs, memory
    costs = replace(costs, prefetch_bytes_per_second=1e9)
    for space, write, read in ((10**12, 1e9, 1e8), (4 * 10**9, 1e9, 1e9), (10**12, 1e8, 1e9)):
        of_disk = replace(costs, disk_write_bytes_per_second=write, disk_read_bytes_per_second=read)
        yield of_disk, Budget(device_bytes=11 * 10**9, host_bytes=5 * 10**9, disk_bytes=space)


@pytest.mark.slow
def test_prices_are_what_solving_with_a_little_more_or_less_brings():
    share, exact, seen = 1e-3, 0, set()
    for costs, budget in problems_with_prices():
        solution = solve_storage(costs, budget, may_drop_attention=True)
        if solution is None:
            continue
        changes = limits_of(costs, budget)
        assert [price.resource for price in solution.prices] == list(changes)
        for price in solution.prices:
            more, less = (
                solve_storage(*changes[price.resource](sign * share), may_drop_attention=True) for sign in (1, -1)
            )
            gain = (solution.seconds - more.seconds) / (share * solution.seconds)
            loss = (less.seconds - solution.seconds) / (share * solution.seconds) if less else math.inf
            elasticity = price.seconds * price.limit / solution.seconds
            # Where what binds changes, the two differ, and a dual is between them.
            assert gain - 1e-3 * (1 + gain) <= elasticity <= loss + 1e-3 * (1 + loss), price
            if elasticity > 1e-3:
                seen.add(price.resource)
                exact += loss - gain < 0.05 * elasticity
    assert seen == set(changes), seen
    assert exact > 30


def test_a_table_says_what_binds_and_what_more_would_bring():
    costs, budget = analytic(MODELS["Llama-8B LoRA"], MACHINES["H100"], 64 * 1024, 32, DISK)
    made = plan_storage(costs, budget)
    needs = made.needs
    plan = Plan(
        fingerprint=FINGERPRINT,
        costs=layer_costs(costs),
        budget=budget,
        swap=SwapPlan(storage=made.storage, memory=PlanMemory(host=needs.host_bytes)),
        step_seconds=needs.step_seconds,
        reason="",
        prices=made.prices,
    )
    rows = plan.sensitivities
    prices = {price.resource: price for price in plan.prices}
    assert len(rows) == len(prices) == 7
    assert [row.seconds for row in rows if row.binds] == sorted((r.seconds for r in rows if r.binds), reverse=True)
    for row in rows:
        unit = {"GiB": GIB, "GB/s": 1e9}[row.unit]
        assert row.seconds == pytest.approx(prices[row.resource].seconds * unit)
        assert row.percent == pytest.approx(100 * row.seconds / plan.step_seconds)
        assert row.binds == (row.seconds > 0)
    host = next(row for row in rows if row.resource == "host memory")
    assert (host.unit, host.limit, host.binds) == ("GiB", 32.0, True)
    assert host.used == pytest.approx(32.0, rel=0.02) and host.used <= 32.0
    more = plan_storage(costs, replace(budget, host_bytes=budget.host_bytes + GIB))
    assert 0 < made.bound_seconds - more.bound_seconds <= host.seconds * (1 + 1e-6)


def test_of_plans_that_take_equally_long_the_simplest_is_chosen():
    # Everything fits the device: plain training.
    plain = plan_storage(tiny(), AMPLE)
    assert {(r.kind, r.place) for r in plain.storage.calls[0].ranges} == {
        (kind, "device") for kind in (INPUT, ATTENTION, OTHER)
    }
    assert (plain.needs.step_seconds, plain.storage.calls[0].bounds) == (5 + 4 * (4 + 8), (0, 100))
    # Nothing is gained by storing what costs nothing to compute again, nor by dropping attention outputs that fit.
    free = replace(
        CALL,
        products=tuple(replace(product, seconds=0.0) for product in CALL.products),
        elementwise_seconds=0.0,
        attention_seconds=0.0,
    )
    device = Budget(device_bytes=2000, host_bytes=10**6, disk_bytes=AMPLE.disk_bytes)
    least = plan_storage(tiny(n=30, classes=(free,)), device, tile_tokens=10)
    assert {(r.kind, r.place) for r in least.storage.calls[0].ranges} == {(INPUT, "host"), (ATTENTION, "host")}


def test_layers_run_in_slices_only_where_the_device_takes_longer_than_the_host_to_launch_them():
    layers = tuple(replace(CALL, attention_bytes=110 + n) for n in range(2))  # two classes, which take turns
    costs = tiny(n=12, classes=layers, call_classes=(0, 1) * 6, recomputed_device_bytes=300)
    budget = Budget(device_bytes=1500 + 7000, host_bytes=10**6)
    long = plan_storage(costs, budget, tile_tokens=10)
    assert max(len(call.bounds) for call in long.storage.calls) > 2
    short = plan_storage(replace(costs, launch_seconds=4.0), budget, tile_tokens=10)
    assert {call.bounds for call in short.storage.calls} == {(0, 100)}
    stored = [short.storage.call(n).tokens(OTHER) for n in range(12)]
    assert 0 < stored.count(0) < 12  # whole calls are recomputed, spread over the step
    assert all(0 in part and 100 in part for part in (stored[:6], stored[6:]))
    ungrouped = costs.of_plan(short.storage.call_classes)
    assert [ungrouped.classes[n] for n in ungrouped.call_classes] == [costs.classes[n] for n in costs.call_classes]
    assert simulate(costs, short.storage, budget).peak_device_bytes == short.needs.device_bytes <= budget.device_bytes


def test_attention_outputs_are_dropped_only_where_that_pays():
    costs = tiny(n=12)
    assert plan_storage(costs, Budget(device_bytes=1900, host_bytes=2000)).storage.calls[0].tokens(ATTENTION) == 100
    tight = Budget(device_bytes=1900, host_bytes=1500)
    dropped = plan_storage(costs, tight, tile_tokens=10).storage.calls[0]
    stored = [r for r in dropped.ranges if r.kind == ATTENTION]
    assert min(r.start for r in stored) == 100 - dropped.tokens(ATTENTION) > 0  # the first tokens: the cheapest
    with pytest.raises(StorageError) as caught:
        plan_storage(costs, replace(tight, device_bytes=1600), may_drop_attention=False)
    assert str(caught.value) == (
        "the layer inputs and attention outputs of 12 layer calls need 2.3 KiB, and if they are offloaded, another "
        "400 B of device buffers, but the device has 100 B left and the host has 1.5 KiB: "
        "raise device_memory or host_memory, or shorten the sequence"
    )
    with pytest.raises(StorageError, match=r"lacks 500 B even without them and the host has 1\.5 KiB, the disk 976\.6"):
        plan_storage(costs, replace(tight, device_bytes=1000, disk_bytes=AMPLE.disk_bytes))


def test_what_is_dropped_costs_its_share_of_the_triangle():
    bare = replace(CALL, other_bytes=0, products=(), elementwise_seconds=0.0)
    exact = Budget(device_bytes=1500 + 2 * 137, host_bytes=10 * 137)
    plan = plan_storage(tiny(n=12, classes=(bare,)), exact, tile_tokens=1)
    assert plan.bound_seconds == pytest.approx(5 + 12 * (4 + 8 + 2 * 0.63**2), rel=1e-7)
    assert plan.storage.calls[0].tokens(ATTENTION) == 37
    assert plan.needs.step_seconds == pytest.approx(plan.bound_seconds, rel=1e-7)


def test_a_budget_that_is_just_enough_is_met_to_the_byte():
    costs = tiny(n=12)
    exact = Budget(device_bytes=1500 + 2 * 100, host_bytes=10 * 100)
    plan = plan_storage(costs, exact)
    assert plan.storage.calls[0].ranges == (StoredRange(kind=INPUT, place="host", start=0, stop=100),)
    assert (plan.needs.device_bytes, plan.needs.host_bytes, plan.needs.rounding_bytes) == (1700, 1000, 200)
    with pytest.raises(StorageError):
        plan_storage(costs, replace(exact, host_bytes=999))
    split = plan_storage(costs, replace(exact, host_bytes=500, disk_bytes=500))
    assert (split.needs.host_bytes, split.needs.disk_bytes) == (500, 500)
    assert split.storage.calls[0].bounds == (0, 50, 100)  # not at a multiple of 128: there is no such plan


def test_layers_that_differ_share_times_only_with_their_like():
    local = replace(CALL, window_tokens=10)
    times = (2.0, 4.0, 30.0, 4.0)  # the third was cold
    measured = [replace(CALL, forward_seconds=seconds, attention_seconds=seconds / 2) for seconds in times]
    step = {f.name: getattr(tiny(), f.name) for f in fields(StorageCosts) if f.name not in ("classes", "call_classes")}
    costs = StorageCosts.of_calls([measured[0], local, *measured[1:]], **step)
    assert costs.call_classes == (0, 1, 0, 0, 0)
    assert costs.classes == (replace(CALL, forward_seconds=4.0, attention_seconds=2.0), local)
    assert (costs.class_calls, costs.class_copies) == ((4, 1), (2, 1))
    assert costs.pairs(costs.call_classes) == [(0, 1), (1, 0), (0, 0)]


def test_windowed_attention_costs_the_same_for_all_tokens_past_the_first_window():
    assert [CALL.attention_share(tokens, 100) for tokens in (0, 50, 100)] == [0, 0.25, 1]
    local = replace(CALL, window_tokens=10)
    assert local.attention_share(55, 100) == pytest.approx((50 + 450) / (50 + 900))
    assert local.attention_slope(55, 100) == pytest.approx(10 / 950)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Product(name="other", size_bytes=1, seconds=1.0), 'a product is named "other"'),
        (lambda: Product(name="q", size_bytes=-1, seconds=1.0), "size_bytes=-1 must be"),
        (
            lambda: replace(tiny().classes[0], products=tiny().classes[0].products * 2),
            "different names, but several are named .a.",
        ),
        (lambda: replace(tiny().classes[0], window_tokens=0), "window_tokens=0 must be"),
        (lambda: tiny(call_classes=(0, 1)), "each of the 1 classes"),
        (lambda: tiny(classes=(), call_classes=()), "each of the 0 classes"),
        (lambda: tiny(offload_bytes_per_second=0.0), "offload_bytes_per_second=0.0 must be greater than 0"),
    ],
)
def test_documents_refuse_what_makes_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_solver_that_fails_is_not_believed(monkeypatch):
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kWarning)
    with pytest.raises(RuntimeError, match="HiGHS did not solve a linear program"):
        plan_storage(tiny(), AMPLE)
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)
    with pytest.raises(RuntimeError, match="HiGHS rejected"):
        plan_storage(tiny(), AMPLE)
