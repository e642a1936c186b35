"""Packed documents, queries that see no key, and merging of blocks."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_reference import Attended, Inputs, assert_close, attend, make_inputs, reference, visible
from support.kernels.banded import CpuBanded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.kernels import AttentionResult, AttentionSpec, select_backend
from lightning_memo.kernels.attention_kernel import block_mask, merge, sees_nothing_result, sums_dtype
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.kernels.divided_calls import PackedDocuments
from lightning_memo.kernels.fallback_kernels import Replay
from lightning_memo.kernels.flash_attention import pieces, sees_any

FP32_BOUND = 2e-6
DOCUMENTS = ((0, 5, 6, 17), (0, 12))
SPECS = {
    "causal": AttentionSpec(documents=DOCUMENTS),
    "full": AttentionSpec(causal=False, documents=DOCUMENTS),
    "scaled": AttentionSpec(scale=0.7, documents=DOCUMENTS),
    "window": AttentionSpec(window=4, documents=DOCUMENTS),
    "lengths": AttentionSpec(lengths=(24, 9), documents=DOCUMENTS),
    "full lengths": AttentionSpec(causal=False, lengths=(14, 24), documents=DOCUMENTS),
    "an empty row": AttentionSpec(lengths=(0, 24), documents=DOCUMENTS),
    "alike": AttentionSpec(documents=((0, 7, 20),) * 2),
    "alike, lengths": AttentionSpec(lengths=(24, 8), documents=((0, 7, 20),) * 2),
    "one": AttentionSpec(documents=((0,), (0,))),
    "beyond the block": AttentionSpec(documents=((0, 24, 30), (0, 40))),
    "window lengths": AttentionSpec(window=3, lengths=(23, 14), documents=DOCUMENTS),
}


class Counting(CpuFlash):
    """Records the shapes of its queries and keys, and checks its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def forward(self, q, k, v, spec, query_start=0, key_start=0):
        assert spec.documents is None
        self.calls.append((q.shape[0], q.shape[2], k.shape[2]))
        return super().forward(q, k, v, spec, query_start, key_start)


def masked(inputs: Inputs, spec: AttentionSpec) -> list[Tensor]:
    """PyTorch's output and gradients with an explicit mask."""
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    positions = range(q.shape[2])
    seen = visible(spec, q.shape[0], positions, positions)
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=spec.scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout)]


# ---- documents


