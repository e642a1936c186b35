"""Inputs of the first layer (embeddings, rotary tables) that are computed when a layer reads them, slice by slice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_memo.engine.memory.lazy_tensor import LazyTensor, real
from lightning_memo.engine.memory.row_matrices import ComputedRows
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.modules.rotary_tables import depends_on_length, is_rotary
from lightning_memo.engine.modules.token_local_modules import Forward, GradientSums, TokenLocal, chunks
from lightning_memo.engine.token_locality.prove_module import ModuleProofs
from lightning_memo.utils.find_layers import find_hugging_face


def attach_lazy_inputs(model: nn.Module, longest: int) -> list[Callable[[], None]]:
    """Make Hugging Face models embed their tokens slice by slice, when layers read them.

    Calls with rows of at most `longest` tokens run as usual, and so do embeddings that tensor-parallel processes share.
    Any operation on the embeddings before the first layer computes them in full. So do modules that are not proven to
    compute each token by itself; see `ModuleProofs`.

    Args:
        model: The module that contains the models.
        longest: Largest number of tokens of a row that are computed at once.

    Returns:
        Functions that undo this.
    """
    undo: list[Callable[[], None]] = []
    for host in find_hugging_face(model):
        embedding = None
        with contextlib.suppress(NotImplementedError):  # transformers does not know all models' embeddings
            embedding = host.get_input_embeddings()
        if isinstance(embedding, nn.Embedding) and not embedding.sparse:
            proofs = ModuleProofs()
            undo.append(replace_forward(embedding, _Embed(longest, proofs)))
            rotate = functools.partial(_rotate, proofs)
            undo += [replace_forward(m, rotate) for m in host.modules() if is_rotary(m)]
    return undo


class _Embed:
    """Replaces the forward of an embedding, `[batch, tokens]` to `[batch, tokens, hidden]`."""

    def __init__(self, longest: int, proofs: ModuleProofs) -> None:
        self._longest, self._proofs = longest, proofs

    def __call__(self, module: nn.Module, forward: Forward, input: Tensor) -> Tensor:
        whole = not torch.is_grad_enabled() or input.dim() != 2 or input.shape[1] <= self._longest
        if whole or any(isinstance(p, DTensor) for p in module.parameters()):
            return forward(input)
        if self._proofs.why_not(module, forward, input):
            return forward(input)
        local = TokenLocal(module, forward)
        result: Tensor = _LazyEmbedding.apply(local, input, self._longest * input.shape[0], *local.trained)
        return result


class _LazyEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: TokenLocal, ids: Tensor, at_once: int, *trained: Tensor) -> Tensor:
        flat, like = ids.flatten(), module(ids[:1, :1])
        ctx.module, ctx.ids, ctx.at_once, ctx.dtypes = module, flat, at_once, [p.dtype for p in trained]
        rows = ComputedRows(lambda ranges: module(_joined(flat, ranges)[None])[0])
        return LazyTensor(rows, (*ids.shape, like.shape[-1]), like.dtype, like.device, at_once)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sums = GradientSums()
        for ids, part in zip(ctx.ids.split(ctx.at_once), chunks(gradient, ctx.at_once), strict=True):
            with torch.enable_grad():
                y = ctx.module(ids[None])
            sums.add(ctx.module.gradients(y, ids, part)[1])
        return None, None, None, *sums.take(ctx.dtypes)


def _rotate(
    proofs: ModuleProofs,
    module: nn.Module,
    forward: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces the forward of a rotary module, which makes tables `[batch or 1, tokens, features]` of positions.

    It returns several tables (sines and cosines) or a single one (complex numbers).
    """
    if not isinstance(x, LazyTensor) or position_ids.dim() != 2 or depends_on_length(module):
        return forward(x, position_ids, *args, **kwargs)
    like, positions = torch.empty(0, dtype=x.dtype, device=x.device), position_ids.flatten()

    def make(like: Tensor, position_ids: Tensor) -> Any:
        return forward(like, position_ids, *args, **kwargs)

    if proofs.why_no_table(module, make, like, position_ids, args, *kwargs.items()):
        return forward(real(x), position_ids, *args, **kwargs)
    first = make(like, position_ids[:1, :1])

    def table(number: int, t: Tensor) -> LazyTensor:
        def compute(ranges: Sequence[range]) -> Tensor:
            found = make(like, _joined(positions, ranges)[None])
            rows: Tensor = (found if isinstance(first, Tensor) else found[number])[0]
            return rows

        shape = (*position_ids.shape, t.shape[-1])
        return LazyTensor(ComputedRows(compute), shape, t.dtype, t.device, x.at_once)

    return table(0, first) if isinstance(first, Tensor) else tuple(table(n, t) for n, t in enumerate(first))


def _joined(t: Tensor, ranges: Sequence[range]) -> Tensor:
    return torch.cat([t[rows.start : rows.stop] for rows in ranges])
