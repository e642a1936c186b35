"""What training at a level results in, compared with plain training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lightning_memo.utils.user_errors import is_own_refusal
from model_types.levels import Level
from model_types.training import Example, Step, train_plainly, train_with_memo

BOUND = 1e-5  # relative, for the loss and for the gradient of each parameter
_LEAST = 1e-6  # smaller gradients, relative to the norm of the whole gradient, count as large as this
AS_NEAR = 3.0  # rounding errors of two orders of summation differ by chance, by up to this factor
MOST = 1e-2  # whatever the rounding errors of plain training are
_PERTURBATIONS = 4
WHOLE, NOTHING = "layers run as one slice", "nothing is swapped"
Errors = dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """The result of training at a level.

    Attributes:
        status: "works", "whole" (alpha is a fraction of the layers, which are not cut), "plain" (nothing is swapped),
            "refused", "wrong" or "crash".
        error: Largest relative error of the loss and of any parameter's gradient.
        why: Why layers are not cut or not swapped, which modules of them are not, the message of a refusal or of an
            error, or the parameter with the largest error.
        settings: Settings that were used because the message of a refusal advised them.
        plain_error: Error of plain training in fp32 against fp64, if it was needed; `error` is then against fp64, too.
            It is the largest of some trainings with weights that differ slightly, as the error of a single sum may be
            small by chance.
    """

    status: str
    error: float | None = None
    why: str = ""
    settings: Mapping[str, Any] | None = None
    plain_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes that say something."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


class References:
    """Plain training of an example, in fp32 and, where needed, in fp64."""

    def __init__(self, example: Example) -> None:
        self._example = example
        self.single = train_plainly(example)

    @cached_property
    def double(self) -> Step:
        return train_plainly(self._example, double=True)

    @cached_property
    def rounding(self) -> Errors:
        """Errors of plain training in fp32 against fp64."""
        found = _errors([self.single], self.double)
        for seed in range(_PERTURBATIONS):
            example = self._example.perturbed(seed)
            errors = _errors([train_plainly(example)], train_plainly(example, double=True))
            found = {name: max(error, errors.get(name, 0.0)) for name, error in found.items()}
        return found


def outcome_of(example: Example, level: Level, references: References, processes: int = 1) -> Outcome:
    """Trains at a level and compares with plain training. Follows the advice of a refusal, if the level names it."""
    first = _train(example, level.settings, references, processes)
    if first.status != "refused" or level.instead is None or level.instead[0] not in first.why:
        return first
    second = _train(example, level.instead[1], references, processes)
    if second.status != "works":
        return second
    return replace(second, why=first.why, settings=level.instead[1])


def _train(example: Example, settings: Mapping[str, Any], references: References, processes: int) -> Outcome:
    found = _train_once(example, settings, references, processes)
    if found.status != "wrong":
        return found
    # At a kink, for example of ReLU, a rounding error becomes another gradient. Other weights have no value just there.
    other = example.perturbed(_PERTURBATIONS)
    return _train_once(other, settings, References(other), processes)


def _train_once(example: Example, settings: Mapping[str, Any], references: References, processes: int) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit = train_with_memo(example, settings, processes)
        except BaseException as error:
            return _of_error(error)
    found = compare(fit.steps, references)
    if found.status != "works":
        return found
    if not fit.planned:
        return replace(found, status="plain", why=_warning(caught, NOTHING))
    whole = _warning(caught, WHOLE)
    if whole and 0.0 < settings["alpha"] < 1.0:
        return replace(found, status="whole", why=whole)
    return replace(found, why=fit.left_out)


def _warning(caught: Sequence[warnings.WarningMessage], words: str) -> str:
    return next((message for each in caught if words in (message := str(each.message))), "")


def _of_error(error: BaseException) -> Outcome:
    message = str(error)
    if is_own_refusal(error) and isinstance(error, ValueError) and "\n" not in message:
        return Outcome("refused", why=message)
    return Outcome("crash", why=f"{type(error).__name__}: {' '.join(message.split())[:400]}")


def compare(steps: Sequence[Step], references: References) -> Outcome:
    """Compares the steps of a fit with plain training."""
    if not steps:
        return Outcome("crash", why="no optimizer step was made")
    found = _errors(steps, references.single)
    name, worst = max(found.items(), key=lambda each: each[1])
    if worst <= BOUND:
        return Outcome("works", worst)
    if math.isnan(worst):
        return Outcome("wrong", why=f"NaN in {name}")
    try:
        mine, plain = _errors(steps, references.double), references.rounding
    except Exception:  # a model that does not run in fp64
        return Outcome("wrong", worst, name)
    far = {n: e for n, e in mine.items() if e > max(BOUND, min(AS_NEAR * plain[n], MOST))}
    shown = far or mine
    name = max(shown, key=lambda n: shown[n])
    return Outcome("wrong" if far else "works", shown[name], name if far else "", plain_error=plain[name])


def _errors(steps: Sequence[Step], expected: Step) -> Errors:
    """Returns the largest errors of any step, by parameter and for the loss. A missing gradient counts as zero."""
    least = _LEAST * math.sqrt(sum(float(g.norm()) ** 2 for g in expected.gradients.values()))
    errors: Errors = {}
    for step in steps:
        errors["loss"] = max(errors.get("loss", 0.0), abs(step.loss - expected.loss) / abs(expected.loss))
        for name in {**expected.gradients, **step.gradients}:
            given = step.gradients.get(name), expected.gradients.get(name)
            like = next(g for g in given if g is not None)
            actual, exact = (torch.zeros_like(like) if g is None else g for g in given)
            error = float((actual.double() - exact.double()).norm() / (exact.double().norm() + least))
            before = errors.get(name, 0.0)
            errors[name] = error if math.isnan(error) or error > before else before
    return errors
