from dataclasses import replace

import pytest
from rich.console import Console
from support.alpha_plans import alpha_swap

from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import PlanMemory
from lightning_memo.planner.token_slices import plan_of_plain_training
from lightning_memo.reports.tables import Measurement, comparison_table, plan_table

MIB = 2**20
GIB = 2**30


def render(table, width=100):
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def row(text, start):
    """Cells of the one row whose first cell is `start`."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    (found,) = [cells[1:] for cells in rows if cells[0] == start]
    return found


@pytest.fixture
def plan():
    n = 6
    return Plan(
        fingerprint=Fingerprint(
            model="[red]Llama", batch=2, tokens=65536, precision="bf16", device="cuda", torch="2.13", parallel="1"
        ),
        costs=LayerCosts(
            batch=2,
            tokens=65536,
            input_bytes=(MIB,) * n,
            attention_bytes=(MIB,) * n,
            other_bytes=(8 * MIB,) * n,
            forward_seconds=(0.1,) * n,
            backward_seconds=(0.2,) * n,
            recompute_seconds=(0.05,) * n,
            outside_seconds=0.3,
            offload_bytes_per_second=1e9,
            prefetch_bytes_per_second=1e9,
            fixed_device_bytes=30 * GIB,
            transient_device_bytes=GIB,
        ),
        budget=Budget(device_bytes=80 * GIB, host_bytes=120 * GIB),
        swap=alpha_swap(0.25, n, 5 * MIB, 65536, slice_tokens=8192),
        step_seconds=2.125,
        reason="Above alpha=0.25 a layer's copy would outlast its forward.",
    )


def test_like_layers_share_a_row(plan):
    text = render(plan_table(plan))
    assert row(text, "layers 0-3") == ["4.0 MiB", "6.0 MiB", "-"]
    assert row(text, "layers 4-5") == ["-", "6.0 MiB", "4.0 MiB"]


def test_a_layer_of_its_own_size_has_a_row_of_its_own(plan):
    costs = replace(plan.costs, other_bytes=(4 * MIB, *plan.costs.other_bytes[1:]))
    text = render(plan_table(replace(plan, costs=costs)))
    assert row(text, "layer 0") == ["3.0 MiB", "3.0 MiB", "-"]
    assert row(text, "layers 1-3") == ["4.0 MiB", "6.0 MiB", "-"]


def test_the_whole_plan_is_summed_up(plan):
    text = render(plan_table(plan))
    assert "[red]Llama, batch 2 x 65,536 tokens" in text
    assert "memo, alpha=0.25, slices of at most 8,192 tokens" in text
    assert "needs 20.0 MiB, budget 120.0 GiB" in text
    assert "(30.0 GiB of it model state), budget 80.0 GiB" in text
    assert "2.12 s expected" in text
    assert plan.reason in text


def test_what_goes_to_the_disk_is_told(plan):
    assert "disk" not in render(plan_table(plan))
    with_disk = replace(plan, budget=replace(plan.budget, disk_bytes=GIB))
    assert "disk needs 0 B, budget 1.0 GiB: not needed" in " ".join(render(plan_table(with_disk)).split())
    spilled = replace(with_disk, swap=alpha_swap(0.25, 6, 5 * MIB, 65536, slice_tokens=8192, disk_calls=2))
    told = "disk needs 10.0 MiB, budget 1.0 GiB: layer calls 0, 2 (2 of the 4 swapped)"
    assert told in " ".join(render(plan_table(spilled)).split())


def test_without_a_limit_slices_are_not_mentioned(plan):
    assert "slices" not in render(plan_table(replace(plan, swap=alpha_swap(0.25, 6, 5 * MIB, 65536))))


def test_a_plain_plan_keeps_everything(plan):
    swap = replace(plan.swap, storage=plan_of_plain_training(65536, 6), memory=PlanMemory())
    text = render(plan_table(replace(plan, swap=swap, step_seconds=0.0125, reason="Ample.")))
    assert row(text, "layers 0-5") == ["-", "-", "10.0 MiB"]
    assert "plain, nothing swapped or recomputed" in text
    assert "alpha" not in text
    assert "needs 0 B, budget 120.0 GiB" in text
    assert "12.5 ms expected" in text


def test_measurements_are_compared_with_the_first():
    rows = [
        Measurement(
            name="plain", step_seconds=2.0, step_memory_bytes=80 * GIB, host_bytes=0, tokens_per_second=32768.0
        ),
        Measurement(
            name="memo [0.5]", step_seconds=2.5, step_memory_bytes=20 * GIB, host_bytes=3 * GIB, tokens_per_second=26214
        ),
    ]
    text = render(comparison_table(rows))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "plain 2.00 s (1.00x) 80.0 GiB (1.00x) 0 B 32,768" in lines
    assert "memo [0.5] 2.50 s (1.25x) 20.0 GiB (0.25x) 3.0 GiB 26,214" in lines


def test_a_comparison_of_nothing_is_an_empty_table():
    assert comparison_table([]).row_count == 0
