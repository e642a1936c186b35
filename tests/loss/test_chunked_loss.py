"""The loss of a model's logits in chunks of tokens, against the same model with all logits at once."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import Callback
from support.families import FAMILIES, VOCABULARY, make_batch
from support.harness import Batch, Step, assert_close, assert_equal, gradients_of, in_double, loss_and_gradients
from support.trainer_harness import LanguageModel, fit, forwards, loader, shorten_measurements
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo import MemoStrategy
from lightning_memo.loss.attach_loss import attach_chunked_loss, find_last_norm
from lightning_memo.loss.chunked_module import attach_chunks
from lightning_memo.loss.lazy_logits import LazyLogits
from lightning_memo.profiler.memory_meter import PeakMeter
from lightning_memo.runtime.memory_plans import memory_planner as planning

CHUNK = 7
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def build(config: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, config)(**LLAMA | settings, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config)


def tied() -> nn.Module:
    return build("LlamaConfig", tie_word_embeddings=True)


def router_loss() -> nn.Module:
    return build("MixtralConfig", num_local_experts=4, output_router_logits=True, sliding_window=None)


def with_bias() -> nn.Module:
    model = build("LlamaConfig")
    model.lm_head = nn.Linear(32, VOCABULARY, bias=True)
    return model


def lora(*targets: str) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=[*targets], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(build("LlamaConfig"), config)


SOFTCAP = {"final_logit_softcapping": 3.0, "head_dim": 8}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{n: FAMILIES[n].build for n in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", "gpt2", "phi")},
    "gemma2": lambda: build("Gemma2Config", **SOFTCAP),
    "gemma3": lambda: build("Gemma3TextConfig", **SOFTCAP),
    "phi3": lambda: build("Phi3Config"),
    "granite": lambda: build("GraniteConfig", logits_scaling=8.0),
    "cohere": lambda: build("CohereConfig", logit_scale=0.25),
    "mixtral with router loss": router_loss,
    "llama tied": tied,
    "llama with a bias": with_bias,
    "llama lora": lambda: lora("q_proj"),
    "llama lora on the head": lambda: lora("q_proj", "lm_head"),
}  # fmt: skip


@contextmanager
def chunked(model: nn.Module, tokens: int = CHUNK) -> Iterator[nn.Module]:
    undo = attach_chunked_loss(model, tokens)
    assert undo
    try:
        yield model
    finally:
        for u in undo:
            u()
        assert not forwards(model) or isinstance(model, peft.PeftModel)


@pytest.fixture
def only_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if the logits of all tokens are computed at once."""

    def refuse(logits: LazyLogits) -> Tensor:
        raise AssertionError("whole logits")

    monkeypatch.setattr(LazyLogits, "materialize", refuse)


@pytest.mark.usefixtures("only_chunks")
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_all_logits(name: str) -> None:
    model, batch = MODELS[name](), make_batch(2, 45, padded=True)
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        assert_close(loss_and_gradients(model, batch), plain)
        assert isinstance(model(**batch).logits, LazyLogits)
    assert not isinstance(model(**batch).logits, LazyLogits)


def test_batches_of_one_chunk_are_left_as_they_are() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 45)
    plain = loss_and_gradients(model, batch)
    with chunked(model, 90):
        assert_equal(loss_and_gradients(model, batch), plain)
        assert type(model(**batch).logits) is Tensor


@pytest.mark.usefixtures("only_chunks")
@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {"num_items_in_batch": torch.tensor(31.0)},
        lambda batch: {"num_items_in_batch": 31},
        lambda batch: {"shift_labels": batch["labels"].roll(-3, 1)},
        lambda batch: {"labels": batch["labels"].masked_fill(batch["labels"] % 2 == 0, -5), "ignore_index": -5},
        lambda batch: {"labels": torch.full_like(batch["labels"], -100)},
        lambda batch: {"labels": torch.full_like(batch["labels"], -100), "num_items_in_batch": 1},
    ],
    ids=["items", "items as int", "shifted labels", "ignored label", "all ignored", "all ignored of one"],
)
def test_arguments_of_the_loss(change: Callable[[Batch], dict[str, Any]]) -> None:
    model, batch = build("LlamaConfig"), make_batch(3, 23)
    batch |= change(batch)
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        mine = loss_and_gradients(model, batch)
    torch.testing.assert_close(mine.loss, plain.loss, rtol=1e-6, atol=0, equal_nan=True)
    if plain.norm() > 0:
        assert_close(mine, plain)
    else:
        assert_equal(mine._replace(loss=torch.zeros(())), plain._replace(loss=torch.zeros(())))


