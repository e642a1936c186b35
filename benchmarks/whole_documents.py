"""Simulates the time of steps on documents of very different lengths, with all of them divided over a ring, or few.

    python benchmarks/whole_documents.py
    python benchmarks/whole_documents.py --distribution pareto --seq-len 131072

Documents have log-normal lengths (median 1,800 tokens, spread 1.6 in the logarithm) or those of a Pareto distribution
(at least 512 tokens, exponent 1), at most those of a row. The processes of a ring compute one batch in a step:

- packed: a row, into which documents are packed by best fit;
- padded: several documents at random, each in a row of its own, padded to the longest.

The time of a step is that of the slowest process, for the layers' forward and backward, from the estimate's times of a
layer: products in proportion to the tokens of a process, attention to the pairs of queries and keys, messages and
merged outputs to the divided tokens. The size of the context-parallel group is fixed ("divided": every row is divided
over all processes, packed ones at the edges of documents), or fits the documents ("placed": as in training). Merging
has the estimate's rate. Ratios without it are given, too, and those to rows that are divided without their padding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from circumstances import circumstances, save_report
from rich.console import Console
from rich.table import Table

from lightning_memo.data.document_rows import PackedRows
from lightning_memo.estimate import EstimateRequest, Parallelism, constants_of, load_cluster, load_model
from lightning_memo.estimate.step_times import layer_times, ring_bandwidth
from lightning_memo.parallel.batches.place_documents import (
    DocumentPlacement,
    PlacingCosts,
    pairs_of_a_token,
    place_documents,
)
from lightning_memo.parallel.batches.token_layout import multiple

_RESULTS = Path(__file__).parent / "results"
_RINGS = (4, 8, 16, 32)


def main() -> None:
    options = _options()
    random = np.random.default_rng(options.seed)
    if options.distribution == "lognormal":
        drawn = np.exp(random.normal(np.log(1800), 1.6, options.documents))
    else:
        drawn = 512 * (1 + random.pareto(1.0, options.documents))
    lengths = np.clip(drawn, 2, options.seq_len).astype(np.int64)
    packed, padded = _packed(lengths, options.seq_len), _padded(lengths, options.rows)
    results = [
        {"ring": ring, "batches": name, **_compare(options, ring, batches)}
        for name, batches in (("packed", packed), ("padded", padded))
        for ring in _RINGS
    ]
    names = ("model", "cluster", "seq_len", "distribution", "documents", "rows", "seed")
    drawn_lengths = {f"tokens_of_{q:.1%}": float(np.quantile(lengths, q)) for q in (0.5, 0.9, 0.99, 0.999)}
    report = {
        **circumstances(("torch", "numpy", "lightning_memo")),
        "settings": {**{name: getattr(options, name) for name in names}, **drawn_lengths},
        "results": results,
    }
    path = options.output / "whole_documents.json"
    save_report(path, report)
    _show(results)
    Console().print(f"Results: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b", help="a model of conf/model")
    parser.add_argument("--cluster", default="h100", help="a cluster of conf/cluster")
    parser.add_argument("--seq-len", type=int, default=262144, help="tokens of a packed row and the longest document")
    parser.add_argument("--distribution", choices=("lognormal", "pareto"), default="lognormal", help="of the lengths")
    parser.add_argument("--documents", type=int, default=20000, help="number of documents")
    parser.add_argument("--rows", type=int, default=8, help="rows of a padded batch")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file")
    return parser.parse_args()


@dataclass(frozen=True)
class _Batch:
    """A batch: `rows` rows of `tokens` tokens, and where their documents start, or how many tokens are valid."""

    rows: int
    tokens: int
    starts: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def joined(self) -> _Batch:
        """The documents in a single row, without padding."""
        if self.lengths is None:
            return self
        return _Batch(1, sum(self.lengths), starts=(0, *np.cumsum(self.lengths[:-1]).tolist()))

    @property
    def pairs(self) -> float:
        """Pairs of queries and keys of which attention is computed if every row is divided.

        Where attention is causal, no valid token sees padding, which is computed as well.
        """
        if self.starts is None:
            return self.rows * self.tokens**2 / 2
        return float((np.diff([*self.starts, self.tokens]).astype(float) ** 2 / 2).sum())


def _packed(lengths: np.ndarray, tokens: int) -> list[_Batch]:
    rows = PackedRows([{"ids": np.zeros(n, np.int64)} for n in lengths], lengths, tokens, 0)
    positions = [rows[n]["position_ids"].numpy() for n in range(len(rows))]
    return [_Batch(1, len(row), starts=tuple(np.flatnonzero(row == 0).tolist())) for row in positions]


def _padded(lengths: np.ndarray, rows: int) -> list[_Batch]:
    whole = lengths[: len(lengths) // rows * rows].reshape(-1, rows)
    return [_Batch(rows, int(batch.max()), lengths=tuple(batch.tolist())) for batch in whole]


def _compare(options: argparse.Namespace, ring: int, batches: Sequence[_Batch]) -> dict[str, Any]:
    """Returns the mean time of a step both ways, with and without the merging of outputs."""
    times = _Times(options, ring)
    costs = PlacingCosts(ring, 1, multiple(ring, 1, 1), pairs_of_a_token(times.request.shape.hidden))
    found: dict[str, Any] = {"steps": len(batches)}
    placements = [
        place_documents(b.rows, b.tokens, None if b.starts is None else (b.starts,), b.lengths, costs) for b in batches
    ]
    found["placed_steps"] = sum(placement is not None for placement in placements)
    for suffix, merging in (("", True), ("_without_merging", False)):
        divided = [times.divided(batch, merging) for batch in batches]
        placed = [
            seconds if placement is None else times.placed(placement, merging)
            for placement, seconds in zip(placements, divided, strict=True)
        ]
        found[f"divided_seconds{suffix}"], found[f"placed_seconds{suffix}"] = np.mean(divided), np.mean(placed)
        found[f"ratio{suffix}"] = sum(divided) / sum(placed)
        if not suffix:
            joined = sum(times.divided(batch.joined, merging) for batch in batches)
            found["ratio_beside_padding"] = joined / sum(placed)
    return found


class _Times:
    """Times of all layers on the slowest process, forward and backward, in seconds."""

    def __init__(self, options: argparse.Namespace, ring: int) -> None:
        shape, cluster = load_model(options.model), load_cluster(options.cluster)
        self.request = EstimateRequest(
            shape=shape, cluster=cluster, constants=constants_of(options.cluster), method="memo", gpus=ring,
            seq_len=options.seq_len, batch_size=1,
        )  # fmt: skip
        self._ring, self._times = ring, layer_times(self.request, Parallelism(cp=ring))

    def divided(self, batch: _Batch, merging: bool) -> float:
        """Return the time of a batch of which every row is divided."""
        local = batch.rows * batch.tokens / self._ring
        return self._seconds(local, local, batch.pairs / self._ring, 0.0, merging)

    def placed(self, placement: DocumentPlacement, merging: bool) -> float:
        """Return the time of a batch of which some documents are divided."""
        shared = placement.shared_tokens / self._ring
        idle = (placement.whole_tokens - sum(map(len, documents)) for documents in placement.whole)
        most = max(_pairs(documents) + n * n / 2 for documents, n in zip(placement.whole, idle, strict=True))
        of_shared = _pairs(placement.shared) / self._ring
        return self._seconds(placement.tokens / self._ring, shared, of_shared, most, merging)

    def _seconds(self, local: float, shared: float, shared_pairs: float, own_pairs: float, merging: bool) -> float:
        request, times, steps = self.request, self._times, self._ring - 1
        tokens, widths, size = request.seq_len, request.shape.attention, request.element_bytes.product
        per_pair = 2 * self._ring / tokens**2  # the times are those of a row of one document
        of_attention = times.attention_forward + times.attention_backward
        products = (times.computing - of_attention) * local * self._ring / tokens
        attention = of_attention * (shared_pairs + own_pairs) * per_pair
        sending = steps * shared * (widths.key + widths.value) * size / ring_bandwidth(request.cluster, self._ring)
        context = max(sending - times.attention_forward * shared_pairs * per_pair, 0.0)
        if merging:
            context += steps * shared * widths.output * size / request.constants.merged_bytes_per_second
        passing = replace(times, context=context).context_parallel
        return request.shape.layers * (products + attention + passing)


def _pairs(documents: Sequence[range]) -> float:
    return sum(len(document) ** 2 / 2 for document in documents)


def _show(results: list[dict[str, Any]]) -> None:
    grid = Table(title="Simulated seconds of a step")
    for name in ("batches", "ring", "placed", "divided", "placed ", "ratio", "beside padding", "without merging"):
        grid.add_column(name, justify="right")
    for row in results:
        grid.add_row(
            row["batches"], str(row["ring"]), f"{row['placed_steps'] / row['steps']:.0%}",
            f"{row['divided_seconds']:.2f}", f"{row['placed_seconds']:.2f}", f"{row['ratio']:.2f}",
            f"{row['ratio_beside_padding']:.2f}", f"{row['ratio_without_merging']:.2f}",
        )  # fmt: skip
    Console().print(grid)


if __name__ == "__main__":
    main()
