"""Training of a tiny model, plainly or with MemoStrategy, that records losses and gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.utils.find_layers import find_stacks
from model_types.configs import parts_of, tiny_config
from model_types.inputs import Batch, batches_for
from model_types.kinds import KINDS

_STEPS = 2  # the first one is profiled, the second follows the plan
_PERTURBATION, _GATE = 1e-4, 0.1


@dataclass
class Step:
    """The loss of a step and the gradient of every parameter that has one."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass
class Fit:
    """What a fit with MemoStrategy knows.

    Attributes:
        steps: The steps.
        planned: Whether there was a plan; without one, nothing is swapped.
        left_out: Which modules of the layers are not swapped, in words; empty if whole layers are.
    """

    steps: list[Step]
    planned: bool = True
    left_out: str = ""


@dataclass
class Example:
    """A tiny model and a batch to train it on.

    Attributes:
        model: The model.
        batch: The batch.
        inputs: What the batch holds.
    """

    model: nn.Module
    batch: Batch
    inputs: str = "text"

    def perturbed(self, seed: int) -> Example:
        """Returns an example whose weights differ slightly."""
        model, generator = copy.deepcopy(self.model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + _PERTURBATION * torch.randn(p.shape, generator=generator))
        return Example(model, self.batch, self.inputs)


def make_example(kind: str, model_type: str) -> Example:
    """Builds the tiny model of a type.

    Raises:
        Exception: Whatever transformers raises if it accepts neither the sizes nor any batch.
    """
    refused: Exception | None = None
    for cached in (True, False):  # a few models do not train with the cache that is their default
        model = _build(kind, model_type, cached)
        for inputs, batch in batches_for(kind, model):
            example = Example(model, batch, inputs)
            try:
                if math.isfinite(train_plainly(example).loss):
                    return example
            except Exception as error:
                refused = error
    raise refused or ValueError("the loss is not finite")


def _build(kind: str, model_type: str, cached: bool) -> nn.Module:
    config = tiny_config(model_type)
    if kind == "causal" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    for part in () if cached else parts_of(config):
        part.use_cache = False
    torch.manual_seed(0)
    model = KINDS[kind].build(config).train()
    _open_gates(model)
    return model


def _open_gates(model: nn.Module) -> None:
    """Changes biases, scales and gates, which may begin at zero and would then hide other parts of the model."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() <= 1:
                p.nan_to_num_().add_(_GATE * torch.randn(p.shape))


class _Recording(LightningModule):
    """Keeps the losses and gradients of all steps, which do not change the weights."""

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.steps: list[Step] = []
        self._loss = 0.0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        torch.manual_seed(1)
        loss: Tensor = self.model(**batch).loss
        self._loss = _mean(_whole(loss))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps.append(Step(self._loss, _gradients(self.model)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_plainly(example: Example, double: bool = False) -> Step:
    """Returns a step without MemoStrategy.

    Args:
        example: Model and batch.
        double: Whether to compute in fp64.
    """
    model: Any = copy.deepcopy(example.model)
    batch = example.batch
    mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if double:
        model, mode = model.double(), _InDouble()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped kernels do not support fp64
        batch = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    torch.manual_seed(1)
    with mode:
        loss = model(**batch).loss
    loss.backward()
    return Step(loss.item(), _gradients(model))


class _InDouble(TorchFunctionMode):
    """Computes in fp64 what a model computes in fp32 whatever the dtype of its weights, such as recurrences."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def train_with_memo(example: Example, settings: Mapping[str, Any], processes: int = 1) -> Fit:
    """Returns what a fit knows.

    Args:
        example: Model and batch.
        settings: Arguments of MemoStrategy.
        processes: Number of processes that train together; this is one of them.

    Raises:
        Exception: Whatever the fit raises.
    """
    module = _Recording(copy.deepcopy(example.model))
    strategy = MemoStrategy(**settings)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=processes,
        max_steps=_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader([example.batch] * _STEPS, batch_size=None))  # type: ignore[arg-type]
    assert strategy.engine is not None
    return Fit(module.steps, strategy.plan is not None, _left_out(module.model, strategy.engine.layers))


def _left_out(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Returns which lists of modules are not swapped although lists beside them are: both are parts of layers."""
    swapped: dict[str, str] = {}  # by the module that has the list
    others: list[tuple[str, str]] = []
    for stack in find_stacks(model):
        parent, _, name = stack.name.rpartition(".")
        if stack.layers[0] in layers:
            swapped[parent] = name
        else:
            others.append((parent, name))
    told = [
        f"{swapped[parent]} are swapped, and {name} beside them are not" for parent, name in others if parent in swapped
    ]
    return "; ".join(told)


def _mean(loss: Tensor) -> float:
    """Returns the mean over the processes, which share the tokens or compute the same."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _whole(t: Tensor) -> Tensor:
    """Returns an unsharded copy."""
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()
