"""Checkpoints of sharded training: every rank writes its part, and any topology reads them.

The layout is Lightning's: a folder of `torch.distributed.checkpoint` files, with all else in `meta.pt`, so
`python -m lightning.pytorch.utilities.consolidate_checkpoint` reads it. Optimizer state goes by names of parameters;
which rank held what is forgotten. A folder is a pickle, as a file is: load only those that you trust.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from lightning_memo.parallel.checkpoints import atomic_replace
from lightning_memo.parallel.checkpoints.open_checkpoint import (
    REST_FILE,
    CheckpointSource,
    check_complete,
    open_checkpoint,
)
from lightning_memo.parallel.run_on_ranks import is_first_rank, on_every_rank, on_first_rank

Sizes = Mapping[str, torch.Size | None]
"""Of a state's tensors, by name; None where something else is saved."""

_SHOWN = 3  # names in an error
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and checkpoint_wrapper: part of no name


def sharded_model_state(model: nn.Module) -> dict[str, Any]:
    """Returns the model's state by names, sharded as it is and where it is: saving copies tensor by tensor."""
    return get_model_state_dict(model)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state as it is, with the names of parameters in the place of their numbers.

    torch's `get_optimizer_state_dict` does so, too, but would have an optimizer without state take a step.

    Raises:
        ValueError: The optimizer holds a parameter that is not the model's.
    """
    names = _names(model, optimizer)
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[p]: dict(state) for p, state in optimizer.state.items()}, "param_groups": groups}


def save_sharded(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Writes a checkpoint, each rank its part, and puts it in the place of what is there; all ranks call it.

    A reader sees the old checkpoint or the new one, and a killed save leaves one that :func:`load_sharded` finds.

    Args:
        checkpoint: Checkpoint as Lightning passes it to `Strategy.save_checkpoint`, with "state_dict" from
            :func:`sharded_model_state` and "optimizer_states" from :func:`optimizer_state`. Other entries are written
            by rank 0.
        path: Folder to be, on a file system that all ranks share.

    Raises:
        OSError: A rank could not write; raised on all, and nothing is replaced.
        ValueError: `path` is a folder of other things, or remote.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    state = {"state_dict": checkpoint["state_dict"]}
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    target = on_first_rank(lambda: _target(path))
    unfinished = on_first_rank(lambda: atomic_replace.begin(target))
    try:
        on_every_rank(lambda: _write(state, rest, unfinished))
        on_first_rank(lambda: atomic_replace.commit(unfinished, target))
    except Exception:
        if is_first_rank():
            atomic_replace.abort(target)
        raise


def load_sharded(
    path: str | Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint of any topology into a model of any other; all ranks call it, or one process alone.

    Args:
        path: A folder that :func:`save_sharded` wrote, or a file that one process wrote.
        model: Its parameters may be DTensors of any mesh, or plain.
        optimizers: Those of the saved run, in the same order; none reads the weights only.
        strict: Refuse names that only one of model and checkpoint has.
        weights_only: As `torch.load` takes it.

    Returns:
        The rest of the checkpoint: all but weights and optimizer states.

    Raises:
        ValueError: There is no checkpoint, or it is incomplete, or of another model or optimizer.
    """
    found = on_first_rank(lambda: existing_checkpoint(path))
    return on_every_rank(lambda: _read(found, model, optimizers, strict, weights_only))


def existing_checkpoint(path: str | Path) -> Path:
    """Returns `path`, or its predecessor where a save was killed just when the new one took its place.

    Raises:
        ValueError: There is neither.
    """
    found = atomic_replace.find_complete(Path(path))
    if found is None:
        raise ValueError(f"{path}: no such checkpoint; give the folder or file of one")
    if found != Path(path) and is_first_rank():
        warnings.warn(f"{path}: a save was interrupted; taking the checkpoint before it, {found}", stacklevel=2)
    return found


def remove_checkpoint(path: str | Path) -> None:
    """Removes a checkpoint, folder or file, such that nobody sees half of it; rank 0 calls it."""
    atomic_replace.remove(Path(path))


def tensor_sizes(state: Mapping[str, Any]) -> Sizes:
    """Sizes of the tensors of a state dict, by name."""
    return {name: value.size() if isinstance(value, Tensor) else None for name, value in state.items()}


def refuse_other_model(path: str | Path, saved: Sizes, own: Sizes, strict: bool) -> None:
    """Refuses the weights of a model that has others.

    Args:
        path: Of the checkpoint.
        saved: What it holds.
        own: What the model has.
        strict: Refuse names that only one of them has.

    Raises:
        ValueError: Names or sizes differ; one line.
    """
    if strict:
        _refuse(Path(path), "the model", missing=own.keys() - saved.keys(), unexpected=saved.keys() - own.keys())
    for name, size in own.items():
        theirs = saved.get(name)
        if size is not None and theirs is not None and theirs != size:
            raise ValueError(
                f"{path}: of another model: {name} is {list(theirs)} in the checkpoint and {list(size)} in the model"
            )


