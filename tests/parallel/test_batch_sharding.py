"""Parts of batches, put together again, are the whole batch; losses of parts average to the loss of the whole."""

from __future__ import annotations

import os
from collections import UserDict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.families import FAMILIES
from support.markers.slow import slow_if
from support.processes import run_in_processes
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from transformers import BatchEncoding
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_memo.data.resumable_loader import seed_workers, shield_workers
from lightning_memo.parallel.batches.loss_arguments import takes_loss_arguments, why_loss_unfit
from lightning_memo.parallel.batches.same_batches import check_same_batch
from lightning_memo.parallel.batches.shard_batch import BatchSharder
from lightning_memo.parallel.batches.split_loader import SplitLoader, seeding_rank, split_iterable
from lightning_memo.parallel.batches.token_layout import multiple

VOCABULARY = 13


def sharders(ring=1, ulysses=1, shards=1, ranks=None, **settings):
    """One sharder for each context rank of one data-parallel index."""
    return [
        BatchSharder(
            ring=ring, ring_rank=r, ulysses=ulysses, ulysses_rank=u, shards=shards,
            ranks=ring * ulysses if ranks is None else ranks, **{"takes_loss_arguments": True, **settings},
        )
        for r in range(ring)
        for u in range(ulysses)
    ]  # fmt: skip


