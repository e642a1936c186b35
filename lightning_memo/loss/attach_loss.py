"""Makes Hugging Face models compute the loss of long sequences in chunks of tokens, without changes to their code.

The norm before the head runs in chunks, too: otherwise it would save copies of the complete sequence in fp32.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memo.engine.fp8_modules import why_scaled_by_engine, why_scaled_together
from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor, TensorBuilder
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.modules.token_local_modules import Forward, GradientSums, TokenLocal, chunk_tokens_of, chunks
from lightning_memo.engine.token_locality.prove_locality import ModuleProofs
from lightning_memo.loss.lazy_logits import LazyLogits
from lightning_memo.loss.logits_recipe import Head
from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.parallel.local_tensors import awaited
from lightning_memo.utils.around_forward import is_watched
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks
from lightning_memo.utils.retained_graph import first_derivative

# Size of the fp32 logits of a chunk. Every chunk reads and writes the fp32 gradient of the head's weights once. From
# about a thousand tokens on, the matrix products hide this time; a thousand tokens have 512 MiB of logits for a
# vocabulary of 128K.
CHUNK_BYTES = 512 * 2**20


def attach_chunked_loss(
    model: nn.Module,
    chunk_tokens: int | str = "auto",
    shards: int = 1,
    vocabulary_parts: int = 1,
    warn: Callable[[str], object] = warnings.warn,
    current: CurrentLayout | None = None,
) -> list[Callable[[], None]]:
    """Give every Hugging Face model inside `model` lazy logits, and run its last norm in chunks.

    Calls with no more tokens than a chunk run as before, with bit-identical results. A head that cannot run in chunks
    is left unchanged, with a warning.

    Args:
        model: The trained module. Models inside it that are not from Hugging Face are left unchanged.
        chunk_tokens: Number of tokens whose logits exist at the same time, over all sequence-parallel ranks. "auto"
            gives `CHUNK_BYTES` of fp32 logits per process.
        shards: Number of sequence-parallel ranks, each with its own part of the tokens of every row.
        vocabulary_parts: Number of processes that share the logits of a token.
        warn: Issues a warning.
        current: Holds the processes that share the tokens of whole rows, if some do.

    Returns:
        Functions that undo the change.
    """
    current = current or CurrentLayout()
    undo: list[Callable[[], None]] = []
    for host in find_hugging_face(model):
        head = getattr(host, "get_output_embeddings", lambda: None)()
        if not isinstance(head, nn.Module) or any(map(is_parametrized, head.modules())):
            continue  # reading a weight that is computed may change its buffers
        weight = getattr(head, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if why := why_scaled_together(head):
            warn(
                f"lightning_memo: the logits of all tokens are computed at once, because {why}: leave the head in "
                "higher precision, or set loss_chunk_tokens=None"
            )
            continue
        vocabulary, hidden = weight.shape
        tokens = chunk_tokens
        if isinstance(tokens, str):
            tokens = max(1, CHUNK_BYTES // (4 * -(-vocabulary // vocabulary_parts)))
        own = Head(head, head.forward, max(1, tokens // shards), shards, vocabulary_parts)
        undo += [_attach_head(own, vocabulary, warn, current), _count_steps(head)]
        norm = find_last_norm(host, hidden)
        if norm is not None:
            undo.append(attach_chunks(norm, max(1, tokens // shards)))
    return undo


def _attach_head(
    head: Head, vocabulary: int, warn: Callable[[str], object], current: CurrentLayout
) -> Callable[[], None]:
    proofs, warned = ModuleProofs(), set[str]()

    def run(module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        lazy = not kwargs and len(args) == 1 and args[0].dim() == 3 and not _has_backward_hooks(module)
        if not lazy or is_watched() or args[0].shape[:-1].numel() <= chunk_tokens_of(args[0], head.chunk_tokens):
            return forward(*args, **kwargs)
        if why := why_scaled_by_engine(module) or proofs.why_not(module, forward, args[0]):
            if why not in warned:
                warned.add(why)
                warn(
                    f"lightning_memo: the logits of all tokens are computed at once, because {why}: "
                    "loss_chunk_tokens=None does the same without this warning"
                )
            return forward(*args)
        return LazyLogits.of(replace(head, forward=forward, sharers=current.sharers), args[0], vocabulary)

    return replace_forward(head.module, run)


def _count_steps(head: nn.Module) -> Callable[[], None]:
    """Let optimizer steps count as changes of a head's weights: some optimizers write through `data`, or compiled code.

    Logits that are read after such a step would be those of the new weights.

    Returns:
        A function that undoes it.
    """
    weak = weakref.ref(head)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        head = weak()
        own = set() if head is None else set(head.parameters())
        increment_version([p for group in optimizer.param_groups for p in group["params"] if p in own])

    return register_optimizer_step_post_hook(stepped).remove


def _has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a backward hook needs the gradients of the module's output, which must then exist."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def find_last_norm(host: nn.Module, hidden: int) -> nn.Module | None:
    """Return the norm between the layers and the head, or `None`.

    It is the only norm of `hidden` features among the siblings behind the largest stack of layers.
    """
    try:
        stack = find_stacks(host)[0]
    except ValueError:
        return None
    parent, _, name = stack.name.rpartition(".")
    siblings = list(host.get_submodule(parent).named_children())
    behind = [name for name, _ in siblings].index(name) + 1
    norms = [m for _, m in siblings[behind:] if _is_norm(m, hidden)]
    return norms[0] if len(norms) == 1 else None


def _is_norm(module: nn.Module, hidden: int) -> bool:
    weight = None if is_parametrized(module) else getattr(module, "weight", None)
    named = any(kind.__name__.endswith("Norm") for kind in type(module).__mro__)
    return named and isinstance(weight, Tensor) and weight.shape == (hidden,)


def attach_chunks(module: nn.Module, chunk_tokens: int) -> Callable[[], None]:
    """Make a module run on at most `chunk_tokens` tokens at a time, and save only its input for the backward.

    Args:
        module: A module from `[batch, tokens, hidden]` to the same shape. It runs on all tokens at once unless it is
            proven to compute each token by itself; see `ModuleProofs`.
        chunk_tokens: Number of tokens, counted over all sequences of a batch.

    Returns:
        A function that undoes the change.
    """
    proofs = ModuleProofs()

    def run(module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or args[0].dim() != 3 or is_watched():
            return forward(*args, **kwargs)
        tokens = chunk_tokens_of(args[0], chunk_tokens)
        if args[0].shape[:-1].numel() <= tokens or proofs.why_not(module, forward, args[0]):
            return forward(*args)
        return _run_in_chunks(module, forward, args[0], tokens)

    return replace_forward(module, run)


def _run_in_chunks(module: nn.Module, forward: Forward, x: Tensor, chunk_tokens: int) -> Tensor:
    """Run a module on chunks of `x` `[..., hidden]` without saving a graph; the backward recomputes each chunk."""
    local = TokenLocal(module, forward)
    result: Tensor = _InChunks.apply(local, chunk_tokens, awaited(x), *local.trained)
    return result


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: TokenLocal, chunk_tokens: int, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.module, ctx.chunk_tokens, ctx.dtypes = module, chunk_tokens, [p.dtype for p in trained]
        ctx.save_for_backward(x)
        if isinstance(x, OffloadedTensor) and not x.is_real:  # the output is lazy too, because it is read only once
            dtype = module(torch.zeros(1, 1, x.shape[-1], dtype=x.dtype, device=x.device)).dtype
            return x.mapped(lambda rows: module(rows[None])[0], dtype)
        y: TensorBuilder | None = None
        for number, part in enumerate(chunks(x, chunk_tokens)):
            part_y = module(part)
            y = y or TensorBuilder(x.shape, part_y.dtype, part_y.device)
            y.write_rows(number * chunk_tokens, part_y)
        assert y is not None
        return y.take()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.module.check_unchanged()
        dx, sums = TensorBuilder.like(x), GradientSums()
        pairs = zip(chunks(x, ctx.chunk_tokens), chunks(gradient, ctx.chunk_tokens), strict=True)
        for number, (part, part_gradient) in enumerate(pairs):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.module(part)
            part_dx, gradients = ctx.module.gradients(y, part, part_gradient)
            assert part_dx is not None
            dx.write_rows(number * ctx.chunk_tokens, part_dx)
            sums.add(gradients)
        return None, None, dx.take(), *sums.take(ctx.dtypes)