@pytest.mark.parametrize(
    "backend", [PackedDocuments(CpuFlash()), CpuFlash(), Replay()], ids=["packed", "cpu", "replay"]
)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_documents_are_what_a_mask_gives(spec, backend):
    inputs = make_inputs(key_heads=2)
    found = attend(backend, inputs, spec)
    for mine, theirs in zip((found.out, *found[2:]), masked(inputs, spec), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("inner", [CpuFlash(), CpuBanded()], ids=["cpu", "banded"])
@pytest.mark.parametrize("query_start", [0, 14])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_documents_in_blocks(spec, query_start, inner):
    inputs = make_inputs(key_heads=2, queries=10, keys=20, dtype=torch.float64)
    found = attend(PackedDocuments(inner), inputs, spec, query_start, 4)
    assert_close(found, reference(inputs, spec, query_start, 4), FP32_BOUND)


positions = st.integers(0, 20)
lengths = st.none() | st.tuples(st.integers(0, 40), st.integers(0, 40))
starts = st.sets(st.integers(0, 40), min_size=1, max_size=7).map(lambda each: tuple(sorted(each)))


@pytest.mark.slow
@settings(max_examples=300)
@given(
    inner=st.sampled_from([CpuFlash(), CpuBanded()]),
    entries=st.integers(1, 256),
    causal=st.booleans(),
    query_start=positions,
    key_start=positions,
    queries=st.integers(1, 16),
    keys=st.integers(1, 16),
    window=st.none() | st.integers(1, 40),
    lengths=lengths,
    documents=st.tuples(starts, starts) | starts.map(lambda one: (one, one)),
)
def test_documents_in_any_block(
    inner, entries, causal, query_start, key_start, queries, keys, window, lengths, documents
):
    if isinstance(inner, CpuFlash):
        inner.mask_entries = entries
    inputs = make_inputs(heads=2, key_heads=1, queries=queries, keys=keys, dtype=torch.float64)
    spec = AttentionSpec(causal=causal, window=window if causal else None, lengths=lengths, documents=documents)
    expected = reference(inputs, spec, query_start, key_start)
    assert_close(attend(PackedDocuments(inner), inputs, spec, query_start, key_start), expected, 1e-5)
    assert_close(attend(CpuFlash(), inputs, spec, query_start, key_start), expected, 1e-5)
    sees = bool((expected.lse != -torch.inf).any())
    ranges = range(query_start, query_start + queries), range(key_start, key_start + keys)
    assert sees_any(spec, *ranges) or not sees


def test_documents_in_half_precision():
    inputs = make_inputs(key_heads=2, dtype=torch.bfloat16)
    found = attend(PackedDocuments(CpuFlash()), inputs, SPECS["causal"])
    assert found.lse.dtype == torch.float32
    assert {t.dtype for t in (found.out, *found[2:])} == {torch.bfloat16}
    assert_close(found, reference(inputs, SPECS["causal"]), 2**-7)


def test_each_document_is_one_call_and_rows_alike_share_it():
    inputs, kernel = make_inputs(), Counting()
    PackedDocuments(kernel).forward(*inputs[:3], SPECS["causal"])
    assert kernel.calls == [(1, 5, 5), (1, 1, 1), (1, 11, 11), (1, 7, 7), (1, 12, 12), (1, 12, 12)]
    kernel.calls.clear()
    PackedDocuments(kernel).forward(*inputs[:3], SPECS["alike"])
    assert kernel.calls == [(2, 7, 7), (2, 13, 13), (2, 4, 4)]


class CountingRuns(CpuBanded):
    """Records the numbers of queries and keys of documents of each call, and those of calls of one document."""

    def __init__(self, longest: int = sys.maxsize) -> None:
        self.longest_joined, self.calls = longest, []

    def _call(self, q, k, v, spec, band):
        self.calls.append((q.shape[1], k.shape[1]))
        return super()._call(q, k, v, spec, band)

    def _call_run(self, q, k, v, run, starts):
        self.calls.append((run.query_lengths, run.key_lengths))
        return super()._call_run(q, k, v, run, starts)


@pytest.mark.parametrize(
    ("longest", "spec", "query_start", "calls"),
    [
        (24, AttentionSpec(documents=((0, 5, 6, 17),)), 0, [((5, 1, 11, 7), (5, 1, 11, 7))]),
        (24, AttentionSpec(documents=((0, 5, 6, 17),)), 8, [((9, 7), (11, 7))]),  # a slice
        (10, AttentionSpec(documents=((0, 5, 6, 17),)), 0, [((5, 1), (5, 1)), (11, 11), (7, 7)]),
        (24, AttentionSpec(documents=((2, 8, 20),)), 0, [((6, 12, 4), (6, 12, 4))]),  # padded on the left
        (24, AttentionSpec(documents=((0, 5, 6, 17),), lengths=(20,)), 0, [((5, 1, 11), (5, 1, 11)), (3, 3), (4, 3)]),
        (24, AttentionSpec(documents=((0, 5, 6, 17),), lengths=(6,)), 0, [((5, 1), (5, 1))]),
        (24, AttentionSpec(documents=((0,),)), 0, [(24, 24)]),
    ],
)
def test_documents_that_follow_each_other_are_one_call(longest, spec, query_start, calls):
    inputs, kernel = make_inputs(batch=1, queries=24 - query_start, keys=24), CountingRuns(longest)
    PackedDocuments(kernel).forward(*inputs[:3], spec, query_start)
    assert kernel.calls == calls


def test_each_row_with_several_documents_is_one_call():
    inputs, kernel = make_inputs(batch=3), CountingRuns()
    PackedDocuments(kernel).forward(*inputs[:3], AttentionSpec(documents=((0, 7), (0, 7), (0,))))
    assert kernel.calls == [((7, 17), (7, 17)), ((7, 17), (7, 17)), (24, 24)]


def test_one_call_for_all_tokens_is_not_copied():
    inputs, kernel = make_inputs(batch=1), CountingRuns()
    spec, made = AttentionSpec(documents=((0, 7),)), []

    def call_run(*arguments):
        made.append(CpuBanded._call_run(kernel, *arguments))
        return made[-1]

    kernel._call_run = call_run
    found = PackedDocuments(kernel).forward(*inputs[:3], spec)
    assert found.lse.data_ptr() == made[0][1].data_ptr()


def test_documents_that_queries_or_keys_do_not_touch_cost_nothing():
    spec = AttentionSpec(documents=((0, 10, 20, 30),))
    found = [(piece.queries, piece.keys) for piece in pieces(spec, 1, range(15, 25), range(25))]
    assert found == [(slice(0, 5), slice(10, 20)), (slice(5, 10), slice(20, 25))]
    assert not sees_any(spec, range(20, 30), range(20))
    assert sees_any(spec, range(20, 30), range(21))
    assert not sees_any(AttentionSpec(), range(8), range(8, 16))
    assert sees_any(AttentionSpec(), range(9), range(8, 16))


def test_a_kernel_gets_lengths_only_where_they_cut():
    spec = AttentionSpec(lengths=(24, 20), documents=((0, 12), (0, 12)))
    assert [piece.spec.lengths for piece in pieces(spec, 2, range(24), range(24))] == [None, (24, 20)]


def test_documents_choose_their_kernel():
    q, k, v, _ = make_inputs()
    packed = select_backend(q, k, v, SPECS["causal"])
    assert isinstance(packed, PackedDocuments) and packed.blocks and packed.name == "sdpa"
    assert isinstance(select_backend(q, k, v, AttentionSpec(dropout=0.1, documents=DOCUMENTS)), Replay)
    assert AttentionSpec(documents=DOCUMENTS).sliceable


# ---- blocks that are merged


KERNELS = {
    "cpu": CpuFlash(),
    "banded": CpuBanded(),
    "packed cpu": PackedDocuments(CpuFlash()),
    "packed banded": PackedDocuments(CpuBanded()),
}


def in_blocks(backend, inputs: Inputs, spec: AttentionSpec, query_start: int, edges: list[int]) -> Attended:
    """Attention computed block by block, with gradients from the log-sum-exp over all keys."""
    q, k, v, dout = inputs
    merged = sees_nothing_result(q, v, sums_dtype(q))
    blocks = [(a, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(edges)]
    states = []
    for start, keys, values in blocks:
        part = backend.forward(q, keys, values, spec, query_start, start)
        assert not part.out[part.lse == -torch.inf].any()
        merge(merged.out, merged.lse, part)
        states.append(part.state)
    dq, grads = torch.zeros_like(q), []
    for (start, keys, values), state in zip(blocks, states, strict=True):
        result = AttentionResult(merged.out.to(q.dtype), merged.lse, state)
        dq_part, *dkv = backend.backward(dout, q, keys, values, result, spec, query_start, start)
        dq += dq_part
        grads.append(dkv)
    return Attended(merged.out, merged.lse, dq, *(torch.cat(parts, 2) for parts in zip(*grads, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=100)
@given(
    causal=st.booleans(),
    query_start=positions,
    queries=st.integers(1, 16),
    inner_edges=st.sets(st.integers(1, 23), max_size=3),
    window=st.none() | st.integers(1, 30),
    lengths=lengths,
    documents=st.tuples(starts, starts),
)
def test_blocks_merge_to_the_whole(kernel, causal, query_start, queries, inner_edges, window, lengths, documents):
    inputs = make_inputs(heads=2, key_heads=1, queries=queries, keys=24, dtype=torch.float64)
    spec = AttentionSpec(
        causal=causal,
        window=window if causal else None,
        lengths=lengths,
        documents=documents if kernel.startswith("packed") else None,
    )
    found = in_blocks(KERNELS[kernel], inputs, spec, query_start, [0, *sorted(inner_edges), 24])
    assert_close(found, reference(inputs, spec, query_start), 1e-5)


def test_a_row_that_sees_nothing_at_all_has_no_gradient():
    inputs = make_inputs()
    for kernel in KERNELS.values():
        found = attend(kernel, inputs, AttentionSpec(lengths=(0, 24)))
        assert (found.lse[0] == -torch.inf).all() and not found.out[0].any()
        for gradient in found[2:]:
            assert not gradient[0].any() and gradient[1].any()


class Calls(TorchDispatchMode):
    """Counts the calls of PyTorch's operators."""

    def __init__(self):
        super().__init__()
        self.by_operator = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.by_operator[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("start", "calls"), [(0, 3), (6, 4), (14, 2), (30, 0)])
def test_rows_whose_window_holds_no_key_do_not_reach_the_kernel(start, calls, monkeypatch):
    monkeypatch.setattr(CpuFlash, "mask_entries", 32)  # of 4 queries and 8 keys
    inputs, spec = make_inputs(queries=16, keys=8), AttentionSpec(window=5)
    with Calls() as counted:
        found = attend(CpuFlash(), inputs, spec, start, 7)
    assert_close(found, reference(inputs, spec, start, 7), FP32_BOUND)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert counted.by_operator[operator] == calls


def test_a_kernel_that_takes_a_mask_or_the_causal_flag_gets_a_mask():
    whole = range(24)
    mask, flag = block_mask(SPECS["causal"], 2, whole, whole, torch.device("cpu"), flag_with_mask=False)
    assert not flag and torch.equal(mask, visible(SPECS["causal"], 2, whole, whole))
