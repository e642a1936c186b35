"""The kernels for CUDA against the definition in fp64, and against PyTorch's own flash attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.kernels.attention_reference import Attended, assert_close, attend, errors, make_inputs, reference
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.kernels import AttentionSpec, select_backend
from lightning_memo.kernels.attention_kernel import repeat_heads
from lightning_memo.kernels.fallback_kernels import Replay
from lightning_memo.kernels.flash_attention import AtenFlash, CudnnSdpa

TOKENS = 200  # no multiple of a kernel's block
# Output and gradients are rounded to 8 or 11 bits, the weights between them too.
BOUNDS = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
LSE_BOUND = 1e-4  # fp32, from exponentials of two to the power
SPECS = {
    "causal": AttentionSpec(),
    "full": AttentionSpec(causal=False),
    "scaled": AttentionSpec(scale=0.3),
    "window": AttentionSpec(window=70),
    "lengths": AttentionSpec(lengths=(TOKENS, 60)),
    "full lengths": AttentionSpec(causal=False, lengths=(90, TOKENS)),
    "window lengths": AttentionSpec(window=70, lengths=(TOKENS, 30)),
}


def assert_accurate(found: Attended, expected: Attended, dtype: torch.dtype) -> None:
    assert found.lse.dtype == torch.float32
    assert errors(found, expected)["lse"] <= LSE_BOUND
    assert_close(found, expected, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_kernels_compute_attention(spec, key_heads, dtype, choice, device):
    inputs = make_inputs(key_heads=key_heads, queries=TOKENS, keys=TOKENS, head=64, dtype=dtype, device=device)
    backend = select_backend(*inputs[:3], spec, choice)
    assert backend.name == choice
    assert_accurate(attend(backend, inputs, spec), reference(inputs, spec), dtype)


@pytest.mark.parametrize("window", [None, 30, 90])
@pytest.mark.parametrize(("query_start", "queries", "key_start"), [(128, 72, 0), (130, 70, 64), (199, 1, 0)])
def test_kernels_compute_slices(query_start, queries, key_start, window, choice, device):
    keys = query_start + queries - key_start
    inputs = make_inputs(key_heads=2, queries=queries, keys=keys, head=64, dtype=torch.bfloat16, device=device)
    spec = AttentionSpec(window=window)
    found = attend(select_backend(*inputs[:3], spec, choice), inputs, spec, query_start, key_start)
    assert_accurate(found, reference(inputs, spec, query_start, key_start), torch.bfloat16)


DOCUMENTS = {
    "alike": AttentionSpec(documents=((0, 1, 30, 160), (0, 1, 30, 160))),
    "full": AttentionSpec(causal=False, documents=((0, 64, 128), (0, 199))),
    "window": AttentionSpec(window=20, documents=((0, 1, 30, 160), (0, 25, 50))),
    "padded on the left": AttentionSpec(documents=((7, 20, 90), (0, 90))),
    "lengths": AttentionSpec(lengths=(TOKENS, 60), documents=((0, 20, 50, 90), (0, 20, 50, 90))),
}


@pytest.mark.parametrize(("query_start", "key_start"), [(0, 0), (100, 0), (60, 20)])
@pytest.mark.parametrize("spec", DOCUMENTS.values(), ids=DOCUMENTS)
def test_kernels_compute_packed_documents(spec, query_start, key_start, choice, device):
    inputs = make_inputs(
        key_heads=2, queries=TOKENS - query_start, keys=TOKENS - key_start, head=64, dtype=torch.bfloat16, device=device
    )
    found = attend(select_backend(*inputs[:3], spec, choice), inputs, spec, query_start, key_start)
    assert_accurate(found, reference(inputs, spec, query_start, key_start), torch.bfloat16)
    assert found.out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("head", [8, 40, 96, 128, 192, 256])
def test_kernels_compute_all_head_sizes(head, choice, device):
    inputs = make_inputs(queries=TOKENS, keys=TOKENS, head=head, dtype=torch.bfloat16, device=device)
    spec = AttentionSpec()
    found = attend(select_backend(*inputs[:3], spec, choice), inputs, spec)
    assert_accurate(found, reference(inputs, spec), torch.bfloat16)


def test_kernels_take_any_layout(choice, device):
    inputs = make_inputs(queries=TOKENS, keys=TOKENS, head=64, dtype=torch.bfloat16, device=device)
    turned = type(inputs)(*(t.transpose(2, 3).contiguous().transpose(2, 3) for t in inputs))
    spec = AttentionSpec()
    found = attend(select_backend(*turned[:3], spec, choice), turned, spec)
    assert_accurate(found, reference(inputs, spec), torch.bfloat16)
    assert found.out.transpose(1, 2).is_contiguous()


def test_kernels_without_dropout_draw_nothing(choice, device):
    inputs = make_inputs(queries=TOKENS, keys=TOKENS, head=64, dtype=torch.bfloat16, device=device)
    before = torch.cuda.get_rng_state(device)
    attend(select_backend(*inputs[:3], AttentionSpec(), choice), inputs, AttentionSpec())
    assert torch.equal(torch.cuda.get_rng_state(device), before)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_pytorchs_flash_kernel_gives_what_plain_training_gets(dropout, device):
    inputs = make_inputs(queries=TOKENS, keys=TOKENS, head=64, dtype=torch.bfloat16, device=device)
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    torch.manual_seed(3)
    found = attend(AtenFlash(), inputs, AttentionSpec(dropout=dropout))
    assert torch.equal(found.out, out)
    # The kernel adds up dq in no fixed order.
    for mine, theirs in zip(found[2:], grads, strict=True):
        assert float((mine.double() - theirs.double()).norm() / theirs.double().norm()) <= 2**-8


@pytest.mark.parametrize("key_heads", [8, 2, 1])
def test_cudnn_takes_keys_and_values_as_they_are(key_heads, device):
    """Grouped-query attention without repeated keys and values gives the same results with less memory."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("cuDNN's attention needs compute capability 8.0")
    inputs = make_inputs(
        batch=1, heads=8, key_heads=key_heads, queries=512, keys=512, head=128, dtype=torch.bfloat16, device=device
    )
    spec, kernel = AttentionSpec(), CudnnSdpa()
    assert kernel.serves(inputs.q, inputs.k, spec)
    found = attend(kernel, inputs, spec)
    assert (found.dk.shape, found.dv.shape) == (inputs.k.shape, inputs.v.shape)
    assert_accurate(found, reference(inputs, spec), torch.bfloat16)
    groups = 8 // key_heads
    repeated = inputs._replace(k=repeat_heads(inputs.k, groups), v=repeat_heads(inputs.v, groups))
    expected = attend(kernel, repeated, spec)
    # Scores and weights are those of the same queries and keys; gradients of keys are added up in another order.
    assert float((found.out.double() - expected.out.double()).norm() / expected.out.double().norm()) <= 2**-8


