"""Device memory of a training step by sequence length, plain and with MemoStrategy: the picture in the README.

    OMP_NUM_THREADS=1 python benchmarks/memory_by_length.py
    python benchmarks/memory_by_length.py --lengths 1024 2048 --output FOLDER
    python benchmarks/memory_by_length.py --draw   # draws the picture again from the results, without a run

A small Llama with random weights is trained by Lightning's Trainer on a CPU, where "device" and "host" are both main
memory and are distinguished by who allocates. The peak is measured in the third optimizer step. It is the memory above
weights, gradients and optimizer state, and includes the buffers that a plan keeps allocated between steps. Memory does
not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from circumstances import circumstances, save_report
from lightning.pytorch import Trainer, seed_everything
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.cli.step_stats import METERED_STEP, StepStats
from lightning_memo.models import CausalLM
from lightning_memo.utils.files import replacing

_BENCHMARKS = Path(__file__).parent
_LENGTHS = [1024, 2048, 4096, 8192]
_SLICE_TOKENS = 512
_VOCABULARY = 512
_LAYERS, _HIDDEN, _HEADS = 32, 64, 2  # as deep as Llama 3 8B, and much narrower
_MODEL = {
    "model_type": "llama", "hidden_size": _HIDDEN, "intermediate_size": _HIDDEN * 43 // 16,
    "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "vocab_size": _VOCABULARY,
    "max_position_embeddings": 2**20,
}  # fmt: skip
_ALPHA = 0.5
_MEMO = {"alpha": _ALPHA, "loss_chunk_tokens": _SLICE_TOKENS}
_METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "gradient checkpointing": None,
    f"MemoStrategy(alpha={_ALPHA})": _MEMO,
    f'MemoStrategy(alpha={_ALPHA}, slice_tokens={_SLICE_TOKENS}, stream_from_host="hidden")': {
        **_MEMO,
        "slice_tokens": _SLICE_TOKENS,
        "stream_from_host": "hidden",
    },
}


def main() -> None:
    """Measures every method at every length, writes the raw file, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=_LENGTHS, help="sequence lengths in tokens")
    parser.add_argument("--output", type=Path, default=_BENCHMARKS / "results", help="folder of the JSON file")
    parser.add_argument(
        "--picture", type=Path, default=_BENCHMARKS.parent / "docs" / "images" / "memory_by_length.png",
        help="the PNG file to write",
    )  # fmt: skip
    parser.add_argument("--draw", action="store_true", help="only draw the picture from the JSON file")
    options = parser.parse_args()
    path = options.output / "memory_by_length.json"
    if not options.draw:
        report: dict[str, Any] = {
            **circumstances(("torch", "transformers", "lightning", "lightning_memo")),
            "settings": {"model": _MODEL, "methods": _METHODS, "batch_size": 1, "precision": "32-true"},
            "results": [],
        }
        with tempfile.TemporaryDirectory() as folder:
            for tokens in options.lengths:
                for method in _METHODS:
                    measured = _measure(method, tokens, folder)
                    report["results"].append({"method": method, "tokens": tokens, **measured})
        save_report(path, report)
    _draw(json.loads(path.read_text(encoding="utf-8")), options.picture)


def _measure(method: str, tokens: int, folder: str) -> dict[str, int]:
    """Peak bytes on the device and bytes on the host, in a step of training on one sequence."""
    seed_everything(0, verbose=False)
    model = {"config": _MODEL, "gradient_checkpointing": method == "gradient checkpointing"}
    ids = torch.randint(0, _VOCABULARY, (1, tokens))
    stats, settings = StepStats(), _METHODS[method]
    steps = METERED_STEP + 1
    strategy = MemoStrategy(**settings) if settings is not None else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, callbacks=[stats], max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(CausalLM(model), DataLoader([{"input_ids": ids, "labels": ids}] * steps, batch_size=None))
    assert stats.step_memory_bytes is not None
    if not isinstance(strategy, MemoStrategy):
        return {"peak_bytes": stats.step_memory_bytes, "host_bytes": 0}
    swap = strategy.plan.swap
    return {"peak_bytes": stats.step_memory_bytes + swap.memory.buffer_bytes, "host_bytes": swap.host_bytes}


def _draw(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    rows = report["results"]
    lengths = sorted({row["tokens"] for row in rows})
    for method, style in zip(_METHODS, ("s-", "^--", "o-", "D-"), strict=True):
        peaks = {row["tokens"]: row["peak_bytes"] / 2**20 for row in rows if row["method"] == method}
        ours = "Memo" in method
        axes.plot(
            peaks.keys(), peaks.values(), style, label=method, linewidth=2 if ours else 1,
            markersize=6 if ours else 9, markerfacecolor=None if ours else "none",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{tokens // 1024}K" for tokens in lengths])
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("step memory, MiB (log scale)")
    axes.set_title(f"Step memory on the device (Llama, {_LAYERS} layers, hidden size {_HIDDEN}, fp32, on a CPU)")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=110)


if __name__ == "__main__":
    main()
