"""Layers whose swapped activations are compressed: what stays exact, errors of gradients, bytes, ways to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.devices import DEVICE
from support.families import FAMILIES, PlainBlock, PlainModel, make_batch
from support.harness import (
    DELAYS,
    Batch,
    EngineUnderTest,
    Step,
    assert_equal,
    loss_and_gradients,
    on_device,
)
from support.markers.slow import slow_if
from torch import Tensor, nn

from lightning_memo.artifacts.slot_layouts import BLOCK

# Largest relative error of one value. Errors of many values have either sign, so those of whole gradients are smaller.
ONE_VALUE = 1 / 17


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return on_device(FAMILIES[family].build())


def planned_steps(model: nn.Module, batch: Batch, alpha: float, **settings: Any) -> tuple[Step, EngineUnderTest]:
    """Return the second step by a plan, and the engine, which is detached."""
    spilled, planned_slices = settings.pop("disk_calls", 0), settings.pop("planned_slices", None)
    with EngineUnderTest(model, swap_precision="fp8", **settings) as under_test:
        under_test.profile_step(batch)
        under_test.load(alpha, planned_slices, disk_calls=spilled)
        for _ in range(2):
            step = under_test.step(batch)
        under_test.assert_as_planned()
        return step, under_test


class TwoProducts(nn.Module):
    """A layer of which a single tensor is compressed: the input of its second product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


def test_gradients_are_within_the_bound_of_their_products() -> None:
    """The gradient of a weight sums products with values that are off by 1/17 at most; all others are exact."""
    torch.manual_seed(0)
    model = on_device(PlainModel([TwoProducts() for _ in range(4)]))
    batch = make_batch(2, 48)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.endswith("down"):

            def note(module: nn.Module, given: Any, out: Tensor, name: str = name) -> None:
                inputs[name] = given[0].detach().flatten(0, 1)
                out.register_hook(lambda g: outputs.__setitem__(name, g.flatten(0, 1)))

            hooks.append(module.register_forward_hook(note))
    plain = loss_and_gradients(model, batch)
    for hook in hooks:
        hook.remove()
    step, _ = planned_steps(model, batch, alpha=1.0)
    assert torch.equal(step.loss, plain.loss)
    for name, gradient in plain.gradients.items():
        error = (step.gradients[name] - gradient).abs()
        if not name.endswith("down.weight"):
            assert not error.any(), name
            continue
        layer = name.removesuffix(".weight")
        rows, values = outputs[layer].abs().double(), inputs[layer].abs().double()
        largest = values.view(-1, BLOCK).amax(1, keepdim=True)  # a token has a block
        bound = rows.T @ torch.maximum(values / 17, largest * 2.0**-17) + 1e-6 * gradient.abs()
        assert (error <= bound).all() and (error > 0.01 * bound).any(), name


@slow_if(lambda family: family == "gemma3_mixed_windows")
@pytest.mark.parametrize("family", ["llama_gqa", "gpt2", "block_dropout", "gemma3_mixed_windows", "mixtral"])
def test_steps_of_models(family: str) -> None:
    """The forward is exact at every alpha, and with alpha 0 so are gradients: what is recomputed starts exactly."""
    model, batch = model_of(family), make_batch(2, 48)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model) as exact:
        profiled = exact.profile_step(batch)
        exact.load(0.0)
        without = exact.step(batch)
    with EngineUnderTest(model, swap_precision="fp8") as under_test:
        assert_equal(under_test.profile_step(batch), profiled)
        for alpha in (0.0, 0.5, 1.0):
            under_test.load(alpha)
            for _ in range(2):
                step = under_test.step(batch)
                if alpha == 0.0:
                    assert_equal(step, without)
                else:
                    torch.testing.assert_close(step.loss, plain.loss, rtol=1e-6, atol=0)
                    assert 1e-4 < step.distance(plain) <= ONE_VALUE, (alpha, step.distance(plain))
            under_test.assert_as_planned()


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "slices": ("llama_gqa", {"planned_slices": 13}),
    "nested slices": ("llama_gqa", {"schedule": "nest", "planned_slices": 13}),
    "not causal": ("encoder_layer_dropout", {}),
    "keys on the host": ("llama_gqa", {"slice_tokens": 13, "host_backed": "attention"}),
    "states on the host": ("llama_gqa", {"slice_tokens": 13, "host_backed": "all"}),
    "slice by slice": ("llama_gqa", {"slice_tokens": 13, "host_backed": "all", "schedule": "slice"}),
    "disk": ("llama_gqa", {"disk_calls": 2}),
}
INCLUDED = ("slices", "nested slices", "keys on the host", "states on the host")  # in other ways


