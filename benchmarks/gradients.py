"""Compares the gradients of a step at full size with those of plain training and of full precision, on one GPU.

    python benchmarks/gradients.py
    python benchmarks/gradients.py --model llama3_2_1b --layers 4 --tokens 32K
    python benchmarks/gradients.py --device cpu --quick --bf16 --full

Kernels sum some gradients in a varying order, and bf16 keeps eight bits, so that plain training itself neither repeats
its gradients exactly nor has those of full precision. Its distances are in the first rows; those of gradient
checkpointing and of the strategy's ways to store activations follow. With `--full`, full precision is run, too. Each
run starts with the same weights, which no step changes, and the gradients of its last step are compared: earlier ones
are profiled. The results are printed and written to a JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from arguments import token_count
from circumstances import circumstances, save_report
from peers import checkpointing
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from transformers.integrations import sdpa_attention

from lightning_memo import MemoStrategy
from lightning_memo.estimate.cluster import load_preset, preset_names
from lightning_memo.models import ModelConfig, build_model
from lightning_memo.trials.training_trial import QUIET, RandomTokens

_RESULTS = Path(__file__).parent / "results"
_VOCABULARY = 32_000
_STEPS = 3

Gradients = dict[str, Tensor]


def main() -> int:
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: PyTorch finds no GPU; --device cpu --quick tries things out", file=sys.stderr)
        return 2
    try:
        runs = _runs(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    known = circumstances(("torch", "transformers", "lightning", "lightning_memo"))
    exact = _gradients(options, "auto", checkpointing, full=True) if options.full else None
    rows: list[dict[str, Any]] = []
    expected = None
    for name, (strategy, around) in runs.items():
        found = _gradients(options, strategy(), around)
        expected = found if expected is None else expected
        references = {"to_plain": expected, "to_full": exact}
        distances = {to: _distances(found, gradients) for to, gradients in references.items() if gradients is not None}
        rows.append({"run": name, **distances})
        print(rows[-1], flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else known["cpu"]["name"]
    settings = {name: getattr(options, name) for name in ("model", "layers", "tokens", "attention", "bf16")}
    save_report(
        options.output / f"gradients-{options.device}.json",
        {**known, "device": device, "settings": settings, "rows": rows},
    )
    _print(rows)
    return 0


def _runs(
    options: argparse.Namespace,
) -> dict[str, tuple[Callable[[], Any], Callable[..., AbstractContextManager[Any]]]]:
    """Returns the runs that are compared with plain training: their strategies, and what is put around the model."""

    def memo(**settings: Any) -> tuple[Callable[[], Any], Callable[..., AbstractContextManager[Any]]]:
        settings = {"attention": options.attention, "loss_chunk_tokens": None, **settings}
        return lambda: MemoStrategy(**settings), contextlib.nullcontext

    sliced = {"slice_tokens": max(options.tokens // 4, 1)}
    runs = {
        "plain": (lambda: "auto", contextlib.nullcontext),
        "plain, again": (lambda: "auto", contextlib.nullcontext),
        "checkpointing": (lambda: "auto", checkpointing),
        "alpha 0": memo(alpha=0.0),
        "alpha 1/2": memo(alpha=0.5),
        "alpha 1": memo(alpha=1.0),
        "alpha 1/2, in memory planned": memo(alpha=0.5, plan_memory=True),
        "by kinds": memo(device_memory=options.device_memory),
        "slices, keys on the host": memo(alpha=0.5, stream_from_host="attention", **sliced),
        "slices, all on the host": memo(alpha=0.5, stream_from_host="hidden", **sliced),
        "slice by slice": memo(alpha=0.5, stream_from_host="model", **sliced),
    }
    if unknown := set(options.runs or ()) - runs.keys():
        raise ValueError(f"--runs {', '.join(sorted(unknown))}: there is no such run; give some of {'; '.join(runs)}")
    return {name: run for name, run in runs.items() if options.runs is None or name in ("plain", *options.runs)}


class _Module(pl.LightningModule):
    """A Hugging Face model with random weights, which steps do not change."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        super().__init__()
        self._options, self._dtype = options, dtype
        self.model: nn.Module | None = None
        self.gradients: Gradients = {}

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            config = dict(load_preset("model", self._options.model)["config"])
            config |= {"num_hidden_layers": self._options.layers, "vocab_size": _VOCABULARY}
            config["max_position_embeddings"] = max(config["max_position_embeddings"], self._options.tokens)
            self.model = build_model(ModelConfig(config=config)).to(self._dtype)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_step == _STEPS - 1:
            self.gradients = {name: p.grad.float().cpu() for name, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _gradients(
    options: argparse.Namespace,
    strategy: Any,
    around: Callable[..., AbstractContextManager[Any]],
    full: bool = False,
) -> Gradients:
    """Returns the gradients of the last step of a run, whose weights are the same in full precision."""
    half = options.bf16 and not full
    module = _Module(options, torch.bfloat16 if half else torch.float32)
    kernel = contextlib.nullcontext()
    if options.device == "cuda" and half and strategy == "auto":  # Memo's kernel is a setting
        backends = {"sdpa": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        kernel = sdpa_kernel(backends[options.attention])
    with tempfile.TemporaryDirectory() as folder, kernel, _repeated_keys() if full else contextlib.nullcontext():
        trainer = pl.Trainer(
            **QUIET, strategy=strategy, precision="bf16-true" if half else "32-true", max_steps=_STEPS, devices=1,
            accelerator="gpu" if options.device == "cuda" else "cpu", default_root_dir=folder,
        )  # fmt: skip
        with torch.device(options.device), _weights_in_bf16():
            module.configure_model()
        batch = RandomTokens(vocabulary=_VOCABULARY)(options.tokens)
        with around(module.model) if around is checkpointing else around():
            trainer.fit(module, DataLoader([batch] * _STEPS, batch_size=None))
    gradients, module.model = module.gradients, None
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return gradients


@contextlib.contextmanager
def _repeated_keys() -> Iterator[None]:
    """Make transformers repeat keys and values, because PyTorch's kernel for full precision does not share them."""
    own, sdpa_attention.use_gqa_in_sdpa = sdpa_attention.use_gqa_in_sdpa, lambda *_: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = own


@contextlib.contextmanager
def _weights_in_bf16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _distances(found: Gradients, expected: Gradients) -> dict[str, Any]:
    """Returns the distance of all gradients together, and that of the weight where it is largest, relative to them."""
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - expected[name]).norm()) for name in expected}
    norms = {name: float(expected[name].norm()) for name in expected}
    farthest = max(apart, key=lambda name: apart[name] / norms[name])
    total = sum(d * d for d in apart.values()) ** 0.5 / sum(n * n for n in norms.values()) ** 0.5
    return {"all": total, "farthest": apart[farthest] / norms[farthest], "weight": farthest}


