"""The search for the best parallelism, the reasons against the others, and the longest sequence."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from lightning_memo.estimate import (
    EstimateRequest,
    Parallelism,
    constants_of,
    estimate,
    load_cluster,
    load_model,
    longest,
    longest_with,
    search,
)
from lightning_memo.estimate.parallelism_search import candidate_parallelisms, step_parts

K = 1024


def ask(model="llama3_8b", cluster="h100", gpus=8, seq_len=128 * K, method="memo", batch_size=16, **more):
    return EstimateRequest(
        shape=load_model(model), cluster=load_cluster(cluster), constants=constants_of(cluster), method=method,
        gpus=gpus, seq_len=seq_len, batch_size=batch_size, **more,
    )  # fmt: skip


def sizes(answer):
    return answer.parallel.tp, answer.parallel.cp, answer.parallel.dp, answer.parallel.pp


# ---- candidates


def test_candidates_are_all_products_that_divide():
    request = ask(gpus=8)
    found = candidate_parallelisms(request, {"pp": 1})
    expected = {
        (tp, cp, 8 // tp // cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8
    }  # 8 key and value heads and a batch of 16: everything divides
    assert {(p.tp, p.cp, p.dp) for p in found} == expected
    assert all(p.devices == 8 and p.pp == 1 for p in found)
    assert {p.zero_stage for p in found if p.dp * p.cp > 1} == {0, 1, 2, 3}
    assert [p.zero_stage for p in found if p.dp * p.cp == 1] == [0]


def test_candidates_divide_heads_layers_sequence_and_batch():
    odd = ask(gpus=24, cluster="gh200", batch_size=6, seq_len=3 * K, precision="bf16-true")
    found = candidate_parallelisms(odd, {})
    assert {p.tp for p in found} == {1, 2, 4, 8}  # 3 does not divide the heads
    assert {p.cp for p in found} >= {1, 2, 3, 6}
    assert {p.dp for p in found} == {1, 2, 3, 6}
    assert {p.pp for p in found} == {1, 2, 4, 8}  # of 32 layers
    assert {p.zero_stage for p in found if p.pp > 1} == {0, 1, 2, 3}
    assert candidate_parallelisms(replace(odd, precision="bf16-mixed"), {}) == found


def test_forced_sizes_are_kept():
    found = candidate_parallelisms(ask(), {"tp": 2, "cp": 2, "zero_stage": 1, "pp": 1})
    assert found == [Parallelism(tp=2, cp=2, dp=2, zero_stage=1)]


@pytest.mark.parametrize(
    ("changes", "forced", "told"),
    [
        ({}, {"tp": 3}, "parallel.tp=3 does not divide gpus=8: give 1, 2, 4 or 8, or leave it out"),
        (
            {},
            {"tp": 4, "cp": 4, "pp": 1},
            "parallel.tp=4 x parallel.cp=4 = 16 does not divide gpus=8: give sizes whose product does, or leave one "
            "out",
        ),
        (
            {},
            {"tp": 2, "cp": 2, "dp": 1, "pp": 1},
            "parallel.tp=2 x parallel.cp=2 x parallel.dp=1 = 4 is not gpus=8: give sizes whose product is 8, or leave "
            "one out",
        ),
        (
            {"seq_len": 1001},
            {"cp": 8},
            "gpus=8, parallel.cp=8: no such parallelism is possible (8 does not divide the sequence, 1001): "
            "give parallel.cp=1, or seq_len=1000 or 1008",
        ),
        (
            {"batch_size": 3, "seq_len": 3 * K},
            {"dp": 2},
            "gpus=8, parallel.dp=2: no such parallelism is possible (2 does not divide the batch, 3): "
            "give parallel.dp=1, or batch_size=2 or 4",
        ),
        (
            {"gpus": 64},
            {"tp": 64, "pp": 1},
            "gpus=64, parallel.tp=64: no such parallelism is possible (64 does not divide the heads, 32): "
            "give parallel.tp=1, 2, 4 or 8",
        ),
        (
            {"gpus": 24},
            {"pp": 1},
            "gpus=24: no such parallelism is possible (3 does not divide the batch, 16; 3 does not "
            "divide the sequence, "
            "131072; 3 does not divide the heads, 32): "
            "give gpus=16 or 32, or batch_size=15 or 18, or seq_len=131064 or 131088",
        ),
    ],
)
def test_no_parallelism_is_told_with_what_would_do(changes, forced, told):
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        search(ask(**changes), forced)


@pytest.mark.parametrize(
    ("changes", "forced"),
    [
        *[({"gpus": gpus}, {"pp": 1}) for gpus in (16, 32)],
        *[({"gpus": 24, "batch_size": size}, {"pp": 1}) for size in (15, 18)],
        *[({"gpus": 24, "seq_len": tokens}, {"pp": 1}) for tokens in (131064, 131088)],
    ],
)
def test_what_would_do_does(changes, forced):
    assert candidate_parallelisms(ask(**changes), forced)


@pytest.mark.slow
def test_parallelisms_that_the_length_rules_out_are_told():
    prime = search(ask(seq_len=100_003), {"pp": 1})
    assert sizes(prime.best) == (1, 1, 8, 1) and not prime.alternatives
    (told,) = [limit for limit in prime.best.limits if limit.startswith("Not considered")]
    assert told == (
        "Not considered: parallelisms with TP x CP = 2, 4 or 8, which does not divide 100,003 tokens. "
        "They are possible with 100,000 or 100,008 tokens."
    )
    for tokens in (100_000, 100_008):
        ranking = search(ask(seq_len=tokens), {"pp": 1})
        assert len(ranking.alternatives) == 9
        assert not any("Not considered" in limit for limit in ranking.best.limits)


# ---- ranking


@pytest.mark.slow
def test_the_best_is_the_fastest_of_those_that_fit():
    request = ask()
    ranking = search(request, {"pp": 1})
    every = [estimate(request, p) for p in candidate_parallelisms(request, {"pp": 1})]
    fitting = [answer for answer in every if answer.status == "ok"]
    fastest = min(answer.step_seconds for answer in fitting)
    assert ranking.best.status == "ok"
    assert fastest <= ranking.best.step_seconds <= 1.001 * fastest


def test_alternatives_come_by_time_and_then_by_need():
    ranking = search(ask(model="gpt_13b", cluster="a800", gpus=16, seq_len=256 * K), {"pp": 1})
    answers = [alternative.estimate for alternative in ranking.alternatives]
    assert len({sizes(answer) for answer in answers} | {sizes(ranking.best)}) == len(answers) + 1
    fitting = [answer.step_seconds for answer in answers if answer.status == "ok"]
    lacking = [answer.device_bytes["total"] for answer in answers if answer.status == "oom"]
    assert fitting and lacking
    assert fitting == sorted(fitting) and lacking == sorted(lacking)
    order = {"ok": 0, "oom": 1, "oohm": 2}
    ranks = [order[answer.status] for answer in answers]
    assert ranks == sorted(ranks)


def test_one_stage_of_zero_stands_for_a_division_and_takes_no_more_memory_than_a_faster_one():
    request = ask(seq_len=64 * K)
    ranking = search(request, {"tp": 1, "cp": 8})
    assert not ranking.alternatives
    stages = [estimate(request, Parallelism(cp=8, zero_stage=stage)) for stage in range(4)]
    fitting = [stage for stage in stages if stage.status == "ok"]
    fastest = min(stage.step_seconds for stage in fitting)
    equal = [stage for stage in fitting if stage.step_seconds <= 1.001 * fastest]
    assert ranking.best.device_bytes["total"] == min(stage.device_bytes["total"] for stage in equal)


def test_where_nothing_fits_the_best_needs_least():
    ranking = search(ask(model="llama3_70b", gpus=8, seq_len=4096 * K, method="full_recompute"), {"pp": 1})
    assert ranking.best.status == "oom"
    assert ranking.best.step_seconds is None
    needs = [a.estimate.device_bytes["total"] for a in ranking.alternatives if a.estimate.status == "oom"]
    assert ranking.best.device_bytes["total"] <= min(needs)


# ---- reasons


def reasons(ranking):
    return {sizes(alternative.estimate): alternative.reason for alternative in ranking.alternatives}


def test_tensor_parallelism_over_the_network_is_told():
    told = reasons(search(ask(gpus=64, model="llama3_70b", cluster="gh200"), {"pp": 1, "dp": 1}))
    assert any("tensor-parallel traffic over the network" in reason for reason in told.values())
    inside = reasons(search(ask(gpus=8), {"pp": 1, "dp": 1}))
    slower = [reason for reason in inside.values() if "tensor-parallel" in reason]
    assert slower
    assert all("% slower: tensor-parallel traffic, " in reason for reason in slower)


def test_what_does_not_fit_names_the_largest_kind():
    ranking = search(ask(model="gpt_7b", cluster="a800", seq_len=4096 * K, method="full_recompute"), {"pp": 1})
    for alternative in ranking.alternatives:
        sizes_of = {kind: size for kind, size in alternative.estimate.device_bytes.items() if kind != "total"}
        largest = max(sizes_of, key=sizes_of.get)
        assert alternative.reason.startswith("device: ")
        assert f", {largest.replace('_', ' ')} " in alternative.reason


def test_a_host_that_is_full_is_told():
    told = reasons(search(ask(seq_len=1024 * K), {"pp": 1}))
    assert any(reason.startswith("host: ") and "GiB per node" in reason for reason in told.values())


@pytest.mark.parametrize(
    ("method", "pp"),
    [
        *[(m, 1) for m in ("memo", "full_recompute", "selective_checkpointing", "full_swap", "plain")],
        *[(m, 2) for m in ("memo", "full_recompute", "selective_checkpointing")],
    ],
)
def test_the_parts_of_a_step_are_all_of_it(method, pp):
    request = ask(model="gpt_7b", cluster="a800", seq_len=64 * K, method=method)
    forced = {"pp": pp}
    ranking = search(request, forced)
    for answer in [ranking.best, *[alternative.estimate for alternative in ranking.alternatives]]:
        if answer.status == "ok":
            parts = step_parts(request, answer)
            assert sum(parts.values()) == pytest.approx(answer.step_seconds, rel=0.02)
            assert all(seconds >= 0 for seconds in parts.values())


# ---- lengths


def test_the_longest_with_a_parallelism_fits_and_the_next_does_not():
    request, parallel = ask(model="gpt_7b", cluster="a800"), Parallelism(tp=4, cp=2, zero_stage=1)
    tokens = longest_with(request, parallel, 4 * K)
    assert tokens % (4 * K) == 0
    assert estimate(replace(request, seq_len=tokens), parallel).status == "ok"
    assert estimate(replace(request, seq_len=tokens + 4 * K), parallel).status != "ok"
    assert longest_with(request, parallel, 4 * K, above=tokens) is None
    assert longest_with(request, parallel, 4 * K, above=tokens - 1) == tokens


def test_lengths_are_multiples_of_what_divides_them():
    tokens = longest_with(ask(gpus=12, cluster="gh200"), Parallelism(cp=12, zero_stage=3), 1000)
    assert tokens % 3000 == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["memo", "full_recompute", "full_swap"])
def test_the_longest_is_that_of_the_best_parallelism(method):
    request = ask(method=method)
    tokens = longest(request, {"pp": 1}, 64 * K)
    each = [longest_with(request, p, 64 * K) or 0 for p in candidate_parallelisms(request, {"pp": 1})]
    assert tokens == max(each)
    assert search(replace(request, seq_len=tokens), {"pp": 1}).best.status == "ok"
    assert search(replace(request, seq_len=tokens + 64 * K), {"pp": 1}).best.status != "ok"


@pytest.mark.slow
def test_more_gpus_allow_longer_sequences():
    lengths = [longest(ask(gpus=gpus), {"pp": 1}, 16 * K) for gpus in (4, 8, 16)]
    assert lengths == sorted(set(lengths))


def test_there_may_be_no_longest():
    assert longest(ask(model="llama3_70b", gpus=1, batch_size=1), {}, K) is None


def test_progress_is_told():
    told = []
    search(ask(), {"pp": 1}, lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(len(told)))
    assert {total for _, total in told} == {len(told)}


@pytest.mark.slow
def test_a_search_of_64_gpus_takes_seconds():
    request = ask(model="llama3_70b", gpus=64)
    start = time.process_time()
    tokens = longest(request, {}, 4 * K)
    search(replace(request, seq_len=tokens), {})
    assert time.process_time() - start < 30
    start = time.process_time()
    estimate(request, Parallelism(tp=8, cp=8, zero_stage=3))
    assert time.process_time() - start < 2
