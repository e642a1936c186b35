"""Names of the parameters of an optimizer, those of other stages of a pipeline included."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memo.parallel.ranks import gather

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


def names_of_parameters(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
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


def names_of_all(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of the parameters of each group on all ranks. All ranks call this.

    The order is that of the optimizer, or that of the model if stages of a pipeline have different parameters. A tied
    weight that stages have in different groups is in that of its first name. Stages may have added groups meanwhile.
    """
    whole: WholeNames | None = getattr(model, WHOLE_NAMES, None)
    names, own = names_of_parameters(model, optimizer), {p: _bare(name) for name, p in model.named_parameters()}
    everyones = gather([[(names[p], own[p]) for p in group["params"]] for group in optimizer.param_groups])
    homes = {name: n for of in everyones for n, group in enumerate(of) for name, other in group if name == other}
    groups = [
        list(dict.fromkeys(name for name, _ in itertools.chain(*of_group) if homes.get(name, number) == number))
        for number, of_group in enumerate(itertools.zip_longest(*everyones, fillvalue=()))
    ]
    return groups if whole is None else [sorted(group, key=whole.place.__getitem__) for group in groups]


def settings_of_all(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
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


def check_order(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Check that it is known which of the optimizer's states in a file of one process belong to which parameter.

    They have numbers, in the order of the optimizer of that process. A stage of a pipeline has some of the parameters,
    and only knows the order of the others if it is the model's.

    Raises:
        ValueError: The optimizer of a stage has another order.
    """
    whole: WholeNames | None = getattr(model, WHOLE_NAMES, None)
    if whole is None:
        return
    names = names_of_parameters(model, optimizer)
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
