"""PyTorch's attention kernels compared with the definition in fp64 and with PyTorch bit by bit."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_reference import (
    Attended,
    assert_close,
    attend,
    attention,
    make_inputs,
    reference,
)
from support.kernels.specs import FP32_BOUND, SPECS, without_memory
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.kernels.divided_calls import PackedDocuments
from lightning_memo.kernels.fallback_kernels import Replay
from lightning_memo.kernels.flash_attention import AtenFlash, BandedFlash, CudnnSdpa
from lightning_memo.kernels.rng_state import RngState
from lightning_memo.profiler.memory_meter import PeakMeter

BF16_BOUND = 2**-7  # two roundings to 8 bits


def same_bits(found: Attended, expected: Attended) -> None:
    for name, mine, theirs in zip(Attended._fields, found, expected, strict=True):
        assert torch.equal(mine, theirs), name


# ---- the CPU's kernel


@pytest.mark.parametrize("mask_entries", [1024, 49])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_cpu_kernel_computes_attention(spec, key_heads, mask_entries, monkeypatch):
    monkeypatch.setattr(CpuFlash, "mask_entries", mask_entries)
    inputs = make_inputs(key_heads=key_heads)
    assert_close(attend(CpuFlash(), inputs, spec), reference(inputs, spec), FP32_BOUND)


@pytest.mark.parametrize("mask_entries", [1024, 49])
@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.causal], ids=[n for n, s in SPECS.items() if s.causal])
def test_cpu_kernel_computes_blocks(spec, mask_entries, monkeypatch):
    monkeypatch.setattr(CpuFlash, "mask_entries", mask_entries)
    inputs = make_inputs(queries=10, keys=20)
    found = attend(CpuFlash(), inputs, spec, query_start=14, key_start=4)
    assert_close(found, reference(inputs, spec, 14, 4), FP32_BOUND)


@pytest.mark.parametrize("mask_entries", [1024, 49])
def test_cpu_kernel_in_half_precision(mask_entries, monkeypatch):
    monkeypatch.setattr(CpuFlash, "mask_entries", mask_entries)
    inputs = make_inputs(key_heads=2, dtype=torch.bfloat16)
    spec = AttentionSpec(window=9)
    found = attend(CpuFlash(), inputs, spec)
    assert found.lse.dtype == torch.float32
    assert {t.dtype for t in (found.out, *found[2:])} == {torch.bfloat16}
    assert_close(found, reference(inputs, spec), BF16_BOUND)


def test_gradients_of_many_row_chunks_do_not_gather_rounding(monkeypatch):
    inputs = make_inputs(batch=1, heads=2, key_heads=2, queries=512, keys=520, dtype=torch.bfloat16)
    spec = AttentionSpec()
    once = attend(CpuFlash(), inputs, spec, 8)
    monkeypatch.setattr(CpuFlash, "mask_entries", 4 * 520)
    often = attend(CpuFlash(), inputs, spec, 8)
    expected = reference(inputs, spec, 8)
    for name in ("dk", "dv"):
        of_once, of_often = ((getattr(a, name).double() - getattr(expected, name)).norm() for a in (once, often))
        assert of_often <= 1.1 * of_once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_cpu_kernel_is_bit_equal_to_pytorch(causal, dtype):
    inputs = make_inputs(queries=200, keys=200, dtype=dtype)
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    found = attend(CpuFlash(), inputs, AttentionSpec(causal=causal))
    same_bits(found, Attended(out, found.lse, *grads))


@pytest.mark.parametrize("spec", [SPECS["window"], SPECS["lengths"], SPECS["window lengths"]])
def test_masks_of_the_cpu_kernel_are_bit_equal_to_pytorchs(spec):
    """A window or padding as transformers passes it: a boolean mask without the causal flag."""
    inputs = make_inputs()
    i, j = torch.arange(24)[:, None], torch.arange(24)[None]
    mask = (j <= i) & (i - j < (spec.window or 24)) & (j < torch.tensor(spec.lengths or (24, 24))[:, None, None])
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    found = attend(CpuFlash(), inputs, spec)
    assert torch.equal(found.out, out)
    assert_close(found, Attended(out.detach().double(), found.lse.double(), *(g.double() for g in grads)), FP32_BOUND)


@pytest.mark.parametrize("backend", [CpuFlash(), Replay()])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_explicit_masks(backend, kind):
    inputs = make_inputs()
    seen = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[..., 0] = True
    mask = seen if kind == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    q, k, v = (t.double().requires_grad_() for t in inputs[:3])
    out, lse = attention(q, k, v, seen, None)
    expected = Attended(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout.double()))
    found = attend(backend, inputs, AttentionSpec(causal=False, mask=mask))
    if found.lse.numel() == 0:
        found = found._replace(lse=expected.lse)
    assert_close(found, expected, FP32_BOUND)


@pytest.mark.parametrize("backend", [CpuFlash(), Replay()])
def test_outputs_lie_token_by_token(backend):
    q, k, v, _ = make_inputs()
    out = backend.forward(q.contiguous(), k, v, AttentionSpec()).out
    assert out.transpose(1, 2).is_contiguous()


@settings(max_examples=80)
@given(
    start=st.integers(0, 12),
    before=st.integers(0, 12),
    tokens=st.integers(1, 14),
    window=st.none() | st.integers(1, 30),
    lengths=st.none() | st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mask_entries=st.integers(1, 256),
    key_heads=st.sampled_from([1, 2]),
)
def test_cpu_kernel_computes_any_slice(start, before, tokens, window, lengths, mask_entries, key_heads):
    inputs = make_inputs(heads=2, key_heads=key_heads, queries=tokens, keys=before + tokens)
    spec = AttentionSpec(window=window, lengths=lengths)
    backend = CpuFlash()
    backend.mask_entries = mask_entries
    found = attend(backend, inputs, spec, start + before, start)
    assert_close(found, reference(inputs, spec, start + before, start), 1e-5)


def test_masks_of_the_cpu_kernel_need_little_memory():
    """The profiled step has no slices, and so none of their masks: a plan does not count them."""
    tokens = 4096
    q, k, v, dout = make_inputs(batch=1, heads=1, key_heads=1, queries=tokens // 2, keys=tokens)
    for spec in (AttentionSpec(), AttentionSpec(window=1500), AttentionSpec(lengths=(tokens - 5,))):
        with PeakMeter(torch.device("cpu")) as meter:
            result = CpuFlash().forward(q, k, v, spec, tokens // 2)
            CpuFlash().backward(dout, q, k, v, result, spec, tokens // 2)
        assert meter.peak_bytes < 2**21 + 8 * k.nbytes


# ---- replay


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_replay_computes_attention(spec):
    inputs = make_inputs(key_heads=2)
    found, expected = attend(Replay(), inputs, spec), reference(inputs, spec)
    assert found.lse.numel() == 0  # nothing needs it
    assert_close(found._replace(lse=expected.lse), expected, FP32_BOUND)


def test_replayed_dropout_is_bit_equal_to_plain_autograd():
    inputs = make_inputs()
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    torch.manual_seed(3)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
    after = RngState.capture(q.device)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)

    torch.manual_seed(3)
    spec, replay = AttentionSpec(dropout=0.3), Replay()
    result = replay.forward(*inputs[:3], spec)
    assert RngState.capture(q.device).same(after)
    torch.rand(100)  # what comes between forward and backward
    present = RngState.capture(q.device)
    found = Attended(result.out, result.lse, *replay.backward(inputs.dout, *inputs[:3], result, spec))
    same_bits(found, Attended(out, result.lse, *grads))
    assert RngState.capture(q.device).same(present)


class DrawsBefore(TorchDispatchMode):
    """Draws before each dropout, as another thread may."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.rand(())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("drawn_in", ["forward", "backward"])