# ---- saving


def _target(path: str | Path) -> Path:
    if "://" in str(path):
        raise ValueError(f"{path}: sharded checkpoints need a local path, or a mounted one")
    target = Path(path).absolute()  # `resolve` would replace what a link points to
    is_ours = any((target / name).is_file() for name in (REST_FILE, ".metadata"))
    if target.is_dir() and not is_ours and any(target.iterdir()):
        raise ValueError(f"{path}: is a folder of other things; give a new name")
    return target


def _write(state: dict[str, Any], rest: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # one process may be intended
        metadata = dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    if is_first_rank():
        torch.save(rest, folder / REST_FILE)
        check_complete(folder, metadata)


# ---- loading


def _read(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    source = open_checkpoint(path, weights_only)
    _read_model(source, model, strict)
    for index, optimizer in enumerate(optimizers):
        _read_optimizer(source, f"optimizer_{index}", model, optimizer)
    return source.rest


def _read_model(source: CheckpointSource, model: nn.Module, strict: bool) -> None:
    own = get_model_state_dict(model)
    saved = {path[1]: entry for path, entry in source.entries("state_dict").items()}
    sizes = {name: entry.size if isinstance(entry, TensorStorageMetadata) else None for name, entry in saved.items()}
    refuse_other_model(source.path, sizes, tensor_sizes(own), strict)
    shared = {name: value for name, value in own.items() if name in saved}
    read = source.read({("state_dict", name): value for name, value in shared.items()})
    # The tensors are the model's own. This is for modules that do more on loading, and for other values.
    set_model_state_dict(
        model, {path[1]: value for path, value in read.items()}, options=StateDictOptions(strict=False)
    )


def _read_optimizer(source: CheckpointSource, root: str, model: nn.Module, optimizer: Optimizer) -> None:
    groups = _read_groups(source, root)
    positions = _positions(source.path, groups, model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    into = {path: _like(entry, parameters[positions[path[2]]]) for path, entry in source.entries(root, "state").items()}
    state: dict[int, dict[str, Any]] = {}
    for (_, _, parameter, *keys), value in source.read(into).items():
        inner = state.setdefault(positions[parameter], {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    numbers = iter(range(len(parameters)))
    merged = [
        {**own, **saved, "params": [next(numbers) for _ in own["params"]]}
        for own, saved in zip(optimizer.param_groups, groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def _read_groups(source: CheckpointSource, root: str) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for path, value in source.read(dict.fromkeys(source.entries(root, "param_groups"))).items():
        groups.setdefault(path[2], {})[path[3]] = value
    if not groups:
        raise ValueError(f"{source.path}: holds no {root}: saved with fewer optimizers, or with weights only")
    return [groups[index] for index in sorted(groups)]


def _positions(path: Path, groups: list[dict[str, Any]], model: nn.Module, optimizer: Optimizer) -> dict[Any, int]:
    """Maps what stands for a parameter in the checkpoint, name or number, to its number in the optimizer."""
    saved = [group["params"] for group in groups]
    names = _names(model, optimizer)
    own = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    sizes, own_sizes = ([len(group) for group in side] for side in (saved, own))
    if sizes != own_sizes:
        raise ValueError(
            f"{path}: of another optimizer: groups of {sizes} parameters in the checkpoint, of {own_sizes} here"
        )
    if any(isinstance(key, int) for group in saved for key in group):  # of one process: numbers in the groups' order
        return {key: position for position, key in enumerate(key for group in saved for key in group)}
    for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        _refuse(path, f"the optimizer's group {number}", missing={*ours} - {*theirs}, unexpected={*theirs} - {*ours})
    return {name: position for position, name in enumerate(name for group in own for name in group)}


def _like(entry: Any, parameter: Tensor) -> Tensor | None:
    """A tensor to read a state into: sharded as its parameter, if it has the shape of that."""
    if isinstance(entry, TensorStorageMetadata) and entry.size == parameter.size() and parameter.ndim:
        return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return None


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    names = {
        p: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name, p in model.named_parameters()
    }
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {list(p.shape)} that is not the model's: make it after "
                    "the model is sharded, from the model's parameters"
                )
    return names


def _refuse(path: Path, of: str, missing: Set[str], unexpected: Set[str]) -> None:
    if missing or unexpected:
        raise ValueError(
            f"{path}: of another model: {_list(missing)} of {of} not in the checkpoint, "
            f"{_list(unexpected)} of the checkpoint not in {of}"
        )


def _list(names: Set[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
