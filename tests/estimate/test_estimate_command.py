"""The estimate command: its output, its files, the settings that it refuses and the configurations that it reads."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image
from support.commands import ROOT
from support.commands import run as run_process
from support.samples.messages import imported
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_memo.estimate import EstimateRequest, constants_of, load_cluster, load_model, load_shape, search
from lightning_memo.estimate import sweep as pictures
from lightning_memo.estimate.cluster import cluster_of, load_preset
from lightning_memo.estimate.command import main
from lightning_memo.estimate.sweep import JobEstimate
from lightning_memo.shapes.hf_config import _FAMILIES, shape_of
from lightning_memo.utils.units import read_length

KEYS = [
    "status", "method", "model", "seq_len", "gpus", "parallel", "alpha", "storage", "step_seconds",
    "recompute_seconds", "mfu", "hfu", "tokens_per_gpu_per_second", "device_bytes", "host_bytes", "disk_bytes",
    "slices", "speeds", "limits", "longest", "longest_in_slices",
]  # fmt: skip


@pytest.fixture
def run(in_process, monkeypatch):
    """Runs the command; see `in_process`."""
    monkeypatch.setenv("COLUMNS", "150")
    return lambda *arguments: in_process(main, *arguments)


def answer_of(result):
    status, out, err = result
    assert (status, err) == (0, "")
    return json.loads(out)


# ---- as a command


@pytest.mark.slow
def test_the_command_needs_neither_torch_nor_lightning(tmp_path):
    command = ["python", "-m", "lightning_memo.estimate", "seq_len=64K", "output=json"]
    status, out, err = run_process(command, tmp_path, cold=True, PYTHONPROFILEIMPORTTIME="1")
    assert status == 0
    packages = imported(err)
    assert {"lightning_memo", "hydra", "numpy", "rich"} <= packages
    heavy = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "matplotlib"}
    assert not packages & heavy
    assert list(json.loads(out)) == KEYS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_refuses_in_one_line(tmp_path):
    status, out, err = run_process(["python", "-m", "lightning_memo.estimate", "gpus=0"], tmp_path)
    assert (status, out) == (2, "")
    assert err == "error: gpus=0: give an integer of at least 1, or auto\n"


# ---- JSON


@pytest.mark.slow
def test_json_has_the_keys_of_an_estimate(run):
    answer = answer_of(run("model=gpt_7b", "cluster=a800", "seq_len=256K", "output=json"))
    assert list(answer) == KEYS
    assert list(answer["parallel"]) == [
        "tp",
        "cp",
        "dp",
        "pp",
        "zero_stage",
        "expert_parallel_size",
        "virtual_pipeline_size",
        "pipeline_schedule",
    ]
    assert (answer["status"], answer["method"], answer["model"]) == ("ok", "memo", "gpt_7b")
    assert (answer["seq_len"], answer["gpus"]) == (262144, 8)
    sizes = answer["parallel"]
    assert sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"] == 8
    kinds = answer["device_bytes"]
    assert kinds["total"] == sum(size for kind, size in kinds.items() if kind != "total")
    assert {"parameters", "gradients", "optimizer"} <= set(kinds)
    assert 0 < answer["mfu"] <= answer["hfu"] < 100
    tokens = 262144 / answer["step_seconds"] / 8
    assert answer["tokens_per_gpu_per_second"] == pytest.approx(tokens)
    assert all(isinstance(limit, str) for limit in answer["limits"])


def test_forced_values_are_kept(run):
    answer = answer_of(
        run(
            "model=gpt_7b", "cluster=a800", "seq_len=256K", "output=json", "alpha=0.5", "batch_size=4",
            "parallel.tp=2", "parallel.cp=4", "parallel.dp=1", "parallel.zero_stage=1",
        )
    )  # fmt: skip
    assert answer["parallel"] == {
        "tp": 2, "cp": 4, "dp": 1, "pp": 1, "zero_stage": 1, "expert_parallel_size": 1,
        "virtual_pipeline_size": 1, "pipeline_schedule": "1f1b",
    }  # fmt: skip
    assert answer["alpha"] == 0.5
    assert answer["tokens_per_gpu_per_second"] == pytest.approx(4 * 262144 / answer["step_seconds"] / 8)


@pytest.mark.slow
def test_what_does_not_fit_is_an_answer(run):
    answer = answer_of(run("model=gpt_7b", "cluster=a800", "seq_len=8M", "method=full_recompute", "output=json"))
    assert answer["status"] == "oom"
    assert answer["step_seconds"] is None and answer["mfu"] is None and answer["alpha"] is None
    assert answer["device_bytes"]["total"] > 80 * 2**30
    none = answer_of(run("model=llama3_70b", "gpus=1", "batch_size=1", "seq_len=max", "output=json"))
    assert none["status"] == "oom"
    assert (none["longest"], none["longest_in_slices"]) == (None, None)
    assert "weights, gradients and the optimizer need 1.0 TiB, 76.8 GiB are usable." in none["limits"][1]
    shown = run("model=llama3_8b", "gpus=8", "seq_len=4M", "slice_tokens=null")
    assert "does not fit: out of device and host memory" in shown[1]
    assert "TiB of the 1.5 TiB usable on each node, 75% of cluster.host_bytes=2TiB" in " ".join(shown[1].split())


@pytest.mark.slow
def test_slices_are_asked_for_and_offered(run):
    asked = ["model=llama3_2_1b", "gpus=1", "seq_len=1M", "precision=bf16-true", "output=json"]
    whole = answer_of(run(*asked, "slice_tokens=null"))
    assert (whole["status"], whole["slices"]) == ("oom", None)
    assert any(
        limit.startswith("The sequence fits with slice_tokens=262144 stream_from_host=attention: ")
        for limit in whole["limits"]
    )
    sliced = answer_of(run(*asked, "slice_tokens=32K", "stream_from_host=hidden"))
    assert sliced["status"] == "ok"
    assert sliced["slices"] == {"tokens": 32 * 1024, "stream_from_host": "hidden"}


def test_layers_are_cut_as_in_training_if_whole_ones_do_not_fit(run):
    """The longest length fits in slices, and one more step does not."""
    asked = ["model=llama3_2_1b", "cluster=rtx_4090", "gpus=1", "multiple_of=64K", "output=json"]
    asked += ["model.config.num_hidden_layers=4", "cluster.host_bytes=16GiB"]
    found = answer_of(run(*asked, "seq_len=max"))
    tokens, slices = found["seq_len"], found["slices"]
    assert found["status"] == "ok" and tokens % 65536 == 0
    whole = answer_of(run(*asked, "seq_len=max", "slice_tokens=null"))
    assert whole["slices"] is None and whole["seq_len"] < tokens
    assert (found["longest"], found["longest_in_slices"]) == (whole["seq_len"], tokens)
    given = [f"{name}={value}" for name, value in slices.items() if name != "tokens"]
    given = answer_of(run(*asked, f"seq_len={tokens}", f"slice_tokens={slices['tokens']}", *given))
    assert given["step_seconds"] == found["step_seconds"]
    assert answer_of(run(*asked, f"seq_len={tokens + 65536}"))["status"] != "ok"


def test_max_finds_the_longest(run):
    settings = ("model=gpt_7b", "cluster=a800", "output=json", "multiple_of=16K")
    answer = answer_of(run(*settings, "seq_len=max"))
    tokens = answer["seq_len"]
    assert answer["status"] == "ok" and tokens % 16384 == 0
    assert answer["longest"] == tokens
    assert answer_of(run(*settings, f"seq_len={tokens + 16384}"))["status"] != "ok"


@pytest.mark.parametrize("method", ["memo", "full_recompute", "selective_checkpointing", "full_swap", "plain"])
def test_all_methods_answer(run, method):
    answer = answer_of(run("model=llama3_8b", "cluster=h200", "seq_len=8K", f"method={method}", "output=json"))
    assert (answer["status"], answer["method"]) == ("ok", method)


# ---- the table


@pytest.mark.slow
def test_the_table_tells_all(run):
    status, out, err = run("model=gpt_7b", "cluster=a800", "seq_len=256K", "alternatives=2")
    assert (status, err) == (0, "")
    for word in (
        "gpt_7b, 6.65 B", "8 x NVIDIA A800-SXM4-80GB, 1 node", "262,144 tokens", "fits", "MFU", "HFU", "optimizer",
        "rounding buffers", "Alternatives", "% slower", "more", "longest", "Speed constants: ",
    ):  # fmt: skip
        assert word in out
    assert out.count("% slower") <= 2
    assert list(Path().iterdir()) == []


# ---- sweeps


@pytest.mark.slow
def test_a_sweep_writes_a_table_and_pictures(run):
    lengths = "seq_len=64K,256K,2M"
    status, out, err = run("-m", lengths, "method=memo,plain", "model=gpt_7b", "cluster=a800")
    assert (status, err) == (0, "")
    (folder,) = Path("outputs/estimate/sweeps").iterdir()
    with (folder / "estimates.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["seq_len"] for row in rows] == ["65536"] * 2 + ["262144"] * 2 + ["2097152"] * 2
    assert {row["method"] for row in rows} == {"memo", "plain"}
    header = list(rows[0])
    assert header[0] == "overrides" and header[-1] == "message"
    device = [name for name in header if name.startswith("device_bytes.")]
    assert header.index(device[-1]) - header.index(device[0]) == len(device) - 1
    assert {"device_bytes.rounding_buffers", "device_bytes.fragmentation", "device_bytes.total"} <= set(device)
    for row in rows:
        assert sum(int(row[name] or 0) for name in device) == 2 * int(row["device_bytes.total"])
        assert (row["step_seconds"] == "") == (row["status"] != "ok")
    for name in ("device_bytes.png", "mfu.png"):
        with Image.open(folder / name) as picture:
            assert picture.format == "PNG"
            assert len(picture.convert("L").getcolors()) > 10
        assert str(folder / name) in out
    assert not (folder / "longest.png").exists()
    assert "oom" in out and "Estimates" in out


@pytest.mark.slow
def test_a_sweep_over_gpus_draws_the_longest_lengths(run):
    status, _, err = run("-m", "gpus=4,8", "seq_len=max", "multiple_of=64K", "batch_size=8")
    assert (status, err) == (0, "")
    (folder,) = Path("outputs/estimate/sweeps").iterdir()
    assert {path.name for path in folder.iterdir() if path.suffix != ".yaml"} == {
        "0",
        "1",
        "estimates.csv",
        "longest.png",
    }


def swept(method, tokens, cluster="h100", gpus=8):
    request = EstimateRequest(
        shape=load_model("llama3_8b"), cluster=load_cluster(cluster), constants=constants_of(cluster), method=method,
        gpus=gpus, seq_len=tokens, batch_size=16,
    )  # fmt: skip
    overrides = [f"method={method}", f"seq_len={tokens}", f"cluster={cluster}"]
    best = search(request, {"pp": 1}).best.to_dict()
    return JobEstimate(overrides=overrides, longest=False, answer=best, device_budget_bytes=70 * 2**30)


def colors(figure, kind):
    """Colors of the drawn bars or lines, by label."""
    return {
        label: to_hex(handle.patches[0].get_facecolor() if kind == "bars" else handle.get_color())
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if kind == "lines" or label != "usable memory"
    }


@pytest.mark.slow
def test_kinds_of_bytes_and_methods_have_their_colors_in_every_picture(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure) or path)
    methods = ["memo", "full_recompute", "selective_checkpointing", "full_swap", "plain"]
    jobs = {method: [swept(method, tokens) for tokens in (4096, 2**17, 2**20)] for method in methods}
    for group in (methods, methods[::-1], ["plain", "full_recompute"], ["full_swap"]):
        pictures.draw_estimates([job for method in group for job in jobs[method]], tmp_path)
    bars = [colors(figure, "bars") for figure in figures[::2]]
    kinds = {
        kind for each in jobs.values() for job in each for kind, size in job.answer["device_bytes"].items() if size
    }
    assert {label.replace(" ", "_") for label in bars[0]} == kinds - {"total"}
    assert len(set(bars[0].values())) == len(bars[0])
    assert all(found.items() <= bars[0].items() for found in bars)
    lines = [
        {label.split(",")[0]: color for label, color in colors(figure, "lines").items()} for figure in figures[1::2]
    ]
    assert set(lines[0]) == {f"method={method}" for method in methods}
    assert len(set(lines[0].values())) == len(methods)
    assert lines[1] == lines[0] and lines[2].items() <= lines[0].items()


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([2**16, 2**17, 2**20], [2**16, 2**17, 2**20]),
        ([2**16, 100_000, 100_003, 2**18], [2**16, 2**17, 2**18]),
        ([100_000, 100_003], [100_000, 100_003]),
        ([8], [8]),
    ],
)
def test_ticks_are_apart(values, ticks):
    assert pictures.ticks_of(values) == ticks


@pytest.mark.slow
def test_a_mistake_in_a_sweep_is_a_line_of_its_report(run):
    status, out, err = run("-m", "seq_len=64K", "gpus=8,12", "output=json")
    assert status == 1
    assert json.loads(out)["gpus"] == 8
    assert "gpus=12: give 1 to 64" in " ".join(err.split())
    (folder,) = Path("outputs/estimate/sweeps").iterdir()
    with (folder / "estimates.csv").open(newline="", encoding="utf-8") as file:
        assert [bool(row["message"]) for row in csv.DictReader(file)] == [False, True]


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=nope"], ["model=nope: no such model; give one of", "llama3_8b"]),
        (["cluster=nope"], ["cluster=nope: no such cluster; give one of", "h100"]),
        (["method=magic"], ["method='magic'", "give memo, full_recompute, selective_checkpointing, full_swap, plain"]),
        (["method=megatron"], ["method=megatron: programs of papers", "give method=full_recompute, "]),
        (["method=deepspeed_ulysses"], ["give method=full_recompute parallel.zero_stage=3, "]),
        (["method=fpdt"], ["give method=memo slice_tokens=64K stream_from_host=hidden, "]),
        (["output=xml"], ["output='xml'", "json"]),
        (["gpus=0"], ["gpus=0"]),
        (["gpus=-8"], ["gpus=-8"]),
        (["gpus=eight"], ["gpus='eight'"]),
        (["gpus=65"], ["gpus=65", "64"]),
        (["gpus=128"], ["gpus=128", "64"]),
        (["gpus=12"], ["gpus=12", "whole nodes of 8", "8 or 16"]),
        (["seq_len=0"], ["seq_len=0", "128K"]),
        (["seq_len=-5"], ["seq_len=-5"]),
        (["seq_len=long"], ["seq_len='long'", "max"]),
        (["seq_len=1.5M"], ["seq_len='1.5M'"]),
        (["seq_len=null"], ["seq_len=None"]),
        (["seq_len=max", "multiple_of=0"], ["multiple_of=0"]),
        (["batch_size=0"], ["batch_size=0"]),
        (["alpha=1.5"], ["alpha=1.5", "0 to 1"]),
        (["alpha=-0.1"], ["alpha=-0.1"]),
        (["alpha=auto"], ["alpha='auto'", "null"]),
        (["alpha=0.5", "method=full_swap"], ["alpha=0.5", "full_swap"]),
        (["slice_tokens=0"], ["slice_tokens=0", "auto or null"]),
        (["slice_tokens=64K", "method=plain"], ["slice_tokens=64K", "method=memo"]),
        (
            ["slice_tokens=64K", "gpus=1", "model=gpt_7b", "batch_size=1"],
            ["slice_tokens is estimated", "Llama or Qwen3"],
        ),
        (["slice_tokens=64K", "stream_from_host=some"], ["stream_from_host='some'", "attention"]),
        (["slice_tokens=64K", "stream_from_host=none"], ["stream_from_host=none", "leave slice_tokens"]),
        (["stream_from_host=hidden"], ["stream_from_host=hidden", "slice_tokens=64K"]),
        (["disk_memory=much"], ["disk_memory", "'much'"]),
        (["disk_memory=1TiB"], ["cluster.disk_write_bandwidth", "example 4GB"]),
        (["disk_memory=1TiB", "slice_tokens=64K"], ["whole sequences"]),
        (["disk_memory=1TiB", "method=plain"], ["method=memo"]),
        (["cluster.disk_read_bandwidth=0"], ["cluster", "disk_read_bandwidth"]),
        (["parallel.tp=3"], ["parallel.tp=3", "gpus=8", "1, 2, 4 or 8"]),
        (["gpus=3"], ["gpus=3: ", "give gpus=2 or 4"]),
        (["gpus=128"], ["such as 64\n"]),
        (["parallel.tp=0"], ["parallel.tp=0"]),
        (["parallel.zero_stage=4"], ["parallel.zero_stage=4", "0 to 3"]),
        (["parallel.pipeline_schedule=gpipe"], ["parallel.pipeline_schedule='gpipe'", "give 1f1b, zero_bubble"]),
        (["parallel.pipeline_schedule=zero_bubble"], ["is for pipelines", "parallel.pipeline_schedule=1f1b"]),
        (["parallel.xp=2"], ["parallel.xp"]),
        (["+parallel.xp=2"], ["parallel.xp", "zero_stage"]),
        (["parallel.cp=8", "seq_len=1001"], ["8 does not divide the sequence, 1001"]),
        (["cluster.host_bytes=much"], ["cluster", "'much'"]),
        (["cluster.host_bandwidth=0"], ["cluster", "host_bandwidth"]),
        (["cluster.devices_per_node=null"], ["cluster.devices_per_node is missing"]),
        (["+cluster.price=1"], ["cluster.price"]),
        (["model.lora.r=-8"], ["model.lora.r=-8", "0 to train all weights"]),
        (["model.lora=true"], ["model.lora=True is no group of settings", "give model.lora.r"]),
        (["model.lora=16"], ["model.lora=16 is no group of settings", "give model.lora.r"]),
        (["model.lora.r=8", "model.lora.lora_dropout=0.1"], ["model.lora.lora_dropout=0.1", "set it to 0"]),
        (
            ["model.lora.r=8", "model.lora.target_modules=[q]"],
            ["model.lora.target_modules: unknown module q", "q_proj", "all-linear"],
        ),
        (["model.lora.r=8", "+model.lora.use_dora=true"], ["model.lora.use_dora", "remove it"]),
        (["model=gpt_7b", "model.lora.r=8"], ["model: adapters", "Llama", "r to 0"]),
        (["model.path=missing"], ["missing", "No such file"]),
        (["model.config.num_hidden_layers=null"], ["num_hidden_layers", "missing"]),
        (["model.config.num_hidden_layers=0"], ["num_hidden_layers", "'0'"]),
        (["model.config.num_attention_heads=33"], ["33 heads"]),
        (["model.config.num_key_value_heads=5"], ["heads=32", "kv_heads=5"]),
        (["model.config.model_type=mamba"], ["model_type='mamba'", "llama"]),
        (["constants=missing.json"], ["constants=missing.json", "No such file", "calibrate"]),
        (["parallel=4"], ["parallel=4", "parallel.tp=4"]),
        (["parallel=null"], ["parallel=None", "parallel.tp=4"]),
        (["seq_len=999999999999999"], ["seq_len=999999999999999", "131072"]),
        (["batch_size=1000000000000000000"], ["batch_size=1000000000000000000", "at most"]),
        (["cluster.devices_per_node=1.5"], ["devices_per_node=1.5", "whole number"]),
        (["model.config.num_hidden_layers=3000000"], ["num_hidden_layers", "'3000000'"]),
        (["model.config.hidden_size=549755813888"], ["hidden_size", "'549755813888'"]),
        (["alternatives=-1"], ["alternatives=-1"]),
        (["cluster=4090"], ["cluster=4090: no such cluster; did you mean rtx_4090? All are a100_40", "h200"]),
        (["cluster=a100"], ["cluster=a100: no such cluster; did you mean a100_40 or a100_80?"]),
        (["cluster=H100_PCIE"], ["did you mean h100?"]),
        (["cluster.device_memory=40GiB"], ["cluster.device_memory: no such setting", "cluster.device_bytes"]),
        (["cluster.host_memory=40GiB"], ["cluster.host_memory: no such setting", "cluster.host_bytes"]),
        (["cluster=t4", "cluster.bf16=perhaps"], ["cluster: bf16='perhaps'", "true or false"]),
        (["cluster=t4"], ["precision=bf16-mixed: Tesla T4 has no bf16: give precision=32-true"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_told_in_one_line(run, arguments, words):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


def _two_layers(model_type, **others):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9,
             "intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1,
             "moe_intermediate_size": 8}  # fmt: skip
    return json.dumps({"model_type": model_type, **sizes, **others})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not JSON"]),
        ("[]", ["not a JSON object"]),
        ("{}", ["model_type"]),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}', ["num_hidden_layers"]),
        ('{"model_type": ["llama"]}', ["model_type"]),
        ('{"model_type": "llama", "num_hidden_layers": "two", "hidden_size": 64, "num_attention_heads": 4}', ["'two'"]),
        (_two_layers("qwen3_moe", decoder_sparse_step="often"), ["decoder_sparse_step", "'often'"]),
        (_two_layers("qwen3_moe", mlp_only_layers=1), ["mlp_only_layers", "'1'", "list"]),
        (_two_layers("deepseek_v3"), ["kv_lora_rank is missing"]),
        (
            _two_layers("mistral", layer_types=["full_attention", "linear_attention"]),
            ["linear_attention", "sliding_attention"],
        ),
        (_two_layers("mistral", layer_types=["full_attention"]), ["layer_types has 1 entries", "2 layers"]),
        (_two_layers("llama", layer_types=5), ["layer_types", "'5'"]),
        (
            '{"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, '
            '"vocab_size": 9, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 20}',
            ["active_experts=20", "experts=2"],
        ),
        ("[" * 100000, ["not JSON"]),
    ],
)
def test_a_configuration_that_tells_no_shape_is_refused(run, text, words):
    Path("config.json").write_text(text)
    status, out, err = run("model.path=config.json")
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in ["config.json", *words]:
        assert word in err


# ---- models and clusters


@pytest.mark.parametrize("model_type", sorted(_FAMILIES))
def test_shapes_are_those_of_hugging_face(model_type):
    """The number of weights of each family's defaults agrees to 1.5 %, without biases and learned positions."""
    given = {"nemotron": {"num_key_value_heads": 8}, "glm4_moe": {"head_dim": 128}}.get(model_type, {})
    config = AutoConfig.for_model(model_type, **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of({**config.to_dict(), "model_type": model_type}, model_type)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.015)
    assert shape.tied == config.tie_word_embeddings


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma", "gpt2", "starcoder2", "falcon", "mixtral"])
def test_what_a_saved_configuration_leaves_out_is_the_familys_default(model_type, tmp_path):
    config = AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    whole = shape_of(content, tmp_path.name)
    for name in ("tie_word_embeddings", "head_dim"):
        content.pop(name, None)
    assert shape_of(content, tmp_path.name) == whole


