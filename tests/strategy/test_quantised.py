"""QLoRA with the packages that people quantise with: adapters over frozen weights of 4 or 8 bits.

The `quantized` extra brings them. What they do to a layer, without them, is in test_attached.py.
"""

from __future__ import annotations

import functools
import math
import runpy
import sys
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from support.families import FAMILIES
from support.markers.extras import extra
from support.paths import ROOT
from support.samples.callbacks import Gradients
from support.trainer_harness import LanguageModel, fit, loader, plain
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

_TOKENS = 48


def _bitsandbytes(make: Callable[[Any, nn.Linear], nn.Module]) -> Callable[[nn.Module], None]:
    """Replaces the linear modules of a model's layers by what `make` makes of them and of the package."""

    def quantise(model: nn.Module) -> None:
        package = extra("bitsandbytes", "quantized")
        for layer in model.model.layers:  # type: ignore[union-attr]
            for parent in (layer.self_attn, layer.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, make(package, child).to("cpu"))  # where it is packed

    return quantise


def _nf4(package: Any, linear: nn.Linear) -> nn.Module:
    made = package.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.weight = package.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return made


def _int8(package: Any, linear: nn.Linear) -> nn.Module:
    made = package.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    made.weight = package.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return made


def _int8_with_outliers(package: Any, linear: nn.Linear) -> nn.Module:
    made = _int8(package, linear)
    made.state.threshold = 6.0  # type: ignore[union-attr]
    return made


def _torchao(model: nn.Module) -> None:
    quantization = extra("torchao.quantization", "quantized")
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())


KINDS = {
    "bitsandbytes NF4": _bitsandbytes(_nf4),
    "bitsandbytes int8": _bitsandbytes(_int8),
    "torchao int8": _torchao,
    "bitsandbytes int8 with outliers": _bitsandbytes(_int8_with_outliers),
}
SETTINGS = {
    "recomputed": {"alpha": 0.0},
    "both": {"alpha": 0.4},
    "swapped": {"alpha": 1.0},
    "slices": {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "attention"},
    "slices of the model": {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "model"},
}


class Adapters(LanguageModel):
    """A Llama of quantised layers with adapters of rank 4, trained plainly so that gradients stay comparable."""

    def __init__(self, quantise: Callable[[nn.Module], None]) -> None:
        def build() -> nn.Module:
            model = FAMILIES["llama_gqa"].build()
            quantise(model)
            return peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
            )

        super().__init__(build)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=1e-2)


@functools.cache
def _plainly(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of plain training."""
    noted = Gradients()
    losses = plain(Adapters(KINDS[kind]), loader(tokens=_TOKENS), callbacks=[noted]).losses
    return losses, noted.last


# What a setting does is the same for all kinds.
PAIRS = [(next(iter(KINDS)), name) for name in SETTINGS] + [(kind, "both") for kind in list(KINDS)[1:3]]
PAIRS += [("bitsandbytes int8 with outliers", name) for name in ("recomputed", "swapped")]


@pytest.mark.parametrize(("kind", "setting"), PAIRS)
def test_gradients_of_adapters_are_those_of_plain_training(kind: str, setting: str) -> None:
    """Losses and gradients differ by rounding in fp32 alone, which a few steps enlarge a little."""
    losses, gradients = _plainly(kind)
    noted, settings = Gradients(), SETTINGS[setting]
    result = fit(MemoStrategy(**settings), Adapters(KINDS[kind]), loader(tokens=_TOKENS), callbacks=[noted])
    assert result.plan.swap.alpha == pytest.approx(settings["alpha"], abs=0.05)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert noted.last.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((noted.last[name] - gradient).norm()) <= 2e-5 * float(gradient.norm()), name
    assert noted.overflow_bytes == 0


def test_outliers_are_those_of_all_tokens() -> None:
    with pytest.warns(UserWarning, match=r"bitsandbytes finds the outliers of all tokens .*llm_int8_threshold=0\.0"):
        fit(MemoStrategy(alpha=0.4), Adapters(KINDS["bitsandbytes int8 with outliers"]), loader(tokens=_TOKENS))


def test_packed_weights_do_not_leave_the_device() -> None:
    """A slot has no more in it than that of a model whose frozen weights are not quantised."""
    slots = [
        fit(MemoStrategy(alpha=1.0), Adapters(quantise), loader(tokens=_TOKENS)).plan.swap.memory.slot
        for quantise in (KINDS["bitsandbytes NF4"], lambda model: None)
    ]
    assert 0 < slots[0] <= slots[1]


def test_the_example_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapters begin as zero, and the loss of random bytes at ln 264."""
    extra("bitsandbytes", "quantized")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["qlora.py", "--steps=8"])
    runpy.run_path(str(ROOT / "examples" / "qlora.py"), run_name="__main__")
    loss = float(capsys.readouterr().out.rpartition("loss ")[2])
    assert loss < math.log(264)
