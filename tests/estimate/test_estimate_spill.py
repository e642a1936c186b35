"""The disk in estimates: the planner decides what is written to it, as in training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import FUSED
from support.trainer_harness import batches, make_trainer

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.slot_layouts import BLOCK_BYTES
from lightning_memo.estimate import EstimateRequest, Parallelism, constants_of, estimate, load_cluster, load_model
from lightning_memo.estimate.planner_inputs import device_budget, estimated_layer_costs
from lightning_memo.models import CausalLM

K, GB = 1024, 10**9
TOKENS = 512
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 264,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS, "use_cache": False,
    "tie_word_embeddings": False,
}  # fmt: skip


def ask(**changes: Any) -> EstimateRequest:
    cluster = replace(
        load_cluster("h100"), host_bytes=128 * 2**30, disk_write_bandwidth=6.0 * GB, disk_read_bandwidth=10.0 * GB
    )
    request = EstimateRequest(
        shape=load_model("llama3_2_1b"), cluster=cluster, constants=constants_of("h100"), method="memo", gpus=1,
        seq_len=256 * K, batch_size=1, precision="bf16-true", disk_bytes=2**40,
    )  # fmt: skip
    return replace(request, fused_kernels=FUSED, **changes)


def train(folder: Path, host_bytes: int) -> Plan:
    """The plan of a step whose host memory is too small."""
    ids = torch.randint(0, 264, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    strategy = MemoStrategy(
        plan_memory=False,
        alpha=0.5,
        disk_path=str(folder),
        disk_memory="64MiB",
        host_memory=host_bytes,
        fused_kernels=FUSED,
    )
    trainer = make_trainer(strategy, max_steps=1, default_root_dir=str(folder))
    trainer.fit(CausalLM({"config": CONFIG}), batches([{"input_ids": ids, "labels": ids}]))
    return trainer.strategy.plan


def test_what_goes_to_the_disk_is_what_training_sends_there(tmp_path: Path) -> None:
    """Slots in training are aligned, and therefore some bytes larger."""
    trained = train(tmp_path, 7 * 2**20)
    shape = replace(
        load_model("llama_tiny"), layers=6, hidden=128, ffn=256, heads=4, kv_heads=4, head_dim=32, tied=False
    )
    request = ask(
        shape=shape, seq_len=TOKENS, precision="32-true", alpha=0.5, disk_bytes=64 * 2**20,
        constants=replace(constants_of("h100"), host_share=1.0),
        cluster=replace(ask().cluster, host_bytes=7 * 2**20),
    )  # fmt: skip
    answer = estimate(request, Parallelism())
    assert 0 < len(trained.swap.disk_calls) < trained.swap.swapped_calls
    assert answer.disk_bytes == pytest.approx(trained.swap.disk_bytes, abs=6 * BLOCK_BYTES)
    assert answer.host_bytes == pytest.approx(trained.swap.host_bytes, rel=0.01)


def test_a_disk_is_used_where_the_host_is_full_and_only_as_fast_as_it_is() -> None:
    without = estimate(ask(disk_bytes=0), Parallelism())
    answers = {
        speed: estimate(
            ask(cluster=replace(ask().cluster, disk_write_bandwidth=speed * GB, disk_read_bandwidth=speed * GB)),
            Parallelism(),
        )
        for speed in (0.01, 8.0, 80.0)
    }
    assert without.disk_bytes == 0 and answers[80.0].disk_bytes > 0
    alphas = [without.alpha, *(answers[speed].alpha for speed in (8.0, 80.0))]
    assert alphas == sorted(alphas) and alphas[0] < alphas[-1]
    assert answers[80.0].step_seconds <= without.step_seconds
    room = device_budget(ask(), Parallelism())
    assert all(answer.host_bytes <= room.host_bytes for answer in answers.values())


def test_a_disk_that_is_too_slow_is_waited_for() -> None:
    """If even inputs and attention outputs do not fit in host memory, the step waits for the disk."""
    cluster = replace(ask().cluster, host_bytes=24 * 2**30)
    disks = [
        replace(cluster, disk_write_bandwidth=speed, disk_read_bandwidth=speed) for speed in (100.0 * GB, 0.5 * GB)
    ]
    fast, slow = (estimate(ask(cluster=disk, alpha=0.0), Parallelism()) for disk in disks)
    assert fast.step_seconds is not None and slow.step_seconds is not None
    assert slow.disk_bytes > 0
    written = slow.disk_bytes / (0.5 * GB)
    assert slow.step_seconds > max(written, 1.2 * fast.step_seconds)
    assert any("for the disk" in limit for limit in slow.limits)
    free = estimate(ask(cluster=disks[1]), Parallelism())
    assert free.step_seconds is not None and free.storage is not None
    assert free.disk_bytes < slow.disk_bytes and free.step_seconds < slow.step_seconds  # it need not store as much
    assert estimate(replace(ask(cluster=cluster, alpha=0.0), disk_bytes=0), Parallelism()).status == "oohm"


def test_devices_of_a_node_share_its_disk() -> None:
    one, eight = ask(), ask(gpus=8, batch_size=8)
    parallel = Parallelism(dp=8, zero_stage=1)
    assert device_budget(eight, parallel).disk_bytes == device_budget(one, Parallelism()).disk_bytes // 8
    costs, shared = estimated_layer_costs(one, Parallelism()), estimated_layer_costs(eight, parallel)
    assert shared.disk_write_bytes_per_second == costs.disk_write_bytes_per_second / 8
    assert shared.disk_read_bytes_per_second == costs.disk_read_bytes_per_second / 8
    answer = estimate(replace(eight, cluster=replace(eight.cluster, host_bytes=2**38)), parallel)
    assert answer.disk_bytes > 0 and answer.disk_bytes % 8 == 0
