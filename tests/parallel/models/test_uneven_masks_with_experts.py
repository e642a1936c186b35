"""Processes that share experts get other masks, in other batches: layers are tried out and run as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures.mixtures import lopsided
from support.devices import DEVICE
from support.families import FAMILIES
from support.modes import JOINT
from support.parallel_training import Run, train_alone, train_together
from support.processes import run_in_processes
from support.samples.configurations import BOUND
from torch import Tensor, nn

from lightning_memo.engine.layers.token_sharing import TokenSharing
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.parallel.ranks import Ranks

Row = dict[str, Tensor]
EXPERTS = {"expert_parallel_size": 2}


def _is_masked(index: int) -> bool:
    """Whether a row is one of the second process, behind the first batch, which is profiled."""
    return index % 2 == 1 and index > 1


def padded_later(index: int, row: Row) -> Row:
    return _padded(index, row, lambda places, tokens: places < tokens - 7)


def padded_on_the_left_later(index: int, row: Row) -> Row:
    return _padded(index, row, lambda places, _: places >= 7)


def _padded(index: int, row: Row, valid: Callable[[Tensor, int], Tensor]) -> Row:
    places = torch.arange(len(row["labels"]))
    mask = (valid(places, len(places)) | torch.tensor(not _is_masked(index))).long()
    return row | {"attention_mask": mask, "labels": row["labels"].masked_fill(mask == 0, -100)}


def packed_later(index: int, row: Row) -> Row:
    places = torch.arange(len(row["labels"]))
    return row | {"position_ids": torch.where(places >= 20, places - 20, places) if _is_masked(index) else places}


def prefix_later(index: int, row: Row) -> Row:
    return row | {"prefix": torch.tensor(9 * _is_masked(index))}


def prefix_first(index: int, row: Row) -> Row:
    return row | {"prefix": torch.tensor(9 * (index % 2 == 1 and not _is_masked(index)))}


def _prefixed(**sizes: Any) -> nn.Module:
    """Return a model whose first tokens see each other: its mask is a tensor, and not causal, if there are any."""
    model = FAMILIES["mixtral"].build(**sizes)

    class Prefixed(type(model)):
        def forward(self, input_ids: Tensor, prefix: Tensor, **others: Any) -> Any:
            if prefix.any():
                tokens = input_ids.shape[1]
                inside = torch.arange(tokens, device=prefix.device) < prefix[:, None]
                causal = torch.ones(tokens, tokens, dtype=torch.bool, device=prefix.device).tril()
                others["attention_mask"] = (causal | (inside[:, None] & inside[:, :, None]))[:, None]
            return super().forward(input_ids, **others)

    model.__class__ = Prefixed
    return model


MASKS = (padded_later, padded_on_the_left_later, packed_later, prefix_later, prefix_first)
WAYS: dict[str, dict[str, Any]] = {
    "alpha": {"alpha": 0.5},
    "slices": {"slice_tokens": 20},
    "slices on the device": {"alpha": 0.5, "slice_tokens": 20, "stream_from_host": "none"},
    "states on the host": {"slice_tokens": 20, "stream_from_host": "hidden"},
    "kinds": {"device_memory": "2.2MiB"},
    "nested slices": {"alpha": 0.5, "test_mode": JOINT},
    "zero3": {"alpha": 0.5, "zero_stage": 3},
    "plain": {},
}
QUICK = {(padded_later, "alpha"), (prefix_later, "slices"), (prefix_first, "slices on the device")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "way"),
    # In one process as well, the first batch shows that keys and values cannot be on the host.
    [(change, way) for change in MASKS for way in WAYS if (change, way) != (prefix_first, "states on the host")],
)
def test_masks_on_one_process_only(change: Callable[[int, Row], Row], way: str) -> None:
    family = _prefixed if change in (prefix_later, prefix_first) else "mixtral"
    run = Run(family=family, tokens=60, layers=2, steps=4, change=change)
    errors = train_together(2, run, EXPERTS | WAYS[way]).worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "settings"),
    [
        ("qwen3_moe", 2, {}),
        pytest.param(lopsided, 2, {"slice_tokens": 20}, id="lopsided"),
        ("mixtral", 2, {"stream_from_host": "model", "slice_tokens": 20}),
        ("mixtral", 4, {"zero_stage": 3}),
        ("mixtral", 4, {"tensor_parallel_size": 2}),
        ("mixtral", 4, {"context_parallel_size": 2, "ulysses_size": 2}),
        ("mixtral", 4, {"context_parallel_size": 2, "ulysses_size": 2, "expert_parallel_size": 4}),
    ],
    ids=str,
)
def test_padding_of_any_length(family: Any, size: int, settings: dict[str, Any]) -> None:
    run = Run(family=family, tokens=60, batch=4, layers=2, steps=4, padded=True)
    errors = train_together(size, run, EXPERTS | {"alpha": 0.5} | settings).worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


def _agreed(shares_experts: bool) -> list[LayerTraits]:
    """Let the second process find that layers cannot be cut, and the first one that attention needs all tokens."""
    sharing = TokenSharing(ranks=Ranks(slice_group=dist.group.WORLD, shares_experts=shares_experts, world=True))
    rank = dist.get_rank()
    found = (LayerTraits(""), LayerTraits("its own reason" * rank), LayerTraits("", "" if rank else "its own reason"))
    return [sharing.agreed(traits, DEVICE) for traits in found]


def test_processes_that_share_experts_agree_on_slices() -> None:
    for rank, (neither, whole, nest) in enumerate(run_in_processes(2, _agreed, True)):
        assert (neither.unsliceable, neither.needs_full_attention, whole.needs_full_attention, nest.unsliceable) == (
            "",
            "",
            "",
            "",
        )
        elsewhere = "a process that shares experts with this one"
        assert whole.unsliceable == "its own reason" if rank else elsewhere in whole.unsliceable
        assert elsewhere in nest.needs_full_attention if rank else nest.needs_full_attention == "its own reason"
    for rank, (_, whole, nest) in enumerate(run_in_processes(2, _agreed, False)):
        assert (bool(whole.unsliceable), bool(nest.needs_full_attention)) == (rank == 1, rank == 0)
