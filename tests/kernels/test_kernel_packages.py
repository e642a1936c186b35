"""Kernels of optional packages, and the selection of a kernel."""

from __future__ import annotations

import enum
import inspect
import json
import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType

import pytest
import torch
from support.kernels.attention_reference import (
    assert_close,
    attend,
    make_inputs,
    reference,
)
from support.kernels.banded import (
    flash_backward,
    flash_forward,
    flash_sees,
    flash_varlen_backward,
    flash_varlen_forward,
)
from support.kernels.specs import FP32_BOUND, SPECS, without_memory
from support.transformer_engine_stand_in.protocol import ATTENTION, OTHERS, TABLE

from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.kernels.divided_calls import PackedDocuments
from lightning_memo.kernels.fallback_kernels import Replay
from lightning_memo.kernels.flash_attention import AtenFlash, BandedFlash, CudnnSdpa
from lightning_memo.kernels.kernel_packages import (
    FlashAttn,
    FlashAttn3,
    FlashAttn4,
    Package,
    TransformerEngineAttention,
)
from lightning_memo.kernels.select_kernel import check_available, select_backend

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


def flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
):  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    found = flash_varlen_forward(
        q, k, v, starts, longest, causal, window_size_left, window_size_right, softmax_scale
    )  # fmt: skip
    return *found, None, torch.zeros(2, dtype=torch.int64)


def flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes, deterministic, rng_state) == (0.0, 0.0, None, False, None)
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    grads = flash_varlen_backward(
        dout, q, k, v, out, softmax_lse, starts, longest, causal, window_size_left, window_size_right, softmax_scale
    )  # fmt: skip
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)


def module(name: str, monkeypatch: pytest.MonkeyPatch, **contents: object) -> ModuleType:
    """A module that can be imported while the test runs."""
    made = ModuleType(name)
    made.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    return made


PACKED = AttentionSpec(documents=((0, 5, 6, 17), (0, 12)))


@pytest.mark.parametrize(
    "spec", [*SPECS.values(), PACKED, replace(PACKED, window=4), replace(PACKED, causal=False, scale=0.4)]
)
def test_flash_attn_is_called_by_its_signature(spec, monkeypatch):
    interface = module(
        "flash_attn.flash_attn_interface",
        monkeypatch,
        _flash_attn_forward=flash_attn_forward,
        _flash_attn_backward=flash_attn_backward,
        _flash_attn_varlen_forward=flash_attn_varlen_forward,
        _flash_attn_varlen_backward=flash_attn_varlen_backward,
    )
    module("flash_attn", monkeypatch, flash_attn_interface=interface)
    inputs = make_inputs(key_heads=2, dtype=torch.float64)
    kernel = FlashAttn() if spec.documents is None else PackedDocuments(FlashAttn())
    assert_close(attend(kernel, inputs, spec), reference(inputs, spec), FP32_BOUND)


# ---- FlashAttention-3, in the schema of 3.0, and FlashAttention-4, in the signatures of 4.0.0b36

FORWARD_3 = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None,"
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,"
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None,"
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None,"
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None,"
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False,"
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0,"
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0,"
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD_3 = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None,"
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,"
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None,"
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1,"
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def by_name(operator, arguments):
    """What an implementation gets, without the last arguments if they have their defaults."""
    schema = getattr(torch.ops.flash_attn_3, operator).default._schema.arguments
    return {each.name: arguments[n] if n < len(arguments) else each.default_value for n, each in enumerate(schema)}


def forward_3(*arguments):
    q, k, v = arguments[:3]
    given = by_name("fwd", arguments)
    assert all(t.stride(-1) == 1 for t in (q, k, v)) and given["num_splits"] == 1
    seen = flash_sees(q.shape[1], k.shape[1], given["is_causal"], given["window_size_left"], given["window_size_right"])
    out, lse = flash_forward(q, k, v, seen, given["softmax_scale"])
    return out.contiguous(), lse, torch.empty(0), torch.empty(0)


def backward_3(*arguments):
    tensors, given = arguments[:9], by_name("bwd", arguments)
    assert all(t.stride(-1) == 1 for t in tensors)
    dout, q, k, v, out, lse, *targets = tensors
    seen = flash_sees(q.shape[1], k.shape[1], given["is_causal"], given["window_size_left"], given["window_size_right"])
    grads = flash_backward(dout, q, k, v, out, lse, seen, given["softmax_scale"])
    for target, grad in zip(targets, grads, strict=True):
        target.copy_(grad)
    return tuple(torch.empty(0) for _ in range(5))


def flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, return_lse=False, out=None, lse=None,
):  # fmt: skip
    assert return_lse
    seen = flash_sees(q.shape[1], k.shape[1], causal, -1, -1)
    return *flash_forward(q, k, v, seen, softmax_scale), None, None


def flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, deterministic=False, dq=None, dk=None, dv=None, learnable_sink=None,
):  # fmt: skip
    seen = flash_sees(q.shape[1], k.shape[1], causal, -1, -1)
    return tuple(flash_backward(dout, q, k, v, out, lse, seen, softmax_scale))


