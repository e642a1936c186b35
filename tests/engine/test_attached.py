"""What users attach to a model or a Trainer: compiled code, quantized weights, weight averages, profilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from support.families import PlainModel, make_batch
from support.markers.slow import slow_if
from support.trainer_harness import (
    LanguageModel,
    Sequences,
    batches,
    copy_threads,
    fit,
    listening,
    loader,
    plain,
)
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")


def assert_same(result: Any, expected: Any) -> None:
    """Losses and weights are the same, bit by bit."""
    assert result.losses == expected.losses
    for (name, a), b in zip(result.module.state_dict().items(), expected.module.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


# ---- callbacks, profilers, loops

CALLBACKS = {
    "EMA": (lambda: EMAWeightAveraging(decay=0.5), {}),
    "SWA": (
        lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1),
        {"max_epochs": 3, "max_steps": -1, "limit_train_batches": 2},
    ),
    "accumulation that changes": (
        lambda: GradientAccumulationScheduler({0: 2, 1: 1}),
        {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 4},
    ),
}


@pytest.mark.parametrize(("make", "settings"), CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks(make: Callable[[], Callback], settings: dict[str, Any]) -> None:
    """Callbacks that replace weights or change the accumulation work as in plain training."""
    result = fit(MemoStrategy(alpha=1.0), callbacks=[make()], **settings)
    assert_same(result, plain(callbacks=[make()], **settings))


@pytest.mark.slow
@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_profilers(profiler: str) -> None:
    """Lightning's profilers run during the planning of the first step, and have priority in PyTorch's profiler."""
    with listening() as heard:
        result = fit(MemoStrategy(alpha=1.0), profiler=profiler)
    assert result.losses == plain().losses
    estimated = [line for line in heard if "another profiler runs" in line]
    assert len(estimated) == (profiler == "pytorch")


def test_workers_that_load() -> None:
    """Batches come from processes of a DataLoader, across the end of an epoch."""

    def data() -> Any:
        return torch.utils.data.DataLoader(Sequences(4), batch_size=2, num_workers=1, persistent_workers=True)

    settings = {"max_epochs": 2, "max_steps": -1}
    assert_same(fit(MemoStrategy(alpha=1.0), data=data(), **settings), plain(data=data(), **settings))


# ---- compiled code


def _compile_pieces(model: PlainModel) -> None:
    for block in model.blocks:
        block.mlp.compile(backend="aot_eager")


def _compile_layers(model: PlainModel) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def _wrap_layers(model: PlainModel) -> None:
    for number, block in enumerate(list(model.blocks)):
        model.blocks[number] = torch.compile(block, backend="aot_eager")


def _compile_model(model: PlainModel) -> None:
    model.compile(backend="aot_eager")


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("compile_it", [_compile_pieces, _compile_layers, _wrap_layers, _compile_model])
def test_compiled_code_rests(compile_it: Callable[[PlainModel], None], alpha: float) -> None:
    """Layers run as they were written, which one line reports; afterwards they are compiled again."""

    def module(compiled: bool) -> LanguageModel:
        made = LanguageModel()
        if compiled:
            compile_it(made.model)
        return made

    trained = module(compiled=True)
    before = [(m._compiled_call_impl, vars(m).get("forward")) for m in trained.modules()]
    with pytest.warns(UserWarning, match="torch.compile is off") as caught:
        result = fit(MemoStrategy(alpha=alpha), trained)
    assert len([w for w in caught if "torch.compile is off" in str(w.message)]) == 1
    assert [(m._compiled_call_impl, vars(m).get("forward")) for m in trained.modules()] == before
    expected = plain(module(compiled=False)).losses
    assert result.losses == expected if alpha == 1.0 else result.losses == pytest.approx(expected, abs=3e-6)


def test_a_model_beside_its_compiled_form() -> None:
    """Layers that are held twice run once."""
    module = LanguageModel()
    module.compiled = torch.compile(module.model, backend="aot_eager")
    with pytest.warns(UserWarning, match="torch.compile is off"):
        assert fit(MemoStrategy(alpha=1.0), module).losses == plain(LanguageModel()).losses


class Head(nn.Linear):
    """A head whose code can be compiled."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.0


