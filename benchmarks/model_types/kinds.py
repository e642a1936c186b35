"""The kinds of models for which transformers registers types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Kind:
    """A task of transformers' auto classes.

    Attributes:
        title: Heading of the kind on the page.
        mapping: Name of the mapping from model types to classes.
        auto_class: Name of the class that makes the models.
    """

    title: str
    mapping: str
    auto_class: str

    @property
    def types(self) -> tuple[str, ...]:
        """The model types that the installed transformers registers."""
        return tuple(getattr(modeling_auto, self.mapping))

    def build(self, config: transformers.PreTrainedConfig) -> Any:
        """Returns a model with random weights."""
        return getattr(transformers, self.auto_class).from_config(config)


KINDS = {
    "causal": Kind("Causal language models", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "masked": Kind("Masked language models", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "seq2seq": Kind(
        "Sequence-to-sequence models", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"
    ),
    "image-text": Kind(
        "Image-text-to-text models", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "AutoModelForImageTextToText"
    ),
}
