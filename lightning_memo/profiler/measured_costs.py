"""Measures the machine, and converts a profiled step into the planner's inputs: costs, budget and fingerprint."""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from lightning_memo.artifacts.costs import Budget, CallCosts, LayerCosts, Product
from lightning_memo.artifacts.plan import Fingerprint
from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.config import MemoConfig
from lightning_memo.engine.copy_streams import make_copy_stream, use_device
from lightning_memo.engine.layers.step_profile import CallProfile, StepProfile
from lightning_memo.engine.memory.disk import DiskStore, free_disk_bytes
from lightning_memo.engine.memory.host import HostArena
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts
from lightning_memo.planner.make_plan import usable_device_bytes
from lightning_memo.profiler.memory_meter import WorkingSet
from lightning_memo.utils.free_memory import available_host_bytes, free_device_bytes
from lightning_memo.utils.quantized_weights import scales_of


def measure_copy_bandwidth(
    copy_out: Callable[[], object],
    copy_in: Callable[[], object],
    size_bytes: int,
    seconds: float,
    start_thread: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Time copies in both directions at once, as they run when offloads and prefetches of a step overlap.

    After one warm-up call, each function is called repeatedly in a thread of its own, until the time is over and both
    have copied at least once.

    Args:
        copy_out: Copies from device to host and returns when the copy has ended. It must release the GIL, as PyTorch's
            copies do.
        copy_in: Copies from host to device in the same way.
        size_bytes: Number of bytes that each call copies.
        seconds: Duration of the measurement.
        start_thread: Called first in each thread.

    Returns:
        Bytes per second of `copy_out` and of `copy_in`.

    Raises:
        Exception: An error that one of the functions raised.
    """
    copies = (copy_out, copy_in)
    for copy in copies:
        copy()
    copied = (threading.Event(), threading.Event())
    failed = threading.Event()

    def repeat(index: int) -> float:
        count, begin = 0, time.perf_counter()
        try:
            while not failed.is_set():
                copies[index]()
                count += 1
                copied[index].set()
                elapsed = time.perf_counter() - begin
                if elapsed >= seconds and copied[1 - index].is_set():
                    return count * size_bytes / elapsed
        except BaseException:
            failed.set()
            raise
        return 0.0

    with ThreadPoolExecutor(2, initializer=start_thread) as pool:
        offload, prefetch = pool.map(repeat, range(2))
    return offload, prefetch


_LONGEST_COPY_BYTES = 256 * 2**20
_SHORTEST_COPY_BYTES = 2**16
_BANDWIDTH_SECONDS = 0.2
# The rest of the host memory is left to the data loader, checkpoints and the system.
_USABLE_HOST_SHARE = 0.9
_USABLE_DISK_SHARE = 0.9
# Kinds of tensors that a slice recomputes if it is not swapped.
_RECOMPUTED = ("query", "key", "value", "other")


def measured_layer_costs(
    profile: StepProfile,
    step_seconds: float,
    fixed_device_bytes: int,
    working_set: WorkingSet,
    device: torch.device,
    disk_path: Path | None = None,
    arena: HostArena | None = None,
    counts_launches: bool = True,
) -> LayerCosts:
    """Return the costs of the layers in a profiled step.

    Args:
        profile: Profile of the step.
        step_seconds: Duration of the step, including the optimizer.
        fixed_device_bytes: Bytes of parameters, gradients and optimizer state.
        working_set: Peaks of the other device memory, with all layers recomputed.
        device: Where the layers run. Its copy bandwidth is measured with both directions busy.
        disk_path: Folder on a disk, whose bandwidth is measured in the same way.
        arena: Host memory of the step, which the measurement of the bandwidth uses.
        counts_launches: Whether the host was as fast as in other steps, which it is not in the test mode.
    """
    forward, both = profile.seconds_of("forward"), profile.seconds_of("backward")
    attention = profile.bytes_of("out", "lse")
    again = profile.seconds_of("recompute")
    copied = max(a + b for a, b in zip(profile.bytes_of("input"), attention, strict=True))
    copied = min(copied, _LONGEST_COPY_BYTES)
    offload, prefetch = copy_bandwidth(device, copied, arena)
    write, read = (0.0, 0.0) if disk_path is None else disk_bandwidth(disk_path, device, copied)
    return LayerCosts(
        batch=profile.batch,
        tokens=profile.tokens,
        input_bytes=profile.bytes_of("input"),
        attention_bytes=attention,
        other_bytes=profile.bytes_of(*_RECOMPUTED),
        forward_seconds=forward,
        backward_seconds=tuple(max(b - r, 0.0) for b, r in zip(both, again, strict=True)),
        recompute_seconds=recompute_seconds(profile),
        outside_seconds=max(
            step_seconds - profile.setup_seconds - profile.waited_seconds - sum(forward) - sum(both), 0.0
        ),
        offload_bytes_per_second=offload,
        prefetch_bytes_per_second=prefetch,
        fixed_device_bytes=fixed_device_bytes,
        transient_device_bytes=working_set.outside,
        # With the attention outputs, if the host had no room for them: a plan may drop them, too.
        backward_device_bytes=max(working_set.layers - max(profile.slice_bytes_of(*_RECOMPUTED)), 0),
        disk_write_bytes_per_second=write,
        disk_read_bytes_per_second=read,
        # A CPU computes while it launches.
        launch_seconds=profile.launch_seconds if counts_launches and device.type == "cuda" else 0.0,
    )


def recompute_seconds(profile: StepProfile) -> tuple[float, ...]:
    """Return the seconds in which each layer call of a profiled step is computed again, without attention.

    It computes what the forward did. A recomputation that took longer waited for the host, for which later steps do not
    wait where backwards keep the device busy.

    Args:
        profile: Profile of the step.
    """
    names = (
        "recompute",
        "attention_again",
        "forward",
        "attention",
    )  # attention again: the host had no room for outputs
    calls = zip(*map(profile.seconds_of, names), strict=True)
    return tuple(
        min(again - attending, max(forward - attention, 0.0)) for again, attending, forward, attention in calls
    )


def measured_call_costs(profile: StepProfile, costs: LayerCosts) -> list[CallCosts]:
    """Return the costs of each kind of tensor in the layer calls of a profiled step.

    Args:
        profile: Profile of the step, including matrix products.
        costs: Costs of the layers in the step.
    """
    attention = profile.seconds_of("attention")
    return [_call_costs(call, costs, n, attention[n]) for n, call in enumerate(profile.in_order())]


def _call_costs(call: CallProfile, costs: LayerCosts, number: int, attention_seconds: float) -> CallCosts:
    products = tuple(Product(name=p.name, size_bytes=p.size_bytes, seconds=p.seconds) for p in call.products)
    elementwise = costs.recompute_seconds[number] - sum(product.seconds for product in products)
    bounded = [window for window in call.windows if window is not None]
    return CallCosts(
        input_bytes=costs.input_bytes[number],
        attention_bytes=costs.attention_bytes[number],
        other_bytes=costs.other_bytes[number],
        products=products,
        forward_seconds=costs.forward_seconds[number],
        backward_seconds=costs.backward_seconds[number],
        attention_seconds=attention_seconds,
        elementwise_seconds=max(elementwise, 0.0),
        window_tokens=max(bounded) if bounded and len(bounded) == len(call.windows) else None,
    )


def copy_bandwidth(device: torch.device, size_bytes: int, arena: HostArena | None = None) -> tuple[float, float]:
    """Return the bytes per second from device to host and back, both at once, with the engine's copy streams.

    Args:
        device: The device.
        size_bytes: Longest copy.
        arena: Host memory to copy with. If it is in use, or empty, pages are locked for the measurement.
    """
    pages = HostPages(device)
    if arena is None or arena.bytes_in_use or arena.size_bytes < 2:
        pages.hold(2 * size_bytes)
        arena = HostArena(pages, range(2 * size_bytes))
    blocks = _device_blocks(min(size_bytes, arena.size_bytes // 2), device)
    size_bytes = blocks[0].nbytes
    acquired = [arena.acquire(size_bytes) for _ in range(2)]
    hosts = [buffer for buffer in acquired if buffer is not None]
    streams = [make_copy_stream(device, name) for name in ("offload", "prefetch")]

    def copy_out() -> None:
        streams[0].copy(hosts[0], blocks[0])
        streams[0].synchronize()

    def copy_in() -> None:
        streams[1].copy(blocks[1], hosts[1])
        streams[1].synchronize()

    try:
        start = functools.partial(use_device, device)
        return measure_copy_bandwidth(copy_out, copy_in, size_bytes, _BANDWIDTH_SECONDS, start)
    finally:
        for stream in streams:
            stream.close()
        for buffer in hosts:
            arena.release(buffer)
        pages.close()


def _device_blocks(size_bytes: int, device: torch.device) -> list[Tensor]:
    """Return two blocks of at most this size: the step may have left little of the device."""
    try:
        return [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    except torch.OutOfMemoryError:
        if size_bytes <= _SHORTEST_COPY_BYTES:
            raise
    return _device_blocks(size_bytes // 2, device)


def disk_bandwidth(folder: Path, device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Return the bytes per second from device to disk and back, both at once, with the engine's file.

    Raises:
        DiskError: The disk does not have the space, or it failed.
        ValueError: The folder cannot be used.
    """
    sizes = DiskLayout(max(size_bytes, 1))
    disk = DiskStore(folder, 2 * sizes.region_bytes, sizes, device)
    going, coming = (torch.zeros(sizes.region_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    there, back = disk.take(sizes.region_bytes), disk.take(sizes.region_bytes)
    assert there is not None and back is not None
    back.write(going)
    back.synchronize()

    def write() -> None:
        there.write(going)
        there.synchronize()

    def read() -> None:
        back.read(coming).synchronize()

    try:
        start = functools.partial(use_device, device)
        return measure_copy_bandwidth(write, read, sizes.region_bytes, _BANDWIDTH_SECONDS, start)
    finally:
        disk.close()


def state_bytes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return this process's bytes of parameters, buffers, gradients of trained parameters, and optimizer state.

    An optimizer that has not stepped yet, because gradients are accumulated, has no state. It is assumed to keep two
    moments of every parameter, like Adam.
    """
    gradients = sum(_local_bytes(p) for p in model.parameters() if p.requires_grad)
    return weight_bytes(model) + gradients + sum(_optimizer_bytes(optimizer) for optimizer in optimizers)


def weight_bytes(model: nn.Module) -> int:
    """Return this process's bytes of parameters, with the scales of quantised ones, and buffers."""
    scales = (scale for p in model.parameters() for scale in scales_of(p))
    return sum(map(_local_bytes, [*model.parameters(), *model.buffers(), *scales]))


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    if not optimizer.state:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        return 2 * sum(map(_local_bytes, trained))
    return sum(_local_bytes(t) for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor))


def _local_bytes(t: Tensor) -> int:
    return sum(part.nbytes for part in plain_parts(t))


def estimated_working_set(profile: StepProfile, earlier: LayerCosts | None) -> WorkingSet:
    """Estimate the working set of a profiled step whose memory was not measured.

    Args:
        profile: Profile of the step.
        earlier: Costs of a shorter batch, from which the working set is scaled by the number of tokens. With `None`,
            the activations of the largest layer are taken instead, which is too little if the logits are larger.
    """
    if earlier is None:
        kinds = ("input", "out", "lse", *_RECOMPUTED)
        return WorkingSet(layers=max(profile.slice_bytes_of(*kinds)), outside=0)
    grown = profile.batch * profile.tokens / (earlier.batch * earlier.tokens)
    layers = math.ceil(earlier.backward_device_bytes * grown) + max(profile.slice_bytes_of(*_RECOMPUTED))
    return WorkingSet(layers=layers, outside=math.ceil(earlier.transient_device_bytes * grown))


def available_budget(
    config: MemoConfig, device: torch.device, fixed_device_bytes: int, held_host_bytes: int, processes: int = 1
) -> Budget:
    """Return the memory that a process may use: the user's limits, or the memory that is free now.

    Args:
        config: The user's settings.
        device: Where the layers run.
        fixed_device_bytes: Device bytes that the process needs with any plan.
        held_host_bytes: Host bytes that the engine holds for the profile and frees before the plan is executed.
        processes: Number of processes on this node, which share its host memory and its disk evenly.
    """
    limit = config.device_memory_bytes
    if limit is None:
        free_bytes = free_device_bytes(device) // (processes if device.type == "cpu" else 1)
        limit = usable_device_bytes(fixed_device_bytes, free_bytes)
    return Budget(
        device_bytes=limit,
        host_bytes=host_budget(config, held_host_bytes, processes),
        disk_bytes=_disk_bytes(config) // processes,
    )


def host_budget(config: MemoConfig, held_host_bytes: int, processes: int) -> int:
    """Return the host bytes that a process may use; see `available_budget`."""
    host = config.host_memory_bytes
    if host is None:
        host = int(_USABLE_HOST_SHARE * (available_host_bytes() + processes * held_host_bytes))
    return host // processes


def _disk_bytes(config: MemoConfig) -> int:
    if config.disk_path is None:
        return 0
    limit = config.disk_memory_bytes
    return int(_USABLE_DISK_SHARE * free_disk_bytes(Path(config.disk_path))) if limit is None else limit


def fingerprint(
    model: nn.Module, profile: StepProfile, precision: str, device: torch.device, parallel: str
) -> Fingerprint:
    """Return the fingerprint of a run, which says for which runs a plan is valid."""
    run = run_fingerprint(model, precision, device, parallel)
    return Fingerprint(batch=profile.batch, tokens=profile.tokens, **run)


def run_fingerprint(model: nn.Module, precision: str, device: torch.device, parallel: str) -> dict[str, str]:
    """Return the part of the fingerprint that is known before the first batch."""
    return {
        "model": model_fingerprint(model),
        "precision": precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parallel": parallel,
    }


def model_fingerprint(model: nn.Module) -> str:
    """Return the model's class name with a digest of the names, shapes and dtypes of its parameters."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}\n".encode())
    # FSDP2 changes the class of a module.
    own = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return f"{own.__name__}-{digest.hexdigest()[:16]}"