def test_replayed_dropout_with_another_mask_is_refused(drawn_in):
    inputs, spec, replay = make_inputs(), AttentionSpec(dropout=0.3), Replay()
    with DrawsBefore() if drawn_in == "forward" else nullcontext():
        result = replay.forward(*inputs[:3], spec)
    with (
        DrawsBefore() if drawn_in == "backward" else nullcontext(),
        pytest.raises(RuntimeError, match=r"^the dropout of attention drew other random numbers"),
    ):
        replay.backward(inputs.dout, *inputs[:3], result, spec)


def test_replay_without_dropout_leaves_the_generator_alone():
    inputs, spec, replay = make_inputs(), AttentionSpec(), Replay()
    result = replay.forward(*inputs[:3], spec)
    expected = replay.backward(inputs.dout, *inputs[:3], result, spec)
    torch.manual_seed(4)
    with mock.patch.object(torch, "set_rng_state", side_effect=AssertionError):
        found = replay.backward(inputs.dout, *inputs[:3], result, spec)
    assert all(map(torch.equal, found, expected))


class NotesKernels(TorchFunctionMode):
    """Notes whether PyTorch may select its flash kernel in calls of attention."""

    def __init__(self):
        super().__init__()
        self.flash = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.flash.append(torch.backends.cuda.flash_sdp_enabled())
        return func(*args, **(kwargs or {}))


