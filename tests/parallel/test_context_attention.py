"""Ring attention, all-to-all attention and both at once, against attention over the whole sequence in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.kernels.attention_reference import Inputs, attention, make_inputs, visible
from support.processes import run_in_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_memo.engine.attention.sliced_attention import attend
from lightning_memo.kernels import AttentionSpec, select_backend
from lightning_memo.kernels.fallback_kernels import Replay
from lightning_memo.parallel.batches.token_layout import Documents, TokenLayout, ring_chunks, zigzag
from lightning_memo.parallel.context_parallel import ContextAttention, ContextGroups, StateExchange, kernel_calls
from lightning_memo.parallel.parallel_sizes import choose_ulysses

OUT_BOUND = 1e-6
GRADIENT_BOUND = 5e-6
# Weights, each block's output or gradient and the sum are rounded to 8 bits: three errors of at most 2^-9.
BF16_BOUND = 2**-7

TOPOLOGIES = {"ring 2": (2, 1), "ring 4": (4, 1), "ulysses 2": (1, 2), "ulysses 4": (1, 4), "both": (2, 2)}
DOCUMENTS = ((0, 3, 40, 41, 90), (0, 64, 100))
SPECS = {
    "causal": AttentionSpec(),
    "full": AttentionSpec(causal=False),
    "scaled": AttentionSpec(scale=0.3),
    "window": AttentionSpec(window=20),
    "long window": AttentionSpec(window=70),
    "window of one": AttentionSpec(window=1),
    "lengths": AttentionSpec(lengths=(128, 37)),
    "an empty row": AttentionSpec(lengths=(0, 100)),
    "full lengths": AttentionSpec(causal=False, lengths=(61, 128)),
    "documents": AttentionSpec(documents=DOCUMENTS),
    "full documents": AttentionSpec(causal=False, documents=DOCUMENTS),
    "documents alike": AttentionSpec(documents=((0, 50, 77),) * 2),
    "all": AttentionSpec(window=9, lengths=(120, 70), documents=DOCUMENTS),
}


@cache
def context_groups(ring: int, ulysses: int, contiguous: bool = False) -> ContextGroups:
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return ContextGroups(
        mesh.get_group("ring") if ring > 1 else None,
        mesh.get_group("ulysses") if ulysses > 1 else None,
        StateExchange(dist.group.WORLD, dist.group.WORLD) if contiguous else None,
    )


def rank_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def layout_of(
    groups: ContextGroups, ring: int, ulysses: int, tokens: int, documents: Documents | None = None
) -> TokenLayout:
    return TokenLayout(
        tokens, ring, rank_of(groups.ring), ulysses, rank_of(groups.ulysses), contiguous=groups.contiguous,
        documents=documents,
    )  # fmt: skip


def whole(inputs: Inputs, spec: AttentionSpec) -> list[Tensor]:
    """Output and gradients of PyTorch's attention over all tokens, with an explicit mask."""
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    positions = range(q.shape[2])
    seen = visible(spec, q.shape[0], positions, positions)
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=spec.scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout)]


def parallel(
    ring: int, ulysses: int, inputs: Inputs, spec: AttentionSpec, contiguous: bool = False
) -> tuple[Tensor, list[Tensor], TokenLayout]:
    """Log-sum-exp, output and gradients of this process's tokens, and which these are."""
    groups = context_groups(ring, ulysses, contiguous)
    layout = layout_of(groups, ring, ulysses, inputs.q.shape[2], spec.documents)
    q, k, v, dout = (t[:, :, layout.layer_order()] for t in inputs)
    attention = ContextAttention(groups, select_backend)
    result = attention.forward(q, k, v, spec)
    gradients = attention.backward(dout, q, k, v, result, spec)
    assert [t.dtype for t in (result.out, *gradients)] == [q.dtype] * 4
    assert result.out.transpose(1, 2).is_contiguous()
    return result.lse, [result.out, *gradients], layout


def absolute_errors(
    ring: int, ulysses: int, spec: AttentionSpec, shapes: dict[str, int], contiguous: bool
) -> list[float]:
    """Largest differences of output, dq, dk, dv from the whole's."""
    inputs = make_inputs(**shapes)
    _, found, layout = parallel(ring, ulysses, inputs, spec, contiguous)
    expected = [t[:, :, layout.layer_order()] for t in whole(inputs, spec)]
    return [float((mine - theirs).abs().max()) for mine, theirs in zip(found, expected, strict=True)]