@slow_if(lambda way: way in INCLUDED)
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_run(way: str, tmp_path: Path) -> None:
    family, settings = WAYS[way]
    settings = settings | ({"disk_path": tmp_path} if "disk_calls" in settings else {})
    model, batch, rounding = model_of(family), make_batch(2, 48), 1e-6
    if DEVICE.type == "cuda" and "host_backed" in settings:  # attention runs slice after slice in half precision only
        model, rounding = model.to(torch.bfloat16), 2**-8
    plain = loss_and_gradients(model, batch)
    step, _ = planned_steps(model, batch, alpha=0.6, **settings)
    torch.testing.assert_close(step.loss, plain.loss, rtol=rounding, atol=0)
    assert 1e-4 < step.distance(plain) <= ONE_VALUE


def test_mixed_precision() -> None:
    model, batch = model_of("llama_gqa"), make_batch(2, 48)
    plain = loss_and_gradients(model, batch, amp=True)
    with EngineUnderTest(model, swap_precision="fp8") as under_test:
        under_test.profile_step(batch, amp=True)
        under_test.load(1.0)
        step = under_test.step(batch, amp=True)
        under_test.assert_as_planned()
    assert torch.equal(step.loss, plain.loss)
    assert 1e-4 < step.distance(plain) <= ONE_VALUE


def moved_bytes(precision: Any, model: nn.Module, batch: Batch) -> tuple[int, int]:
    """Return the bytes that a step copies to the host, and the largest number that the host held."""
    with EngineUnderTest(model, swap_precision=precision) as under_test:
        under_test.profile_step(batch)
        under_test.load(1.0)
        under_test.step(batch)
        assert under_test.engine.memory is not None
        stats = under_test.engine.memory.stats
        assert stats.offloaded_bytes == stats.fetched_bytes
        return stats.offloaded_bytes, stats.peak_host_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_on_the_host(dtype: torch.dtype) -> None:
    """An input, which is exact, and the input of a product with four times as many values, which is compressed."""
    torch.manual_seed(0)
    model, batch = on_device(PlainModel([TwoProducts() for _ in range(4)])).to(dtype), make_batch(2, 64)
    (exact, most), (compressed, least) = (moved_bytes(precision, model, batch) for precision in ("exact", "fp8"))
    values = 2 * 2 * 64 * 32  # of the inputs of two layers that leave
    assert exact == 5 * values * dtype.itemsize
    assert compressed == values * dtype.itemsize + 4 * values * (1 + 2 / BLOCK)
    assert (least - compressed, most - exact) == (pytest.approx(0, abs=1024), pytest.approx(0, abs=1024))


def test_large_scores_of_attention() -> None:
    """Keys that have much in common: the softmax does not see it, but errors of such keys would be exponents."""
    torch.manual_seed(0)
    model = on_device(PlainModel([PlainBlock() for _ in range(4)]))
    for block in model.blocks:
        block.qkv.bias.data[32:64] = 300.0
    batch = make_batch(2, 48)
    plain = loss_and_gradients(model, batch)
    step, _ = planned_steps(model, batch, alpha=1.0)
    assert 1e-4 < step.distance(plain) <= ONE_VALUE


