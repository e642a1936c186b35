import ast
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.samples.plans import small_plan

import lightning_memo.artifacts
import lightning_memo.artifacts.plan
from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import PlanMemory, SwapPlan
from lightning_memo.planner.token_slices import plan_of_alpha, plan_of_plain_training

COUNTS = st.integers(0, 2**50)
SECONDS = st.floats(0, 1e6)
RATES = st.floats(1e-3, 1e15)
TEXTS = st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))).filter(str.isprintable)


@st.composite
def plans(draw):
    n = draw(st.integers(1, 5))
    counts, seconds = st.tuples(*[COUNTS] * n), st.tuples(*[SECONDS] * n)
    costs = LayerCosts(
        batch=draw(st.integers(1, 9)),
        tokens=draw(st.integers(1, 2**40)),
        input_bytes=draw(counts),
        attention_bytes=draw(counts),
        other_bytes=draw(counts),
        forward_seconds=draw(seconds),
        backward_seconds=draw(seconds),
        recompute_seconds=draw(seconds),
        outside_seconds=draw(SECONDS),
        offload_bytes_per_second=draw(RATES),
        prefetch_bytes_per_second=draw(RATES),
        fixed_device_bytes=draw(COUNTS),
        transient_device_bytes=draw(COUNTS),
    )
    swap = SwapPlan(
        storage=plan_of_alpha(
            costs.tokens, draw(st.floats(0, 1)), n, slice_tokens=draw(st.none() | st.integers(1, 2**40))
        ),
        memory=PlanMemory(slot=draw(COUNTS), host=draw(COUNTS), kept=draw(COUNTS)),
        joint_attention=draw(st.booleans()),
    )
    texts = {name: draw(TEXTS) for name in ("model", "precision", "device", "torch", "parallel")}
    return Plan(
        fingerprint=Fingerprint(batch=costs.batch, tokens=costs.tokens, **texts),
        costs=costs,
        budget=Budget(device_bytes=draw(COUNTS), host_bytes=draw(COUNTS)),
        swap=swap,
        step_seconds=draw(SECONDS),
        reason=draw(TEXTS),
    )


@pytest.fixture
def plan():
    return small_plan()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans())
