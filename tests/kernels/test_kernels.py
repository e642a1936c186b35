"""Attention kernels compared with the definition in fp64 and with PyTorch bit by bit, and their calls of packages."""

from __future__ import annotations

import inspect
import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_reference import (
    Attended,
    Inputs,
    assert_close,
    attend,
    attention,
    make_inputs,
    reference,
)
from support.kernels.banded import CpuBanded, flash_backward, flash_forward, flash_sees

from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.kernels.cudnn import CudnnSdpa
from lightning_memo.kernels.flash_attention import AtenFlash, Band, BandedFlash, FlashAttn, bands
from lightning_memo.kernels.kernel_packages import Package
from lightning_memo.kernels.replayed_sdpa import Replay
from lightning_memo.kernels.rng_state import RngState
from lightning_memo.kernels.select_kernel import check_available, select_backend
from lightning_memo.kernels.transformer_engine import TransformerEngineAttention

FP32_BOUND = 2e-6
BF16_BOUND = 2**-7  # two roundings to 8 bits
SPECS = {
    "causal": AttentionSpec(),
    "full": AttentionSpec(causal=False),
    "scaled": AttentionSpec(scale=0.7),
    "window": AttentionSpec(window=5),
    "window of one": AttentionSpec(window=1),
    "window beyond all": AttentionSpec(window=100),
    "lengths": AttentionSpec(lengths=(24, 7)),
    "full lengths": AttentionSpec(causal=False, lengths=(9, 24)),
    "window lengths": AttentionSpec(window=4, lengths=(24, 6)),
}


def same_bits(found: Attended, expected: Attended) -> None:
    for name, mine, theirs in zip(Attended._fields, found, expected, strict=True):
        assert torch.equal(mine, theirs), name


# ---- the CPU's kernel


@pytest.mark.parametrize("query_rows", [1024, 7])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_cpu_kernel_computes_attention(spec, key_heads, query_rows, monkeypatch):
    monkeypatch.setattr(CpuFlash, "query_rows", query_rows)
    inputs = make_inputs(key_heads=key_heads)
    assert_close(attend(CpuFlash(), inputs, spec), reference(inputs, spec), FP32_BOUND)


@pytest.mark.parametrize("query_rows", [1024, 7])
@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.causal], ids=[n for n, s in SPECS.items() if s.causal])
def test_cpu_kernel_computes_blocks(spec, query_rows, monkeypatch):
    monkeypatch.setattr(CpuFlash, "query_rows", query_rows)
    inputs = make_inputs(queries=10, keys=20)
    found = attend(CpuFlash(), inputs, spec, query_start=14, key_start=4)
    assert_close(found, reference(inputs, spec, 14, 4), FP32_BOUND)


@pytest.mark.parametrize("query_rows", [1024, 7])
def test_cpu_kernel_in_half_precision(query_rows, monkeypatch):
    monkeypatch.setattr(CpuFlash, "query_rows", query_rows)
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
    monkeypatch.setattr(CpuFlash, "query_rows", 4)
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


@settings(deadline=None, max_examples=80)
@given(
    start=st.integers(0, 12),
    before=st.integers(0, 12),
    tokens=st.integers(1, 14),
    window=st.none() | st.integers(1, 30),
    lengths=st.none() | st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rows=st.integers(1, 16),
    key_heads=st.sampled_from([1, 2]),
)
def test_cpu_kernel_computes_any_slice(start, before, tokens, window, lengths, rows, key_heads):
    inputs = make_inputs(heads=2, key_heads=key_heads, queries=tokens, keys=before + tokens)
    spec = AttentionSpec(window=window, lengths=lengths)
    backend = CpuFlash()
    backend.query_rows = rows
    found = attend(backend, inputs, spec, start + before, start)
    assert_close(found, reference(inputs, spec, start + before, start), 1e-5)


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


# ---- bands, with a flash kernel emulated on the CPU according to its sources


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_bands_compute_attention(spec):
    inputs = make_inputs(key_heads=2, dtype=torch.float64)
    assert_close(attend(CpuBanded(), inputs, spec), reference(inputs, spec), FP32_BOUND)