def make_batch(rows=2, tokens=13, ignored=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.masked_fill(torch.rand(rows, tokens, generator=generator) < ignored, -100)
    return {"input_ids": ids, "labels": labels}


def shard_all(batch, group):
    return [sharder.shard(batch) for sharder in group]


def together(parts, name):
    """A tensor of all parts, `[batch, padded tokens, ...]`, each token at its position."""
    layout = parts[0][1]
    first = parts[0][0][name]
    whole = torch.full((first.shape[0], layout.tokens, *first.shape[2:]), -7, dtype=first.dtype)
    for part, place in parts:
        whole[:, place.fed_order()] = part[name]
    return whole


def two_slices(batch, shard_tokens):
    return (shard_tokens // 3, shard_tokens) if shard_tokens >= 3 else (shard_tokens,)


topologies = pytest.mark.parametrize(
    ("ring", "ulysses", "shards"), [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
)


@topologies
@pytest.mark.parametrize("tokens", [16, 13, 1])
def test_parts_make_up_the_whole(ring, ulysses, shards, tokens):
    batch = make_batch(tokens=tokens) | {"token_type_ids": torch.arange(2 * tokens).view(2, tokens)}
    parts = shard_all(batch, sharders(ring, ulysses, shards, bounds_of=two_slices))
    padded = parts[0][1].tokens
    assert padded - tokens < multiple(ring, ulysses, shards)
    assert {part["input_ids"].shape for part, _ in parts} == {(2, padded // (ring * ulysses))}
    for name in ("input_ids", "token_type_ids"):
        whole = together(parts, name)
        assert torch.equal(whole[:, :tokens], batch[name])
        assert not whole[:, tokens:].any()
    assert torch.equal(together(parts, "position_ids"), torch.arange(padded).clamp_max(tokens - 1)[None])
    assert {layout.largest_position for _, layout in parts} == {tokens - 1}
    shifted = together(parts, "shift_labels")
    assert torch.equal(shifted[:, : tokens - 1], batch["labels"][:, 1:])
    assert (shifted[:, tokens - 1 :] == -100).all()
    assert torch.equal(together(parts, "labels"), shifted)


@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]), st.integers(1, 40), st.data())
@settings(max_examples=80)
def test_slices_gathered_from_all_shards_are_contiguous(ring, ulysses, shards, tokens, data):
    def bounds_of(batch, shard_tokens):
        inner = data.draw(st.sets(st.integers(1, max(shard_tokens - 1, 1)), max_size=3)) - {shard_tokens}
        return (*sorted(inner), shard_tokens)

    if ring * ulysses * shards == 1:
        return
    batch = make_batch(tokens=tokens)
    padded = None
    for sharder in sharders(ring, ulysses, shards, bounds_of=bounds_of):
        part, layout = sharder.shard(batch)
        padded = layout.tokens
        in_layer_order = torch.nn.functional.pad(batch["input_ids"], (0, padded - tokens))[:, layout.layer_order()]
        of_shards = part["input_ids"].chunk(shards, 1)
        assert len(of_shards) == shards
        for a, b in pairwise((0, *layout.bounds)):
            gathered = torch.cat([shard[:, a:b] for shard in of_shards], 1)
            assert torch.equal(gathered, in_layer_order[:, shards * a : shards * b])
    assert padded - tokens < multiple(ring, ulysses, shards)


def test_bounds_are_asked_for_a_shard():
    asked = []

    def bounds_of(batch, shard_tokens):
        asked.append((batch, shard_tokens))
        return (1, shard_tokens)

    [sharder, _] = sharders(ulysses=2, shards=2, bounds_of=bounds_of)
    _, layout = sharder.shard(make_batch(rows=3, tokens=21))
    assert (layout.tokens, layout.bounds) == (24, (1, 6))
    assert asked == [(3, 6)]


# ---- loss


def causal_loss(logits, **batch):
    """The loss as a causal language model of transformers computes it."""
    return ForCausalLMLoss(logits, vocab_size=VOCABULARY, **batch)


def loss_arguments(part):
    return {name: part[name] for name in ("labels", "shift_labels", "num_items_in_batch") if name in part}


def mean_of_parts(logits, parts):
    """The mean of the parts' losses; `logits` are of the whole."""
    losses = []
    for part, layout in parts:
        padded = torch.nn.functional.pad(logits, (0, 0, 0, layout.tokens - logits.shape[1]))
        losses.append(causal_loss(padded[:, layout.fed_order()], **loss_arguments(part)))
    return torch.stack(losses).mean()


@topologies
@pytest.mark.parametrize("tokens", [16, 13])
def test_mean_loss_of_parts_is_the_loss_of_the_whole(ring, ulysses, shards, tokens):
    batch = make_batch(tokens=tokens)
    batch["labels"][:, : tokens // 2] = -100  # uneven: some parts have hardly any label
    logits = torch.randn(2, tokens, VOCABULARY, dtype=torch.float64, requires_grad=True)
    expected = causal_loss(logits, labels=batch["labels"])
    actual = mean_of_parts(logits, shard_all(batch, sharders(ring, ulysses, shards)))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def test_given_shift_labels_are_not_shifted_again():
    batch = make_batch(tokens=12)
    batch["shift_labels"] = torch.arange(24).view(2, 12)
    parts = shard_all(batch, sharders(ring=2))
    for name in ("shift_labels", "labels"):
        assert torch.equal(together(parts, name), batch["shift_labels"])
    assert parts[0][0]["num_items_in_batch"] == 24 / 2


def test_no_label_at_all_is_loss_zero():
    batch = make_batch(ignored=1.1)
    assert (batch["labels"] == -100).all()
    parts = shard_all(batch, sharders(ring=2))
    assert mean_of_parts(torch.randn(2, 13, VOCABULARY), parts) == 0
    assert parts[0][0]["num_items_in_batch"] == 0.5


def test_item_count_is_fp32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        part, _ = sharders(ring=2)[0].shard(make_batch(tokens=2000, ignored=0.0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert part["num_items_in_batch"].dtype == torch.float32
    assert part["num_items_in_batch"] == 2 * 1999 / 2


def test_uncut_batches_get_the_item_count_alone():
    batch = make_batch()
    [sharder] = sharders(ranks=2)
    whole, layout = sharder.shard(batch)
    assert layout is None
    assert whole.keys() == {*batch, "num_items_in_batch"}
    assert all(whole[name] is batch[name] for name in batch)
    assert whole["num_items_in_batch"] == (batch["labels"][:, 1:] != -100).sum() / 2
    assert "num_items_in_batch" not in batch, "the loader's batch is not changed"


@pytest.mark.parametrize(
    ("batch", "changes"),
    [
        (make_batch(), {"takes_loss_arguments": False, "ranks": 2}),
        (make_batch(), {"ranks": 1}),
        ({"input_ids": torch.ones(1, 3)}, {"ranks": 2}),
        ([torch.ones(2, 3)], {"ranks": 2}),
    ],
    ids=["plain module", "one process", "no labels", "a list"],
)
def test_batches_that_are_left_alone(batch, changes):
    [sharder] = sharders(**changes)
    same, layout = sharder.shard(batch)
    assert same is batch
    assert layout is None


def test_plain_modules_with_aligned_labels():
    batch = {"input_ids": make_batch()["input_ids"], "shift_labels": make_batch()["labels"]}
    parts = shard_all(batch, sharders(ring=2, takes_loss_arguments=False))
    assert parts[0][0].keys() == {"input_ids", "shift_labels", "position_ids", "num_items_in_batch"}
    assert torch.equal(together(parts, "shift_labels")[:, :13], batch["shift_labels"])


def test_predicting_needs_no_labels():
    for takes in (True, False):
        parts = shard_all({"input_ids": make_batch()["input_ids"]}, sharders(ring=2, takes_loss_arguments=takes))
        assert parts[0][0].keys() == {"input_ids", "position_ids"}


# ---- padding, documents, other tensors


def mask_of(*lengths, tokens):
    return (torch.arange(tokens)[None] < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize(
    ("tokens", "lengths", "expected"),
    [(16, None, None), (16, (16, 16), None), (16, (5, 16), (5, 16)), (13, None, (13, 13)), (13, (1, 13), (1, 13))],
)
def test_right_padding_becomes_lengths(tokens, lengths, expected):
    batch = make_batch(tokens=tokens)
    if lengths is not None:
        batch["attention_mask"] = mask_of(*lengths, tokens=tokens)
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    for part, layout in shard_all(batch, sharders(ring=2)):
        assert layout.lengths == expected
        assert "attention_mask" not in part


def test_padding_is_used_unless_all_of_its_labels_are_ignored():
    batch = make_batch(tokens=8, ignored=0.0) | {"attention_mask": mask_of(5, 8, tokens=8)}
    ignored = {"labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)}
    without = {name: t for name, t in batch.items() if name != "labels"}
    for data, used in ((batch, True), (batch | ignored, False), (without, True)):
        assert [layout.uses_padding for _, layout in shard_all(data, sharders(ring=2))] == [used] * 2


def test_recurrences_get_no_padding_mask():
    batch = make_batch(tokens=8, ignored=0.0) | {"attention_mask": mask_of(5, 8, tokens=8)}
    recurrent = BatchSharder(ring=2, takes_loss_arguments=True, has_recurrences=True)
    with pytest.raises(ValueError, match=r"padding has labels, and recurrences .*labels\[attention_mask == 0\] = -100"):
        recurrent.shard(batch)
    with pytest.warns(UserWarning, match="recurrences get no padding mask .*leave padding out of the loss"):
        recurrent.shard({name: t for name, t in batch.items() if name != "labels"})


def test_packed_documents():
    batch = make_batch(tokens=11)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2], [*range(11)]])
    parts = shard_all(batch, sharders(ring=2))
    assert {layout.documents for _, layout in parts} == {((0, 3, 8), (0,))}
    assert together(parts, "position_ids").tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 2],  # padding belongs to the last document
        [*range(11), 10],
    ]
    assert {layout.largest_position for _, layout in parts} == {10}


def test_positions_of_one_row_hold_for_all():
    batch = make_batch(rows=3, tokens=8) | {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    parts = shard_all(batch, sharders(ring=2))
    assert parts[0][1].documents == ((0, 4),) * 3
    assert torch.equal(together(parts, "position_ids"), batch["position_ids"])


def test_positions_that_only_count_are_no_documents():
    batch = make_batch(tokens=8) | {"position_ids": torch.arange(5, 13).expand(2, 8)}
    assert sharders(ring=2)[0].shard(batch)[1].documents is None


def test_positions_under_a_mask_are_no_documents():
    # transformers looks for documents only where there is no mask; padded positions often stand still.
    batch = make_batch(tokens=8) | {"attention_mask": mask_of(5, 8, tokens=8)}
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 1, 1, 1], [*range(8)]])
    [layout, _] = [layout for _, layout in shard_all(batch, sharders(ring=2))]
    assert (layout.documents, layout.lengths) == (None, (5, 8))


