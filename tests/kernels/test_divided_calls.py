"""Calls of more elements than kernels can index are divided into calls for some batch rows and heads."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_reference import assert_close, attend, make_inputs, reference
from support.kernels.banded import CpuBanded
from support.kernels.specs import FP32_BOUND, SPECS

from lightning_memo.kernels import AttentionSpec, divided_calls, select_backend
from lightning_memo.kernels.divided_calls import DividedCalls, PackedDocuments, parts_of_call


class Counted(CpuBanded):
    """Notes the shapes of the queries, `[batch, tokens, heads, head_dim]`, of all calls."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def _call(self, q, k, v, spec, band):
        self.shapes.append(q.shape)
        return super()._call(q, k, v, spec, band)

    def _call_run(self, q, k, v, run, starts):
        self.shapes.append(q.shape)
        return super()._call_run(q, k, v, run, starts)


@pytest.mark.parametrize("heads_of_call", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_parts_compute_attention(spec, heads_of_call, monkeypatch):
    monkeypatch.setattr(divided_calls, "LARGEST_CALL", heads_of_call * 128 * 32)
    inputs, kernel = make_inputs(heads=4, key_heads=2, dtype=torch.float64), Counted()
    found = attend(DividedCalls(kernel), inputs, spec)
    assert_close(found, reference(inputs, spec), FP32_BOUND)
    assert max(shape[0] * shape[2] for shape in kernel.shapes) <= heads_of_call
    whole = attend(CpuBanded(), inputs, spec)
    assert all(torch.equal(found[n], whole[n]) for n in range(3)), "output, log-sum-exp and dq depend on one head only"


@pytest.mark.parametrize("heads_of_call", [1, 2, 4, 8])
def test_parts_of_packed_documents(heads_of_call, monkeypatch):
    spec = AttentionSpec(documents=((0, 5, 11), (3, 9)), window=4)
    monkeypatch.setattr(divided_calls, "LARGEST_CALL", heads_of_call * 3 * 128 * 32)
    inputs, kernel = make_inputs(heads=4, key_heads=1, dtype=torch.float64), Counted()
    assert_close(attend(DividedCalls(PackedDocuments(kernel)), inputs, spec), reference(inputs, spec), FP32_BOUND)
    assert max(shape[-2] for shape in kernel.shapes) == min(heads_of_call, 4)


@settings(max_examples=300)
@given(
    batch=st.integers(1, 5), groups=st.integers(1, 6), key_heads=st.integers(1, 6), tokens=st.integers(1, 10**7),
    head=st.sampled_from([8, 64, 80, 128, 192, 256]), documents=st.integers(1, 10**5),
)  # fmt: skip
def test_each_part_is_small_enough(batch, groups, key_heads, tokens, head, documents):
    """All heads of all rows are in one part each, and no part's queries, padded as kernels do, are too many."""
    q = torch.empty(batch, groups * key_heads, tokens, head, device="meta")
    k = torch.empty(batch, key_heads, tokens, head, device="meta")
    spec = AttentionSpec(documents=(tuple(range(documents)),) * batch)
    parts = parts_of_call(q, k, k, spec)
    seen = torch.zeros(batch, groups * key_heads, dtype=torch.int64)
    for part in parts:
        part.of_queries(seen).add_(1)
        rows, heads = part.of_queries(seen).shape
        # the sum of dq of documents is [tokens + 128 * documents, heads, head_dim]
        size = rows * heads * (tokens + 128 * documents - 128) * head
        assert size <= 2**31 or (rows, heads) == (1, 1)
        assert part.of_queries(seen).shape[1] <= groups * part.of_keys(k).shape[1]
        of_keys = {head // groups for head in range(*part.heads.indices(groups * key_heads))}
        assert of_keys == set(range(*part.key_heads.indices(key_heads)))
    assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("shape", "calls"),
    [((130, 32, 4096, 128), 2), ((128, 32, 4096, 128), 1), ((1, 32, 2**19, 128), 1), ((1, 32, 2**20, 128), 2)],
)
def test_calls_are_divided_where_kernels_need_it(shape, calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    k = torch.empty(shape[0], 8, *shape[2:], dtype=torch.bfloat16, device="meta")
    assert len(parts_of_call(q, k, k, AttentionSpec())) == calls
    assert isinstance(select_backend(q, k, k, AttentionSpec()), DividedCalls) == (prod(shape) > 2**31)
