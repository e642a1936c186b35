"""Probes a layer before its first run: whether it can be cut by tokens, and what its attention needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memo.engine.forward.cut_tokens import take_tokens
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.saved_tensors.mutated_buffers import MutatedBuffers
from lightning_memo.kernels import AttentionBackend, AttentionSpec, RngState
from lightning_memo.kernels.attention_kernel import sums_dtype
from lightning_memo.planner.token_slices import Action, SavedBytes, TokenRange

BackendOf = Callable[[Tensor, Tensor, Tensor, AttentionSpec], AttentionBackend]

# Two runs of the same arithmetic on other shapes differ by rounding. If tokens of one slice affect another, outputs
# change by their own order of magnitude.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """The traits of a layer that decide how it can run.

    Attributes:
        why_whole: Why the layer has to run as one slice; empty if it can be cut.
        schedule: "layer", or "nest" if attention needs all tokens at once.
        saved: Sizes of attention outputs, log-sum-exps, keys and values of one call.
        tokens: Number of tokens that were probed.
        key_value_gradient_bytes: Size of the gradients of keys and values, in the dtype in which they are summed.
        may_mix: Whether tokens may affect each other outside of attention.
        changing: Names of the buffers that a forward changes.
    """

    why_whole: str
    schedule: str
    saved: tuple[SavedBytes, ...] = ()
    tokens: int = 1
    key_value_gradient_bytes: int = 0
    may_mix: bool = False
    changing: tuple[str, ...] = ()


class _Recorder:
    """Answers attention calls, and records them."""

    def __init__(self, backend_of: BackendOf) -> None:
        self._backend_of = backend_of
        self.specs: list[AttentionSpec] = []
        self.blocks = True
        self.saved: list[SavedBytes] = []
        self.gradient_bytes = 0
        self.outputs: list[tuple[RngState, Tensor, RngState]] = []
        self.drawn_alike = True
        self.ends: list[RngState] = []  # where the random state is after each part

    def whole(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        backend = self._backend_of(q, k, v, spec)
        before = RngState.capture(q.device)
        result = backend.forward(q, k, v, spec)
        self.specs.append(spec)
        self.blocks &= backend.blocks
        for kind, t in (("out", result.out), ("lse", result.lse), ("key", k), ("value", v)):
            self.saved.append(SavedBytes(kind, t.nbytes))
        self.gradient_bytes += (k.numel() + v.numel()) * sums_dtype(k).itemsize
        self.outputs.append((before, result.out, RngState.capture(q.device)))
        return result.out

    def draws_alike(self, after: RngState) -> bool:
        """Return whether every part drew as many random numbers as the whole, after which the state was `after`."""
        return self.drawn_alike and all(end.same(after) for end in self.ends)

    def part(self, part: TokenRange, tokens: int) -> Callable[..., Tensor]:
        """Return a handler that answers with the known output of these tokens, and draws as much as attention did."""
        known = iter(self.outputs)

        def answer(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            before, out, after = next(known)
            self.drawn_alike &= RngState.capture(q.device).same(before)
            after.restore()
            return take_tokens(out, 2, tokens, part.start, part.stop)

        return answer


@torch.no_grad()
def probe_layer(
    call: LayerCall, x: Tensor, backend_of: BackendOf, longest: int | None = None, why_scaled: str = ""
) -> LayerTraits:
    """Run a layer on all tokens and in two slices, without gradients, and compare. The layer's state is restored.

    Attention in the slices is answered from the first run, so that everything else is compared: a layer that mixes
    tokens outside attention (a convolution over tokens, a mean over the sequence) gives other outputs in slices. Such a
    layer runs on all tokens once more, and has to give the same output.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        backend_of: Returns the attention kernel.
        longest: Largest number of tokens to probe; `None` for all tokens.
        why_scaled: Why tokens are known to share scales; empty if they do not.

    Raises:
        ValueError: The layer gives another output for the same input.
    """
    recorder = _Recorder(backend_of)
    present, state = RngState.capture(x.device), MutatedBuffers(call.layer)
    try:
        tokens = min(call.tokens, longest or call.tokens)
        x = x.narrow(call.token_dim, 0, tokens)
        whole_range = TokenRange(0, tokens, Action.KEEP)
        with handling(recorder.whole, call.layout), call.mode(whole_range):
            whole = _hidden(call.run(x.clone(), whole_range))  # a copy, because a layer may change its input in place
        after = RngState.capture(x.device)
        changing = state.changed()

        def rewind() -> None:
            present.restore()
            state.restore(changing)

        sliceable = recorder.blocks and all(spec.sliceable for spec in recorder.specs)
        mixes, compared = why_scaled, False
        if not mixes:
            mixes, compared = _compare_halves(call, x, recorder, whole, rewind, after)
        if mixes or not compared:  # equal halves have shown already that the layer is deterministic
            _check_repeats(call, x, recorder, whole, rewind)
        why = mixes or _why_whole(call, recorder, after, sliceable, changing)
        schedule = "layer" if sliceable else "nest"
        saved = tuple(recorder.saved)
        return LayerTraits(why, schedule, saved, tokens, recorder.gradient_bytes, bool(mixes), changing)
    finally:
        state.restore(state.changed())
        present.restore()


def _check_repeats(call: LayerCall, x: Tensor, recorder: _Recorder, whole: Tensor, rewind: Callable[[], None]) -> None:
    """Run a layer once more, from the same state and with known attention.

    Raises:
        ValueError: The layer gives another output. A recomputation would do so, too, and gradients would be wrong.
    """
    tokens = x.shape[call.token_dim]
    everything = TokenRange(0, tokens, Action.KEEP)
    same = False
    rewind()
    with (
        handling(recorder.part(everything, tokens), call.layout),
        call.mode(everything),
        contextlib.suppress(StopIteration),
    ):
        same = _same(_hidden(call.run(x.clone(), everything)), whole, x)
    if not same:
        raise ValueError(
            f"{type(call.layer).__name__} gives another output for the same input: its forward depends on something "
            "besides inputs, weights, buffers and torch's random state (a counter, a generator of its own): make it a "
            "function of these, or train this model without MemoStrategy"
        )


def _compare_halves(
    call: LayerCall, x: Tensor, recorder: _Recorder, whole: Tensor, rewind: Callable[[], None], after: RngState
) -> tuple[str, bool]:
    """Return why tokens may affect each other outside of attention, and whether halves could be compared.

    The reason is empty if two halves gave the output of the whole, or drew other random numbers and could not be
    compared.
    """
    name, tokens = type(call.layer).__name__, x.shape[call.token_dim]
    if tokens < 2:
        return "", False
    if not recorder.specs:
        return f"{name} calls no attention function that is known here, so it may mix any tokens", False
    middle = tokens // 2
    outputs = []
    for part in (TokenRange(0, middle, Action.KEEP), TokenRange(middle, tokens, Action.KEEP)):
        rewind()
        try:
            with (
                handling(recorder.part(part, tokens), call.layout),
                call.mode(part),
                contextlib.suppress(StopIteration),
            ):
                outputs.append(_hidden(call.run(x.narrow(call.token_dim, part.start, part.tokens).clone(), part)))
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            return f"{name} cannot run on some of the tokens: {str(error).splitlines()[0]}", False
        recorder.ends.append(RngState.capture(x.device))
    if not recorder.draws_alike(after):
        return "", False
    same = _same(torch.cat(outputs, call.token_dim), whole, x)
    return "" if same else f"{name} mixes tokens outside attention", True


def _why_whole(
    call: LayerCall, recorder: _Recorder, after: RngState, sliceable: bool, changing: tuple[str, ...]
) -> str:
    """Return why a layer that mixes tokens in attention only has to run as one slice; empty if it can be cut."""
    name = type(call.layer).__name__
    if call.tokens < 2:
        return f"{name} got a single token"
    if changing:
        return f"{name} changes its buffer {changing[0]} in each forward"
    if not sliceable and len(recorder.specs) > 1:
        return f"{name} calls attention {len(recorder.specs)} times, and not all calls are causal"
    if not recorder.draws_alike(after):
        return f"{name} draws random numbers other than dropout"
    return ""


def _hidden(output: object) -> Tensor:
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(hidden, Tensor):
        raise ValueError(
            f"a layer returned {type(output).__name__}: it has to return its hidden states, alone or first in a tuple"
        )
    return hidden


def _same(joined: Tensor, whole: Tensor, x: Tensor) -> bool:
    """Return whether two outputs differ by rounding only, relative to what the layer added to its input."""
    if joined.shape != whole.shape:
        return False
    exact = whole.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)
    if not torch.equal(joined.isnan(), whole.isnan()):
        return False
    # In place, because the peak memory of the first step is measured.
    added = (whole - x if whole.shape == x.shape else whole.clone()).nan_to_num_().abs_()
    largest = added.max().clamp_min(torch.finfo(added.dtype).tiny)
    del added
    apart = (joined - whole).nan_to_num_().abs_().max()
    return float(apart / largest) <= (_TOLERANCE if exact else _HALF_TOLERANCE)
