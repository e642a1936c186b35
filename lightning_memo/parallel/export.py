"""Models of any topology as plain Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_memo.parallel import publish
from lightning_memo.parallel.agree import is_first_rank


def gather_state(model: nn.Module) -> dict[str, Any] | None:
    """Gathers a sharded model's state in rank 0's host memory, one tensor after the other; all ranks call it.

    Returns:
        On rank 0, or in the only process, full tensors by names; None on other ranks.
    """
    # `full_state_dict` with `cpu_offload` gathers a tensor, copies it to rank 0's host memory and lets it go.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return state if is_first_rank() else None


def export_huggingface(
    model: nn.Module, folder: str | Path, state_dict: dict[str, Any] | None = None, merge: bool = False
) -> None:
    """Writes a folder that `from_pretrained` reads: safetensors, configuration and generation configuration.

    Of a PEFT model the adapter is written, or with `merge` the whole model with the adapter added to its weights.
    One process calls it. The folder appears when it is complete. A tokenizer is not included.

    Args:
        model: Hugging Face model, or PEFT's around one; it may be sharded if `state_dict` is given.
        folder: New, or empty.
        state_dict: Full tensors, from :func:`gather_state`; None takes the model's own.
        merge: Changes `model`: its adapter becomes part of its weights.

    Raises:
        ValueError: The model is sharded, or no Hugging Face model, or has no adapter to merge; or `folder` is not free.
    """
    target = check_free(folder)
    if not hasattr(model, "save_pretrained"):
        raise ValueError(f"{type(model).__name__} is no Hugging Face model: give the one that is in it")
    if merge:
        model, state_dict = _merged(model, state_dict), None
    if state_dict is None and _is_sharded(model):
        raise ValueError("the model is sharded: give the state_dict that gather_state returns")
    unfinished = publish.begin(target)
    try:
        with _cache_in_use(model):
            # A copy, because tensors are taken out of it as they are written.
            model.save_pretrained(unfinished, state_dict=None if state_dict is None else dict(state_dict))
        publish.publish(unfinished, target)
    except BaseException:
        publish.abandon(target)
        raise


def check_free(folder: str | Path) -> Path:
    """Returns the absolute path of a folder that can be made.

    Raises:
        ValueError: There is something already.
    """
    target = Path(folder).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{folder}: exists already; give a new or an empty folder")
    return target


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _merged(model: nn.Module, state_dict: dict[str, Tensor] | None) -> nn.Module:
    if not hasattr(model, "merge_and_unload"):
        raise ValueError("merge: the model has no adapter")
    if _is_sharded(model):
        raise ValueError("merge: the model is sharded; save a checkpoint, then python -m lightning_memo.export --merge")
    if state_dict is not None:
        model.load_state_dict(state_dict)
    merged: nn.Module = model.merge_and_unload()
    return merged


@contextmanager
def _cache_in_use(model: nn.Module) -> Iterator[None]:
    """Training turns the key-value cache off; whoever generates with the exported model wants it."""
    configs = [getattr(model, name, None) for name in ("config", "generation_config")]
    off = [config for config in configs if getattr(config, "use_cache", None) is False]
    for config in off:
        config.use_cache = True
    try:
        yield
    finally:
        for config in off:
            config.use_cache = False