def test_embeddings_as_inputs():
    embeds = torch.randn(2, 13, 13, requires_grad=True)  # as wide as long, and still no mask
    batch = {"inputs_embeds": embeds, "labels": make_batch()["labels"]}
    parts = shard_all(batch, sharders(ring=2, shards=2))
    whole = together(parts, "inputs_embeds")
    assert torch.equal(whole[:, :13], embeds)
    assert torch.equal(torch.autograd.grad(whole[:, :13].sum(), embeds)[0], torch.ones_like(embeds))


def test_what_has_no_tokens_passes():
    others = {"weight": torch.ones(2), "names": ["a", "b"], "table": torch.ones(13, 2), "step": 3, "nothing": None}
    batch = make_batch() | others | {"flags": torch.ones(2, 13, 4, dtype=torch.bool)}
    parts = shard_all(batch, sharders(ring=2))
    for part, _ in parts:
        assert all(part[name] is value for name, value in others.items())
    assert together(parts, "flags")[:, :13].all()
    assert batch["input_ids"].shape == (2, 13), "the loader's batch is not changed"


@pytest.mark.parametrize("kind", [dict, UserDict, BatchEncoding])
def test_kind_of_mapping_stays(kind):
    batch = kind(make_batch() | {"attention_mask": torch.ones(2, 13)})
    part, _ = sharders(ring=2)[0].shard(batch)
    assert type(part) is kind
    assert "attention_mask" in batch
    assert "attention_mask" not in part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": 1 - mask_of(5, 5, tokens=13)}, r"padding that is not on the right.*pad on the right"),
        ({"attention_mask": torch.tensor([[1] * 6 + [0] + [1] * 6] * 2)}, r"padding that is not on the right"),
        ({"attention_mask": torch.zeros(2, 13)}, r"row without valid tokens"),
        ({"attention_mask": torch.ones(2, 1, 13, 13)}, r"attention_mask is \[2, 1, 13, 13\]: give a padding mask"),
        ({"attention_mask": {"full": None}}, r"attention_mask is dict: give a padding mask \[2, 13\]"),
        ({"bias": torch.ones(2, 4, 13, 13)}, r"bias \[2, 4, 13, 13\] relates tokens to tokens.*omit it"),
        ({"bias": torch.ones(13, 13)}, r"bias \[13, 13\] relates tokens to tokens"),
        ({"position_ids": torch.ones(3, 2, 13)}, r"position_ids are \[3, 2, 13\]: give \[2, 13\]"),
        ({"position_ids": torch.ones(1, 12)}, r"13 tokens and 12 position_ids: give one for each"),
        ({"labels": torch.ones(2)}, r"labels are \[2\], its tokens \[2, 13\]: give one label for each"),
        ({"shift_labels": torch.ones(2, 12)}, r"shift_labels are \[2, 12\], its tokens \[2, 13\]"),
    ],
)
def test_batches_that_cannot_be_cut(changes, message):
    for sharder in sharders(ring=2):
        with pytest.raises(ValueError, match=message) as caught:
            sharder.shard(make_batch() | changes)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.ones(2, 3)], r"a batch of list cannot be divided.*give a dict with input_ids"),
        ({"x": torch.ones(2, 3)}, r"a batch of keys \['x'\] cannot be divided"),
        ({"input_ids": torch.ones(3)}, r"a batch of keys \['input_ids'\] cannot be divided"),
        ({"input_ids": torch.ones(2, 0)}, r"a batch of keys \['input_ids'\] cannot be divided"),
    ],
)
def test_batches_without_tokens(batch, message):
    with pytest.raises(ValueError, match=message):
        sharders(ring=2)[0].shard(batch)


