"""The stand-in is compared with a table of TransformerEngine's Python sources, and so are the names that are used.

`tests/support/transformer_engine_stand_in/protocol.py` wrote the table, from wheels of PyPI.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.architectures.fp8_models import manager, recipes
from support.transformer_engine_stand_in import FOLDER
from support.transformer_engine_stand_in.protocol import (
    FUNCTIONS,
    OTHERS,
    PACKAGE,
    RELEASE,
    SAVES,
    SAVING,
    TABLE,
    arguments_of,
    fields_in,
    functions_in,
    saved_by,
    saves_of,
    steps_of,
)

from lightning_memo.engine.fp8_modules import CLASSES, RECIPES
from lightning_memo.engine.fp8_state import FIRST, LAST, MANAGER_NAMES, STATE_NAMES
from lightning_memo.kernels.kernel_packages import TRANSFORMER_ENGINE

# What the stand-in has not: custom recipes, CUDA graphs, calibration, and buffers of communication.
_FORWARD = {"fp8_graph_capturing", "is_fp8_enabled()", "get_fp8_recipe()", "fp8_calibration"}
LEFT_OUT: dict[str, set[str]] = {
    "FP8GlobalStateManager.add_fp8_tensors_to_global_buffer": {"get_unique_autocast_key()", "autocast_arguments"},
    "_LayerNormLinear.backward": {"fp8_recipe"},
    **{f"{kind}.forward": _FORWARD for kind in CLASSES},
}
# What other known releases do differently, of which nothing changes when scales are updated or what a recomputation
# restores: before 2.19, the recomputation of TransformerEngine, which is refused in layers, asked at its beginning
# whether FP8 is on, and LayerNormLinear had another name for its weight.
_BEFORE_219 = {
    "distributed.py:activation_recompute_forward.__enter__",
    "distributed.py:is_fp8_activation_recompute_enabled",
    "saves:LayerNormLinear",
}
# In 2.15, callers asked whether scaling is delayed, the autocast was a generator, and modules saved weights once, also
# quantized weights in units of FSDP2, for which later ones ask: these quantize what is gathered for the backward.
_OF_215 = {
    "quantization.py:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer",
    "quantization.py:FP8GlobalStateManager.get_unique_autocast_key",
    "quantization.py:FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute",
    "quantization.py:FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute",
    "quantization.py:FP8GlobalStateManager.restore_fp8_meta_tensors",
    *(f"quantization.py:autocast.{name}" for name in ("__init__", "__enter__", "__exit__")),
    *(f"module/base.py:TransformerEngineBaseModule.{name}" for name in ("prepare_forward", "end_forward")),
    "ops/fuser.py:_OperationFuserAutogradFunction.forward",
    "module/base.py:TransformerEngineBaseModule.is_fsdp2",
    *(
        f"module/{file}.py:{kind}.forward"
        for file, kind in zip(("linear", "layernorm_linear", "layernorm_mlp"), CLASSES, strict=True)
    ),
    "module/layernorm_linear.py:_LayerNormLinear.backward",
    "saves:Linear",
    "saves:LayerNormMLP",
}
UNDERSTOOD: dict[str, set[str]] = {
    "2.15.0": _BEFORE_219 | _OF_215,
    "2.16.1": _BEFORE_219,
    "2.17.1": _BEFORE_219,
    "2.18.0": _BEFORE_219,
    "2.19.0": set(),
}


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    assert found["release"] == RELEASE and set(found["names"]) == {*OTHERS, RELEASE}
    return found


def source(file: str) -> str:
    return (FOLDER / PACKAGE / file).read_text()


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in FUNCTIONS.items() for name in names])
def test_functions_take_the_same_arguments_and_the_same_steps(table: dict[str, Any], file: str, name: str) -> None:
    """The stand-in may leave arguments out, and what `LEFT_OUT` names, but not change an order."""
    function, known = functions_in(source(file))[name], table["functions"][file][name]
    given = iter(known["arguments"])
    assert all(argument in given for argument in arguments_of(function))
    assert steps_of(function) == [step for step in known["steps"] if step not in LEFT_OUT.get(name, ())]


def test_the_state_has_the_same_fields(table: dict[str, Any]) -> None:
    assert fields_in(source("quantization.py"), "FP8GlobalState") == table["state"]


@pytest.mark.parametrize("release", OTHERS)
def test_other_known_releases_differ_only_in_what_is_understood(table: dict[str, Any], release: str) -> None:
    found = table["differences"][release]
    functions = {f"{file}:{name}" for file, names in found.get("functions", {}).items() for name in names}
    saves = {f"saves:{kind}" for kind in found.get("saves", {})}
    assert functions | saves == UNDERSTOOD[release]
    assert set(found) <= {"functions", "saves"}


def test_the_first_and_the_last_known_release_are_in_the_table() -> None:
    releases = [tuple(map(int, release.split(".")[:2])) for release in (*OTHERS, RELEASE)]
    assert releases == [(FIRST[0], minor) for minor in range(FIRST[1], LAST[1] + 1)]
    assert (FIRST[0], TRANSFORMER_ENGINE.last) == (LAST[0], LAST)


@pytest.mark.parametrize("kind", SAVING)
def test_tensors_are_saved_in_the_same_order(table: dict[str, Any], kind: str) -> None:
    assert saved_by(source(f"tensor/{SAVING[kind]}.py"), kind) == table["saved"][kind]


@pytest.mark.parametrize("kind", SAVES)
def test_modules_save_the_same_tensors(table: dict[str, Any], kind: str) -> None:
    file, _, function = SAVES[kind]
    assert saves_of(functions_in(source(file))[function]) == table["saves"][kind]


@pytest.mark.parametrize("release", [*OTHERS, RELEASE])
def test_each_known_release_has_the_names_that_are_used(table: dict[str, Any], release: str) -> None:
    names = table["names"][release]
    assert set(MANAGER_NAMES) <= set(names["manager"]) and set(STATE_NAMES) <= set(names["state"])
    assert {"scale", "amax_history"} <= set(names["delayed"])
    assert {
        "fp8_meta",
        "primary_weights_in_fp8",
        "_fp8_workspaces",
        "tp_size",
        "sequence_parallel",
        "wgrad_store",
    } <= set(names["module"])
    assert "_basic_ops" in names["fuser"]


def test_the_stand_in_has_all_that_is_supported(te: Any) -> None:
    assert all(hasattr(te, name) for name in CLASSES) and all(hasattr(recipes(), name) for name in RECIPES)
    assert all(hasattr(manager(), name) for name in MANAGER_NAMES)
