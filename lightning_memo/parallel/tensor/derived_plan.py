"""Derives which modules of a model are divided over tensor-parallel ranks, where its `tp_plan` does not say it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_memo.parallel.tensor.derived_regions import Region, derive_regions
from lightning_memo.parallel.tensor.experts import find_experts
from lightning_memo.parallel.tensor.linear_layers import base_layer, is_linear
from lightning_memo.parallel.tensor.sample_runs import capture_calls, kinds_of_layers
from lightning_memo.utils.find_layers import find_stacks


@dataclass(frozen=True, slots=True)
class DerivedPlan:
    """How the layers of a model are divided.

    Attributes:
        regions: The parts of layers that are divided.
        experts: Names of experts that are divided.
        whole: Linear layers that stay whole although no part of a layer needs them so, with `*` for numbers.
    """

    regions: tuple[Region, ...]
    experts: tuple[str, ...]
    whole: tuple[str, ...]

    def styles(self) -> dict[str, str]:
        """Returns the styles of modules, as a plan names them."""
        styles = dict.fromkeys(self.experts, "moe_tp_experts")
        for region in self.regions:
            styles |= dict.fromkeys(region.colwise, "colwise") | {region.rowwise: "rowwise"}
        return styles


def derive_plan(model: nn.Module, named: Mapping[str, nn.Module], ranks: int) -> DerivedPlan:
    """Derive how the layers of a Hugging Face model are divided; see Note: [A region, and its proof].

    Args:
        model: The model, with any weights. It is not changed.
        named: Modules by name, among them those of the model.
        ranks: Number of ranks.

    Raises:
        ValueError: No division could be proven. The message says why.
    """
    layers = [layer for stack in find_stacks(model) for layer in stack.layers]
    kinds = kinds_of_layers(layers)
    try:
        calls = capture_calls(model, kinds)
    except Exception as error:  # whatever a model raises that needs more than token ids
        told = " ".join(str(error).split())[:100] or type(error).__name__
        raise ValueError(f"a trial run with token ids alone fails ({told})") from error
    names = {m: name for name, m in named.items()}
    regions: dict[str, Region] = {}
    shared = _in_several(kinds)
    for first, *others in kinds:
        found = derive_regions(calls[first], ranks) if first in calls else []
        found = [r for r in found if shared.isdisjoint(map(first.get_submodule, (*r.colwise, r.rowwise)))]
        for layer in (first, *others):
            renamed = [region.renamed(_names_in(layer, names)) for region in found]
            regions |= {region.rowwise: region for region in renamed}
    experts = [names[m] for m in find_experts(model).values() if _is_divisible(m, names, named, layers, ranks)]
    if not (regions or experts):
        raise ValueError("no division of its layers gives what they compute as a whole")
    plan = DerivedPlan(tuple(regions.values()), tuple(experts), ())
    return DerivedPlan(plan.regions, plan.experts, tuple(_whole(plan, layers, names)))


def _in_several(kinds: Iterable[Sequence[nn.Module]]) -> set[nn.Module]:
    """Returns modules that layers of several kinds call. What is proven in one of them need not hold in the others."""
    counts = Counter(m for kind in kinds for m in {m for layer in kind for m in layer.modules()})
    return {m for m, count in counts.items() if count > 1}


def _names_in(layer: nn.Module, names: Mapping[nn.Module, str]) -> Callable[[str], str]:
    """Returns a function from names of modules and parameters in a layer to those in the model."""

    def name(path: str) -> str:
        try:
            return names[layer.get_submodule(path)]
        except AttributeError:  # a parameter
            holder, _, last = path.rpartition(".")
            return f"{names[layer.get_submodule(holder)]}.{last}"

    return name


def _is_divisible(
    experts: nn.Module,
    names: Mapping[nn.Module, str],
    named: Mapping[str, nn.Module],
    layers: list[nn.Module],
    ranks: int,
) -> bool:
    """Whether ranks can divide experts, and the module around them has no weights of its own."""
    name = names[experts]
    mixture = named.get(name.rpartition(".")[0])
    around = mixture is not None and mixture not in layers and not any(True for _ in mixture.parameters(recurse=False))
    return around and "base_layer" not in name.split(".") and int(experts.num_experts) % ranks == 0  # type: ignore


def _whole(plan: DerivedPlan, layers: list[nn.Module], names: Mapping[nn.Module, str]) -> list[str]:
    divided = plan.styles()
    blocks = tuple(f"{region.block}." for region in plan.regions if region.block)
    found: dict[str, None] = {}
    for layer in layers:
        for m in layer.modules():
            name = names.get(m, "")
            if is_linear(base_layer(m)) and name and name not in divided and not name.startswith(blocks):
                found[re.sub(r"\.\d+\.", ".*.", name)] = None
    return list(found)
