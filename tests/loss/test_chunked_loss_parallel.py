"""The loss in chunks, in several processes, against one process that computes all logits at once.

Few optimizer steps of sequences of 45 tokens, logits of 5 tokens at a time. The bound is that of the other comparisons
of processes (`test_parallel_training`): 1e-5, relative, for losses, norms, whole gradients and weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch import Callback
from support.families import FAMILIES
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput
from typing_extensions import override

from lightning_memo.loss.lazy_logits import LazyLogits
from lightning_memo.utils.find_layers import find_hugging_face

BOUND = 1e-5
TENSOR, SEQUENCE = {"tensor_parallel_size": 2, "sequence_parallel": False}, {"tensor_parallel_size": 2}


class SeesLogits(Callback):
    """Records the head's outputs, and fails if the logits of all tokens are computed at once."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {"heads": set()}
        self._materialize = LazyLogits.materialize

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        head = find_hugging_face(pl_module)[0].get_output_embeddings()
        head.register_forward_hook(lambda module, args, output: self.notes["heads"].add(type(output).__name__))
        LazyLogits.materialize = self._refuse

    def _refuse(self, logits: Any = None) -> Any:
        raise AssertionError("whole logits")

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        LazyLogits.materialize = self._materialize


def lora_on_head(**sizes: Any) -> nn.Module:
    import peft

    targets = ["q_proj", "lm_head"]
    adapters = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(FAMILIES["llama_gqa"].build(**sizes), adapters)


QUICK = [(2, "llama_tied", SEQUENCE)]


class OwnLoss(nn.Module):
    """A loss from logits, as users write it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> CausalLMOutput:
        logits = self.model(input_ids=input_ids).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        divided = isinstance(self.model.lm_head.weight, DTensor)  # then the loss of unchunked logits is a DTensor too
        return CausalLMOutput(loss=loss.full_tensor() if divided else loss)


def own_loss(**sizes: Any) -> nn.Module:
    return OwnLoss(FAMILIES["llama_gqa"].build(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "family", "settings"),
    [
        (2, "llama_gqa", TENSOR),
        (2, "llama_tied", TENSOR),
        (2, "llama_gqa", SEQUENCE),
        (2, "llama_tied", SEQUENCE),
        (2, lora_on_head, SEQUENCE),
        (2, "llama_gqa", {"context_parallel_size": 2}),
        (2, "llama_gqa", {"zero_stage": 3}),
        (2, "llama_tied", {"zero_stage": 3}),
        (4, "llama_gqa", SEQUENCE | {"context_parallel_size": 2}),
        (4, "llama_tied", SEQUENCE | {"zero_stage": 3}),
    ],
)
def test_equals_one_process_with_all_logits(size: int, family: Any, settings: dict[str, Any]) -> None:
    run = Run(family=family, tokens=45, accumulate=2, clip=0.5, steps=2, layers=2)
    chunked = train_together(size, run, {"alpha": 0.5, "loss_chunk_tokens": 5} | settings, watch=SeesLogits)
    assert chunked.notes["heads"] == [{"LazyLogits"}] * size
    errors = chunked.worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


@slow_if(lambda settings: settings == {"zero_stage": 0})
@pytest.mark.parametrize("settings", [{"zero_stage": 0}, {"zero_stage": 3}, TENSOR])
def test_loss_of_a_users_own(settings: dict[str, Any]) -> None:
    run = Run(family=own_loss, tokens=45, ignore=0.0, steps=2, layers=2)
    chunked = train_together(2, run, {"alpha": 0.5, "loss_chunk_tokens": 5} | settings, watch=SeesLogits)
    errors = chunked.worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors
