"""Attention kernels behind one interface, their selection, and random state."""

from lightning_memo.kernels.attention_kernel import AttentionBackend, AttentionResult, AttentionSpec, token_major
from lightning_memo.kernels.rng_state import RngState
from lightning_memo.kernels.select_kernel import select_backend

__all__ = ["AttentionBackend", "AttentionResult", "AttentionSpec", "RngState", "select_backend", "token_major"]
