"""Token embeddings and rotary tables, the inputs of the first layer, where a forward computes only some of the tokens.

Lazy inputs are computed when a layer reads them, slice by slice.

transformers chooses the frequencies of the rotary tables "dynamic" and "longrope" in each forward of the rotary module
by the largest position, and keeps those of "dynamic" for later forwards. Therefore the largest position of the batch is
appended to the positions of some of the tokens or rows: the module then chooses and keeps the frequencies of the whole
batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lightning_memo.engine.memory.lazy_tensor import LazyTensor, real
from lightning_memo.engine.memory.row_matrices import ComputedRows
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.modules.token_local_modules import Forward, GradientSums, TokenLocal, chunks
from lightning_memo.engine.token_locality.prove_module import ModuleProofs
from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.utils.around_forward import is_watched
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face
from lightning_memo.utils.retained_graph import first_derivative

_DEPENDING = ("dynamic", "longrope")


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
        whole = not torch.is_grad_enabled() or input.dim() != 2 or input.shape[1] <= self._longest or is_watched()
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
        flat, like = ids.flatten().clone(), module(ids[:1, :1])  # see Note: [Values that are read later]
        ctx.module, ctx.ids, ctx.at_once, ctx.dtypes = module, flat, at_once, [p.dtype for p in trained]
        rows = ComputedRows(lambda ranges: module(_joined(flat, ranges)[None])[0])
        return LazyTensor(rows, (*ids.shape, like.shape[-1]), like.dtype, like.device, at_once)

    @staticmethod
    @first_derivative
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
    like = torch.empty(0, dtype=x.dtype, device=x.device)

    def make(like: Tensor, position_ids: Tensor) -> Any:
        return forward(like, position_ids, *args, **kwargs)

    if proofs.why_no_table(module, make, like, position_ids, args, *kwargs.items()):
        return forward(real(x), position_ids, *args, **kwargs)
    first = make(like, position_ids[:1, :1])
    positions = position_ids.flatten().clone()  # see Note: [Values that are read later]

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


def attach_rotary(model: nn.Module, layers: Sequence[nn.Module], current: CurrentLayout) -> list[Callable[[], None]]:
    """Make rotary tables of some tokens equal to those of the whole batch.

    Args:
        model: The module that contains the rotary modules.
        layers: The model's layers.
        current: Holds the layout of the batch.

    Returns:
        Functions that undo this.

    Raises:
        ValueError: Layers make such tables themselves, from the positions of one slice.
    """
    for layer in layers:
        for module in layer.modules():
            if depends_on_length(module):
                raise ValueError(
                    f"{class_name(module)} makes rotary tables by the length of the sequence (dynamic or longrope) "
                    "inside a layer, which runs on some of the tokens at a time: use another rope_scaling, like yarn"
                )
    rotate = functools.partial(_rotate_part, current)
    return [replace_forward(module, rotate) for module in model.modules() if depends_on_length(module)]


def _rotate_part(
    current: CurrentLayout,
    module: nn.Module,
    forward: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces the forward of a rotary module: tables `[..., tokens, features]` of positions `[..., tokens]`."""
    layout = current.layout
    if layout is not None:
        largest = layout.tokens - 1 if layout.largest_position is None else layout.largest_position
    elif current.largest_position is not None:
        largest = current.largest_position()
    else:
        return forward(x, position_ids, *args, **kwargs)
    last = position_ids.new_full((*position_ids.shape[:-1], 1), largest)
    tables = forward(x, torch.cat([position_ids, last], -1), *args, **kwargs)
    return tree_map(lambda t: t[..., :-1, :].contiguous(), tables)


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module makes rotary tables like those of transformers."""
    return any(kind.__name__.endswith("RotaryEmbedding") for kind in type(module).__mro__)


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module makes other rotary tables for longer sequences."""
    kinds = getattr(module, "rope_type", "default")
    return is_rotary(module) and any(k in _DEPENDING for k in (kinds.values() if isinstance(kinds, dict) else (kinds,)))
