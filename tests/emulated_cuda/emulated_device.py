"""The CUDA build of PyTorch without a GPU: an emulated device with real streams and right numbers.

It is loaded at the end of `import torch` (entry point `torch.backends`).
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_runtime: ctypes.CDLL | None = None
_operators: ctypes.CDLL | None = None


def load() -> None:
    """Replace PyTorch's CUDA operators in this process."""
    global _runtime, _operators
    if _operators is not None:
        return
    import torch
    import torch._meta_registrations  # shapes of operators that have no C++ ones

    libraries = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"
    _runtime = ctypes.CDLL(str(libraries / "libcudart.so.13"))
    _operators = ctypes.CDLL(str(libraries / "libemulated_cuda_operators.so"))
    _operators.emulated_cuda_inline_operators.restype = ctypes.c_char_p
    _operators.emulated_cuda_install()
    import triton_kernels

    sys.meta_path.insert(0, triton_kernels.ReplaceLaunch())
    if _runtime.emulated_cuda_simulates():
        import simulated_time

        simulated_time.start()


def runtime() -> ctypes.CDLL:
    """Return the library of the emulated runtime."""
    assert _runtime is not None
    return _runtime


def set_delays(copy_microseconds: int = 0, kernel_microseconds: int = 0) -> None:
    """Set the longest random delay of each copy, and of each kernel."""
    runtime().emulated_cuda_set_delays(ctypes.c_long(copy_microseconds), ctypes.c_long(kernel_microseconds))


def set_memory(size_bytes: int) -> None:
    """Set the memory of each device."""
    runtime().emulated_cuda_set_memory(ctypes.c_size_t(size_bytes))


def count(name: str) -> int:
    """Return a counter: "launched", "copies", "host_waits", "unknown_kernels", "pinned_bytes" or "pinned_peak"."""
    counter = getattr(runtime(), f"emulated_cuda_{name}")
    counter.restype = ctypes.c_long
    return int(counter())


def contexts() -> set[int]:
    """Return the devices on which this process has a context."""
    bits = count("contexts")
    return {device for device in range(bits.bit_length()) if bits >> device & 1}


def inline_operators() -> str:
    """Return the operators that made the host wait although a GPU would not, one per line with their number of calls.

    They hide races between the host and the device.
    """
    assert _operators is not None
    found: bytes = _operators.emulated_cuda_inline_operators()
    return found.decode()
