"""Several trainings and profilers in threads of one process: what the process has once belongs to one of them."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.devices import DEVICE
from support.trainer_harness import (
    BATCH,
    LanguageModel,
    Sequences,
    listening,
    loader,
    make_trainer,
    shorten_measurements,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

from lightning_memo import MemoLoop, MemoStrategy
from lightning_memo.profiler.memory_meter import AllocationRecorder

STEPS = 4
CPU = [ProfilerActivity.CPU]
Outcome = tuple[list[float], list[Tensor]]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_measurements(monkeypatch)


class Checkpointed(LanguageModel):
    """Recomputes its whole forward with PyTorch's own activation checkpointing."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        forward = super().loss
        loss: Tensor = checkpoint(lambda: forward(batch), use_reentrant=False)
        return loss


def by_trainer(module: LanguageModel, strategy: Callable[[], Any]) -> Outcome:
    make_trainer(strategy(), max_steps=STEPS).fit(module, loader())
    return module.losses, [p.detach() for p in module.parameters()]


def memo(module: LanguageModel) -> Outcome:
    return by_trainer(module, lambda: MemoStrategy(alpha=0.5))


def plain(module: LanguageModel) -> Outcome:
    return by_trainer(module, lambda: "auto")


def by_loop(module: LanguageModel, after_step: Callable[[], object] = lambda: None, **settings: Any) -> Outcome:
    optimizer = module.configure_optimizers()
    model = module.model
    assert model is not None
    with MemoLoop(model, optimizer, **{"alpha": 0.5, **settings}):
        for batch in batches():
            module.keep(module.loss(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()
    return module.losses, [p.detach() for p in module.parameters()]


def batches() -> Iterator[dict[str, Tensor]]:
    sequences = Sequences(STEPS * BATCH)
    for step in range(STEPS):
        rows = [sequences[n] for n in range(step * BATCH, (step + 1) * BATCH)]
        yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time, each in a thread; return their results."""
    results: list[Any] = [None] * len(works)
    begin = threading.Barrier(len(works))

    def run(number: int) -> None:
        begin.wait()
        try:
            results[number] = works[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def assert_same(found: Outcome, expected: Outcome, exact: bool = True) -> None:
    tolerance = 0.0 if exact else 1e-6
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [(memo, memo), (memo, by_loop), (by_loop, by_loop)])
def test_two_trainings_in_two_threads(ways: tuple[Callable[[LanguageModel], Outcome], ...]) -> None:
    first = LanguageModel("llama")
    alone, expected = [way(copy.deepcopy(first)) for way in ways], plain(copy.deepcopy(first))
    modules = [copy.deepcopy(first) for _ in ways]
    with listening() as heard:
        found = together(*(lambda way=way, m=m: way(m) for way, m in zip(ways, modules, strict=True)))
    for each, same in zip(found, alone, strict=True):
        assert_same(each, same)
        assert_same(each, expected, exact=False)
    assert sum("another profiler runs" in line for line in heard) <= 1
    assert AllocationRecorder().stop() == []


@pytest.mark.slow
def test_a_plain_training_with_checkpoints_in_another_thread() -> None:
    """What a layer may not call is refused in its own thread only."""
    first, other = LanguageModel("llama"), Checkpointed("llama")
    expected, alone = plain(copy.deepcopy(other)), memo(copy.deepcopy(first))
    found = together(lambda: plain(other), lambda: memo(first))
    assert_same(found[0], expected)
    assert_same(found[1], alone)


def profiled(join: bool = True) -> threading.Thread:
    """Profile with PyTorch in another thread."""

    def work() -> None:
        with torch.profiler.profile(activities=CPU) as profiler:
            torch.randn(20, 20) @ torch.randn(20, 20)
        seen.append(any("mm" in event.key for event in profiler.key_averages()))

    seen: list[bool] = []
    thread = threading.Thread(target=work)
    thread.start()
    if join:
        thread.join()
        assert seen == [True]
    return thread


@pytest.mark.slow
def test_a_profiler_in_another_thread_during_a_step() -> None:
    """The step waits for the thread, whose profiler must therefore not wait for the step."""
    expected = by_loop(LanguageModel("llama"))
    module = LanguageModel("llama")
    assert module.model is not None
    module.model.register_forward_pre_hook(lambda *_: profiled() and None)
    assert_same(by_loop(module), expected)
    assert AllocationRecorder().stop() == []


@pytest.mark.slow
def test_profilers_in_another_thread_all_the_time() -> None:
    expected = memo(LanguageModel("llama"))
    first, stop = LanguageModel("llama"), threading.Event()

    def profile_until_stopped() -> int:
        count = 0
        while not stop.is_set():
            profiled()
            count += 1
        return count

    def train() -> Outcome:
        try:
            return memo(first)
        finally:
            stop.set()

    found, profiles = together(train, profile_until_stopped)
    assert_same(found, expected)
    assert profiles > 1


@pytest.mark.slow
@pytest.mark.parametrize("phases", [(0, 1, 1), (1, 1, 2), (0, 0, 2)], ids=str)
def test_a_profiler_with_a_schedule_around_a_loop(phases: tuple[int, int, int]) -> None:
    """It warms up before it records; a second profiler in between would crash the process."""
    expected = by_loop(LanguageModel("llama"))
    seen: list[bool] = []
    wait, warmup, active = phases
    profiler = torch.profiler.profile(
        activities=CPU,
        schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda p: seen.append(any("mm" in event.key for event in p.key_averages())),
    )
    with profiler:
        found = by_loop(LanguageModel("llama"), profiler.step)
    assert_same(found, expected)
    assert seen == [True]
    assert AllocationRecorder().stop() == []


def test_a_failed_forward_leaves_no_profiler_running() -> None:
    module = LanguageModel("llama")
    model, optimizer = module.model, module.configure_optimizers()
    assert model is not None
    broken = model.register_forward_pre_hook(lambda *_: 1 / 0)
    memo_loop = MemoLoop(model, optimizer, alpha=0.5)
    memo_loop.__enter__()  # a Trainer of transformers does not leave it after an error
    with pytest.raises(ZeroDivisionError):
        module.loss(next(batches()))
    broken.remove()
    assert AllocationRecorder().stop() == []
    memo_loop.__exit__(None, None, None)


@pytest.mark.slow
def test_a_failed_backward_does_not_hinder_the_next_training() -> None:
    expected = by_loop(LanguageModel("llama"))
    module = LanguageModel("llama")
    assert module.model is not None
    left = MemoLoop(module.model, module.configure_optimizers(), alpha=0.5)
    left.__enter__()
    loss = module.loss(next(batches()))
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    with listening() as heard:
        assert_same(by_loop(LanguageModel("llama")), expected)
    assert not any("another profiler runs" in line for line in heard)
    left.__exit__(None, None, None)


# ---- random numbers, of which the process has one generator


class Elsewhere:
    """Draws a random number in another thread."""

    def __init__(self) -> None:
        self.armed = threading.Event()  # which a recomputation does not restore, other than a flag
        self.drawn: list[float] = []

    @contextlib.contextmanager
    def drawing(self, now: bool) -> Iterator[None]:
        if now:
            self.armed.set()
        try:
            yield
        finally:
            self.armed.clear()

    def draw(self) -> None:
        if self.armed.is_set():
            thread = threading.Thread(target=lambda: self.drawn.append(float(torch.rand((), device=DEVICE))))
            thread.start()
            thread.join()


ELSEWHERE = Elsewhere()


class Drops(nn.Module):
    """A layer with dropout, in the middle of which another thread draws."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(16, 16), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.tanh(self.inner(x)))
        ELSEWHERE.draw()
        q = y.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return x + torch.sigmoid(self.dropout(y)) * y


class Stack(nn.Module):
    def __init__(self, dropout: float, head_dropout: float, recompute: bool) -> None:
        super().__init__()
        self.head_dropout, self.recompute = head_dropout, recompute
        self.layers = nn.ModuleList(Drops(dropout) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return F.dropout(x, self.head_dropout).square().mean()


def gradients(model: Stack, steps: int, armed_in: str = "", **settings: Any) -> list[Tensor]:
    """Train; let another thread draw in the forward or the backward of the last step. Return its gradients."""
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.linspace(-1, 1, 256, device=DEVICE).view(2, 8, 16)
    memo = MemoLoop(model, optimizer, **settings) if settings else contextlib.nullcontext()
    torch.manual_seed(1)
    ELSEWHERE.drawn.clear()
    with memo:
        for step in range(steps):
            optimizer.zero_grad()
            with ELSEWHERE.drawing(armed_in == "forward" and step == steps - 1):
                loss = model(x)
            with ELSEWHERE.drawing(armed_in == "backward" and step == steps - 1):
                loss.backward()
            optimizer.step()
    return [p.grad for p in model.parameters() if p.grad is not None]


def stack(dropout: float, head_dropout: float = 0.5, recompute: bool = False) -> Stack:
    torch.manual_seed(0)
    return Stack(dropout, head_dropout, recompute).to(DEVICE)


@pytest.mark.parametrize("armed_in", ["forward", "backward"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_other_dropout_masks_are_refused(armed_in: str, steps: int) -> None:
    """Also in steps in which recomputed values are not compared; PyTorch's checkpoints compute wrong gradients."""
    expected = gradients(stack(0.5), steps)
    assert all(map(torch.equal, gradients(stack(0.5), steps, alpha=0.0), expected))
    wrong = gradients(stack(0.5, recompute=True), steps, armed_in)
    assert armed_in == "forward" or not all(map(torch.equal, wrong, expected))
    with pytest.raises(RuntimeError, match=r"(another|other).* random numbers") as caught:
        gradients(stack(0.5), steps, armed_in, alpha=0.0)
    assert "\n" not in str(caught.value) and "another thread" in str(caught.value)
    assert all(map(torch.equal, gradients(stack(0.5), steps, alpha=0.0), expected))


@pytest.mark.parametrize("armed_in", ["forward", "backward"])
def test_layers_that_draw_nothing_leave_the_generator_to_other_threads(armed_in: str) -> None:
    assert all(map(torch.equal, gradients(stack(0.0), 3, alpha=0.0), gradients(stack(0.0), 3)))
    expected = gradients(stack(0.0, 0.0), 3)
    torch.manual_seed(1)
    numbers = [float(torch.rand((), device=DEVICE)) for _ in range(4)]
    found = gradients(stack(0.0, 0.0), 3, armed_in, alpha=0.0)
    assert all(map(torch.equal, found, expected))
    assert ELSEWHERE.drawn == numbers
