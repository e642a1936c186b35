"""Train a configuration of model, data, trainer and strategy with and without MemoStrategy, and compare."""

from __future__ import annotations

import contextlib
import math
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

import lightning_memo
from lightning_memo import MemoStrategy
from lightning_memo.config import MemoConfig
from support.families import FAMILIES, make_batch
from support.harness import Batch, Step, gradients_of, in_double
from support.trainer_harness import batches, copy_threads, forwards, make_trainer

LR = 0.05
FP32_BOUND = 1e-6
# Farthest from fp64, in units of the largest of plain training's own distances. Few tokens' hidden states make most of
# the error of a small model, so that by chance one run has two to three times another's; a wrong gradient is a
# thousand times as far off. `test_gradients` has the close bound, for fixed models.
FARTHER = 4.0


@dataclass(frozen=True)
class Configuration:
    """A configuration to train. Its repr is code that creates it.

    Attributes:
        family: Name in `FAMILIES`.
        shape: Settings of the Hugging Face configuration or of the blocks.
        part: Trained parameters: "all", "lora", "upper layers", "no embeddings", "head" or "norms".
        lengths: Number of tokens of each batch.
        rows: Number of sequences of a batch.
        kind: Content of the rows: "full", "padded", "left padded" or "packed".
        unlabelled: Fraction of the tokens that the loss ignores.
        step: Kind of the training step; see `Module`.
        manual: Whether optimization is manual.
        validation: Whether a validation follows each step.
        trainer: Arguments of `Trainer`.
        strategy: Arguments of `MemoStrategy`; `disk_path=True` stands for a temporary folder.
    """

    family: str = "llama"
    shape: dict[str, Any] = field(default_factory=dict)
    part: str = "all"
    lengths: tuple[int, ...] = (32, 32)
    rows: int = 2
    kind: str = "full"
    unlabelled: float = 0.0
    step: str = "loss"
    manual: bool = False
    validation: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def hugging_face(self) -> bool:
        return not self.family.startswith(("block", "encoder"))

    @property
    def has_experts(self) -> bool:
        return self.family in ("mixtral", "qwen3_moe")

    def build(self) -> nn.Module:
        model = FAMILIES[self.family].build(**self.shape)
        _PARTS[self.part](model)
        if self.part == "lora":
            targets = ["q_proj", "v_proj"] if self.has_experts else "all-linear"  # weights of experts are no modules
            adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, init_lora_weights=False)
            model = peft.get_peft_model(model, adapters)
        return model

    def data(self) -> list[Batch]:
        return [self._batch(tokens, number) for number, tokens in enumerate(self.lengths)]

    def _batch(self, tokens: int, number: int) -> Batch:
        batch = make_batch(self.rows, tokens, self.kind.endswith("padded"), seed=number)
        if self.kind == "left padded":
            batch = {name: t.flip(1) for name, t in batch.items()}
        if self.kind == "packed":
            cuts = [1 + (number + row) % max(1, tokens - 1) for row in range(self.rows)]
            positions = [torch.cat([torch.arange(cut), torch.arange(tokens - cut)])[:tokens] for cut in cuts]
            batch["position_ids"] = torch.stack(positions)
        ignored = torch.rand(self.rows, tokens, generator=torch.Generator().manual_seed(number)) < self.unlabelled
        batch["labels"] = batch["labels"].masked_fill(ignored, -100)
        return batch


