"""Device memory of a plan by category."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.plan import Plan
from lightning_memo.estimate.inputs.parallelism import Parallelism
from lightning_memo.estimate.inputs.precision_bytes import FP32
from lightning_memo.estimate.memory.activations import saved_tensors
from lightning_memo.estimate.memory.planned_step import PlannedCall, PlannedSlice, PlannedStep
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.request.training_methods import element_bytes, layer_kernels
from lightning_memo.estimate.step.device_bytes import gathered_bytes, logits_bytes
from lightning_memo.estimate.step.planner_inputs import has_known_step, known_step, restored_bytes_per_token
from lightning_memo.estimate.times.layer_products import layer_products
from lightning_memo.planner.storage.storage_plan_slices import stored_slices
from lightning_memo.planner.token_slices import Action, TokenRange, slice_tokens_by_alpha

# The layer saves queries and keys behind their rotary positions.
_ROTATED: Final = ("query", "key")


def bytes_of_plan(question: Question, parallel: Parallelism, plan: Plan) -> dict[str, int]:
    """Return the bytes of a plan by category, without the model state.

    Where the buffers of a layer are known, their sum is the peak of a step. Otherwise it is what the planner expects,
    which is an upper bound.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        plan: Plan of a training with this package, or of MEMO's.
    """
    swap = plan.swap
    kept = plan.costs.skeletal_bytes if swap.mode == "plain" else swap.kept_bytes
    working = plan.working_set_bytes - swap.buffer_bytes - kept
    if has_known_step(question) and question.sliced is None:
        if swap.mode == "plain" and element_bytes(question).stream != FP32:
            kept -= sum(plan.costs.input_bytes)  # the layer's norm saves a copy in fp32 instead
        step = PlannedStep(
            step=known_step(question, parallel),
            calls=_planned_calls(question, parallel, plan, kept),
            buffer_bytes=swap.buffer_bytes,
            plain=swap.mode == "plain",
        )
        working = step.peak_bytes - swap.buffer_bytes - kept + _restored_bytes(question, parallel, plan)
    return by_category(question, parallel, swap.buffer_bytes, kept, working, plan.costs.transient_device_bytes)


def _restored_bytes(question: Question, parallel: Parallelism, plan: Plan) -> int:
    """Bytes of compressed tensors that the backward of a slice restores at once."""
    if question.swap_precision == "exact" or plan.swap.mode == "plain":
        return 0
    slices = itertools.chain.from_iterable(_slices(plan, call) for call in range(plan.swap.calls))
    swapped = (part.tokens for part in slices if part.action is Action.SWAP)
    return max(swapped, default=0) * restored_bytes_per_token(question, parallel)


def by_category(
    question: Question, parallel: Parallelism, buffers: int, kept: int, working: int, outside: int
) -> dict[str, int]:
    """Return the device memory by category. Logits count only if the peak is outside the layers.

    Args:
        question: Question that was asked.
        parallel: Sizes of the parallelism.
        buffers: Bytes of the rounding buffers.
        kept: Bytes of activations that stay on the device.
        working: All other bytes.
        outside: Bytes of the peak outside the layers.
    """
    logits = round(logits_bytes(question, parallel)) if working == outside else 0
    return {
        "rounding_buffers": buffers,
        "activations": kept,
        "transients": working - logits,
        "logits": logits,
        "gathered": round(gathered_bytes(question, parallel)),
    }


def all_but_input(question: Question) -> frozenset[str]:
    """Return the names of all tensors that a layer saves, except its input."""
    return saved_names(question, "attention", "other")


def saved_names(question: Question, *kinds: str) -> frozenset[str]:
    """Return the names of the tensors of some kinds that a layer saves."""
    tensors = saved_tensors(question.shape, kernels=layer_kernels(question), sizes=element_bytes(question))
    return frozenset(tensor.name for tensor in tensors if tensor.kind in kinds)


def _planned_calls(question: Question, parallel: Parallelism, plan: Plan, kept: int) -> list[PlannedCall]:
    """All layer calls, which keep `kept` bytes of activations on the device in total."""
    calls: list[PlannedCall] = []
    for run in question.runs(parallel):
        slices = tuple(_planned_slices(run, plan, len(calls)))
        call = PlannedCall(slices=slices, kept_bytes=0, input_gradient=run.shape.input_gradient)
        calls += [call] * run.shape.layers
    shares = _kept_by_call(plan)
    return [replace(call, kept_bytes=round(kept * share)) for call, share in zip(calls, shares, strict=True)]


def _kept_by_call(plan: Plan) -> list[float]:
    """The share of each layer call in the bytes of activations that stay on the device."""
    costs, storage = plan.costs, plan.swap.storage
    kept = list(map(sum, zip(costs.attention_bytes, costs.other_bytes, strict=True)))
    if storage is not None and plan.storage_costs is not None:
        classes = zip(plan.storage_costs.classes, storage.calls, strict=True)
        of_class = [
            sum(size * stored.tokens(kind, "keep") for kind, size in zip(call.kinds, call.sizes, strict=True))
            for call, stored in classes
        ]
        kept = [of_class[number] for number in storage.call_classes]
    return [each / max(sum(kept), 1) for each in kept]


def _planned_slices(run: Question, plan: Plan, call: int) -> Iterator[PlannedSlice]:
    """The slices of a layer call, each with what it recomputes."""
    swap, tokens = plan.swap, plan.costs.tokens
    if swap.mode == "plain":
        yield PlannedSlice(tokens=tokens, kept=all_but_input(run))
        return
    for part in _slices(plan, call):
        kept = saved_names(run, "other") if part.action is Action.KEEP else frozenset()
        yield PlannedSlice(tokens=part.tokens, made=frozenset(_recomputed(run, part)), kept=kept)


def _slices(plan: Plan, call: int) -> tuple[TokenRange, ...]:
    swap, tokens = plan.swap, plan.costs.tokens
    if swap.storage is not None:
        return stored_slices(swap.storage, call, tokens)
    return slice_tokens_by_alpha(tokens, swap.alpha)


def _recomputed(question: Question, part: TokenRange) -> Iterator[str]:
    """Names of the saved tensors that a slice computes again. Outputs of stored products, if saved, are not copied."""
    if part.action is not Action.RECOMPUTE:
        return
    shape, kernels = question.shape, layer_kernels(question)
    known: set[str] = set()
    for product in layer_products(shape, kernels):
        stored = {product.name: product.role} if product.role not in _ROTATED else {}
        if adapters := product.adapters(shape):
            stored[adapters[0][0]] = f"within the adapter of {product.role}"
        if part.places is not None:
            known |= {tensor for name, tensor in stored.items() if part.place(name) is not None}
    dropped = part.places is not None and part.place("out") is None
    for tensor in saved_tensors(shape, kernels=kernels, sizes=element_bytes(question)):
        wanted = tensor.kind == "other" or (tensor.kind == "attention" and dropped)
        if wanted and tensor.name not in known:
            yield tensor.name
