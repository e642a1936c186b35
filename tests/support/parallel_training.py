"""Train small models in several processes and in one, and compare the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.parallel.mesh_precision import total_norm
from lightning_memo.profiler import measured_costs
from support.families import BALANCED, FAMILIES, VOCABULARY
from support.processes import run_in_processes
from support.trainer_harness import LanguageModel, make_trainer

STEPS = 3  # the first is profiled, the second takes the buffers for the first time, the third takes them again
LR = 1e-4


@dataclass(frozen=True)
class Run:
    """The model, the data and the steps of a training run.

    Attributes:
        family: Name in `FAMILIES` or in `MODELS`, or a function that makes the model, with sizes as keyword arguments.
        tokens: Length of the sequences.
        lengths: Lengths of successive batches, repeated; if empty, all batches have `tokens` tokens.
        batch: Number of sequences of a batch, over all data-parallel processes.
        accumulate: Number of batches of an optimizer step.
        clip: Maximum gradient norm; 0 disables clipping.
        ignore: Fraction of the labels that the loss ignores.
        packed: Whether rows hold several documents, which position ids separate.
        uneven: Whether packed documents of different rows have very different lengths.
        padded: Whether rows are padded on the right, to other lengths each.
        growing: Whether rows of odd numbers are padded in the first batches, and each process drops the padding that
            all of its rows have.
        change: A function, importable by name, that gets the number of a row and the row, and returns another row.
        precision: Precision of Lightning's trainer.
        steps: Number of optimizer steps.
        layers: Number of layers; if 0, that of the family.
    """

    family: str | Callable[..., nn.Module] = "llama"
    tokens: int = 48
    lengths: tuple[int, ...] = ()
    batch: int = 2
    accumulate: int = 1
    clip: float = 0.0
    ignore: float = 0.3
    packed: bool = False
    uneven: bool = False
    padded: bool = False
    growing: bool = False
    change: Callable[[int, dict[str, Tensor]], dict[str, Tensor]] | None = None
    precision: str = "32-true"
    steps: int = STEPS
    layers: int = 0

    def build(self) -> nn.Module:
        """Return the model with random weights."""
        family = self.family
        build = family if callable(family) else MODELS[family] if family in MODELS else FAMILIES[family].build
        return build(num_hidden_layers=self.layers) if self.layers else build()


def _tied(**sizes: Any) -> nn.Module:
    model = FAMILIES["llama_gqa"].build(**sizes)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def _lora(**sizes: Any) -> nn.Module:
    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(FAMILIES["llama_gqa"].build(**sizes), adapters)


class _Mean(nn.Module):
    """An MLP that adds the mean over the sequence to its output."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + x.mean(1, keepdim=True)


def _mixing(**sizes: Any) -> nn.Module:
    model = FAMILIES["llama"].build(**sizes)
    for layer in model.model.layers:
        layer.mlp = _Mean(layer.mlp)
    return model


def _caching(**sizes: Any) -> nn.Module:
    """Return a model that makes a key-value cache, as models of transformers do by default."""
    model = FAMILIES["llama"].build(**sizes)
    model.config.use_cache = True
    return model


def _shared(**sizes: Any) -> nn.Module:
    """Return a model in which two layers share an MLP, as Zamba's do."""
    model = FAMILIES["llama_gqa"].build(**sizes)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


def _frozen_below(**sizes: Any) -> nn.Module:
    model = FAMILIES["llama_gqa"].build(**sizes)
    for module in (model.model.embed_tokens, *model.model.layers[:2]):
        module.requires_grad_(False)
    return model


def _with_reference(**sizes: Any) -> nn.Module:
    """Return a model that runs each forward again without gradients, like a reference model."""
    model = FAMILIES["llama_gqa"].build(**sizes)

    class WithReference(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            with torch.no_grad():
                again = super().forward(*args, **kwargs)
            torch.testing.assert_close(again.loss, output.loss)
            return output

    model.__class__ = WithReference
    return model


# Rotary frequencies that depend on the sequence length, for models of 24 positions. Configurations modify these dicts.
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24}
_LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 2.5, 4.0, 6.0]}


def _dynamic_rope(**sizes: Any) -> nn.Module:
    return FAMILIES["llama"].build(max_position_embeddings=24, rope_parameters=dict(_DYNAMIC), **sizes)


def _dynamic_rope_of_some_layers(**sizes: Any) -> nn.Module:
    by_layer = {"full_attention": dict(_DYNAMIC), "sliding_attention": dict(_LONG)}
    return _mixed_windows(max_position_embeddings=24, rope_parameters=by_layer, **sizes)


def _narrow_window(**sizes: Any) -> nn.Module:
    return FAMILIES["mistral_window"].build(sliding_window=11, **sizes)


def _mixed_windows(**sizes: Any) -> nn.Module:
    return FAMILIES["gemma3_mixed_windows"].build(**{"num_hidden_layers": 4} | sizes)


