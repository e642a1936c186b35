"""What users change between a forward and its backward: a recomputation sees what the forward saw, or is refused."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import Recording, blocks, compare
from support.families import VOCABULARY, PlainBlock, PlainModel, make_batch
from support.markers.slow import slow_if
from support.trainer_harness import batches, fit
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo import MemoStrategy
from lightning_memo.engine.saved_tensors.saved_sums import SavedSums

pytestmark = pytest.mark.usefixtures("own_folder")

STEPS = 3
ALPHAS = [0.0, 0.5, 1.0]


class Scaled(PlainBlock):
    """Reads a number, an object, a deque, a nested list, and a tensor."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.scale, self.state = 1.0, SimpleNamespace(scales=[[1.0]], factor=1.0)
        self.past, self.shift = deque([1.0], maxlen=3), torch.zeros(32)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.scale * self.state.scales[0][0] * self.state.factor * self.past[-1]
        return super().forward((x + self.shift) * factor)


class Adapters(PlainBlock):
    """Has two adapters, one of which is active and trained."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 32)) for name in "ab"})
        self.active = "a"

    def activate(self, name: str) -> None:
        self.active = name
        for key, adapter in self.adapters.items():
            adapter.requires_grad_(key == name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.adapters[self.active](x))


class InPlace(PlainBlock):
    """Changes its input in place before anything else."""

    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        x *= 1.5
        return super().forward(x)


class Between(Recording):
    """Changes something between a forward and its backward, and back before the next step."""

    def __init__(self, family: Callable[[], nn.Module], change: Callable[[nn.Module, bool], None]) -> None:
        super().__init__(family)
        self.change = change

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change(self.model, False)

    def on_before_backward(self, loss: Tensor) -> None:
        self.change(self.model, True)


class TwoAdapters(Recording):
    """The loss is that of two forwards with different adapters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for name in "ab":
            for block in self.model.blocks:
                block.activate(name)
            losses.append(self.model(**batch).loss)
        for block in self.model.blocks:
            block.requires_grad_(True)
        return losses[0] + 2 * losses[1]


