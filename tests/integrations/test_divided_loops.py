"""Loops whose processes share the tokens of their rows train as one process does."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures import vision_models
from support.architectures.vision_models import images_in_text
from support.devices import DEVICE, skip_ring_on_cuda
from support.families import BALANCED, FAMILIES, VOCABULARY
from support.markers.slow import slow_if
from support.modes import BY_KIND
from support.processes import run_in_processes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    DynamicCache,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    OPTConfig,
    OPTForCausalLM,
)

from lightning_memo import MemoLoop
from lightning_memo.config import MemoConfig
from lightning_memo.utils.cache_names import CACHE_NAMES

ROWS, STEPS, ACCUMULATED = 2, 3, 2
RING, ULYSSES = ({"context_parallel_size": 2, "ulysses_size": size} for size in (1, 2))
HALF, CHUNKS = {"alpha": 0.5}, {"loss_chunk_tokens": 8}
HIDDEN = {"slice_tokens": 8, "stream_from_host": "hidden"}

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
NOT_OF_LOOPS = {field.name for field in fields(MemoConfig)} - set(inspect.signature(MemoLoop).parameters)

Batch = dict[str, Tensor]


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    make: Callable[[], Any] = BALANCED.get(family) or getattr(vision_models, family, None) or FAMILIES[family].build
    return make().to(DEVICE)


def batch_of(family: str, number: int) -> Batch:
    """Return rows that are padded, packed or neither, of lengths that two processes cannot divide evenly."""
    if hasattr(vision_models, family):
        return {name: t.to(DEVICE) for name, t in images_in_text(family, 61, (1, 2), number, 5).items()}
    tokens, generator = 41 + number, torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (ROWS, tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if number % 3 == 1:
        batch["attention_mask"] = (torch.arange(tokens) < torch.tensor([[tokens], [9]])).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
    if number % 3 == 2 and "balanced" not in family:
        documents = [torch.arange(n) for n in (26, 4, 6, tokens - 36)]
        batch["position_ids"] = torch.cat(documents).expand(ROWS, -1)
    return {name: t.to(DEVICE) for name, t in batch.items()}


def by_the_model(model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
    loss: Tensor = model(**batch, num_items_in_batch=items).loss
    return loss


def by_logits(model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
    """A loss that is no mean over tokens: it prefers the first of two answers, like DPO, and uses an entropy."""
    labels, given = batch["labels"][:, 1:], {name: t for name, t in batch.items() if name != "labels"}
    rows: list[Tensor] = []
    for ids in (given["input_ids"], given["input_ids"].flip(1)):  # two forwards before a backward
        log_p = model(**given | {"input_ids": ids}).logits[:, :-1].log_softmax(-1)
        of_labels = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        entropies = -(log_p.exp() * log_p).sum(-1)
        rows.append(((of_labels + 0.1 * entropies) * (labels != -100)).sum(-1))
    return -nn.functional.logsigmoid(0.1 * (rows[0] - rows[1])).mean()


def by_routers(model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
    """The model's loss, with its balancing loss, and a loss of the router logits of tokens that are no padding."""
    output, kept = model(**batch, num_items_in_batch=items), (batch["labels"] != -100).flatten()
    squares = (logits[kept].logsumexp(-1).pow(2).mean() for logits in output.router_logits)
    loss: Tensor = output.loss + 0.1 * sum(squares)
    return loss


