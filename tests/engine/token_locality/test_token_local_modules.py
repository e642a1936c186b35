"""Modules outside of the layers run in chunks if that changes nothing, and are as they were when they run again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from support.families import FAMILIES, VOCABULARY, make_batch
from support.harness import EngineUnderTest, assert_close, loss_and_gradients
from support.markers.slow import slow_if
from support.samples.chunked_models import chunked
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_memo.engine.token_locality.prove_locality import ModuleProofs
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.loss.lazy_logits import LazyLogits

HIDDEN, BATCH = 32, make_batch(2, 24)
Use = Callable[[Any], Tensor]


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training))


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Counting(nn.Linear):
    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x) * (1 + 0.1 * (self.forwards % 3))


class TokenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.pow(2).mean((1, 2), keepdim=True).sqrt()


class DroppingNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class RunningNorm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.register_buffer("forwards", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x) / self.forwards


class TaskNorm(nn.LayerNorm):
    task = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.task)


class Shifted(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x + 0.3 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Positioned(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + torch.arange(ids.shape[1])[:, None] * torch.linspace(0, 0.1, HIDDEN)


class VocabularyDropout(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight * torch.empty(VOCABULARY, 1).bernoulli_(0.8))


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * HIDDEN**0.5


class Rotary(nn.Module):
    """Makes rotary tables; `how` says what of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.frequencies = how, nn.Parameter(torch.linspace(1, 0.01, 4), requires_grad=how == "trained")

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = position_ids.float()
        if self.how == "length":
            positions = positions / positions.max() * 10
        if self.how == "random":
            positions = positions * (1 + torch.rand(()))
        if self.how == "input":
            positions = positions * (1 + x.detach().abs().mean())
        angles = torch.cat([positions[..., None] * self.frequencies] * 2, -1)
        return angles.cos(), angles.sin()


class RotaryEmbedding(Rotary):
    """Is taken for one of transformers."""


HEADS = {
    "dropout": lambda: Drawing(HIDDEN, VOCABULARY),
    "mean": lambda: Centred(HIDDEN, VOCABULARY),
    "counter": lambda: Counting(HIDDEN, VOCABULARY),
    "spectral norm": lambda: spectral_norm(nn.Linear(HIDDEN, VOCABULARY)),
}
NORMS = {"tokens": TokenNorm, "dropout": lambda: DroppingNorm(HIDDEN), "buffer": RunningNorm}
EMBEDDINGS = {
    "shift": lambda: Shifted(VOCABULARY, HIDDEN),
    "positions": lambda: Positioned(VOCABULARY, HIDDEN),
    "dropout": lambda: VocabularyDropout(VOCABULARY, HIDDEN),
    "scale": lambda: Scaled(VOCABULARY, HIDDEN),
    "frequency": lambda: nn.Embedding(VOCABULARY, HIDDEN, scale_grad_by_freq=True),
}
CHANGED = {
    **{f"head: {name}": ("lm_head", module) for name, module in HEADS.items()},
    **{f"norm: {name}": ("model.norm", module) for name, module in NORMS.items()},
    **{f"embedding: {name}": ("model.embed_tokens", module) for name, module in EMBEDDINGS.items()},
    **{
        f"rotary: {how}": ("model.rotary_emb", lambda how=how: RotaryEmbedding(how))
        for how in ("plain", "trained", "length", "random", "input")
    },
}


