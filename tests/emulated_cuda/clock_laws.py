"""A program for `test_simulated_time.py`, in simulated time: prints what each case should take, and took."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import simulated_time
import torch
from simulated_time import now
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

MACHINE = {
    "gemm_half": 750e12, "gemm_fp32": 50e12, "flash_forward": 430e12, "flash_backward": 350e12, "cudnn_forward": 600e12,
    "cudnn_backward": 500e12, "hbm": 4e12, "to_device": 50e9, "to_host": 40e9, "pageable": 10e9, "lock": 4e9,
    "kernel_latency": 3e-6, "copy_latency": 8e-6, "launch": 1e-9, "query": 0.0, "allocate": 0.0, "host_scale": 0.0,
}  # fmt: skip
SIDE, COPIED, TOKENS, HEADS, HEAD = 8192, 1 << 30, 16384, 32, 128

simulated_time.set_machine(MACHINE)
a, b = (torch.empty(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
device, other_device = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
host, other_host = (torch.empty(COPIED, dtype=torch.uint8, pin_memory=True) for _ in range(2))
first, second = torch.cuda.Stream(), torch.cuda.Stream()
q = torch.empty(1, HEADS, TOKENS, HEAD, device="cuda", dtype=torch.bfloat16)
k = torch.empty(1, 8, TOKENS, HEAD, device="cuda", dtype=torch.bfloat16)
v = torch.empty_like(k)

PRODUCT = MACHINE["kernel_latency"] + 2 * SIDE**3 / MACHINE["gemm_half"]
SUM = MACHINE["kernel_latency"] + 3 * 2 * SIDE**2 / MACHINE["hbm"]
TO_HOST = MACHINE["copy_latency"] + COPIED / MACHINE["to_host"]
TO_DEVICE = MACHINE["copy_latency"] + COPIED / MACHINE["to_device"]
CAUSAL = 4 * HEADS * HEAD * TOKENS * (TOKENS + 1) / 2


def products(count: int = 16) -> None:
    for _ in range(count):
        torch.mm(a, b)


def offload(stream: torch.cuda.Stream, target: torch.Tensor = host) -> None:
    with torch.cuda.stream(stream):
        target.copy_(device, non_blocking=True)


def prefetch(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        other_device.copy_(other_host, non_blocking=True)


def product_behind_copy() -> None:
    offload(first)
    torch.cuda.current_stream().wait_stream(first)
    products()


def copy_behind_product() -> None:
    products()
    first.wait_stream(torch.cuda.current_stream())
    offload(first)


def attention(backend: SDPBackend) -> None:
    with sdpa_kernel(backend), torch.no_grad():
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


CASES: dict[str, tuple[Callable[[], object], float]] = {
    "products": (products, 16 * PRODUCT),
    "product and sum": (lambda: torch.mm(a, b).add_(a), PRODUCT + SUM),
    "copy beside products": (lambda: (offload(first), products()), max(TO_HOST, 16 * PRODUCT)),
    "products beside products": (lambda: (products(), torch.cuda.set_stream(first), products()), 32 * PRODUCT),
    "copies both ways": (lambda: (offload(first), prefetch(second)), max(TO_HOST, TO_DEVICE)),
    "two copies one way": (lambda: (offload(first), offload(second, other_host)), 2 * TO_HOST),
    "products behind a copy": (product_behind_copy, TO_HOST + 16 * PRODUCT),
    "copy behind products": (copy_behind_product, TO_HOST + 16 * PRODUCT),
    "flash, causal": (lambda: attention(SDPBackend.FLASH_ATTENTION), CAUSAL / MACHINE["flash_forward"]),
    "cudnn, causal": (lambda: attention(SDPBackend.CUDNN_ATTENTION), CAUSAL / MACHINE["cudnn_forward"]),
    "pageable": (lambda: device.copy_(torch.empty(COPIED, dtype=torch.uint8)), COPIED / MACHINE["pageable"]),
    "lock": (lambda: torch.empty(COPIED * 2, dtype=torch.uint8, pin_memory=True), 2 * COPIED / MACHINE["lock"]),
    "compute of the host": (lambda: sum(range(10_000_000)), 0.0),
}


def measure(work: Callable[[], object]) -> list[float]:
    """Seconds by the host's clock and by the device's events."""
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    begin = now()
    events[0].record()
    work()
    for stream in (first, second, torch.cuda.current_stream()):
        torch.cuda.default_stream().wait_stream(stream)
    events[1].record(torch.cuda.default_stream())
    torch.cuda.synchronize()
    return [now() - begin, events[0].elapsed_time(events[1]) / 1e3]


json.dump({name: [expected, *measure(work)] for name, (work, expected) in CASES.items()}, sys.stdout)