def test_gradient_of_the_loss_and_hooks_on_weights() -> None:
    model, batch, heard = build("LlamaConfig"), make_batch(2, 23), []

    def gradients() -> Step:
        model.zero_grad()
        loss = model(**batch).loss
        (3.0 * loss.square()).backward()
        return Step(loss.detach(), gradients_of(model))

    handle = model.lm_head.weight.register_hook(lambda g: heard.append(g) or 2.0 * g)
    plain = gradients()
    with chunked(model):
        assert_close(gradients(), plain)
    handle.remove()
    assert len(heard) == 2


def test_frozen_parts_get_no_gradients() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)
    model.model.requires_grad_(False)
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        assert_close(loss_and_gradients(model, batch), plain)
        model.requires_grad_(False)
        assert not model(**batch).loss.requires_grad


@pytest.mark.usefixtures("only_chunks")
def test_losses_that_users_write() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 45)
    ids, labels = batch["input_ids"], batch["labels"]
    mask = torch.arange(44) < torch.tensor([[44], [31]])
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda z: F.cross_entropy(z[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)),
        lambda z: F.cross_entropy(z.float()[..., :-1, :].contiguous().view(-1, VOCABULARY), labels[:, 1:].reshape(-1)),
        lambda z: nn.CrossEntropyLoss(reduction="sum")(z.flatten(0, 1), labels.flatten()),
        lambda z: F.cross_entropy((z[:, :-1] / 2.0)[mask], labels[:, 1:][mask], ignore_index=3),
        lambda z: F.cross_entropy(torch.tanh(z[1]), labels[1]),
    ]
    for number, loss in enumerate(losses):
        steps = []
        for attach in (False, True):
            model.zero_grad()
            undo = attach_chunked_loss(model, CHUNK) if attach else []
            logits = model(input_ids=ids).logits
            assert isinstance(logits, LazyLogits) == attach
            value = loss(logits)
            value.backward()
            steps.append(Step(value.detach(), gradients_of(model)))
            for u in undo:
                u()
        assert_close(steps[1], steps[0]), number


def logits_of(model: nn.Module, batch: Batch) -> tuple[LazyLogits, Tensor]:
    real = model(**batch).logits * 1.0
    with chunked(model):
        lazy = model(**batch).logits
    assert isinstance(lazy, LazyLogits)
    return lazy, real


@pytest.mark.parametrize(
    "use",
    [
        lambda z: z.softmax(-1),
        lambda z: z[0, -1],
        lambda z: z[:, :, 5:9],
        lambda z: z[:, -1:].argmax(-1),
        lambda z: z.argmax(-1),
        lambda z: z[:, :-1].detach().argmax(dim=-1) == 3,
        lambda z: z.float().log_softmax(-1).gather(-1, torch.zeros(2, 23, 1, dtype=torch.long)),
        lambda z: F.cross_entropy(z.transpose(1, 2), torch.zeros(2, 23, dtype=torch.long)),
        lambda z: F.cross_entropy(z.view(-1, VOCABULARY), torch.zeros(46, dtype=torch.long), label_smoothing=0.1),
        lambda z: torch.cat([z, z], 1),
        lambda z: 1.0 - z,
        lambda z: z.detach().cpu().numpy().sum(),
        lambda z: pickle.loads(pickle.dumps(z.detach())),
        lambda z: copy.deepcopy(z.detach()),
        lambda z: [*z][1],
        lambda z: z.mul_(2.0).sum(),
        lambda z: z.data.max(),
        lambda z: torch.topk(z, 3).indices,
        lambda z: z.shape == (2, 23, VOCABULARY) and z.size(-1) == VOCABULARY and torch.is_tensor(z) and z.device.type,
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_whatever_else_is_done_with_logits(use: Callable[[Tensor], Any], grad: bool) -> None:
    lazy, real = logits_of(build("Gemma2Config", **SOFTCAP), make_batch(2, 23))
    with torch.set_grad_enabled(grad):
        mine, theirs = use(lazy), use(real)
    if not isinstance(theirs, Tensor):
        assert mine == theirs or mine == pytest.approx(theirs, rel=1e-5)
        return
    torch.testing.assert_close(mine, theirs)
    assert not grad or mine.requires_grad == theirs.requires_grad
    assert type(mine) is Tensor


def test_gradients_flow_through_computed_logits() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)

    def gradients() -> Step:
        model.zero_grad()
        out = model(**batch)
        loss = out.loss + 0.1 * out.logits.logsumexp(-1).square().mean()
        loss.backward()
        return Step(loss.detach(), gradients_of(model))

    plain = gradients()
    with chunked(model):
        assert_close(gradients(), plain)


def test_logits_are_computed_once_and_stay_real() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.__setitem__((..., 0), -9.0))
    plain = loss_and_gradients(model, batch)
    with chunked(model):  # the hook's change affects the loss
        assert_equal(loss_and_gradients(model, batch)._replace(gradients={}), plain._replace(gradients={}))
        assert model(**batch).logits.materialize()[0, 0, 0] == -9.0


