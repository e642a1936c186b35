"""The rules of docs/architecture.md, checked on the imports and definitions of the package."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePath

import pytest
from support.paths import ROOT

PACKAGE = ROOT / "lightning_memo"

# Folder or file of the package -> packages that it does not import, directly.
WITHOUT = {
    "artifacts": {"torch", "lightning"},
    "planner": {"torch", "lightning"},
    "reports": {"torch", "lightning"},
    "shapes": {"torch", "lightning"},
    "estimate": {"torch", "lightning"},
    "place.py": {"torch", "lightning"},
    "allocator": {"lightning"},
    "engine": {"lightning"},
    "kernels": {"lightning"},
    "loss": {"lightning"},
    "profiler": {"lightning"},
    "runtime": {"lightning"},
}
HEAVY = {"torch", "lightning", "pytorch_lightning", "matplotlib", "transformers"}
# Module -> packages that are not loaded when it is imported.
NOT_LOADED = {
    "lightning_memo": HEAVY,
    "lightning_memo.planner": HEAVY,
    "lightning_memo.estimate": HEAVY,
    "lightning_memo.place": HEAVY,
    "lightning_memo.artifacts.trace": HEAVY | {"highspy"},
    "lightning_memo.runtime.training_runtime": {"lightning", "pytorch_lightning"},  # and engine, kernels, allocator
}


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Syntax tree of every module, by path relative to the package."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def module_file(name: str) -> str | None:
    """Path of the module with a dotted name, relative to the package; `None` if there is none."""
    parts = name.split(".")[1:]
    for path in (PurePath(*parts, "__init__.py"), PurePath(*parts[:-1], f"{parts[-1]}.py") if parts else None):
        if path is not None and str(path) in sources():
            return str(path)
    return None


def imported(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Dotted name of each imported module, with the name taken from it; imports in functions and for types count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            yield from ((node.module, alias.name) for alias in node.names)


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Files of the package that each file imports."""
    found: dict[str, set[str]] = {path: set() for path in sources()}
    for path, tree in sources().items():
        for module, name in imported(tree):
            if module.partition(".")[0] == "lightning_memo":
                target = module_file(f"{module}.{name}") or module_file(module)
                assert target is not None, f"{path} imports {module}.{name}"
                found[path].add(target)
    return found


def folders(root: Path) -> list[Path]:
    return [root, *(path for path in sorted(root.rglob("*")) if path.is_dir() and any(path.glob("*.py")))]


def child_of(folder: PurePath, path: str) -> str | None:
    """The file or subfolder of `folder` that `path` is in."""
    parts = PurePath(path).parts
    depth = len(folder.parts)
    return parts[depth] if parts[:depth] == folder.parts else None


@pytest.mark.parametrize("folder", [str(path.relative_to(PACKAGE)) for path in folders(PACKAGE)])
def test_imports_have_no_circle(folder: str) -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for path, targets in arrows().items():
        child = child_of(PurePath(folder), path)
        if child is not None:
            others = {child_of(PurePath(folder), target) for target in targets}
            graph[child] |= {other for other in others if other not in (None, child)}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{folder}: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("place", WITHOUT)
def test_imports_of_packages_that_a_part_does_without(place: str) -> None:
    paths = [path for path in sources() if path == place or path.startswith(f"{place}/")]
    assert paths
    found = {(path, name) for path in paths for name, _ in imported(sources()[path])}
    assert not [(path, name) for path, name in found if name.partition(".")[0] in WITHOUT[place]]


def test_parallel_does_not_import_the_engine() -> None:
    assert not [
        path for path in arrows() if path.startswith("parallel/") and any("engine/" in t for t in arrows()[path])
    ]


@pytest.mark.parametrize("module", NOT_LOADED)
def test_modules_that_an_import_does_not_load(module: str) -> None:
    script = f"import sys; before = dict(sys.modules); import {module}; print(*set(sys.modules) - set(before))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "lightning_memo" in loaded
    assert not loaded & NOT_LOADED[module]


def test_importing_the_package_changes_no_environment() -> None:
    script = "import os; before = dict(os.environ); import lightning_memo.planner; print(before == dict(os.environ))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True"]