def test_a_plan_comes_back_as_it_was_saved(tmp_path, plan):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_saving_makes_the_folder_and_leaves_nothing_else(tmp_path, plan):
    path = tmp_path / "a" / "b" / "plan.json"
    plan.save(path)
    plan.save(str(path))
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_file(tmp_path, plan, monkeypatch):
    path = tmp_path / "plan.json"
    plan.save(path)

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(lightning_memo.artifacts.plan.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        replace(plan, step_seconds=9.0).save(path)
    assert Plan.load(path) == plan
    assert list(tmp_path.iterdir()) == [path]


def test_derived_sizes(plan):
    assert plan.costs.calls == 4
    assert plan.costs.skeletal_bytes == 4 * 131
    assert plan.costs.swapped_bytes(0, 0.0) == 30
    assert plan.costs.swapped_bytes(0, 0.5) == 81  # half of 101, rounded up
    assert plan.costs.swapped_bytes(0, 1.0) == 131
    assert (plan.swap.swapped_calls, plan.swap.host_bytes) == (2, 256)
    assert replace(plan.swap, storage=plan_of_alpha(128, 0.5, 1)).swapped_calls == 0
    assert replace(plan.swap, storage=plan_of_plain_training(128, 4)).swapped_calls == 0


CORRUPTIONS = [
    (("version",), 2, "version is 2, but this lightning_memo reads version 3"),
    (("version",), True, "version is True"),
    (("version",), "1", "version is '1'"),
    (("step_seconds",), "fast", "step_seconds is 'fast', expected a number"),
    (("step_seconds",), -1.0, "step_seconds=-1.0 must be finite and at least 0"),
    (("step_seconds",), True, "step_seconds is True, expected a number"),
    (("step_seconds",), 1e300, "step_seconds is 1e+300, expected a number"),
    (("reason",), "\x1b[31mred", "reason is"),
    (("reason",), "x" * 3000, "reason is"),
    (("fingerprint",), [], "fingerprint is [], expected an object"),
    (("fingerprint", "tokens"), 0, "fingerprint.tokens=0 must be finite and at least 1"),
    (("fingerprint", "model"), None, "fingerprint.model is None, expected printable text"),
    (("costs", "input_bytes"), [], "the numbers of layer calls must be equal and at least 1"),
    (("costs", "input_bytes"), [1, 2], "input_bytes 2, attention_bytes 4"),
    (("costs", "input_bytes"), [1, 2, "3", 4], "costs.input_bytes[2] is '3', expected an integer"),
    (("costs", "input_bytes"), [1, 2, 3.0, 4], "costs.input_bytes[2] is 3.0, expected an integer"),
    (("costs", "input_bytes"), [1, 2, -3, 4], "costs.input_bytes=-3 must be finite"),
    (("costs", "input_bytes"), {"0": 1}, "costs.input_bytes is {'0': 1}, expected a list"),
    (("costs", "input_bytes"), [2**70, 1, 1, 1], "costs.input_bytes[0] is"),
    (("costs", "offload_bytes_per_second"), 0, "costs.offload_bytes_per_second=0.0 must be greater than 0"),
    (("costs", "forward_seconds"), [math.nan] * 4, "NaN is not a finite number"),
    (("costs", "forward_seconds"), [math.inf] * 4, "Infinity is not a finite number"),
    (("swap", "stream_from_host"), "magic", 'swap.stream_from_host is \'magic\', expected "none" or "attention" or'),
    (("swap", "stream_from_host"), ["none"], "swap.stream_from_host is ['none']"),
    (("swap", "storage", "call_classes"), [0] * 2**17, "swap.storage.call_classes has 131072 layer calls"),
    (("swap", "storage", "call_classes"), [0] * 3, "must have a class for each of the 4 layer calls, but has 3"),
    (("swap", "storage", "slice_tokens"), 0, "swap.storage.slice_tokens=0 must be finite and at least 1"),
    (("swap", "storage", "slice_tokens"), 1.5, "swap.storage.slice_tokens is 1.5, expected an integer"),
    (("swap", "surprise"), 1, "swap.'surprise' is not a field of a plan"),
    (("budget", "host_bytes"), ..., "budget.host_bytes is missing"),
    (("swap",), ..., "swap is missing"),
    (("version",), ..., "version is None"),
]


@pytest.mark.parametrize(("where", "value", "message"), CORRUPTIONS)
def test_a_corrupted_field_is_named(tmp_path, plan, where, value, message):
    content = json.loads(json.dumps(asdict(plan)))
    *parents, name = where
    part = content
    for parent in parents:
        part = part[parent]
    if value is ...:
        del part[name]
    else:
        part[name] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    _refused(path, message)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 2}',
        b'{"version": ' + b"9" * 5000,
        b'{"version": 2, "version": 2}',
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    _refused(path, "not a plan")


def test_a_cut_file_is_refused(tmp_path, plan):
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text().rstrip()
    for end in range(0, len(text), 97):
        path.write_text(text[:end])
        _refused(path, "not a plan")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


def _refused(path, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Plan.load(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


PURE = sorted(
    str(path.relative_to(Path(lightning_memo.artifacts.__file__).parents[1]))
    for folder in ("artifacts", "planner")
    for path in (Path(lightning_memo.artifacts.__file__).parents[1] / folder).glob("*.py")
)


@pytest.mark.parametrize("name", [*PURE, "config.py"])
def test_planning_imports_neither_torch_nor_lightning(name):
    source = Path(lightning_memo.artifacts.__file__).parents[1] / name
    allowed = {"lightning_memo", "highspy", "numpy", "rich", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed
