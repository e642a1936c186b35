"""Explains errors of models that do not follow a tensor-parallel plan."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

_OF_PARTS = (
    "the training step adds weights or logits of which each process has a part (DTensor) to whole tensors: add "
    "full_tensor() of their sums, such as p.pow(2).sum().full_tensor()"
)
_IN_BACKWARD = ("got mixed torch.Tensor and DTensor", "only accepts torch.Tensor but got")


@contextlib.contextmanager
def explaining_divided_gradients() -> Iterator[None]:
    """Inside a backward, PyTorch's errors about a divided gradient of a whole tensor become one line.

    Raises:
        ValueError: A loss was computed from divided tensors and from whole ones.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _IN_BACKWARD):
            raise
        raise ValueError(_OF_PARTS) from error


@contextlib.contextmanager
def explaining_mixed_tensors(tensor_parallel: bool, sequence_parallel: bool, loss_parallel: bool) -> Iterator[None]:
    """Inside, PyTorch's errors about divided and whole tensors in one operation become one line.

    Args:
        tensor_parallel: Whether processes share weights for computing, rather than FSDP2 for keeping them.
        sequence_parallel: Whether each process has some of the tokens between blocks.
        loss_parallel: Whether logits are divided in the vocabulary.

    Raises:
        ValueError: An operation got a divided weight, or some of the tokens, and a tensor that is not divided.
    """
    try:
        yield
    except RuntimeError as error:
        if sequence_parallel and "must match the size of tensor" in str(error):
            raise ValueError(
                "sequence_parallel=True: the model combines some of the tokens with all of them outside of attention "
                f"and MLP modules ({error}): set sequence_parallel=False"
            ) from error
        if "on inputs with different meshes" in str(error):
            raise ValueError(_OF_PARTS) from error
        found = re.search(r"(aten\.\w+)\S* got mixed torch\.Tensor and DTensor", str(error))
        if found is None:
            raise
        if not tensor_parallel:
            raise ValueError(
                f"a weight that FSDP2 had divided among the processes reached {found[1]}: a backward inside of the "
                "model's forward (torch.autograd.grad) ends its use of the weights; train this model in one process"
            ) from error
        logits = (
            "; if it passes logits, which loss_parallel=True divides, set loss_parallel=False" if loss_parallel else ""
        )
        raise ValueError(
            f"tensor_parallel_size: the model passes a divided weight to {found[1]} outside of the module that holds "
            f"it: leave this weight out of tensor_parallel_plan, or train with tensor_parallel_size=1{logits}"
        ) from error
