"""Feed-forward of a mixture of experts: how its router chooses, and the experts that all tokens pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memo.artifacts.json_documents import check_range

RouterKind = Literal["softmax", "softmax_fp32", "chosen_softmax", "gpt_oss", "sigmoid"]
"""Router of a model family of Hugging Face, which determines the tensors that it saves.

- "softmax": probabilities of all experts in fp32; the weights of the chosen ones are cast back (Qwen3-MoE).
- "softmax_fp32": the same, with weights that stay in fp32 (Mixtral).
- "chosen_softmax": probabilities of the chosen experts only, in fp32 (GraniteMoE).
- "gpt_oss": the same in the type of the products; experts have biases and a clamped activation function.
- "sigmoid": scores in fp32, among which groups of experts are chosen first (DeepSeek-V3).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """What a mixture of experts has in addition to its experts.

    Raises:
        ValueError: A number is negative.
    """

    router: RouterKind = "softmax"
    normalized: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""

    groups: int = 1
    """Groups of experts of a "sigmoid" router."""

    chosen_groups: int = 1
    shared_ffn: int = 0
    """Width of the shared experts together, which process all tokens; 0 if there are none."""

    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by a gate of its own (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        check_range(self, {"groups": 1, "chosen_groups": 1})
