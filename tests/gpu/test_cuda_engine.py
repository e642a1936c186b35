"""The engine on a GPU: gradients, copies during computation, page-locked memory, and training with Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from support.alpha_plans import alpha_swap, slices_at
from support.devices import needs_real_gpu
from support.markers.slow import slow_if
from support.samples.cuda import FARTHER, MIB, TOKENS, VOCABULARY, Batch, distance, gradients, make_batch, make_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.costs import MOVED
from lightning_memo.artifacts.swap_plan import Attention
from lightning_memo.engine import Engine, RequestedSettings, TestMode
from lightning_memo.engine.copy_streams import CudaCopyStream
from lightning_memo.engine.memory import host_pages
from lightning_memo.engine.memory.host import HostArena, HostStore
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.kernels import divided_calls, select_kernel
from lightning_memo.kernels.divided_calls import DividedCalls
from lightning_memo.planner.token_slices import stored_bytes
from lightning_memo.utils.find_layers import find_stacks


@contextmanager
def attached(
    model: nn.Module, device: torch.device, test_mode: TestMode | None, attention: Attention = "sdpa"
) -> Iterator[Engine]:
    engine = Engine(model, find_stacks(model)[0].layers, device, RequestedSettings(attention, test_mode=test_mode))
    engine.attach()
    try:
        yield engine
    finally:
        engine.detach()


def load(engine: Engine, alpha: float, slice_tokens: int | None = None, attention: Attention = "sdpa") -> None:
    """Plan for the batch that was just profiled."""
    profile = engine.profile
    assert profile is not None and profile.complete
    slices = slices_at(profile.tokens, alpha, slice_tokens)
    joint = engine.layer_classes.joint_attention
    size = max(
        stored_bytes(call.saved, profile.tokens, slices, *MOVED, joint_attention=joint) for call in profile.in_order()
    )
    plan = alpha_swap(
        alpha, len(engine.layers), size, profile.tokens, joint_attention=joint,
        slice_tokens=slice_tokens, attention=attention,
    )  # fmt: skip
    engine.load(plan, profile.batch * profile.tokens)


@slow_if(lambda window, padded, slice_tokens: slice_tokens is None and (window is None) != padded)
@pytest.mark.parametrize(
    ("attention", "window", "padded"),
    [*(("sdpa", window, padded) for window in (None, 100) for padded in (False, True)), ("cudnn", None, False)],
)
@pytest.mark.parametrize(("alpha", "slice_tokens"), [(0.0, None), (0.5, None), (1.0, None), (0.5, 64)])
def test_gradients_are_those_of_plain_training(alpha, slice_tokens, window, padded, attention, device):
    """Copies are delayed at random and released memory is poisoned, which would reveal a missing wait."""
    model, batch = make_model(device, window=window), make_batch(device, padded)
    in_double = copy.deepcopy(model).to("cpu", torch.float64)
    truth = gradients(in_double, {name: t.cpu() for name, t in batch.items()})
    plain = distance(gradients(model, batch), truth)
    with attached(model, device, TestMode(seed=1, longest_delay_seconds=0.002), attention) as engine:
        assert distance(gradients(model, batch), truth) <= FARTHER * plain  # the step that is profiled
        load(engine, alpha, slice_tokens, attention)
        for _ in range(3):
            assert distance(gradients(model, batch), truth) <= FARTHER * plain
            assert engine.slots_in_use == 0
        assert engine.memory is not None
        region = engine.memory.host.arena.acquire(MIB // 4)
        assert region is not None and region.is_pinned()
        engine.memory.host.arena.release(region)
        stats = engine.memory.stats
        assert (stats.overflow_bytes, stats.unplanned_slots) == (0, 0)
        assert engine.memory.offloaded_bytes > 0 and engine.memory.fetched_bytes > 0


@slow_if(lambda attention, alpha: (attention == "sdpa") != (alpha == 1.0))
@pytest.mark.parametrize("attention", ["sdpa", "cudnn"])
@pytest.mark.parametrize(("alpha", "slice_tokens"), [(0.5, None), (1.0, 64)])
def test_packed_documents(alpha, slice_tokens, attention, device):
    """Some documents end in other slices than they begin, and rows differ."""
    model, batch = make_model(device), make_batch(device)
    model.config.use_cache = False  # with a cache, transformers ignores documents
    starts = ([0, 1, 30, 150], [0, 90])
    rows = [torch.cat([torch.arange(b - a) for a, b in pairwise([*each, TOKENS])]) for each in starts]
    batch["position_ids"] = torch.stack(rows).to(device)
    in_double = copy.deepcopy(model).to("cpu", torch.float64)
    truth = gradients(in_double, {name: t.cpu() for name, t in batch.items()})
    plain = distance(gradients(model, batch), truth)
    together = {name: t for name, t in batch.items() if name != "position_ids"}
    assert distance(gradients(model, together), truth) > 2 * FARTHER * plain
    with attached(model, device, TestMode(seed=1, longest_delay_seconds=0.002), attention) as engine:
        assert distance(gradients(model, batch), truth) <= FARTHER * plain
        load(engine, alpha, slice_tokens, attention)
        for _ in range(2):
            assert distance(gradients(model, batch), truth) <= FARTHER * plain


@slow_if(lambda attention, heads_of_call: (attention == "sdpa") != (heads_of_call == 3))
@pytest.mark.parametrize("attention", ["sdpa", "cudnn"])
@pytest.mark.parametrize("heads_of_call", [1, 3])
def test_attention_in_several_calls(heads_of_call, attention, device, monkeypatch):
    """Calls of more elements than kernels can index are divided, which is small here; rows have several documents."""
    monkeypatch.setattr(divided_calls, "LARGEST_CALL", heads_of_call * (TOKENS + 3 * 128) * 64)
    model, batch = make_model(device), make_batch(device)
    positions = torch.cat([torch.arange(length) for length in (30, 120, TOKENS - 150)])
    batch["position_ids"] = torch.stack([positions, torch.arange(TOKENS)]).to(device)
    in_double = copy.deepcopy(model).to("cpu", torch.float64)
    truth = gradients(in_double, {name: t.cpu() for name, t in batch.items()})
    plain = distance(gradients(model, batch), truth)
    calls = 0

    def divided(*args):
        nonlocal calls
        calls += 1
        return DividedCalls(*args)

    monkeypatch.setattr(select_kernel, "DividedCalls", divided)
    with attached(model, device, TestMode(seed=1, longest_delay_seconds=0.002), attention) as engine:
        assert distance(gradients(model, batch), truth) <= FARTHER * plain
        load(engine, 0.5, attention=attention)
        assert distance(gradients(model, batch), truth) <= FARTHER * plain
    assert calls >= 2 * 6  # in each layer of each step


def test_full_precision_nests_its_slices(device):
    model, batch = make_model(device, torch.float32), make_batch(device)
    plain = gradients(model, batch)
    with attached(model, device, TestMode()) as engine:
        gradients(model, batch)
        load(engine, 0.5)
        assert engine.layer_classes.joint_attention
        assert distance(gradients(model, batch), plain) <= 1e-5


# ---- copies


def milliseconds(work: Callable[[], None]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


@pytest.fixture
def arena(device) -> Iterator[HostArena]:
    pages = HostPages(device)
    pages.hold(512 * MIB)
    yield HostArena(pages, range(512 * MIB))
    torch.cuda.synchronize()
    pages.close()


@needs_real_gpu
def test_copies_run_beside_computation_and_each_other(arena, device):
    hosts = [arena.acquire(256 * MIB), arena.acquire(256 * MIB)]
    blocks = [torch.empty(256 * MIB, dtype=torch.uint8, device=device) for _ in range(2)]
    out, back = CudaCopyStream(device), CudaCopyStream(device)

    def compute() -> None:
        torch.cuda._sleep(40_000_000)

    def copies() -> None:
        events = [out.copy(hosts[0], blocks[0]), back.copy(blocks[1], hosts[1])]
        for event in events:
            event.wait()

    def both() -> None:
        events = [out.copy(hosts[0], blocks[0]), back.copy(blocks[1], hosts[1])]
        compute()
        for event in events:
            event.wait()

    for work in (compute, copies, both):
        work()
    alone, copied = milliseconds(compute), milliseconds(copies)
    assert milliseconds(both) <= 0.5 * (alone + copied) + 0.6 * max(alone, copied)


def test_a_copy_waits_for_the_computation_before_it_and_later_computation_for_the_copy(arena, device):
    host, block = arena.acquire(MIB), torch.zeros(MIB, dtype=torch.uint8, device=device)
    out, back = CudaCopyStream(device), CudaCopyStream(device)
    torch.cuda._sleep(50_000_000)
    block.fill_(7)
    gone = out.copy(host, block)
    gone.wait()
    block.fill_(0)
    back.copy(block, host, gone).wait()
    assert bool((block.clone() == 7).all())


def test_pages_are_locked_where_a_buffer_is_taken_and_unlocked_where_they_are_closed(device):
    pages = HostPages(device)
    pages.hold(6 * MIB)
    arena = HostArena(pages, range(MIB, 6 * MIB))
    slot = arena.acquire(2 * MIB)
    assert slot.is_pinned() and slot.numel() == 2 * MIB
    arena.release(slot)
    pages.close()
    pages.close()
    assert not slot.is_pinned()


def test_a_copy_does_not_cross_the_bounds_of_page_locks(device, monkeypatch):
    monkeypatch.setattr(host_pages, "PART_BYTES", 8192)
    pages, streams = HostPages(device), [CudaCopyStream(device) for _ in range(2)]
    pages.hold(50_000)
    pages.wait()
    store = HostStore(pages, range(10, 50_000), streams[0], streams[1], poison=True)
    sent = torch.randint(0, 256, (40_000,), dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match="CUDA error"):
        streams[0].copy(pages.memory[: sent.nbytes], sent)
    buffer = store.take(sent.nbytes)
    buffer.write(sent)
    back = torch.empty_like(sent)
    buffer.read(back).wait()
    assert torch.equal(back, sent)
    assert torch.equal(buffer.memory.cpu(), sent.cpu())
    part = torch.empty(17_000, dtype=torch.uint8, device=device)
    buffer.range(9_000, 17_000).read(part, streams[1]).wait()
    assert torch.equal(part, sent[9_000:26_000])
    torch.cuda.synchronize()
    store.close()
    pages.close()


# ---- Lightning


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("cpu")
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(strategy: object) -> tuple[list[float], Trainer]:
    ids = torch.randint(0, VOCABULARY, (6, TOKENS), generator=torch.Generator().manual_seed(2))
    batches = DataLoader([{"input_ids": row, "labels": row.clone()} for row in ids], batch_size=2)
    model = LanguageModel()
    trainer = Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision="bf16-true", max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, batches)
    return model.losses, trainer


@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_the_trainer_takes_the_same_steps(alpha):
    plain, _ = train("auto")
    losses, trainer = train(MemoStrategy(alpha=alpha, host_memory="8GiB"))
    assert len(losses) == 3
    assert losses == pytest.approx(plain, rel=2**-8)  # a mean of many tokens, each rounded to 8 bits
    assert isinstance(trainer.strategy, MemoStrategy) and trainer.strategy.plan is not None
