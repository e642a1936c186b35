"""From a profiled step to a plan of `storage="alpha"`, which all processes agree on."""

from __future__ import annotations

from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import StreamedBytes
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.engine.bootstrap_plan import host_backed_bytes
from lightning_memo.parallel.agree_on_plan import agree_on_plan
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner import plan_swap
from lightning_memo.planner.token_slices import slice_tokens_by_alpha, slot_bytes
from lightning_memo.runtime.activation_plans.measured_step import MeasuredStep


def plan_by_alpha(
    step: MeasuredStep, engine: Engine, config: MemoConfig, most_alpha: float, ranks: Ranks, everyone: bool
) -> Plan:
    """Solve for alpha, the fraction of the tokens whose activations are swapped (MEMO, section 4.2).

    Args:
        step: The measured step.
        engine: The engine that profiled the step.
        config: The settings of the strategy.
        most_alpha: Upper limit of alpha.
        ranks: The processes that have to agree.
        everyone: Whether all processes agree, or only those that work on the same sequences.

    Raises:
        ValueError: Some process finds no plan, or some layer cannot run by the settings.
    """
    return agree_on_plan(_AlphaPlanner(step, engine, config, most_alpha).solve, ranks, everyone)


class _AlphaPlanner:
    def __init__(self, step: MeasuredStep, engine: Engine, config: MemoConfig, most_alpha: float) -> None:
        assert engine.swap is not None
        self._step, self._engine, self._config, self._most_alpha = step, engine, config, most_alpha
        self._backing = engine.swap.host_backed
        self._slice_tokens = engine.settings.slice_tokens

    def solve(self, alpha: float | None, may_be_plain: bool) -> Plan:
        """The plan of this process for an alpha; `None` is the user's.

        Raises:
            ValueError: Some layer cannot run slice after slice, and `host_backed` puts keys and values on the host.
        """
        if why := self._engine.layer_classes.why_whole:
            self._backing = self._engine.settings.backing_of_whole_layers(self._backing, why)
        plan = self._plan_at(self._config.alpha if alpha is None else alpha, may_be_plain)
        return plan if plan.swap.alpha <= self._most_alpha else self._plan_at(self._most_alpha, may_be_plain)

    def _plan_at(self, alpha: float | str, may_be_plain: bool) -> Plan:
        return plan_swap(
            self._step.costs,
            self._step.budget,
            self._step.label,
            alpha=alpha,
            schedule=self._engine.layer_classes.schedule,
            slice_tokens=self._slice_tokens,
            slot_bytes=self._slot_bytes,
            whole_layers=bool(self._engine.layer_classes.why_whole),
            # If the profiled step was cut into slices, the memory of a step without slices is not known.
            may_be_plain=may_be_plain and self._step.profile.slice_tokens == self._step.profile.tokens,
            host_backed=self._backing,
            streamed_bytes=None if self._backing == "none" else self._streamed_bytes,
        )

    def _slot_bytes(self, alpha: float) -> int:
        """Size of the largest host slot at an alpha."""
        profile, classes = self._step.profile, self._engine.layer_classes
        slices = slice_tokens_by_alpha(profile.tokens, alpha, None if classes.why_whole else self._slice_tokens)
        calls = profile.saved_by_calls
        return max(slot_bytes(saved, measured, slices, classes.schedule) for saved, measured in calls)

    def _streamed_bytes(self, alpha: float) -> StreamedBytes:
        """Memory at an alpha if slices are swapped one by one."""
        profile = self._step.profile
        slices = self._engine.cutter.cut(profile.tokens, alpha, self._slice_tokens)
        return host_backed_bytes(self._engine, profile.saved_by_calls, slices, self._backing)