def test_labels_of_plain_modules_must_be_aligned():
    with pytest.raises(ValueError, match=r"give shift_labels \[batch, tokens\].*num_items_in_batch"):
        sharders(ring=2, takes_loss_arguments=False)[0].shard(make_batch())


def test_labels_are_not_shifted_twice():
    (part, _), _ = shard_all(make_batch(), sharders(ring=2))
    labels = part["labels"]
    for index in ((slice(None), slice(1, None)), (..., slice(1, None))):
        with pytest.raises(ValueError, match="would shift the labels twice"):
            labels[index]
    for used in (labels[:, 2:], labels[labels != -100], labels[torch.tensor([0]), 1:], labels.flatten(), labels + 1):
        assert type(used) is torch.Tensor
    assert torch.equal(labels, part["shift_labels"]) and type(part["shift_labels"]) is torch.Tensor


# ---- models


class Within(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


def llama():
    return FAMILIES["llama"].build()


def with_lora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def refusing_counts():
    """Refuses counts of the Trainer of transformers, and passes them on, as Qwen2.5-VL does."""
    model = llama()
    model.accepts_loss_kwargs = False
    return model


def dropping_loss_arguments():
    model = llama()

    class Dropping(type(model)):
        accepts_loss_kwargs = False

        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids, **kwargs)[0])
            return self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)

    model.__class__ = Dropping
    return model