def test_a_compiled_head_stays_compiled() -> None:
    """Modules apart from the layers stay compiled."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = LanguageModel("block")
    module.model.head.__class__ = Head
    module.model.head.compile(backend=backend)
    assert fit(MemoStrategy(alpha=1.0), module).losses == plain(LanguageModel("block")).losses
    assert graphs


# ---- quantised base weights


class Dequantised(torch.autograd.Function):
    """A product with a weight of 8 bits, made real in the forward and again in the backward, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        weight, scale = ctx.saved_tensors
        return dy @ (weight.to(dy.dtype) * scale), None, None


class QuantisedLinear(nn.Module):
    """A frozen weight of 8 bits, and a low-rank adapter that is trained (QLoRA).

    Args:
        linear: What is quantised.
        by_function: Whether the product has a backward of its own; else autograd keeps the dequantised weight.
    """

    def __init__(self, linear: nn.Linear, by_function: bool) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight_int8", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.down = nn.Parameter(torch.randn(4, linear.in_features) / 8)
        self.up = nn.Parameter(torch.zeros(linear.out_features, 4))
        self._by_function = by_function

    def forward(self, x: Tensor) -> Tensor:
        adapted = x @ self.down.T @ self.up.T
        if self._by_function:
            return Dequantised.apply(x, self.weight_int8, self.scale) + adapted
        return nn.functional.linear(x, self.weight_int8.to(x.dtype) * self.scale) + adapted


class Quantised(LanguageModel):
    """Linear layers of the blocks are quantized, and the rest is frozen."""

    def __init__(self, by_function: bool) -> None:
        super().__init__("block")
        self.model.requires_grad_(False)
        torch.manual_seed(7)
        for block in self.model.blocks:
            for parent in (block, block.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, QuantisedLinear(child, by_function))


class Watch(Callback):
    """Records the bytes of a slot."""

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.slot_bytes = trainer.strategy.plan.swap.memory.slot
        self.overflow_bytes = trainer.strategy.engine.memory.stats.overflow_bytes


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("by_function", [True, False], ids=["own backward", "autograd"])
def test_quantised_weights(by_function: bool, alpha: float) -> None:
    """Adapters over quantized weights train as in plain training, and the packed weights never leave the device."""
    watch = Watch()
    data = loader(tokens=24)  # not the width of a weight
    result = fit(MemoStrategy(alpha=alpha), Quantised(by_function), data, callbacks=[watch])
    expected = plain(Quantised(by_function), data)
    assert result.losses[-1] != result.losses[0]
    assert (
        result.losses == expected.losses if alpha != 0.5 else result.losses == pytest.approx(expected.losses, abs=3e-6)
    )
    assert watch.overflow_bytes == 0
    if by_function and alpha == 1.0:
        plainly = fit(MemoStrategy(alpha=1.0), LanguageModel("block"), data).plan.swap.memory.slot
        adapters = 4 * 4 * 2 * 24 * 4  # what four adapters of rank 4 save of 48 tokens, in fp32
        assert watch.slot_bytes <= plainly + adapters


# ---- batches of any shape


@pytest.mark.slow
def test_a_hundred_batches_of_any_shape() -> None:
    """Losses and weights are those of plain training, and memory is that of the plan for the largest batch."""
    chance = torch.Generator().manual_seed(11)
    shapes = [[int(n) for n in torch.randint(1, 41, (2,), generator=chance)] for _ in range(100)]
    data = batches(make_batch(1 + rows % 4, 1 + tokens, seed=n) for n, (rows, tokens) in enumerate(shapes))
    watch = Held()
    result = fit(MemoStrategy(alpha=1.0), LanguageModel("block"), data, max_steps=100, callbacks=[watch])
    assert_same(result, plain(LanguageModel("block"), data, max_steps=100))
    largest = max((1 + rows % 4) * (1 + tokens) for rows, tokens in shapes)
    assert result.plan.costs.batch * result.plan.costs.tokens == largest
    assert set(result.held) == {0}
    assert len(watch.threads) == 1  # two copy threads in every step, however many plans were made
    assert max(watch.host_bytes) == watch.host_bytes[-1]


class Held(Callback):
    """Records the engine's state after every batch."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.host_bytes: list[int] = []

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.threads.add(len(copy_threads()))
        self.host_bytes.append(trainer.strategy.engine.host_bytes)
