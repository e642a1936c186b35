"""Measures the device memory of a training step by sequence length, with all other tensors on the host.

    python benchmarks/growth.py
    python benchmarks/growth.py --layers 2 --kv-heads 2 --lengths 8192 65536
    python benchmarks/growth.py --quick

A Llama with random weights trains on one sequence with slices of fixed length, most tensors on the host and the loss
in chunks. It runs on a CPU, where "device" and "host" are main memory and are distinguished by who allocates. A peak
is the highest level of a step without weights and gradients: the memory that the step allocates on the device, and the
buffers of the plan. It does not include the batch, 8 bytes for each token and each label. The results are printed and
written to a JSON file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from circumstances import circumstances, save_report
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_memo.artifacts.swap_plan import StreamFromHost, SwapPlan
from lightning_memo.engine import Engine, RequestedSettings
from lightning_memo.engine.bootstrap_plan import streamed_bytes_of_calls
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.planner.token_slices import plan_of_alpha
from lightning_memo.profiler.memory_meter import PeakMeter
from lightning_memo.utils.find_layers import find_stacks
from lightning_memo.utils.units import format_bytes

CPU = torch.device("cpu")
_RESULTS = Path(__file__).parent / "results"
_QUICK = [
    "--layers", "2", "--hidden", "64", "--heads", "4", "--slice-tokens", "128", "--block-tokens", "256",
    "--lengths", "1024", "2048",
]  # fmt: skip


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    known = circumstances(("torch", "transformers", "lightning_memo"))  # missing packages are reported now
    rows = []
    for stream in options.stream_from_host:
        for tokens in options.lengths:
            rows.append({"stream_from_host": stream, "tokens": tokens, **_measure(options, stream, tokens)})
    names = (
        "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "slice_tokens", "block_tokens", "alpha", "threads",
    )  # fmt: skip
    report = {
        **known,
        "settings": {name: getattr(options, name) for name in names},
        "results": rows,
    }
    path = options.output / f"{options.name}.json"
    save_report(path, report)
    _show(rows)
    Console().print(f"Results: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "hidden": 256, "heads": 8, "vocab": 264, "slice-tokens": 512, "block-tokens": 2048}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-heads", type=int, help="key-value heads (default: as many as heads)")
    parser.add_argument("--ffn", type=int, help="MLP width (default: 43/16 of hidden, as in Llama 7B)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    levels = ("hidden", "model")
    parser.add_argument("--stream-from-host", choices=levels, nargs="+", default=levels)
    parser.add_argument("--alpha", type=float, default=0.0, help="share of the tokens whose activations are swapped")
    parser.add_argument("--threads", type=int, default=1, help="number of compute threads")
    parser.add_argument("--quick", action="store_true", help="sizes that take seconds; other options override them")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file")
    parser.add_argument("--name", default="growth", help="name of the JSON file")
    options = parser.parse_args()
    if options.quick:
        options = parser.parse_args([*_QUICK, *sys.argv[1:]])
    options.kv_heads = options.kv_heads or options.heads
    options.ffn = options.ffn or options.hidden * 43 // 16
    return options


def _measure(options: argparse.Namespace, stream: StreamFromHost, tokens: int) -> dict[str, Any]:
    """Returns peak and host bytes of a step, and its duration while memory was measured."""
    model, longest = _model(options), options.slice_tokens
    ids = torch.randint(0, options.vocab, (1, tokens))
    batch = {"input_ids": ids, "labels": ids}
    attach_chunked_loss(model, longest)
    settings = RequestedSettings(slice_tokens=longest, stream_from_host=stream)
    engine = Engine(model, find_stacks(model)[0].layers, CPU, settings)
    engine.attention.block_tokens = options.block_tokens
    engine.attach()
    # Two slices show what a layer saves; values that depend on the number of slices are computed.
    model(**{name: t[:, : 2 * longest] for name, t in batch.items()}).loss.backward()
    swap = _plan(engine, options, stream, tokens)
    engine.load(swap, tokens)
    model.zero_grad(set_to_none=False)
    started = time.perf_counter()
    with PeakMeter(CPU) as meter:
        model(**batch).loss.backward()
    assert engine.memory is not None
    stats = engine.memory.stats
    engine.detach()
    return {
        "peak_bytes": meter.peak_bytes + 2 * swap.memory.slot,  # other buffers are allocated within the step
        "host_bytes": stats.peak_host_bytes,
        "overflow_bytes": stats.overflow_bytes,
        "seconds": time.perf_counter() - started,
    }


def _model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.ffn, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.kv_heads, vocab_size=options.vocab,
        max_position_embeddings=2**20, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    return model


def _plan(engine: Engine, options: argparse.Namespace, stream: StreamFromHost, tokens: int) -> SwapPlan:
    profile = engine.profile
    assert profile is not None
    storage = plan_of_alpha(tokens, options.alpha, options.layers, slice_tokens=options.slice_tokens)
    sizes = streamed_bytes_of_calls(engine, profile.saved_by_calls, engine.cutter.slices(storage, tokens), stream)
    return SwapPlan(storage=storage, memory=sizes.memory, stream_from_host=stream)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("stream_from_host", "tokens", "step memory", "of the shortest", "host peak", "overflow", "seconds")
    for row in rows:
        first = next(r for r in rows if r["stream_from_host"] == row["stream_from_host"])
        table.add_row(
            row["stream_from_host"],
            f"{row['tokens']:,}",
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / first['peak_bytes']:.4f}",
            format_bytes(row["host_bytes"]),
            format_bytes(row["overflow_bytes"]),
            f"{row['seconds']:.1f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
