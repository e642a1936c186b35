"""Rotary tables that depend on the sequence length are those of the whole batch, on every part of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.families import make_batch
from support.harness import EngineUnderTest, assert_close, loss_and_gradients
from support.parallel_training import MODELS, Run, Texts, train_alone, train_together
from support.processes import run_in_processes
from support.samples.configurations import BOUND, CONFIGURATIONS
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.swap_plan import StreamFromHost

# Frequencies change at 24 tokens; those of "dynamic" stay as long as sequences are between that and the longest so far.
LENGTHS = (45, 30, 17, 27, 50)
LAYERS = 3  # of which one is swapped; the third one of Gemma 3 has no window


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "configuration", "settings"),
    [
        ("llama_dynamic_rope", "cp2 ring", {}),
        ("llama_dynamic_rope", "cp2 x tp2+sp", {"slice_tokens": 5}),
        ("llama_dynamic_rope", "tp2+sp", {}),
        ("llama_dynamic_rope", "dp2 zero1", {"stream_from_host": "model", "slice_tokens": 8}),
        ("phi3_longrope", "cp2 ring", {"slice_tokens": 4, "stream_from_host": "hidden"}),
        ("phi3_longrope", "cp4 ulysses2 x ring2", {"alpha": 1.0}),
        ("gemma3_dynamic_rope", "cp2 ulysses", {"slice_tokens": 5}),
    ],
)
def test_trains_as_one_process(family: str, configuration: str, settings: dict[str, Any]) -> None:
    run = Run(family=family, lengths=LENGTHS, accumulate=2, steps=3, layers=LAYERS)
    size, of_configuration = CONFIGURATIONS[configuration]
    errors = train_together(size, run, {"alpha": 0.5} | of_configuration | settings).worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_dynamic_rope", "phi3_longrope"])
def test_packed_documents_go_by_the_longest_of_the_batch(family: str) -> None:
    run = Run(family=family, lengths=(45, 60, 33), packed=True, steps=3, layers=LAYERS)  # documents of 19 to 40 tokens
    size, settings = CONFIGURATIONS["cp2 ring"]
    errors = train_together(size, run, settings | {"alpha": 0.5}).worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


class Evaluated(LanguageModel):
    """Records the losses of all stages."""

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.keep(self.loss(batch))


def losses_of_fit(family: str, strategy: dict[str, Any] | None) -> list[float]:
    """Losses of training and validation in turn, on batches of other lengths; plain Lightning without settings."""
    module = Evaluated(Run(family=family, layers=LAYERS).build, lr=1e-3)
    trainer = make_trainer(
        "auto" if strategy is None else MemoStrategy(alpha=0.5, **strategy),
        devices=1 if strategy is None else dist.get_world_size(),
        max_steps=5,
        val_check_interval=1,
        use_distributed_sampler=False,
    )
    loaders = [DataLoader(Texts(Run(lengths=lengths, steps=5)), batch_size=2) for lengths in (LENGTHS, (40, 20))]
    trainer.fit(module, loaders[0], loaders[1])
    return module.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama_dynamic_rope", {"context_parallel_size": 2}),
        ("phi3_longrope", {"context_parallel_size": 2, "ulysses_size": 2}),
    ],
)
def test_evaluation_leaves_the_tables_that_it_would_leave_in_one_process(family: str, settings: dict[str, Any]) -> None:
    plain = losses_of_fit(family, None)
    together = run_in_processes(2, losses_of_fit, family, settings)
    means = [sum(losses) / 2 for losses in zip(*together, strict=True)]
    torch.testing.assert_close(means, plain, rtol=BOUND, atol=0)
    assert len(plain) == 2 + 5 * 6  # two at the start, and five after each step


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["hidden", "model"])
@pytest.mark.parametrize("family", ["llama_dynamic_rope", "phi3_longrope"])
def test_slices_go_by_the_whole_batch(family: str, stream_from_host: StreamFromHost) -> None:
    model = MODELS[family]().train()
    batches = [make_batch(2, tokens) for tokens in (61, 40, 19, 50)]
    batches[1]["position_ids"] = torch.cat([torch.arange(10), torch.arange(30)]).expand(2, -1)
    again = copy.deepcopy(model)
    with EngineUnderTest(model, slice_tokens=8, stream_from_host=stream_from_host) as under_test:
        under_test.profile_step(batches[0])
        under_test.load(0.5)
        for batch in batches:  # frequencies may stay those of a longer batch before
            assert_close(loss_and_gradients(model, batch), loss_and_gradients(again, batch))


def test_tables_that_layers_make_themselves_are_refused() -> None:
    model = MODELS["llama_dynamic_rope"]()
    model.model.layers[1].self_attn.rotary_emb = model.model.rotary_emb
    under_test = EngineUnderTest(model)
    with pytest.raises(ValueError, match=r"LlamaRotaryEmbedding makes rotary tables by the length .* inside a layer"):
        under_test.engine.attach()
    under_test.engine.detach()
