"""Constants are fitted to measurements, and the estimate reads their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.alpha_plans import memory_by
from support.commands import errors, run

from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.cli import calibration_runs
from lightning_memo.estimate.calibrate import EFFICIENCIES, LayerMeasurement, StepMeasurement, calibrate, fit, main
from lightning_memo.estimate.cluster import (
    Constants,
    constants_of,
    load_cluster,
    load_model,
    load_preset,
    read_constants,
)
from lightning_memo.estimate.planner_inputs import estimated_layer_costs
from lightning_memo.estimate.request import EstimateRequest, Method, Parallelism
from lightning_memo.planner import Restrictions, make_plan

CLUSTER, SHAPE = load_cluster("h100"), load_model("llama_tiny")
TRUE = replace(
    constants_of("h100"),
    dense_efficiency=0.31,
    attention_forward_efficiency=0.12,
    attention_backward_efficiency=0.05,
    host_efficiency=0.8,
)
COMMAND = ["python", "-m", "lightning_memo.estimate"]


def costs(tokens: int, constants: Constants = TRUE, method: Method = "memo") -> LayerCosts:
    """The costs that a machine with these constants would measure."""
    request = EstimateRequest(
        shape=SHAPE, cluster=CLUSTER, constants=constants, method=method, gpus=1, seq_len=tokens, batch_size=1
    )
    return estimated_layer_costs(request, Parallelism())


def measurement(tokens: int, factor: float = 1.0) -> LayerMeasurement:
    """A run whose forwards took `factor` times the predicted time."""
    exact = costs(tokens)
    slow = replace(exact, forward_seconds=tuple(factor * seconds for seconds in exact.forward_seconds))
    return LayerMeasurement(origin=f"{tokens}", shape=SHAPE, costs=slow)


def efficiencies(constants: Constants) -> list[float]:
    return [getattr(constants, name) for name in EFFICIENCIES]


def test_the_constants_of_a_machine_are_found_and_tell_a_length_that_was_not_measured() -> None:
    fitted, residuals = fit([measurement(512), measurement(2048)], CLUSTER, constants_of("h100"))
    assert efficiencies(fitted) == pytest.approx(efficiencies(TRUE))
    assert fitted.host_efficiency == pytest.approx(0.8)
    assert len(residuals) == 6 and all(abs(residual.percent) < 1e-6 for residual in residuals)
    untried = costs(8192, fitted)
    assert untried.forward_seconds == pytest.approx(costs(8192).forward_seconds)
    assert untried.backward_seconds == pytest.approx(costs(8192).backward_seconds)


def test_what_no_constants_explain_is_told() -> None:
    _, residuals = fit([measurement(512, 1.2), measurement(2048)], CLUSTER, constants_of("h100"))
    worst = max(residuals, key=lambda residual: abs(residual.percent))
    assert worst.what == "512, forward of a layer"
    assert -17 < worst.percent < -2
    assert str(worst) == f"512, forward of a layer: {worst.measured_seconds:.4g} s measured, {worst.percent:+.1f} %"


def test_layers_that_differ_are_refused() -> None:
    parts = (replace(SHAPE, layers=3), replace(SHAPE, layers=5, window=64))
    with pytest.raises(ValueError, match=r"512: the layers of llama_tiny differ; calibrate with a model of equal"):
        fit([replace(measurement(512), shape=replace(SHAPE, parts=parts))], CLUSTER, constants_of("h100"))


def test_whole_steps_keep_the_ratio_of_attentions_forward_and_backward() -> None:
    def step(tokens: int) -> StepMeasurement:
        exact = costs(tokens, method="plain")
        seconds = sum(exact.forward_seconds) + sum(exact.backward_seconds) + exact.outside_seconds
        return StepMeasurement(origin="step", shape=SHAPE, batch=3, tokens=tokens, seconds=3 * seconds)

    base = replace(TRUE, dense_efficiency=0.9, attention_forward_efficiency=0.6, attention_backward_efficiency=0.25)
    fitted, _ = fit([step(512), step(4096)], CLUSTER, base)
    assert efficiencies(fitted) == pytest.approx(efficiencies(TRUE))
    assert fitted.host_efficiency == base.host_efficiency


def test_peaks_that_are_exceeded_are_refused() -> None:
    slow = replace(CLUSTER, peak_flops=CLUSTER.peak_flops / 10)
    with pytest.raises(ValueError, match=r"dense_efficiency would be 3\.1, but cannot exceed 1: .*cluster\.peak_flops"):
        fit([measurement(512), measurement(2048)], slow, TRUE)
    far = replace(CLUSTER, host_bandwidth=1e9)
    with pytest.raises(ValueError, match=r"above cluster\.host_bandwidth=1e\+09"):
        fit([measurement(512)], far, TRUE)
    with pytest.raises(ValueError, match="there are no measurements"):
        fit([], CLUSTER, TRUE)
    with pytest.raises(ValueError, match=r"8 layer calls, but small has 4 layers: give the model of the run"):
        LayerMeasurement(origin="run", shape=replace(SHAPE, name="small", layers=4), costs=costs(512))


# ---- files


def save_plan(path: Path, tokens: int) -> None:
    label = Fingerprint(
        model="x", batch=1, tokens=tokens, precision="32-true", device="cpu", torch="2", parallel="none"
    )
    budget = Budget(device_bytes=2**40, host_bytes=2**40)
    memory_of = memory_by(lambda alpha: 64, costs(tokens).swapped_calls)
    make_plan(costs(tokens), budget, label, Restrictions(), memory_of).save(path)


def save_benchmark(path: Path, tokens: int) -> None:
    """Results of `benchmarks/engine.py`."""
    exact = costs(tokens, method="plain")
    seconds = sum(exact.forward_seconds) + sum(exact.backward_seconds) + exact.outside_seconds
    model = {"layers": 8, "hidden": 256, "ffn": 688, "heads": 8, "kv_heads": 8, "vocab": 264, "batch": 1}
    rows = [{"method": {"name": "plain"}, "median_seconds": seconds}, {"method": {"name": "alpha=0"}}]
    path.write_text(json.dumps({"model": model | {"seq_len": tokens}, "results": rows}), encoding="utf-8")


def settings(folder: Path, **changes: Any) -> list[str]:
    return [f"{name}={value}" for name, value in ({"output": folder / "constants.json"} | changes).items()]


@pytest.mark.slow
def test_plans_and_benchmarks_of_a_folder_make_constants_that_the_estimate_uses(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for tokens in (512, 2048):
        save_plan(runs / f"plan{tokens}.json", tokens)
    save_benchmark(runs / "engine.json", 1024)
    (runs / "other.json").write_text('{"results": [{"problem": "A"}]}', encoding="utf-8")
    arguments = settings(tmp_path, files="[runs]", model="llama_tiny", cluster="h100")
    status, out, err = run([*COMMAND, "calibrate", *arguments], tmp_path)
    assert (status, err) == (0, "")
    assert "constants.json" in out
    made = read_constants(tmp_path / "constants.json")
    assert efficiencies(made) == pytest.approx(efficiencies(TRUE))
    assert "estimate calibrate" in made.source and "cluster h100" in made.source and "plan512.json" in made.source
    assert len(made.measurements) == 7
    ask = [*COMMAND, "model=llama_tiny", "gpus=1", "seq_len=4K", "batch_size=1", "output=json", "method=full_swap"]
    status, out, err = run([*ask, f"constants={tmp_path / 'constants.json'}"], tmp_path)
    assert (status, err) == (0, "")
    exact = costs(4096)
    assert json.loads(out)["step_seconds"] >= sum(exact.forward_seconds) + sum(exact.backward_seconds)
    assert json.loads(out)["step_seconds"] != json.loads(run(ask, tmp_path)[1])["step_seconds"]
    status, out, err = run([*ask, f"constants={tmp_path / 'constants.json'}", "cluster=a800"], tmp_path)
    assert (status, out) == (2, "")
    assert "cluster=h100, not for cluster=a800: give cluster=h100, or calibrate with cluster=a800" in err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"files": "[broken.json]"}, "error: broken.json: not JSON"),
        ({"files": "[missing.json]"}, "error: files: missing.json: No such file or directory; give saved plans"),
        (
            {"files": "[empty]"},
            "error: files=['empty']: no measurements in any of 0 files: give the memo_plan.json of a run",
        ),
        ({"files": "runs"}, "error: files='runs': give a list"),
        ({"seq_lens": "[1]"}, "error: seq_lens contains 1: give lengths of at least 2 tokens"),
        ({"seq_lens": "4K"}, "error: seq_lens='4K': give a list"),
        ({"seq_lens": "[]"}, "error: seq_lens=[]: give a list"),
        ({"repeats": "0"}, "error: repeats=0: give an integer"),
        ({"seq_lens": "[long]"}, "error: seq_lens='long' is not a number of tokens"),
        ({"model": "none"}, "error: "),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, in_process: Any, changes: dict[str, str], told: str) -> None:
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    status, _, err = in_process(main, *settings(tmp_path, **changes))
    assert status == 2
    assert len(errors(err)) == len(err.splitlines()) == 1
    assert err.startswith(told)
    assert not (tmp_path / "constants.json").exists()


@pytest.mark.slow
def test_a_short_run_here_is_measured_and_only_progress_and_the_table_are_seen(tmp_path: Path) -> None:
    small = (
        "model=llama_tiny", "model.config.hidden_size=64", "model.config.intermediate_size=172",
        "model.config.num_hidden_layers=4", "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=4",
    )  # fmt: skip
    status, out, err = run([*COMMAND, "calibrate", *small, "seq_lens=[4K]", "repeats=1"], tmp_path)
    assert status == 0
    assert err == "length 1 of 1: llama_tiny, 4,096 tokens, 1 runs\n"
    assert out.count("1 x 4096 tokens") == 3
    assert out.split()[:3] == ["measured", "and", "fitted"]
    assert out.endswith("Use the constants with constants=constants.json\n")
    found = read_constants(tmp_path / "constants.json")
    assert "measured on cpu" in found.source and len(found.measurements) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "constants.json"]


def test_constants_say_how_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = {512: [1.5, 1.0, 2.0], 2048: [1.0, 3.0, 2.0]}

    def run_here(model: Any, tokens: int) -> Plan:
        save_plan(tmp_path / "plan.json", tokens)
        plan = Plan.load(tmp_path / "plan.json")
        seconds = tuple(slower[tokens].pop() * each for each in plan.costs.forward_seconds[:1]) * plan.costs.calls
        return replace(plan, costs=replace(plan.costs, forward_seconds=seconds))

    monkeypatch.setattr(calibration_runs, "profile_run", run_here)
    model, cluster = load_preset("model", "llama_tiny"), load_preset("cluster", "h100")
    path = tmp_path / "made" / "constants.json"
    given = {"model": model, "cluster": cluster, "files": [], "seq_lens": [512, "2K"], "repeats": 3}
    constants, residuals = calibrate({**given, "output": str(path)}, "llama_tiny")
    assert capsys.readouterr().err.splitlines() == [
        "length 1 of 2: llama_tiny, 512 tokens, 3 runs", "length 2 of 2: llama_tiny, 2,048 tokens, 3 runs",
    ]  # fmt: skip
    assert read_constants(path) == constants
    assert efficiencies(constants) == pytest.approx(efficiencies(TRUE))
    assert "torch" in constants.source and "measured on cpu" in constants.source
    assert constants.measurements == tuple(map(str, residuals))
    assert [r.what for r in residuals[2::3]] == [
        f"llama_tiny, 1 x {tokens} tokens, recomputation of a layer" for tokens in (512, 2048)
    ]
