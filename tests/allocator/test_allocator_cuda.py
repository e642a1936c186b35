import re
import subprocess
import sys

import pytest
from support.cuda_stub.real_allocator import build_stub
from support.markers.slow import slow_if
from support.paths import ROOT, TESTS

from lightning_memo.allocator.planned_allocator import SOURCE_FOLDER
from lightning_memo.utils import native_build as native

STUB = TESTS / "support" / "cuda_stub"
FETCHED = ROOT / ".cuda"
VERSIONS = sorted(path.parent for path in FETCHED.glob("*/torch/complete"))
BACK_END = SOURCE_FOLDER / "allocator_cuda.cpp"

pytestmark = pytest.mark.skipif(not VERSIONS, reason="no headers of CUDA builds: make cuda-headers")
each_version = pytest.mark.parametrize("version", VERSIONS, ids=[version.parent.name for version in VERSIONS])

# Runs in a separate process, because this one has loaded the CPU build's library of the same name.
RUN = """
import ctypes, sys
for library in sys.argv[1:-1]:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
sys.exit(ctypes.CDLL(sys.argv[-1]).run_tests())
"""


@pytest.fixture(autouse=True)
def compiler():
    try:
        return native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))


def torch_flags(version):
    """Compiler flags for this version of torch, without optimization, which would double the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "torch_folder", lambda: version)
        return [*native.torch_flags(cuda=True), "-O0", "-Werror"]


def not_overridden(compiler, source, version, folder):
    """Entries of the virtual table of PlannedCuda that this project does not define."""
    layout = folder / "classes.txt"
    flags = ["-std=c++20", "-fsyntax-only", f"-fdump-lang-class={layout}", *torch_flags(version), "-w"]
    done = subprocess.run([*compiler, *flags, str(source)], capture_output=True, text=True, check=False)
    if "-fdump-lang-class" in done.stderr:
        pytest.skip("only g++ prints virtual tables")
    table = re.search(r"^Vtable for lightning_memo::\S*::PlannedCuda\n(.*?)\n\n", layout.read_text(), re.S | re.M)
    entries = re.findall(r"\(int \(\*\)\(\.\.\.\)\)(\S+)", table.group(1))
    functions = [entry for entry in entries if "::" in entry or "virtual" in entry]
    assert len(functions) > 40
    return [entry for entry in functions if not entry.startswith("lightning_memo::")]


@slow_if(lambda version, toolkit: version in VERSIONS[:-1] or toolkit != "missing")
@each_version
@pytest.mark.parametrize("toolkit", ["missing", "toolkit/nvidia/cu13"], ids=["pip install torch", "and a toolkit"])
def test_every_virtual_function_is_overridden(compiler, version, toolkit, tmp_path, monkeypatch):
    """It compiles with the packages that `pip install torch` brings, with and without a CUDA toolkit."""
    monkeypatch.setenv("CUDA_HOME", str(FETCHED / toolkit))
    assert native.cuda_include_folders(version)[0] == version.parent / "nvidia" / "cu13" / "include"
    assert not_overridden(compiler, BACK_END, version, tmp_path) == []


@pytest.mark.slow
def test_a_toolkit_alone(compiler, tmp_path, monkeypatch):
    """As beside a torch that was built from source, without NVIDIA's packages."""
    (tmp_path / "torch").symlink_to(VERSIONS[-1])
    monkeypatch.setenv("CUDA_HOME", str(FETCHED / "toolkit" / "nvidia" / "cu13"))
    assert native.cuda_include_folders(tmp_path / "torch") == [FETCHED / "toolkit" / "nvidia" / "cu13" / "include"]
    assert not_overridden(compiler, BACK_END, tmp_path / "torch", tmp_path) == []


@slow_if(lambda name: name != "getMemoryInfo")
@pytest.mark.parametrize("name", ["getMemoryInfo", "setNoSplit", "attachAllocatorTraceTracker"])
def test_a_missing_override_is_noticed(compiler, name, tmp_path):
    for source in SOURCE_FOLDER.iterdir():
        if source.suffix in (".h", ".cpp"):
            (tmp_path / source.name).write_text(source.read_text())
    header = tmp_path / "delegating_cuda_allocator.h"
    header.write_text(re.sub(rf"^  [^\n]*\b{name}\([^{{]*\{{[^}}]*\}}\n", "", header.read_text(), count=1, flags=re.M))
    missing = not_overridden(compiler, tmp_path / BACK_END.name, VERSIONS[-1], tmp_path)
    assert [entry for entry in missing if name in entry or "pure_virtual" in entry], missing


def test_versions_that_nobody_looked_at_are_refused(tmp_path):
    header = tmp_path / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 16\n")
    flags = [f"-I{tmp_path}", *torch_flags(VERSIONS[-1])]
    with pytest.raises(native.BuildError, match=r"planned allocator supports torch 2\.11 to 2\.15"):
        native.build("allocator_cuda", [BACK_END], flags)


@slow_if(lambda version: version in VERSIONS[:-1])
@each_version
def test_back_end_on_the_stub_runtime(version):
    flags = torch_flags(version)
    stub = build_stub(version)
    back_end = native.build("allocator_cuda", [BACK_END], flags)
    links = ["-fvisibility=default", f"-I{SOURCE_FOLDER}", str(back_end), str(stub), *flags]
    tests = native.build("test_cuda_backend", [STUB / "test_cuda_backend.cpp"], links)
    libraries = [str(path) for path in (stub, back_end, tests)]
    done = subprocess.run([sys.executable, "-c", RUN, *libraries], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
