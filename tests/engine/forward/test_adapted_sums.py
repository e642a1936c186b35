"""Modules that LoRA adapts: their outputs are stored as one product, and what nothing reads is not computed again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.architectures.adapted_models import (
    RANK,
    Watched,
    adapters_in,
    build,
    by_hand,
    in_place_dropout,
    parametrized,
    scaled,
    stored_in_bf16,
    two_adapters,
)
from support.devices import DEVICE
from support.families import make_batch
from support.harness import EngineUnderTest, assert_equal, beside, in_double, loss_and_gradients
from support.markers.slow import slow_if
from support.samples.storage_kinds import BASE, TOKENS, ByKind, everything
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_memo.artifacts.costs import Place
from lightning_memo.engine.slices.recomputed_products import SumMode

# Distance to fp64 of a step in slices, in units of plain training's own: 0.8 to 1.3 is measured, and without sums 0.6
# to 1.4, as that compares the lengths of two small random vectors.
FARTHER = 1.5
WHOLE: list[tuple[Place, int, int]] = [("host", 0, TOKENS)]


def names(under_test: ByKind, module: str) -> list[str]:
    """Products of a module of the second layer that a plan may store."""
    return [name.partition(f"{module}")[2] for name in under_test.products if module in name]


def train(model: nn.Module, stored: bool = True, amp: bool = False) -> ByKind:
    """Compare a step with plain training bit by bit, and another one in slices, in fp64; return what has run."""
    batch = make_batch(2, TOKENS)
    double = in_double(model)
    for compared in (model,) if amp else (double, model):
        plain = loss_and_gradients(compared, batch, amp)
        with ByKind(compared) as under_test:
            under_test.profile_step(batch, amp)
            if compared is double:
                nested = under_test.engine.layer_classes.joint_attention  # as no kernel of a GPU attends in fp64
                under_test.load_storage(everything(under_test.products, nested) if stored else BASE)
                assert under_test.step(batch).distance(plain) <= 1e-12
            under_test.load_storage(BASE | dict.fromkeys(under_test.products if stored else (), WHOLE))
            assert_equal(under_test.step(batch, amp), plain)
    return under_test


SUMS = {
    "plain": build,
    "dropout": partial(build, lora_dropout=0.2),
    "rank of the width": partial(build, r=16),
    "rank-stabilized": partial(build, use_rslora=True),
    "bias": partial(build, "qwen2"),
    "bias of B": partial(build, "qwen2", lora_bias=True),
    "trained biases": partial(build, "qwen2", bias="lora_only"),
    "two adapters": two_adapters,
    "weights in bf16": stored_in_bf16,
}


@slow_if(lambda kind: kind not in ("dropout", "two adapters"))
@pytest.mark.parametrize("kind", SUMS)
def test_sums_are_stored(kind: str) -> None:
    assert_only_sums(train(SUMS[kind]()))


def assert_only_sums(under_test: ByKind) -> None:
    assert names(under_test, "self_attn.q_proj")[-1] == "" and ".base_layer" not in str(under_test.products)
    assert "lora_B" not in str(under_test.products)
    assert names(under_test, "mlp.down_proj") == [".lora_A.default"]


APART = {
    "weights are decomposed": partial(build, use_dora=True),
    "decomposed beside bf16": partial(build, use_dora=True, dtype=torch.bfloat16),
    "a cast product is read": partial(stored_in_bf16, base=Watched),
    "users' own forward": lambda: by_hand(torch.float32),
    "users' own beside bf16": lambda: by_hand(torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", APART.values(), ids=APART.keys())
def test_terms_that_something_else_reads_are_stored_by_themselves(make: Callable[[], nn.Module]) -> None:
    under_test = train(make())
    assert "" not in names(under_test, "self_attn.q_proj")


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_in_mixed_precision(stored: bool) -> None:
    train(build(), stored, amp=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", *APART])
def test_nothing_is_stored(kind: str) -> None:
    train((SUMS | APART)[kind](), stored=False)


# ---- adapters in another type than the base layer


def train_of_types(model: nn.Module, amp: bool = False) -> None:
    """Compare steps with plain training bit by bit, but for one in slices, and assert that sums are stored."""
    batch = make_batch(2, TOKENS)
    plain, exact = loss_and_gradients(model, batch, amp), loss_and_gradients(in_double(model), batch)
    for alpha in (0.0, 1.0):
        with EngineUnderTest(model) as whole_layers:
            assert_equal(whole_layers.profile_step(batch, amp), plain)
            whole_layers.load(alpha)
            assert_equal(whole_layers.step(batch, amp), plain)
    with ByKind(model) as under_test:
        assert_equal(under_test.profile_step(batch, amp), plain)
        assert_only_sums(under_test)
        for stored in ((), ("other",), under_test.products):
            under_test.load_storage(BASE | dict.fromkeys(stored, WHOLE))
            assert_equal(under_test.step(batch, amp), plain)
        nested = under_test.engine.layer_classes.joint_attention
        under_test.load_storage(everything(under_test.products, nested))
        assert under_test.step(batch, amp).distance(exact) <= FARTHER * plain.distance(exact)
    assert under_test.profile is not None
    size_bytes = {product.name: product.size_bytes for product in under_test.profile.in_order()[1].products}
    weight = under_test.engine.layers[1].self_attn.q_proj.base_layer.weight
    dtype = torch.bfloat16 if amp else weight.dtype
    assert size_bytes["self_attn.q_proj"] == batch["input_ids"].numel() * weight.shape[0] * dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True], ids=["", "mixed precision"])
@pytest.mark.parametrize("kind", SUMS)
def test_adapters_in_fp32_beside_bf16(kind: str, amp: bool) -> None:
    model = SUMS[kind](dtype=torch.bfloat16)
    # This is PEFT's default, but for a second adapter before release 0.19.
    assert {p.dtype for name, p in model.named_parameters() if ".default." in name} == {torch.float32}
    train_of_types(model, amp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "adapters"),
    [(torch.float16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)],
)
def test_adapters_of_other_types(base: torch.dtype, adapters: torch.dtype) -> None:
    train_of_types(adapters_in(build(dtype=base, lora_dropout=0.2), adapters))


# ---- adapters that change after the profiled step


@contextlib.contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    before = copy.deepcopy(model.state_dict())
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        model.load_state_dict(before)  # the difference of a sum is rounded


@contextlib.contextmanager
def only_second(model: nn.Module) -> Iterator[None]:
    model.base_model.set_adapter("second")
    try:
        yield
    finally:
        model.base_model.set_adapter(["default", "second"])


CHANGES = {"disabled": lambda model: model.disable_adapter(), "merged": merged, "another": only_second}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_adapters_change_from_step_to_step(change: Callable[[Any], Any], stored: bool, dtype: torch.dtype) -> None:
    model, batch = two_adapters(dtype=dtype), make_batch(2, TOKENS)
    model.get_input_embeddings().weight.requires_grad_()  # without adapters, this alone is trained
    plain = loss_and_gradients(model, batch)
    with change(model):
        changed = loss_and_gradients(model, batch)
    with ByKind(model) as under_test:
        under_test.profile_step(batch)
        under_test.load_storage(BASE | dict.fromkeys(under_test.products if stored else (), WHOLE))
        for _ in range(2):
            with change(model):
                assert_equal(under_test.step(batch), changed)
            assert_equal(under_test.step(batch), plain)


def test_a_profiled_step_without_adapters_stores_outputs() -> None:
    model, batch = build(), make_batch(2, TOKENS)
    model.get_input_embeddings().weight.requires_grad_()
    with model.disable_adapter(), ByKind(model) as under_test:
        plain = loss_and_gradients(copy.deepcopy(model), batch)
        assert_equal(under_test.profile_step(batch), plain)
    assert names(under_test, "self_attn.q_proj") == [""]


# ---- what modules are made of


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("make", [scaled, parametrized, in_place_dropout])
def test_modules_of_users(make: Callable[[], nn.Module], stored: bool) -> None:
    train(make(), stored)


@pytest.mark.slow
def test_types_change_from_step_to_step() -> None:
    model, batch = build(), make_batch(2, TOKENS)
    with ByKind(model) as under_test:
        under_test.profile_step(batch)
        adapters_in(model, torch.float64)
        plain = loss_and_gradients(model, batch)
        under_test.load_storage(BASE | dict.fromkeys(under_test.products, WHOLE))
        assert_equal(under_test.step(batch), plain)


def test_a_stored_sum_is_not_read_as_a_term() -> None:
    x, weight = torch.randn(3, 4, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    stored = torch.randn(3, 5, device=DEVICE)
    with SumMode(stored) as mode:
        term = mode.term("base", lambda: F.linear(x, weight))
        whole = term * 2.0 + term
        with pytest.raises(RuntimeError, match=r"a stored output of LoRA calls aten\.relu\.default with one of its"):
            term.relu()
    assert torch.equal(whole, stored)


def hooked(part: str) -> nn.Module:
    """A model with hooks, which see one slice only: layers then run as they are."""
    model = build()
    for name, module in model.named_modules():
        if name.endswith(part):
            module.register_forward_hook(_Doubled.read)
    return model


class _Doubled(torch.autograd.Function):
    """Reads a tensor past PyTorch's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2) if DEVICE.type == "cpu" else x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2

    @staticmethod
    def read(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return _Doubled.apply(out)


@slow_if(lambda part: "." not in part)
@pytest.mark.parametrize("part", ["q_proj", "q_proj.base_layer", "down_proj.base_layer", "lora_B.default"])
def test_hooks_see_what_they_see_in_plain_training(part: str) -> None:
    model, batch = hooked(part), make_batch(2, TOKENS)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model) as under_test:
        assert_equal(under_test.profile_step(batch), plain)
        under_test.load(0.0)
        assert_equal(under_test.step(batch), plain)


# ---- what is computed again


def flops(under_test: ByKind, rows: Any) -> float:
    under_test.load_storage(rows)
    batch = beside(under_test.model, make_batch(2, TOKENS))
    loss = under_test.model(**batch).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    under_test.assert_empty()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_sum_spares_its_products_and_the_last_one_is_never_computed(dtype: torch.dtype) -> None:
    with ByKind(build(dtype=dtype), test_mode=None) as under_test:
        under_test.profile_step(make_batch(2, TOKENS))
        layers = len(under_test.engine.layers)
        up = under_test.engine.layers[0].mlp.up_proj
        spared = 2 * 2 * TOKENS * (up.in_features + RANK) * up.out_features
        nothing = flops(under_test, BASE)
        assert nothing - flops(under_test, BASE | {"mlp.up_proj": [("device", 0, TOKENS)]}) == layers * spared
        stored = BASE | {name: [("device", 0, TOKENS)] for name in under_test.products}
        assert flops(under_test, stored) == flops(under_test, BASE | {"other": [("device", 0, TOKENS)]})
