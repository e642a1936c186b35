"""Divides the experts of mixture layers over data- and context-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from lightning_memo.parallel.device_mesh import ExpertMeshes
from lightning_memo.parallel.tensor.mixtures import Experts, is_stacked
from lightning_memo.utils.class_names import class_name


def find_experts(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the experts of the mixture layers of a model, by name."""
    return {name: m for name, m in module.named_modules() if is_stacked(m)}


def check_experts(module: nn.Module, experts: int, tensor: int) -> None:
    """Check that the experts of a model can be divided evenly. Needs no process group.

    Args:
        module: The model.
        experts: Expert-parallel size.
        tensor: Tensor-parallel size.

    Raises:
        ValueError: The model has no experts, they have adapters, or a number of experts is not divisible.
    """
    found = find_experts(module)
    if not found:
        raise ValueError(
            f"expert_parallel_size={experts}: {class_name(module)} has no experts with stacked weights, [experts, "
            "...], that get hidden states, choices and their weights: set expert_parallel_size=1"
        )
    common = math.gcd(*(int(m.num_experts) for m in found.values()))
    allowed = ", ".join(str(n) for n in range(1, common + 1) if common % (n * tensor) == 0)
    for name, m in found.items():
        if "base_layer" in name.split("."):
            raise ValueError(
                f"expert_parallel_size={experts}: {name} has an adapter on the weights of experts, which is not "
                "divided: leave it out, or set expert_parallel_size=1"
            )
        if m.num_experts % (experts * tensor):
            times = f" x tensor_parallel_size={tensor}" if tensor > 1 else ""
            raise ValueError(
                f"expert_parallel_size={experts}{times} does not divide num_experts of {name}={m.num_experts}: "
                f"expert_parallel_size can be {allowed or 'none: lower tensor_parallel_size'}"
            )


def divide_experts(experts: Iterable[nn.Module], meshes: ExpertMeshes) -> None:
    """Give each rank its experts, in place. The weights become `DTensor`s on `meshes.homes`.

    Args:
        experts: Experts, with the same weights on all ranks. Each keeps its part, and nothing is sent.
        meshes: Where the experts are.
    """
    for m in experts:
        parallelize_module(m, meshes.homes, Experts(meshes), src_data_rank=None)


def divided_experts(module: nn.Module) -> list[nn.Module]:
    """Returns the experts of a model that :func:`divide_experts` has divided, but for those of other stages."""
    divided = [m for m in module.modules() if isinstance(getattr(m, "tensor_style", None), Experts)]
    return [m for m in divided if any(True for _ in m.parameters())]
