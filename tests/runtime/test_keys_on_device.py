"""With slices of a given length, keys and values are on the device if it has room for them, and else on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.architectures.scarce import Scarce
from support.trainer_harness import LanguageModel, batches, fit, loader, plain

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

SLICED: dict[str, Any] = {"slice_tokens": 4}


def streamed(result: Any) -> tuple[int, str]:
    return result.plan.swap.storage.slice_tokens, result.plan.swap.stream_from_host


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "none"),
        ({"alpha": 0.5}, "none"),
        ({"device_memory": "1MiB"}, "attention"),
        ({"stream_from_host": "attention"}, "attention"),
        ({"stream_from_host": "hidden"}, "hidden"),
    ],
    ids=str,
)
def test_keys_are_on_the_device_if_it_has_room(settings: dict[str, Any], expected: str) -> None:
    result = fit(MemoStrategy(**SLICED, **settings), LanguageModel(), max_steps=5)
    assert streamed(result) == (4, expected)
    assert result.losses == pytest.approx(plain(max_steps=5).losses, abs=3e-6)
    assert set(result.held) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_keys_go_to_the_host_if_a_step_does_not_fit(where: str) -> None:
    """Slices stay as long as they were given; hidden states follow when not even keys on the host are enough."""
    fails = {3: [where], 5: [where]}
    with pytest.warns(UserWarning, match="out of device memory") as caught:
        result = fit(MemoStrategy(alpha=0.0, **SLICED), Scarce(fails), max_steps=8)
    told = [str(w.message) for w in caught if "out of device memory" in str(w.message)]
    assert [text.partition(" with slice_tokens=4, ")[2].partition(":")[0] for text in told] == [
        'stream_from_host="attention"', 'stream_from_host="hidden"'
    ]  # fmt: skip
    assert streamed(result) == (4, "hidden")
    assert result.losses == pytest.approx(plain(max_steps=8).losses, abs=3e-6)
    assert set(result.held) == {0}


def test_rows_that_are_no_longer_than_a_slice_are_not_run_again() -> None:
    """Nothing would move to the host."""
    strategy = MemoStrategy(alpha=0.0, slice_tokens=64)
    with pytest.raises(torch.OutOfMemoryError, match="the step does not fit the device, even with every layer"):
        fit(strategy, Scarce({0: ["forward"]}), max_steps=2)


@pytest.mark.slow
def test_a_longer_batch_is_profiled_where_keys_are(tmp_path: Any) -> None:
    data = batches([*loader(6, tokens=16), *loader(6, tokens=32)])
    result = fit(MemoStrategy(**SLICED), LanguageModel(), data=data, max_steps=6)
    assert streamed(result) == (4, "none")
    result.plan.save(tmp_path / "plan.json")
    again = fit(MemoStrategy(plan=tmp_path / "plan.json", **SLICED), LanguageModel(), data=data, max_steps=6)
    assert again.plan.swap == result.plan.swap
    assert again.losses == pytest.approx(plain(data=data, max_steps=6).losses, abs=3e-6)
