"""Finds changes of the settings, such as slices of tokens, with which a training fits that does not fit as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from lightning_memo.estimate.device_bytes import device_state_bytes
from lightning_memo.estimate.layer_buffers import has_known_buffers
from lightning_memo.estimate.parallelism_search import (
    Ranking,
    Sizes,
    candidate_parallelisms,
    longest,
    longest_with,
    search,
)
from lightning_memo.estimate.planner_inputs import device_budget
from lightning_memo.estimate.request import Estimate, EstimateRequest
from lightning_memo.estimate.slice_settings import Slices
from lightning_memo.shapes.model_shape import adapters_of
from lightning_memo.utils.units import about_seconds, format_bytes, format_setting, two_digits

_MOST_LINES: Final = 3
_LORA: Final = {"r": 16, "target_modules": "all-linear"}
_HOST_FACTORS: Final = (2, 4)
_GPU_FACTORS: Final = (2, 4, 8, 16, 32, 64)

Variant = tuple[str, EstimateRequest]
"""Settings as on the command line, and the training with them."""

_Variants = Callable[[EstimateRequest], Iterator[Variant]]
"""Variants of a change, from the smallest to the largest."""

_EFFORTS: Final = {
    "sizes": 1, "alpha": 1, "slices": 2, "method": 2, "precision": 3, "host": 4, "lora": 5, "quantization": 5, "gpus": 6
}  # fmt: skip
"""How much a user has to change: without the given sizes of the parallelism, with slices, or with other settings.
Combinations are tried in the order of the sum."""
_MIN_SLICE_TOKENS: Final = 4096
"""Shortest slice that is suggested. Shorter slices underuse a GPU, which the cost model does not include."""
_SAME_TIME: Final = 1.01
"""Ratio of times up to which settings count as equally fast; of these, the simplest is suggested."""
_OWN_MODES: Final = (Slices(tokens=1, stream_from_host="attention"), Slices(tokens=1, stream_from_host="hidden"))
"""Ways to run slices that training chooses by itself, the simplest first."""
_SLICE_MODES: Final = (*_OWN_MODES, Slices(tokens=1, stream_from_host="model"))
"""All ways. Each keeps more on the host than the one before."""


def changes_that_fit(request: EstimateRequest, forced: Sizes, multiple_of: int) -> list[str]:
    """Return sentences about the smallest changes that fit, at most three, or about why there are none.

    One or two changes are tried, and three only if less does not help. A combination is left out if a part of it fits.

    Args:
        request: Training that does not fit.
        forced: Sizes of the parallelism that are given, see `search`.
        multiple_of: Number of tokens that the longest lengths with a change are multiples of.
    """
    fitting: dict[frozenset[str], str] = {}
    for counts in ((1, 2), (3,)):
        combined = [names for count in counts for names in combinations(_EFFORTS, count)]
        for names in map(frozenset, sorted(combined, key=lambda names: sum(map(_EFFORTS.__getitem__, names)))):
            more_gpus = "gpus" in names and len(names) > 1  # and something else: the largest change
            if len(fitting) == _MOST_LINES or any(fewer <= names for fewer in fitting) or (more_gpus and fitting):
                continue
            if sentence := _tried(request, forced, names, multiple_of):
                fitting[names] = sentence
        if fitting:
            break
    found = list(fitting.values()) or [
        "No change was found with which it fits: neither slices, bf16-true, LoRA, QLoRA, four times the host memory "
        "nor more GPUs, nor three of them together. Give a shorter seq_len."
    ]
    return [*found, *_why_no_slices(request)]


def _tried(request: EstimateRequest, forced: Sizes, names: frozenset[str], multiple_of: int) -> str:
    """The sentence of the first variants of some changes that fit; empty if none fits."""
    if "sizes" in names:
        forced, given = {name: size for name, size in forced.items() if name == "pp"}, forced
        if forced == given:
            return ""
    changes = [variants for name, variants in _VARIANTS.items() if name in names]
    for words, changed in _variants(request, changes):
        if not _state_fits(changed, forced):
            continue
        ranking = suggest_slices(changed, forced) if "slices" in names else search(changed, forced)
        if ranking is not None and (answer := ranking.best).status == "ok":
            settings = [*words]
            if "sizes" in names:
                settings[:0] = [
                    f"parallel.{name}={size}"
                    for name in given
                    if (size := getattr(answer.parallel, name)) != given[name]
                ]
            if "slices" in names:
                settings.append(str(answer.slices))
                changed = replace(changed, slices=answer.slices)
            tokens = longest_with(changed, answer.parallel, multiple_of, above=changed.seq_len)
            return _sentence(" ".join(settings), answer, tokens)
    return ""


def _variants(
    request: EstimateRequest, changes: Sequence[_Variants]
) -> Iterator[tuple[tuple[str, ...], EstimateRequest]]:
    """All combinations of the variants of some changes."""
    if not changes:
        yield (), request
        return
    for words, changed in changes[0](request):
        for more, again in _variants(changed, changes[1:]):
            yield (words, *more), again


def _state_fits(request: EstimateRequest, forced: Sizes) -> bool:
    """Whether the model state fits on the device with any parallelism, which takes little time to know."""
    try:
        choices = candidate_parallelisms(request, forced)
    except ValueError:  # no parallelism divides the model, the sequences and the batch
        return False
    return any(
        device_state_bytes(request, parallel).total < device_budget(request, parallel).device_bytes
        for parallel in choices
    )


def _sentence(settings: str, answer: Estimate, longest: int | None) -> str:
    assert answer.step_seconds is not None and answer.mfu is not None
    how = "whole layers" if answer.slices is None else "such slices"
    more = "" if longest is None else f"; up to {longest:,} tokens would in {how}"
    return (
        f"The sequence fits with {settings}: {about_seconds(answer.step_seconds)} per step, MFU "
        f"{two_digits(answer.mfu)} %, {format_bytes(answer.device_bytes['total'])} of device memory and "
        f"{format_bytes(answer.host_bytes)} of host memory per node{more}."
    )


def _why_no_slices(request: EstimateRequest) -> list[str]:
    """A sentence if slices might help but are not estimated."""
    if request.method != "memo" or request.slices is not None:
        return []
    if not has_known_buffers(request.shape):
        return [
            "Slices of tokens are estimated for dense models with layers of Llama or Qwen3 only; on one GPU, training "
            "tries them by itself."
        ]
    return []


# ---- changes


def _method(request: EstimateRequest) -> Iterator[Variant]:
    if request.method != "memo":
        yield "method=memo", replace(request, method="memo", alpha=None)


def _alpha(request: EstimateRequest) -> Iterator[Variant]:
    if request.alpha is not None:
        yield "alpha=null", replace(request, alpha=None)


def _precision(request: EstimateRequest) -> Iterator[Variant]:
    if request.precision != "bf16-true" and request.cluster.bf16:
        yield "precision=bf16-true", replace(request, precision="bf16-true")


def _host(request: EstimateRequest) -> Iterator[Variant]:
    for factor in _HOST_FACTORS:
        cluster = replace(request.cluster, host_bytes=factor * request.cluster.host_bytes)
        yield f"cluster.host_bytes={format_setting(cluster.host_bytes)}", replace(request, cluster=cluster)


def _lora(request: EstimateRequest) -> Iterator[Variant]:
    if request.shape.adapters is None:
        try:
            shape = replace(request.shape, adapters=adapters_of(_LORA))
        except ValueError:  # not supported for this model
            return
        yield f"model.lora.r={_LORA['r']}", replace(request, shape=shape)


def _gpus(request: EstimateRequest) -> Iterator[Variant]:
    for gpus in (factor * request.gpus for factor in _GPU_FACTORS):
        if gpus in request.cluster.device_counts:
            yield f"gpus={gpus}", replace(request, gpus=gpus)


def _quantization(request: EstimateRequest) -> Iterator[Variant]:
    if request.shape.adapters is not None and request.shape.quantization is None and request.gpus == 1:
        yield "quantization=nf4", replace(request, shape=replace(request.shape, quantization="nf4"))


_VARIANTS: Final[dict[str, _Variants]] = {
    "alpha": _alpha, "method": _method, "precision": _precision, "host": _host, "lora": _lora, "gpus": _gpus,
    "quantization": _quantization,
}  # fmt: skip


def own_slices(request: EstimateRequest, forced: Sizes) -> Ranking | None:
    """Returns the ranking with slices that training chooses by itself, or None if none fit or are estimated.

    Args:
        request: Training without slices, which does not fit.
        forced: Sizes of the parallelism that are given, see `search`.
    """
    return suggest_slices(request, forced, _OWN_MODES) if _may_slice(request) else None


def longest_in_slices(request: EstimateRequest, forced: Sizes, multiple_of: int, above: int = 0) -> int | None:
    """Returns the longest length that fits in the shortest slices that training chooses by itself, or None.

    Args:
        request: Training without slices. Its sequence length is ignored.
        forced: Sizes of the parallelism that are given, see `search`.
        multiple_of: Number of tokens that lengths are multiples of.
        above: Only longer sequences are tried.
    """
    if not _may_slice(request):
        return None
    tokens = None
    for mode in _OWN_MODES:  # the host of one may be full before the device of another
        sliced = replace(request, slices=replace(mode, tokens=_MIN_SLICE_TOKENS))
        try:
            tokens = longest(sliced, forced, multiple_of, above=tokens or above) or tokens
        except ValueError:  # slices are not estimated with any of the parallelisms
            return None
    return tokens


def _may_slice(request: EstimateRequest) -> bool:
    return request.method == "memo" and request.slices is None and not request.disk_bytes


def suggest_slices(request: EstimateRequest, forced: Sizes, modes: Sequence[Slices] = _SLICE_MODES) -> Ranking | None:
    """Returns the fastest ranking with slices that fits, or None if slices do not help or are not estimated.

    For each way to run slices, the largest slice that fits is tried, a power of two of at least 4096 tokens.

    Args:
        request: Training without slices.
        forced: Sizes of the parallelism that are given, see `search`.
        modes: Ways to run slices, the simplest first.
    """
    fitting = [
        (ranking, seconds)
        for mode in modes
        if (ranking := _largest(request, forced, mode)) and (seconds := ranking.best.step_seconds)
    ]
    fastest = min((seconds for _, seconds in fitting), default=0.0)
    return next((ranking for ranking, seconds in fitting if seconds <= _SAME_TIME * fastest), None)


def _largest(request: EstimateRequest, forced: Sizes, mode: Slices) -> Ranking | None:
    """The ranking with the largest slices that fit. Larger slices need more memory, so that few have to be tried."""
    lengths = list(_lengths(request.seq_len))
    best, low, high = None, 0, len(lengths)
    middle = 0  # if the shortest slices do not fit, none do
    while low < high:
        try:
            ranking = search(replace(request, slices=replace(mode, tokens=lengths[middle])), forced)
        except ValueError:  # slices are not estimated for this training
            return None
        if ranking.best.status == "ok":
            best, low = ranking, middle + 1
        elif middle == 0:
            return None
        else:
            high = middle
        middle = (low + high) // 2
    return best


def _lengths(seq_len: int) -> Iterator[int]:
    """Lengths of slices shorter than the sequence, in ascending order."""
    tokens = _MIN_SLICE_TOKENS
    while tokens < seq_len:
        yield tokens
        tokens *= 2