def test_writing_into_logits_that_are_viewed_is_refused() -> None:
    lazy, _ = logits_of(build("LlamaConfig"), make_batch(2, 23))
    view = lazy.view(-1, VOCABULARY)
    with pytest.raises(RuntimeError, match=r"mul_ in place on logits of which a view is in use.*clone"):
        lazy.mul_(2.0)
    del view
    assert lazy.mul_(2.0).shape == (2, 23, VOCABULARY)


def test_logits_of_weights_that_are_gone_are_refused() -> None:
    model = build("LlamaConfig")
    with chunked(model):
        logits = model(**make_batch(2, 23)).logits
        torch.optim.SGD(model.model.parameters(), lr=0.1).step()
        logits.argmax(-1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for use in (lambda: logits.sum(), lambda: logits.argmax(-1)):
            with pytest.raises(RuntimeError, match=r"the optimizer has changed the head.*loss_chunk_tokens=None"):
                use()


def test_second_backward_is_refused() -> None:
    model = build("LlamaConfig")
    with chunked(model):
        loss = model(**make_batch(2, 23)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward through the same loss"):
            loss.backward()


def test_hooks_on_the_head_and_the_model() -> None:
    model, batch, shapes = build("LlamaConfig"), make_batch(2, 23), []
    model.register_forward_hook(lambda module, args, out: shapes.append(out.logits.shape))
    handles = [model.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)]
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        assert_close(loss_and_gradients(model, batch), plain)
    handles.append(model.lm_head.register_full_backward_hook(lambda module, dx, dy: (2.0 * dx[0],)))
    plain = loss_and_gradients(model, batch)
    with chunked(model):  # the gradient of the logits is available
        assert_close(loss_and_gradients(model, batch), plain)
    assert set(shapes) == {(2, 23, VOCABULARY)}


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """Sets the default type, as Lightning does in steps of bf16-true."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision_is_as_close_to_fp64_as_without_chunks(
    name: str, precision: str, default_dtype: Callable[[torch.dtype], None]
) -> None:
    model, batch, amp = MODELS[name](), make_batch(2, 100), precision == "bf16-mixed"
    if not amp:
        model = model.bfloat16()
    exact = loss_and_gradients(in_double(model), batch)
    if not amp:
        default_dtype(torch.bfloat16)
    plain = loss_and_gradients(model, batch, amp)
    with chunked(model):
        mine = loss_and_gradients(model, batch, amp)
    assert mine.distance(exact) <= 1.1 * plain.distance(exact)
    torch.testing.assert_close(mine.loss, plain.loss, rtol=1e-5, atol=0, check_dtype=True)
    assert {n: g.dtype for n, g in mine.gradients.items()} == {n: g.dtype for n, g in plain.gradients.items()}


class VocabularyWatch(TorchDispatchMode):
    """Measures the peak bytes of all storages that hold logits."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.largest_tokens = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, tuple | list) else (out,):
            real = isinstance(t, Tensor) and not t.is_meta and t.dim() > 1
            if real and t.shape[-1] == LARGE and t.shape[-2] != LLAMA["hidden_size"]:
                self._see(t)
        return out

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.largest_tokens = max(self.largest_tokens, t.numel() // LARGE)
        if storage._cdata not in self._alive:
            weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self._alive[storage._cdata] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))


LARGE = 1999


@pytest.mark.parametrize(
    ("config", "settings", "dtype", "bytes_each"),
    [
        ("LlamaConfig", {}, torch.float32, 4),
        ("LlamaConfig", {"tie_word_embeddings": True}, torch.float32, 4),
        ("LlamaConfig", {}, torch.bfloat16, 6),
        ("GraniteConfig", {"logits_scaling": 8.0}, torch.float32, 8),
        ("Gemma2Config", SOFTCAP, torch.float32, 16),
    ],
)
def test_one_chunk_of_logits_is_alive(
    config: str, settings: dict[str, Any], dtype: torch.dtype, bytes_each: int
) -> None:
    model = build(config, vocab_size=LARGE, **settings).to(dtype)
    batch = make_batch(2, 45)
    with chunked(model), VocabularyWatch() as watch:
        model(**batch).loss.backward()
    assert watch.largest_tokens == CHUNK
    assert watch.peak_bytes == bytes_each * CHUNK * LARGE
    with VocabularyWatch() as watch:
        model(**batch).loss.backward()
    assert watch.largest_tokens == 90


