import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from support.alpha_plans import alpha_swap

from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.plan_tables import percents
from lightning_memo.artifacts.swap_plan import PlanMemory
from lightning_memo.planner.token_slices import plan_of_plain_training
from lightning_memo.utils.tables import html_of

MIB = 2**20
GIB = 2**30


@pytest.fixture
def plan():
    n = 6
    return Plan(
        fingerprint=Fingerprint(
            model="[red]Llama-790cab1c19db30e0",
            batch=2,
            tokens=65536,
            precision="bf16",
            device="cuda",
            torch="2.13",
            parallel="1",
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


def rows(plan):
    """The rows of a plan's table by name."""
    first, second = plan.table.columns
    return dict(zip(first.cells, map(str, second.cells), strict=True))


def calls(plan):
    """The lines of the table of layer calls that `explain` adds."""
    return [" ".join(line.split()) for line in plan.explain().splitlines()]


def test_like_layers_share_a_row(plan):
    assert "0-3 4.0 MiB 6.0 MiB -" in calls(plan)
    assert "4-5 - 6.0 MiB 4.0 MiB" in calls(plan)


def test_a_layer_of_its_own_size_has_a_row_of_its_own(plan):
    lines = calls(replace(plan, costs=replace(plan.costs, other_bytes=(4 * MIB, *plan.costs.other_bytes[1:]))))
    assert "0 3.0 MiB 3.0 MiB -" in lines
    assert "1-3 4.0 MiB 6.0 MiB -" in lines


def test_a_plan_is_printed_as_a_table_of_at_most_ten_rows(plan):
    assert rows(plan) == {
        "plan": "alpha=0.25, slices of at most 8,192 tokens, sdpa attention",
        "step": "2.12 s expected",
        "kept": "8.0 MiB, 13 % of the activations",
        "swapped": "16.0 MiB, 27 % of the activations",
        "recomputed": "36.0 MiB, 60 % of the activations",
        "device memory": "31.0 GiB of 80.0 GiB: 30.0 GiB model state + 1.0 GiB step",
        "host memory": "20.0 MiB of 120.0 GiB",
        "limit": plan.reason,
    }
    assert str(plan).splitlines()[0] == "[red]Llama, 2 x 65,536 tokens"
    assert all(len(line) <= 80 for line in plan.explain().splitlines())


def test_what_goes_to_the_disk_is_told(plan):
    with_disk = replace(plan, budget=replace(plan.budget, disk_bytes=GIB))
    assert rows(with_disk)["disk"] == "0 B of 1.0 GiB, for 0 layer calls"
    spilled = replace(with_disk, swap=alpha_swap(0.25, 6, 5 * MIB, 65536, slice_tokens=8192, disk_calls=2))
    assert rows(spilled)["disk"] == "10.0 MiB of 1.0 GiB, for 2 layer calls"


def test_a_plan_over_its_budget_says_so(plan):
    over = replace(plan, budget=replace(plan.budget, device_bytes=30 * GIB))
    assert rows(over)["device memory"].endswith("step; over by 1.0 GiB")


def test_a_plain_plan_keeps_everything(plan):
    swap = replace(plan.swap, storage=plan_of_plain_training(65536, 6), memory=PlanMemory())
    shown = rows(replace(plan, swap=swap, step_seconds=0.0125))
    assert (shown["plan"], shown["step"]) == ("plain: nothing is swapped or recomputed", "12.5 ms expected")
    assert (shown["kept"], shown["swapped"], shown["recomputed"]) == ("60.0 MiB, 100 % of the activations", "-", "-")


def test_a_notebook_shows_the_same_rows(plan):
    cells = re.findall(r"<td[^>]*>(.*?)</td>", plan._repr_html_())
    shown = rows(plan)
    shown["limit"] = shown["limit"].replace("'", "&#x27;")
    assert dict(zip(cells[::2], cells[1::2], strict=True)) == shown
    assert "<caption>[red]Llama, 2 x 65,536 tokens</caption>" in plan._repr_html_()


def test_html_shows_what_the_table_shows():
    table = Table("a & b", title="t", caption="[b]c[/b]")
    table.add_column("n", justify="right")
    table.add_row("<x>", "[red]1[/red]")
    page = html_of(table)
    for part in (
        "<caption>t</caption>",
        "<th>a &amp; b</th>",
        "&lt;x&gt;",
        'text-align: right; white-space: pre-wrap">1<',
    ):
        assert part in page
    assert page.endswith("<p>c</p>")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5).filter(any))
def test_percents_make_a_hundred(counts):
    shares = percents(counts)
    assert sum(shares) == 100
    assert all(abs(share - 100 * count / sum(counts)) < 1 for share, count in zip(shares, counts, strict=True))
