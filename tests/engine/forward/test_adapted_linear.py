"""Modules that LoRA adapts, computed by one operation, or as they are where that is not theirs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import peft
import pytest
import torch
from support.architectures.adapted_models import (
    RANK,
    Watched,
    adapters_in,
    build,
    by_hand,
    clipped,
    in_place_dropout,
    parametrized,
    scaled,
    stored_in_bf16,
    trained_scale,
    two_adapters,
)
from support.devices import DEVICE
from support.families import make_batch
from support.harness import (
    Batch,
    EngineUnderTest,
    Step,
    assert_equal,
    beside,
    gradients_of,
    in_double,
    loss_and_gradients,
    times_farther,
)
from support.markers.slow import slow_if
from support.samples.storage_kinds import BASE, TOKENS, ByKind, Rows, everything
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_memo.artifacts.costs import Place
from lightning_memo.engine.forward.adapted_linear import adapted_modules
from lightning_memo.engine.modules import fused_kernels

# Distance of the gradient to fp64 in units of plain training's, as the mean of many batches: of two methods that are
# equally near, one is nearer in a batch and the other in the next, by factors of up to 3.
FARTHER, BATCHES = 1.25, 32
WHOLE: list[tuple[Place, int, int]] = [("host", 0, TOKENS)]


@pytest.fixture(autouse=True)
def only_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, norms, feed-forwards and rotary positions would be fused, too, and round differently."""
    monkeypatch.setattr(fused_kernels, "_attach_norms", lambda *_: ())
    monkeypatch.setattr(fused_kernels, "runs_triton", lambda _: False)


FUSED = {
    "plain": build,
    "dropout": partial(build, lora_dropout=0.2),
    "rank of the width": partial(build, r=16),
    "rank-stabilized": partial(build, use_rslora=True),
    "bias": partial(build, "qwen2"),
    "trained biases": partial(build, "qwen2", bias="lora_only"),
}
AS_THEY_ARE = {
    "bias of B": partial(build, "qwen2", lora_bias=True),
    "two adapters": two_adapters,
    "weights in bf16": stored_in_bf16,
    "weights are decomposed": partial(build, use_dora=True),
    "decomposed beside bf16": partial(build, use_dora=True, dtype=torch.bfloat16),
    "a cast product is read": partial(stored_in_bf16, base=Watched),
    "users' own forward": lambda: by_hand(torch.float32),
    "users' own beside bf16": lambda: by_hand(torch.bfloat16),
    "a factor": scaled,
    "dropout in place": in_place_dropout,
    "a trained scale": trained_scale,
    "fp64 beside fp32": lambda: adapters_in(build(), torch.float64),
    "fp32 beside fp16": partial(build, dtype=torch.float16),
}


