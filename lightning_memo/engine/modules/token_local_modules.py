"""Modules that treat each token by itself, such as an output head, a norm, token embeddings or rotary tables.

They can run on a few tokens. Embeddings and rotary tables, the inputs of the first layer, are computed lazily: when a
layer reads them, slice by slice.

transformers chooses the frequencies of the rotary tables "dynamic" and "longrope" in each forward of the rotary module
by the largest position, and keeps those of "dynamic" for later forwards. Therefore the largest position of the batch is
appended to the positions of some of the tokens or rows: the module then chooses and keeps the frequencies of the whole
batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.memory.offloaded_tensor import ComputedRows, OffloadedTensor, read_rows, real
from lightning_memo.engine.memory.saved_storages import NotedTensor
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts
from lightning_memo.engine.state.forward_state import ForwardState
from lightning_memo.engine.token_locality.prove_locality import ModuleProofs
from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.parallel.local_tensors import ShardedHandle, local_part
from lightning_memo.utils.around_forward import is_watched
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face
from lightning_memo.utils.retained_graph import first_derivative

Forward = Callable[[Tensor], Any]


class TokenLocal:
    """Runs a module that treats each token by itself, chunk by chunk.

    Detached aliases replace its parameters. The gradients of a chunk end at the aliases, and hooks that a user has
    registered on a parameter are called once, with the whole gradient. Every chunk, also one that a backward computes
    again, sees the attributes that the module has now.

    Args:
        module: The module, with its present parameters (FSDP2 exchanges them).
        forward: The module's own forward.
        state: What the module reads; `None` for its present state.
    """

    def __init__(self, module: nn.Module, forward: Forward, state: ForwardState | None = None) -> None:
        self._state = state or ForwardState(module, (), copies=False)  # as aliases replace the parameters
        self._call, self._name = _Call(module, forward), class_name(module)
        parameters = dict(self._call.named_parameters())
        self.trained = [p for p in parameters.values() if p.requires_grad]
        self._aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in parameters.items()}
        self._read = [(p, self._aliases[name], NotedTensor.of(local_part(p))) for name, p in parameters.items()]
        self._trained_aliases = [alias for alias in self._aliases.values() if alias.requires_grad]
        self._autocast = ambient_autocast(next(iter(parameters.values())).device.type)

    def __call__(self, x: Tensor) -> Any:
        """Return the module's output for `x` `[1, tokens, hidden]`, under the autocast of `__init__`."""
        with self._state.replayed(), self._autocast():
            return functional_call(self._call, self._aliases, (x,))

    def check_unchanged(self) -> None:
        """Check that the weights are still those that a forward has read.

        Raises:
            RuntimeError: A weight was changed since.
        """
        for p, alias, noted in self._read:
            if noted.changed or address_of(local_part(p)) != address_of(local_part(alias)):
                raise RuntimeError(
                    f"a weight of {self._name}, of shape {list(p.shape)}, was changed between a forward and its "
                    "backward, which needs its value: change it after the backward"
                )

    def gradients(self, y: Tensor, x: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of `x` (`None` if it needs none) and of `trained`.

        Args:
            y: The module's output, computed from `x` in a graph.
            x: The module's input.
            gradient: The gradient of `y`.
        """
        inputs = [x, *self._trained_aliases] if x.requires_grad else self._trained_aliases
        found = list(torch.autograd.grad(y, inputs, gradient, allow_unused=True))
        return (found.pop(0) if x.requires_grad else None), found


class _Call(nn.Module):
    """Calls a module's own forward without its hooks, which belong to the call that runs in chunks."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(x)


class GradientSums:
    """Sums the gradients of parameters over chunks, in fp32 if they are in half precision."""

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, ShardedHandle | None] | None] = []

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a chunk's gradients, of the same parameters in every call."""
        self._sums = self._sums or [None] * len(gradients)
        for n, gradient in enumerate(gradients):
            if gradient is None:
                continue
            part, known = local_part(gradient), self._sums[n]
            if known is not None:
                known[0].add_(part)
                continue
            # A copy, because autograd's tensor may share memory with another gradient.
            total = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
            layout = ShardedHandle.of(gradient, None) if hasattr(gradient, "device_mesh") else None
            self._sums[n] = (total, layout)

    def copy(self) -> GradientSums:
        """Return the same sums in memory of their own."""
        copied = GradientSums()
        copied._sums = [None if known is None else (known[0].clone(), known[1]) for known in self._sums]
        return copied

    def take(self, dtypes: Sequence[torch.dtype], factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the sums in these dtypes, multiplied by `factor`, and hold them no longer."""
        sums, self._sums = self._sums or [None] * len(dtypes), []
        return [_finished(known, dtype, factor) for known, dtype in zip(sums, dtypes, strict=True)]


def _finished(
    known: tuple[Tensor, ShardedHandle | None] | None, dtype: torch.dtype, factor: Tensor | None
) -> Tensor | None:
    if known is None:
        return None
    total, layout = known
    if factor is not None:
        # A new tensor, allocated in the backward like all gradients: memory plans let it live until the next step's.
        total = total * factor if total.dtype == dtype else total.mul_(factor)
    total = total.to(dtype)
    return total if layout is None else layout.wrap(total)


def chunks(x: Tensor, tokens: int) -> Iterator[Tensor]:
    """Return the tokens of `x` `[..., hidden]` in chunks `[1, at most tokens, hidden]`, without history."""
    if isinstance(x, OffloadedTensor):
        return (rows[None] for rows in read_rows(x, tokens))
    return iter(x.detach().reshape(1, -1, x.shape[-1]).split(tokens, 1))


def chunk_tokens_of(x: Tensor, requested: int) -> int:
    """Return how many tokens of `x` are computed at once, at most `requested`."""
    return min(requested, x.at_once) if isinstance(x, OffloadedTensor) else requested


@contextlib.contextmanager
def noting_saved(addresses: set[int]) -> Iterator[None]:
    """Add the storages of all tensors that a graph saves inside the context to `addresses`."""

    def note(t: Tensor) -> Tensor:
        addresses.update(part.untyped_storage().data_ptr() for part in plain_parts(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        yield


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
        return OffloadedTensor(rows, (*ids.shape, like.shape[-1]), like.dtype, like.device, at_once)

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
    if not isinstance(x, OffloadedTensor) or position_ids.dim() != 2 or depends_on_length(module):
        return forward(x, position_ids, *args, **kwargs)
    like = torch.empty(0, dtype=x.dtype, device=x.device)

    def make(like: Tensor, position_ids: Tensor) -> Any:
        return forward(like, position_ids, *args, **kwargs)

    if proofs.why_no_table(module, make, like, position_ids, args, *kwargs.items()):
        return forward(real(x), position_ids, *args, **kwargs)
    first = make(like, position_ids[:1, :1])
    positions = position_ids.flatten().clone()  # see Note: [Values that are read later]

    def table(number: int, t: Tensor) -> OffloadedTensor:
        def compute(ranges: Sequence[range]) -> Tensor:
            found = make(like, _joined(positions, ranges)[None])
            rows: Tensor = (found if isinstance(first, Tensor) else found[number])[0]
            return rows

        shape = (*position_ids.shape, t.shape[-1])
        return OffloadedTensor(ComputedRows(compute), shape, t.dtype, t.device, x.at_once)

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
