"""Rehearses TRL's example for 1M tokens with random weights: FSDP2, ring attention, checkpoints on the host.

    .cuda/venv/bin/python -m pip install --no-deps --target outputs/trl trl==1.13.0
    PYTHONPATH=outputs/trl .cuda/venv/bin/python benchmarks/rehearse.py --device h100 --ranks 8 --host-memory 2TiB \
        benchmarks/trl_long_context.py --model qwen3_8b --tokens 1M

The program is TRL's `SFTTrainer`, with the settings of `examples/sft_qwen3_8b_1m_context` and of its file for
Accelerate. It runs on a simulated GPU only. With `--offload`, weights and optimizer are on the host, as in the guide of
TRL's pull request 6846 for 30 billion weights and more; the host then computes neither the optimizer's step nor the
norm of the gradients, which are not in the times. The file has the time of each step, and the allocator's peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RANKS = os.environ.get("WORLD_SIZE", "1")
_ACCELERATE = {  # what `accelerate launch` sets
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_OFFLOAD_PARAMS": str("--offload" in sys.argv).lower(),
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_VERSION": "2",
    "PARALLELISM_CONFIG_CP_SIZE": _RANKS,
}
os.environ.update(_ACCELERATE)

import emulated_device  # noqa: E402
import torch  # noqa: E402
from arguments import token_count  # noqa: E402
from circumstances import circumstances  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from lightning_memo.estimate.cluster import load_preset, preset_names  # noqa: E402
from lightning_memo.models import ModelConfig, build_model  # noqa: E402

_STEPS = 3
_PIN = Tensor.pin_memory
_RESULTS = Path(__file__).parent / "results" / "rehearsed_published"


class Steps(TrainerCallback):
    """Times steps, and reads the peaks of the last one.

    Args:
        device_bytes: Memory of the device from the first step on.
    """

    def __init__(self, device_bytes: int) -> None:
        self._device_bytes = device_bytes
        self.seconds: list[float] = []
        self.memory: dict[str, int] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.empty_cache()
        emulated_device.set_memory(self._device_bytes)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)
        self.memory = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }


class WithoutNorm(SFTTrainer):
    """A trainer that does not compute the norm of the gradients."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """Returns nothing."""


class NoOptimizer(torch.optim.Optimizer):
    """Leaves weights as they are, in place of an optimizer on the host, which would compute for real."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.0})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does nothing."""


def main() -> None:
    options = _options()
    limit = torch.cuda.mem_get_info()[1]
    emulated_device.set_memory(2**40)  # weights are loaded onto the device, while a real run has them on the host
    config = {**load_preset("model", options.model)["config"], "max_position_embeddings": options.tokens}
    config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
    with torch.device("meta"):
        model = build_model(ModelConfig(config=config))
    # Accelerate casts bf16 to fp32; on the host, where weights are with --offload, it would do so for real.
    model.to(torch.float32 if options.offload else torch.bfloat16).to_empty(device="cuda")
    torch.Tensor.pin_memory = _pin_without_values  # type: ignore[method-assign]
    steps = Steps(limit)
    with tempfile.TemporaryDirectory() as folder:
        _trainer(model, options, steps, folder).train()
    result = {
        **circumstances(("torch", "transformers", "accelerate", "trl")),
        "model": options.model,
        "layers": config["num_hidden_layers"],
        "tokens": options.tokens,
        "ranks": int(_RANKS),
        "offload": options.offload,
        "seconds": steps.seconds,
        "memory": {**steps.memory, "pinned_bytes": emulated_device.count("pinned_peak")},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.model}-{options.tokens}{'-offload' if options.offload else ''}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {steps.seconds[-1]:.1f} s, {steps.memory['peak_allocated_bytes'] / 1e9:.1f} GB")


def _pin_without_values(t: Tensor, device: object = None) -> Tensor:
    """`Tensor.pin_memory` that does not touch memory for weights, which have no values."""
    return torch.empty_like(t, pin_memory=True) if t.is_floating_point() else _PIN(t)


def _trainer(model: nn.Module, options: argparse.Namespace, steps: Steps, folder: str) -> SFTTrainer:
    more: dict[str, Any] = {"max_grad_norm": 0.0} if options.offload else {}
    arguments = SFTConfig(
        output_dir=folder, max_length=options.tokens, per_device_train_batch_size=1, logging_steps=1, bf16=True,
        save_strategy="no", pad_to_multiple_of=2 * int(_RANKS), gradient_checkpointing_kwargs={"offload": True},
        max_steps=_STEPS, report_to=[], disable_tqdm=True, **more,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({str(n): n for n in range(1000)}, unk_token="0"))
    row = torch.randint(0, 1000, (options.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return (WithoutNorm if options.offload else SFTTrainer)(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": [row] * _STEPS}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
        callbacks=[steps],
        optimizer_cls_and_kwargs=(NoOptimizer, {}) if options.offload else None,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=preset_names("model"), required=True)
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--tokens", type=token_count, required=True)
    parser.add_argument("--offload", action="store_true", help="weights and optimizer on the host")
    parser.add_argument("--output", type=Path, default=_RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
