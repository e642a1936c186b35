"""Settings of earlier versions are answered by one line that names what to do, wherever they are given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.samples.messages import assert_one_line

from lightning_memo import MemoCallback, MemoLoop, MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.cli import hydra_command
from lightning_memo.config import GONE, MemoConfig
from lightning_memo.runtime.earlier_plan import EarlierPlan

OLD_PLAN = json.dumps({"version": 2, "swap": {"schedule": "layer", "host_backed": "none", "precision": "exact"}})


def _in_a_loop(**settings: Any) -> MemoLoop:
    model = torch.nn.Linear(1, 1)
    return MemoLoop(model, torch.optim.SGD(model.parameters()), **settings)


@pytest.mark.parametrize("name", GONE)
def test_each_is_answered_by_its_successor(name: str) -> None:
    makers: list[Callable[..., Any]] = [MemoStrategy, MemoCallback, _in_a_loop]
    for make in makers:
        with pytest.raises(ValueError, match=name) as caught:
            make(**{name: "x"})
        assert_one_line(caught.value, f"{name}='x' is no setting any more: {GONE[name]}")
    folder = Path(hydra_command.config_dir())
    for given in (f"strategy.{name}", name):  # options of `lightning_memo.estimate` have no group
        assert hydra_command._no_such_setting(given, folder) == f"{given}: no setting any more: {GONE[name]}"


def test_a_misspelt_one_gets_a_suggestion() -> None:
    makers = {"MemoStrategy": MemoStrategy, "MemoCallback": MemoCallback, "MemoLoop": _in_a_loop}
    for of, make in makers.items():
        with pytest.raises(TypeError) as caught:
            make(slice_token=64)
        assert_one_line(caught.value, f"slice_token=64 is no setting of {of}: did you mean slice_tokens?")
        with pytest.raises(TypeError) as caught:
            make(xyz=1)
        assert_one_line(caught.value, f"xyz=1 is no setting of {of}: give ", "alpha, device_memory, host_memory")


def test_successors_are_settings_and_what_is_gone_is_none() -> None:
    known = {field.name for field in fields(MemoConfig)}
    assert known.isdisjoint(GONE)
    named = {name for told in GONE.values() for name in re.findall(r"\b([a-z]+(?:_[a-z]+)*)=", told)}
    named |= {name for told in GONE.values() for name in re.findall(r"set ([a-z_]+)", told)}
    assert named <= known, named - known


def test_plans_of_earlier_versions(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(OLD_PLAN)
    with pytest.raises(ValueError, match="not a plan") as caught:
        Plan.load(saved)
    assert_one_line(caught.value, "version is 2, but this lightning_memo reads version 3", "plan=None")
    earlier = EarlierPlan(Mock(), MemoConfig(), Mock(gather=lambda found: [found]), Mock(), OLD_PLAN)
    with pytest.warns(UserWarning, match="the checkpoint's plan is not used, .* version is 2, but") as told:
        assert earlier.valid_plan() is None
    assert len(told) == 1 and "\n" not in str(told[0].message)