def check(topology: str, spec: AttentionSpec, contiguous: bool = False, **shapes: int) -> None:
    ring, ulysses = TOPOLOGIES[topology]
    shapes = {"queries": 128, "keys": 128} | shapes
    errors = run_in_processes(ring * ulysses, absolute_errors, ring, ulysses, spec, shapes, contiguous)
    for out, *gradients in errors:
        assert out <= OUT_BOUND
        assert max(gradients) <= GRADIENT_BOUND


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_attention_over_processes_is_that_of_the_whole_sequence(topology, spec):
    check(topology, spec, key_heads=2)


@pytest.mark.parametrize("topology", ["ring 2", "ring 4", "both"])
@pytest.mark.parametrize("spec", [name for name, spec in SPECS.items() if spec.documents is None])
def test_attention_over_contiguous_ranges(topology, spec):
    check(topology, SPECS[spec], contiguous=True, key_heads=2)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shapes",
    [
        {"heads": 4, "key_heads": 4},
        {"heads": 8, "key_heads": 2},
        {"heads": 4, "key_heads": 1, "queries": 64, "keys": 64},
        {"heads": 12, "key_heads": 6, "batch": 1},
        {"head": 20, "queries": 256, "keys": 256},
        {"head": 7, "batch": 3, "queries": 72, "keys": 72},
    ],
    ids=str,
)
def test_shapes(topology, shapes, causal):
    check(topology, AttentionSpec(causal=causal), **shapes)


# ---- half precision


