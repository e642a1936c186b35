"""Adapters on the embedding of a pipeline's first stage."""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
from support.families import FAMILIES
from support.parallel_training import MODELS, Run, train_alone, train_together
from support.processes import ProcessError
from support.samples.configurations import BOUND
from torch import nn

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 7]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


def _adapted(family: str, kind: str, **sizes: Any) -> nn.Module:
    adapters = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[kind])
    return peft.get_peft_model((MODELS.get(family) or FAMILIES[family].build)(**sizes), adapters)


def run_of(family: str, kind: str, **other: Any) -> Run:
    return Run(family=functools.partial(_adapted, family, kind), tokens=45, batch=4, layers=4, clip=0.5, **other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "lora"), ("llama", "tokens"), ("llama", "saved"), ("llama_tied", "lora"), ("llama_tied", "saved")],
)
@pytest.mark.parametrize("settings", [{}, {"virtual_pipeline_size": 2}, {"zero_stage": 1}], ids=str)
def test_adapters_on_the_embedding_train_as_in_one_process(family: str, kind: str, settings: dict[str, Any]) -> None:
    run, processes = run_of(family, kind, accumulate=2), 4 if "zero_stage" in settings else 2
    together = train_together(processes, run, {"pipeline_parallel_size": 2, "alpha": 0.5} | settings)
    errors = together.worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


def test_trained_tokens_of_a_tied_embedding_are_refused_in_one_line_on_all_stages() -> None:
    with pytest.raises(ProcessError) as caught:
        train_together(2, run_of("llama_tied", "tokens"), {"pipeline_parallel_size": 2})
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        last = error.strip().splitlines()[-1]
        assert "has weights in model.base_model.model." in last and "that two modules have" in last, last
