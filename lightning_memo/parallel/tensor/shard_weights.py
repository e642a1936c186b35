"""Tensor parallelism: splits the weights of each layer over ranks, and with sequence parallelism the tokens, too.

Note: [Who communicates when]
In each attention or MLP block, forward sums the outputs of the last projection over the ranks, and backward sums the
gradients of the block's input. Without sequence parallelism each sum is one all-reduce. With it, forward gathers the
block's input and reduce-scatters its output, and backward does the reverse (Korthikanti et al., "Reducing Activation
Recomputation", section 4.2.2). `tensor_plan` reads what is split, `assign_styles` chooses a style for each module, and
`module_styles` implements the styles.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from lightning_memo.parallel.device_mesh import ExpertMeshes
from lightning_memo.parallel.tensor.assign_styles import assign_styles
from lightning_memo.parallel.tensor.divide_experts import divide_experts
from lightning_memo.parallel.tensor.tensor_plan import TensorPlan


def shard_tensors(
    module: nn.Module,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    loss_parallel: bool,
    plan: Mapping[str, str] | None = None,
    experts: ExpertMeshes | None = None,
) -> None:
    """Split a model's weights over ranks, in place. Every parameter becomes a `DTensor` on `mesh`.

    Modules pass plain local tensors to each other. With sequence parallelism each rank has `1 / ranks` of the tokens
    between blocks. Ids and positions are given for all tokens, and logits are returned for all tokens.

    Args:
        module: Hugging Face model, possibly with LoRA by peft, any module with `plan`, or a module that contains one.
            All ranks have the same weights. Each keeps its part, and nothing is sent.
        mesh: One-dimensional mesh of the ranks.
        sequence_parallel: Whether to split the tokens between blocks. Their number must be a multiple of the number of
            ranks.
        loss_parallel: Whether the logits are a `DTensor` split in the vocabulary, for a loss inside torch's
            `loss_parallel()`. Otherwise every rank has all logits.
        plan: Styles by dotted module name or a suffix of it, with `*` for a layer's number: `"colwise"`, `"rowwise"`,
            `"colwise_gather_output"`, `"rowwise_split_input"` or `"replicated"`. It takes precedence over the
            `tp_plan` of a Hugging Face model. Attention of another model has to derive its number of heads from the
            shapes of the projections' outputs.
        experts: Where experts are, if other ranks share them with those of `mesh`.

    Raises:
        ValueError: The model has no plan, or the plan does not split it evenly.
    """
    tensor_plan = TensorPlan(module, plan)
    tensor_plan.check_sizes(mesh.size())
    styles = assign_styles(tensor_plan, sequence_parallel, loss_parallel)
    tied = _shared_parameters(module)
    if experts is not None:
        for name, m in tensor_plan.experts.items():
            del styles[name]
            divide_experts([m], experts)
    for name, style in styles.items():
        # One module at a time: parallelize_module would read some characters of a name as wildcards.
        parallelize_module(module.get_submodule(name), mesh, style, src_data_rank=None)
    _tie_again(module, tied)


def check_divisible(module: nn.Module, ranks: int, plan: Mapping[str, str] | None = None) -> None:
    """Check that the weights of a model can be split evenly. Needs no process group.

    Args:
        module: As for `shard_tensors`.
        ranks: Number of ranks.
        plan: As for `shard_tensors`.

    Raises:
        ValueError: A size is not divisible. The message names it and the possible numbers of ranks.
    """
    TensorPlan(module, plan).check_sizes(ranks)


def _shared_parameters(module: nn.Module) -> list[tuple[str, str]]:
    """Returns the names of tied parameters, each with the first name of the same parameter."""
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
