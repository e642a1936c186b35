"""Examines devices, memory, compiler and kernels of this machine, and trains a few steps of a small model.

What training would use is not concluded from versions: the parts of the package that decide it are asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shlex
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memo.allocator.planned_allocator import AllocatorLibrary
from lightning_memo.config import MemoConfig
from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.engine.memory.disk import free_disk_bytes
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.modules.fused_kernels import attach_fused
from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.select_kernel import PROBE_TOKENS
from lightning_memo.memo_loop import MemoLoop
from lightning_memo.planner.placement.placement_core import load_library
from lightning_memo.profiler.measured_costs import available_budget
from lightning_memo.utils.files import user_cache
from lightning_memo.utils.find_layers import select_layers
from lightning_memo.utils.findings import Finding
from lightning_memo.utils.free_memory import available_host_bytes, free_device_bytes
from lightning_memo.utils.native_build import BuildError, find_compiler
from lightning_memo.utils.units import format_bytes
from lightning_memo.utils.user_errors import one_line

_STEPS = 3
_LOCKED_BYTES = 256 * 2**20
_VOCABULARY, _HEADS, _HEAD = 256, 4, 128
_TOKENS = 512


def check_machine() -> Iterator[Finding]:
    """Yield what is found, one subject after the other. The last one is the training."""
    yield from _devices()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.device_count() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" and _computes_bf16() else torch.float32
    yield from _memory(device)
    yield from _compiled(device)
    for each in (torch.bfloat16, torch.float32):
        yield Finding(f"{_name(each)} attention", _attention(device, each))
    yield from _training(device, dtype)


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _computes_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _devices() -> Iterator[Finding]:
    alike: dict[str, list[int]] = {}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            slow = "" if _computes_bf16() else '; has no bf16, which is emulated slowly: precision="32-true"'
        size = format_bytes(about.total_memory)
        kind = f"{about.name}, {size}, sm_{about.major}{about.minor}{slow}"
        alike.setdefault(kind, []).append(index)
    for text, indices in alike.items():
        free = format_bytes(min(free_device_bytes(torch.device("cuda", index)) for index in indices))
        yield Finding("GPU", f"{len(indices)} x {text}; {free} free" if len(indices) > 1 else f"{text}; {free} free")
    if alike:
        return
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA; for a GPU, install a build with CUDA"
    else:
        try:
            torch.empty(0, device="cuda")
            why = "No GPU is visible (CUDA_VISIBLE_DEVICES)"
        except (RuntimeError, AssertionError) as error:
            why = one_line(str(error))
    yield Finding("GPU", f"none: training runs on {len(os.sched_getaffinity(0))} CPU cores. {why}")


def _memory(device: torch.device) -> Iterator[Finding]:
    budget = available_budget(MemoConfig.of({}), device, 0, 0)
    may = f"plans may use {format_bytes(budget.host_bytes)}"
    if device.type == "cuda":
        may += f", and {format_bytes(budget.device_bytes)} of the GPU"
    yield Finding("host memory", f"{format_bytes(available_host_bytes())} free; {may}")
    if device.type == "cuda":
        yield Finding("page locks", _page_locks(device))
    folder, cache = Path.cwd(), user_cache("native")
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    readonly = "" if os.access(folder, os.W_OK) else " (not writable)"
    places = f"{format_bytes(free_disk_bytes(folder))} free here{readonly}"
    if cache.is_dir():
        home = os.environ.get("HOME")
        shown = f"~/{cache.parent.relative_to(home)}" if home and cache.is_relative_to(home) else cache.parent
        places += f", {format_bytes(free_disk_bytes(cache))} in {shown}"
    yield Finding("disk", places)


def _page_locks(device: torch.device) -> str:
    pages = HostPages(device)
    try:
        pages.hold(_LOCKED_BYTES)
        pages.wait()
        speed = 1 / pages.locking_seconds_per_byte
    except MemoryError as refused:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
        return f"{refused} (ulimit -l: {limit})"
    finally:
        pages.close()
    return f"{format_bytes(_LOCKED_BYTES)} were locked, at {format_bytes(speed)}/s"


def _compiled(device: torch.device) -> Iterator[Finding]:
    """Tell of the compiler, and compile the native parts, which training would otherwise do in its first step."""
    try:
        command = find_compiler()
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
        yield Finding("C++ compiler", f"{shlex.join(command)}: {''.join(version.splitlines()[:1])}")
    except BuildError as error:
        yield Finding("C++ compiler", str(error))
    parts: dict[str, Callable[[], object]]
    parts = {"placement": load_library, "allocator": lambda: AllocatorLibrary(device.type)}
    compiled = []
    for name, load in parts.items():
        try:
            load()
            compiled.append(name)
        except BuildError as error:
            yield Finding("not compiled", f"{error}; training runs without it")
    if compiled:
        yield Finding("compiled", ", ".join(compiled))


def _attention(device: torch.device, dtype: torch.dtype) -> str:
    """Let the engine select the kernel for calls like those of a small model."""
    shape = (1, _HEADS, PROBE_TOKENS if device.type == "cuda" else _TOKENS, _HEAD)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    selector = AttentionSelector("auto")
    with selector.choosing():
        kernel = selector.backend(q, k, v, AttentionSpec())
    if not kernel.blocks:
        return "PyTorch's, computed twice; layers are not cut into slices"
    beaten = [each for each in selector.trials if each.name != kernel.name]
    slower = [each.name for each in beaten if not each.why_not]
    failed = [f"; {each.name}: {each.why_not}" for each in beaten if each.why_not]
    return kernel.name + (f", which is faster than {', '.join(slower)}" if slower else "") + "".join(failed)


def _training(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Train a small Llama, half of whose activations are swapped."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_HEADS * _HEAD,
        intermediate_size=4 * _HEAD,
        num_hidden_layers=4,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
    )
    started = time.perf_counter()
    with _quiet() as caught:
        model: nn.Module = LlamaForCausalLM(config)
        model.to(device, dtype)
        fused = _fused(model, device)
        loss = _train(model, device)
    yield Finding("fused kernels", fused)
    for told in dict.fromkeys(one_line(str(each.message)) for each in caught):
        if told.startswith("lightning_memo: "):
            yield Finding("note", told.removeprefix("lightning_memo: "))
    seconds = time.perf_counter() - started
    text = f"{_STEPS} steps of a small Llama in {_name(dtype)} took {seconds:.1f} s, loss {loss:.2f}"
    yield Finding("training", text, prevents_training=not loss < float("inf"))


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Inside this context, the package tells nothing; yields the list of warnings."""
    logger = logging.getLogger("lightning_memo")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield caught
    finally:
        logger.setLevel(level)


def _fused(model: nn.Module, device: torch.device) -> str:
    """Name the modules that run by fewer kernels than they call themselves."""
    layers = select_layers(model, None, alone=False)
    undo = attach_fused(layers, device)
    kinds = Counter(type(m).__name__ for layer in layers for m in layer.modules() if "forward" in vars(m))
    for each in reversed(undo):
        each()
    return ", ".join(kinds) or "none" + " (on GPUs only)" * (device.type == "cpu")


def _train(model: nn.Module, device: torch.device) -> float:
    """Return the loss of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.randint(0, _VOCABULARY, (1, _TOKENS), device=device)
    with MemoLoop(model, optimizer, alpha=0.5):
        for _ in range(_STEPS):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(loss.detach())
