"""Selection of the attention kernel that computes a call: by what it supports, and by trials of its speed.

A trial is a forward and a backward with random queries, keys and values that have the model's number of heads, head
size and dtype, at a bounded length. A kernel that raises, or whose results differ from those of the first one, is
dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memo.artifacts.swap_plan import Attention, AttentionTrial
from lightning_memo.kernels.attention_kernel import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    Kernel,
    token_major,
)
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.kernels.divided_calls import DividedCalls, PackedDocuments, is_too_large
from lightning_memo.kernels.fallback_kernels import BlockwiseAttention, Replay
from lightning_memo.kernels.flash_attention import AtenFlash, CudnnSdpa
from lightning_memo.kernels.kernel_packages import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    TRANSFORMER_ENGINE,
    FlashAttn,
    FlashAttn3,
    FlashAttn4,
    TransformerEngineAttention,
)
from lightning_memo.kernels.rng_state import RngState

_PACKAGES = {
    "flash_attn": FLASH_ATTN, "flash_attn_3": FLASH_ATTN_3, "flash_attn_4": FLASH_ATTN_4,
    "transformer_engine": TRANSFORMER_ENGINE,
}  # fmt: skip
# The first kernel is PyTorch's own. The others pass a call on to it if they do not compute it themselves.
KERNELS: dict[str, dict[Attention, type[Kernel]]] = {
    "cpu": {"sdpa": CpuFlash},
    "cuda": {
        "sdpa": AtenFlash,
        "cudnn": CudnnSdpa,
        "flash_attn": FlashAttn,
        "flash_attn_3": FlashAttn3,
        "flash_attn_4": FlashAttn4,
        "transformer_engine": TransformerEngineAttention,
    },
}
"""Kernels of each device type, by name."""
_FIRST_WITH_FLASH = (8, 0)  # the first compute capability with flash attention
_LARGEST_HEAD = 256


def check_available(choice: str) -> None:
    """Check that the package of a kernel is installed in a supported version.

    Raises:
        ValueError: See :meth:`Package.check`.
    """
    if choice in _PACKAGES:
        _PACKAGES[choice].check(choice)


def select_backend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str = "auto") -> AttentionBackend:
    """Return the kernel for an attention call.

    If no flash kernel can compute the call because of its head size, dtype, mask or dropout, PyTorch's attention is
    replayed in the backward, which is correct but slower. Calls with a cap are computed blockwise, and so are calls
    with sinks that no flash kernel can compute. Packed documents are computed one by one, or replayed with a mask.
    Calls of more than 2^31 elements are divided.

    Args:
        q: Queries, `[batch, heads, tokens, head_dim]`.
        k: Keys.
        v: Values.
        spec: The keys that each query sees.
        choice: Name of the kernel. "auto" is PyTorch's own kernel; the fastest one is found by trials, see
            :func:`try_kernels`.
    """
    backend = _select(q, k, v, spec, choice)
    is_flash = q.device.type != "cpu" and not isinstance(backend, (Replay, BlockwiseAttention))
    if spec.documents is not None and backend.blocks:
        backend = PackedDocuments(backend)
    return DividedCalls(backend) if is_flash and is_too_large(q, v, spec) else backend


def candidate_kernels(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> dict[Attention, Callable[[], AttentionBackend]]:
    """Return factories of the kernels that compute such calls themselves, whatever the padding, documents and window.

    There are none if PyTorch's attention is replayed or computed blockwise. A factory raises `ValueError` if the
    version of the kernel's package is not supported.
    """
    spec = replace(spec, window=None, lengths=None, documents=None)
    if isinstance(_select(q, k, v, spec, "auto"), (Replay, BlockwiseAttention)):
        return {}
    padded = q.shape[-1] != v.shape[-1]
    if padded:
        q, k, v, spec = _padded_heads(q, k, v, spec)
    return {
        name: functools.partial(_make, name, kind, padded)
        for name, kind in _kernels_of(q.device).items()
        if (name not in _PACKAGES or _PACKAGES[name].release() is not None) and kind.serves(q, k, spec)
    }


def _make(name: str, kind: type[Kernel], padded: bool) -> AttentionBackend:
    check_available(name)
    return _PaddedHeads(kind()) if padded else kind()


def _select(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str) -> AttentionBackend:
    serves = _cpu_flash_serves if q.device.type == "cpu" else _flash_serves
    if spec.softcap is not None:
        return BlockwiseAttention()
    if q.shape[-1] != v.shape[-1] and serves(*_padded_heads(q, k, v, spec)):
        return _PaddedHeads(_select(*_padded_heads(q, k, v, spec), choice))
    if not serves(q, k, v, spec):
        return Replay() if spec.sinks is None else BlockwiseAttention()
    kernels: Mapping[str, type[Kernel]] = _kernels_of(q.device)
    return kernels.get(choice, kernels["sdpa"])()


def _kernels_of(device: torch.device) -> dict[Attention, type[Kernel]]:
    return KERNELS["cpu" if device.type == "cpu" else "cuda"]


def _flash_serves(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Return whether a call fulfils the conditions of all CUDA kernels."""
    head = q.shape[-1]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and spec.mask is None
        and head == v.shape[-1]
        and head % 8 == 0
        and head <= _LARGEST_HEAD
        and torch.cuda.get_device_capability(q.device) >= _FIRST_WITH_FLASH
    )


