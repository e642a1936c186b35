"""The benchmark of cells, on a CPU: what a cell measures, how a run goes on, and what its numbers are made of."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from support.benchmark_modules import ROOT, load
from support.markers.slow import slow_if
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("own_modules")

TINY = ("--models", "llama_tiny", "--layers", "3", "--device", "cpu", "--lengths", "128", "--warmup", "1",
        "--repeats", "2", "--slice-tokens", "64")  # fmt: skip
METHODS = ("plain", "checkpointing_save_on_cpu", "async_offload", "memo_alpha_0.5")


def command(*arguments):
    return [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def results(folder):
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/*/*.json"))]
    return {(result["cell"]["tuning"], result["cell"]["method"]): result for result in found}


def arguments(folder, *tuning, methods=METHODS):
    return (*TINY, "--methods", *methods, "--tuning", *tuning, "--output", folder)


def run_here(folder, *tuning, **others):
    """Run the cells that are not finished, and return what is said."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["gpu.py", *map(str, arguments(folder, *tuning, **others))])
        assert load("gpu").main() == 0, said.getvalue()
    return said.getvalue()


@pytest.fixture(scope="module", params=["full", "lora"])
def finished(tmp_path_factory, request):
    """The results of a run of some cells by method, and what it said."""
    folder = tmp_path_factory.mktemp("cells")
    said = run_here(folder, request.param)
    assert_complete(folder, request.param)
    return {method: result for (_, method), result in results(folder).items()}, said


slow_tuning = slow_if(lambda finished: finished == "lora")


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_ended(tmp_path):
    folder = tmp_path
    process = subprocess.Popen(
        command(*arguments(folder, "full", "lora")), env=environment(), stdout=subprocess.PIPE, text=True
    )
    limit = time.monotonic() + 600
    while not list(folder.glob("*/*/*.json")) and time.monotonic() < limit:
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stdout.close()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*.json")}
    said = run_here(folder, "full", "lora")
    assert 0 < len(before) < len(METHODS) * 2
    for path, changed in before.items():
        assert path.stat().st_mtime_ns == changed
        assert str(path.relative_to(folder).relative_to(path.parents[1].name)) not in said
    assert_complete(folder, "full", "lora")


def assert_complete(folder, *tunings):
    assert set(results(folder)) == {(tuning, method) for tuning in tunings for method in METHODS}
    assert not list(folder.glob("**/.*")), "an unfinished file is left"


@pytest.mark.slow
def test_methods_at_a_length_come_one_after_the_other(finished):
    _, said = finished
    order = [line.partition(" ...")[0] for line in said.splitlines() if " ... " in line]
    assert [path.partition("/")[0] for path in order] == sorted(path.partition("/")[0] for path in order)


@pytest.mark.slow
def test_every_method_trains_alike(finished):
    found, _ = finished
    plain = found["plain"]
    for method in set(METHODS) - {"plain", "async_offload"}:
        result = found[method]
        # bf16 weights and activations: a sum in another order differs by a few of its last places, 2^-8.
        assert result["losses"][0] == pytest.approx(plain["losses"][0], rel=2**-8)
        assert result["gradient_norm"] == pytest.approx(plain["gradient_norm"], rel=2**-5)
        assert result["losses"][2] < result["losses"][0]


@slow_tuning
def test_a_result_says_what_was_measured_and_how(finished):
    result = finished[0]["memo_alpha_0.5"]
    assert result["status"] == "ok"
    assert result["steps"] == {"prime": 0, "settling": 1, "warmup": 1, "timed": 2, "observed": 1}
    assert len(result["seconds"]) == 2
    assert min(result["seconds"]) <= result["median_seconds"] <= max(result["seconds"])
    stages = [stage for stage, *_ in result["every_step"]]
    assert stages == ["settling", "warmup", "timed", "timed", "observed"]
    assert [step[-2:] for step in result["every_step"]] == [[None, None]] * 5, "a CPU tells no clock and no power"
    assert result["tokens_per_second"] == 128 / result["median_seconds"]
    assert result["plan"]["alpha"] == 0.5
    assert result["plan"]["overflow_bytes"] == 0
    assert result["swapped_host_bytes"] > 0
    assert result["memory"]["peak_rss_bytes"] > 0
    assert result["mfu"] is None, "a CPU has no peak"
    assert result["waits"]["copied_bytes"]["offload"] == result["waits"]["copied_bytes"]["prefetch"] > 0
    assert torch.__version__.startswith(result["versions"]["torch"])  # the wheels of CUDA builds leave "+cu130" out
    assert "--layers 3" in result["command"]
    assert result["date"] and result["device"]
    assert finished[0]["plain"]["waits"] is None


