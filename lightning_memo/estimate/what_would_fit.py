"""Finds changes of the settings with which a training fits that does not fit as it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from lightning_memo.estimate.memory.layer_buffers import has_known_buffers
from lightning_memo.estimate.parallelism_search import search
from lightning_memo.estimate.request.candidate_parallelisms import Sizes, candidate_parallelisms
from lightning_memo.estimate.request.estimate_request import Estimate, Question
from lightning_memo.estimate.request.training_methods import runs_here
from lightning_memo.estimate.step.device_bytes import device_state_bytes
from lightning_memo.estimate.step.planner_inputs import device_budget
from lightning_memo.estimate.suggest_slices import suggest_slices
from lightning_memo.shapes.adapters import adapters_of
from lightning_memo.utils.units import format_bytes, format_seconds

_MOST_LINES: Final = 3
_LORA: Final = {"r": 16, "target_modules": "all-linear"}
_HOST_FACTORS: Final = (2, 4)
_GPU_FACTORS: Final = (2, 4, 8, 16, 32, 64)

Variant = tuple[str, Question]
"""Settings as on the command line, and the question with them."""

_Variants = Callable[[Question], Iterator[Variant]]
"""Variants of a change, from the smallest to the largest."""


def changes_that_fit(question: Question, forced: Sizes) -> list[str]:
    """Return sentences about the smallest changes that fit, at most three, or about why there are none.

    One or two changes are tried, and three only if less does not help. A combination is left out if a part of it fits.

    Args:
        question: Question that does not fit.
        forced: Sizes of the parallelism that are given, see `search`.
    """
    fitting: dict[frozenset[str], str] = {}
    for counts in ((1, 2), (3,)):
        combined = [names for count in counts for names in combinations(_EFFORTS, count)]
        for names in map(frozenset, sorted(combined, key=lambda names: sum(map(_EFFORTS.__getitem__, names)))):
            more_gpus = "gpus" in names and len(names) > 1  # and something else: the largest change
            if len(fitting) == _MOST_LINES or any(fewer <= names for fewer in fitting) or (more_gpus and fitting):
                continue
            if sentence := _tried(question, forced, names):
                fitting[names] = sentence
        if fitting:
            break
    found = list(fitting.values()) or [
        "No change was found with which it fits: neither slices, bf16-true, LoRA, four times the host memory nor more "
        "GPUs, nor three of them together. Give a shorter seq_len."
    ]
    return [*found, *_why_no_slices(question)]


def _tried(question: Question, forced: Sizes, names: frozenset[str]) -> str:
    """The sentence of the first variants of some changes that fit; empty if none fits."""
    if "sizes" in names:
        forced, given = {name: size for name, size in forced.items() if name == "pp"}, forced
        if forced == given:
            return ""
    changes = [variants for name, variants in _VARIANTS.items() if name in names]
    for words, changed in _variants(question, changes):
        if not _state_fits(changed, forced):
            continue
        answer = suggest_slices(changed, forced) if "slices" in names else _fitting(changed, forced)
        if answer is not None:
            settings = [*words]
            if "sizes" in names:
                settings[:0] = [
                    f"parallel.{name}={size}"
                    for name in given
                    if (size := getattr(answer.parallel, name)) != given[name]
                ]
            if "slices" in names:
                settings.append(str(answer.slices))
            return _sentence(" ".join(settings), answer)
    return ""


def _variants(question: Question, changes: Sequence[_Variants]) -> Iterator[tuple[tuple[str, ...], Question]]:
    """All combinations of the variants of some changes."""
    if not changes:
        yield (), question
        return
    for words, changed in changes[0](question):
        for more, again in _variants(changed, changes[1:]):
            yield (words, *more), again


def _state_fits(question: Question, forced: Sizes) -> bool:
    """Whether the model state fits on the device with any parallelism, which takes little time to know."""
    try:
        choices = candidate_parallelisms(question, forced)
    except ValueError:  # no parallelism divides the model, the sequences and the batch
        return False
    return any(
        device_state_bytes(question, parallel).total < device_budget(question, parallel).device_bytes
        for parallel in choices
    )


def _fitting(question: Question, forced: Sizes) -> Estimate | None:
    answer = search(question, forced).best
    return answer if answer.status == "ok" else None


def _sentence(settings: str, answer: Estimate) -> str:
    assert answer.step_seconds is not None
    return (
        f"The sequence fits with {settings}: {format_seconds(answer.step_seconds)} per step, MFU {answer.mfu:.1f} %, "
        f"{format_bytes(answer.device_bytes['total'])} of device memory and {format_bytes(answer.host_bytes)} of host "
        "memory per node."
    )


def _why_no_slices(question: Question) -> list[str]:
    """A sentence if slices might help but are not estimated."""
    if question.method != "memo" or not runs_here(question) or question.slices is not None:
        return []
    if not has_known_buffers(question.shape):
        return [
            "Slices of tokens are estimated for dense models with layers of Llama or Qwen3 only; on one GPU, training "
            "tries them by itself."
        ]
    if question.batch_size % question.gpus:
        return ["Slices of tokens are estimated for data parallelism only: batch_size must be a multiple of gpus."]
    return []


# ---- changes


def _method(question: Question) -> Iterator[Variant]:
    if question.method != "memo":
        yield "method=memo", replace(question, method="memo", alpha=None)


def _alpha(question: Question) -> Iterator[Variant]:
    if question.alpha is not None:
        yield "alpha=null", replace(question, alpha=None)


def _precision(question: Question) -> Iterator[Variant]:
    if runs_here(question) and question.precision != "bf16-true":
        yield "precision=bf16-true", replace(question, precision="bf16-true")


def _host(question: Question) -> Iterator[Variant]:
    for factor in _HOST_FACTORS:
        cluster = replace(question.cluster, host_bytes=factor * question.cluster.host_bytes)
        yield f"cluster.host_bytes={_size(cluster.host_bytes)}", replace(question, cluster=cluster)


def _lora(question: Question) -> Iterator[Variant]:
    if runs_here(question) and question.shape.adapters is None:
        try:
            shape = replace(question.shape, adapters=adapters_of(_LORA))
        except ValueError:  # not supported for this model
            return
        yield f"model.lora.r={_LORA['r']}", replace(question, shape=shape)


def _gpus(question: Question) -> Iterator[Variant]:
    for gpus in (factor * question.gpus for factor in _GPU_FACTORS):
        if gpus in question.cluster.device_counts:
            yield f"gpus={gpus}", replace(question, gpus=gpus)


def _size(size_bytes: int) -> str:
    """A number of bytes as a setting."""
    units = ((2**40, "TiB"), (2**30, "GiB"))
    return next((f"{size_bytes // unit}{name}" for unit, name in units if not size_bytes % unit), str(size_bytes))


_EFFORTS: Final = {
    "sizes": 1, "alpha": 1, "slices": 2, "method": 2, "precision": 3, "host": 4, "lora": 5, "gpus": 6
}  # fmt: skip
"""How much a user has to change: without the given sizes of the parallelism, with slices, or with other settings.
Combinations are tried in the order of the sum."""

_VARIANTS: Final[dict[str, _Variants]] = {
    "alpha": _alpha, "method": _method, "precision": _precision, "host": _host, "lora": _lora, "gpus": _gpus
}  # fmt: skip