def _cpu_flash_serves(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Return whether PyTorch's flash kernel computes a call, whatever `sdpa_kernel` allows around the model.

    Forwards and backwards need not run in the same context, and slices need a kernel that takes blocks.
    """
    grouped = q.shape[1] != k.shape[1]
    mask = spec.mask
    causal = spec.causal and mask is None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        picked = torch._fused_sdp_choice(q, k, v, mask, spec.dropout, causal, scale=spec.scale, enable_gqa=grouped)
    return picked == SDPBackend.FLASH_ATTENTION.value


def _padded_heads(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Return the call with zeros at the end of each head, such that all heads have the same size."""
    size = max(q.shape[-1], v.shape[-1])
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    return _padded(q, size), _padded(k, size), _padded(v, size), replace(spec, scale=scale)


def _padded(t: Tensor, size: int) -> Tensor:
    return t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1]))


class _PaddedHeads:
    """Calls a kernel with padded heads. Zeros change neither scores nor outputs, so that the result is exact.

    Args:
        inner: The kernel.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name, self.blocks = inner.name, inner.blocks

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        width = v.shape[-1]
        result = self._inner.forward(*_padded_heads(q, k, v, spec), query_start, key_start)
        return replace(result, out=token_major(result.out[..., :width]))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        query_start: int = 0,
        key_start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = max(q.shape[-1], v.shape[-1])
        result = replace(result, out=_padded(result.out, size))
        *padded, spec_of_all = _padded_heads(q, k, v, spec)
        grads = self._inner.backward(_padded(dout, size), *padded, result, spec_of_all, query_start, key_start)
        dq, dk, dv = (grad[..., : t.shape[-1]] for grad, t in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv


PROBE_TOKENS = 4096
"""Longest sequence of a trial, which takes some milliseconds on a GPU and is long enough to occupy all of it."""

_ROUNDS = 3
# Results in half precision differ by about 2^-8. The relative error of a kernel that sees wrong keys is of order 1.
_TOLERANCE = 2**-4

Timer = Callable[[Callable[[], object]], float]
"""Runs a function, waits until the device has finished, and returns the seconds it took."""

KernelFactories = Mapping[Attention, Callable[[], AttentionBackend]]


@dataclass(frozen=True, slots=True)
class ProbeInputs:
    """Inputs of a trial: q, k, v and the gradient of the output, each `[1, heads, tokens, head_dim]`, and the spec."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    spec: AttentionSpec

    @classmethod
    def like(cls, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, parts: int = 1) -> ProbeInputs:
        """Return random inputs for calls like a model's, without padding, documents and window.

        Args:
            q: Queries of the model's call, `[batch, heads, tokens, head_dim]`.
            k: Keys.
            v: Values.
            spec: Spec of the model's call.
            parts: Number of processes that share the heads in attention.
        """
        tokens = min(q.shape[2], k.shape[2], PROBE_TOKENS)
        generator = torch.Generator(q.device).manual_seed(0)

        def random(t: Tensor, head_dim: int) -> Tensor:
            shape = (1, tokens, max(t.shape[1] // parts, 1), head_dim)
            return torch.randn(shape, generator=generator, dtype=t.dtype, device=t.device).transpose(1, 2)

        spec = replace(spec, window=None, lengths=None, documents=None)
        return cls(random(q, q.shape[3]), random(k, k.shape[3]), random(v, v.shape[3]), random(q, v.shape[3]), spec)

    def run(self, backend: AttentionBackend, start: int = 0) -> tuple[Tensor, ...]:
        """Run forward and backward of the queries from `start` on, and return the output and the gradients."""
        q, dout = self.q[:, :, start:], self.dout[:, :, start:]
        result = backend.forward(q, self.k, self.v, self.spec, start)
        return result.out, *backend.backward(dout, q, self.k, self.v, result, self.spec, start)

    def run_slice(self, backend: AttentionBackend) -> tuple[Tensor, ...]:
        """Run the second half of the queries, as the attention of a slice does; nothing if the calls are not cut."""
        return self.run(backend, self.q.shape[2] // 2) if self.spec.sliceable and backend.blocks else ()


def try_kernels(factories: KernelFactories, inputs: ProbeInputs, seconds_of: Timer) -> tuple[AttentionTrial, ...]:
    """Run trials of several kernels. The random state is unchanged afterwards.

    Args:
        factories: Factories of the kernels, by name. The results of the first one are the reference.
        inputs: Inputs of the calls.
        seconds_of: Times a call. A kernel's time is the shortest of several, after one warm-up call.
    """
    trials: dict[Attention, AttentionTrial] = {}
    running: dict[Attention, AttentionBackend] = {}
    expected: tuple[Tensor, ...] | None = None
    present = RngState.capture(inputs.q.device)
    try:
        for name, make in factories.items():
            try:
                backend = make()
                found = *_measured(backend, inputs, seconds_of)[0], *inputs.run_slice(backend)
                why_not = "" if expected is None or inputs.spec.dropout else _deviation(found, expected)
            except torch.OutOfMemoryError:
                raise  # memory is short because of the step, not because of the kernel
            except Exception as error:  # a package may raise anything
                why_not = _brief(error)
            else:
                expected = found if expected is None else expected
            if why_not:
                trials[name] = AttentionTrial(name=name, why_not=why_not)
            else:
                running[name] = backend
        rounds = [
            {name: _measured(backend, inputs, seconds_of)[1] for name, backend in running.items()}
            for _ in range(_ROUNDS)
        ]
        for name in running:
            trials[name] = AttentionTrial(name=name, seconds=min(seconds[name] for seconds in rounds))
    finally:
        present.restore()
    return tuple(trials[name] for name in factories)


def agreed(trials_of_ranks: Sequence[Sequence[AttentionTrial]]) -> tuple[AttentionTrial, ...]:
    """Combine the trials of all processes: a kernel's time is the longest one, and it fails if it fails on any rank.

    Args:
        trials_of_ranks: The trials of each rank.
    """
    names = dict.fromkeys(trial.name for trials in trials_of_ranks for trial in trials)
    by_rank = [{trial.name: trial for trial in trials} for trials in trials_of_ranks]
    combined = []
    for name in names:
        same = [trials.get(name, AttentionTrial(name=name, why_not="not available")) for trials in by_rank]
        failed = [(rank, trial.why_not) for rank, trial in enumerate(same) if trial.why_not]
        if failed:
            where = f"rank {failed[0][0]}: " if len(same) > 1 else ""
            combined.append(AttentionTrial(name=name, why_not=f"{where}{failed[0][1]}"))
        else:
            seconds = [trial.seconds for trial in same if trial.seconds is not None]
            combined.append(AttentionTrial(name=name, seconds=max(seconds, default=None)))
    return tuple(combined)


def fastest_kernel(trials: Sequence[AttentionTrial]) -> Attention:
    """Return the name of the kernel with the shortest time.

    Raises:
        ValueError: No kernel was timed; the message says why.
    """
    measured = [trial for trial in trials if trial.seconds is not None]
    if not measured:
        reasons = "; ".join(f"{trial.name}: {trial.why_not}" for trial in trials)
        raise ValueError(f"no attention kernel runs on this device ({reasons})")
    return min(measured, key=lambda trial: trial.seconds or 0.0).name


def _measured(backend: AttentionBackend, inputs: ProbeInputs, seconds_of: Timer) -> tuple[tuple[Tensor, ...], float]:
    results: list[tuple[Tensor, ...]] = []
    seconds = seconds_of(lambda: results.append(inputs.run(backend)))
    return results[0], seconds


def _deviation(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Describe how results differ from the reference by more than rounding; empty if they do not."""
    names = [f"{name}{of}" for of in ("", " of a slice") for name in ("output", "dq", "dk", "dv")]
    for name, mine, theirs in zip(names, found, expected, strict=False):  # calls that are not cut have no slice
        distance, size = float((mine.float() - theirs.float()).norm()), float(theirs.float().norm())
        if not distance <= _TOLERANCE * size:
            share = distance / size if size else math.inf
            return f"its {name} differs by {share:.1%} from that of PyTorch's kernel"
    return ""


def _brief(error: Exception) -> str:
    """Return the type and the first line of an error as printable text."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}"
    return "".join(character if character.isprintable() else " " for character in text)
