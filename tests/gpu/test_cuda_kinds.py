"""Plans by kinds of tensors on a GPU: gradients, bytes, and matrix products that are not recomputed."""

from __future__ import annotations

import copy

import pytest
import torch
from support.samples.cuda import FARTHER, TOKENS, distance, gradients, make_batch, make_model
from torch.utils.flop_counter import FlopCounterMode

from lightning_memo.artifacts.costs import Place
from lightning_memo.artifacts.swap_plan import CallPlan, StoragePlan, StoredRange, SwapPlan
from lightning_memo.engine import Engine, RequestedSettings, TestMode
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.planner.token_slices import memory_of_plan
from lightning_memo.utils.find_layers import find_stacks

Row = tuple[str, Place, int, int]
BASE: list[Row] = [("input", "host", 0, TOKENS), ("attention", "host", 0, TOKENS)]
MIXED: list[Row] = [
    ("input", "device", 0, 128),
    ("input", "host", 128, TOKENS),
    ("attention", "host", 64, TOKENS),
    ("other", "host", 384, 448),
    ("other", "device", 448, TOKENS),
    ("self_attn.q_proj", "host", 64, 384),
    ("self_attn.v_proj", "device", 0, 384),
    ("mlp.up_proj", "host", 128, 384),
]


def load(engine: Engine, rows: list[Row], profile: StepProfile) -> None:
    ranges = tuple(StoredRange(kind=kind, place=place, start=start, stop=stop) for kind, place, start, stop in rows)
    plan = StoragePlan(
        tokens=TOKENS, call_classes=(0,) * len(engine.layers), calls=(CallPlan(ranges=ranges),)
    )  # fmt: skip
    saved = [[*call.saved, *(product.saved for product in call.products)] for call in profile.in_order()]
    memory = memory_of_plan(plan, [(of, TOKENS) for of in saved], len(engine.layers) - 2)
    engine.load(SwapPlan(storage=plan, memory=memory), profile.batch * TOKENS)


@pytest.mark.parametrize("window", [None, 100])
def test_gradients_where_everything_is_somewhere(window: int | None, device: torch.device) -> None:
    model, batch = make_model(device, window=window), make_batch(device)
    in_double = copy.deepcopy(model).to("cpu", torch.float64)
    truth = gradients(in_double, {name: t.cpu() for name, t in batch.items()})
    plain = distance(gradients(model, batch), truth)
    test_mode = TestMode(seed=1, longest_delay_seconds=0.002)
    engine = Engine(
        model,
        list(find_stacks(model)[0].layers),
        device,
        RequestedSettings("sdpa", test_mode=test_mode, by_kind=True),
    )
    engine.attach()
    try:
        gradients(model, batch)
        profile = engine.profile
        assert profile is not None and all(product.seconds > 0 for product in profile.in_order()[1].products)
        assert 0.0 < profile.launch_seconds < 60.0
        load(engine, MIXED, profile)
        for _ in range(3):
            assert distance(gradients(model, batch), truth) <= FARTHER * plain
        assert engine.memory is not None and engine.slots_in_use == 0
        stats = engine.memory.stats
        assert (stats.overflow_bytes, stats.unplanned_slots) == (0, 0)
        assert stats.peak_host_bytes == engine.host_bytes > 0
    finally:
        engine.detach()


def test_a_stored_product_is_not_computed_again(device: torch.device) -> None:
    model, batch = make_model(device), make_batch(device)
    engine = Engine(model, list(find_stacks(model)[0].layers), device, RequestedSettings("sdpa", by_kind=True))
    engine.attach()
    try:
        gradients(model, batch)
        profile, flops = engine.profile, []
        assert profile is not None
        for rows in (BASE, [*BASE, ("mlp.up_proj", "host", 0, TOKENS)]):
            load(engine, rows, profile)
            loss = model(**batch).loss
            with FlopCounterMode(display=False) as counter:
                loss.backward()
            flops.append(counter.get_total_flops())
    finally:
        engine.detach()
    assert flops[0] - flops[1] == len(engine.layers) * 2 * 2 * TOKENS * 256 * 512
