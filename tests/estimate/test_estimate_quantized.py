"""QLoRA: the bytes and the times of frozen weights of 4 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from lightning_memo.estimate import EstimateRequest, Parallelism, constants_of, estimate, load_cluster, load_model
from lightning_memo.estimate.command import main
from lightning_memo.shapes.model_shape import QUANTIZED_BYTES, Quantization, adapters_of

LORA = {"r": 8, "target_modules": "all-linear"}


def ask(**changes: Any) -> EstimateRequest:
    shape = replace(
        load_model("llama3_8b"), adapters=adapters_of(LORA), quantization=changes.pop("quantization", "nf4")
    )
    request = EstimateRequest(
        shape=shape, cluster=load_cluster("rtx_4090"), constants=constants_of("rtx_4090"), method="memo", gpus=1,
        seq_len=8192, batch_size=1, precision="bf16-true",
    )  # fmt: skip
    return replace(request, **changes)


def test_weights_of_layers_take_4_bits_and_their_scales() -> None:
    """Of 8B, products of layers have 6.98 billion weights, and embedding, head and norms keep two bytes each."""
    products = ask().shape.layers * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    whole = estimate(ask(quantization=None), Parallelism()).device_bytes["parameters"]
    for name in get_args(Quantization):
        quantized = estimate(ask(quantization=name), Parallelism()).device_bytes["parameters"]
        assert whole - quantized == pytest.approx(products * (2 - QUANTIZED_BYTES[name]), rel=1e-9)
    assert QUANTIZED_BYTES["nf4"] == 0.5625 and QUANTIZED_BYTES["nf4_double"] == pytest.approx(0.516, abs=1e-3)


def test_weights_are_made_real_again_in_each_pass() -> None:
    """Reading 4 bits and writing bf16, once in the forward and once in the backward, if nothing is recomputed."""
    request = ask(cluster=load_cluster("h100"), alpha=None, seq_len=4096)
    quantized, whole = (
        estimate(replace(request, shape=replace(request.shape, quantization=q)), Parallelism()) for q in ("nf4", None)
    )
    assert quantized.step_seconds is not None and whole.step_seconds is not None
    cost = request.shape.layers * request.shape.quantized_in_a_layer * 2.5625 * 2
    seconds = cost / (request.cluster.memory_bandwidth * request.constants.memory_efficiency)
    assert quantized.step_seconds - whole.step_seconds > seconds  # PEFT's adapters are separate operations, too


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantization=nf4"], "quantization=nf4 is for frozen weights: give model.lora.r, or null"),
        (["quantization=int4", "model.lora.r=8"], "quantization='int4': give nf4, nf4_double"),
        (
            ["quantization=nf4", "model.lora.r=8", "gpus=8"],
            "quantization=nf4 is estimated for one GPU only: give gpus=1",
        ),
    ],
    ids=" ".join,
)
def test_mistakes_are_told_in_one_line(in_process: Any, arguments: list[str], words: str) -> None:
    status, out, err = in_process(main, *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1
