"""Compares undivided calls of attention kernels above 2^31 elements with calls of a part alone, on a GPU of 80 GB.

    python benchmarks/large_attention.py
    python benchmarks/large_attention.py --quick

The parts are the last batch row, the last packed document, or the last group of heads, which do not depend on the
others. A row of the table is the relative distance of each result of the part to what the part is alone. Each call runs
in a process of its own: an illegal memory access ends it. `--quick` takes small calls, as a trial of the script.

The results are printed and written to a JSON file, to which docs/kernels.md refers.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from circumstances import circumstances, save_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.attention_kernel import AttentionBackend
from lightning_memo.kernels.divided_calls import PackedDocuments
from lightning_memo.kernels.flash_attention import AtenFlash, CudnnSdpa

_RESULTS = Path(__file__).parent / "results" / "large_attention.json"
_TRIED = Path("outputs") / "benchmarks" / "large_attention.json"
_KERNELS: dict[str, Callable[[], AttentionBackend]] = {"sdpa": AtenFlash, "cudnn": CudnnSdpa}
_HEADS, _KEY_HEADS, _HEAD_DIM, _DOCUMENT = 32, 8, 128, 120
_SIZES = {"rows": (130, 4096), "documents": (1, 4400 * _DOCUMENT), "heads": (1, 2**19 + 4096)}  # batch, tokens
_QUICK = {"rows": (3, 256), "documents": (1, 4 * _DOCUMENT), "heads": (1, 256)}
_NAMES = ("out", "lse", "dq", "dk", "dv")

Results = tuple[Tensor, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, help=f"default: {_RESULTS}; {_TRIED} with --quick")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU, and these kernels are CUDA's", file=sys.stderr)
        return 2
    rows = list(_rows(_QUICK if options.quick else _SIZES))
    table = Table("kernel", "part", "batch x tokens", *_NAMES, title="distance of a part to the part alone")
    for row in rows:
        found = row["distances"]
        cells = ["failed"] if found is None else [f"{found[name]:.1e}" for name in _NAMES]
        table.add_row(row["kernel"], row["part"], f"{row['batch']} x {row['tokens']}", *cells)
    Console().print(table)
    output = options.output or (_TRIED if options.quick else _RESULTS)
    output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        **circumstances(["torch"]),
        "cudnn": torch.backends.cudnn.version(),
        "device": torch.cuda.get_device_name(),
    }
    save_report(output, {**report, "rows": rows})
    return 0


def _rows(sizes: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    for kernel in _KERNELS:
        for part, (batch, tokens) in sizes.items():
            with spawn.Pool(1) as pool:
                try:
                    found = pool.apply(distances, (kernel, part, batch, tokens))
                except (RuntimeError, ValueError) as error:
                    print(f"{kernel}, {part}: {str(error).splitlines()[0]}", file=sys.stderr)
                    found = None
            yield {"kernel": kernel, "part": part, "batch": batch, "tokens": tokens, "distances": found}


def distances(kernel: str, part: str, batch: int, tokens: int) -> dict[str, float]:
    """Return the distance of each result of a part to that of the part alone."""
    random = torch.Generator("cuda").manual_seed(0)
    make = functools.partial(torch.randn, generator=random, device="cuda", dtype=torch.bfloat16)
    heads = (_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS)
    inputs = tuple(make(batch, tokens, n, _HEAD_DIM).transpose(1, 2) for n in heads)
    starts = tuple(range(0, tokens, _DOCUMENT)) if part == "documents" else None
    backend = PackedDocuments(_KERNELS[kernel]()) if starts else _KERNELS[kernel]()
    found = _attend(backend, inputs, AttentionSpec(documents=(starts,) if starts else None))
    alone = _attend(_KERNELS[kernel](), tuple(_part(t, part) for t in inputs), AttentionSpec())
    pairs = zip(_NAMES, (_part(t, part) for t in found), alone, strict=True)
    return {name: float((a.double() - b.double()).norm() / b.double().norm()) for name, a, b in pairs}


def _part(t: Tensor, part: str) -> Tensor:
    """Return the last row, document, or group of heads of `t` `[batch, heads, tokens, ...]`."""
    if part == "rows":
        return t[-1:]
    if part == "documents":
        return t[:, :, -_DOCUMENT:]
    return t[:, -(t.shape[1] // _KEY_HEADS) :]


def _attend(backend: AttentionBackend, inputs: Results, spec: AttentionSpec) -> Results:
    *qkv, dout = inputs
    result = backend.forward(*qkv, spec)
    return result.out, result.lse, *backend.backward(dout, *qkv, result, spec)


if __name__ == "__main__":
    sys.exit(main())
