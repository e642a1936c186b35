"""Bands of flash kernels, with a kernel that is emulated on the CPU according to their sources."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_reference import (
    Inputs,
    assert_close,
    attend,
    make_inputs,
    reference,
)
from support.kernels.banded import CpuBanded
from support.kernels.specs import FP32_BOUND, SPECS

from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.flash_attention import Band, bands


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_bands_compute_attention(spec):
    inputs = make_inputs(key_heads=2, dtype=torch.float64)
    assert_close(attend(CpuBanded(), inputs, spec), reference(inputs, spec), FP32_BOUND)


@pytest.mark.slow
@settings(max_examples=400)
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
