"""Functions of transformers are intercepted for the thread whose layer runs, and only if they take a state."""

from __future__ import annotations

import contextvars
import sys
import threading
from typing import Any

import pytest
import torch
from support.architectures.hybrids import make_hybrid
from torch import Tensor, nn

from lightning_memo.engine.recurrence import StateCall, handing


def layer_and_home(config: str = "Qwen3NextConfig") -> tuple[nn.Module, Any]:
    layer = make_hybrid(config).model.layers[0]
    return layer, sys.modules[type(layer).__module__]


def recurrence_arguments() -> list[Tensor]:
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 10, 2, 8).unbind()
    return [*qkv, -torch.rand(1, 10, 2), torch.rand(1, 10, 2)]


def test_other_threads_are_not_answered() -> None:
    layer, home = layer_and_home()
    arguments, results = recurrence_arguments(), []
    expected, _ = home.torch_chunk_gated_delta_rule(*arguments)
    _, state = home.torch_chunk_gated_delta_rule(*arguments, output_final_state=True)

    def evaluate() -> None:
        results.append(home.torch_chunk_gated_delta_rule(*arguments)[0])
        results.append(home.torch_chunk_gated_delta_rule(*arguments, output_final_state=True)[1])

    with handing(layer, pytest.fail, pytest.fail):
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
    assert torch.equal(results[0], expected)
    assert torch.equal(results[1], state)


def test_functions_are_restored_whichever_layer_ends_first() -> None:
    layer, home = layer_and_home()
    function, other_thread = home.torch_chunk_gated_delta_rule, contextvars.copy_context()
    names: list[str] = []

    def hand(call: StateCall) -> Tensor:
        names.append(call.name)
        return call.like

    first, second = handing(layer, pytest.fail, pytest.fail), handing(layer, hand, pytest.fail)
    first.__enter__()
    other_thread.run(second.__enter__)
    first.__exit__(None, None, None)
    other_thread.run(home.torch_chunk_gated_delta_rule, *recurrence_arguments())
    other_thread.run(second.__exit__, None, None, None)
    assert names == ["torch_chunk_gated_delta_rule"]
    assert home.torch_chunk_gated_delta_rule is function


def test_a_state_by_position_is_the_models() -> None:
    layer, home = layer_and_home()
    reasons: list[str] = []
    arguments, start = recurrence_arguments(), torch.randn(1, 2, 8, 8)
    expected, _ = home.torch_chunk_gated_delta_rule(*arguments, initial_state=start)
    with handing(layer, pytest.fail, reasons.append):
        out, _ = home.torch_chunk_gated_delta_rule(*arguments, 64, start)
    assert torch.equal(out, expected)
    assert reasons == ["torch_chunk_gated_delta_rule gets or returns a state of the model"]


def test_a_users_function_without_a_state_is_not_handed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, home = layer_and_home()
    reasons: list[str] = []

    def own(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return value, None

    monkeypatch.setattr(home, "torch_chunk_gated_delta_rule", own)
    arguments = recurrence_arguments()
    with handing(layer, pytest.fail, reasons.append):
        out, _ = home.torch_chunk_gated_delta_rule(*arguments)
    assert out is arguments[2]
    assert reasons == ["torch_chunk_gated_delta_rule takes or returns no state"]
