"""Models with vision towers train in two processes as in one: ring attention, Ulysses attention, and slices.

Each run has two steps, of which the first is profiled. Losses are those of plain training within 1e-5, relative, and so
are all gradients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch
from support.architectures import vision_models
from support.architectures.vision_models import images_in_text
from support.devices import skip_ring_on_cuda
from support.divided_training import RING, ULYSSES, check, train
from support.harness import Batch
from support.markers.slow import slow_if
from support.processes import run_in_processes
from torch import nn

from lightning_memo.parallel.batches.packed_documents import separate_documents
from lightning_memo.parallel.batches.shard_batch import BatchSharder

MODELS = ("qwen2_5_vl", "qwen3_vl", "gemma3")
# Tokens, images of each row, and padding.
ROWS = {
    "odd": (61, (1, 2), 0),
    "long": (301, (3, 0), 40),
    "text": (61, (0, 0), 0),
    "padded": (60, (2, 1), 5),
}


def build(model: str, trained: str = "all") -> nn.Module:
    built: Any = getattr(vision_models, model)()
    if trained == "text":
        tower = built.model.vision_tower if model == "gemma3" else built.model.visual
        tower.requires_grad_(False)
    if trained == "adapters":
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)
        return peft.get_peft_model(built, adapters)
    return built


def data_of(model: str, rows: str, steps: int = 2) -> list[Batch]:
    tokens, images, padding = ROWS[rows]
    return [images_in_text(model, tokens, images, seed, padding) for seed in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 1.0}, {"alpha": 0.5, "slice_tokens": 16}],
    ids=["alpha 0", "alpha 0.5", "alpha 1", "slices"],
)
@pytest.mark.parametrize("model", MODELS)
def test_one_process(model: str, settings: dict[str, Any]) -> None:
    check(functools.partial(build, model), data_of(model, "padded"), settings, processes=1)


QUICK = {("qwen2_5_vl", "ring", "long", 0.5), ("gemma3", "ulysses", "long", 0.5)}
MORE = {("gemma3", "ring", "odd", 0.5), ("qwen3_vl", "ulysses", "odd", 1.0)}


# Every model, method and kind of rows, with one alpha after the other.
OTHERS = zip(itertools.product(MODELS, ("ring", "ulysses"), ROWS), itertools.cycle((0.0, 0.5, 1.0)), strict=False)
CASES = sorted(QUICK.union(MORE, ((*case, alpha) for case, alpha in OTHERS)))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method", "rows", "alpha"), CASES)
def test_two_processes(model: str, method: str, rows: str, alpha: float) -> None:
    settings = {"ring": RING, "ulysses": ULYSSES}[method] | {"alpha": alpha}
    skip_ring_on_cuda(settings)
    check(functools.partial(build, model), data_of(model, rows), settings)


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["attention", "hidden"])
@pytest.mark.parametrize("settings", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_slices_of_rows_that_processes_share(model: str, settings: dict[str, Any], stream_from_host: str) -> None:
    skip_ring_on_cuda(settings)
    sliced = {"alpha": 0.5, "slice_tokens": 32, "stream_from_host": stream_from_host}
    check(functools.partial(build, model), data_of(model, "long"), settings | sliced)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["text", "adapters"])
@pytest.mark.parametrize("model", MODELS)
def test_frozen_towers_and_adapters(model: str, trained: str) -> None:
    check(functools.partial(build, model, trained), data_of(model, "odd"), ULYSSES | {"alpha": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_accumulated_gradients(model: str, zero_stage: int) -> None:
    """Rows have images in some micro-batches only."""
    data = [*data_of(model, "odd"), *data_of(model, "text")]
    settings = ULYSSES | {"alpha": 0.5, "zero_stage": zero_stage}
    check(functools.partial(build, model), data, settings, accumulate=2)


def packed() -> Batch:
    """Return rows of two documents, with the positions in the text before those of three axes."""
    batch = images_in_text("qwen3_vl", 61, (2, 1))
    built: Any = vision_models.qwen3_vl()
    axes, _ = built.model.get_rope_index(batch["input_ids"], batch["mm_token_type_ids"], batch["image_grid_thw"])
    text = torch.cat([torch.arange(25), torch.arange(36)]).expand(1, 2, -1)
    del batch["attention_mask"]
    return batch | {"position_ids": torch.cat([text, axes])}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_packed_documents(model: str) -> None:
    check(functools.partial(build, model), [packed()] * 2, RING | {"alpha": 0.5})


def message_of(
    model: Callable[[], nn.Module], data: Sequence[Sequence[Batch]], size: int, settings: dict[str, Any]
) -> str:
    """Return the message that ends a training run of several processes, each group of which has its own data."""
    own = data[torch.distributed.get_rank() % len(data)]
    try:
        train(model, own, size, 1, settings)
    except ValueError as error:
        return str(error)
    return ""


@slow_if(lambda case_id: case_id != "images on one side")
@pytest.mark.parametrize(
    ("model", "rows", "settings", "message"),
    [
        (
            "gemma3",
            ("long",),
            ULYSSES | {"slice_tokens": 32, "stream_from_host": "hidden"},
            'set stream_from_host="none"',
        ),
        ("qwen3_vl", ("odd",), ULYSSES | {"layers": "visual.blocks"}, 'layers="model.model.language_model.layers"'),
        ("gemma3", ("odd", "text"), {}, "some data-parallel processes got a batch with images and others one without"),
    ],
    ids=["keys on the host", "layers of the tower", "images on one side"],
)
def test_refusals(model: str, rows: Sequence[str], settings: dict[str, Any], message: str) -> None:
    data = [data_of(model, name) for name in rows]
    for found in run_in_processes(2, message_of, functools.partial(build, model), data, 2, {"alpha": 0.5} | settings):
        assert message in found and "\n" not in found


def test_documents_by_positions_of_one_axis_are_refused() -> None:
    positions = torch.cat([torch.arange(25), torch.arange(36)]).expand(2, -1)
    with pytest.raises(ValueError, match=r"positions of this model have several axes \(M-RoPE\)"):
        separate_documents(vision_models.qwen2_5_vl(), {"position_ids": positions}, 2)


def test_images_are_not_put_among_divided_embeddings() -> None:
    sharder = BatchSharder(shards=2, ranks=1, takes_loss_arguments=True)
    with pytest.raises(ValueError, match="the batch has pixel_values, and the features of images have places among"):
        sharder.shard(images_in_text("gemma3", 60, (1, 1)))