def with_a_loss_of_its_own():
    model = llama()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    return model


def with_a_loss_that_ignores_the_count():
    model = llama()

    def of_label_smoothing(logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None):
        return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), label_smoothing=0.1)

    model.loss_function = of_label_smoothing
    return model


def with_a_loss_that_divides():
    model = llama()

    def of_sums(logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **kwargs):
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return losses / num_items_in_batch

    model.loss_function = of_sums
    return model


def with_a_mean_beside_the_loss():
    from transformers import BambaConfig, BambaForCausalLM

    sizes = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    config = BambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attn_layer_indices=[0], z_loss_coefficient=0.25, **sizes,
    )  # fmt: skip
    return BambaForCausalLM(config)


UNFIT = {
    with_a_loss_of_its_own: (
        "the loss function <lambda> of LlamaForCausalLM takes no shift_labels and no num_items_in_batch"
    ),
    with_a_loss_that_ignores_the_count: (
        "the loss function of_label_smoothing of LlamaForCausalLM does not divide by num_items_in_batch"
    ),
    with_a_mean_beside_the_loss: (
        "BambaForCausalLM adds a mean over tokens to its loss, without num_items_in_batch (z_loss_coefficient=0.25; 0 "
        "leaves it out)"
    ),
}


def encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    return T5ForConditionalGeneration(T5Config(**sizes))


def masked():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (llama, True),
        (with_lora, True),
        (lambda: llama().model, False),
        (refusing_counts, True),
        (dropping_loss_arguments, False),
        (with_a_loss_of_its_own, False),
        (with_a_loss_that_ignores_the_count, False),
        (with_a_loss_that_divides, True),
        (with_a_mean_beside_the_loss, False),
        (encoder_decoder, False),
        (masked, False),
        (lambda: nn.Linear(2, 2), False),
    ],
    ids=[
        "causal", "lora", "headless", "refusing counts", "dropping", "own loss", "ignoring the count", "dividing",
        "mean beside", "encoder-decoder", "masked", "plain",
    ],
)  # fmt: skip
def test_models_that_take_loss_arguments(build, expected):
    assert takes_loss_arguments(Within(build())) is expected
    assert why_loss_unfit(Within(build())) == UNFIT.get(build, "")


def test_loss_arguments_reach_the_loss_of_a_model():
    # A model in which tokens do not see each other stands for the attention that is not under test here.
    model = llama().double()
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    batch = make_batch(tokens=13)
    expected = model(**batch).loss
    losses = [model(**part).loss for part, _ in shard_all(batch, sharders(ring=2, ulysses=2))]
    torch.testing.assert_close(torch.stack(losses).mean(), expected, rtol=1e-6, atol=0)


# ---- several processes