def test_peak_memory_grows_by_one_chunk_of_logits() -> None:
    model, batch, peaks = build("LlamaConfig", vocab_size=4096), make_batch(1, 256), []
    for tokens in (16, 32, 64):
        model.zero_grad()
        with chunked(model, tokens), PeakMeter(torch.device("cpu")) as meter:
            model(**batch).loss.backward()
        peaks.append(meter.peak_bytes)
    for tokens, (smaller, larger) in zip((16, 32), itertools.pairwise(peaks), strict=True):
        assert larger - smaller == pytest.approx(4 * tokens * 4096, rel=0.05)


# ---- the norm before the head


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("llama", "model.norm"),
        ("gpt2", "transformer.ln_f"),
        ("gemma3", "model.norm"),
        ("gpt_neox", "gpt_neox.final_layer_norm"),
        ("phi", "model.final_layernorm"),
    ],
)
def test_last_norm_is_found(name: str, norm: str) -> None:
    model = MODELS[name]()
    assert find_last_norm(model, 32) is model.get_submodule(norm)
    assert find_last_norm(model, 33) is None


@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.RMSNorm(32), nn.LayerNorm(32).bfloat16()])
def test_module_in_chunks(norm: nn.Module) -> None:
    x = torch.randn(2, 23, 32, dtype=norm.weight.dtype)

    def run() -> tuple[Tensor, Tensor, list[Tensor], int]:
        kept: list[Tensor] = []
        norm.zero_grad()
        here = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = norm(here)
        y.square().sum().backward()
        return y.detach(), here.grad, [p.grad for p in norm.parameters()], len({t.data_ptr() for t in kept})

    y, dx, weights, _ = run()
    undo = attach_chunks(norm, CHUNK)
    mine, my_dx, my_weights, kept = run()
    undo()
    assert torch.equal(mine, y)
    assert torch.equal(my_dx, dx)
    exact = copy.deepcopy(norm).double()
    exact.zero_grad()
    exact(x.double()).square().sum().backward()
    for w, whole, p in zip(my_weights, weights, exact.parameters(), strict=True):
        assert w.dtype == whole.dtype
        assert (w - p.grad).norm() <= 1.1 * (whole - p.grad).norm() + 1e-6 * p.grad.norm()
    assert kept == 1


# ---- in the strategy


class Accuracy(LanguageModel):
    """Logs the number of correct tokens, and returns the model's complete output from its step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        out = self.model(**batch)
        with torch.no_grad():
            right = (out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean()
        self.log("right", right)
        self.keep(out.loss)
        return out


class Kinds(Callback):
    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kinds.add(type(outputs["logits"]).__name__)


@pytest.mark.usefixtures("only_chunks")
def test_training_with_the_strategy() -> None:
    runs = []
    for settings in ({"loss_chunk_tokens": None}, {}, {"loss_chunk_tokens": CHUNK}):
        strategy, kinds = MemoStrategy(alpha=0.5, plan_memory=False, **settings), Kinds()
        run = fit(strategy, Accuracy("llama"), val_data=loader(4), max_steps=6, val_check_interval=3,
                  callbacks=[kinds], accumulate_grad_batches=2)  # fmt: skip
        assert forwards(run.module) == []
        runs.append((run.losses, run.trainer.callback_metrics, kinds.kinds))
    (off, off_metrics, _), (default, _, kinds), (mine, metrics, my_kinds) = runs
    assert default == off
    assert kinds == {"Tensor"} and my_kinds == {"LazyLogits"}
    assert mine == pytest.approx(off, rel=1e-5)
    assert float(metrics["right"]) == pytest.approx(float(off_metrics["right"]), abs=0.02)
    assert float(metrics["val_loss"]) == pytest.approx(float(off_metrics["val_loss"]), rel=1e-5)


class Waits(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        while trainer.strategy.memory.busy:
            time.sleep(0.002)


def test_recorded_trace_has_no_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every memory request of a step is smaller than the logits of the batch."""
    shorten_measurements(monkeypatch)
    monkeypatch.setattr(planning, "cache_folder", lambda: tmp_path / "plans")
    largest = {}
    for tokens in (None, 8):
        strategy = MemoStrategy(alpha=0.5, loss_chunk_tokens=tokens)
        module = LanguageModel(lambda: build("LlamaConfig", vocab_size=400))
        fit(strategy, module, loader(24, 512), max_steps=9, callbacks=[Waits()], default_root_dir=tmp_path)
        largest[tokens] = int(strategy.memory.trace.size.max())
        assert strategy.memory.use.hits > 0 and not any(strategy.memory.use.misses.values())
    assert largest[None] == 2 * 512 * 400 * 4 > 2 * largest[8]
