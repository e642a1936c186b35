"""Sharded checkpoints: every rank writes its part, and any parallel layout can read them.

The layout is that of Lightning, a folder of `torch.distributed.checkpoint` files with other entries in `meta.pt`, so
`python -m lightning.pytorch.utilities.consolidate_checkpoint` reads it. Optimizer state is stored by parameter name,
independent of ranks. A folder contains pickles, as a checkpoint file does, and is read as safely: with
`weights_only=False`, whoever wrote it can run code.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.parallel.open_checkpoint import (
    METADATA_FILE,
    REST_FILE,
    CheckpointSource,
    ChecksummedFile,
    missing_part,
    open_checkpoint,
    write_checksums,
)
from lightning_memo.parallel.ranks import gather, is_first_rank, on_every_rank, on_first_rank
from lightning_memo.utils.files import commit, explained, find_complete, previous_of, remove, unfinished

WHOLE_NAMES = "_lightning_memo_whole_names"
"""Attribute of a module that has lost the weights of other stages of a pipeline: its `WholeNames`."""

_OTHER_GROUPS = (
    "pipeline_parallel_size: the optimizer's groups differ between stages ({}): make the same groups on all of them, "
    'with {{"params": [], ...}} where a stage has none of their weights'
)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and checkpoint_wrapper


@dataclass(frozen=True)
class WholeNames:
    """Names of the parameters of a module before it lost those of other stages.

    Attributes:
        place: The place of each name in the order of `named_parameters()`.
        of_shared: The first name of each weight with several, by its other names. The last stage may keep a tied weight
            under another name than the first one.
    """

    place: Mapping[str, int]
    of_shared: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> WholeNames:
        first = {p: name for name, p in module.named_parameters()}
        every = module.named_parameters(remove_duplicate=False)
        place = {_bare(name): number for number, name in enumerate(first.values())}
        return cls(place, {name: first[p] for name, p in every if name != first[p]})


def _names_of_parameters(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Returns the names of the model's parameters.

    Raises:
        ValueError: The optimizer has a parameter that is not the model's.
    """
    whole: WholeNames | None = getattr(model, WHOLE_NAMES, None)
    shared = {} if whole is None else whole.of_shared
    names = {p: _bare(shared.get(name, name)) for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {list(p.shape)} that is not the model's: make it after "
                    "the model is sharded, from the model's parameters"
                )
    return names


