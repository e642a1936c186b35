import subprocess
from pathlib import Path

import pytest
from support.markers.slow import slow_if

from lightning_memo.allocator.planned_allocator import SOURCE_FOLDER
from lightning_memo.utils import native_build as native

FOLDER = Path(__file__).parent / "cpp"
FLAGS = ["-std=c++20", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{SOURCE_FOLDER}"]


def compiler():
    try:
        return native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))


def build(source, program, flags):
    return subprocess.run(
        [*compiler(), *FLAGS, *flags, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )


def need_sanitizer(folder, flags):
    """Skip the test if the compiler lacks the sanitizer's runtime library, or if the machine can't run it."""
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}")
    program = folder / "empty"
    if (
        build(empty, program, flags).returncode
        or subprocess.run([program], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"programs with {' '.join(flags)} can't be built or run here")


@slow_if(lambda case_id: case_id != "address")
@pytest.mark.parametrize(
    ("flags", "rounds"),
    [
        (["-O2"], 4000),
        (["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover"], 600),
        (["-O1", "-fsanitize=thread"], 300),
    ],
    ids=["plain", "address", "thread"],
)
def test_core(tmp_path, flags, rounds):
    need_sanitizer(tmp_path, flags)
    program = tmp_path / "test_allocator_core"
    built = build(FOLDER / "test_allocator_core.cpp", program, flags)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, str(rounds)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
