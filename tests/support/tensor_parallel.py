"""Compares models whose weights are divided over tensor-parallel ranks with whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_memo.parallel.local_tensors import resolve_partial
from lightning_memo.parallel.tensor.shard_weights import shard_tensors

Gradients = dict[str, Tensor]


def randomise(model: nn.Module) -> nn.Module:
    """Make all parameters random, biases and norms too."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def step(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Gradients]:
    """A loss and all gradients, whole."""
    loss = model(**batch).loss
    assert type(loss) is Tensor
    loss.backward()
    resolve_partial(model.parameters())
    return loss.detach(), {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def whole(t: Tensor) -> Tensor:
    """An undivided copy."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def errors(got: Gradients, expected: Gradients, least: float = 0.0) -> dict[str, float]:
    """Relative error of each gradient, in norm. Those below `least` times the norm of all count as large as this."""
    assert got.keys() == expected.keys()
    smallest = least * sum(float(g.norm()) ** 2 for g in expected.values()) ** 0.5
    assert smallest > 0 or all(g.norm() > 0 for g in expected.values())
    return {n: float((got[n] - g).norm() / max(float(g.norm()), smallest)) for n, g in expected.items()}


@cache
def tensor_mesh(tensor: int, data: int = 1) -> DeviceMesh:
    """The ranks; made once in a process, as every mesh opens connections that stay."""
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data_parallel", "tensor_parallel"))


def assert_plain_between_modules(model: nn.Module) -> None:
    """Whatever a module gives back is a plain tensor, but for the logits."""
    output_layer = model.get_output_embeddings()
    head = [*output_layer.modules(), *(m for m in model.modules() if output_layer in list(m.modules()))]

    def check(module: nn.Module, args: Any, output: Any) -> None:
        if module not in head and not hasattr(output, "logits"):
            tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
            assert all(type(t) is Tensor for t in tensors), f"{module} gives {[type(t) for t in tensors]}"

    for module in model.modules():
        module.register_forward_hook(check)


def compare(
    build: Callable[[], nn.Module], batch: dict[str, Tensor], sp: bool, plan: Any = None, least: float = 0.0
) -> float:
    """The largest relative error of the loss and all gradients; the parameters are compared bit by bit."""
    loss, gradients = step(build(), batch)
    model = build()
    before = {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
    shard_tensors(model, tensor_mesh(torch.distributed.get_world_size())["tensor_parallel"], sp, plan)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for n, (value, requires_grad) in before.items():
        assert isinstance(after[n], DTensor) and isinstance(after[n], nn.Parameter), n
        assert torch.equal(whole(after[n]), value), n
        assert after[n].requires_grad == requires_grad, n
        assert after[n].to_local().untyped_storage().nbytes() == after[n].to_local().nbytes, n
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        assert_plain_between_modules(model)
    got, got_gradients = step(model, batch)
    return max(float((got - loss).abs() / loss), *errors(got_gradients, gradients, least).values())
