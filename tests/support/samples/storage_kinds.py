"""Engines that store activations kind by kind, and plans for them."""

from __future__ import annotations

import math
from pathlib import Path

from torch import nn

from lightning_memo.artifacts.costs import PLACES, Place
from lightning_memo.artifacts.swap_plan import CallPlan, PlanMemory, StoragePlan, StoredRange, SwapPlan
from lightning_memo.engine import Engine, RequestedSettings, TestMode
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.planner.token_slices import slices_of, stored_bytes
from lightning_memo.utils.find_layers import find_stacks
from support.devices import DEVICE
from support.harness import (
    DELAYS,
    EngineUnderTest,
)

TOKENS = 56  # not a size of any weight: what is saved is told apart by its shape

Rows = dict[str, list[tuple[Place, int, int]]]

BASE: Rows = {"input": [("host", 0, TOKENS)], "attention": [("host", 0, TOKENS)]}


def call_plan(rows: Rows) -> CallPlan:
    ranges = (StoredRange(kind=kind, place=p, start=a, stop=b) for kind, of in rows.items() for p, a, b in of)
    return CallPlan(ranges=tuple(ranges))


def storage_plan(classes: tuple[Rows, ...], calls: int) -> StoragePlan:
    """Return a plan whose layer calls cycle through the given classes."""
    return StoragePlan(
        tokens=TOKENS,
        call_classes=tuple(n % len(classes) for n in range(calls)),
        calls=tuple(call_plan(rows) for rows in classes),
    )


def everything(names: list[str], nested: bool = False) -> Rows:
    """Return rows with every kind in every place, in eight slices.

    Attention of the first tokens is recomputed, unless it runs over all tokens at once.
    """
    rows: Rows = {
        "input": [("device", 0, 20), ("host", 20, TOKENS)],
        "attention": [("host", 0 if nested else 16, 32), ("device", 32, TOKENS)],
        "other": [("host", 40, 48), ("device", 48, TOKENS)],
    }
    for n, name in enumerate(names):
        rows[name] = [[("host", 8, 40)], [("device", 24, 40)], [("host", 0, 24), ("device", 24, 40)]][n % 3]
    return rows


class ByKind(EngineUnderTest):
    """An engine that stores kind by kind."""

    def __init__(
        self,
        model: nn.Module,
        test_mode: TestMode | None = DELAYS,
        disk_path: Path | None = None,
        host_limit: float = math.inf,
        joint_attention: bool = False,
        fused_kernels: bool = False,
    ) -> None:
        super().__init__(model, test_mode=test_mode)
        layers = find_stacks(model)[0].layers
        settings = RequestedSettings(
            by_kind=True, disk_path=disk_path, test_mode=test_mode, host_limit=lambda held_bytes: host_limit,
            joint_attention=joint_attention, fused_kernels=fused_kernels,
        )  # fmt: skip
        self.engine = Engine(model, layers, DEVICE, settings)

    @property
    def products(self) -> list[str]:
        assert self.profile is not None
        return [product.name for product in self.profile.in_order()[1].products]

    def load_storage(self, *classes: Rows) -> tuple[list[int], list[int]]:
        """Load a plan, and return the predicted bytes that each layer call swaps and keeps."""
        profile = self.profile
        assert profile is not None
        plan = storage_plan(classes, len(profile.calls))
        kept, swapped, spilled = (predicted_bytes(profile, plan, place) for place in PLACES)
        memory = PlanMemory(
            slot=max(map(sum, zip(swapped, spilled, strict=True))), host=sum(swapped[:-2]), disk=tuple(spilled),
            kept=sum(kept),
        )  # fmt: skip
        swap = SwapPlan(storage=plan, memory=memory, joint_attention=self.engine.layer_classes.joint_attention)
        self.engine.load(swap, profile.batch * profile.tokens)
        return swapped, kept


def predicted_bytes(profile: StepProfile, plan: StoragePlan, place: Place) -> list[int]:
    calls = ([*call.saved, *(product.saved for product in call.products)] for call in profile.in_order())
    return [
        stored_bytes(saved, profile.tokens, slices_of(plan, n, profile.tokens), place) for n, saved in enumerate(calls)
    ]
