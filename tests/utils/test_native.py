import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightning_memo.utils import native_build as native

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return %s; }\n'
FUNCTIONS = {"answer": (ctypes.c_int,)}


@pytest.fixture
def source(monkeypatch, tmp_path):
    """A source to build, and a cache folder that is still empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "sources" / "answer.cpp"
    path.parent.mkdir()
    path.write_text(ANSWER % 42)
    return path


@pytest.fixture
def compiler():
    try:
        return native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))


def message_of(function, *arguments):
    with pytest.raises(native.BuildError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.usefixtures("compiler")
def test_a_library_is_built_once_and_loaded(source, tmp_path):
    assert native.load("answer", [source], FUNCTIONS).answer() == 42
    assert native.load("answer", [source], FUNCTIONS, keep_gil=True).answer() == 42
    libraries = list((tmp_path / "cache" / "lightning_memo" / "native").glob("*.so"))
    built = libraries[0].stat().st_mtime_ns
    assert native.build("answer", [source]) == libraries[0]
    assert len(libraries) == 1 and libraries[0].stat().st_mtime_ns == built


@pytest.mark.usefixtures("compiler")
def test_what_is_included_and_the_flags_make_another_library(source):
    header = source.with_name("value.h")
    header.write_text("#define VALUE 1\n")
    source.write_text('#include "value.h"\n' + ANSWER % "VALUE + MORE")
    first = native.build("answer", [source], ["-DMORE=1"])
    header.write_text("#define VALUE 2\n")
    second = native.build("answer", [source], ["-DMORE=1"])
    assert len({first, second, native.build("answer", [source], ["-DMORE=2"])}) == 3
    assert native.load("answer", [source], FUNCTIONS, ["-DMORE=2"]).answer() == 4


@pytest.mark.usefixtures("compiler")
def test_a_source_that_does_not_compile_is_one_line_and_a_log(source, tmp_path):
    source.write_text("int f() { return missing_name; }\n")
    message = message_of(native.build, "answer", [source])
    assert "answer: the C++ compiler failed" in message and "missing_name" in message
    log = Path(message.rpartition("full output: ")[2].rstrip(")"))
    assert "missing_name" in log.read_text() and str(source) in log.read_text()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_compiler(source, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install g++, or set CXX" in message_of(native.build, "answer", [source])


def test_a_compiler_that_does_not_exist(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert message_of(native.build, "answer", [source]).startswith("CXX=no-such-compiler -m64: no such program")


@pytest.mark.usefixtures("compiler")
def test_a_cache_folder_that_can_not_be_written(source, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "set XDG_CACHE_HOME to a writable folder" in message_of(native.build, "answer", [source])


@pytest.mark.usefixtures("compiler")
def test_a_damaged_library_is_named(source):
    native.build("answer", [source]).write_bytes(b"")
    message = message_of(native.load, "answer", [source], FUNCTIONS)
    assert "cannot be loaded" in message and "delete it" in message


@pytest.mark.usefixtures("compiler")
def test_a_library_without_a_function_is_named(source, tmp_path):
    other = source.with_name("other.cpp")
    other.write_text('extern "C" __attribute__((visibility("default"))) int question() { return 1; }\n')
    library = native.build("answer", [source])
    library.write_bytes(native.build("other", [other]).read_bytes())
    message = message_of(native.load, "answer", [source], FUNCTIONS)
    assert "answer" in message and "delete it" in message


@pytest.mark.slow
def test_two_processes_build_once(source, compiler, monkeypatch, tmp_path):
    calls = tmp_path / "calls"
    slow = tmp_path / "slow-compiler"
    slow.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            case "$*" in *--version) exit 0;; esac
            echo call >> {calls}
            sleep 1
            exec {compiler[0]} "$@"
            """)
    )
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    code = (
        "from pathlib import Path; from lightning_memo.utils import native_build; "
        f"native_build.build('answer', [Path({str(source)!r})])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert calls.read_text() == "call\n"


@pytest.mark.usefixtures("compiler")
def test_torch_is_found_without_importing_it():
    code = """
import sys
from lightning_memo.utils import native_build
print(*native_build.torch_flags())
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "-lc10" in done.stdout and "torch/include" in done.stdout


def test_cuda_headers_that_are_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    torch_root, include = tmp_path / "torch", tmp_path / "nvidia" / "cu13" / "include"
    assert "nvidia-cuda-runtime, or set CUDA_HOME" in message_of(native.cuda_include_folders, torch_root)
    include.mkdir(parents=True)
    (include / "cuda_runtime_api.h").touch()
    assert "nvidia-cuda-crt, or set CUDA_HOME" in message_of(native.cuda_include_folders, torch_root)
    triton = tmp_path / "triton" / "backends" / "nvidia" / "include"
    (triton / "crt").mkdir(parents=True)
    (triton / "crt" / "host_defines.h").touch()
    assert native.cuda_include_folders(torch_root) == [include, triton]


@pytest.mark.usefixtures("compiler")
def test_what_another_machine_compiled_needs_no_compiler(source, monkeypatch):
    built = native.build("answer", [source])
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native.build("answer", [source]) == built
    source.write_text(ANSWER % 43)
    assert "no C++ compiler" in message_of(native.build, "answer", [source])


@pytest.mark.usefixtures("compiler")
def test_what_an_ended_process_left_is_swept(source, tmp_path):
    library = native.build("answer", [source])
    litter = library.parent / ".unfinished" / "12345678" / library.name
    litter.parent.mkdir(parents=True)
    library.rename(litter)
    assert native.build("answer", [source]) == library
    assert not litter.exists()