def test_what_is_not_finite_stays_so() -> None:
    torch.manual_seed(0)
    model, batch = on_device(PlainModel([TwoProducts() for _ in range(4)])), make_batch(2, 48)
    with EngineUnderTest(model, swap_precision="fp8", check_slices=False) as under_test:
        under_test.profile_step(batch)
        under_test.load(1.0)
        model.blocks[0].up.weight.data[5] = float("inf")
        step = under_test.step(batch)
    assert not step.gradients["blocks.0.down.weight"].isfinite().any()


class Between(nn.Module):
    """A function between two products."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(32, 64), nn.Linear(64, 32), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(x)))


class Sorted(torch.autograd.Function):
    """Saves indices as floats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        order = x.argsort(-1)
        ctx.save_for_backward(order.to(x.dtype))
        return x.gather(-1, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter_(-1, order.long(), gradient)


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "exponentials of differences": lambda h: h - torch.logsumexp(h + 300.0, -1, keepdim=True),
    "comparisons": lambda h: h / (1 + h.abs().amax(-1, keepdim=True)),
    "a mean": lambda h: F.layer_norm(h + 100.0, (64,)),
    "a pole": lambda h: torch.atanh(0.999 * torch.tanh(2 * h)),
    "thresholds": lambda h: h.clamp(-1.0, 1.0),
    "indices": Sorted.apply,
    "masks of floats": lambda h: F.dropout(h, 0.05),
    "saved by a product first": lambda h: h * h.sigmoid() + torch.logsumexp(h + 300.0, -1, keepdim=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_no_factor_is_exact(name: str) -> None:
    torch.manual_seed(0)
    model, batch = on_device(PlainModel([Between(EXACT[name]) for _ in range(4)])), make_batch(2, 48)
    plain = loss_and_gradients(model, batch)
    step, _ = planned_steps(model, batch, alpha=1.0)
    assert torch.equal(step.loss, plain.loss)
    assert 1e-4 < step.distance(plain) <= ONE_VALUE / 2, step.distance(plain)
    alike = [float((step.gradients[n] * g).sum() / (g * g).sum()) for n, g in plain.gradients.items() if "up." in n]
    assert all(abs(ratio - 1) < ONE_VALUE / 4 for ratio in alike), alike  # errors cancel


class WeightFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight * 1.1)


def test_functions_of_weights_are_exact_whatever_the_number_of_tokens() -> None:
    torch.manual_seed(0)
    model, batch = on_device(PlainModel([WeightFunction() for _ in range(4)])), make_batch(2, 32)
    plain = loss_and_gradients(model, batch)
    step, _ = planned_steps(model, batch, alpha=1.0)
    assert step.distance(plain) <= 1e-6


class OwnAttention(nn.Module):
    """A layer with an attention function that nothing replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.mT / 6, -1) @ v
        return x + self.down(nn.functional.gelu(self.up(x)))


def test_layers_that_run_whole_stay_exact() -> None:
    torch.manual_seed(0)
    model, batch = on_device(PlainModel([OwnAttention() for _ in range(4)])), make_batch(2, 48)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, swap_precision="fp8") as under_test:
        under_test.profile_step(batch)
        assert under_test.engine.layer_classes.unsliceable
        assert under_test.profile is not None
        for call in under_test.profile.in_order():
            call.store_exactly()
        under_test.load(1.0)
        assert_equal(under_test.step(batch), plain)
        under_test.assert_as_planned()


@slow_if(lambda family: family != "qwen3")
@pytest.mark.parametrize("family", ["qwen3", "phi", "gpt_neox", "mistral_window", "qwen3_moe"])
def test_other_families(family: str) -> None:
    model, batch = model_of(family), make_batch(2, 48)
    plain = loss_and_gradients(model, batch)
    step, _ = planned_steps(model, batch, alpha=0.5, test_mode=DELAYS)
    torch.testing.assert_close(step.loss, plain.loss, rtol=1e-6, atol=0)
    assert 1e-4 < step.distance(plain) <= ONE_VALUE
