"""Storage problems whose solutions are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_memo.artifacts.costs import Budget, CallCosts, LayerCosts, Product, StorageCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import PlanMemory, StoragePlan
from lightning_memo.planner import Restrictions, make_plan

TOKENS = 2000  # so few that ranges may begin at any token

CALL = CallCosts(
    input_bytes=2048 * TOKENS, attention_bytes=2068 * TOKENS, other_bytes=40_960 * TOKENS,
    products=(Product(name="up", size_bytes=8192 * TOKENS, seconds=0.02),),
    forward_seconds=0.1, backward_seconds=0.2, attention_seconds=0.03, elementwise_seconds=0.01,
)  # fmt: skip

CALLS = 6

LAYERS = LayerCosts(
    batch=1, tokens=TOKENS, input_bytes=(CALL.input_bytes,) * CALLS, attention_bytes=(CALL.attention_bytes,) * CALLS,
    other_bytes=(CALL.other_bytes,) * CALLS, forward_seconds=(0.1,) * CALLS, backward_seconds=(0.2,) * CALLS,
    recompute_seconds=(0.03,) * CALLS, outside_seconds=0.1, offload_bytes_per_second=2e8, prefetch_bytes_per_second=2e8,
    fixed_device_bytes=1000, transient_device_bytes=500,
)  # fmt: skip

COSTS = StorageCosts(
    tokens=TOKENS, classes=(CALL,), call_classes=(0,) * CALLS, outside_seconds=0.1, offload_bytes_per_second=2e8,
    prefetch_bytes_per_second=2e8, fixed_device_bytes=1000,
    transient_device_bytes=LAYERS.working_bytes(1.0),
)  # fmt: skip

LABEL = Fingerprint(model="m", batch=1, tokens=TOKENS, precision="bf16", device="cuda", torch="2.13", parallel="1")

MIB = 2**20

ALWAYS = COSTS.fixed_device_bytes + COSTS.transient_device_bytes


def rounded(unit: int) -> Any:
    """Return a function for the bytes of a plan whose ranges are aligned to `unit`."""

    def of(plan: StoragePlan) -> PlanMemory:
        (stored,) = plan.calls
        sizes = dict(zip(CALL.kinds, CALL.sizes, strict=True))

        def total(place: str) -> int:
            ranges = (r for r in stored.ranges if r.place == place)
            return sum(-(-sizes[r.kind] * (r.stop - r.start) // TOKENS // unit) * unit for r in ranges)

        return PlanMemory(
            slot=total("host") + total("disk"), host=(CALLS - 2) * total("host"), kept=CALLS * total("device"),
            disk=(total("disk"),) * CALLS,
        )  # fmt: skip

    return of


def planned(budget: Budget, unit: int = 1, disk_speed: float = 2e8) -> Plan:
    kinds = replace(COSTS, disk_write_bytes_per_second=disk_speed, disk_read_bytes_per_second=disk_speed)
    return make_plan(LAYERS, budget, LABEL, Restrictions(kinds=kinds, may_be_plain=False), rounded(unit))
