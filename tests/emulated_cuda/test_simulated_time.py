"""The laws of the simulated clock, and what is computed at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATED = {"EMULATED_CUDA_SIMULATE": "1", "EMULATED_CUDA_DEVICES": "1", "EMULATED_CUDA_MEMORY_MIB": "143000"}


def run(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **SIMULATED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_operations_take_what_the_machine_says():
    for name, (expected, by_host, by_events) in json.loads(run(Path(__file__).parent / "clock_laws.py")).items():
        assert by_host == pytest.approx(expected, rel=0.01, abs=2e-5), name
        assert by_events == pytest.approx(expected, rel=0.01, abs=2e-5), name


SMALL_AND_LARGE = """
import simulated_time, torch
simulated_time.set_machine({"gemm_half": 1e15, "gemm_fp32": 1e13, "hbm": 1e12, "to_device": 1e10, "to_host": 1e10,
                            "pageable": 1e9, "lock": 1e9, "kernel_latency": 1e-6, "copy_latency": 1e-6, "launch": 1e-6,
                            "host_bytes": 2**30})
small = torch.arange(1000, device="cuda")
assert small.sum().item() == 499500 and int((small > 990).sum()) == 9 and small[small > 990].tolist()[0] == 991
assert small[torch.full((4,), 2**60, device="cuda")].tolist() == [0] * 4  # as memory that a large copy left as it was
large = torch.ones(2**36, dtype=torch.bfloat16, device="cuda")  # 128 GiB
assert large.mul_(2).sum().item() == 0
assert torch.cuda.max_memory_allocated() >= 2**37
for name, arguments in (("device", dict(device="cuda")), ("host", dict(pin_memory=True))):
    try:
        torch.empty(2**35, dtype=torch.uint8, **arguments)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        print(name, "out of memory")
spans = simulated_time.take_spans()
print("aten::mul_.Tensor" in simulated_time.names_of(spans), len(simulated_time.take_spans()))
begin = simulated_time.now()
sum(range(1_000_000))
print(simulated_time.now() - begin > 1e-3)
"""


def test_small_tensors_have_values_and_large_ones_take_no_memory():
    lines = run("-c", SMALL_AND_LARGE).split("\n")
    assert lines[:4] == ["device out of memory", "host out of memory", "True 0", "True"]


LIGER_AT_64K = """
import json, sys, simulated_time, torch
from liger_kernel import ops
def empty(*sizes): return torch.empty(sizes, dtype=torch.bfloat16, device="cuda", requires_grad=True)
q, k, angles = (empty(1, 65536, heads, 128).transpose(1, 2) for heads in (32, 8, 1))
a, b, x, w = empty(65536, 14336), empty(65536, 14336), empty(65536, 4096), empty(4096)
made = (
    ops.LigerRopeFunction.apply(q, k, angles.detach(), angles.detach()),
    ops.LigerSiLUMulFunction.apply(a, b),
    ops.LigerGELUMulFunction.apply(a, b),
    ops.LigerRMSNormFunction.apply(x, w.detach(), 1e-6),
    ops.LigerRMSNormFunction.apply(x, w, 1e-6),
)
for each in made:
    outputs = each if isinstance(each, tuple) else (each,)
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
spans = simulated_time.take_spans()
json.dump(list(zip(simulated_time.names_of(spans), spans["bytes"].tolist())), sys.stdout)
"""


def test_kernels_of_liger_move_the_bytes_that_they_do_on_a_gpu():
    pytest.importorskip("liger_kernel")
    element = 2 * 65536
    hidden, wide, parts_of_weight = element * 4096, element * 14336, 4 * 132 * 4096
    rope = ["_triton_rope", element * (2 * 40 * 128 + 128)]
    norm = ["_rms_norm_forward_kernel", 2 * hidden]
    forward = [rope, ["_swiglu_forward_kernel", 3 * wide], ["_geglu_tanh_forward_kernel", 3 * wide], norm, norm]
    backward = [
        rope,
        ["_swiglu_backward_kernel", 5 * wide],
        ["_geglu_tanh_backward_kernel", 5 * wide],
        ["_rms_norm_backward_kernel", 3 * hidden],
        ["_rms_norm_backward_kernel", 3 * hidden + parts_of_weight],
    ]
    moved = json.loads(run("-c", LIGER_AT_64K))
    assert [each for each in moved if each[0].startswith("_")] == forward + backward
