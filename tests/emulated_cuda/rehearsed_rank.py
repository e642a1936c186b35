"""A program for `test_rehearsed_rank.py`: prints what collectives take, and give, to one rank in simulated time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from simulated_time import now

from lightning_memo.parallel.ranks import processes_on_this_node
from lightning_memo.utils.free_memory import available_host_bytes

NETWORK = json.loads(os.environ["EMULATED_CUDA_MACHINE"])
BYTES = 1 << 30
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
rank, ranks = dist.get_rank(), dist.get_world_size()
part, whole = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in (BYTES, ranks * BYTES))
matrix = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)


def takes(sent_bytes: float) -> float:
    return float(NETWORK["network_latency"] + sent_bytes / NETWORK["network"])


def ring() -> None:
    ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
    received = torch.empty_like(part)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, part, ahead), dist.P2POp(dist.irecv, received, behind)]):
        work.wait()


def beside_products() -> None:
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    for _ in range(4):
        matrix @ matrix
    work.wait()


def measure(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = now()
    work()
    torch.cuda.synchronize()
    return now() - begin


def collectives() -> dict[str, tuple[float, float]]:
    """The time that each takes, and the one that it should."""
    others = (ranks - 1) * BYTES
    cases: dict[str, tuple[Callable[[], object], float]] = {
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), others),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), others),
        "all-reduce": (lambda: dist.all_reduce(part), 2 * others / ranks),
        "broadcast": (lambda: dist.broadcast(part, src=0), BYTES),
        "all-to-all": (lambda: dist.all_to_all_single(torch.empty_like(part), part), others / ranks),
        "ring": (ring, BYTES),
        "beside products": (beside_products, others),
    }
    for work, _ in cases.values():
        work()  # the first one forms the communicator
    return {name: (measure(work), takes(sent)) for name, (work, sent) in cases.items()}


def values() -> dict[str, list[float]]:
    """What small collectives give, if all ranks give the same as this one."""
    own = torch.arange(ranks, dtype=torch.float32, device="cuda")
    total, counts, received = own.clone(), torch.empty_like(own), torch.empty_like(own)
    dist.all_reduce(total)
    dist.all_to_all_single(counts, own)
    ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, ahead), dist.P2POp(dist.irecv, received, behind)]):
        work.wait()
    row = torch.arange(2**20).pin_memory().cuda(non_blocking=True)
    every = torch.empty(ranks * len(row), dtype=row.dtype, device="cuda")
    dist.all_gather_into_tensor(every, row)
    return {
        "sum": total.tolist(),
        "counts": counts.tolist(),
        "ring": received.tolist(),
        "all": every[:: len(row) - 1][:3].tolist(),
    }


def what_others_do_not() -> str:
    try:
        dist.gather(matrix, [torch.empty_like(matrix) for _ in range(ranks)], dst=rank)
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return ""


host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
result = {
    "host_bytes": available_host_bytes(),
    "collectives": collectives(),
    "values": values(),
    "refused": what_others_do_not(),
    "processes": processes_on_this_node(),
}
sys.stdout.write("\n" + json.dumps(result) + "\n")