def _upper_layers(model: nn.Module) -> None:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
    model.requires_grad_(False)
    layers[len(layers) // 2 :].requires_grad_(True)


def _only(wanted: Callable[[str], bool]) -> Callable[[nn.Module], None]:
    def freeze(model: nn.Module) -> None:
        names = [name for name, _ in model.named_parameters() if wanted(name)]
        for name, parameter in model.named_parameters():  # a tied head goes by the name of the embeddings
            parameter.requires_grad_(name in names or not names)

    return freeze


_PARTS: dict[str, Callable[[nn.Module], None]] = {
    "all": lambda model: None,
    "lora": lambda model: None,
    "upper layers": _upper_layers,
    "no embeddings": _only(lambda name: "embed" not in name and "wte" not in name and "wpe" not in name),
    "head": _only(lambda name: "head" in name or "embed_out" in name),
    "norms": _only(lambda name: "norm" in name or "ln_" in name),
}
PARTS = tuple(_PARTS)
STEPS = ("loss", "own loss", "two forwards", "reference", "two backwards")


class Module(LightningModule):
    """Trains the model of a configuration with SGD, which does not amplify errors of gradients.

    Steps: "loss", the model's own; "own loss", of its logits; "two forwards" before a backward; "reference", a second
    forward without gradients; "two backwards" (manual optimization).
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self._configuration = configuration
        self.automatic_optimization = not configuration.manual
        torch.manual_seed(0)
        self.model = configuration.build()
        self.record = Record()

    def loss(self, batch: Batch) -> Tensor:
        if self._configuration.step != "own loss" or not self._configuration.hugging_face:
            loss: Tensor = self.model(**batch).loss
            return loss
        batch = dict(batch)
        labels = batch.pop("labels")
        logits = self.model(**batch).logits[:, :-1].float()
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))

    def losses(self, batch: Batch) -> Iterator[Tensor]:
        """Yield the losses of the successive backward passes."""
        kind = self._configuration.step
        if kind in ("two forwards", "two backwards"):
            parts = [self.loss(half) for half in (batch, {name: t[:1] for name, t in batch.items()})]
            yield from parts if kind == "two backwards" and self._configuration.manual else [sum(parts)]
        elif kind == "reference":
            loss = self.loss(batch)
            with torch.no_grad():
                reference = self.loss(batch)
            yield loss + 0.1 * (loss - reference.detach()) ** 2
        else:
            yield self.loss(batch)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.record.begin(self, batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            for loss in self.losses(batch):
                self.record.losses.append(loss.item())
                self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return None
        (loss,) = self.losses(batch)
        self.record.losses.append(loss.item())
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.record.losses.append(self.loss(batch).item())

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record.gradients.append(gradients_of(self.model))

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=LR)


@dataclass
class Record:
    """The results of a run.

    Attributes:
        losses: Losses of every backward pass and every validation batch.
        gradients: Gradients of every optimizer step before clipping.
        starts: Random state, weights and batch at the start of every training step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    starts: list[tuple[Tensor, dict[str, Tensor], Batch]] = field(default_factory=list)

    def begin(self, module: Module, batch: Batch) -> None:
        weights = {name: t.detach().clone() for name, t in module.model.state_dict().items()}
        self.starts.append((torch.get_rng_state(), weights, {name: t.clone() for name, t in batch.items()}))


@dataclass
class Trained:
    """A completed fit."""

    module: Module
    trainer: Trainer

    @property
    def record(self) -> Record:
        return self.module.record

    def weights(self) -> dict[str, Tensor]:
        return {name: t.detach() for name, t in self.module.model.state_dict().items()}


def train(configuration: Configuration, strategy: Any) -> Trained:
    """Fit a configuration."""
    module = Module(configuration)
    steps = -(-len(configuration.lengths) // configuration.trainer.get("accumulate_grad_batches", 1))
    trainer = make_trainer(strategy, **{"max_epochs": 1, "max_steps": steps} | configuration.trainer)
    data = configuration.data()
    validation = batches(data[:1]) if configuration.validation else None
    if validation is not None:
        trainer.val_check_interval = 1
    torch.manual_seed(1)
    trainer.fit(module, batches(data), validation)
    return Trained(module, trainer)


@contextlib.contextmanager
def memo(configuration: Configuration) -> Iterator[Callable[[], MemoStrategy]]:
    """Yield the strategy of the configuration, and assert that its spill folder is empty afterwards."""
    with tempfile.TemporaryDirectory(prefix="spill-") as folder:
        settings = dict(configuration.strategy)
        if settings.get("disk_path"):
            settings["disk_path"] = folder
        yield lambda: MemoStrategy(**settings)
        assert not list(Path(folder).iterdir())


def train_with_memo(configuration: Configuration) -> Trained | str:
    """Return a completed fit, or the error message that refuses the configuration.

    Raises:
        Exception: Any that is no clear refusal, or that leaves the model or the process changed.
    """
    modules: list[Module] = []
    with memo(configuration) as make:
        try:
            trained = train(configuration, make())
        except (ValueError, MisconfigurationException) as error:
            assert_clear(error)
            refusal = str(error)
        else:
            refusal = ""
            modules.append(trained.module)
    assert copy_threads() == []
    assert [name for module in modules for name in forwards(module)] == []
    return refusal or trained


def assert_clear(error: Exception) -> None:
    """Assert that a message of this package is one line that names a setting or the necessary change."""
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(lightning_memo.__file__).parent
    if "\n" in text or own not in Path(frames[-1].filename).parents or not any(word in text for word in NAMES):
        raise AssertionError(f"no clear refusal: {text}") from error


_SAME: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
NAMES = (*MemoConfig.__dataclass_fields__, "precision", "pad", "attention")


def assert_as_plain(configuration: Configuration, actual: Trained, expected: Trained) -> None:
    """Assert that losses, gradients and weights equal plain training's, bit by bit where that is promised."""
    mine, plain = actual.record, expected.record
    assert len(mine.losses) == len(plain.losses) and len(mine.gradients) == len(plain.gradients)
    if is_exact(configuration, actual):
        torch.testing.assert_close((mine.losses, actual.weights()), (plain.losses, expected.weights()), **_SAME)
        return
    half = configuration.trainer.get("precision", "32-true") != "32-true"
    losses = (torch.tensor(record.losses) for record in (mine, plain))
    torch.testing.assert_close(*losses, rtol=2**-7 if half else 2e-6, atol=1e-6, equal_nan=True)
    for number in range(len(plain.gradients)):
        assert_gradient(configuration, actual, expected, number, half)
    assert_weights(actual, expected, half)


def assert_gradient(configuration: Configuration, actual: Trained, expected: Trained, number: int, half: bool) -> None:
    """Assert that a gradient equals plain training's up to fp32 rounding, or is about as close to fp64."""
    mine, plain = (Step(torch.zeros(()), run.record.gradients[number]) for run in (actual, expected))
    assert mine.gradients.keys() == plain.gradients.keys()
    if not has_direction(plain.gradients):
        torch.testing.assert_close(mine.gradients, plain.gradients, **_SAME)
        return
    if not half and mine.distance(plain) <= FP32_BOUND:
        return
    own = mine.distance(exact_gradient(configuration, actual, number))
    plains = [
        Step(torch.zeros(()), gradients).distance(exact_gradient(configuration, expected, n))
        for n, gradients in enumerate(expected.record.gradients)
        if has_direction(gradients)
    ]
    message = f"step {number}: {own:.2e} from fp64, plain {plains}, {mine.distance(plain):.2e} apart"
    assert own <= FARTHER * max(plains), message


def has_direction(gradients: dict[str, Tensor]) -> bool:
    """Whether the gradient is neither zero nor NaN, as it is in a batch without labels."""
    norm = Step(torch.zeros(()), gradients).norm()
    return 0 < norm < math.inf


def assert_weights(actual: Trained, expected: Trained, half: bool) -> None:
    """Assert that the optimizer changed the weights as in plain training."""
    starts, mine, plain = (flat(each) for each in (expected.record.starts[0][1], actual.weights(), expected.weights()))
    if plain.isfinite().all():
        change, rounding = (plain - starts).norm(), (2**-8 if half else 2**-22) * plain.norm()
        assert (mine - plain).norm() <= (0.2 if half else 1e-5) * change + rounding
    else:
        assert not mine.isfinite().all()


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.double().flatten() for t in weights.values()])


