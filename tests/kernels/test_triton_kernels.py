"""Feed-forwards and rotary positions of layers by Triton's kernels, which its interpreter runs on a CPU."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from support.families import FAMILIES, make_batch
from support.harness import (
    EngineUnderTest,
    Step,
    assert_close,
    assert_equal,
    gradients_of,
    in_double,
    loss_and_gradients,
    times_farther,
)
from support.kernels.counted_kernels import assert_near, count_kernels
from support.samples.storage_kinds import BASE, TOKENS, ByKind, everything
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from lightning_memo.engine.forward.fused_functions import GatedActivation, Rotation, gated_activation, rotation
from lightning_memo.engine.modules import fused_kernels

HERE = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not (HERE or "EXTRAS_REQUIRED" in os.environ),
    reason="runs compiled on a GPU: gpu/test_cuda_fused_layers.py" if HERE else "triton is not installed",
)
# Distance of the gradient to fp64 in units of plain training's, as the mean of many batches, which differ.
FARTHER, BATCHES = 1.25, 12


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> Iterator[Counter[str]]:
    """Run kernels on the CPU, and count them."""
    from support.kernels.triton_interpreter import interpreted

    with interpreted():
        monkeypatch.setattr(fused_kernels, "runs_triton", lambda device: True)
        yield count_kernels(monkeypatch)


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
OTHERS = {
    "phi3": partial(transformers.Phi3Config, **SIZES),
    "glm": partial(transformers.GlmConfig, **SIZES, head_dim=8),
    "cohere": partial(transformers.CohereConfig, **SIZES),
    "stablelm": partial(transformers.StableLmConfig, **SIZES),
}


def build(family: str = "llama", layers: int = 2, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    if family in OTHERS:
        config = OTHERS[family](num_hidden_layers=layers, **settings)
        return transformers.AutoModelForCausalLM.from_config(config).train()
    return FAMILIES[family].build(num_hidden_layers=layers, **settings).train()


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def counted_step(model: nn.Module, calls: Counter[str], **settings: Any) -> tuple[Step, Counter[str]]:
    """A step in which nothing is computed again, and the kernels that ran."""
    batch = make_batch(1, 12)
    with EngineUnderTest(model, fused_kernels=True, **settings) as under_test:
        under_test.profile_step(batch)
        assert under_test.engine.layer_classes.unsliceable == ""
        under_test.load(1.0)
        calls.clear()
        return under_test.step(batch), calls


# ---- functions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tanh", [False, True])
def test_gated_activations(tanh: bool, dtype: torch.dtype) -> None:
    gate, up = (numbers(3, 17, 45, seed=seed).mul(3).to(dtype) for seed in (1, 2))
    assert_near(lambda *given: GatedActivation.apply(*given, tanh), partial(gated_activation, tanh=tanh), [gate, up])


def test_large_numbers_have_finite_gradients() -> None:
    gate = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4], requires_grad=True)
    for tanh in (False, True):
        y = GatedActivation.apply(gate, torch.ones(5), tanh)
        (gradient,) = torch.autograd.grad(y.sum(), gate)
        assert torch.equal(y, torch.tensor([0.0, 0, 0, 50, 1e4])) or float(y[:2].detach().abs().max()) < 1e-18
        assert torch.allclose(gradient, torch.tensor([0, 0, 0.5, 1, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2], ids=["shared angles", "angles of rows"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_rotations(contiguous: bool, rows: int, dtype: torch.dtype) -> None:
    """Angles of both halves of a head may differ; heads are no power of two, and more than one program takes."""
    q, k = (numbers(2, 5, heads, 12, seed=heads).transpose(1, 2).to(dtype) for heads in (35, 3))
    cos, sin = (numbers(rows, 5, 24, seed=seed)[..., ::2].to(dtype) for seed in (3, 4))
    if contiguous:
        q, k = q.contiguous(), k.contiguous()

    def exact(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(rotation(t, cos.to(t.dtype), sin.to(t.dtype)) for t in (q, k))

    assert_near(lambda q, k: Rotation.apply(q, k, cos, sin), exact, [q, k])


# ---- models


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3", "mistral"])
def test_plans_train_alike(family: str, calls: Counter[str]) -> None:
    model, batch = build(family), make_batch(1, TOKENS)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        first = under_test.profile_step(batch)
        assert_close(first, plain)
        assert under_test.engine.layer_classes.unsliceable == ""
        for alpha in (0.0, 1.0):
            under_test.load(alpha)
            calls.clear()
            assert_equal(under_test.step(batch), first)
            under_test.assert_as_planned()
        assert calls == {"gated": 2, "gated_gradients": 2, "rotated": 8}
        under_test.load(0.5, slice_tokens=16)
        assert_close(under_test.step(batch), plain)
    with ByKind(model, fused_kernels=True) as by_kind:
        by_kind.profile_step(batch)
        whole = {kind: [("host", 0, TOKENS)] for kind in ("other", *by_kind.products)}
        for rows in (BASE, BASE | whole):
            by_kind.load_storage(rows)
            assert_equal(by_kind.step(batch), first)
        by_kind.load_storage(everything(by_kind.products))
        assert_close(by_kind.step(batch), plain)
        by_kind.assert_as_planned()


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_gradients_in_bf16_are_as_near_to_fp64(family: str) -> None:
    model, batches = build(family).bfloat16(), [make_batch(1, 12, seed=seed) for seed in range(BATCHES)]
    double = in_double(model)
    with EngineUnderTest(model, fused_kernels=True, check_slices=False) as under_test:
        ours = [under_test.step(batch) for batch in batches]
    exact = [loss_and_gradients(double, batch) for batch in batches]
    plain = [loss_and_gradients(model, batch) for batch in batches]
    assert any(a.distance(b) > 0 for a, b in zip(ours, plain, strict=True))
    assert times_farther(ours, plain, exact) <= FARTHER


@pytest.mark.parametrize("place", ["hidden", "model"])
def test_all_but_a_slice_on_the_host(place: Any) -> None:
    model, batch = build(num_key_value_heads=2), make_batch(1, 24)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, slice_tokens=8, stream_from_host=place, fused_kernels=True) as under_test:
        assert_close(under_test.profile_step(batch), plain)
        under_test.load(0.5)
        assert_close(under_test.step(batch), plain)


def test_a_retained_graph_has_several_backwards() -> None:
    """What was read in the first backward is read again, by plans that keep, store and recompute it."""
    model, batch = build(), make_batch(1, TOKENS)
    plain = {name: 2 * g for name, g in loss_and_gradients(model, batch).gradients.items()}
    with ByKind(model, fused_kernels=True) as under_test:
        under_test.profile_step(batch)
        everywhere = everything(under_test.products)
        kept = BASE | {kind: [("device", 0, TOKENS)] for kind in ("other", *under_test.products)}
        plainly = {kind: [("device", 0, TOKENS)] for kind in ("input", "attention", "other")}
        for rows in (BASE, kept, everywhere, plainly):
            under_test.load_storage(rows)
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward(retain_graph=True)
            loss.backward()
            under_test.assert_empty()
            assert_close(Step(loss.detach(), gradients_of(model)), Step(loss.detach(), plain))


def test_gradients_accumulate() -> None:
    model, batches = build(), [make_batch(1, 12, seed=seed) for seed in (1, 2)]
    model.zero_grad()
    for batch in batches:
        model(**batch).loss.backward()
    plain = gradients_of(model)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        under_test.profile_step(batches[0])
        under_test.load(0.5)
        model.zero_grad()
        losses = [model(**batch).loss for batch in batches]
        sum(losses).backward()
        under_test.assert_empty()
        zero = torch.zeros(())
        assert_close(Step(zero, gradients_of(model)), Step(zero, plain))


def test_adapters(calls: Counter[str]) -> None:
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model, batch = peft.get_peft_model(build(), settings), make_batch(1, TOKENS)
    plain = loss_and_gradients(model, batch)
    with ByKind(model, fused_kernels=True) as under_test:
        first = under_test.profile_step(batch)
        assert_close(first, plain)
        under_test.load_storage(BASE | {kind: [("host", 0, TOKENS)] for kind in under_test.products})
        calls.clear()
        assert_equal(under_test.step(batch), first)
    assert calls == {"gated": 4, "gated_gradients": 2, "rotated": 12}


def test_the_activation_is_not_saved() -> None:
    sizes = []
    for fused in (False, True):
        with ByKind(build(), fused_kernels=fused) as under_test:
            under_test.profile_step(make_batch(1, TOKENS))
            assert under_test.profile is not None
            call = under_test.profile.in_order()[1]
            sizes.append(sum(saved.size_bytes for saved in call.saved if saved.kind == "other"))
    width = under_test.model.config.intermediate_size
    assert sizes[0] - sizes[1] == 4 * TOKENS * width


# ---- what runs as it is


def scaled(module: Any, args: Any, output: Tensor) -> Tensor:
    return output * 2


def test_code_of_users_runs(calls: Counter[str], monkeypatch) -> None:
    model = build(layers=5)
    own, hooked, later, changed, _ = [layer.mlp for layer in model.model.layers]
    for mlp in (own, hooked, later, changed):
        mlp.act_fn = nn.SiLU()
    own.act_fn.forward = lambda x: F.silu(x) * 2
    hooked.act_fn.register_forward_hook(scaled)
    batch = make_batch(1, 12)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        later.act_fn.register_forward_hook(scaled)
        changed.act_fn = nn.GELU()
        calls.clear()
        step = under_test.step(batch)
    assert calls["gated_gradients"] == 1
    assert_close(step, loss_and_gradients(model, batch))


def test_a_class_that_a_user_changed_runs(calls: Counter[str], monkeypatch) -> None:
    model, batch = build(), make_batch(1, 12)
    own = modeling_llama.LlamaMLP.forward
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: own(self, x) * 2)
        calls.clear()
        step = under_test.step(batch)
    assert calls["gated"] == 0
    assert_close(step, loss_and_gradients(model, batch))


def test_hooks_of_projections_run() -> None:
    model, batch, seen = build(), make_batch(1, 12), []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(scaled)
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        step = under_test.step(batch)
    assert_close(step, plain)
    assert torch.equal(seen[-1], seen[-1].clone()) and len(seen) > 2


def test_rotations_of_a_users_function(calls: Counter[str], monkeypatch) -> None:
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: own(*args[:3], args[3] * 2))
    step, counts = counted_step(model := build(), calls)
    assert counts["rotated"] == 0
    assert_close(step, loss_and_gradients(model, make_batch(1, 12)))


def test_functions_that_a_user_put_around_others_run(calls: Counter[str], monkeypatch) -> None:
    seen = Counter[str]()

    def watched(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        @wraps(own)
        def watch(*args: Any) -> Any:
            seen[name] += 1
            return own(*args)

        monkeypatch.setattr(owner, name, watch)

    watched(modeling_llama, "apply_rotary_pos_emb")
    watched(modeling_llama.LlamaMLP, "forward")
    model, batch = build(), make_batch(1, 12)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        calls.clear()
        seen.clear()
        under_test.step(batch)
    assert not calls and seen["forward"] >= 2 and seen["apply_rotary_pos_emb"] >= 2


def test_approximations_of_gelu_are_told_apart(calls: Counter[str]) -> None:
    model, batch = build(), make_batch(1, 12)
    for layer, approximate in zip(model.model.layers, ("tanh", "none"), strict=True):
        layer.mlp.act_fn = nn.GELU(approximate)
    step, counts = counted_step(model, calls)
    assert counts["gated"] == 1
    assert_close(step, loss_and_gradients(model, batch))


@pytest.mark.parametrize("name", ["deepseek_v4.DeepseekV4MLP", "glm5_next.Glm5NextTextMLP"])
def test_classes_that_clamp_large_numbers(name: str, calls: Counter[str]) -> None:
    package, _, kind = name.partition(".")
    module = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    mlp = getattr(module, kind)(SimpleNamespace(**sizes, hidden_act="silu", swiglu_limit=10.0, mlp_bias=False))
    layer, x = nn.Sequential(mlp), numbers(2, 4, 8) * 100
    plain = layer(x)
    undo = fused_kernels.attach_fused([layer], torch.device("cpu"))
    calls.clear()
    assert torch.equal(layer(x), plain) and not calls and not undo


def test_the_function_is_replaced_inside_of_layers_only(calls: Counter[str]) -> None:
    own, other, seen = modeling_llama.apply_rotary_pos_emb, build(), []
    model, batch = build(), make_batch(1, 12)
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda *_: seen.append(modeling_llama.apply_rotary_pos_emb is own)
    )
    plain = loss_and_gradients(other, batch)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        calls.clear()
        assert modeling_llama.apply_rotary_pos_emb is own
        assert_equal(loss_and_gradients(other, batch), plain)
        assert not calls
        under_test.step(batch)
        assert not any(seen) and seen
        assert modeling_llama.apply_rotary_pos_emb is own
        with torch.no_grad():
            calls.clear()
            model(**batch)
        assert not calls
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("phi3", {"rotated"}),  # gate and up are one product
        ("glm", set()),  # rotates pairs of neighbours
        ("cohere", {"gated", "gated_gradients"}),
        ("stablelm", {"rotated", "gated", "gated_gradients"}),  # rotates a part of each head
        ("phi", {"rotated"}),  # the same
        ("gpt2", set()),
    ],
)
def test_other_classes(family: str, kernels: set[str], calls: Counter[str]) -> None:
    step, counts = counted_step(model := build(family), calls)
    assert set(counts) == kernels
    assert_close(step, loss_and_gradients(model, make_batch(1, 12)))


@pytest.mark.parametrize("amp", [False, True], ids=["fp64", "mixed precision"])
def test_types(amp: bool, calls: Counter[str]) -> None:
    """Under autocast, products are in bf16 and angles in fp32, and single operations rotate in fp32."""
    model, batch = build(), make_batch(1, 12)
    model = model if amp else in_double(model)
    plain = loss_and_gradients(model, batch, amp)
    with EngineUnderTest(model, fused_kernels=True) as under_test:
        calls.clear()
        step = under_test.step(batch, amp)
    assert calls["rotated"] == 0 and (calls["gated"] > 0) == amp
    assert step.distance(plain) <= (0.02 if amp else 0)


def test_the_setting_turns_it_off(calls: Counter[str]) -> None:
    model, batch = build(), make_batch(1, 12)
    with EngineUnderTest(model) as under_test:
        assert_equal(under_test.profile_step(batch), loss_and_gradients(model, batch))
    assert not calls


def test_a_kernel_that_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    from lightning_memo.kernels import triton_kernels

    def fails(*args: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(triton_kernels, "gated", fails)
    model, batch = build(), make_batch(1, 12)
    plain = loss_and_gradients(model, batch)
    told = r"layers run without a fused kernel, which fails \(RuntimeError: Failed to find C compiler\.\): Triton needs"
    with pytest.warns(UserWarning, match=told), EngineUnderTest(model, fused_kernels=True) as under_test:
        assert_close(under_test.profile_step(batch), plain)