def relative_errors(ring: int, ulysses: int, spec: AttentionSpec) -> list[tuple[float, float]]:
    """Squared distances from fp64 and squared norms of output, dq, dk, dv."""
    inputs = make_inputs(key_heads=2, queries=128, keys=128, dtype=torch.bfloat16)
    _, found, layout = parallel(ring, ulysses, inputs, spec)
    exact = [t[:, :, layout.layer_order()] for t in whole(Inputs(*(t.double() for t in inputs)), spec)]
    return [
        (float((mine.double() - truth).norm() ** 2), float(truth.norm() ** 2))
        for mine, truth in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", ["causal", "full", "all"])
def test_half_precision_is_as_near_to_fp64_as_its_roundings(topology, name):
    ring, ulysses = TOPOLOGIES[topology]
    by_rank = run_in_processes(ring * ulysses, relative_errors, ring, ulysses, SPECS[name])
    for of_tensor in zip(*by_rank, strict=True):
        distance, norm = (sum(numbers) ** 0.5 for numbers in zip(*of_tensor, strict=True))
        assert distance <= BF16_BOUND * norm


# ---- log-sum-exp


def lse_errors(ring: int, ulysses: int, spec: AttentionSpec) -> float:
    inputs = make_inputs(key_heads=2, queries=128, keys=128)
    found, _, layout = parallel(ring, ulysses, inputs, spec)
    q, k, v = (t.double() for t in inputs[:3])
    _, expected = attention(q, k, v, visible(spec, 2, range(128), range(128)), spec.scale)
    chunks = ring_chunks(range(128), ring, layout.ring_rank, spec.documents)
    positions = [position for chunk in chunks for position in chunk]
    expected = expected.chunk(ulysses, 1)[layout.ulysses_rank][:, :, positions]
    assert found.dtype == torch.float32
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    seen = expected != -torch.inf
    return float((found[seen] - expected[seen]).abs().max())


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", ["causal", "an empty row", "all"])
def test_log_sum_exp_is_over_all_keys(topology, name):
    ring, ulysses = TOPOLOGIES[topology]
    assert max(run_in_processes(ring * ulysses, lse_errors, ring, ulysses, SPECS[name])) <= 2e-6


# ---- what travels, and when


class Recorded:
    """A kernel, or a message under way, that notes when it is used."""

    def __init__(self, inner: Any, events: list[str], **names: str) -> None:
        self._inner, self._events, self._names = inner, events, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def noted(*args: Any) -> Any:
            self._events.append(self._names[name])
            return found(*args)

        return noted


def events_of_a_ring(
    ring: int, spec: AttentionSpec, dtype: torch.dtype = torch.float32
) -> tuple[list[str], list[str], list[tuple[int, torch.dtype]]]:
    """What happened in forward and backward, in order, and the numbers that each message held."""
    groups, events, messages = context_groups(ring, 1), [], []
    layout = layout_of(groups, ring, 1, 64)
    inputs = make_inputs(key_heads=2, queries=64, keys=64, dtype=dtype)
    q, k, v, dout = (t[:, :, layout.layer_order()] for t in inputs)
    batch_isend_irecv = dist.batch_isend_irecv

    def exchange(operations):
        sent, received = operations
        assert (sent.op, received.op) == (dist.isend, dist.irecv)
        assert sent.tensor.is_contiguous() and received.tensor.is_contiguous()
        messages.append((sent.tensor.numel(), sent.tensor.dtype))
        events.append({0: "send keys", 1: "send gradients"}[sent.tag])
        first, *rest = batch_isend_irecv(operations)
        return [Recorded(first, events, wait={0: "keys", 1: "gradients"}[sent.tag]), *rest]

    def select(*args):
        return Recorded(select_backend(*args), events, forward="kernel", backward="kernel")

    with mock.patch.object(dist, "batch_isend_irecv", exchange):
        ring_attention = ContextAttention(groups, select)
        result = ring_attention.forward(q, k, v, spec)
        of_forward = events.copy()
        events.clear()
        ring_attention.backward(dout, q, k, v, result, spec)
    return of_forward, events, messages


@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_travel_while_a_kernel_runs(ring, causal):
    for of_forward, _, _ in run_in_processes(ring, events_of_a_ring, ring, AttentionSpec(causal=causal)):
        assert of_forward == ["send keys", "kernel", "keys"] * (ring - 1) + ["kernel"]


def test_gradients_travel_behind_their_keys_and_come_home():
    for _, of_backward, _ in run_in_processes(4, events_of_a_ring, 4, AttentionSpec()):
        assert of_backward == [
            "send keys", "kernel", "keys",
            "send keys", "kernel", "send gradients", "keys",
            "send keys", "kernel", "gradients", "send gradients", "keys",
            "kernel", "gradients", "send gradients",
            "gradients",
        ]  # fmt: skip


def test_a_message_holds_the_key_heads_only_and_gradients_are_summed_in_fp32():
    """Keys and values of 2 heads, not one copy for each of the 4 query heads."""
    numbers = 2 * 2 * 2 * 32 * 8
    for _, _, messages in run_in_processes(2, events_of_a_ring, 2, AttentionSpec(), torch.bfloat16):
        assert messages == [(numbers, torch.bfloat16)] * 2 + [(numbers, torch.float32)]


def numbers_exchanged(heads: int, key_heads: int) -> list[int]:
    groups, sizes = context_groups(1, 4), []
    q, k, v, dout = make_inputs(1, heads, key_heads, 6, 6)
    all_to_all_single = dist.all_to_all_single

    def exchange(received, sent, group):
        assert sent.is_contiguous() and received.is_contiguous()
        sizes.append(sent.numel())
        return all_to_all_single(received, sent, group=group)

    with mock.patch.object(dist, "all_to_all_single", exchange):
        attention = ContextAttention(groups, select_backend)
        attention.backward(dout, q, k, v, attention.forward(q, k, v, AttentionSpec()), AttentionSpec())
    return sizes


@pytest.mark.parametrize(("heads", "key_heads", "sent"), [(8, 8, 8), (8, 4, 4), (8, 2, 4), (8, 1, 4), (24, 6, 12)])
def test_two_messages_each_way_with_as_few_copies_of_keys_as_serve(heads, key_heads, sent):
    for sizes in run_in_processes(4, numbers_exchanged, heads, key_heads):
        of_head = 6 * 8
        expected = [heads + 2 * sent, heads, 3 * heads + 2 * sent, heads + 2 * sent]
        assert sizes == [n * of_head for n in expected]


# ---- what a ring computes


def calls(spec: AttentionSpec, ring: int = 4, tokens: int = 64) -> list[list[int]]:
    """Kernel calls by rank and source."""
    chunks = [ring_chunks(range(tokens), ring, rank, spec.documents) for rank in range(ring)]
    return [[len(kernel_calls(spec, queries, keys)) for keys in chunks] for queries in chunks]


def test_a_plain_step_is_one_kernel_call_of_even_work():
    assert calls(AttentionSpec()) == calls(AttentionSpec(causal=False)) == [[1] * 4] * 4
    chunks = [list(zigzag(range(64), 4, rank)) for rank in range(4)]
    for queries in chunks:
        others = [kernel_calls(AttentionSpec(), queries, keys)[0] for keys in chunks if keys is not queries]
        work = {(b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in others}
        assert work == {16 * 8}
        assert not any(b.spec.causal for b in others)


def test_pairs_of_chunks_that_see_nothing_are_skipped():
    assert sum(map(sum, calls(AttentionSpec(lengths=(64, 9))))) == 8 * 9 // 2
    # Chunks of 8 tokens: every chunk sees its own tokens and the last 7 of the chunk before.
    assert sum(map(sum, calls(AttentionSpec(window=8)))) == 8 + 7
    # Two documents, each divided into 8 chunks that see the chunks before and themselves.
    assert sum(map(sum, calls(AttentionSpec(documents=((0, 32), (0, 32)))))) == 2 * (8 * 9 // 2)
    assert sum(map(sum, calls(AttentionSpec(lengths=(8, 3))))) == 8


# ---- refusals


def complaint(ring: int, ulysses: int, spec: AttentionSpec, shapes: dict[str, int], replay: bool) -> str:
    groups = context_groups(ring, ulysses)
    q, k, v, _ = make_inputs(**shapes)
    select = (lambda *args: Replay()) if replay else select_backend
    with pytest.raises(ValueError, match="attention") as refused:
        ContextAttention(groups, select).forward(q, k, v, spec)
    return str(refused.value)


@pytest.mark.parametrize(
    ("topology", "spec", "shapes", "replay", "reason"),
    [
        ("ring 2", AttentionSpec(dropout=0.1), {}, False, "attention dropout is 0.1"),
        ("ring 2", AttentionSpec(mask=torch.ones(24, 24, dtype=torch.bool)), {}, False, "no explicit mask"),
        ("ulysses 2", AttentionSpec(mask=torch.ones(24, 24, dtype=torch.bool)), {}, False, "no explicit mask"),
        ("ring 2", AttentionSpec(), {}, True, '("replay") gives none'),
        ("both", AttentionSpec(), {}, True, '("replay") gives none'),
        (
            "ulysses 4",
            AttentionSpec(),
            {"heads": 6, "key_heads": 6},
            False,
            "6 attention heads cannot be divided",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_line(topology, spec, shapes, replay, reason):
    ring, ulysses = TOPOLOGIES[topology]
    for text in run_in_processes(ring * ulysses, complaint, ring, ulysses, spec, shapes, replay):
        assert reason in text and "\n" not in text


def test_attention_without_groups_is_refused():
    with pytest.raises(ValueError, match="got none"):
        ContextAttention(ContextGroups(), select_backend)


def replayed_errors(ulysses: int) -> list[float]:
    groups = context_groups(1, ulysses)
    inputs = make_inputs(key_heads=2, queries=64, keys=64)
    spec = AttentionSpec(documents=((0, 20), (0, 33, 40)), lengths=(64, 50))
    layout = layout_of(groups, 1, ulysses, 64, spec.documents)
    q, k, v, dout = (t[:, :, layout.layer_order()] for t in inputs)
    attention = ContextAttention(groups, lambda *args: Replay())
    result = attention.forward(q, k, v, spec)
    found = [result.out, *attention.backward(dout, q, k, v, result, spec)]
    expected = [t[:, :, layout.layer_order()] for t in whole(inputs, spec)]
    return [float((mine - theirs).abs().max()) for mine, theirs in zip(found, expected, strict=True)]


def test_all_to_all_attention_takes_any_kernel():
    for out, *gradients in run_in_processes(2, replayed_errors, 2):
        assert out <= OUT_BOUND and max(gradients) <= GRADIENT_BOUND


def masked_errors(ring: int, ulysses: int, replay: bool) -> list[float]:
    """Errors of attention in which tokens 20 to 45 of the first row see each other, and earlier ones."""
    groups, inputs = context_groups(ring, ulysses), make_inputs(key_heads=2, queries=64, keys=64)
    seen = torch.ones(2, 1, 64, 64, dtype=torch.bool).tril()
    seen[0, :, 20:46, 20:46] = True
    documents = ((0, 20), (0, 33))  # by which tokens are laid out; the mask says what they see
    spec = AttentionSpec(causal=False, whole_mask=seen, documents=documents, lengths=(64, 50))
    layout = layout_of(groups, ring, ulysses, 64, documents)
    q, k, v, dout = (t[:, :, layout.layer_order()] for t in inputs)
    attention = ContextAttention(groups, (lambda *args: Replay()) if replay else select_backend)
    result = attention.forward(q, k, v, spec)
    found = [result.out, *attention.backward(dout, q, k, v, result, spec)]
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = F.scaled_dot_product_attention(*leaves, seen, enable_gqa=True)
    expected = [t[:, :, layout.layer_order()] for t in (out.detach(), *torch.autograd.grad(out, leaves, inputs.dout))]
    return [float((mine - theirs).abs().max()) for mine, theirs in zip(found, expected, strict=True)]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("topology", ["ring 2", "ulysses 2", "both"])
def test_masks_of_all_tokens(topology, replay):
    ring, ulysses = TOPOLOGIES[topology]
    for out, *gradients in run_in_processes(ring * ulysses, masked_errors, ring, ulysses, replay):
        assert out <= OUT_BOUND and max(gradients) <= GRADIENT_BOUND


# ---- sinks and caps


def sinks_and_caps_errors(ring: int, ulysses: int, spec: AttentionSpec) -> tuple[list[float], Tensor]:
    """Errors of the local output, dq, dk and dv, and the local part of the gradient of the sinks."""
    groups, inputs = context_groups(ring, ulysses), make_inputs(key_heads=2, queries=128, keys=128)
    layout = layout_of(groups, ring, ulysses, 128, spec.documents)
    own = layout.layer_order()
    leaves = [*(t[:, :, own].detach().requires_grad_() for t in inputs[:3]), SINKS.clone().requires_grad_()]
    out = attend(ContextAttention(groups, select_backend), *leaves[:3], replace(spec, sinks=leaves[3]))
    found = [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout[:, :, own])]
    expected = [t[:, :, own] for t in with_sinks_and_caps(inputs, spec)[:4]]
    return [float((mine - theirs).abs().max()) for mine, theirs in zip(found, expected, strict=False)], found[4]


def with_sinks_and_caps(inputs: Inputs, spec: AttentionSpec) -> list[Tensor]:
    """Output and gradients in fp64 of all tokens, the last one of the sinks: one more column without a value."""
    leaves = [t.double().detach().requires_grad_() for t in (*inputs[:3], SINKS)]
    q, k, v, sinks = leaves
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    positions = range(q.shape[2])
    scores = scores.masked_fill(~visible(spec, q.shape[0], positions, positions), -torch.inf)
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    out = weights @ v.repeat_interleave(2, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout.double())]


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("name", ["causal", "window", "all"])
@pytest.mark.parametrize("topology", ["ring 2", "ulysses 2", "both"])
def test_sinks_and_caps(topology, name, softcap):
    ring, ulysses = TOPOLOGIES[topology]
    spec = replace(SPECS[name], softcap=softcap)
    parts = run_in_processes(ring * ulysses, sinks_and_caps_errors, ring, ulysses, spec)
    for (out, *gradients), _ in parts:
        assert out <= OUT_BOUND and max(gradients) <= GRADIENT_BOUND
    expected = with_sinks_and_caps(make_inputs(key_heads=2, queries=128, keys=128), spec)[4]
    torch.testing.assert_close(sum(part[1].double() for part in parts), expected, rtol=1e-5, atol=1e-5)


# ---- names and sizes


def names() -> list[str]:
    return [ContextAttention(context_groups(*sizes), select_backend).name for sizes in ((4, 1), (1, 4), (2, 2))]


def test_names():
    assert run_in_processes(4, names)[0] == ["ring", "ulysses", "ulysses+ring"]


@pytest.mark.parametrize(
    ("context_size", "heads", "kv_heads", "expected"),
    [
        (8, 32, 8, 8),
        (16, 32, 8, 8),
        (8, 32, 4, 4),
        (6, 32, 8, 2),
        (8, 32, 1, 8),  # key heads are copied rather than not used
        (8, 28, 4, 4),
        (4, 9, 3, 1),
        (3, 9, 1, 3),
    ],
)
def test_heads_decide_how_many_processes_exchange_them(context_size, heads, kv_heads, expected):
    assert choose_ulysses(context_size, heads, kv_heads) == expected