@slow_tuning
def test_a_method_that_is_not_to_be_had_says_so_and_is_tried_again(finished):
    result = finished[0]["async_offload"]
    assert result["status"] == "unavailable"
    assert result["reason"].startswith("needs a GPU")
    assert not load("cells.cell").finished(result, 1.0)


def test_a_package_that_is_missing_is_told(monkeypatch):
    peers = load("peers")

    def missing(package):
        raise peers.PackageNotFoundError(package)

    monkeypatch.setattr(peers, "version", missing)
    with ExitStack() as stack, pytest.raises(peers.Unavailable, match=r"^deepspeed is not installed$"):
        peers.attach_alst(torch.nn.Linear(2, 2), stack)
    with pytest.raises(peers.Unavailable, match=r"^torchtune is not installed; trl is not installed$"):
        peers._async_hooks()


class Tiles:
    """Stands for DeepSpeed's functions that run in tiles; autograd differentiates them."""

    counts: ClassVar[list[int]] = []

    @classmethod
    def apply(cls, function, module, x, *rest):
        *labels, tiles, weights, reduced = rest if len(rest) > 2 else (*rest, "")
        cls.counts.append(tiles)
        assert all(isinstance(weight, torch.nn.Parameter) for weight in weights)
        parts = zip(x.chunk(tiles, -2), *(y.chunk(tiles, -1) for y in labels if y is not None), strict=True)
        made = [function(module, tile.flatten(0, -2), *(y.flatten() for y in more)) for tile, *more in parts]
        return torch.stack(made).sum() if reduced else torch.cat(made).view_as(x)


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    """Stand for DeepSpeed's hooks, which keep what they gave back."""

    def __init__(self):
        self._restored = {}
        super().__init__(lambda tensor: tensor, lambda tensor: self._restored.setdefault(id(tensor), tensor))