@settings(deadline=None, max_examples=400)
@given(
    causal=st.booleans(),
    query_start=st.integers(0, 20),
    key_start=st.integers(0, 20),
    queries=st.integers(1, 16),
    keys=st.integers(1, 16),
    window=st.none() | st.integers(1, 40),
    lengths=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_bands_compute_any_block(causal, query_start, key_start, queries, keys, window, lengths):
    inputs = make_inputs(heads=2, key_heads=1, queries=queries, keys=keys, dtype=torch.float64)
    spec = AttentionSpec(causal=causal, window=window if causal else None, lengths=lengths)
    found = attend(CpuBanded(), inputs, spec, query_start, key_start)
    assert_close(found, reference(inputs, spec, query_start, key_start), FP32_BOUND)


def test_a_slice_is_one_call():
    spec = AttentionSpec(window=100)
    assert list(bands(spec, 2, range(40, 60), range(60))) == [Band(slice(0, 2), slice(0, 20), 60, -1, 0)]
    spec = AttentionSpec(window=50)
    assert list(bands(spec, 2, range(40, 60), range(60))) == [Band(slice(0, 2), slice(0, 20), 60, 49, 0)]


def test_padding_stays_causal_where_it_is_most_of_a_row():
    """Kernels ignore a bound as long as the keys, so in a single call queries would see later keys."""
    spec = AttentionSpec(lengths=(3,))
    first, second = bands(spec, 1, range(10), range(10))
    assert first == Band(slice(0, 1), slice(0, 3), 3, -1, 0)
    assert second == Band(slice(0, 1), slice(3, 10), 3, -1, -1)


def test_keys_in_another_layout_than_their_last_dimension_are_copied():
    inputs = make_inputs(dtype=torch.float64)
    turned = Inputs(*(t.transpose(2, 3).contiguous().transpose(2, 3) for t in inputs))
    assert turned.q.stride(-1) != 1
    strides = set()

    class Watched(CpuBanded):
        def _call(self, q, k, v, spec, band):
            strides.update(t.stride(-1) for t in (q, k, v))
            return super()._call(q, k, v, spec, band)

    assert_close(attend(Watched(), turned, AttentionSpec()), reference(inputs, AttentionSpec()), FP32_BOUND)
    assert strides == {1}


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


def without_memory(queries: int = 24, head: int = 64, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Tensors without memory, for which operators check their arguments and return shapes."""
    shapes = [(4, queries), (2, 24), (2, 24), (4, queries)]
    return Inputs(*(torch.empty(2, n, tokens, head, dtype=dtype, device="meta") for n, tokens in shapes))


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
        (AttentionSpec(), 8, 16, 64),
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


# ---- the flash-attn package, in the signatures of 2.7 and 2.8


def flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    seen = flash_sees(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    return (*flash_forward(q, k, v, seen, softmax_scale), None, torch.zeros(2, dtype=torch.int64))


def flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes, deterministic, rng_state) == (0.0, 0.0, None, False, None)
    seen = flash_sees(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    grads = flash_backward(dout, q, k, v, out, softmax_lse, seen, softmax_scale)
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)


def module(name: str, monkeypatch: pytest.MonkeyPatch, **contents: object) -> ModuleType:
    """A module that can be imported while the test runs."""
    made = ModuleType(name)
    made.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_flash_attn_is_called_by_its_signature(spec, monkeypatch):
    interface = module(
        "flash_attn.flash_attn_interface",
        monkeypatch,
        _flash_attn_forward=flash_attn_forward,
        _flash_attn_backward=flash_attn_backward,
    )
    module("flash_attn", monkeypatch, flash_attn_interface=interface)
    inputs = make_inputs(key_heads=2, dtype=torch.float64)
    assert_close(attend(FlashAttn(), inputs, spec), reference(inputs, spec), FP32_BOUND)


# ---- TransformerEngine, in the signatures of 2.0 to 2.14 and of 2.15 to 2.18


class FusedAttention:
    """Stands in for `transformer_engine.pytorch.cpp_extensions.fused_attn`, on the CPU."""

    FusedAttnBackend = {"F16_arbitrary_seqlen": "arbitrary"}  # noqa: RUF012

    def __init__(self) -> None:
        self.generators: list[object] = []

    def _check(self, tensors, lengths, dtype, fused_attention_backend, names):
        assert fused_attention_backend == "arbitrary"
        assert names["attn_bias_type"] == "no_bias" and names["qkv_layout"] == "bshd_bshd_bshd"
        assert all(t.is_contiguous() and t.dtype == dtype for t in tensors)
        q, k = tensors[:2]
        max_q, max_k, starts_q, starts_k = lengths
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        for starts, tokens in ((starts_q, max_q), (starts_k, max_k)):
            assert starts.dtype == torch.int32
            assert starts.tolist() == [row * tokens for row in range(q.shape[0] + 1)]
        kind, window = names["attn_mask_type"], names["window_size"]
        assert window == ((-1, -1) if kind == "no_mask" else (-1, 0))
        assert kind != "causal" or q.shape[1] == k.shape[1]
        return flash_sees(q.shape[1], k.shape[1], kind != "no_mask", *window)

    def forward(self, is_training, lengths, qkv, dtype, backend, rng_gen, attn_scale, **names):
        assert is_training
        seen = self._check(qkv, lengths, dtype, backend, names)
        self.generators.append(rng_gen)
        out, lse = flash_forward(*qkv, seen, attn_scale)
        return out, [lse[..., None], torch.zeros(2, dtype=torch.int64)]

    def backward(self, lengths, tensors, dtype, aux_ctx_tensors, backend, attn_scale, **names):
        seen = self._check(tensors, lengths, dtype, backend, names)
        q, k, v, out, dout = tensors
        lse, rng_state = aux_ctx_tensors
        assert lse.shape == (*dout.transpose(1, 2).shape[:3], 1) and rng_state.shape == (2,)
        scale = q.shape[-1] ** -0.5 if attn_scale is None else attn_scale
        return [*flash_backward(dout, q, k, v, out, lse.squeeze(-1), seen, scale), None, None]


class FusedAttention20(FusedAttention):
    def fused_attn_fwd(
        self, is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, page_table_k=None,
        page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True,
        qkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding", window_size=(-1, -1), rng_gen=None,
    ):  # fmt: skip
        return self.forward(
            is_training, (max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv), (q, k, v), fake_dtype,
            fused_attention_backend, rng_gen, attn_scale, qkv_layout=qkv_layout, attn_bias_type=attn_bias_type,
            attn_mask_type=attn_mask_type, window_size=window_size,
        )  # fmt: skip

    def fused_attn_bwd(
        self, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype,
        aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True,
        qkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding", window_size=(-1, -1),
        deterministic=False,
    ):  # fmt: skip
        assert dqkv_dtype == "a double"
        return self.backward(
            (max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv), (q, k, v, o, d_o), fake_dtype, aux_ctx_tensors,
            fused_attention_backend, attn_scale, qkv_layout=qkv_layout, attn_bias_type=attn_bias_type,
            attn_mask_type=attn_mask_type, window_size=window_size,
        )  # fmt: skip


class FusedAttention215(FusedAttention):
    def fused_attn_fwd(
        self, is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, page_table_k=None,
        page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True,
        qkv_layout="sbh3d", o_format="sbhd", qkv_scale_inv_format=None, attn_bias_type="no_bias",
        attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1), bottom_right_diagonal=None,
        rng_gen=None, softmax_offset=None, return_max_logit=False, cuda_graph=False,
    ):  # fmt: skip
        assert o_format == "bshd"
        return self.forward(
            is_training, (max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv), (q, k, v), fake_dtype,
            fused_attention_backend, rng_gen, attn_scale, qkv_layout=qkv_layout, attn_bias_type=attn_bias_type,
            attn_mask_type=attn_mask_type, window_size=window_size,
        )  # fmt: skip

    def fused_attn_bwd(
        self, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, s_quantizer=None,
        dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
        o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d", qkv_scale_inv_format=None, do_scale_inv_format=None,
        attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
        bottom_right_diagonal=None, deterministic=False, cuda_graph=False,
    ):  # fmt: skip
        assert (o_format, do_format, dqkv_layout) == ("bshd", "bshd", "bshd_bshd_bshd")
        return self.backward(
            (max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv), (q, k, v, o, d_o), fake_dtype, aux_ctx_tensors,
            fused_attention_backend, attn_scale, qkv_layout=qkv_layout, attn_bias_type=attn_bias_type,
            attn_mask_type=attn_mask_type, window_size=window_size,
        )  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Makes every distribution appear to be installed in this version."""
    monkeypatch.setattr(metadata, "version", lambda name: version)


@pytest.fixture(params=[("2.0.0", FusedAttention20), ("2.14.1+cu13", FusedAttention20), ("2.18", FusedAttention215)])
def fused_attention(request, monkeypatch):
    version, stub = request.param
    install(monkeypatch, version)
    fused = stub()
    extensions = module("transformer_engine.pytorch.cpp_extensions", monkeypatch, fused_attn=fused)
    constants = module("transformer_engine.pytorch.constants", monkeypatch, TE_DType={torch.float64: "a double"})
    pytorch = module("transformer_engine.pytorch", monkeypatch, constants=constants, cpp_extensions=extensions)
    module("transformer_engine", monkeypatch, pytorch=pytorch)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpp_extensions.fused_attn", fused)
    return fused


@pytest.mark.parametrize("spec", [SPECS["causal"], SPECS["full"], SPECS["scaled"]])
def test_transformer_engine_is_called_by_its_signature(spec, fused_attention):
    inputs = make_inputs(key_heads=2, dtype=torch.float64)
    assert_close(attend(TransformerEngineAttention(), inputs, spec), reference(inputs, spec), FP32_BOUND)


def test_transformer_engine_computes_slices(fused_attention):
    inputs = make_inputs(key_heads=2, queries=10, keys=20, dtype=torch.float64)
    found = attend(TransformerEngineAttention(), inputs, AttentionSpec(), 14, 4)
    assert_close(found, reference(inputs, AttentionSpec(), 14, 4), FP32_BOUND)


def test_transformer_engine_draws_from_the_models_generator_only_for_dropout(fused_attention):
    q, k, v, _ = make_inputs(dtype=torch.float64)
    backend = TransformerEngineAttention()
    backend.forward(q, k, v, AttentionSpec())
    backend.forward(q, k, v, AttentionSpec(dropout=0.1))
    own, models = fused_attention.generators
    assert isinstance(own, torch.Generator) and own is not torch.default_generator
    assert models is None


@pytest.mark.parametrize(
    ("spec", "queries", "head"),
    [
        (SPECS["window"], 24, 8),
        (SPECS["lengths"], 24, 8),
        (AttentionSpec(dropout=0.1), 12, 8),
        (AttentionSpec(), 24, 256),
        (AttentionSpec(), 36, 8),
    ],
)
def test_transformer_engine_leaves_the_rest_to_the_flash_kernel(spec, queries, head, fused_attention, monkeypatch):
    called = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(BandedFlash, "forward", lambda self, *args: called.append("forward"))
    monkeypatch.setattr(BandedFlash, "backward", lambda self, *args: called.append("backward"))
    q, k, v, dout = make_inputs(queries=queries, head=head, dtype=torch.float64)
    start = 24 - queries if queries <= 24 else 0
    TransformerEngineAttention().forward(q, k, v, spec, start, 0)
    TransformerEngineAttention().backward(dout, q, k, v, None, spec, start, 0)
    assert called == ["forward", "backward"]


def test_transformer_engine_is_imported_when_it_is_used_only():
    source = inspect.getsource(sys.modules[TransformerEngineAttention.__module__])
    outside = [line for line in source.splitlines() if "import transformer_engine" in line and line[0] != " "]
    assert not outside


# ---- selection of a kernel


def test_the_cpu_gets_what_plain_training_runs_there():
    q, k, v, _ = make_inputs()
    assert isinstance(select_backend(q, k, v, AttentionSpec()), CpuFlash)
    assert isinstance(select_backend(q, k, v, AttentionSpec(), "flash_attn"), CpuFlash)
    assert isinstance(select_backend(q, k, v, AttentionSpec(dropout=0.1)), Replay)


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability of a GPU that appears to exist."""

    def become(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    become(9, 0)
    return become


def chosen(spec: AttentionSpec, choice: str = "auto", head: int = 64, dtype: torch.dtype = torch.bfloat16) -> type:
    q, k, v, _ = without_memory(head=head, dtype=dtype)
    return type(select_backend(q, k, v, spec, choice))


def test_a_gpu_gets_flash(capability):
    assert chosen(AttentionSpec()) is AtenFlash
    assert chosen(AttentionSpec(window=8, lengths=(3, 4), dropout=0.1)) is AtenFlash
    assert chosen(AttentionSpec(), "sdpa", head=256, dtype=torch.float16) is AtenFlash


def test_a_gpu_gets_the_kernel_that_is_wished(capability, monkeypatch, fused_attention):
    module("flash_attn", monkeypatch, flash_attn_interface=None)
    assert chosen(AttentionSpec(), "cudnn") is CudnnSdpa
    assert chosen(AttentionSpec(), "flash_attn") is FlashAttn
    assert chosen(AttentionSpec(), "transformer_engine") is TransformerEngineAttention


@pytest.mark.parametrize("choice", ["auto", "flash_attn", "transformer_engine", "cudnn"])
def test_what_no_flash_kernel_computes_is_replayed(choice, capability):
    assert chosen(AttentionSpec(), choice, dtype=torch.float32) is Replay
    assert chosen(AttentionSpec(), choice, head=264) is Replay
    assert chosen(AttentionSpec(), choice, head=20) is Replay
    assert chosen(AttentionSpec(mask=torch.ones(24, 24, dtype=torch.bool)), choice) is Replay
    capability(7, 5)
    assert chosen(AttentionSpec(), choice, dtype=torch.float16) is Replay


@pytest.mark.parametrize("choice", ["auto", "sdpa", "cudnn"])
def test_what_pytorch_brings_is_available(choice):
    check_available(choice)


@pytest.mark.parametrize(
    ("choice", "distribution", "extra"),
    [("flash_attn", "flash-attn", "flash"), ("transformer_engine", "transformer-engine", "te")],
)
def test_a_missing_package_is_named_with_its_extra(choice, distribution, extra, monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ValueError, match=rf'^attention="{choice}" needs the package {distribution}.*\[{extra}\]'):
        check_available(choice)


@pytest.mark.parametrize(
    ("choice", "version", "known"),
    [
        ("flash_attn", "2.6.3", "2.7 to 2.8, and 2.6"),
        ("flash_attn", "3.0.0b1", "2.7 to 2.8, and 3.0"),
        ("transformer_engine", "1.13.0", "2.0 to 2.18, and 1.13"),
        ("transformer_engine", "2.19.0", "2.0 to 2.18, and 2.19"),
    ],
)
def test_another_version_is_refused_in_one_line(choice, version, known, monkeypatch):
    install(monkeypatch, version)
    with pytest.raises(ValueError, match=known) as refused:
        check_available(choice)
    assert "\n" not in str(refused.value)
    if choice == "transformer_engine":
        with pytest.raises(ValueError, match=known):
            TransformerEngineAttention()


@pytest.mark.parametrize(("choice", "version"), [("flash_attn", "2.7.4.post1"), ("transformer_engine", "2.9.0+c8d")])
def test_a_known_version_is_available(choice, version, monkeypatch):
    install(monkeypatch, version)
    check_available(choice)


def test_a_version_without_numbers_counts_as_missing(monkeypatch):
    install(monkeypatch, "dev")
    assert Package("any", "any", (1, 0), (2, 0)).release() is None