def build(part: str = "", module: Callable[[], nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES["llama"].build()
    if module is not None:
        model.set_submodule(part, module())
    return model


@slow_if(lambda name: name.endswith(("dropout", "positions", "plain", "mean")))
@pytest.mark.parametrize("name", CHANGED)
def test_modules_that_users_put_outside_the_layers(name: str) -> None:
    """In chunks, and slice by slice with everything on the host."""
    expected = loss_and_gradients(build(*CHANGED[name]), BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(*CHANGED[name])
        if name != "head: spectral norm":
            with chunked(model):
                assert_close(loss_and_gradients(model, BATCH), expected)
        with EngineUnderTest(build(*CHANGED[name]), stream_from_host="hidden", slice_tokens=8) as under_test:
            assert_close(under_test.profile_step(BATCH), expected)


def test_a_head_that_cannot_run_in_chunks_is_told_once() -> None:
    model, told = build("lm_head", HEADS["mean"]), list[str]()
    undo = attach_chunked_loss(model, 7, warn=told.append)
    for _ in range(2):
        assert type(model(**BATCH).logits) is Tensor
    for each in undo:
        each()
    assert len(told) == 1 and "at once, because Centred may not compute each token by itself: aten.mean" in told[0]


# ---- logits that are used after something has changed


def logits_of(model: nn.Module) -> Tensor:
    return model(input_ids=BATCH["input_ids"]).logits


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), BATCH["labels"][:, 1:].flatten())


def adapted() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(build(), config)


def reference_without_adapters(model: Any) -> Tensor:
    logits = logits_of(model)
    with torch.no_grad(), model.disable_adapter():
        reference = logits_of(model)
    return loss_of(logits) + F.mse_loss(logits, reference)


def two_adapters(model: Any) -> Tensor:
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter("default")
    first = logits_of(model)
    model.base_model.set_adapter("other")
    return loss_of(first) + 2 * loss_of(logits_of(model))


def other_weights(model: Any) -> Tensor:
    weights = {name: p * 1.2 for name, p in model.named_parameters()}
    return loss_of(torch.func.functional_call(model, weights, (), {"input_ids": BATCH["input_ids"]}).logits)


def teacher_in_evaluation(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        teacher = logits_of(model)
    model.train()
    logits = logits_of(model)
    return loss_of(logits) + F.mse_loss(logits, teacher)


def two_tasks(model: Any) -> Tensor:
    model.model.norm.task = 0
    first = model(**BATCH).loss
    model.model.norm.task = 1
    return first + model(**{name: t.flip(1) for name, t in BATCH.items()}).loss


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (adapted, reference_without_adapters),
        (adapted, two_adapters),
        (build, other_weights),
        (lambda: build("lm_head", HEADS["dropout"]), teacher_in_evaluation),
        (lambda: build("model.norm", lambda: TaskNorm(HIDDEN)), two_tasks),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_logits_are_those_of_their_forward(make: Callable[[], nn.Module], use: Use) -> None:
    def train(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(1)
        use(model).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, model = train(make()), make()
    with warnings.catch_warnings(), chunked(model):
        warnings.simplefilter("ignore")
        actual = train(model)
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], t, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(("grad", "by_data"), [(True, False), (False, False), (False, True)])
def test_weights_that_were_changed_are_refused(grad: bool, by_data: bool) -> None:
    """As by averages of weights that are swapped in for a teacher's logits."""
    model = build()
    with chunked(model), torch.set_grad_enabled(grad):
        logits = logits_of(model)
        assert isinstance(logits, LazyLogits)
        with torch.no_grad():
            weight = model.lm_head.weight.data if by_data else model.lm_head.weight
            weight.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"weight .*was changed since the forward whose logits are used now"):
            logits.sum()
        with pytest.raises(RuntimeError, match=r"weight .*was changed since the forward whose logits are used now"):
            loss_of(logits)


@pytest.mark.parametrize("use", [lambda t: t.register_hook(print), lambda t: t.retain_grad()])
def test_gradients_of_logits_are_refused(use: Callable[[Tensor], object]) -> None:
    model = build()
    with chunked(model):
        output = model(**BATCH)
        with pytest.raises(RuntimeError, match=r"gradient of logits .* as a whole.*loss_chunk_tokens=None"):
            use(output.logits)
        with pytest.raises(RuntimeError, match="gradient of logits is not computed as a whole"):
            torch.autograd.grad(output.loss, output.logits)


def test_proofs_end_if_attributes_change_in_each_forward() -> None:
    proofs, head, x = ModuleProofs(), Scaled(VOCABULARY, HIDDEN), BATCH["input_ids"]
    for number in range(20):
        head.number = number
        assert bool(proofs.why_not(head, head.forward, x)) == (number >= 16)
