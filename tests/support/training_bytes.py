"""Predicts the sizes that a training run of a Hugging Face model measures, from the shape of the model."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.estimate.saved_tensors import ElementBytes, layer_activations
from lightning_memo.estimate.slice_settings import saved_bytes
from lightning_memo.estimate.step_buffers import HuggingFaceStep
from lightning_memo.planner.token_slices import slot_bytes
from lightning_memo.shapes.model_shape import ModelShape
from support.alpha_plans import slices_at


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Sizes of a step, with their names in `LayerCosts`. All layers are equal."""

    input_bytes: tuple[int, ...]
    attention_bytes: tuple[int, ...]
    other_bytes: tuple[int, ...]
    fixed_device_bytes: int
    transient_device_bytes: int
    backward_device_bytes: int


def step_bytes(shape: ModelShape, *, sizes: ElementBytes, tokens: int) -> StepBytes:
    """Predict what the first step of a model with Llama layers and AdamW measures on one device.

    Args:
        shape: Shape of the model.
        sizes: Sizes of elements.
        tokens: Number of tokens of the batch, which is one sequence.

    Raises:
        ValueError: The model has other layers.
    """
    step = HuggingFaceStep(shape=shape, sizes=sizes, tokens=tokens)
    kept = layer_activations(shape, sizes=sizes)
    others = tokens * kept.others
    return StepBytes(
        input_bytes=(tokens * kept.input,) * shape.layers,
        attention_bytes=(tokens * kept.attention,) * shape.layers,
        other_bytes=(others,) * shape.layers,
        fixed_device_bytes=step.state_bytes,
        transient_device_bytes=step.outside_bytes,
        backward_device_bytes=max(step.layers_bytes - others, 0),
    )


def slot_bytes_by_alpha(shape: ModelShape, *, sizes: ElementBytes, tokens: int, alpha: float) -> int:
    """Return the size of a rounding buffer, including alignment, by the code that training uses.

    Args:
        shape: Shape of the model.
        sizes: Sizes of elements.
        tokens: Number of tokens of the batch.
        alpha: Fraction of the tokens whose activations are swapped.
    """
    saved = list(saved_bytes(shape, sizes=sizes, tokens=tokens))
    return slot_bytes(saved, tokens, slices_at(tokens, alpha))
