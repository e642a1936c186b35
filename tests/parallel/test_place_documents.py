"""Short documents lie whole on a process, long ones are divided: training gives what one process gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from support.devices import skip_ring_on_cuda
from support.divided_training import WholeGradients, check
from support.families import FAMILIES, VOCABULARY
from support.harness import Batch
from support.markers.slow import slow_if
from support.parallel_training import MODELS, Run, train_alone, train_together
from support.processes import run_in_processes
from support.samples.configurations import BOUND, CONFIGURATIONS
from support.trainer_harness import batches, fit
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.parallel.batches.place_documents import DocumentPlacement, PlacingCosts, place_documents
from lightning_memo.parallel.batches.shard_batch import BatchSharder
from lightning_memo.parallel.batches.token_layout import TokenLayout, multiple

PAIRS = 6 * 32  # of the small models
SIZES = {"ring 2": (2, 1), "ulysses 2": (1, 2), "ring 4": (4, 1), "both": (2, 2), "ulysses 4": (1, 4)}
LONG_AND_SHORT = (150, 7, 13, 9, 11, 8, 12, 14, 6, 10, 16, 5, 3, 9)
SHORT = (9, 12, 7, 11, 8, 10, 9, 6, 13, 8, 10, 9, 7, 12, 11, 8)
PADDED = (151, 14, 9, 22, 11, 17, 8, 12)


def packed(*rows: Sequence[int], seed: int = 0) -> Batch:
    """Return rows of packed documents of these lengths."""
    tokens = sum(rows[0])
    ids = torch.randint(0, VOCABULARY, (len(rows), tokens), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    labels = torch.where((ids % 5 == 0) | (positions == 0), -100, ids)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def padded(*lengths: int, seed: int = 0) -> Batch:
    """Return rows of these lengths, padded on the right."""
    tokens = max(lengths) + 3
    ids = torch.randint(0, VOCABULARY, (len(lengths), tokens), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "labels": torch.where((ids % 5 == 0) | (mask == 0), -100, ids), "attention_mask": mask}


def starts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths[:-1], initial=0))


def placed(batch: Batch, ring: int, ulysses: int, shards: int = 1, pairs: int = PAIRS) -> DocumentPlacement | None:
    rows, tokens = batch["input_ids"].shape
    lengths = tuple(batch["attention_mask"].sum(1).tolist()) if "attention_mask" in batch else None
    documents = None
    if "position_ids" in batch:
        documents = tuple(tuple((row == 0).nonzero()[:, 0].tolist()) for row in batch["position_ids"])
    costs = PlacingCosts(ring, ulysses, multiple(ring, ulysses, shards), pairs)
    return place_documents(rows, tokens, documents, lengths, costs)


BATCHES = {
    "a long document": packed(LONG_AND_SHORT),
    "short documents": packed(SHORT),
    "two rows": packed(LONG_AND_SHORT, LONG_AND_SHORT[::-1]),
    "padded rows": padded(*PADDED),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", BATCHES)
def test_every_token_is_on_one_process(name: str, sizes: str) -> None:
    (ring, ulysses), batch = SIZES[sizes], BATCHES[name]
    placement = placed(batch, ring, ulysses)
    assert placement is not None
    if name != "padded rows":  # of which four processes divide all
        assert any(placement.whole)
    if name in ("a long document", "short documents"):
        assert bool(placement.shared) == (name == "a long document")
    layouts = [
        TokenLayout(placement.tokens, ring, r, ulysses, u, documents=(placement.starts,), placement=placement)
        for r in range(ring)
        for u in range(ulysses)
    ]
    held = torch.cat([layout.sources() for layout in layouts])
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten().nonzero()[:, 0]
    assert held[held >= 0].sort().values.tolist() == valid.tolist()
    # Each document is a range of the sequence of attention.
    sources, edges = placement.sources(), (*placement.starts, placement.tokens)
    for start, stop in pairwise(edges):
        of_document = sources[start:stop]
        assert (of_document == -1).all() or (of_document.diff() == 1).all()


def test_rows_alike_and_single_documents_are_divided_as_before() -> None:
    assert placed(packed((200,)), 4, 1) is None
    assert placed(packed((100, 100)), 4, 1) is None
    assert placed(padded(100, 100, 100), 1, 2) is not None  # three tokens of padding for each row


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_no_process_has_more_tokens_than_before_but_for_a_64th(ring: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = (torch.rand(40, generator=generator) ** 6 * 4000 + 2).int().tolist()
        lengths.append(16384 - sum(lengths) % 16384)
        batch = packed(lengths)
        placement = placed(batch, ring, 1, pairs=6 * 4096)
        if placement is not None:
            assert placement.tokens <= batch["input_ids"].numel() * 65 / 64


def settings(sizes: str) -> dict[str, Any]:
    ring, ulysses = SIZES[sizes]
    return {"context_parallel_size": ring * ulysses, "ulysses_size": ulysses}


def build(family: str) -> nn.Module:
    return MODELS[family]() if family in MODELS else FAMILIES[family].build()


CASES = [
    ("ring 2", "llama_gqa", ("a long document", "short documents", "two rows", "padded rows"), 1, {"alpha": 0.5}),
    ("both", "llama", ("padded rows", "two rows", "padded rows", "a long document"), 2, {"alpha": 0.0}),
]
MORE = [
    ("ulysses 2", "llama_gqa", ("padded rows", "padded rows", "a long document"), 1, {"alpha": 0.5}),
    ("ring 4", "llama", ("a long document", "padded rows", "two rows", "short documents"), 2, {"alpha": 0.5}),
    ("ulysses 4", "llama", ("a long document", "padded rows", "two rows", "short documents"), 1, {"alpha": 1.0}),
    ("ring 2", "mistral_window", ("a long document", "two rows", "padded rows"), 1, {"alpha": 0.5}),
    ("ring 2", "gemma3_mixed_windows", ("padded rows", "padded rows", "two rows"), 1, {}),
    ("ring 2", "mixtral_balanced", ("padded rows", "padded rows", "a long document"), 1, {"alpha": 0.5}),
    ("ring 2", "llama_mixing", ("two rows", "a long document"), 1, {"alpha": 0.5}),
    ("ring 2", "llama_caching", ("padded rows", "padded rows"), 1, {"alpha": 0.5}),
    ("ring 2", "llama_dynamic_rope", ("padded rows", "padded rows", "two rows"), 1, {"alpha": 0.5}),
    ("ring 2", "llama_lora", ("padded rows", "padded rows", "two rows"), 1, {"zero_stage": 3}),
    ("ring 2", "llama_gqa", ("two rows", "padded rows"), 1, {"alpha": 0.5, "slice_tokens": 16}),
    ("ring 2", "llama_gqa", (*BATCHES, "padded rows"), 1, {"alpha": 0.5, "tensor_parallel_size": 2}),
    ("ulysses 2", "mixtral_balanced", ("padded rows", "padded rows", "two rows"), 1, {"expert_parallel_size": 2}),
]  # fmt: skip


@slow_if(lambda case: case not in CASES)
@pytest.mark.parametrize("case", CASES + MORE, ids=lambda case: f"{case[0]}-{case[1]}-{case[2][0]}-{case[4]}")
def test_gradients_are_those_of_one_process(case: tuple[str, str, tuple[str, ...], int, dict[str, Any]]) -> None:
    sizes, family, names, accumulate, others = case
    chosen = settings(sizes) | others
    skip_ring_on_cuda(chosen)
    data = [BATCHES[name] for name in names]
    processes = chosen["context_parallel_size"] * chosen.get("tensor_parallel_size", 1)
    check(functools.partial(build, family), data, chosen, processes, accumulate)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [Run(packed=True, uneven=True), Run(padded=True, accumulate=2)], ids=["packed", "padded"]
)
@pytest.mark.parametrize("configuration", ["dp2 x cp2", "dp2 x cp2 zero3 ulysses"])
def test_groups_with_other_documents_have_other_numbers_of_tokens(configuration: str, run: Run) -> None:
    run = replace(run, family="llama_gqa", tokens=97, batch=8)
    size, chosen = CONFIGURATIONS[configuration]
    skip_ring_on_cuda(chosen)
    errors = train_together(size, run, chosen | {"alpha": 0.5}).worst_error(train_alone(run))
    assert max(errors.values()) <= BOUND, errors


class Validated(WholeGradients):
    """Records the rows and tokens of its batches, and the losses of validation."""

    def __init__(self, family: str) -> None:
        super().__init__(functools.partial(build, family))
        self.sizes: list[tuple[int, ...]] = []
        self.validated: list[float] = []

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.sizes.append(tuple(batch["input_ids"].shape))
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.append(float(self.loss(batch)))


Found = tuple[list[tuple[int, ...]], list[float], list[dict[str, Tensor]]]


def train(family: str, names: Sequence[str], chosen: dict[str, Any], processes: int, precision: Any) -> Found:
    """Return the sizes of training batches, the losses of validation, and gradients."""
    module, data = Validated(family), [BATCHES[name] for name in names]
    strategy = MemoStrategy(**chosen) if chosen else "auto"
    fit(
        strategy, module, batches(data), batches(data), max_steps=len(data), devices=processes, precision=precision,
        use_distributed_sampler=False, limit_val_batches=len(data), num_sanity_val_steps=0,
    )  # fmt: skip
    return module.sizes, module.validated, module.gradients


NAMES = ("padded rows", "a long document", "two rows", "padded rows", "short documents")


@pytest.mark.parametrize("sizes", ["ulysses 2", "ring 2"])
def test_rows_are_joined_in_training_and_validation(sizes: str) -> None:
    chosen = settings(sizes) | {"alpha": 0.5}
    skip_ring_on_cuda(chosen)
    _, losses, _ = train("llama_gqa", NAMES, {}, 1, "32-true")
    parts = run_in_processes(2, train, "llama_gqa", NAMES, chosen, 2, "32-true")
    means = [sum(of_batch) / 2 for of_batch in zip(*(part[1] for part in parts), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for found, *_ in parts:
        # Until a first batch has shown that only attention relates tokens, padding is kept.
        assert [rows for rows, _ in found] == [len(PADDED), 1, 1, 1, 1]
        tokens = [sum(PADDED), sum(LONG_AND_SHORT), 2 * sum(LONG_AND_SHORT), sum(PADDED), sum(SHORT)]
        for (_, held), everyones in zip(found[1:], tokens[1:], strict=True):
            assert everyones / 2 <= held <= everyones / 2 * 65 / 64 + 16


def distance(gradients: Sequence[dict[str, Tensor]], exact: Sequence[dict[str, Tensor]]) -> float:
    pairs = [
        (g.double(), e[name].double())
        for of_step, e in zip(gradients, exact, strict=True)
        for name, g in of_step.items()
    ]
    return float(sum((g - e).norm() ** 2 for g, e in pairs) ** 0.5 / sum(e.norm() ** 2 for _, e in pairs) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["ring 2", "both"])
def test_half_precision_is_as_near_to_fp32_as_in_one_process(sizes: str) -> None:
    chosen = settings(sizes) | {"alpha": 0.5}
    exact, alone = (train("llama_gqa", NAMES, {}, 1, precision)[2] for precision in ("32-true", "bf16-true"))
    processes = chosen["context_parallel_size"]
    parts = run_in_processes(processes, train, "llama_gqa", NAMES, chosen, processes, "bf16-true")
    assert distance(parts[0][2], exact) <= 1.25 * distance(alone, exact)


def sharded(batch: Batch, **settings: Any) -> tuple[Batch, TokenLayout]:
    places = {"places": True, "joins_rows": True, "pairs": PAIRS} | settings
    part, layout = BatchSharder(ring=2, ranks=2, takes_loss_arguments=True, **places).shard(batch)
    assert layout is not None
    return part, layout


def test_rows_that_must_stay_rows() -> None:
    of_rows = {"weights": torch.ones(len(PADDED))}
    counted = padded(*PADDED)
    counted["labels"] = counted["input_ids"]  # the loss of padding counts
    for batch, settings in (
        (padded(*PADDED) | of_rows, {}),
        (counted, {}),
        (padded(*PADDED), {"joins_rows": False}),
        (padded(*PADDED), {"may_need_padding": lambda: True}),
        (packed(LONG_AND_SHORT, LONG_AND_SHORT), {"joins_rows": False}),
        (padded(*PADDED), {"places": False}),
        (packed(LONG_AND_SHORT), {"global_slices": True}),
    ):
        part, layout = sharded(batch, **settings)
        assert layout.placement is None and part["input_ids"].shape[0] == batch["input_ids"].shape[0]
    for batch in (padded(*PADDED), packed(LONG_AND_SHORT) | {"weights": torch.ones(1)}):
        part, layout = sharded(batch)
        assert layout.placement is not None
        assert part["input_ids"].shape == part["position_ids"].shape == part["labels"].shape == (1, layout.local_tokens)


def test_tokens_keep_their_labels_and_positions() -> None:
    batch = padded(*PADDED)
    part, layout = sharded(batch)
    sources = layout.sources()
    held = sources >= 0
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    for name, whole in (("input_ids", batch["input_ids"]), ("position_ids", positions), ("shift_labels", targets)):
        assert torch.equal(part[name][0][held], whole.flatten()[sources[held]])
    assert (part["shift_labels"][0][~held] == -100).all()
    assert torch.equal(layout.valid(), held[None])