def _print(rows: list[dict[str, Any]]) -> None:
    references = [to for to in rows[0] if to != "run"]
    table = Table(
        "run", *(text for to in references for text in (f"distance {to}".replace("_", " "), "farthest weight"))
    )
    for row in rows:
        distances = (row[to][which] for to in references for which in ("all", "farthest"))
        table.add_row(row["run"], *(f"{distance:.2e}" for distance in distances))
    Console(width=140).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=preset_names("model"), metavar="NAME", default="llama3_8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=token_count, default=32768, help="tokens of the sequence, like 32768 or 32K")
    parser.add_argument("--attention", choices=("sdpa", "cudnn"), default="cudnn")
    parser.add_argument("--device-memory", default="24GiB", help="for the run by kinds, which otherwise needs no host")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model on few tokens")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, as on a GPU, and not in full precision")
    parser.add_argument("--full", action="store_true", help="compare with full precision, too")
    parser.add_argument("--runs", nargs="+", metavar="NAME", help="rows besides plain training (default: all)")
    parser.add_argument("--output", type=Path, default=_RESULTS)
    options = parser.parse_args()
    options.bf16 |= options.device == "cuda"
    if options.quick:
        options.model, options.tokens, options.attention, options.device_memory = "llama_tiny", 128, "sdpa", None
    return options


if __name__ == "__main__":
    sys.exit(main())
