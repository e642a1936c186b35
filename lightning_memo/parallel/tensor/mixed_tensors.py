"""Explains errors of models that do not follow a tensor-parallel plan."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator


@contextlib.contextmanager
def explaining_mixed_tensors(tensor_parallel: bool, sequence_parallel: bool) -> Iterator[None]:
    """Inside, PyTorch's errors about divided and whole tensors in one operation become one line.

    Args:
        tensor_parallel: Whether processes share weights for computing, rather than FSDP2 for keeping them.
        sequence_parallel: Whether each process has some of the tokens between blocks.

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
        found = re.search(r"(aten\.\w+)\S* got mixed torch\.Tensor and DTensor", str(error))
        if found is None:
            raise
        if not tensor_parallel:
            raise ValueError(
                f"a weight that FSDP2 had divided among the processes reached {found[1]}: a backward inside of the "
                "model's forward (torch.autograd.grad) ends its use of the weights; train this model in one process"
            ) from error
        raise ValueError(
            f"tensor_parallel_size: the model passes a divided weight to {found[1]} outside of the module that holds "
            "it: leave this weight out of tensor_parallel_plan, or train with tensor_parallel_size=1"
        ) from error
