"""Simulates the time of steps on packed documents of very different lengths, with rows shared out by cost or by length.

    python benchmarks/balance.py
    python benchmarks/balance.py --documents 2000 --seq-len 32768

Documents have log-normal lengths, and are packed into rows by best fit. A process computes one row in a step. The time
of a step is that of the slowest process, for the layers' forward and backward without communication, from the
estimate's times of a layer; the time of attention is proportional to the keys that a process's queries see. Both ways
train the same rows:

- by length: rows in random order, and each row in head-tail order over the processes of a ring.
- by cost: rows in the order of `DocumentsDataModule`, and each row cut at the edges of its documents.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from circumstances import circumstances, save_report
from rich.console import Console
from rich.table import Table

from lightning_memo.data.document_rows import PackedRows
from lightning_memo.data.resumable_loader import balanced_order
from lightning_memo.estimate import EstimateRequest, Parallelism, constants_of, load_cluster, load_model
from lightning_memo.estimate.step_times import layer_times
from lightning_memo.parallel.batches.token_layout import ring_chunks

_RESULTS = Path(__file__).parent / "results"
_LAYOUTS = ((8, 1), (1, 8), (8, 8))  # data-parallel and ring sizes
_MEDIAN, _SPREAD = 1800, 1.6  # of the lengths, in tokens and in the logarithm

Array = npt.NDArray[np.float64]


def main() -> None:
    options = _options()
    random = np.random.default_rng(options.seed)
    lengths = np.exp(random.normal(np.log(_MEDIAN), _SPREAD, options.documents)).astype(np.int64)
    lengths = np.clip(lengths, 2, 2 * options.seq_len)
    rows = PackedRows([{"ids": np.zeros(n, np.int64)} for n in lengths], lengths, options.seq_len, 0)
    results = [_compare(options, rows, data, ring) for data, ring in _LAYOUTS]
    middle, most = (float(np.quantile(lengths, q)) for q in (0.5, 0.99))
    settings = {name: getattr(options, name) for name in ("model", "cluster", "seq_len", "documents", "seed")}
    report = {
        **circumstances(("torch", "numpy", "lightning_memo")),
        "settings": {**settings, "rows": len(rows), "median_tokens": middle, "tokens_of_99_percent": most},
        "results": results,
    }
    path = options.output / "balance.json"
    save_report(path, report)
    _show(results)
    Console().print(f"Results: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b", help="a model of conf/model")
    parser.add_argument("--cluster", default="h100", help="a cluster of conf/cluster")
    parser.add_argument("--seq-len", type=int, default=131072, help="tokens of a row")
    parser.add_argument("--documents", type=int, default=20000, help="number of documents")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths and of the order")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file")
    return parser.parse_args()


def _compare(options: argparse.Namespace, rows: PackedRows, data: int, ring: int) -> dict[str, Any]:
    """Returns the mean time of a step both ways, and the slowest process's time relative to the mean one."""
    assert rows.costs is not None
    random = np.random.default_rng(options.seed).permutation(len(rows))
    balanced = balanced_order(rows.costs, data, np.random.default_rng(options.seed))
    whole = len(rows) // data * data
    assert set(random[:whole]) == set(balanced[:whole])  # what is left over is the same, too
    dense, attention = _seconds(options, ring)
    found: dict[str, Any] = {"data_parallel": data, "ring": ring, "steps": whole // data}
    for name, order, cuts in (("by_length", random, False), ("by_cost", balanced, True)):
        shares = np.array([_attention_shares(rows, int(n), ring, cuts) for n in order[:whole]])
        seconds = (dense + attention * shares).reshape(-1, data * ring)  # [steps, processes]
        found[f"{name}_seconds"] = float(seconds.max(1).mean())
        found[f"{name}_slowest"] = float(seconds.max(1).sum() / seconds.mean(1).sum())
    found["ratio"] = found["by_length_seconds"] / found["by_cost_seconds"]
    return found


def _seconds(options: argparse.Namespace, ring: int) -> tuple[float, float]:
    """Returns the times of all layers: without attention, and of attention if the row is one document."""
    shape, cluster = load_model(options.model), load_cluster(options.cluster)
    request = EstimateRequest(
        shape=shape, cluster=cluster, constants=constants_of(options.cluster), method="memo", gpus=ring,
        seq_len=options.seq_len, batch_size=1,
    )  # fmt: skip
    times = layer_times(request, Parallelism(cp=ring))
    attention = times.attention_forward + times.attention_backward
    return shape.layers * (times.computing - attention), shape.layers * attention


def _attention_shares(rows: PackedRows, index: int, ring: int, cuts: bool) -> Array:
    """Returns the attention of each ring rank on a row, relative to an even share of a row of one document."""
    positions = rows[index]["position_ids"].numpy()
    tokens = len(positions)
    keys = np.concatenate([[0], np.cumsum(positions + 1.0)])  # that are seen by the tokens up to each one
    documents = (tuple(np.flatnonzero(positions == 0).tolist()),) if cuts else None
    by_rank = [
        sum(keys[c.stop] - keys[c.start] for c in ring_chunks(range(tokens), ring, rank, documents))
        for rank in range(ring)
    ]
    return np.array(by_rank) * ring / (tokens * (tokens + 1) / 2)


def _show(results: list[dict[str, Any]]) -> None:
    grid = Table(title="Simulated time of a step on packed documents")
    for name in (
        "data parallel",
        "ring",
        "by length",
        "by cost",
        "times as fast",
        "slowest / mean by length",
        "by cost",
    ):
        grid.add_column(name, justify="right")
    for row in results:
        cells = (row["by_length_seconds"], row["by_cost_seconds"])
        grid.add_row(
            str(row["data_parallel"]), str(row["ring"]), *(f"{seconds:.2f} s" for seconds in cells),
            f"{row['ratio']:.2f}", f"{row['by_length_slowest']:.2f}", f"{row['by_cost_slowest']:.2f}",
        )  # fmt: skip
    Console().print(grid)


if __name__ == "__main__":
    main()
