"""Which of several attention kernels is the fastest: tried side by side on calls like the model's.

A trial is a forward and a backward on random queries, keys and values with the model's own heads, dimensions and type,
at a bounded length. A kernel that raises, or whose results are not those of the first one, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_memo.artifacts.plan import AttentionTrial
from lightning_memo.artifacts.swap_plan import Attention
from lightning_memo.kernels.attention_kernel import AttentionBackend, AttentionSpec
from lightning_memo.kernels.rng import RngState

PROBE_TOKENS = 4096
"""Longest sequence of a trial: some milliseconds on a GPU, and long enough to keep all of it busy."""

_ROUNDS = 3
# Results in half precision are 2^-8 from each other; a kernel that sees the wrong keys is as far off as they are large.
_TOLERANCE = 2**-4

Cost = Callable[[Callable[[], object]], float]
"""Runs something, waits for it, and says how many seconds it took."""

Makers = Mapping[Attention, Callable[[], AttentionBackend]]


@dataclass(frozen=True, slots=True)
class ProbeInputs:
    """q, k, v and the output's gradient of a trial, `[1, heads, tokens, head_dim]`, and what a query sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    spec: AttentionSpec

    @classmethod
    def like(cls, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, parts: int = 1) -> ProbeInputs:
        """Random ones for calls like a model's, whatever the padding, documents and window of the batch at hand.

        Args:
            q: Queries `[batch, heads, tokens, head_dim]`.
            k: Keys.
            v: Values.
            spec: Of the call.
            parts: Processes that share the heads in attention.
        """
        tokens = min(q.shape[2], k.shape[2], PROBE_TOKENS)
        generator = torch.Generator(q.device).manual_seed(0)

        def random(t: Tensor, head_dim: int) -> Tensor:
            shape = (1, tokens, max(t.shape[1] // parts, 1), head_dim)
            return torch.randn(shape, generator=generator, dtype=t.dtype, device=t.device).transpose(1, 2)

        spec = replace(spec, window=None, lengths=None, documents=None)
        return cls(random(q, q.shape[3]), random(k, k.shape[3]), random(v, v.shape[3]), random(q, v.shape[3]), spec)

    def run(self, backend: AttentionBackend) -> tuple[Tensor, ...]:
        """Output, and gradients of q, k and v."""
        result = backend.forward(self.q, self.k, self.v, self.spec)
        return result.out, *backend.backward(self.dout, self.q, self.k, self.v, result, self.spec)


def try_kernels(makers: Makers, inputs: ProbeInputs, seconds_of: Cost) -> tuple[AttentionTrial, ...]:
    """Try kernels side by side, and leave the random state as it was.

    Args:
        makers: Makers of the kernels, by name; the first tells what is right.
        inputs: Of the calls.
        seconds_of: Measures; each kernel gets the least of some times, after one that counts for nothing.
    """
    trials: dict[Attention, AttentionTrial] = {}
    running: dict[Attention, AttentionBackend] = {}
    expected: tuple[Tensor, ...] | None = None
    present = RngState.capture(inputs.q.device)
    try:
        for name, make in makers.items():
            try:
                backend = make()
                found, _ = _measured(backend, inputs, seconds_of)
                why_not = "" if expected is None or inputs.spec.dropout else _deviation(found, expected)
            except torch.OutOfMemoryError:
                raise  # of the step, not of the kernel
            except Exception as error:  # whatever a package raises
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
    return tuple(trials[name] for name in makers)


def agreed(trials_of_ranks: Sequence[Sequence[AttentionTrial]]) -> tuple[AttentionTrial, ...]:
    """Trials of all processes as one: a kernel is as slow as on the slowest, and dropped if it is on any.

    Args:
        trials_of_ranks: Trials by rank.
    """
    names = dict.fromkeys(trial.name for trials in trials_of_ranks for trial in trials)
    by_rank = [{trial.name: trial for trial in trials} for trials in trials_of_ranks]
    together = []
    for name in names:
        same = [trials.get(name, AttentionTrial(name=name, why_not="not available")) for trials in by_rank]
        failed = [(rank, trial.why_not) for rank, trial in enumerate(same) if trial.why_not]
        if failed:
            where = f"rank {failed[0][0]}: " if len(same) > 1 else ""
            together.append(AttentionTrial(name=name, why_not=f"{where}{failed[0][1]}"))
        else:
            seconds = [trial.seconds for trial in same if trial.seconds is not None]
            together.append(AttentionTrial(name=name, seconds=max(seconds, default=None)))
    return tuple(together)


def fastest(trials: Sequence[AttentionTrial]) -> Attention:
    """The kernel with the least seconds.

    Raises:
        ValueError: None was measured; the text tells why.
    """
    measured = [trial for trial in trials if trial.seconds is not None]
    if not measured:
        told = "; ".join(f"{trial.name}: {trial.why_not}" for trial in trials)
        raise ValueError(f"no attention kernel runs on this device ({told})")
    return min(measured, key=lambda trial: trial.seconds or 0.0).name


def _measured(backend: AttentionBackend, inputs: ProbeInputs, seconds_of: Cost) -> tuple[tuple[Tensor, ...], float]:
    results: list[tuple[Tensor, ...]] = []
    seconds = seconds_of(lambda: results.append(inputs.run(backend)))
    return results[0], seconds


def _deviation(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """How results differ from those of the first kernel by more than rounding; empty: they do not."""
    for name, mine, theirs in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        distance = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        if not distance <= _TOLERANCE:
            return f"its {name} is off by {distance:.1%}"
    return ""


def _brief(error: Exception) -> str:
    """One printable line."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}"
    return "".join(character if character.isprintable() else " " for character in text)
