"""An estimate that does not fit says which memory is too small, and with which settings the training would fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from lightning_memo.estimate.command import main
from lightning_memo.utils.units import about_seconds

FITS = re.compile(r"The sequence fits with (.*?): (.*?) per step, MFU")


@pytest.fixture
def limits(in_process: Callable[..., tuple[int, str, str]]) -> Callable[[str], list[str]]:
    """Sentences of an estimate that does not fit. Every suggested setting is asked for, and must fit as it says."""

    def ask(settings: str) -> list[str]:
        found = answer(settings)
        assert found["status"] != "ok"
        for sentence in found["limits"]:
            if suggested := FITS.match(sentence):
                words = suggested[1].split()
                names = {word.partition("=")[0] for word in words}
                kept = [word for word in settings.split() if word.partition("=")[0] not in names]
                changed = answer(" ".join([*kept, *words]))
                assert (changed["status"], about_seconds(changed["step_seconds"])) == ("ok", suggested[2])
        return list(found["limits"])

    def answer(settings: str) -> dict[str, object]:
        status, out, err = in_process(main, *settings.split(), "output=json")
        assert status == 0, err
        return dict(json.loads(out))

    return ask


def changes(limits: list[str]) -> list[str]:
    return [found[1] for sentence in limits if (found := FITS.match(sentence))]


@pytest.mark.slow
def test_a_model_whose_state_is_too_large(limits: Callable[[str], list[str]]) -> None:
    told = limits("model=qwen3_8b gpus=1 batch_size=1 seq_len=512K")
    assert told[1].startswith(
        "Device memory is too small for the model state: weights, gradients and the optimizer need 122.1 GiB, 76.8 GiB "
        "are usable. Activations of 524,288 tokens need "
    )
    small, *others = changes(told)
    assert re.fullmatch(r"precision=bf16-true slice_tokens=\d+ stream_from_host=\w+", small)
    assert any(change.startswith("gpus=") for change in others)
    assert any(change.startswith("model.lora.r=16") for change in others)


def test_activations_that_are_too_large(limits: Callable[[str], list[str]]) -> None:
    told = limits("model=llama3_2_1b gpus=1 batch_size=1 seq_len=1M precision=bf16-true slice_tokens=null")
    assert told[1].startswith("Device memory is too small for the activations: beside weights, gradients and the ")
    assert changes(told)[0].startswith("slice_tokens=")


@pytest.mark.slow
def test_a_host_that_is_too_small(limits: Callable[[str], list[str]]) -> None:
    told = limits(
        "model=llama3_2_1b gpus=1 batch_size=1 seq_len=1M precision=bf16-true slice_tokens=32K stream_from_host=hidden "
        "cluster.host_bytes=64GiB"
    )
    assert told[1] == (
        "Host memory is too small: activations need 178.0 GiB on each node, 48.0 GiB are usable (75% of "
        "cluster.host_bytes)."
    )
    assert changes(told) == ["cluster.host_bytes=128GiB", "gpus=16"]
    told = limits("model=llama3_2_1b gpus=1 batch_size=1 seq_len=384K precision=bf16-true alpha=1 slice_tokens=null")
    assert changes(told)[0] == "alpha=null"


@pytest.mark.slow
def test_sizes_that_were_given_are_changed_first(limits: Callable[[str], list[str]]) -> None:
    told = limits("model=llama3_8b gpus=8 batch_size=8 seq_len=64K parallel.tp=1 parallel.cp=1 parallel.zero_stage=0")
    assert changes(told)[0].startswith("parallel.")


@pytest.mark.slow
def test_other_methods_and_layers(limits: Callable[[str], list[str]]) -> None:
    told = limits("model=llama3_2_1b gpus=1 batch_size=1 seq_len=128K method=plain")
    assert changes(told)[0].startswith("method=memo")
    told = limits("model=gpt_7b gpus=1 batch_size=1 seq_len=512K")
    assert "Slices of tokens are estimated for dense models with layers of Llama or Qwen3 only; " in told[-1]


@pytest.mark.slow
def test_what_no_change_makes_fit_is_told(limits: Callable[[str], list[str]]) -> None:
    told = limits("model=llama3_70b gpus=1 batch_size=1 seq_len=16M cluster.devices_per_node=1 cluster.host_bytes=1GiB")
    assert changes(told) == []
    assert any(sentence.startswith("No change was found with which it fits: ") for sentence in told)


@pytest.mark.slow
def test_frozen_weights_of_4_bits_are_suggested_on_one_gpu(limits: Callable[[str], list[str]]) -> None:
    settings = "model=llama3_8b cluster=rtx_4090 batch_size=1 model.lora.r=16"
    told = limits(f"{settings} gpus=1 seq_len=64K")
    assert any(change.startswith("quantization=nf4 slice_tokens=") for change in changes(told))
    assert any(re.search(r"; up to [\d,]+ tokens would in such slices\.$", sentence) for sentence in told)
    assert not any("quantization" in change for change in changes(limits(f"{settings} gpus=2 seq_len=2M")))