def _longrope(**sizes: Any) -> nn.Module:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.Phi3Config(
        **small | sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=96,
        pad_token_id=0,
        original_max_position_embeddings=24,
        rope_parameters=dict(_LONG),
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS: dict[str, Callable[..., nn.Module]] = {
    **BALANCED,
    "llama_tied": _tied,
    "llama_lora": _lora,
    "llama_mixing": _mixing,
    "llama_caching": _caching,
    "llama_frozen_below": _frozen_below,
    "llama_shared": _shared,
    "llama_with_reference": _with_reference,
    "llama_dynamic_rope": _dynamic_rope,
    "gemma3_dynamic_rope": _dynamic_rope_of_some_layers,
    "phi3_longrope": _longrope,
    "mistral_window": _narrow_window,  # that few tokens exceed
    "gemma3_mixed_windows": _mixed_windows,  # three narrow ones and a wide one
}


@dataclass
class Outcome:
    """The loss and the gradient norm before clipping of each optimizer step, and the final weights.

    Attributes:
        gradients: Whole gradients of the first step, before clipping.
        notes: Further values that a test compares.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def worst_error(self, reference: Outcome) -> dict[str, float]:
        """Return the largest relative errors against a run in one process; tensors are compared by norms."""
        return {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(self.losses, reference.losses, strict=True)),
            "norm": max(abs(a - b) / abs(b) for a, b in zip(self.norms, reference.norms, strict=True)),
            "gradients": _worst(self.gradients, reference.gradients),
            "weights": _worst(self.weights, reference.weights),
        }


def _worst(tensors: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert tensors.keys() == reference.keys()
    pairs = [(t.cpu().double(), reference[name].cpu().double()) for name, t in tensors.items()]
    # Tensors that are nearly zero beside the others are the difference of larger numbers.
    least = max(max(float(expected.norm()) for _, expected in pairs) * 1e-4, 1e-30)
    return max(float((t - expected).norm() / expected.norm().clamp_min(least)) for t, expected in pairs)


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens, a varying fraction of which has no label."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __len__(self) -> int:
        return self._run.batch * self._run.accumulate * self._run.steps

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        run, generator = self._run, torch.Generator().manual_seed(index)
        tokens = run.lengths[index // run.batch % len(run.lengths)] if run.lengths else run.tokens
        ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
        ignored = torch.rand(tokens, generator=generator) < run.ignore * (1 + index % 3)
        item = {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}
        if run.packed:
            first = (10 * index + tokens // 2) % tokens if run.uneven else tokens // 3 + index % 5
            item["position_ids"] = torch.cat([torch.arange(first), torch.arange(tokens - first)])
        if run.padded or run.growing:
            padding = index % 4 if run.padded else index % 2 * max(2 - index // run.batch, 0)
            item["attention_mask"] = (torch.arange(tokens) < tokens - 7 * padding).long()
            item["labels"] = item["labels"].masked_fill(item["attention_mask"] == 0, -100)
        return item if run.change is None else run.change(index, item)


class Keep(Callback):
    """Records the unsharded gradients and their norms."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        trained = [p for p in module.parameters() if p.grad is not None]
        holders = getattr(trainer.strategy.precision_plugin, "holders", None)  # of several processes
        self.outcome.norms.append(float(total_norm(trained, trainer.strategy.root_device, holders)))
        if not self.outcome.gradients:
            self.outcome.gradients = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def whole(t: Tensor) -> Tensor:
    """Return an unsharded copy of a tensor."""
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()


def train(
    run: Run,
    settings: dict[str, Any],
    after: Callable[[Trainer], dict[str, Any]] | None = None,
    watch: Callable[[], Callback] | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    skip: int = 0,
) -> Outcome:
    """Train in this process, one of the processes of the environment's group.

    Args:
        run: Training run.
        settings: Arguments of MemoStrategy.
        after: Function that makes the notes of the outcome from the trainer.
        watch: Function that makes another callback, whose `notes` are added to the outcome.
        callbacks: Further callbacks.
        ckpt_path: Checkpoint to resume from.
        skip: Number of optimizer steps before that checkpoint.
    """
    keep, watchers = Keep(), [] if watch is None else [watch()]
    strategy = MemoStrategy(**settings)
    module = LanguageModel(run.build, lr=LR)
    trainer = make_trainer(
        strategy,
        devices=dist.get_world_size(),
        callbacks=[keep, *watchers, *callbacks],
        enable_checkpointing=bool(callbacks),
        max_steps=run.steps,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip or None,
        precision=run.precision,
        use_distributed_sampler=False,
    )
    torch.manual_seed(1)
    trainer.fit(module, _loader(run, settings, skip), ckpt_path=ckpt_path, weights_only=False)
    outcome = keep.outcome
    outcome.losses = _by_step(module.losses, run.accumulate)
    outcome.weights = {name: whole(p) for name, p in module.named_parameters()}
    outcome.notes = {} if after is None else after(trainer)
    for watcher in watchers:
        outcome.notes |= watcher.notes
    return outcome


def _loader(run: Run, settings: dict[str, Any], skip: int = 0) -> DataLoader[dict[str, Tensor]]:
    """Return this process's part of every batch in the order of one process (Lightning's sampler shuffles)."""
    others = settings.get("context_parallel_size", 1) * settings.get("tensor_parallel_size", 1)
    stage = dist.get_world_size() // settings.get("pipeline_parallel_size", 1)
    data, rank = stage // others, dist.get_rank() % stage // others
    texts, first = Texts(run), skip * run.batch * run.accumulate
    # Lightning counts the batches before a checkpoint as served, but starts the loader from its beginning.
    texts = Subset(texts, [*range(first, len(texts)), *range(first)])
    sampler = DistributedSampler(texts, num_replicas=data, rank=rank, shuffle=False)
    collate = _without_padding if run.growing else default_collate
    return DataLoader(texts, batch_size=run.batch // data, sampler=sampler, collate_fn=collate)


def _without_padding(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = default_collate(rows)
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: t[:, :longest] for name, t in batch.items()}


class WatchAlpha(Callback):
    """Notes alpha. Copies take no time, so that the host's bytes alone decide, on a busy machine too."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}
        self._fast_copies = mock.patch.object(measured_costs, "copy_bandwidth", return_value=(1e15, 1e15))

    def on_train_start(self, *_: Any) -> None:
        self._fast_copies.start()

    def on_train_end(self, *_: Any) -> None:
        self._fast_copies.stop()

    def on_exception(self, *_: Any) -> None:
        self._fast_copies.stop()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        swap = trainer.strategy.plan.swap
        self.notes = {"alpha": swap.alpha, "storage": swap.storage}


def train_together(size: int, run: Run, settings: dict[str, Any], after: Any = None, watch: Any = None) -> Outcome:
    """Train in `size` processes. Losses are averaged over them, and notes become lists by rank."""
    return joined(run_in_processes(size, train, run, settings, after, watch), settings)


def joined(outcomes: Sequence[Outcome], settings: dict[str, Any]) -> Outcome:
    """Return the outcome of all processes together.

    Each stage of a pipeline has the gradients and the weights of its own layers.
    """
    size, first = len(outcomes), outcomes[0]
    first.losses = [sum(losses) / size for losses in zip(*(o.losses for o in outcomes), strict=True)]
    stages = settings.get("pipeline_parallel_size", 1)
    for outcome in outcomes[size // stages :: size // stages]:
        own = {name for name, t in outcome.weights.items() if not _is_copy(t, first.weights)}
        first.gradients |= {name: t for name, t in outcome.gradients.items() if name in own}
        first.weights |= {name: outcome.weights[name] for name in own}
    first.notes = {key: [o.notes[key] for o in outcomes] for key in first.notes}
    return first


def _is_copy(t: Tensor, others: dict[str, Tensor]) -> bool:
    """Return whether a weight of the last stage is the embedding of the first one: a process names both alike."""
    return t.ndim == 2 and any(torch.equal(t.cpu(), other.cpu()) for other in others.values())


@functools.lru_cache(maxsize=16)
def train_alone(run: Run) -> Outcome:
    """Run the same training in one process with plain PyTorch. Tests that compare with it share the outcome."""
    torch.set_num_threads(1)
    module = LanguageModel(run.build, lr=LR)
    if run.precision == "bf16-true":
        module.to(torch.bfloat16)
    optimizer = module.configure_optimizers()
    outcome, losses = Outcome(), []
    loader = DataLoader(Texts(run), batch_size=run.batch)
    for number, batch in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16, enabled=run.precision == "bf16-mixed"):
            loss = module.loss(batch)
        (loss / run.accumulate).backward()
        losses.append(loss.item())
        if (number + 1) % run.accumulate == 0:
            _step(module, optimizer, run, outcome)
    outcome.losses = _by_step(losses, run.accumulate)
    outcome.weights = {name: whole(p) for name, p in module.named_parameters()}
    return outcome


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, run: Run, outcome: Outcome) -> None:
    trained = [p for p in module.parameters() if p.grad is not None]
    outcome.norms.append(float(torch.stack([p.grad.float().norm() for p in trained]).norm()))
    if not outcome.gradients:
        outcome.gradients = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    if run.clip:
        nn.utils.clip_grad_norm_(trained, run.clip)
    optimizer.step()
    optimizer.zero_grad()


def _by_step(losses: Sequence[float], accumulate: int) -> list[float]:
    """Return the mean loss over the batches of each optimizer step."""
    return [sum(losses[n : n + accumulate]) / accumulate for n in range(0, len(losses), accumulate)]
