"""Several processes on the emulated device: collectives, contexts, and training through Lightning's own launcher."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from support.architectures.hybrids import make_hybrid
from support.devices import DEVICE, emulated_device
from support.modes import BY_KIND
from support.parallel_training import Outcome, Run, train, train_alone, train_together
from support.processes import ProcessError, run_in_processes
from support.samples.configurations import CONFIGURATIONS
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from lightning_memo import MemoLoop

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs TEST_DEVICE=cuda")

SIZE = 300_000  # more than a channel of the emulated NCCL holds


def numbers(rank: int, dtype: torch.dtype, size: int = SIZE) -> Tensor:
    """What a rank contributes: small integers, whose sums are exact in every dtype."""
    return torch.randint(0, 5, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def equal(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.cpu(), expected), (found, expected)


def reductions(dtype: torch.dtype) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = torch.stack([numbers(r, dtype) for r in range(ranks)])
    own = numbers(rank, dtype).cuda()
    for operation, expected in (("SUM", every.sum(0)), ("MAX", every.amax(0)), ("MIN", every.amin(0))):
        t = own.clone()
        dist.all_reduce(t, getattr(dist.ReduceOp, operation))
        equal(t, expected.to(dtype))
    part = torch.empty(SIZE // ranks, dtype=dtype, device="cuda")
    dist.reduce_scatter_tensor(part, own)
    equal(part, every.sum(0).chunk(ranks)[rank].to(dtype))
    if dtype.is_floating_point:
        t = own.clone()
        dist.all_reduce(t, dist.ReduceOp.AVG)
        equal(t, (every.double().sum(0) / ranks).to(dtype))


def movements() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = numbers(rank, torch.float32).cuda()
    every = torch.empty(ranks * SIZE, device="cuda")
    dist.all_gather_into_tensor(every, own)
    equal(every, torch.cat([numbers(r, torch.float32) for r in range(ranks)]))
    t = own.clone()
    dist.broadcast(t, src=1)
    equal(t, numbers(1, torch.float32))
    swapped = torch.empty_like(own)
    dist.all_to_all_single(swapped, own)
    equal(swapped, torch.cat([numbers(r, torch.float32).chunk(ranks)[rank] for r in range(ranks)]))
    behind = torch.empty_like(own)
    ahead, before = (rank + 1) % ranks, (rank - 1) % ranks
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, ahead), dist.P2POp(dist.irecv, behind, before)]):
        work.wait()
    equal(behind, numbers(before, torch.float32))


def groups() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(first, ranks, 2))) for first in range(2)]
    t = numbers(rank, torch.float32).cuda()
    dist.all_reduce(t, group=halves[rank % 2])
    equal(t, torch.stack([numbers(r, torch.float32) for r in range(rank % 2, ranks, 2)]).sum(0))


def collectives() -> None:
    emulated_device.set_delays(5_000, 500)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            reductions(dtype)
        movements()
        groups()
    finally:
        emulated_device.set_delays()


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_are_right(ranks: int) -> None:
    run_in_processes(ranks, collectives)


def without_a_wait() -> bool:
    """Whether a result that nobody waited for is there."""
    t = torch.ones(SIZE, device="cuda")
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # 2 seconds: longer than what a busy machine does in between
    work = dist.all_reduce(t, async_op=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # does not wait for the collective, as the current stream would
        seen = t.clone()
    side.synchronize()
    work.wait()
    torch.cuda.synchronize()
    assert bool((t == dist.get_world_size()).all())
    return bool((seen == dist.get_world_size()).all())


def test_collectives_run_on_a_stream_of_their_own() -> None:
    assert run_in_processes(2, without_a_wait) == [False, False]


def disagree() -> None:
    t = torch.ones(SIZE, device="cuda")
    if dist.get_rank() == 0:
        dist.all_reduce(t)
    else:
        dist.broadcast(t, src=1)
    torch.cuda.synchronize()


def test_ranks_that_disagree_end() -> None:
    with pytest.raises(ProcessError, match="the process ended"):
        run_in_processes(2, disagree)


def contexts_of(folder: str) -> set[int]:
    run = Run(steps=2, precision="bf16-mixed")
    train(run, {"alpha": 0.5, "zero_stage": 3, "disk_path": folder, "disk_memory": "64MiB"})
    return set(emulated_device.contexts())


def test_a_process_has_a_context_on_its_own_device_only(tmp_path: Path) -> None:
    """Threads start on device 0: those that copy, measure or spill must not open a context there."""
    assert run_in_processes(2, contexts_of, str(tmp_path)) == [{0}, {1}]


SCRIPT = """
import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning_memo import MemoStrategy
from support.parallel_training import LR, Run, Texts
from support.trainer_harness import LanguageModel, make_trainer
from torch.utils.data import DataLoader

run = Run(precision="bf16-mixed", steps=3)
settings = json.loads(sys.argv[2])


