"""Tensor parallelism: the weights of each layer are split over ranks, and with sequence parallelism the tokens too.

Note: [Who communicates when]
Per attention or MLP block: forward, the outputs of its last projection are added up; backward, the gradients of its
input. Without sequence parallelism each is one all-reduce; with it, forward gathers the block's input and
reduce-scatters its output, and backward does the reverse (Korthikanti et al., "Reducing Activation Recomputation",
section 4.2.2). `tensor_plan` says what is split, `assign_styles` how each module computes then, and `styles` does it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from lightning_memo.parallel.tensor.assign_styles import assign_styles
from lightning_memo.parallel.tensor.tensor_plan import TensorPlan


def shard_tensors(
    module: nn.Module,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    loss_parallel: bool,
    plan: Mapping[str, str] | None = None,
) -> None:
    """Split a model's weights over ranks, in place; every parameter becomes a `DTensor` on `mesh`.

    What travels between modules stays plain local tensors. With sequence parallelism these are, between the blocks of
    layers, `1 / ranks` of the tokens; ids and positions are given for all tokens, and logits come out for all.

    Args:
        module: The model, or what holds it: a Hugging Face model, perhaps with LoRA by peft, or any module with `plan`.
            The same weights on all ranks: each takes its part, nothing is sent.
        mesh: The ranks, 1-D.
        sequence_parallel: Split the tokens between blocks. Their number must be a multiple of the ranks.
        loss_parallel: The logits are a `DTensor` split in the vocabulary, for the loss inside of torch's
            `loss_parallel()`; else every rank has them whole.
        plan: Style by dotted name, whole or from some dot on, `*` for a layer's number: `"colwise"`, `"rowwise"`,
            `"colwise_gather_output"`, `"rowwise_split_input"` or `"replicated"`. It goes before the `tp_plan` of a
            Hugging Face model. Attention of a plain model has to take the number of its heads from the projections'
            outputs.

    Raises:
        ValueError: The model has no plan, or cannot be split by it evenly.
    """
    tensor_plan = TensorPlan(module, plan)
    tensor_plan.check_sizes(mesh.size())
    styles = assign_styles(tensor_plan, sequence_parallel, loss_parallel)
    tied = _shared_parameters(module)
    for name, style in styles.items():
        # One module at a time: a name may hold characters that patterns of parallelize_module would take for wildcards.
        parallelize_module(module.get_submodule(name), mesh, style, src_data_rank=None)
    _tie_again(module, tied)


def check_divisible(module: nn.Module, ranks: int, plan: Mapping[str, str] | None = None) -> None:
    """See that the weights of a model can be split evenly; needs no processes.

    Args:
        module: As for `shard_tensors`.
        ranks: Number of ranks.
        plan: As for `shard_tensors`.

    Raises:
        ValueError: They cannot; says what is in the way and which numbers of ranks would do.
    """
    TensorPlan(module, plan).check_sizes(ranks)


def _shared_parameters(module: nn.Module) -> list[tuple[str, str]]:
    """Names of parameters that are another one too, with the other's name, which comes first."""
    first: dict[int, str] = {}
    shared = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            shared.append((name, other))
    return shared


def _tie_again(module: nn.Module, tied: list[tuple[str, str]]) -> None:
    for name, other in tied:
        parameter, own = module.get_parameter(other), module.get_parameter(name)
        assert isinstance(parameter, DTensor) and isinstance(own, DTensor)
        if parameter.placements != own.placements:
            raise ValueError(
                f"tensor_parallel_size: {name} and {other} are one parameter, but the plan splits them as "
                f"{own.placements[0]} and {parameter.placements[0]}: give both the same style"
            )
        holder, _, last = name.rpartition(".")
        module.get_submodule(holder)._parameters[last] = parameter