@pytest.mark.parametrize("lora", [{}, {"r": 4, "target_modules": "all-linear"}], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["alst", "alst_freed", "alst_reentrant"])
def test_alst_trains_like_the_plain_model_and_leaves_nothing(monkeypatch, method, lora):
    from lightning_memo.estimate.cluster import load_preset
    from lightning_memo.models import ModelConfig, build_model

    peers, tokens = load("peers"), 300
    deepspeed = SimpleNamespace(
        TiledMLP=Tiles, TiledFusedLogitsLoss=Tiles, get_checkpoint_hidden_states_offloading_ctx_manager=Hooks
    )
    monkeypatch.setattr(peers, "_module", lambda name, package: deepspeed)
    monkeypatch.setattr(peers, "named", lambda *packages: packages)
    monkeypatch.setattr(peers, "_LOGITS_BYTES", tokens * 264 * 4 // 3)
    monkeypatch.setattr(Tiles, "counts", [])
    config = {**load_preset("model", "llama_tiny")["config"], "num_hidden_layers": 2}
    model = build_model(ModelConfig(config=config, lora=lora)).train()
    batch = {name: torch.randint(0, 264, (1, tokens)) for name in ("input_ids", "labels")}

    def gradients():
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        return found

    model(**batch).loss.backward()
    expected, checkpoint = gradients(), torch.utils.checkpoint.CheckpointFunction
    with ExitStack() as stack:
        peer = load("cells.methods").METHODS[method].attach(model, stack)
        with peer.step or contextlib.nullcontext():
            peer.loss(batch).backward()
            assert bool(peer.step and peer.step._restored) == (method == "alst")
        torch.testing.assert_close(gradients(), expected)
    assert peer.packages == ("deepspeed",)
    # Each layer runs twice, with as many tiles as hidden sizes fit; the logits of the loss need three.
    assert Tiles.counts == [*[-(-tokens // config["hidden_size"])] * 2, 3, *[-(-tokens // config["hidden_size"])] * 2]
    assert torch.utils.checkpoint.CheckpointFunction is checkpoint
    model(**batch).loss.backward()
    torch.testing.assert_close(gradients(), expected)
    assert len(Tiles.counts) == 5


@pytest.mark.slow
def test_the_profiled_step_is_not_timed():
    """A shorter sequence, which creates the optimizer's state, gives a plan that does not cover the cell's."""
    cell, process = load("cells.cell"), load("cells.process")
    ours = cell.Cell(method="memo_alpha_0.5", tokens=128, model="llama_tiny", layers=2, device="cpu")
    effort = cell.Effort(warmup=0, repeats=1, settle_seconds=0, prime_tokens=32, observe=False)
    result = process.run_cell(ours, effort, 120.0, ["x"])
    assert result["status"] == "ok", result
    assert result["steps"] == {"prime": 1, "settling": 1, "warmup": 0, "timed": 1, "observed": 0}


@pytest.mark.slow
def test_a_cell_that_takes_too_long_is_a_result(tmp_path):
    cell, process = load("cells.cell"), load("cells.process")
    assert process.device_name("cpu")  # from here on processes start quickly
    endless = cell.Cell(method="plain", tokens=128, model="llama_tiny", layers=2, device="cpu")
    for seconds in (4.0, 8.0, 60.0):  # on a busy machine the first step may be over late
        result = process.run_cell(endless, cell.Effort(warmup=0, repeats=99999), seconds, ["x"])
        assert (result["status"], result["reason"]) == ("timeout", f"not over after {seconds:g} s")
        if result["steps"]["timed"] > 0:
            break
    assert result["steps"]["timed"] > 0, "what was measured until then is lost"
    result["effort"] = {"seconds": seconds}
    assert cell.finished(result, seconds)
    assert not cell.finished(result, seconds + 1)


class Ends:
    """Stands where a cell does, and ends the process that gets it."""

    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        return eval, (f"__import__('os').{self.how}",)


@pytest.mark.parametrize(
    ("how", "status"), [("kill(__import__('os').getpid(), 9)", "oohm"), ("_exit(3)", "error")], ids=["killed", "ended"]
)
def test_a_process_that_ends_is_a_result(how, status):
    result = load("cells.process").run_cell(Ends(how), load("cells.cell").Effort(), 60.0, ["x"])
    assert result["status"] == status


def said_of(monkeypatch, capsys, *arguments):
    """The last line on stderr of a command that ends with status 2."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
    try:
        status = load("gpu").main()
    except SystemExit as end:
        status = end.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "fast"), "invalid choice: 'fast'"),
        (("--lengths", "4X"), "'4X' is no number of tokens"),
        (("--plan", "longest", "--lengths", "4K"), "--plan longest: give the least and the longest"),
    ],
)
def test_mistakes_are_told_in_a_line(monkeypatch, capsys, arguments, message):
    assert message in said_of(monkeypatch, capsys, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_told_what_to_do(monkeypatch, capsys, tmp_path):
    said = said_of(monkeypatch, capsys, "--output", tmp_path)
    assert said.startswith("--device cuda: PyTorch finds no GPU; --plan smoke")


# ---- which cells


def test_the_plans_are_in_order_and_without_repetition():
    plans, methods = load("cells.plans"), load("cells.methods")
    for work in (plans.most_important(), plans.smoke()):
        cells = [cell for cell, _ in work]
        assert len(cells) == len(set(cells)) == len({cell.path for cell in cells})
        assert {cell.method for cell in cells} <= set(methods.METHODS)
        for method in {"plain", "memo_auto"}:
            assert any(cell.method == method for cell in cells)
    assert {cell.method for cell, _ in plans.smoke()} == set(methods.METHODS) - {"memo_kinds"}  # of earlier results


def test_the_longest_length_is_searched_by_what_was_found(tmp_path):
    cell, longest = load("cells.cell"), load("cells.longest")
    base, fits = cell.Cell(method="plain", tokens=0, model="llama_tiny", device="cpu"), 45056
    tried = []
    while (tokens := longest.next_length(tmp_path, base, 8192, 131072, 8192)) is not None:
        tried.append(tokens)
        status = "ok" if tokens <= fits else "oom"
        cell.save(tmp_path, replace(base, tokens=tokens), cell.Effort(), {"status": status, "reason": ""})
    assert max(tokens for tokens in tried if tokens <= fits) == 40960
    assert min(tokens for tokens in tried if tokens > fits) == 49152
    assert len(tried) == len(set(tried))


# ---- numbers


@pytest.mark.parametrize("method", ["plain", "checkpointing", "memo_alpha_0", "memo_alpha_0.5", "memo_alpha_1"])
def test_the_flops_of_products_are_those_that_are_counted(method, monkeypatch):
    """Attention is left out: PyTorch's counter takes it for not causal, and does not know the kernel for CPUs."""
    from lightning_memo.engine.modules.slice_comparison import SliceComparison
    from lightning_memo.estimate.cluster import load_preset
    from lightning_memo.models import ModelConfig, build_model

    monkeypatch.setattr(SliceComparison, "due", lambda *_: False)  # is no part of most steps
    cells, flops, peers = load("cells.cell"), load("cells.flops"), load("peers")
    cell = cells.Cell(method=method, tokens=64, model="llama_tiny", layers=3, device="cpu")
    model = build_model(ModelConfig(config={**load_preset("model", "llama_tiny")["config"], "num_hidden_layers": 3}))
    batch = {name: torch.randint(0, 264, (1, 64)) for name in ("input_ids", "labels")}
    alpha = float(method.rpartition("_")[2]) if method.startswith("memo") else None
    with ExitStack() as stack:
        if alpha is not None:
            stack.enter_context(engine_at(model, batch, alpha))
        elif method == "checkpointing":
            stack.enter_context(peers.checkpointing(model))
        counter = stack.enter_context(FlopCounterMode(display=False))
        model(**batch).loss.backward()
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    shape = flops.shape_of(cell)
    attention = shape.layers * shape.attention_flops(64) * (4 if method == "checkpointing" else 3)
    expected = flops.step_flops(cell, alpha=alpha).hardware - attention
    assert counted == pytest.approx(expected, rel=1e-6)


def engine_at(model, batch, alpha):
    methods = load("methods")
    try:
        return methods.Workload(model, batch, torch.device("cpu")).using(methods.Method("alpha", alpha))
    finally:
        sys.modules.pop("methods")


@pytest.mark.slow
def test_frozen_weights_have_no_gradients(tmp_path):
    run_here(tmp_path, "full", "lora", methods=("plain",))
    found = {tuning: result for (tuning, _), result in results(tmp_path).items()}
    shape = replace(load("lightning_memo.estimate.cluster").load_model("llama_tiny"), layers=3)
    share = found["lora"]["trained_parameters"] / found["lora"]["parameters"]
    assert found["full"]["trained_parameters"] == found["full"]["parameters"] == shape.parameters
    assert 0 < share < 0.2
    saved = found["full"]["flops"]["model"] - found["lora"]["flops"]["model"]
    assert saved == pytest.approx(2.0 * 128 * shape.multiplied_parameters * (1 - share))


def test_the_peak_is_that_of_the_device():
    peak = load("cells.peak")
    assert peak.specified("NVIDIA H200") == peak.Peak(989.4e12, "conf/cluster/h200.yaml")
    assert peak.specified("NVIDIA A100-SXM4-40GB").source == "conf/cluster/a100_40.yaml"
    assert peak.specified("NVIDIA H100 (simulated)") == peak.Peak(989.4e12, "conf/cluster/h100.yaml")
    assert peak.specified("NVIDIA H100 PCIe") is None


def test_kernels_are_listed_by_their_time():
    kernels = load("cells.activity").kernels
    events = [("gemm", 0.0, 1.0), ("Memcpy DtoH", 0.0, 9.0), ("norm", 1.0, 1.5), ("gemm", 2.0, 2.5), ("norm", 4.0, 6.5)]
    assert kernels(events) == [("norm", 2, 3.0), ("gemm", 2, 1.5)]
    assert kernels([]) == []


def test_copies_count_where_no_kernel_runs():
    summary = load("cells.activity").summary
    events = [
        ("flash_fwd", 0.0, 2.0), ("gemm", 1.0, 3.0), ("Memcpy DtoH (Device -> Pinned)", 2.5, 4.0),
        ("Memcpy HtoD (Pinned -> Device)", 3.5, 5.0), ("Memcpy DtoD (Device -> Device)", 4.5, 6.0), ("gemm", 7.0, 8.0),
    ]  # fmt: skip
    assert summary(events) == {
        "kernel_seconds": 5.5, "copy_out_seconds": 1.5, "copy_in_seconds": 1.5, "exposed_copy_seconds": 1.5,
        "idle_seconds": 1.0,
    }  # fmt: skip
    assert summary([]) is None