class FastWeights(Recording):
    """Runs the model on weights that are functions of its parameters."""

    made: Callable[[Tensor], Tensor] = staticmethod(lambda p: p * 1.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fast = {name: self.made(p) for name, p in self.model.named_parameters()}
        loss: Tensor = functional_call(self.model, fast, (), batch).loss
        return loss


class Copies(FastWeights):
    made = staticmethod(torch.clone)


class Absolute(PlainBlock):
    """Computes with functions of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.linear(x, self.out.weight.abs()))


class WithContext(PlainModel):
    """Hands its blocks an object, of which they read and write a list."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, context = self.embed(input_ids), SimpleNamespace(sums=[])
        for block in self.blocks:
            x = block(x, context)
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


class Contextual(PlainBlock):
    def forward(self, x: Tensor, context: SimpleNamespace) -> Tensor:
        x = super().forward(x * (1 + len(context.sums)))
        context.sums.append(len(context.sums))
        return x


def switch_mode(model: nn.Module, between: bool) -> None:
    model.train(not between)


def set_number(model: nn.Module, between: bool) -> None:
    for block in model.blocks:
        block.scale = 3.0 if between else 1.0


def set_objects(model: nn.Module, between: bool) -> None:
    for block in model.blocks:
        block.state.scales[0][0] = block.state.factor = 3.0 if between else 1.0
        block.past.append(3.0 if between else 1.0)


def set_tensor(model: nn.Module, between: bool) -> None:
    for block in model.blocks:
        block.shift = torch.full((32,), 3.0 if between else 0.0)


def freeze(model: nn.Module, between: bool) -> None:
    """Freezes weights: plain training accumulates no gradient for them, whatever they were in the forward."""
    model.blocks[1].mlp.requires_grad_(not between)


def hook(model: nn.Module, between: bool) -> None:
    for block in model.blocks:
        block.mlp._forward_hooks.clear()
        if between:
            block.mlp.register_forward_hook(lambda module, args, out: out * 3)


def hook_with_names(model: nn.Module, between: bool) -> None:
    for handle in vars(model).setdefault("handles", []):
        handle.remove()
    if not between:
        model.handles = [
            register(lambda module, args, names, *out: None, with_kwargs=True)
            for block in model.blocks
            for register in (block.mlp.register_forward_pre_hook, block.mlp.register_forward_hook)
        ]


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("change", [switch_mode, set_number, set_objects, set_tensor, freeze, hook, hook_with_names])
def test_what_changes_before_the_backward(change: Callable[[nn.Module, bool], None], alpha: float) -> None:
    compare(blocks(Scaled), {"alpha": alpha}, lambda build: Between(build, change))


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(
    ("build", "module"),
    [
        (blocks(Adapters), TwoAdapters),
        (blocks(PlainBlock), FastWeights),
        (blocks(Absolute), Copies),
        (lambda: WithContext([Contextual() for _ in range(3)]), Recording),
        (blocks(InPlace), Recording),
    ],
    ids=["adapters", "functional_call", "copies", "context", "in_place"],
)
def test_forwards_that_read_and_write(
    build: Callable[[], nn.Module], module: Callable[..., Recording], alpha: float
) -> None:
    compare(build, {"alpha": alpha}, module)


class UsesInput(PlainModel):
    """Uses the input of a block after the block."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) + x
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_inputs_that_are_used_after_a_layer_has_changed_them(alpha: float) -> None:
    with pytest.raises(ValueError, match="InPlace changes its input in place, and the model uses this input"):
        compare(lambda: UsesInput([InPlace() for _ in range(3)]), {"alpha": alpha}, Recording)


FACTOR = 1.0


class Global(PlainBlock):
    """Reads a global variable."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * FACTOR)


class Written(PlainBlock):
    """Reads tensors that somebody may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(32)
        self.register_buffer("factor", torch.ones(32))
        self.register_buffer("large", torch.ones(2**12, 32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift + self.factor + self.large[:1])


def set_global(model: nn.Module, between: bool) -> None:
    global FACTOR
    FACTOR = 3.0 if between else 1.0


def write_tensor(model: nn.Module, between: bool) -> None:
    model.blocks[1].shift.fill_(3.0 if between else 0.0)


def write_buffer(model: nn.Module, between: bool) -> None:
    model.blocks[1].factor.fill_(3.0 if between else 1.0)


def write_large(model: nn.Module, between: bool) -> None:
    model.blocks[1].large.fill_(3.0 if between else 1.0)


@torch.no_grad()
def write_bias(model: nn.Module, between: bool) -> None:
    model.blocks[1].out.bias.fill_(3.0 if between else 1.0)


def set_weight_data(model: nn.Module, between: bool) -> None:
    weight = model.blocks[1].out.weight
    weight.data = weight.data * (1.5 if between else 1.0)


SCALE = ContextVar("SCALE", default=1.0)


class InContext(PlainBlock):
    """Reads a context variable."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * SCALE.get())


class OfClass(PlainBlock):
    """Reads an attribute of its class."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * type(self).factor)


class Around(Recording):
    """Sets a context variable and an attribute of a class around the forward, others in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        token = SCALE.set(2.0 + batch_idx)
        OfClass.factor = SCALE.get()
        try:
            return super().training_step(batch, batch_idx)
        finally:
            SCALE.reset(token)
            OfClass.factor = 1.0


CUT: list[dict[str, Any]] = [
    *({"alpha": a} for a in ALPHAS), {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"}
]  # fmt: skip


@slow_if(lambda settings: settings["alpha"] != 0.5)
@pytest.mark.parametrize("settings", CUT, ids=str)
def test_context_variables_that_are_set_around_a_forward(settings: dict[str, Any]) -> None:
    compare(blocks(InContext), {"check_slices": False} | settings, Around)
    assert SCALE.get() == 1.0


@slow_if(lambda settings: settings["alpha"] != 0.5)
@pytest.mark.parametrize("check_slices", [False, True])
@pytest.mark.parametrize("settings", CUT, ids=str)
def test_class_attributes_that_are_set_around_a_forward(settings: dict[str, Any], check_slices: bool) -> None:
    """The first recomputation notices it. It would be wrong in each step."""
    with pytest.raises(RuntimeError, match="OfClass was recomputed with other values than in its forward") as caught:
        compare(blocks(OfClass), {"check_slices": check_slices} | settings, Around)
    assert "\n" not in str(caught.value)


class CountingInContext(PlainBlock):
    """Sets a context variable, which it does not read."""

    def forward(self, x: Tensor) -> Tensor:
        SCALE.set(SCALE.get() + 1)
        return super().forward(x)


def reset_counts(model: nn.Module, between: bool) -> None:
    if not between:
        SCALE.set(1.0)


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_counts_in_a_context(alpha: float) -> None:
    told = pytest.warns(UserWarning, match="sets a context variable")
    with told if alpha == 0.5 else nullcontext():
        compare(blocks(CountingInContext), {"alpha": alpha}, lambda build: Between(build, reset_counts))
    assert SCALE.get() == 4.0
    SCALE.set(1.0)


CHANGED = [
    (Global, set_global, "Global was recomputed with other values than in its forward"),
    (Written, write_large, r"Written.large was changed between a forward and its backward"),
    (Written, write_bias, r"Linear.bias \(Written\) was changed between"),
    (Written, set_weight_data, r"Linear.weight \(Written\) was changed between"),
]


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("change", [write_tensor, write_buffer])
def test_small_tensors_are_restored(change: Any, alpha: float) -> None:
    compare(blocks(Written), {"alpha": alpha}, lambda build: Between(build, change))


@pytest.mark.parametrize(("kind", "change", "message"), CHANGED)
def test_what_no_recomputation_can_restore(kind: Any, change: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        compare(blocks(kind), {"alpha": 0.0}, lambda build: Between(build, change))


@torch.no_grad()
def write_weight(model: nn.Module, between: bool) -> None:
    model.blocks[1].out.weight.mul_(2.0 if between else 0.5)


def test_a_weight_that_the_backward_needs_is_changed_in_place() -> None:
    """Plain training refuses that, too."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit("auto", Between(blocks(Written), write_weight), batches([make_batch(2, 48)]), max_steps=1)
    run = Between(blocks(Written), lambda model, between: run.trainer.global_step and write_weight(model, between))
    data = batches([make_batch(2, 48)] * 2)
    with pytest.raises(RuntimeError, match=r"argument or an activation of Written, of shape .* was changed in place"):
        fit(MemoStrategy(alpha=1.0), run, data, max_steps=2)


class DefaultDtypes(PlainBlock):
    """Makes tensors of the default dtype, which is bf16 in a training step with `precision="bf16-true"`."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.tensor(0.1)  # rounded; without dimensions, it does not change the dtype of products
        return super().forward(x / factor + torch.linspace(0.1, 0.9, x.shape[-1], device=x.device))


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_tensors_of_the_default_dtype(alpha: float) -> None:
    """The backward runs after Lightning has set it back."""
    runs = []
    for strategy in ("auto", MemoStrategy(alpha=alpha)):
        run, data = Recording(blocks(DefaultDtypes)), [make_batch(2, 48, seed=n) for n in range(STEPS)]
        fit(strategy, run, batches(data), max_steps=STEPS, precision="bf16-true")
        runs.append(run)
    assert runs[0].losses == runs[1].losses and torch.get_default_dtype() is torch.float32
    for plain, mine in zip(*(run.gradients for run in runs), strict=True):
        for name, g in plain.items():
            bound = 0.0 if alpha != 0.5 else 2**-7  # weight gradients of two slices are added in bf16
            assert (mine[name] - g).norm() <= bound * g.norm()


FINITE = torch.linspace(-1, 2, 1000)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_sums_show_other_values(dtype: torch.dtype) -> None:
    """Four turns look at all tensors, and find a difference of a hundredth of the norm."""
    t = (FINITE * 100).to(dtype) if dtype is not torch.bool else FINITE > 0
    other = t.clone()
    other[-20:] = 0
    for number in range(9):
        found = 0
        for turn in range(4):
            sums = SavedSums(turn)
            sums.note(number, t)
            found += not sums.alike(number, other)
            sums.note(number, t)
            assert sums.alike(number, t)
        assert found == 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_sums_show_values_that_are_not_finite(value: float) -> None:
    other = FINITE.clone()
    other[3] = value
    for before, now, alike in ((FINITE, other, False), (other, FINITE, False), (other, other, True)):
        sums = SavedSums(0)
        sums.note(0, before)
        assert sums.alike(0, now) is alike