@pytest.fixture(autouse=True)
def own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, norms are computed by fewer kernels, too, and not bit by bit as plain training."""
    monkeypatch.setattr(fused_kernels, "_is_norm", lambda module: False)


def names(under_test: ByKind, module: str) -> list[str]:
    """Products of a module of the second layer that a plan may store."""
    return [name.partition(f"{module}")[2] for name in under_test.products if module in name]


def steps_of_plans(under_test: ByKind, batch: Batch, amp: bool = False) -> list[Step]:
    """Steps that keep everything, store nothing, one kind, and everything of whole layers."""
    keeps_all: Rows = {kind: [("device", 0, TOKENS)] for kind in ("input", "attention", "other")}
    stores = (BASE | dict.fromkeys(stored, WHOLE) for stored in ((), ("other",), under_test.products))
    steps = []
    for rows in (keeps_all, *stores):
        under_test.load_storage(rows)
        steps.append(under_test.step(batch, amp))
        assert under_test.engine.swap is not None and under_test.engine.swap.plain == (rows is keeps_all)
    return steps


def assert_right_in_double(model: nn.Module, batch: Batch) -> None:
    """Compare all plans of a model in fp64 with plain training, where sums in another order differ by rounding."""
    double = in_double(model)
    plain = loss_and_gradients(double, batch)
    for joint in (False, True):  # with joint attention, slices run while others wait for attention
        with ByKind(double, joint_attention=joint, fused_kernels=True) as under_test:
            steps = [under_test.profile_step(batch), *steps_of_plans(under_test, batch)]
            # No kernel of a GPU attends in fp64: there, attention may run over all tokens at once anyway.
            under_test.load_storage(everything(under_test.products, under_test.engine.layer_classes.joint_attention))
            steps.append(under_test.step(batch))
        assert max(step.distance(plain) for step in steps) <= 1e-12


# ---- one operation


@slow_if(lambda kind, base, amp: kind != "dropout" or amp)
@pytest.mark.parametrize("amp", [False, True], ids=["", "mixed precision"])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSED)
def test_plans_train_alike(kind: str, base: torch.dtype, amp: bool) -> None:
    model, batch = FUSED[kind](dtype=base), make_batch(2, TOKENS)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    assert_right_in_double(model, batch)
    with ByKind(model, fused_kernels=True) as under_test:
        first = under_test.profile_step(batch, amp)
        for step in steps_of_plans(under_test, batch, amp):
            assert_equal(step, first)
    assert names(under_test, "self_attn.q_proj") == names(under_test, "mlp.up_proj") == [""]
    assert names(under_test, "mlp.down_proj") == []  # the recomputation of a layer ends before it
    assert under_test.profile is not None
    size_bytes = {product.name: product.size_bytes for product in under_test.profile.in_order()[1].products}
    weight = under_test.engine.layers[1].self_attn.q_proj.base_layer.weight
    dtype = torch.bfloat16 if amp else weight.dtype
    assert size_bytes["self_attn.q_proj"] == batch["input_ids"].numel() * weight.shape[0] * dtype.itemsize
    with EngineUnderTest(model, fused_kernels=True) as whole_layers:
        assert_equal(whole_layers.profile_step(batch, amp), first)
        for alpha in (0.0, 1.0):
            whole_layers.load(alpha)
            assert_equal(whole_layers.step(batch, amp), first)


@slow_if(lambda base, adapters, dropout: dropout or base == adapters or base != torch.bfloat16)
@pytest.mark.parametrize(
    ("base", "adapters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_as_near_to_fp64(base: torch.dtype, adapters: torch.dtype, dropout: float) -> None:
    model = adapters_in(build(dtype=base, lora_dropout=dropout), adapters)
    batches = [make_batch(2, TOKENS, seed=seed) for seed in range(BATCHES)]
    double, plain = in_double(model), [loss_and_gradients(model, batch) for batch in batches]
    exact = [loss_and_gradients(double, batch) for batch in batches]
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        ours = [under_test.step(batch) for batch in batches]
    assert times_farther(ours, plain, exact) <= FARTHER


@slow_if(lambda amp: amp)
@pytest.mark.parametrize("amp", [False, True], ids=["", "mixed precision"])
def test_the_setting_turns_it_off(amp: bool) -> None:
    model, batch = build(dtype=torch.bfloat16, lora_dropout=0.2), make_batch(2, TOKENS)
    plain = loss_and_gradients(model, batch, amp)
    with ByKind(model) as under_test:
        assert_equal(under_test.profile_step(batch, amp), plain)
        for step in steps_of_plans(under_test, batch, amp):
            assert_equal(step, plain)
    with EngineUnderTest(model, fused_kernels=True) as fused:
        assert not torch.equal(fused.profile_step(batch, amp).loss, plain.loss)


# ---- modules that run as they are


@slow_if(lambda kind: kind != "two adapters")
@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_other_modules_run_as_they_are(kind: str) -> None:
    model, batch = AS_THEY_ARE[kind](), make_batch(2, TOKENS)
    assert_right_in_double(model, batch)
    plain = loss_and_gradients(model, batch)
    with ByKind(model, fused_kernels=True) as under_test:
        assert_equal(under_test.profile_step(batch), plain)
        for step in steps_of_plans(under_test, batch):
            assert_equal(step, plain)
    assert kind == "dropout in place" or "" not in names(under_test, "self_attn.q_proj")  # its adapters are elsewhere


@contextlib.contextmanager
def doubled_by_class() -> Iterator[None]:
    own = peft.tuners.lora.Linear.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.tuners.lora.Linear, "forward", lambda self, x: own(self, x) * 2)
        yield


@contextlib.contextmanager
def doubled_by_hook() -> Iterator[None]:
    def double(module: nn.Module, args: Any, out: Any) -> Any:
        return out * 2 if type(module) is nn.Linear else out

    handle = torch.nn.modules.module.register_module_forward_hook(double)
    try:
        yield
    finally:
        handle.remove()


@slow_if(lambda change: change is doubled_by_hook)
@pytest.mark.parametrize("change", [doubled_by_class, doubled_by_hook])
def test_code_of_users_runs(change: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    model, other, batch = build(), build(), make_batch(2, TOKENS)
    with EngineUnderTest(model, fused_kernels=True) as under_test, change():
        assert_equal(under_test.profile_step(batch), loss_and_gradients(other, batch))


@pytest.mark.slow
def test_parametrized_parts() -> None:
    assert_right_in_double(parametrized(), make_batch(2, TOKENS))


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
@pytest.mark.parametrize("part", ["q_proj", "q_proj.base_layer", "lora_B.default"])
def test_hooks_see_what_they_see_in_plain_training(part: str) -> None:
    model, batch = build(targets=["q_proj"]), make_batch(2, TOKENS)
    for name, module in model.named_modules():
        if name.endswith(part):
            module.register_forward_hook(_Doubled.read)
    whole = part == "q_proj"  # the hooked module itself is one operation
    model = in_double(model) if whole else model
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(
        model, fused_kernels=True
    ) as under_test:  # hooks would see one slice only: layers run as they are
        steps = [under_test.profile_step(batch)]
        under_test.load(0.0)
        steps.append(under_test.step(batch))
    for step in steps:
        if whole:
            assert step.distance(plain) <= 1e-12
        else:
            assert_equal(step, plain)


# ---- what is around modules


def test_a_part_of_the_adapters_is_trained() -> None:
    """Nothing in the first layer needs a gradient but B of the last module."""
    model, batch = build(targets=["gate_proj", "up_proj", "down_proj"]), make_batch(2, TOKENS)
    for name, p in model.named_parameters():
        p.requires_grad_("down_proj.lora_B" in name)
    assert_right_in_double(model, batch)


def test_outputs_are_changed_in_place() -> None:
    """OLMo clips queries, keys and values."""
    assert_right_in_double(clipped(), make_batch(2, TOKENS))


def test_the_backward_may_run_within_autocast() -> None:
    model, batch = build(dtype=torch.bfloat16), make_batch(2, TOKENS)
    batch = beside(model, batch)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        expected = under_test.profile_step(batch)
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(**batch).loss
        with torch.autocast(DEVICE.type, torch.float16):
            loss.backward()
        assert Step(loss.detach(), gradients_of(model)).distance(expected) <= 2**-4  # autocast rounds other products


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


CHANGES = {"disabled": lambda model: model.disable_adapter(), "merged": merged}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_adapters_change_from_step_to_step(change: Callable[[Any], Any], stored: bool, dtype: torch.dtype) -> None:
    model, batch = build(dtype=dtype), make_batch(2, TOKENS)
    model.get_input_embeddings().weight.requires_grad_()  # without adapters, this alone is trained
    with change(model):
        changed = loss_and_gradients(model, batch)
    with ByKind(model, fused_kernels=True) as under_test:
        first = under_test.profile_step(batch)
        under_test.load_storage(BASE | dict.fromkeys(under_test.products if stored else (), WHOLE))
        for _ in range(2):
            with change(model):
                assert_equal(under_test.step(batch), changed)
            assert_equal(under_test.step(batch), first)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_a_second_adapter_is_activated(stored: bool) -> None:
    model, batch = two_adapters(), make_batch(2, TOKENS)
    both = loss_and_gradients(model, batch)
    model.base_model.set_adapter("default")
    with ByKind(model, fused_kernels=True) as under_test:
        first = under_test.profile_step(batch)
        under_test.load_storage(BASE | dict.fromkeys(under_test.products if stored else (), WHOLE))
        for _ in range(2):
            model.base_model.set_adapter(["default", "second"])
            assert_equal(under_test.step(batch), both)
            model.base_model.set_adapter("default")
            assert_equal(under_test.step(batch), first)


@pytest.mark.slow
def test_types_change_from_step_to_step() -> None:
    model, batch = build(), make_batch(2, TOKENS)
    with ByKind(model, fused_kernels=True) as under_test:
        under_test.profile_step(batch)
        adapters_in(model, torch.float64)
        with EngineUnderTest(copy.deepcopy(model), fused_kernels=True) as changed:
            first = changed.profile_step(batch)
        under_test.load_storage(BASE | dict.fromkeys(under_test.products, WHOLE))
        assert_equal(under_test.step(batch), first)


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
def test_a_stored_output_spares_its_products_and_the_last_one_is_never_computed(dtype: torch.dtype) -> None:
    with ByKind(build(dtype=dtype), test_mode=None, fused_kernels=True) as under_test:
        under_test.profile_step(make_batch(2, TOKENS))
        layers = len(under_test.engine.layers)
        adapted = [module for module in under_test.engine.layers[0].modules() if hasattr(module, "lora_A")]
        up = under_test.engine.layers[0].mlp.up_proj
        spared = 2 * 2 * TOKENS * up.in_features * up.out_features  # FlopCounterMode does not count B's `addmm_`
        nothing = flops(under_test, BASE)
        assert nothing - flops(under_test, BASE | {"mlp.up_proj": [("device", 0, TOKENS)]}) == layers * spared
        stored = BASE | {name: [("device", 0, TOKENS)] for name in under_test.products}
        inner = sum(2 * 2 * TOKENS * module.in_features * RANK for module in adapted)
        other = flops(under_test, BASE | {"other": [("device", 0, TOKENS)]})
        assert flops(under_test, stored) - other == layers * inner


def test_an_exception_leaves_no_module_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, replaced = build().base_model.model.model.layers, fused_kernels.replace_forward
    adapted = [module for layer in layers for _, module in adapted_modules(layer)]
    calls = iter(range(len(adapted)))

    def fails_at_last(*args: Any) -> Callable[[], None]:
        if next(calls) == len(adapted) - 1:
            raise KeyboardInterrupt
        return replaced(*args)

    monkeypatch.setattr(fused_kernels, "replace_forward", fails_at_last)
    with pytest.raises(KeyboardInterrupt):
        fused_kernels.attach_fused(layers, torch.device("cpu"))
    assert not any("forward" in vars(module) for module in adapted)