@pytest.fixture(params=[FlashAttn3, FlashAttn4])
def newer(request, monkeypatch):
    """FlashAttention-3 or 4 on a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if request.param is FlashAttn3:
        install(monkeypatch, "3.0.0b1")
        module("flash_attn_interface", monkeypatch)
        library = torch.library.Library("flash_attn_3", "DEF")
        for schema, implementation in ((FORWARD_3, forward_3), (BACKWARD_3, backward_3)):
            library.define(schema)
            library.impl(schema.partition("(")[0], implementation, "CPU")
        yield FlashAttn3()
        library._destroy()
        return
    install(monkeypatch, "4.0.0b36")
    interface = module(
        "flash_attn.cute.interface", monkeypatch, _flash_attn_fwd=flash_attn_fwd, _flash_attn_bwd=flash_attn_bwd
    )
    cute = module("flash_attn.cute", monkeypatch, interface=interface)
    module("flash_attn", monkeypatch, cute=cute)
    yield FlashAttn4()


@pytest.mark.parametrize("name", ["causal", "full", "scaled", "lengths"])
def test_newer_kernels_are_called_by_their_signatures(name, newer):
    inputs = make_inputs(key_heads=2, dtype=torch.float64)
    assert newer.serves(*inputs[:2], SPECS[name])
    assert_close(attend(newer, inputs, SPECS[name]), reference(inputs, SPECS[name]), FP32_BOUND)


def test_newer_kernels_compute_slices(newer):
    inputs = make_inputs(key_heads=2, queries=10, keys=20, dtype=torch.float64)
    assert_close(attend(newer, inputs, AttentionSpec(), 14, 4), reference(inputs, AttentionSpec(), 14, 4), FP32_BOUND)


@pytest.mark.parametrize("spec", [SPECS["window"], AttentionSpec(dropout=0.1)])
def test_newer_kernels_leave_windows_and_dropout_to_the_flash_kernel(spec, newer, monkeypatch):
    called = []
    monkeypatch.setattr(
        AtenFlash, "_call", lambda self, q, *args: (called.append("forward"), q, q[..., 0].mT, None)[1:]
    )
    monkeypatch.setattr(AtenFlash, "_call_backward", lambda self, dout, *qkv: (called.append("backward"), *qkv)[1:4])
    inputs = make_inputs(dtype=torch.float64)
    assert not newer.serves(*inputs[:2], spec)
    attend(newer, inputs, spec)
    assert set(called) == {"forward", "backward"}


# ---- TransformerEngine, in the signatures of 2.0 to 2.14 and of 2.15 to 2.20


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


class FusedAttention219(FusedAttention215):
    class FusedAttnBackend(enum.IntEnum):
        F16_arbitrary_seqlen = 1

    def _check(self, tensors, lengths, dtype, fused_attention_backend, names):
        assert fused_attention_backend is self.FusedAttnBackend.F16_arbitrary_seqlen
        return super()._check(tensors, lengths, dtype, "arbitrary", names)


@pytest.mark.parametrize("name", ATTENTION[1])
def test_functions_of_transformer_engine_take_the_arguments_of_its_releases(name):
    """From 2.15 on, they are the same in all known releases."""
    table = json.loads(TABLE.read_text())
    own = list(inspect.signature(getattr(FusedAttention215, name)).parameters)[1:]
    assert own == table["attention"][name]
    assert set(table["differences"]) == set(OTHERS) and not any("attention" in d for d in table["differences"].values())


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Makes every distribution appear to be installed in this version."""
    monkeypatch.setattr(metadata, "version", lambda name: version)


@pytest.fixture(
    params=[
        ("2.0.0", FusedAttention20),
        ("2.14.1+cu13", FusedAttention20),
        ("2.18", FusedAttention215),
        ("2.20.2", FusedAttention219),
    ]
)
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
    ("choice", "distribution", "install"),
    [
        ("flash_attn", "flash-attn", r"pip install .*\[flash\]"),
        ("flash_attn_3", "flash_attn_3", "build it from hopper/"),
        ("flash_attn_4", "flash-attn-4", "pip install flash-attn-4"),
        ("transformer_engine", "transformer-engine", r"pip install .*\[te\]"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_what_installs_it(choice, distribution, install, monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ValueError, match=rf'^attention="{choice}" needs the package {distribution}, .*{install}'):
        check_available(choice)


@pytest.mark.parametrize(
    ("choice", "version", "known"),
    [
        ("flash_attn", "2.6.3", "2.7 to 2.8, but 2.6"),
        ("flash_attn", "3.0.0b1", "2.7 to 2.8, but 3.0"),
        ("flash_attn_3", "3.1.0", "3.0 to 3.0, but 3.1"),
        ("transformer_engine", "1.13.0", "2.0 to 2.20, but 1.13"),
        ("transformer_engine", "2.21.0", "2.0 to 2.20, but 2.21"),
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