def by_padding(model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
    """A loss of the logits of all tokens, those of padding among them, of which the model gets no labels."""
    given = {name: t for name, t in batch.items() if name != "labels"}
    log_p = model(**given).logits.log_softmax(-1)
    return -log_p.gather(-1, given["input_ids"][..., None]).mean()


def by_labels_of_padding(model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
    """The model's loss, with labels that are not -100 for padding."""
    loss: Tensor = model(**batch | {"labels": batch["input_ids"]}).loss
    return loss


Loss = Callable[[nn.Module, Batch, Tensor], Tensor]
Outcome = tuple[list[float], list[float], list[Tensor]]


def train(model: nn.Module, family: str, loss_of: Loss, part: slice, parts: int, stack: Any) -> Outcome:
    """Return the losses, the norms of gradients before they are clipped, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    with stack(model, optimizer):
        for number in range(STEPS * ACCUMULATED):
            batch = batch_of(family, number)
            items = (batch["labels"][:, 1:] != -100).sum() / parts
            rows = batch if parts == 1 else {name: t[part] for name, t in batch.items()}
            loss = loss_of(model, rows, items)
            (loss / ACCUMULATED).backward()
            losses.append(loss.item())
            if number % ACCUMULATED:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
                optimizer.step()
                optimizer.zero_grad()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in (p.detach() for p in model.parameters())]
    return losses, norms, [t.cpu() for t in weights]


def wrapped(model: Any, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=hasattr(model.model, "vision_tower"))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def of_rank(kind: str, family: str, loss_of: Loss, settings: dict[str, Any]) -> Outcome:
    def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(MemoLoop(model, optimizer, **settings))
        evaluate(model.module if kind == "ddp" else model, family, kind)
        return stack

    model = wrapped(build(family), kind)
    groups = dist.get_world_size() // settings["context_parallel_size"]
    group, rows = dist.get_rank() // settings["context_parallel_size"], ROWS // groups
    return train(model, family, loss_of, slice(group * rows, (group + 1) * rows), groups, evaluating)


def evaluate(model: nn.Module, family: str, kind: str) -> None:
    """Each process has batches of its own; with whole weights, some have none."""
    model.eval()
    with torch.no_grad():
        if kind != "ddp" or dist.get_rank() > 0:
            batch = batch_of(family, 10 + dist.get_rank())
            torch.testing.assert_close(model(**batch).loss, build(family).eval()(**batch).loss, rtol=1e-5, atol=1e-6)
    model.train()


@functools.cache
def alone(family: str, loss_of: Loss) -> Outcome:
    def plain(*_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return train(build(family), family, loss_of, slice(0, ROWS), 1, plain)


CASES = [
    (2, "ddp", "llama", by_the_model, RING | HALF),
    (2, "ddp", "llama", by_logits, ULYSSES | CHUNKS),
    (4, "fsdp2", "llama", by_the_model, ULYSSES | HALF),
    (2, "fsdp2", "llama", by_logits, RING | HALF | CHUNKS),
    (2, "fsdp2", "llama", by_the_model, ULYSSES | HIDDEN | HALF),  # slices end elsewhere than in the profile
    (2, "ddp", "llama", by_the_model, RING | HIDDEN),
    (2, "ddp", "llama", by_the_model, RING | {"test_mode": BY_KIND, "device_memory": "0.8MiB"}),
    (2, "fsdp2", "gemma3_mixed_windows", by_the_model, ULYSSES | CHUNKS),  # with a soft cap
    (4, "ddp", "llama_gqa", by_logits, ULYSSES | CHUNKS),
    (4, "ddp", "llama", by_logits, RING | HALF),
    (2, "ddp", "gemma3_mixed_windows", by_the_model, RING | HALF),
    (2, "ddp", "mixtral_balanced", by_routers, ULYSSES | HALF),
    (2, "ddp", "qwen2_5_vl", by_the_model, RING | HALF),
    (2, "ddp", "gemma3", by_the_model, ULYSSES | HALF),
    (2, "ddp", "llama", by_padding, RING | HALF),
    (4, "ddp", "llama_gqa", by_padding, {"context_parallel_size": 4, "ulysses_size": 2}),
    (2, "fsdp2", "gemma3_mixed_windows", by_padding, ULYSSES | HALF),
    (2, "ddp", "mistral_window", by_labels_of_padding, RING | HALF),
    (2, "ddp", "llama", by_labels_of_padding, ULYSSES | HIDDEN),
]


@slow_if(lambda case: case not in (*CASES[:2], (2, "ddp", "llama", by_padding, RING | HALF)))
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (*case[:3], case[3].__name__, *case[4]))))
def test_processes_that_share_rows(case: tuple[int, str, str, Loss, dict[str, Any]]) -> None:
    processes, kind, family, loss_of, settings = case
    skip_ring_on_cuda(settings)
    if DEVICE.type == "cuda" and "slice_tokens" in settings:
        pytest.skip("slices with keys on the host take half precision on CUDA")
    losses, norms, weights = alone(family, loss_of)
    outcomes = run_in_processes(processes, of_rank, kind, family, loss_of, settings)
    means = [sum(of_step) / processes for of_step in zip(*(o[0] for o in outcomes), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for _, found_norms, found in outcomes:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for t, expected in zip(found, weights, strict=True):
            torch.testing.assert_close(t, expected, rtol=1e-5, atol=1e-6)


def computed_by_the_head(loss_of: Loss) -> list[int]:
    """Return the number of tokens of which this process computes logits in the first step, and of all tokens."""
    model: Any = build("llama")
    batch, counted = batch_of("llama", 0), []
    forward = model.lm_head.forward

    def count(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):  # of a proof
            counted.append(x.shape[:-1].numel())
        return forward(x)

    model.lm_head.forward = count
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with MemoLoop(wrapper, optimizer, **ULYSSES | CHUNKS):
        loss_of(wrapper, batch, (batch["labels"][:, 1:] != -100).sum()).backward()
    return [sum(counted), batch["labels"].numel()]


def test_each_process_computes_some_of_the_logits() -> None:
    for tokens, whole in run_in_processes(2, computed_by_the_head, by_the_model):
        assert whole // 2 <= tokens < 0.6 * whole


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of embeddings that the loop computes, and those of the weights."""
    batch = batch_of("llama", 0)
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(*batch["input_ids"].shape, 32, generator=generator).to(DEVICE).requires_grad_()
    model(inputs_embeds=embeds, labels=batch["labels"]).loss.backward()
    found = [embeds.grad, *(p.grad for p in model.parameters())]
    return [t.cpu() for t in found if t is not None]


def build_opt() -> nn.Module:
    """A model whose head calls the decoder inside of the base model."""
    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY, dropout=0.0,
        word_embed_proj_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    model.get_input_embeddings().weight.requires_grad_(False)
    return model.to(DEVICE)


def divided_gradients(settings: dict[str, Any]) -> list[Tensor]:
    model = DistributedDataParallel(build_opt())
    with MemoLoop(model, torch.optim.SGD(model.parameters(), lr=0.05), **settings):
        return gradients(model)


@pytest.mark.parametrize("settings", [RING | HALF, ULYSSES | CHUNKS], ids=["ring", "ulysses"])
def test_gradients_of_embeddings_of_the_loop(settings: dict[str, Any]) -> None:
    skip_ring_on_cuda(settings)
    expected = gradients(build_opt())
    for found in run_in_processes(2, divided_gradients, settings):
        for t, of_one in zip(found, expected, strict=True):
            torch.testing.assert_close(t, of_one, rtol=1e-5, atol=1e-6)


# ---- calls that are not divided, and refusals


def generated(model: Any) -> list[int]:
    prompt = batch_of("llama", 0)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    ids: list[int] = model.generate(prompt, attention_mask=mask, **settings).flatten().tolist()
    return ids


def llama4() -> nn.Module:
    """A model whose attention is neither causal nor a sliding window."""
    config = Llama4TextConfig(**SIZES, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=32)
    return Llama4ForCausalLM(config)


def gemma3n() -> nn.Module:
    """A model whose layers get several hidden states, [number, batch, tokens, hidden]."""
    config = Gemma3nTextConfig(
        **SIZES, layer_types=["full_attention"] * 2, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0] * 2,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
    )  # fmt: skip
    return Gemma3nForCausalLM(config)


def refusals() -> dict[str, str]:
    """Return a line for each refusal, and what differs although nothing is refused."""
    lines: dict[str, str] = {}
    batch = batch_of("llama", 0)

    def attempt(name: str, model: nn.Module, call: Callable[[], object]) -> None:
        try:
            with MemoLoop(model, sgd(model), **RING):
                call()
        except ValueError as error:
            lines[name] = str(error)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    plain: Any = build("llama")
    attempt("not averaged", plain, lambda: plain(**batch))
    model = wrapped(build("llama"), "ddp")
    attempt("other rows", model, lambda: model(**batch_of("llama", 3 * dist.get_rank())))
    for name in CACHE_NAMES:
        attempt(name, model, lambda: model(**batch, **{name: DynamicCache()}))  # noqa: B023 called at once
    left = batch["input_ids"].new_ones(2, 41)
    left[:, 0] = 0
    attempt("padding on the left", model, lambda: model(**batch, attention_mask=left))
    attempt("no tokens", model, lambda: model(input_ids=batch["input_ids"][0]))
    for name, build_other in (("no transformers", FAMILIES["block"].build), ("chunks", llama4), ("stacked", gemma3n)):
        other = DistributedDataParallel(build_other().to(DEVICE))
        attempt(name, other, lambda: other(**batch))  # noqa: B023 called at once
    with MemoLoop(model, sgd(model), **RING) as memo:
        lines["groups"] = f"{memo.data_parallel_rank} of {memo.data_parallel_size}"
        model(**batch).loss.backward()
        for training in (True, False):
            model.train(training)
            is_same = generated(model.module) == generated(plain.train(training))
            lines[f"generated, {training=}"] = "" if is_same else "other tokens"
    return lines


def test_refusals() -> None:
    skip_ring_on_cuda(RING)
    for lines in run_in_processes(2, refusals):
        assert not any("\n" in line for line in lines.values())
        assert "nothing averages them over all 2 processes: wrap the model by" in lines["not averaged"]
        assert not any(name in line for line in lines.values() for name in NOT_OF_LOOPS)
        assert lines["no tokens"].endswith("or train with context_parallel_size=1")
        assert lines["chunks"].endswith("which needs all tokens at once: train it with context_parallel_size=1")
        assert "divide the tokens of [batch, tokens, ...] only: train this model with context" in lines["stacked"]
        assert "got different batches" in lines["other rows"]
        for name in CACHE_NAMES:
            assert "key-value cache and gradients" in lines[name]
        assert "pad on the right" in lines["padding on the left"]
        assert "context_parallel_size divides the tokens of one model of transformers" in lines["no transformers"]
        assert lines["groups"] == "0 of 1"
        assert lines["generated, training=True"] == lines["generated, training=False"] == ""


def test_one_process_is_too_few() -> None:
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    match = "^context_parallel_size=2 does not divide the 1 processes"
    with pytest.raises(ValueError, match=match), MemoLoop(model, optimizer, **RING):
        pass
