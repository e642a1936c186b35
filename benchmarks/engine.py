"""Compares the engine with plain training, gradient checkpointing and offloading: time, memory and gradients of a step.

    python benchmarks/engine.py
    python benchmarks/engine.py --threads 2 --methods plain alpha=0 alpha=1/2 alpha=1/2:256 alpha=1
    python benchmarks/engine.py --device cuda --dtype bfloat16 --hidden 4096 --heads 32 --seq-len 32768

All methods train the same Llama with random weights on the same batch, in one process. Each round times every method
once and compares it with plain training, so a machine that slows down for a while affects all methods alike.

On a CPU, device and host are both main memory, and the engine's copy streams are threads. With fewer compute threads
than cores (`--threads 1` on two cores or more), the copy threads have their own core, as a GPU has separate copy
engines; with this setting a CPU emulates a device. With as many threads as cores, copies and computation take time from
each other, which they do not on a GPU.

The results are printed, and written to a JSON file with all samples and to a picture. docs/benchmarks.md explains them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from arguments import positive
from circumstances import circumstances, cpu_name, save_report
from measure import Bench
from methods import CHECKPOINTING, PLAIN, SAVE_ON_CPU, Method, Workload
from output import draw, table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_ALPHAS = ("0", "1/8", "1/4", "1/2", "3/4", "1")
_DEFAULT_METHODS = (PLAIN, CHECKPOINTING, SAVE_ON_CPU, *(f"alpha={alpha}" for alpha in _ALPHAS))
_RESULTS = Path(__file__).parent / "results"
_TABLE_WIDTH = 130


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    report = {**_circumstances(options), "model": _sizes(options)}
    bench = _measure(options)
    report["results"] = rows = [result.as_json(bench.plain) for result in bench.results]
    path = options.output / f"{options.name}.json"
    save_report(path, report)
    title = _title(report)
    draw(rows, title, path.with_suffix(".png"))
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table(rows, title))
    console.print(f"Samples: {path}\nPicture: {path.with_suffix('.png')}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda or cuda:N")
    for name, default in (("layers", 8), ("hidden", 512), ("heads", 8), ("kv-heads", None), ("ffn", None)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    for name, default in (("seq-len", 2048), ("batch", 1), ("vocab", 256)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=positive, default=5, help="rounds, each with one timed step per method")
    parser.add_argument("--warmup", type=int, help="untimed steps in each turn (default: 0 on a CPU, else 1)")
    parser.add_argument("--methods", type=_method, nargs="+", default=[Method.parse(name) for name in _DEFAULT_METHODS])
    parser.add_argument("--threads", type=positive, default=1, help="number of compute threads on the CPU")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file and the picture")
    parser.add_argument("--name", help="name of both files (default: device, sizes and threads)")
    options = parser.parse_args()
    return _with_defaults(parser, options)


def _method(name: str) -> Method:
    try:
        return Method.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _with_defaults(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Sets options that depend on others, and refuses invalid combinations."""
    options.kv_heads = options.kv_heads or options.heads
    options.ffn = options.ffn or options.hidden * 43 // 16  # the ratio of Llama 7B
    if options.hidden % (2 * options.heads) or options.heads % options.kv_heads:
        parser.error("--hidden must be a multiple of twice --heads, and --heads one of --kv-heads")
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    if options.warmup is None:
        options.warmup = 0 if options.device.type == "cpu" else 1
    if options.name is None:
        sizes = f"{options.device.type}-{options.layers}x{options.hidden}-{options.batch}x{options.seq_len}"
        options.name = f"{sizes}-{options.dtype}-{options.threads}t"
    return options


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "batch", "seq_len", "dtype")
    return {name: getattr(options, name) for name in names}


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the other values that the numbers depend on."""
    return {
        **circumstances(("torch", "transformers", "lightning_memo")),
        "device": torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else cpu_name(),
        "threads": options.threads,
        "repeats": options.repeats,
        "warmup": options.warmup,
    }


def _measure(options: argparse.Namespace) -> Bench:
    bench = Bench(_workload(options), options.methods, options.warmup)
    turns = bench.turns(options.repeats)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(turns))
        for turn in turns:
            progress.update(task, description=turn.description)
            turn.take()
            progress.advance(task)
    return bench


def _workload(options: argparse.Namespace) -> Workload:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.ffn, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.kv_heads, vocab_size=options.vocab,
        max_position_embeddings=options.seq_len, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with options.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).train()
        ids = torch.randint(0, options.vocab, (options.batch, options.seq_len))
    return Workload(model, {"input_ids": ids, "labels": ids}, options.device)


def _title(report: dict[str, Any]) -> str:
    m, threads = report["model"], report["threads"]
    model = f"Llama, {m['layers']} layers of {m['hidden']}, batch {m['batch']} x {m['seq_len']:,} tokens, {m['dtype']}"
    return f"{model}: {report['device']}, {threads} compute thread{'s' if threads > 1 else ''}"


if __name__ == "__main__":
    main()
