"""Builds the emulated CUDA libraries for the CUDA build of PyTorch in this environment.

    python tests/emulated_cuda/build.py HEADERS     # HEADERS: the include folder of CUDA 13

With `--no-operators`, tests on the CPU can run with `EMULATED_CUDA_DEVICES=0`, and the build takes a sixth of the time.

Every library that PyTorch needs gets all functions that PyTorch takes from it. Those that `csrc/` does not define print
their name once and return an error. The libraries are written where PyTorch looks for CUDA's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
RUNTIME, OPERATORS = "libcudart.so.13", "libemulated_cuda_operators.so"
DEFINED = {
    RUNTIME: "device/*.cpp",
    "libnccl.so.2": "nccl/*.cpp",
    "libcudnn.so.9": "libraries/cudnn.cpp",
    "libcupti.so.13": "libraries/cupti.cpp",
    "libnvidia-ml.so.1": "libraries/nvml.cpp",
}
# Functions whose version PyTorch's symbol table does not name, by library.
UNVERSIONED = {
    "libnccl.so.2": r"nccl[A-Z]\w+",
    "libcusparseLt.so.0": r"cusparseLt\w+",
    "libcufile.so.0": r"cuFile\w+",
    "libcurand.so.10": r"curand\w+",
    "libcuda.so.1": r"cu(?!File|blas|dnn|fft|rand|sparse|solver|pti)[A-Z]\w+",
}
VERSIONS = {"NVSHMEM": "libnvshmem_host.so.3"}  # versions that are not the name of their library
COMPILER = ("g++", "-std=c++20", "-fPIC", "-Wall")


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def needed_functions(libraries: Path) -> dict[str, tuple[str, set[str]]]:
    """By library: its version ("" for none), and the functions that PyTorch takes from it."""
    names: set[str] = set()
    found: dict[str, tuple[str, set[str]]] = {"libcuda.so.1": ("", set()), "libnvidia-ml.so.1": ("", set())}
    for library in libraries.glob("*.so"):
        names |= {line.split()[-1] for line in run("nm", "-D", "--undefined-only", library).splitlines()}
        for name in re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)[^\]]+)\]", run("readelf", "-d", library)):
            found.setdefault(name, ("", set()))
    for name in names:
        function, _, version = name.partition("@")
        version = version.lstrip("@")
        library = VERSIONS.get(version, version)
        if library in found:
            found[library] = (version, found[library][1] | {function})
        elif not version:
            for library, pattern in UNVERSIONED.items():
                if re.fullmatch(pattern, function):
                    found[library][1].add(function)
    return found


def compile_sources(headers: Path, torch: Path, build: Path, operators: bool) -> dict[Path, Path]:
    """Compile the sources that changed, two at a time; returns the object of each."""
    found = [path for path in SOURCES.glob("*/*.cpp") if operators or path.parent.name != "operators"]
    sources = sorted(found, key=lambda path: -path.stat().st_size)
    objects = {source: build / f"{source.parent.name}_{source.stem}.o" for source in sources}
    folders = (headers, torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include")

    newest_header = max(header.stat().st_mtime for header in SOURCES.rglob("*.h"))

    def compile_one(source: Path) -> None:
        made = objects[source]
        if made.exists() and made.stat().st_mtime > max(source.stat().st_mtime, newest_header):
            return
        quick = ("-O0", "-Wno-unused") if source.parent.name == "operators" else ("-O1",)
        run(*COMPILER, *quick, *(f"-isystem{folder}" for folder in folders), "-c", source, "-o", made)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources))
    return objects


def defined_functions(file: Path, *flags: str) -> set[str]:
    lines = run("nm", *flags, "--defined-only", file).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def link(library: str, version: str, functions: set[str], objects: list[Path], target: Path, build: Path) -> None:
    """Link one library from the objects that define its functions and from stubs of the others."""
    defined = set().union(*(defined_functions(file, "-g") for file in objects))
    if library == "libcuda.so.1":  # the driver's functions are in the runtime's library
        defined |= defined_functions(target / RUNTIME, "-D")
    stubs = build / f"{library}.c"
    body = 'return emulated_cuda_missing("{library}: {name}");'
    missing = sorted(functions - defined)
    lines = [f"int {name}(void) {{ {body.format(library=library, name=name)} }}" for name in missing]
    stubs.write_text("\n".join(["int emulated_cuda_missing(const char*);", *lines, ""]))
    run("gcc", "-w", "-fPIC", "-c", stubs, "-o", stubs.with_suffix(".o"))
    options = [] if library == RUNTIME else [f"-L{target}", "-Wl,--no-as-needed", f"-l:{RUNTIME}"]
    if version:
        versions = build / f"{library}.map"
        versions.write_text(f"{version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script={versions}")
    run("g++", "-shared", f"-Wl,-soname,{library}", *objects, stubs.with_suffix(".o"), *options, "-Wl,-rpath,$ORIGIN",
        "-pthread", "-o", target / library)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("headers", type=Path, help="the include folder of CUDA 13")
    parser.add_argument("--no-operators", action="store_true", help="build the libraries alone, for tests on the CPU")
    arguments = parser.parse_args()
    headers: Path = arguments.headers
    if not (headers / "cuda_runtime_api.h").is_file():
        parser.error(f"{headers} has no cuda_runtime_api.h: `make cuda-headers` gets .cuda/toolkit/nvidia/cu13/include")
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    target = torch.parent / "nvidia" / "cu13" / "lib"
    build = target / "build"
    build.mkdir(parents=True, exist_ok=True)
    objects = compile_sources(headers, torch, build, not arguments.no_operators)
    needed = needed_functions(torch / "lib")
    for library in sorted(needed, key=lambda name: name != RUNTIME):  # the others are linked to the runtime
        own = [objects[source] for source in sorted(SOURCES.glob(DEFINED.get(library, "none")))]
        link(library, *needed[library], own, target, build)
    if arguments.no_operators:
        return
    operators = [made for source, made in objects.items() if source.parent.name == "operators"]
    run("g++", "-shared", *operators, f"-L{torch / 'lib'}", f"-L{target}", f"-Wl,-rpath-link,{target}", "-ltorch_cuda",
        "-ltorch_cpu", "-lc10_cuda", "-lc10", f"-l:{RUNTIME}", "-o", target / OPERATORS)  # fmt: skip


if __name__ == "__main__":
    main()