def test_the_text_part_of_a_model_of_images_is_read(tmp_path):
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    shape = load_shape(tmp_path)
    assert (shape.name, shape.layers, shape.gated) == (tmp_path.name, 2, True)


def test_experts_and_windows_are_read():
    mixture = shape_of(AutoConfig.for_model("mixtral").to_dict(), "mixtral")
    assert (mixture.experts, mixture.active_experts, mixture.window) == (8, 2, None)
    experts = shape_of(AutoConfig.for_model("qwen3_moe").to_dict(), "qwen3_moe")
    assert (experts.experts, experts.active_experts, experts.ffn) == (128, 8, 768)
    assert shape_of(AutoConfig.for_model("mistral").to_dict(), "mistral").window == 4096
    assert shape_of({**AutoConfig.for_model("mistral").to_dict(), "sliding_window": None}, "mistral").window is None


def presets(group):
    return sorted(file.stem for file in (ROOT / "conf" / group).glob("*.yaml") if file.stem != "default")


@pytest.mark.parametrize("name", sorted({*presets("model")} - {"hybrid_tiny"}))
def test_model_presets_have_the_shapes_of_hugging_face(name):
    config = AutoConfig.for_model(**load_preset("model", name)["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert load_model(name).parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.002)


def test_the_papers_models_are_there():
    with (ROOT / "tests" / "reference" / "papers" / "memo_models.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row in rows:
        shape = load_model(f"gpt_{row['model'].lower()}")
        assert [shape.layers, shape.hidden, shape.ffn, shape.heads, shape.vocab] == [
            int(row[name]) for name in ("n_layers", "h", "h_ffn", "n_heads", "vocab")
        ]
        assert not shape.gated


@pytest.mark.parametrize("name", sorted({*presets("cluster")} - {"auto"}))
def test_every_number_of_a_cluster_has_its_source(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.host_bandwidth_shared <= cluster.host_bandwidth
    before = ""
    for line in (ROOT / "conf" / "cluster" / f"{name}.yaml").read_text().splitlines():
        number = line and not line.startswith(("#", "name:", "device:", "devices_per_node:", "note:"))
        assert not number or before.startswith("# "), line
        before = line


def test_the_clusters_that_are_promised_are_there():
    assert {
        "a800", "a100_40", "a100_80", "h100", "h200", "b200", "gh200", "b300", "gb200", "mi300x", "l40s", "l4", "a10g",
        "t4", "rtx_4090", "rtx_5090", "rtx_6000_ada", "rtx_pro_6000", "rtx_a6000", "auto",
    } == set(presets("cluster"))  # fmt: skip
    devices = [load_cluster(name).device for name in presets("cluster") if name != "auto"]
    assert len(devices) == len(set(devices)), "a device has one preset"
    assert load_cluster("a100_40").device_bytes == 42405855232
    assert load_cluster("gh200").devices_per_node == 1


def test_presets_are_listed_where_a_name_is_unknown():
    with pytest.raises(ValueError, match=r"cluster='x' does not exist: give .*a800.*h100"):
        load_cluster("x")
    with pytest.raises(ValueError, match=r"model='default' does not exist: give .*llama3_8b"):
        load_model("default")


def test_a_cluster_of_ones_own():
    settings = {
        "name": "mine", "device": "GPU", "peak_flops": 1e14, "device_bytes": "24GiB", "devices_per_node": 2,
        "host_bytes": "64GiB", "memory_bandwidth": "900GB",
        "host_bandwidth": "25GB", "host_bandwidth_shared": 1.2e10, "node_bandwidth": "25GB",
        "network_bandwidth": "1GB",
    }  # fmt: skip
    cluster = cluster_of(settings)
    assert (cluster.device_bytes, cluster.host_bandwidth, cluster.host_bandwidth_shared) == (24 * 2**30, 25e9, 1.2e10)


def test_products_in_fp32_take_the_units_that_a_device_has():
    """Half of the peak in bf16 with TF32, and the whole peak of a device without bf16."""
    common = {"shape": load_model("llama3_2_1b"), "constants": constants_of("t4"), "precision": "32-true"}
    common |= {"method": "memo", "gpus": 1, "seq_len": 4096, "batch_size": 1}
    t4, l4 = (EstimateRequest(cluster=load_cluster(name), **common) for name in ("t4", "l4"))
    assert (t4.product_flops, l4.product_flops) == (8.1e12, 60.5e12)


def test_a_note_of_a_cluster_is_told(run):
    _, out, _ = run("cluster=mi300x", "gpus=1", "seq_len=8K", "model=llama3_2_1b")
    assert "has not run on GPUs of AMD" in out


def test_this_machine_is_a_cluster_if_it_has_gpus(run):
    """This machine has none; tests/gpu/test_cuda_local_cluster.py has some."""
    status, out, err = run("cluster=auto")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(
        "error: cluster=auto: torch finds no GPU on this machine: give the cluster to estimate: a100_40"
    )


@pytest.mark.parametrize(("text", "tokens"), [("1M", 2**20), ("128k", 2**17), (131072, 131072), ("4096", 4096)])
def test_lengths(text, tokens):
    assert read_length("seq_len", text) == tokens
