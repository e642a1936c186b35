"""Names of the classes of modules, for messages."""

from __future__ import annotations

from torch import nn

_WRAPPING = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "lightning_memo.parallel.tensor.module_styles",
)


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class as its author wrote it.

    FSDP2, DDP's replicate and tensor parallelism give modules a class of their own (`FSDPLlamaDecoderLayer`), derived
    from theirs.
    """
    for kind in type(module).__mro__:
        if not any(each.__module__.startswith(_WRAPPING) for each in (kind, *kind.__bases__)):
            return kind.__name__
    return type(module).__name__