def test_the_fastest_kernel_is_chosen_by_trying(device):
    inputs = make_inputs(
        batch=1, heads=8, key_heads=2, queries=1024, keys=1024, head=128, dtype=torch.bfloat16, device=device
    )
    kernels = AttentionSelector("auto")
    before = torch.cuda.get_rng_state(device)
    with kernels.choosing():
        backend = kernels.backend(*inputs[:3], AttentionSpec())
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert {trial.name for trial in kernels.trials} >= {"sdpa", "cudnn"}
    seconds = {trial.name: trial.seconds for trial in kernels.trials if trial.seconds is not None}
    assert "sdpa" in seconds, kernels.trials
    assert backend.name == kernels.chosen == min(seconds, key=lambda name: seconds[name])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_full_precision_is_replayed(spec, device):
    inputs = make_inputs(key_heads=2, queries=TOKENS, keys=TOKENS, head=64, device=device)
    backend = select_backend(*inputs[:3], spec)
    assert isinstance(backend, Replay)
    expected = reference(inputs, spec)
    assert_close(attend(backend, inputs, spec)._replace(lse=expected.lse), expected, 1e-5)


def test_replayed_dropout_is_bit_equal_to_plain_autograd(device):
    inputs = make_inputs(queries=TOKENS, keys=TOKENS, head=64, device=device)
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    with sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
        torch.manual_seed(3)
        found = attend(Replay(), inputs, AttentionSpec(dropout=0.3))
    assert torch.equal(found.out, out)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[2:], grads, strict=True))
