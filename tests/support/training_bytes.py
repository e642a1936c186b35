"""What a training run measures in bytes, predicted from the shape of its model: for models of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.estimate.inputs.precision_bytes import ElementBytes
from lightning_memo.estimate.memory.activations import layer_activations
from lightning_memo.estimate.memory.slice_settings import saved_bytes
from lightning_memo.estimate.memory.working_set import HuggingFaceStep
from lightning_memo.planner.token_slices import slice_tokens_by_alpha, slot_bytes
from lightning_memo.shapes.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Bytes of a step, by their names in `LayerCosts`; all layers are alike."""

    input_bytes: tuple[int, ...]
    attention_bytes: tuple[int, ...]
    other_bytes: tuple[int, ...]
    fixed_device_bytes: int
    transient_device_bytes: int
    backward_device_bytes: int


def step_bytes(shape: ModelShape, *, sizes: ElementBytes, tokens: int) -> StepBytes:
    """What the first step of a model with Llama's layers measures on one device, with AdamW.

    Args:
        shape: the model.
        sizes: Of elements.
        tokens: of the batch, which is one sequence.

    Raises:
        ValueError: other layers.
    """
    step = HuggingFaceStep(shape=shape, sizes=sizes, tokens=tokens)
    kept = layer_activations(shape, kernels="llama", sizes=sizes)
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
    """Bytes of a rounding buffer, alignment included, by the code that training asks.

    Args:
        shape: the model.
        sizes: see `step_bytes`.
        tokens: see there.
        alpha: fraction of the tokens of which everything is swapped.
    """
    saved = list(saved_bytes(shape, kernels="llama", sizes=sizes, tokens=tokens))
    return slot_bytes(saved, tokens, slice_tokens_by_alpha(tokens, alpha), "layer")