def test_replay_selects_from_the_kernels_of_its_forward():
    inputs, spec = make_inputs(), AttentionSpec(dropout=0.3)
    with NotesKernels() as notes:
        with sdpa_kernel(SDPBackend.MATH):
            result = Replay().forward(*inputs[:3], spec)
        Replay().backward(inputs.dout, *inputs[:3], result, spec)
    assert notes.flash == [False, False]
    assert torch.backends.cuda.flash_sdp_enabled()


# ---- PyTorch's operators have the signatures that the kernels use


def arguments(operator: torch._ops.OpOverloadPacket) -> list[str]:
    return [argument.name for argument in operator.default._schema.arguments]


def test_arguments_of_the_flash_operators():
    ops = torch.ops.aten
    assert arguments(ops._flash_attention_forward)[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ]  # fmt: skip
    assert arguments(ops._flash_attention_backward)[:14] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "rng_state", "unused",
    ]  # fmt: skip
    for operator in (ops._flash_attention_forward, ops._flash_attention_backward):
        assert {"scale", "window_size_left", "window_size_right"} <= set(arguments(operator))


def test_arguments_of_the_cudnn_operators():
    ops = torch.ops.aten
    assert arguments(ops._scaled_dot_product_cudnn_attention) == [
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask",
        "scale",
    ]  # fmt: skip
    returned = [value.name for value in ops._scaled_dot_product_cudnn_attention.default._schema.returns]
    assert returned == [
        "output", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset",
        "debug_attn_mask",
    ]  # fmt: skip
    assert arguments(ops._scaled_dot_product_cudnn_attention_backward) == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias",
        "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
    ]  # fmt: skip


def test_arguments_of_the_cpu_operators():
    ops = torch.ops.aten
    assert arguments(ops._scaled_dot_product_flash_attention_for_cpu) == [
        "query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale",
    ]  # fmt: skip
    assert arguments(ops._scaled_dot_product_flash_attention_for_cpu_backward) == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale",
    ]  # fmt: skip


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", [AtenFlash, CudnnSdpa])
def test_operators_for_cuda_accept_packed_documents(backend, causal, window):
    inputs = without_memory()
    spec = AttentionSpec(causal=causal, window=window if causal else None, documents=((0, 5, 6, 17), (0, 12)))
    found = attend(PackedDocuments(backend()), inputs, spec)
    shapes = [inputs.q.shape, inputs.q.shape[:3], inputs.q.shape, inputs.k.shape, inputs.v.shape]
    assert [t.shape for t in found] == shapes


@pytest.mark.parametrize("backend", [AtenFlash, CudnnSdpa])
@pytest.mark.parametrize("dropout", [0.0, 0.125])  # what cuDNN takes is a multiple of 1/16
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_operators_for_cuda_accept_the_arguments(spec, dropout, backend):
    spec = AttentionSpec(spec.causal, spec.scale, spec.window, dropout, spec.lengths)
    inputs = without_memory()
    found = attend(backend(), inputs, spec)
    shapes = [inputs.q.shape, inputs.q.shape[:3], inputs.q.shape, inputs.k.shape, inputs.v.shape]
    assert [t.shape for t in found] == shapes


@pytest.mark.parametrize(
    ("spec", "queries", "start", "head"),
    [
        (AttentionSpec(), 8, 8, 64),  # the last keys are behind the last query
        (AttentionSpec(), 1, 23, 64),
        (AttentionSpec(dropout=0.125), 8, 16, 64),
        (SPECS["window"], 24, 0, 64),
        (SPECS["lengths"], 24, 0, 64),
        (AttentionSpec(), 24, 0, 256),
        (AttentionSpec(dropout=0.1), 24, 0, 64),
    ],
)
def test_cudnn_leaves_the_rest_to_the_flash_kernel(spec, queries, start, head, monkeypatch):
    called = []
    monkeypatch.setattr(BandedFlash, "forward", lambda self, *args: called.append("forward"))
    monkeypatch.setattr(BandedFlash, "backward", lambda self, *args: called.append("backward"))
    q, k, v, dout = without_memory(queries, head)
    CudnnSdpa().forward(q, k, v, spec, start, 0)
    CudnnSdpa().backward(dout, q, k, v, None, spec, start, 0)
    assert called == ["forward", "backward"]
