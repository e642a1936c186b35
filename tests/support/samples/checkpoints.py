"""Models that are sharded, and the checkpoints made of them."""

from __future__ import annotations

from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_memo.parallel.sharded_checkpoint import (
    optimizer_state,
    sharded_model_state,
)

STEPS = 3


def shard(model, mesh, how):
    if mesh["tp"].size() > 1:
        columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
        for layer in model.model.layers:
            for name, child in layer.named_modules():
                style = {**dict.fromkeys(columns, ColwiseParallel), **dict.fromkeys(rows, RowwiseParallel)}
                if (leaf := name.rpartition(".")[2]) in style:
                    parallelize_module(child, mesh["tp"], style[leaf]())
    if how is not None:
        cut = replicate if how == "replicate" else fully_shard
        for layer in model.model.layers:
            cut(layer, mesh=mesh["dp_cp"])
        cut(model, mesh=mesh["dp_cp"])


def checkpoint_of(module, optimizer, **rest):
    states = {"state_dict": sharded_model_state(module), "optimizer_states": [optimizer_state(module, optimizer)]}
    return {**states, "global_step": STEPS, "hyper_parameters": {"a": [1, 2]}, **rest}
