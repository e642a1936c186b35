"""Reads from Python sources what the stand-in has in common with TransformerEngine: arguments, calls and fields.

`python tests/support/transformer_engine_stand_in/protocol.py FOLDER` writes the table that
`tests/engine/fp8_modules/test_fp8_protocol.py` compares with the stand-in, from wheels in the folder, which
`pip download --no-deps transformer_engine_cu13==RELEASE` puts there.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RELEASE, OTHERS = "2.20.2", ("2.15.0", "2.16.1", "2.17.1", "2.18.0", "2.19.0")
PACKAGE = "transformer_engine/pytorch"
TABLE = Path(__file__).parents[2] / "reference" / "transformer_engine_protocol.json"

_MANAGER = "FP8GlobalStateManager"
_BASE = "TransformerEngineBaseModule"
# File, in TransformerEngine -> functions whose arguments and calls are compared.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "quantization.py": (
        *(f"{_MANAGER}.{name}" for name in (
            "add_fp8_tensors_to_global_buffer", "is_fp8_enabled", "is_fp8_calibration", "is_first_fp8_module",
            "get_fp8_recipe", "get_fp8_group", "get_autocast_state", "set_autocast_state",
            "reduce_and_update_fp8_tensors", "get_unique_autocast_key", "autocast_enter", "autocast_exit",
            "copy_forward_fp8_meta_tensors_for_recompute", "get_old_fp8_meta_tensors_for_recompute",
            "restore_fp8_meta_tensors",
        )),
        "autocast.__init__", "autocast.__enter__", "autocast.__exit__",
    ),
    "distributed.py": (
        "activation_recompute_forward.__init__", "activation_recompute_forward.__enter__",
        "activation_recompute_forward.__exit__", "is_fp8_activation_recompute_enabled",
        "in_fp8_activation_recompute_phase", "_CheckpointFunction.forward", "_CheckpointFunction.backward",
        "_get_module_fsdp_state",
    ),
    "quantized_tensor.py": (
        "prepare_for_saving", "restore_from_saved", "restore_from_func_ctx", "Quantizer.set_usage",
        "QuantizedTensorStorage.update_usage", "QuantizedTensorStorage.prepare_for_saving",
        "QuantizedTensorStorage.restore_from_saved",
    ),
    "module/base.py": (
        f"{_BASE}.fast_setattr", f"{_BASE}.set_meta_tensor", f"{_BASE}.init_fp8_meta_tensors",
        f"{_BASE}.init_fp8_metadata", f"{_BASE}.prepare_forward", f"{_BASE}.end_forward", f"{_BASE}.is_fsdp2",
    ),
    "module/linear.py": ("Linear.forward", "_check_fp8_reduce_and_update"),
    "module/layernorm_linear.py": ("LayerNormLinear.forward", "_LayerNormLinear.backward"),
    "module/layernorm_mlp.py": ("LayerNormMLP.forward",),
    "ops/fuser.py": (
        "_OperationFuserAutogradFunction.forward", "_OperationFuserAutogradFunction.backward",
        "OperationFuser.__call__",
    ),
    "ops/basic/layer_norm.py": ("LayerNorm.op_forward", "LayerNorm.op_backward"),
    "ops/basic/rmsnorm.py": ("RMSNorm.op_forward", "RMSNorm.op_backward"),
}  # fmt: skip
# Module -> its file in both, and the functions that save its tensors: in TransformerEngine, and in the stand-in.
SAVES: dict[str, tuple[str, str, str]] = {
    "Linear": ("module/linear.py", "_linear_setup_ctx", "_Linear.forward"),
    "LayerNormLinear": ("module/layernorm_linear.py", "_LayerNormLinear.forward", "_LayerNormLinear.forward"),
    "LayerNormMLP": ("module/layernorm_mlp.py", "_LayerNormMLP._forward", "_LayerNormMLP.forward"),
    "LayerNorm": ("ops/basic/layer_norm.py", "LayerNorm.op_forward", "LayerNorm.op_forward"),
    "RMSNorm": ("ops/basic/rmsnorm.py", "RMSNorm.op_forward", "RMSNorm.op_forward"),
}
# The functions that `attention="transformer_engine"` calls, and their file.
ATTENTION = "cpp_extensions/fused_attn.py", ("fused_attn_fwd", "fused_attn_bwd")
_SAVE = ("prepare_for_saving", "save_for_backward")
# Class of quantized tensors -> its file, among the stand-in's tensors.
SAVING = {
    "Float8TensorStorage": "float8_tensor",
    "MXFP8TensorStorage": "mxfp8_tensor",
    "Float8BlockwiseQTensorStorage": "float8_blockwise_tensor",
}
# Attributes that are read or set in the order of the protocol: of the state, and of the tensors of a module.
_FIELDS = frozenset({
    "fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group", "is_first_fp8_module",
    "fp8_graph_capturing", "autocast_depth", "global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer",
    "fp8_tensors_recompute_buffer", "autocast_arguments", "amax_history", "scale", "tensor_objects", "saved_tensors",
    "is_fsdp2", "_is_fsdp2", "_te_cached_parent_fsdp_state",
})  # fmt: skip
_CALLS = frozenset({
    "get_autocast_state", "set_autocast_state", "autocast_enter", "autocast_exit", "reduce_and_update_fp8_tensors",
    "get_unique_autocast_key", "split_key_in_buffer", "reduce_tensor_across_group_op_max",
    "_has_delayed_scaling_state", "add_fp8_tensors_to_global_buffer", "copy_forward_fp8_meta_tensors_for_recompute",
    "get_old_fp8_meta_tensors_for_recompute", "restore_fp8_meta_tensors", "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled", "is_fp8_enabled", "is_fp8_calibration", "with_fp8_parameters",
    "get_fp8_recipe", "get_fp8_group", "init_fp8_metadata", "init_fp8_meta_tensors", "set_meta_tensor",
    "set_activation_dtype", "make_quantizers", "create", "prepare_forward", "end_forward", "prepare_for_saving",
    "restore_from_saved", "restore_from_func_ctx", "popleft", "is_grad_enabled",
    "activation_recompute_forward", "autocast", "run_function", "save_for_backward", "setup_saved_tensors",
    "_get_module_fsdp_state", "_get_fsdp_state", "clear_columnwise_cache",
})  # fmt: skip


def functions_in(source: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module and the methods of its classes, by their names."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def arguments_of(function: ast.FunctionDef) -> list[str]:
    """Return the names of the arguments."""
    given = function.args
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def steps_of(function: ast.FunctionDef) -> list[str]:
    """Return the calls and fields of the protocol in the order of the source, each where it comes first."""
    nodes = sorted(filter(_is_placed, ast.walk(function)), key=lambda n: (n.lineno, n.col_offset))
    return list(dict.fromkeys(step for node in nodes for step in _steps(node)))


def _is_placed(node: ast.AST) -> bool:
    return isinstance(node, (ast.Call, ast.Attribute))


def _steps(node: Any) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = _name_of(node)
        if name in _CALLS:
            yield f"{name}()"
    elif node.attr in _FIELDS:
        yield node.attr


def fields_in(source: str, name: str) -> list[str]:
    """Return the annotated fields of a class."""
    kind = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def saved_by(source: str, name: str) -> list[str]:
    """Return the attributes that a class of quantized tensors gives away to be saved, in this order."""
    function = functions_in(source)[f"{name}.prepare_for_saving"]
    saved = next(node for node in ast.walk(function) if isinstance(node, ast.List))
    return [each.attr for each in saved.elts if isinstance(each, ast.Attribute)]


def saves_of(function: ast.FunctionDef) -> list[str]:
    """Return the names of the tensors that a function saves for the backward, or returns to be saved, in this order."""
    nodes = sorted((n for n in ast.walk(function) if isinstance(n, (ast.Call, ast.Return))), key=lambda n: n.lineno)
    calls = [n.args for n in nodes if isinstance(n, ast.Call) and _name_of(n) in _SAVE]
    returned = [n.value.elts for n in nodes if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple)]
    named = [[n.id for n in each if isinstance(n, ast.Name)] for each in calls or returned]
    return next((names for names in reversed(named) if names), [])


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def names_in(source: str, base_source: str, fuser_source: str) -> dict[str, list[str]]:
    """Return the names that the manager of the state, the state, a recipe's state, modules and fusers have.

    Args:
        source: The text of `quantization.py`.
        base_source: The text of `module/base.py`.
        fuser_source: The text of `ops/fuser.py`.
    """
    methods = [name.partition(".")[2] for name in functions_in(source) if name.startswith(f"{_MANAGER}.")]
    kind = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == _MANAGER)
    values = [t.id for n in kind.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    delayed = fields_in(source, "DelayedScalingRecipeState")
    return {
        "manager": sorted(methods + values),
        "state": fields_in(source, "FP8GlobalState"),
        "delayed": delayed,
        "module": _set_by(functions_in(base_source)[f"{_BASE}.__init__"]),
        "fuser": _set_by(functions_in(fuser_source)["OperationFuser.__init__"]),
    }


def _set_by(function: ast.FunctionDef) -> list[str]:
    """Return the names of the attributes that a function sets."""
    nodes = (n for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return sorted({n.attr for n in nodes})


def table_of(read: Callable[[str], str]) -> dict[str, Any]:
    """Return arguments, steps and fields of the protocol, and what is saved; `None` for functions that are missing.

    Args:
        read: Returns the text of a file of `transformer_engine/pytorch`.
    """
    functions: dict[str, Any] = {}
    for file, names in FUNCTIONS.items():
        known = functions_in(read(file))
        functions[file] = {
            n: {"arguments": arguments_of(known[n]), "steps": steps_of(known[n])} if n in known else None for n in names
        }
    saves: dict[str, Any] = {}
    for kind, (file, name, _) in SAVES.items():
        function = functions_in(read(file)).get(name)
        saves[kind] = None if function is None else saves_of(function)
    attention = functions_in(read(ATTENTION[0]))
    return {
        "functions": functions,
        "state": fields_in(read("quantization.py"), "FP8GlobalState"),
        "saved": {kind: saved_by(read(f"tensor/storage/{file}_storage.py"), kind) for kind, file in SAVING.items()},
        "saves": saves,
        "attention": {name: arguments_of(attention[name]) for name in ATTENTION[1]},
    }


def differences(table: Any, newest: Any) -> Any:
    """Return what of nested tables differs from the newest one's."""
    if not isinstance(newest, dict) or not isinstance(table, dict):
        return table
    return {key: differences(table[key], newest[key]) for key in newest if table[key] != newest[key]}


def _record(folder: Path) -> None:
    wheels = {release: next(folder.glob(f"transformer_engine_cu13-{release}-*.whl")) for release in (*OTHERS, RELEASE)}
    files = "quantization.py", "module/base.py", "ops/fuser.py"
    tables = {release: table_of(_reader(wheel)) for release, wheel in wheels.items()}
    newest = tables[RELEASE]
    table = {
        "source": "https://pypi.org/project/transformer-engine-cu13, transformer_engine/pytorch",
        "release": RELEASE,
        "sha256": {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels.values()},
        **newest,
        "differences": {release: differences(tables[release], newest) for release in OTHERS},
        "names": {release: names_in(*map(_reader(wheel), files)) for release, wheel in wheels.items()},
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


def _reader(wheel: Path) -> Callable[[str], str]:
    archive = zipfile.ZipFile(wheel)
    return lambda file: archive.read(f"{PACKAGE}/{file}").decode()


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