def losses_of_two_data_ranks():
    rank = dist.get_rank()
    results = {}
    for name, ring, masked_out in (("even", 1, 0), ("uneven", 1, 9), ("cut", 2, 9), ("one without labels", 1, 13)):
        batches = [make_batch(seed=seed) for seed in (1, 2)]
        batches[1]["labels"][:, :masked_out] = -100
        logits = [torch.randn(2, 13, VOCABULARY, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
        group = sharders(ring, ranks=2 * ring, data_group=dist.group.WORLD)
        parts = shard_all(batches[rank], group)
        if ring == 1:
            actual = causal_loss(logits[rank], **loss_arguments(parts[0][0]))
        else:
            actual = mean_of_parts(logits[rank], parts)
        dist.all_reduce(actual)
        labels = torch.cat([batch["labels"] for batch in batches])
        results[name] = (float(actual) / 2, float(causal_loss(torch.cat(logits), labels=labels)))
    return results


def test_mean_loss_over_data_parallel_processes_is_the_true_mean():
    for results in run_in_processes(2, losses_of_two_data_ranks):
        for name, (actual, expected) in results.items():
            assert actual == pytest.approx(expected, rel=1e-6), name


def differing_batches():
    """What each process is told about batches that are the same or not."""
    rank = dist.get_rank()
    ids = torch.arange(12).view(2, 6)
    other = [ids, ids.flip(1)][rank]
    cases = {
        "same": {"input_ids": ids},
        "same embeddings": {"inputs_embeds": torch.ones(2, 6, 4)},
        "same, without ids": [torch.ones(3), "text"],
        "same, without tensors": "text",
        "other values": {"input_ids": ids + rank},
        "other order": {"input_ids": other},
        "other rows": {"input_ids": ids[: 1 + rank]},
        "other length": {"input_ids": ids[:, : 4 + rank]},
        "other shape": {"input_ids": [ids, ids.view(3, 4)][rank]},
        "other embeddings": {"inputs_embeds": torch.full((2, 6, 4), 1.0 + rank)},
        "other kind": [{"input_ids": ids}, {"inputs_embeds": torch.ones(2, 6, 4)}][rank],
        "other tensor in a list": [torch.ones(3) * rank],
        "tokens on one only": [{"input_ids": ids}, "text"][rank],
    }
    told = {}
    for name, batch in cases.items():
        try:
            check_same_batch(batch, dist.group.WORLD, 3)
            told[name] = None
        except ValueError as error:
            told[name] = str(error)
    return told


def test_processes_that_share_a_batch_must_have_got_the_same():
    told = run_in_processes(2, differing_batches)
    assert told[0] == told[1], "all processes must stop, or the others would wait"
    for name, message in told[0].items():
        if name.startswith("same"):
            assert message is None, name
        else:
            assert message is not None, name
            assert "data-parallel rank 3 got different batches" in message
            assert "data_parallel_rank of trainer.strategy" in message


# ---- streams


class Stream(IterableDataset):
    """Numbers from 0, divided over workers."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(torch.arange(first, self.length, step))


class SizedStream(Stream):
    def __len__(self):
        return self.length


def numbers(batches):
    return [batch.tolist() for batch in batches]


@slow_if(lambda num_workers, length: num_workers and length != 29)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("length", [24, 29, 3])
def test_every_rank_reads_its_batches_of_a_stream(num_workers, length):
    def loader():
        return DataLoader(Stream(length), batch_size=2, num_workers=num_workers)

    everything = numbers(loader())
    parts = [numbers(split_iterable(loader(), rank, 3)) for rank in range(3)]
    rounds = len(everything) // 3
    assert [len(part) for part in parts] == [rounds] * 3, "equally many, or some would wait for the others"
    assert [part[n] for n in range(rounds) for part in parts] == everything[: 3 * rounds]


def test_split_loader_is_like_its_loader():
    loader = DataLoader(SizedStream(10), batch_size=2, num_workers=1, persistent_workers=True)
    split = split_iterable(loader, 1, 2)
    assert len(split) == 5 // 2
    assert (split.dataset, split.batch_size) == (loader.dataset, 2)
    assert numbers(split) == numbers(split) == [[2, 3], [6, 7]]
    assert split._iterator is loader._iterator is not None
    split._iterator = None  # as Lightning does when it is done
    assert loader._iterator is None
    with pytest.raises(TypeError):
        len(split_iterable(DataLoader(Stream(10)), 1, 2))


def test_state_of_a_loader_is_kept():
    class Stateful(DataLoader):
        state = 0

        def state_dict(self):
            return {"state": self.state}

        def load_state_dict(self, state):
            self.state = state["state"]

    from lightning.fabric.utilities.types import _Stateful

    loader = Stateful(Stream(8))
    split = split_iterable(loader, 0, 2)
    assert isinstance(split, _Stateful)
    split.load_state_dict({"state": 5})
    assert loader.state == 5
    assert split.state_dict() == {"state": 5}
    assert not isinstance(split_iterable(DataLoader(Stream(8)), 0, 2), _Stateful)


def test_other_loaders_pass():
    loaders = [DataLoader(TensorDataset(torch.ones(4))), [torch.ones(2)], DataLoader(Stream(4))]
    assert [split_iterable(loader, 0, count) for loader, count in zip(loaders, (2, 2, 1), strict=True)] == loaders


def test_workers_are_seeded_by_the_data_they_share(monkeypatch):
    def seeds(loader):
        return None if loader.worker_init_fn is None else loader.worker_init_fn.keywords["rank"]

    def seeded(dataset, rank, count):
        loader = DataLoader(dataset)
        seed_workers(loader, seeding_rank(loader, rank, count))
        return loader

    assert seeds(seeded(Stream(8), 1, 2)) is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    assert seeds(seeded(Stream(8), 1, 2)) == 0
    assert seeds(seeded(Stream(8), 1, 1)) == 1
    loader = seeded(TensorDataset(torch.ones(4)), 3, 4)
    assert seeds(loader) == 3
    seed_workers(loader, 4)
    assert seeds(loader) == 3, "what is set stays"


class Groups(Dataset):
    """The process group of the worker, and whether `begin` was called in it."""

    begun = False

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return os.getpgid(0), self.begun


def begin(worker):
    get_worker_info().dataset.begun = True


@pytest.mark.parametrize("init", [None, begin])
def test_workers_leave_the_process_group_to_which_launchers_send_signals(init):
    loader = DataLoader(Groups(), num_workers=1, worker_init_fn=init)
    for _ in range(2):
        shield_workers(loader)
        ((group, begun),) = loader
        assert group.item() not in (0, os.getpgid(0)) and begun.item() is (init is not None)
    here = DataLoader(Groups())
    shield_workers(here)
    assert here.worker_init_fn is None


class DataRankOne(SingleDeviceStrategy):
    """One process that is given the loaders of the second of three data-parallel ranks."""

    def process_dataloader(self, dataloader):
        return split_iterable(dataloader, 1, 3)


class Listening(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen = {"train": [], "val": [], "predict": []}

    def training_step(self, batch):
        self.seen["train"].append(batch.tolist())
        return self.weight * batch.sum()

    def validation_step(self, batch):
        self.seen["val"].append(batch.tolist())

    def predict_step(self, batch):
        self.seen["predict"].append(batch.tolist())
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
MINE = [[2, 3], [8, 9], [14, 15]]


@slow_if(lambda num_workers, settings: num_workers and settings)
@pytest.mark.parametrize(
    ("stream", "settings", "expected"),
    [
        (Stream, {}, MINE + MINE),
        (SizedStream, {}, MINE + MINE),
        (Stream, {"limit_train_batches": 2}, MINE[:2] + MINE[:2]),
        (SizedStream, {"limit_train_batches": 0.5}, MINE[:1] + MINE[:1]),
        (Stream, {"max_steps": 4, "reload_dataloaders_every_n_epochs": 1}, [*MINE, MINE[0]]),
    ],
    ids=["stream", "sized", "limit", "fraction", "reload"],
)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_lightning_trains_on_a_split_stream(stream, settings, expected, num_workers):
    def loader():
        return DataLoader(stream(22), 2, num_workers=num_workers, persistent_workers=num_workers > 0)

    module = Listening()
    trainer = Trainer(
        accelerator="cpu", strategy=DataRankOne(device="cpu"), **QUIET,
        **{"max_epochs": 2, "num_sanity_val_steps": 0, **settings},
    )  # fmt: skip
    trainer.fit(module, loader(), loader())
    assert module.seen["train"] == expected
    assert module.seen["val"][:3] == MINE
    assert isinstance(trainer.train_dataloader, SplitLoader)
    trainer.predict(module, loader())
    assert module.seen["predict"] == MINE


class DividedStream(Stream):
    """Numbers of one process only."""

    def __iter__(self):
        return iter(torch.arange(dist.get_rank(), self.length, dist.get_world_size()))


def streams_of_two_data_ranks():
    rank = dist.get_rank()
    told = {}
    for name, dataset in (("same", Stream(8)), ("divided", DividedStream(8))):
        try:
            told[name] = numbers(split_iterable(DataLoader(dataset, batch_size=2), rank, 2, dist.group.WORLD))
        except ValueError as error:
            told[name] = str(error)
    return told


def test_streams_that_are_divided_already_are_refused():
    told = run_in_processes(2, streams_of_two_data_ranks)
    assert [answer["same"] for answer in told] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    for answer in told:
        assert "the dataset DividedStream gives data-parallel processes different batches" in answer["divided"]
        assert "use_distributed_sampler=False" in answer["divided"]
        assert "\n" not in answer["divided"]