class Gathers(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        for p in module.parameters():
            assert (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).isfinite().all()


module = LanguageModel(run.build, lr=LR)
trainer = make_trainer(
    MemoStrategy(**settings), devices=int(sys.argv[1]), precision=run.precision, max_steps=run.steps,
    callbacks=[Gathers()],
)
torch.manual_seed(1)
trainer.fit(module, DataLoader(Texts(run), batch_size=1))
Path(f"losses{trainer.global_rank}").write_text(json.dumps(module.losses))
"""


RING = {"context_parallel_size": 2, "alpha": 0.5}
OFFLOADED = {"zero_stage": 3, "offload_state": True, "alpha": 0.5}


@pytest.mark.parametrize(("devices", "settings"), [(2, RING), (4, RING), (2, OFFLOADED)], ids=str)
def test_the_trainer_starts_the_processes(devices: int, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}:{tests}"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    arguments = [str(devices), json.dumps(settings)]
    done = subprocess.run(
        [sys.executable, "script.py", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [json.loads((tmp_path / f"losses{rank}").read_text()) for rank in range(devices)]
    assert all(len(each) == 3 and all(map(math.isfinite, each)) for each in losses)


def late(run: Run, settings: dict[str, Any]) -> Outcome:
    emulated_device.set_delays(5_000, 200)
    try:
        return train(run, settings)
    finally:
        emulated_device.set_delays()


# Ring attention takes half precision on CUDA. The other configurations run in FP32 in tests/parallel.
@pytest.mark.parametrize(
    ("configuration", "settings"),
    [
        ("cp2 ring", {"alpha": 1.0}),
        ("cp4 ulysses2 x ring2", {"alpha": 0.5}),
        ("dp2 x cp2", {"alpha": 0.5, "zero_stage": 2}),
        ("cp2 x tp2+sp", {"alpha": 0.5}),
        ("dp2 x cp2 zero3 ulysses", {"alpha": 0.5}),
        ("dp2 x tp2+sp zero3", {"alpha": 0.0}),
        ("dp2 x tp2+sp zero3", {"alpha": 1.0, "stream_from_host": "hidden", "slice_tokens": 4}),
        ("dp2 x tp2+sp zero3", {"alpha": 0.5, "stream_from_host": "attention", "slice_tokens": 4, "zero_stage": 2}),
        ("cp2 ring", {"alpha": 0.5, "stream_from_host": "hidden", "slice_tokens": 4}),
        ("cp2 ring", {"test_mode": BY_KIND, "device_memory": "0.8MiB"}),
        ("cp2 x tp2+sp", {"test_mode": BY_KIND, "device_memory": "0.43MiB"}),
    ],
)
def test_half_precision_with_late_copies_and_kernels(configuration: str, settings: dict[str, Any]) -> None:
    run = Run(family="llama_gqa", precision="bf16-mixed", steps=2, layers=3)
    size, of_configuration = CONFIGURATIONS[configuration]
    first: Outcome = run_in_processes(size, late, run, of_configuration | settings)[0]
    errors = first.worst_error(train_alone(run))
    assert errors["gradients"] <= 2**-4 and errors["norm"] <= 2**-5, errors


@pytest.mark.parametrize("config", ["Qwen3NextConfig", "BambaConfig"])
def test_states_beside_ring_attention_with_late_copies_and_kernels(config: str) -> None:
    run = Run(family=functools.partial(make_hybrid, config), tokens=45, precision="bf16-mixed", steps=2)
    first: Outcome = run_in_processes(2, late, run, RING)[0]
    errors = first.worst_error(train_alone(run))
    assert errors["gradients"] <= 2**-4 and errors["norm"] <= 2**-5, errors


class Waits(Callback):
    """Counts the host's waits in the third step, up to the end of the backward."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {"waits": 0}

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.notes["waits"] = -emulated_device.count("host_waits")

    @override
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self.notes["waits"] < 0:
            self.notes["waits"] += emulated_device.count("host_waits")


@pytest.mark.parametrize(("alpha", "exchanges"), [(0.0, 8), (1.0, 4)])
def test_the_host_waits_once_for_each_layer_with_experts_and_each_exchange(alpha: float, exchanges: int) -> None:
    """For the slices, and for the numbers of rows. Reading a tensor is two waits: for the copy, and for the stream."""
    layers = 4
    run, settings = Run(family="qwen3_moe", layers=layers), {"alpha": alpha, "check_slices": False}
    whole, divided = (
        train_together(2, run, settings | {"expert_parallel_size": size}, watch=Waits).notes["waits"] for size in (1, 2)
    )
    assert divided == [waits + 2 * (layers + exchanges) for waits in whole]


class Memory(Callback):
    """Notes the peak of the last step, beyond what its plan says."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.reset_peak_memory_stats()

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        plan, peak = trainer.strategy.plan, torch.cuda.max_memory_allocated()
        self.notes = {"beyond": peak - plan.device_bytes, "peak": peak}


@pytest.mark.parametrize("blocks", [1, 2])
def test_plans_have_room_for_the_gradients_of_weights_that_wait(blocks: int) -> None:
    run = Run(family="llama_gqa", tokens=256, batch=6, layers=8)
    settings = {"pipeline_parallel_size": 2, "virtual_pipeline_size": blocks, "alpha": 0.5}
    usual, later = (
        train_together(2, run, settings | {"pipeline_schedule": name}, watch=Memory).notes
        for name in ("1f1b", "zero_bubble")
    )
    assert later["peak"][1] > 1.2 * usual["peak"][1]  # what waits on the last stage
    # The memory of such a small model is planned less well than that of larger ones, but with both orders alike. Hidden
    # states that are being sent take up to 4 %; what one backward leaves is 19 %.
    assert all(b - a <= 0.06 * peak for a, b, peak in zip(usual["beyond"], later["beyond"], later["peak"], strict=True))


def refusal_of_fsdp1() -> str:
    model = FullyShardedDataParallel(Run().build().cuda())
    try:
        with MemoLoop(model, torch.optim.SGD(model.parameters())):
            return ""
    except ValueError as error:
        return str(error)


def test_fsdp1_is_refused() -> None:
    for line in run_in_processes(2, refusal_of_fsdp1):
        assert line.startswith("the model is sharded by FSDP1")


def test_full_precision_is_refused_in_slices_whose_heads_are_exchanged() -> None:
    size, settings = CONFIGURATIONS["cp2 ulysses"]
    line = r'in half precision only on a GPU, and not in torch\.float32: set stream_from_host="none"'
    with pytest.raises(ProcessError, match=line):
        train_together(size, Run(), settings | {"stream_from_host": "hidden", "slice_tokens": 4})
