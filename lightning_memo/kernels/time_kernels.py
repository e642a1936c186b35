"""Timing of attention kernels, to find the fastest one for calls like the model's.

A trial is a forward and a backward with random queries, keys and values that have the model's number of heads, head
size and dtype, at a bounded length. A kernel that raises, or whose results differ from those of the first one, is
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_memo.artifacts.plan import AttentionTrial
from lightning_memo.artifacts.swap_plan import Attention
from lightning_memo.kernels.attention_kernel import AttentionBackend, AttentionSpec
from lightning_memo.kernels.rng_state import RngState

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