def _names_of_all(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of the parameters of each group on all ranks. All ranks call this.

    The order is that of the optimizer, or that of the model if stages of a pipeline have different parameters. A tied
    weight that stages have in different groups is in that of its first name. Stages may have added groups meanwhile.
    """
    whole: WholeNames | None = getattr(model, WHOLE_NAMES, None)
    names, own = _names_of_parameters(model, optimizer), {p: _bare(name) for name, p in model.named_parameters()}
    everyones = gather([[(names[p], own[p]) for p in group["params"]] for group in optimizer.param_groups])
    homes = {name: n for of in everyones for n, group in enumerate(of) for name, other in group if name == other}
    groups = [
        list(dict.fromkeys(name for name, _ in itertools.chain(*of_group) if homes.get(name, number) == number))
        for number, of_group in enumerate(itertools.zip_longest(*everyones, fillvalue=()))
    ]
    return groups if whole is None else [sorted(group, key=whole.place.__getitem__) for group in groups]


def _settings_of_all(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of each group, those of the first stage of a pipeline that has it. All ranks call this.

    Warns if other stages have other ones, as some optimizers estimate settings.
    """
    own = _settings(optimizer)
    if getattr(model, WHOLE_NAMES, None) is None:
        return own
    found = []
    for number, groups in enumerate(itertools.zip_longest(*gather(own))):
        first, *others = [settings for settings in groups if settings is not None]
        found.append(first)
        other = {key for settings in others for key in settings if str(settings[key]) != str(first.get(key))}
        if other:
            rank_zero_warn(
                f"lightning_memo: {', '.join(sorted(other))} of group {number} of the optimizer differ between the "
                "stages of the pipeline, and the checkpoint has those of the first one"
            )
    return found


def check_groups(optimizer: Optimizer) -> None:
    """Check that groups of an optimizer have the same settings on all stages of a pipeline. All ranks call this.

    A checkpoint, and a learning rate schedule in it, have one list of groups for all stages.

    Raises:
        ValueError: Numbers or settings of groups differ.
    """
    everyones = gather([{key: str(value) for key, value in group.items()} for group in _settings(optimizer)])
    for rank, others in enumerate(everyones):
        if others != everyones[0]:
            raise ValueError(_OTHER_GROUPS.format(f"rank 0: {_short(everyones[0])}; rank {rank}: {_short(others)}"))


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _short(groups: list[dict[str, str]]) -> str:
    return f"{len(groups)} groups, lr " + ", ".join(group.get("lr", "none") for group in groups)


def _check_order(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Check that it is known which of the optimizer's states in a file of one process belong to which parameter.

    They have numbers, in the order of the optimizer of that process. A stage of a pipeline has some of the parameters,
    and only knows the order of the others if it is the model's.

    Raises:
        ValueError: The optimizer of a stage has another order.
    """
    whole: WholeNames | None = getattr(model, WHOLE_NAMES, None)
    if whole is None:
        return
    names = _names_of_parameters(model, optimizer)
    tied = {*whole.of_shared.values()}  # which the last stage has in the place of their other name
    for group in optimizer.param_groups:
        own = [whole.place[names[p]] for p in group["params"] if names[p] not in tied]
        if own != sorted(own):
            raise ValueError(
                f"{path}: the file of one process, in which optimizer states have numbers, and the optimizer has its "
                "parameters in another order than the model, so that the stages of a pipeline cannot tell whose they "
                "are: give the optimizer the order of model.parameters(), go on without a pipeline, or from a "
                "checkpoint that several processes saved"
            )


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


Sizes = Mapping[str, torch.Size | None]
"""Sizes of the tensors of a state dict by name; None for other values."""

_SHOWN = 3  # names in an error


def sharded_model_state(model: nn.Module) -> dict[str, Any]:
    """Returns the model's state by name, with the sharding and device of its tensors. Saving copies them one by one."""
    return get_model_state_dict(model)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state with parameter names instead of numbers. All ranks call it.

    Groups have the parameters of all ranks. torch's `get_optimizer_state_dict` does the same for equal parameters on
    all ranks, but makes an optimizer without state take a step.

    Raises:
        ValueError: The optimizer has a parameter that is not the model's.
    """
    names = _names_of_parameters(model, optimizer)
    everyones = _names_of_all(model, optimizer)
    settings = _settings_of_all(model, optimizer)
    groups = [{**group, "params": of_all} for group, of_all in zip(settings, everyones, strict=True)]
    return {"state": {names[p]: dict(state) for p, state in optimizer.state.items()}, "param_groups": groups}


def save_sharded(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Writes a checkpoint and atomically replaces an existing one. All ranks call it, and each writes its part.

    Readers see the old checkpoint or the new one. After a killed save, :func:`load_sharded` finds one of them.

    Args:
        checkpoint: Checkpoint as Lightning passes it to `Strategy.save_checkpoint`, with "state_dict" from
            :func:`sharded_model_state` and "optimizer_states" from :func:`optimizer_state`. Other entries are written
            by rank 0.
        path: Folder to write, on a file system that all ranks share.

    Raises:
        OSError: A rank could not write. It is raised on all ranks, and nothing is replaced.
        ValueError: `path` is a folder with other contents, or remote.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    state = {"state_dict": checkpoint["state_dict"]}
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        state[_optimizer_name(index)] = optimizer
    if "://" in str(path):
        raise ValueError(f"{path}: sharded checkpoints need a local path, or a mounted one")
    target = on_first_rank(lambda: replaceable(path))
    with contextlib.ExitStack() as stack:
        folder = on_first_rank(lambda: stack.enter_context(unfinished(target)))
        files = _Files(target)
        on_every_rank(lambda: _write(state, rest, folder, files))
        checksums = {name: checksum for own in gather(files.checksums) for name, checksum in own.items()}
        on_first_rank(lambda: _finish(checksums, folder, target))


def load_sharded(
    path: str | Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint of any parallel layout into a model of any other. All ranks call it, or a single process.

    Args:
        path: Folder that :func:`save_sharded` wrote, or file that one process wrote.
        model: Model whose parameters are DTensors on any mesh, or plain tensors.
        optimizers: Optimizers in the order of the saved run; empty to read the weights only.
        strict: Whether names that only the model or only the checkpoint has are an error.
        weights_only: As for `torch.load`.

    Returns:
        Entries of the checkpoint other than weights and optimizer states.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is incomplete, or it is of another model or optimizer.
    """
    source = open_existing(path, weights_only)
    read_model(source, model, strict)
    for index, optimizer in enumerate(optimizers):
        read_optimizer(source, _optimizer_name(index), model, optimizer)
    return source.rest


def open_existing(path: str | Path, weights_only: bool | None = None) -> CheckpointSource:
    """Opens a checkpoint, whose weights and optimizer states are read later. All ranks call it, or a single process.

    Args:
        path: As for :func:`load_sharded`.
        weights_only: As for `torch.load`.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is incomplete.
    """
    found = on_first_rank(lambda: existing_checkpoint(path))
    # Each rank checks a part of the files when it opens the checkpoint, and no rank reads before all have.
    return on_every_rank(lambda: open_checkpoint(found, weights_only))


def read_model(source: CheckpointSource, model: nn.Module, strict: bool = True) -> None:
    """Reads the weights of a checkpoint into a model. All ranks call it, or a single process.

    Args:
        source: The opened checkpoint.
        model: Model whose parameters are DTensors on any mesh, or plain tensors.
        strict: Whether names that only the model or only the checkpoint has are an error.

    Raises:
        ValueError: The checkpoint is of another model.
    """
    sizes = {name: size for own in gather(tensor_sizes(get_model_state_dict(model))) for name, size in own.items()}
    on_every_rank(lambda: _read_model(source, model, sizes, strict))


def read_optimizer(source: CheckpointSource, name: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Reads the state of an optimizer. All ranks call it, or a single process.

    Args:
        source: The opened checkpoint.
        name: Name of the optimizer in the checkpoint; see :func:`optimizer_names`.
        model: Model of which the optimizer has parameters.
        optimizer: The optimizer.

    Raises:
        ValueError: The checkpoint is of another optimizer.
    """
    groups = _names_of_all(model, optimizer)
    on_every_rank(lambda: _read_optimizer(source, name, model, optimizer, groups))


def optimizer_names(source: CheckpointSource) -> list[str]:
    """Returns the names of the optimizers in a checkpoint, in the order of the saved run."""
    return list(itertools.takewhile(source.entries, map(_optimizer_name, itertools.count())))


def _optimizer_name(index: int) -> str:
    return f"optimizer_{index}"


def existing_checkpoint(path: str | Path) -> Path:
    """Returns `path`, or its predecessor if a save was killed while it replaced the old checkpoint.

    Raises:
        FileNotFoundError: Neither exists.
    """
    found = find_complete(Path(path))
    if found is None:
        raise FileNotFoundError(f"{path}: no such checkpoint; give the folder or file of one")
    if found != Path(path) and is_first_rank():
        warnings.warn(f"{path}: a save was interrupted; taking the checkpoint before it, {found}", stacklevel=2)
    return found


def remove_checkpoint(path: str | Path) -> None:
    """Atomically removes a checkpoint folder or file. Only rank 0 calls it."""
    remove(Path(path))


def tensor_sizes(state: Mapping[str, Any]) -> Sizes:
    """Returns the sizes of the tensors of a state dict by name. Extra states of modules may have others each time."""
    sized = {name for name, value in state.items() if isinstance(value, Tensor) and not _is_extra(name)}
    return {name: value.size() if name in sized else None for name, value in state.items()}


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def refuse_other_model(path: str | Path, saved: Sizes, own: Sizes, strict: bool) -> None:
    """Raises if a checkpoint's weights do not fit the model.

    Args:
        path: Path of the checkpoint.
        saved: Sizes of the tensors in the checkpoint.
        own: Sizes of the tensors of the model.
        strict: Whether names that only one of them has are an error.

    Raises:
        ValueError: Names or sizes differ. The message is one line.
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


def replaceable(path: str | Path) -> Path:
    """Returns the absolute path of a checkpoint to write.

    Raises:
        ValueError: `path` is a folder with other contents.
    """
    target = Path(path).absolute()  # `resolve` would replace what a link points to
    is_ours = any((target / name).is_file() for name in (REST_FILE, METADATA_FILE))
    if target.is_dir() and not is_ours and any(target.iterdir()):
        raise ValueError(f"{path}: is a folder of other things; give a new name")
    return target


class _Files(FileSystem):
    """Creates the files of a checkpoint, and computes their checksums meanwhile.

    Args:
        target: The final path of the checkpoint, for messages.
    """

    def __init__(self, target: Path) -> None:
        super().__init__()
        self.target = target
        self.checksums: dict[str, int] = {}

    @contextlib.contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with explained(self.target), ChecksummedFile(path) as stream:
            yield stream
        self.checksums[path.name] = stream.checksum

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.checksums[new_path.name] = self.checksums.pop(path.name)


def _write(state: dict[str, Any], rest: dict[str, Any], folder: Path, files: _Files) -> None:
    writer = dcp.FileSystemWriter(folder, sync_files=False)  # the files flush themselves to the disk
    writer.fs = files
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # a single process is intended
        metadata = dcp.save(state, storage_writer=writer)
    if is_first_rank():
        with files.create_stream(folder / REST_FILE, "wb") as file:
            torch.save(rest, file)
        if (reason := missing_part(folder, metadata)) is not None:
            raise ValueError(
                f"{files.target}: incomplete checkpoint: {reason}; all processes must write to one file system"
            )


def _finish(checksums: Mapping[str, int], folder: Path, target: Path) -> None:
    with explained(target):
        write_checksums(folder, checksums)
    commit(folder, target)
    remove(previous_of(target))  # of a killed process


# ---- loading


def _read_model(source: CheckpointSource, model: nn.Module, of_all: Sizes, strict: bool) -> None:
    own = get_model_state_dict(model)
    saved = {path[1]: entry for path, entry in source.entries("state_dict").items()}
    sizes = {name: entry.size if isinstance(entry, TensorStorageMetadata) else None for name, entry in saved.items()}
    refuse_other_model(source.path, sizes, of_all, strict)
    shared = {name: None if _is_extra(name) else value for name, value in own.items() if name in saved}
    read = source.read({("state_dict", name): value for name, value in shared.items()})
    # The tensors are already the model's own. This call is for modules with load hooks and for other values.
    set_model_state_dict(
        model, {path[1]: value for path, value in read.items()}, options=StateDictOptions(strict=False)
    )


def _read_optimizer(
    source: CheckpointSource, root: str, model: nn.Module, optimizer: Optimizer, everyones: list[list[str]]
) -> None:
    groups = _read_groups(source, root)
    if any(isinstance(key, int) for group in groups for key in group["params"]):
        _check_order(source.path, model, optimizer)
    positions = _positions(source.path, groups, everyones, _names_of_parameters(model, optimizer), optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {path: entry for path, entry in source.entries(root, "state").items() if path[2] in positions}
    into = {path: _like(entry, parameters[positions[path[2]]]) for path, entry in entries.items()}
    state: dict[int, dict[str, Any]] = {}
    for (_, _, parameter, *keys), value in source.read(into).items():
        inner = state.setdefault(positions[parameter], {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    numbers = iter(range(len(parameters)))
    merged = [
        {**own, **saved, "params": [next(numbers) for _ in own["params"]]}
        for own, saved in zip(optimizer.param_groups, groups, strict=False)  # later ones are of other stages
    ]
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def _read_groups(source: CheckpointSource, root: str) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for path, value in source.read(dict.fromkeys(source.entries(root, "param_groups"))).items():
        groups.setdefault(path[2], {})[path[3]] = value
    if not groups:
        raise ValueError(f"{source.path}: holds no {root}: saved with fewer optimizers, or with weights only")
    return [groups[index] for index in sorted(groups)]


def _positions(
    path: Path,
    groups: list[dict[str, Any]],
    everyones: list[list[str]],
    names: Mapping[Tensor, str],
    optimizer: Optimizer,
) -> dict[Any, int]:
    """Maps the name or number of each parameter in the checkpoint that this rank has to its number in the optimizer."""
    saved = [group["params"] for group in groups]
    sizes, own_sizes = ([len(group) for group in side] for side in (saved, everyones))
    if sizes != own_sizes:
        raise ValueError(
            f"{path}: of another optimizer: groups of {sizes} parameters in the checkpoint, of {own_sizes} here"
        )
    if any(isinstance(key, int) for group in saved for key in group):  # single process: numbers in group order
        of_keys = dict(zip(itertools.chain(*saved), itertools.chain(*everyones), strict=True))
    else:
        for number, (theirs, ours) in enumerate(zip(saved, everyones, strict=True)):
            _refuse(
                path, f"the optimizer's group {number}", missing={*ours} - {*theirs}, unexpected={*theirs} - {*ours}
            )
        of_keys = {name: name for name in itertools.chain(*everyones)}
    own = {names[p]: position for position, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    return {key: own[name] for key, name in of_keys.items() if name in own}


def _like(entry: Any, parameter: Tensor) -> Tensor | None:
    """Returns a tensor to read a state into, sharded like its parameter; None if the shapes differ."""
    if isinstance(entry, TensorStorageMetadata) and entry.size == parameter.size() and parameter.ndim:
        return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return None


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
