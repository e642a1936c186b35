"""Divisions among processes, drawn at random, train as one process does, or all processes refuse with one clear line.

`DRAWS=50 pytest tests/parallel/test_random_parallel.py` draws 50 times as many, other ones each time.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from support.draws import REPEATABLE, draws
from support.modes import BY_KIND
from support.parallel_training import Outcome, Run, train, train_alone
from support.processes import run_in_processes
from support.random_training import NAMES

BOUND = 1e-5  # as of `test_parallel_training`
DIVISIONS = ((2, 2, 1), (2, 1, 2), (2, 1, 1), (3, 1, 3), (4, 2, 2), (4, 2, 1), (4, 1, 2), (4, 1, 4), (4, 1, 1))
WAYS: tuple[dict[str, Any], ...] = (
    {}, {}, {"slice_tokens": 8, "stream_from_host": "none"}, {"slice_tokens": 10},
    {"slice_tokens": 5, "stream_from_host": "hidden"}, {"slice_tokens": 9, "stream_from_host": "attention"},
    {"slice_tokens": 9, "stream_from_host": "model"},
)  # fmt: skip
FAMILIES = (
    "llama", "llama_gqa", "llama_tied", "llama_lora", "llama_frozen_below", "llama_mixing", "llama_caching",
    "llama_dynamic_rope", "phi3_longrope", "gemma3_dynamic_rope",
    "gemma", "gemma3_mixed_windows", "mistral_window", "qwen3", "gpt2", "gpt_neox", "mixtral", "qwen3_moe",
)  # fmt: skip


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def runs(draw: st.DrawFn, parts: int) -> Run:
    return Run(
        family=draw(st.sampled_from(FAMILIES)),
        tokens=draw(st.integers(8, 50)),
        batch=parts * draw(st.integers(1, 2)),
        accumulate=draw(one_of(1, 1, 2)),
        clip=draw(one_of(0.0, 0.1)),
        packed=draw(one_of(False, False, True)),
        steps=2,
    )


@st.composite
def divided_runs(draw: st.DrawFn) -> tuple[int, Run, dict[str, Any]]:
    """Processes, what they train, and arguments of MemoStrategy."""
    size, tensor, context = draw(st.sampled_from(DIVISIONS))
    drawn = {
        "tensor_parallel_size": tensor,
        "context_parallel_size": context,
        "ulysses_size": draw(one_of(1, context, "auto")),
        "zero_stage": draw(st.integers(0, 3)),
        "sequence_parallel": draw(one_of(True, True, False)),
        "offload_state": draw(one_of(False, False, False, True)),
        "alpha": draw(one_of("auto", 0.0, 0.3, 0.5, 1.0)),
        "loss_chunk_tokens": draw(one_of("auto", None, 5, 16)),
        "device_memory": draw(one_of(None, "1MiB", "0.7MiB")),
    }
    drawn |= draw(st.sampled_from(WAYS))
    drawn |= draw(
        one_of({}, {"test_mode": BY_KIND, "alpha": "auto", "slice_tokens": "auto", "stream_from_host": "auto"})
    )
    return size, draw(runs(size // tensor // context)), drawn


def train_or_refuse(run: Run, strategy: dict[str, Any]) -> Outcome | str:
    """What one process has to say."""
    try:
        return train(run, strategy)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("count", [2, pytest.param(9, marks=pytest.mark.slow)])
def test_trains_as_one_process_or_refuses(count: int) -> None:
    @settings(
        max_examples=draws(count), derandomize=REPEATABLE, database=None, print_blob=False,
        phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(divided=divided_runs())
    def each(divided: tuple[int, Run, dict[str, Any]]) -> None:
        note(repr(divided))
        check(*divided)

    each()


def check(size: int, run: Run, strategy: dict[str, Any]) -> str:
    """Train, and return the refusal, if it is one."""
    answers = run_in_processes(size, train_or_refuse, run, strategy)
    first = answers[0]
    if isinstance(first, str):
        assert answers == [first] * size
        assert "\n" not in first and any(name in first for name in NAMES), first
        return first
    first.losses = [sum(losses) / size for losses in zip(*(answer.losses for answer in answers), strict=True)]
    errors = first.worst_error(train_alone(run))
    # AdamW makes whole steps of gradients that are zero but for rounding, as of biases of keys, which softmax ignores.
    # What it makes of all others shows in the loss and the norm of the next step.
    del errors["weights"]
    assert all(error <= BOUND for error in errors.values()), errors
    return ""
