"""Tensors that a mixture of experts saves for its backward: router, experts and shared experts.

Experts run as grouped products, which transformers uses by default: a row for each pair of a token and a chosen expert,
sorted by expert. The sums over all experts do not depend on how evenly they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_memo.estimate.inputs.precision_bytes import BF16, FP32, ElementBytes
from lightning_memo.estimate.memory.saved_tensor import SavedTensor
from lightning_memo.shapes.model_shape import ModelShape

INT64 = 8
_BOOL = 1
GPT_OSS_TENSORS = ("gate", "up", "clamped gate", "sigmoid", "activated gate", "up + 1", "activated")


def saved_by_experts(shape: ModelShape, sizes: ElementBytes, tensor_parallel: int) -> Iterator[SavedTensor]:
    """Yield the tensors that the feed-forward of a mixture saves, without those of the norm before it.

    Args:
        shape: Shape of the layer.
        sizes: Sizes of elements.
        tensor_parallel: Number of tensor-parallel devices. Each has rows for its own experts, and routes the tokens of
            all, for which it also has the shared experts.
    """
    for tensor in (*_router(shape, sizes), *_shared(shape, sizes)):
        yield replace(tensor, width=tensor.width * tensor_parallel)
    yield from _rows(shape, sizes)


def readers_of_norm(shape: ModelShape) -> list[str]:
    """Names of the products that read the output of the norm before the feed-forward. Rows of experts are copies."""
    if shape.experts == 1:
        return ["gate", "up"]
    layer = shape.expert_layer
    shared = ("shared gate", "shared up") if layer.shared_ffn else ()
    return ["router", *shared, *(("gate of the shared",) if layer.shared_gate else ())]


def _rows(shape: ModelShape, sizes: ElementBytes) -> Iterator[SavedTensor]:
    """Grouped products are not part of autocast: they read the type of the hidden states."""
    layer, chosen = shape.expert_layer, shape.active_experts
    yield SavedTensor("token of each row", chosen, INT64)
    yield SavedTensor("order of rows", chosen, INT64)
    if layer.router == "gpt_oss":
        yield SavedTensor("expert of each row", chosen, INT64)  # for its bias
    yield SavedTensor("rows", chosen * shape.hidden, sizes.stream)
    for name in GPT_OSS_TENSORS if layer.router == "gpt_oss" else ("gate", "activated gate", "up", "activated"):
        yield SavedTensor(name, chosen * shape.ffn, sizes.stream)
    yield SavedTensor("outputs of rows", chosen * shape.hidden, sizes.stream)
    yield SavedTensor("weights of rows", chosen, _weight_bytes(shape, sizes))
    yield SavedTensor("rows in the order of tokens", chosen, INT64)


def _shared(shape: ModelShape, sizes: ElementBytes) -> Iterator[SavedTensor]:
    layer = shape.expert_layer
    if layer.shared_ffn:
        for name in ("gate", "activated gate", "up", "activated"):
            yield SavedTensor(f"shared {name}", layer.shared_ffn, sizes.product)
    if layer.shared_gate:
        yield SavedTensor("shared gate's output", 1, sizes.product)
        yield SavedTensor("shared output", shape.hidden, sizes.product)


def _weight_bytes(shape: ModelShape, sizes: ElementBytes) -> int:
    """Size of the weight of a chosen expert."""
    others = {"softmax_fp32": FP32, "chosen_softmax": sizes.stream, "sigmoid": _score_bytes(sizes)}
    return others.get(shape.expert_layer.router, sizes.product)


def _score_bytes(sizes: ElementBytes) -> int:
    """Size of a "sigmoid" router's scores: in fp32, which autocast changes."""
    return FP32 if sizes.stream == sizes.product else sizes.product


def _router(shape: ModelShape, sizes: ElementBytes) -> Iterator[SavedTensor]:
    layer, chosen = shape.expert_layer, shape.active_experts
    kind, score = layer.router, _score_bytes(sizes) if layer.router == "sigmoid" else FP32
    if kind == "sigmoid":
        if sizes.product == sizes.stream == BF16:
            yield SavedTensor("router's input in fp32", shape.hidden, FP32)
        yield SavedTensor("best of groups", 2 * layer.groups, INT64)
        yield SavedTensor("chosen groups", layer.chosen_groups, INT64)
        yield SavedTensor("experts of other groups", shape.experts, _BOOL)
    if kind in ("chosen_softmax", "gpt_oss"):
        yield SavedTensor("weights of experts", chosen, FP32 if kind == "chosen_softmax" else sizes.product)
    else:
        yield SavedTensor("probabilities", shape.experts, score)
    yield SavedTensor("chosen experts", chosen, INT64)
    if layer.normalized and kind not in ("chosen_softmax", "gpt_oss"):
        yield SavedTensor("sum of weights", 1, score)
        yield SavedTensor("weights of experts", chosen, score)
