"""A PyTorch loop inside of MemoLoop trains as it does outside."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.fabric import Fabric
from support.devices import DEVICE
from support.families import FAMILIES, VOCABULARY
from support.processes import run_in_processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_memo import MemoLoop, MemoStrategy
from lightning_memo.engine import TestMode
from lightning_memo.runtime.memory_planner import MemoryState

TOKENS, STEPS = 40, 5
LATE_COPIES = TestMode(seed=1, longest_delay_seconds=0.0005)
LATE = {"test_mode": LATE_COPIES}
BY_KIND, JOINT = replace(LATE_COPIES, plans="kinds"), replace(LATE_COPIES, joint_attention=True)


def build(family: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family].build().to(DEVICE)


def ids_of(number: int, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(number)).to(DEVICE)


def loss_of(model: nn.Module, number: int, tokens: int = TOKENS) -> Tensor:
    ids = ids_of(number, tokens)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that does not amplify the rounding of small gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Run:
    """A model and its optimizer; afterwards, what a loop has made of them."""

    def __init__(self, family: str = "llama") -> None:
        self.model = build(family)
        self.optimizer = self.second = sgd(self.model)
        self.losses: list[float] = []
        self.memo: MemoLoop | None = None

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]


Loop = Callable[[Run], None]


def plain_loop(run: Run) -> None:
    torch.manual_seed(1)  # dropout
    for number in range(STEPS):
        run.backward(loss_of(run.model, number))
        run.step()


def with_memo(loop: Loop, family: str = "llama", **settings: Any) -> Run:
    run = Run(family)
    with MemoLoop(run.model, run.optimizer, **settings) as run.memo:
        loop(run)
    return run


def compare(memo: Run, plain: Run) -> None:
    assert memo.losses == pytest.approx(plain.losses, rel=1e-5)
    for found, expected in zip(memo.weights, plain.weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def check(loop: Loop, family: str = "llama", **settings: Any) -> Run:
    plain, memo = Run(family), with_memo(loop, family, **settings)
    loop(plain)
    compare(memo, plain)
    return memo


# ---- loops


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["llama", "gpt2_dropout"])
def test_a_plain_loop(family: str, alpha: float) -> None:
    memo = check(plain_loop, family, alpha=alpha, **LATE).memo
    assert memo is not None
    assert memo.plan is not None
    assert memo.plan.swap.alpha == alpha


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"test_mode": BY_KIND, "device_memory": "0.8MiB"},
        {"test_mode": JOINT, "alpha": 0.5},
        {"slice_tokens": 16, "stream_from_host": "hidden"},
        {"loss_chunk_tokens": 16, "alpha": 0.5},
    ],
    ids=["kinds", "joint", "slices", "plan_memory"],
)
def test_settings(settings: dict[str, Any]) -> None:
    check(plain_loop, **LATE | settings)


@pytest.mark.slow
def test_planned_memory_serves_the_steps() -> None:
    memo = with_memo(plain_until_served, alpha=0.5, plan_memory=True).memo
    assert memo is not None
    assert memo.memory is not None
    assert memo.memory.use is not None
    assert memo.memory.use.hits > 0
    assert memo.memory.use.missed <= 0.05 * memo.memory.use.hits


def plain_until_served(run: Run) -> None:
    """Train until the planned memory has served some steps."""
    served = 0
    for number in range(2000):
        run.backward(loss_of(run.model, number))
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.step()
        assert run.memo is not None
        assert run.memo.memory is not None
        served += run.memo.memory.settled
        if served == 5:
            return


def accumulating(run: Run) -> None:
    for number in range(2 * STEPS):
        run.backward(loss_of(run.model, number) / 2)
        if number % 2:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
            run.step()


def preferring(run: Run) -> None:
    """Two forwards before a backward, and a reference without gradients."""
    for number in range(STEPS):
        with torch.no_grad():
            reference = loss_of(run.model, number)
        chosen, rejected = loss_of(run.model, number), loss_of(run.model, 100 + number)
        run.backward(-torch.nn.functional.logsigmoid(rejected - chosen + reference))
        run.step()


def with_several_optimizers(run: Run) -> None:
    """Two optimizers step after each backward; in every other batch, one of them does."""
    for number in range(STEPS):
        run.backward(loss_of(run.model, number))
        run.optimizer.step()
        if number % 2:
            run.second.step()
        run.model.zero_grad()


def with_other_lengths(run: Run) -> None:
    for number, tokens in enumerate((24, 40, 33, 48, 40, 24)):
        run.backward(loss_of(run.model, number, tokens))
        run.step()


def evaluating(run: Run) -> None:
    for number in range(STEPS):
        run.backward(loss_of(run.model, number))
        run.step()
        run.model.eval()
        with torch.no_grad():
            run.losses.append(loss_of(run.model, 200 + number).item())
        run.model.train()


def skipping(run: Run) -> None:
    """A batch without a backward, and one without a step."""
    for number in range(2 * STEPS):
        loss = loss_of(run.model, number)
        if number == 4:
            continue
        run.backward(loss)
        if number == 6:
            run.optimizer.zero_grad()
            continue
        run.step()


def with_closure(run: Run) -> None:
    """An optimizer that calls forward and backward itself."""
    optimizer = torch.optim.LBFGS(run.model.parameters(), lr=0.01, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(run.model, 0)
        run.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)


def with_own_loss(run: Run) -> None:
    """A loss of logits, of which the model computes only chunks."""
    for number in range(STEPS):
        ids = ids_of(number)
        logits = run.model(input_ids=ids).logits[:, :-1]
        run.backward(-logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean())
        run.step()


def with_chosen_kernels(run: Run) -> None:
    """Lets PyTorch select other attention kernels in some forwards and backwards."""
    for number in range(2 * STEPS):
        chosen = contextlib.nullcontext, lambda: sdpa_kernel(SDPBackend.MATH)
        with chosen[number % 2]():
            loss = loss_of(run.model, number)
        with chosen[number // 2 % 2]():
            run.backward(loss)
        run.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"alpha": 0.5}, {"slice_tokens": 16, "stream_from_host": "hidden"}], ids=["half", "slices"]
)
def test_kernels_chosen_by_the_loop(settings: dict[str, Any]) -> None:
    check(with_chosen_kernels, **settings, **LATE)


LOOPS = [with_own_loss, accumulating, preferring, with_other_lengths, evaluating, skipping, with_closure]


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop: Loop) -> None:
    check(loop, alpha=0.5, **LATE)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [accumulating, with_other_lengths, evaluating], ids=lambda loop: loop.__name__)
def test_loops_by_kind_of_tensor(loop: Loop) -> None:
    memo = check(loop, test_mode=BY_KIND, device_memory="1MiB").memo
    assert memo is not None and memo.plan is not None and not memo.plan.swap.storage.has_one_alpha


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"alpha": 0.5}, {"slice_tokens": 16, "stream_from_host": "hidden"}], ids=["half", "slices"]
)
def test_logits_in_chunks(settings: dict[str, Any]) -> None:
    memo = check(with_own_loss, loss_chunk_tokens=16, **settings, **LATE).memo
    assert memo is not None
    assert memo.plan is not None


def test_several_optimizers() -> None:
    runs = [Run(), Run()]
    for run in runs:
        halves = list(run.model.parameters())
        run.optimizer = torch.optim.SGD(halves[::2], lr=0.05)
        run.second = torch.optim.SGD(halves[1::2], lr=0.05)
    plain, memo = runs
    with_several_optimizers(plain)
    with MemoLoop(memo.model, [memo.optimizer, memo.second], alpha=0.5):
        with_several_optimizers(memo)
    compare(memo, plain)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric(precision: str) -> None:
    def train(memo: bool) -> Run:
        fabric, run = Fabric(accelerator=DEVICE.type, devices=1, precision=precision), Run()
        model, optimizer = fabric.setup(run.model, run.optimizer)
        loop = MemoLoop(model, optimizer, alpha=0.5) if memo else contextlib.nullcontext()
        with loop as run.memo:
            for number in range(STEPS):
                loss = loss_of(model, number)
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.losses.append(loss.item())
        return run

    plain, memo = train(False), train(True)
    assert memo.memo is not None
    assert memo.memo.plan is not None
    assert memo.memo.plan.fingerprint.precision == precision
    if precision == "32-true":
        compare(memo, plain)
    assert memo.losses == pytest.approx(plain.losses, rel=2**-7)


@pytest.mark.slow
def test_accelerate() -> None:
    def train(memo: bool) -> Run:
        accelerator, run = Accelerator(cpu=DEVICE.type == "cpu", gradient_accumulation_steps=2), Run()
        model, optimizer = accelerator.prepare(run.model, run.optimizer)
        loop = MemoLoop(model, optimizer, alpha=0.5) if memo else contextlib.nullcontext()
        with loop as run.memo:
            for number in range(2 * STEPS):
                with accelerator.accumulate(model):
                    loss = loss_of(model, number)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                run.losses.append(loss.item())
        return run

    compare(train(True), train(False))


# ---- several processes


def of_rank(kind: str, memo: bool) -> tuple[list[float], list[Tensor]]:
    rank, model = dist.get_rank(), build()
    wrapped = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in model.model.layers if kind == "fsdp2" else ():
            fully_shard(layer)
        fully_shard(model, reshard_after_forward=True)
    optimizer, losses = sgd(wrapped), []
    with MemoLoop(wrapped, optimizer, alpha=0.5, **LATE) if memo else contextlib.nullcontext():
        for number in range(STEPS):
            loss = loss_of(wrapped, 2 * number + rank, TOKENS + number % 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in (p.detach() for p in model.parameters())]
    return losses, [t.cpu() for t in weights]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 root"])
def test_two_processes(kind: str) -> None:
    plain, memo = (run_in_processes(2, of_rank, kind, memo) for memo in (False, True))
    for (losses, weights), (expected_losses, expected) in zip(memo, plain, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for found, t in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, t, rtol=1e-5, atol=1e-6)


def refusal_of_inner_shards() -> str:
    model = build()
    for layer in model.model.layers:
        fully_shard(layer.mlp)
    try:
        with MemoLoop(model, sgd(model)):
            return ""
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_modules_that_are_sharded_inside_of_layers() -> None:
    for line in run_in_processes(2, refusal_of_inner_shards):
        assert line.startswith("mlp of LlamaDecoderLayer is sharded by itself (fully_shard)")


# ---- failures


class Failing:
    """Raises an error in a forward or a backward of a layer, in one of the calls."""

    def __init__(self, model: Any, error: type[Exception], call: int, backward: bool) -> None:
        self._left, self._error = call, error  # an error that is kept would keep the tensors of its frames
        weight = model.model.layers[2].mlp.down_proj.weight
        self._handle = (
            weight.register_hook(self._count) if backward else model.model.norm.register_forward_hook(self._count)
        )

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error("no luck")


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 3])
def test_an_error_in_a_backward_that_the_loop_catches(call: int) -> None:
    def loop(run: Run) -> None:
        Failing(run.model, RuntimeError, call, backward=True)
        for number in range(STEPS):
            try:
                run.backward(loss_of(run.model, number))
            except RuntimeError as error:
                assert "no luck" in str(error)  # noqa: PT017 - the loop goes on, as a user's may
                run.optimizer.zero_grad()
                continue
            run.step()

    assert len(check(loop, alpha=0.5).losses) == STEPS - 1


@pytest.mark.slow
def test_a_forward_without_memory_is_run_again() -> None:
    plain = Run()
    plain_loop(plain)

    def loop(run: Run) -> None:
        Failing(run.model, torch.OutOfMemoryError, 3, backward=False)
        plain_loop(run)

    with pytest.warns(UserWarning, match="out of device memory with alpha=0.5"):
        compare(with_memo(loop, alpha=0.5), plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2_dropout"])
def test_step_runs_a_backward_without_memory_again(family: str) -> None:
    plain = Run(family)
    plain_loop(plain)

    def loop(run: Run) -> None:
        weight = list(run.model.parameters())[-3]
        calls = iter(range(100))

        def fail(gradient: Tensor) -> None:
            if next(calls) == 3:
                raise torch.OutOfMemoryError("no luck")

        weight.register_hook(fail)
        assert run.memo is not None
        torch.manual_seed(1)
        for number in range(STEPS):
            run.losses.append(run.memo.step(lambda number=number: loss_of(run.model, number)).item())
            run.step()

    with pytest.warns(UserWarning, match="out of device memory with alpha=0.5"):
        compare(with_memo(loop, family, alpha=0.5), plain)


def test_a_backward_without_memory_tells_what_to_do() -> None:
    def loop(run: Run) -> None:
        Failing(run.model, torch.OutOfMemoryError, 3, backward=True)
        plain_loop(run)

    with pytest.raises(torch.OutOfMemoryError, match=r"only `memo\.step\(\.\.\.\)` runs more than the first forward"):
        with_memo(loop, alpha=0.5)


@pytest.mark.slow
def test_the_model_is_as_before_afterwards() -> None:
    run = Run()
    before = [set(vars(module)) for module in run.model.modules()]
    hooks = len(run.optimizer._optimizer_step_post_hooks)

    def stopped(run: Run) -> None:
        run.backward(loss_of(run.model, 0))
        raise KeyError("stop")

    with pytest.raises(KeyError), MemoLoop(run.model, run.optimizer, alpha=0.5):
        stopped(run)
    assert [set(vars(module)) for module in run.model.modules()] == before
    assert len(run.optimizer._optimizer_step_post_hooks) == hooks
    with MemoLoop(run.model, run.optimizer, alpha=0.5):  # another one
        plain_loop(run)
    assert [set(vars(module)) for module in run.model.modules()] == before


def test_a_model_that_the_loop_does_not_call_is_told_of() -> None:
    def loop(run: Run) -> None:
        for number in range(2):
            ids = ids_of(number)
            run.backward(run.model.lm_head(run.model.model(input_ids=ids).last_hidden_state).square().mean())
            run.step()

    with pytest.warns(UserWarning, match="LlamaForCausalLM, which MemoLoop was given, has not been called") as told:
        check(loop, alpha=0.5)
    assert sum("has not been called" in str(each.message) for each in told) == 1


# ---- refusals


@contextlib.contextmanager
def refused(line: str, error: type[Exception] = ValueError) -> Iterator[None]:
    with pytest.raises(error, match=line) as caught:
        yield
    assert "\n" not in str(caught.value)


def test_refusals() -> None:
    run = Run()
    with refused("optimizer: got list"):
        MemoLoop(run.model, [[run.optimizer]])  # type: ignore[list-item]
    with refused("model: got SGD; give the torch.nn.Module"):
        MemoLoop(run.optimizer, run.model)  # type: ignore[arg-type]
    with refused("optimizer: got none"):
        MemoLoop(run.model, [])
    with refused("use MemoStrategy"):
        MemoLoop(run.model, run.optimizer, stream_from_host="model", slice_tokens=8)
    with refused("not a fraction of the tokens"):
        MemoLoop(run.model, run.optimizer, alpha=2.0)
    memo = MemoLoop(run.model, run.optimizer)
    with refused("is called inside of `with MemoLoop"):
        memo.step(lambda: loss_of(run.model, 0))
    with memo:
        pass
    with refused("is entered once"), memo:
        pass
    with refused("is called inside of `with MemoLoop"):
        memo.step(lambda: loss_of(run.model, 0))


def test_checkpointing_is_refused() -> None:
    run = Run()
    run.model.gradient_checkpointing_enable()
    with refused("gradient checkpointing is on"), MemoLoop(run.model, run.optimizer):
        pass


def test_float16_is_refused() -> None:
    run = Run()
    with warnings.catch_warnings(), refused("float16"), MemoLoop(run.model.half(), run.optimizer):
        loss_of(run.model, 0)


def test_settings_are_those_of_the_strategy() -> None:
    of_strategy = inspect.signature(MemoStrategy).parameters
    own = {p.name: p.default for p in inspect.signature(MemoLoop).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert own.pop("output_dir") is None
    assert own == {name: of_strategy[name].default for name in own}


def test_a_model_is_copied_within_its_loop() -> None:
    """Averages of weights copy the model; the copies run plainly, and the loop is not disturbed."""
    model = build()
    optimizer = sgd(model)
    with MemoLoop(model, optimizer, alpha=0.5):
        for number in range(2):
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        copied, averaged = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
        loss = loss_of(copied, 2)
        loss.backward()
        assert torch.equal(loss_of(averaged.module, 2), loss)
        loss_of(model, 2).backward()
        for ours, copys in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.allclose(ours.grad, copys.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_backward_after_its_step_tells_what_to_do() -> None:
    """A step ends a batch, after which the memory of the profiled one is freed."""
    model = build()
    optimizer = sgd(model)
    with MemoLoop(model, optimizer, slice_tokens=16, stream_from_host="hidden"):
        first, second = loss_of(model, 0), loss_of(model, 0)
        first.backward()
        optimizer.zero_grad()
        optimizer.step()
        with pytest.raises(RuntimeError, match="run each backward within the step"):
            second.backward()


@pytest.mark.parametrize("of", [lambda out: out.loss, lambda out: out.logits.logsumexp(-1).square().mean()])
def test_second_derivatives_above_the_layers_are_refused(of: Callable[[Any], Tensor]) -> None:
    """A loss in chunks has no graph of its gradient, which would be a constant without a word."""
    model = build()
    with MemoLoop(model, sgd(model), loss_chunk_tokens=16):
        for number in range(2):
            ids = ids_of(number)
            loss = of(model(input_ids=ids, labels=ids))
            with refused("second derivatives", RuntimeError):
                torch.autograd.grad(loss, [model.model.norm.weight], create_graph=True)


def test_a_model_in_two_loops_is_refused() -> None:
    run = Run()
    with MemoLoop(run.model, run.optimizer):
        with refused("another MemoLoop, .* runs the LlamaDecoderLayer modules"), MemoLoop(run.model, run.optimizer):
            pass
        plain_loop(run)
    with MemoLoop(run.model, run.optimizer):
        pass


class OuterMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4, 0.6, 0.9])
def test_an_interrupt_between_two_instructions_leaves_no_contexts(share: float) -> None:
    """An interrupt behind the entry into a mode or hooks, and before the block that leaves them."""
    entered = itertools.count()

    def interrupt(last: float, frame: FrameType, event: str, _: object) -> None:
        of_torch = frame.f_code.co_filename.endswith(
            ("graph.py", "_python_dispatch.py", "overrides.py", "fake_tensor.py")
        )
        if event == "return" and frame.f_code.co_name == "__enter__" and of_torch and next(entered) == last:
            raise KeyboardInterrupt

    def train(last: float) -> None:
        run = Run("gpt2_dropout")
        with MemoLoop(run.model, run.optimizer, alpha=0.5):
            sys.setprofile(functools.partial(interrupt, last))
            try:
                plain_loop(run)
            finally:
                sys.setprofile(None)

    # The first training of a process enters more contexts, because its caches are empty.
    for _ in range(2):
        entered = itertools.count()
        train(math.inf)
    last, entered = int(share * next(entered)), itertools.count()
    with OuterMode():
        before = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        with pytest.raises(KeyboardInterrupt):
            train(last)
        assert (_get_current_function_mode_stack(), _get_current_dispatch_mode_stack()) == before
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.slow
def test_a_loop_inside_of_another_one_plans_its_memory() -> None:
    """The outer one plans again afterwards."""
    outer, inner = Run(), Run()
    with MemoLoop(outer.model, outer.optimizer, alpha=0.5, plan_memory=True) as outer.memo:
        plain_until_served(outer)
        with MemoLoop(inner.model, inner.optimizer, alpha=0.5, plan_memory=True) as inner.memo:
            plain_until_served(inner)
        assert outer.memo.memory is not None and outer.memo.memory.state is MemoryState.BUILDING
        plain_until_served(outer)
        assert outer.memo.memory.state is MemoryState.SERVING
    for run in (outer, inner):
        assert run.memo is not None and run.memo.memory is not None and run.memo.memory.use is not None


@pytest.mark.slow
def test_a_loop_that_another_thread_has_left_open_keeps_no_memory() -> None:
    left, run = Run(), Run()

    def leave() -> None:
        left.memo = MemoLoop(left.model, left.optimizer, alpha=0.5, plan_memory=True)
        left.memo.__enter__()
        plain_until_served(left)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert left.memo is not None and left.memo.memory is not None and left.memo.memory.stats is not None
    with MemoLoop(run.model, run.optimizer, alpha=0.5, plan_memory=True) as run.memo:
        plain_until_served(run)
    assert run.memo.memory is not None and run.memo.memory.use is not None
    left.memo.__exit__(None, None, None)
    assert left.memo.memory.state is MemoryState.BUILDING


@pytest.mark.slow
def test_two_loops_at_a_time_plan_the_memory_of_one() -> None:
    models = [build(), build()]
    optimizers = [sgd(model) for model in models]
    with warnings.catch_warnings(record=True) as told, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        loops = [
            stack.enter_context(MemoLoop(model, optimizer, alpha=0.5, plan_memory=True))
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for number in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss_of(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
            deadline = time.monotonic() + 60
            while number == 2 and any(memo.memory.busy for memo in loops) and time.monotonic() < deadline:
                time.sleep(0.01)
    assert sum("another training of this process" in str(each.message) for each in told) == 1