def exact_gradient(configuration: Configuration, run: Trained, number: int) -> Step:
    """Return the gradient of an optimizer step in fp64, from the weights of the run."""
    accumulate = configuration.trainer.get("accumulate_grad_batches", 1)
    starts = run.record.starts[number * accumulate : (number + 1) * accumulate]
    module = Module(configuration)
    module.model = in_double(module.model).train()
    for state, weights, batch in starts:
        module.model.load_state_dict({name: t.double() if t.is_floating_point() else t for name, t in weights.items()})
        torch.set_rng_state(state)
        for loss in module.losses(batch):
            (loss / accumulate).backward()
    return Step(torch.zeros(()), gradients_of(module.model))


def is_exact(configuration: Configuration, run: Trained) -> bool:
    """Whether results are bit-identical to plain training: one slice, and the same attention kernel and keys."""
    family, plan = FAMILIES[configuration.family], run.trainer.strategy.plan
    one_slice = configuration.strategy.get("slice_tokens", "auto") == "auto"
    if plan is None:  # no layer was trained
        return one_slice and not isinstance(configuration.strategy.get("loss_chunk_tokens"), int)
    swap = plan.swap
    same_attention = not family.grouped and configuration.kind == "full" and "window" not in configuration.family
    heads = configuration.shape["num_attention_heads"]
    whole = one_slice and swap.alpha in (0.0, 1.0)
    chunked = isinstance(configuration.strategy.get("loss_chunk_tokens"), int)
    ungrouped = configuration.shape.get("num_key_value_heads", heads) == heads
    return same_attention and ungrouped and whole and not chunked and swap.storage.has_one_alpha
