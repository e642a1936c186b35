"""Where layers cannot be cut, alpha is the fraction of the layer calls that are swapped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from support.attention.recorded_training import BOUND, Recording, gradient_errors
from support.families import VOCABULARY, PlainBlock, PlainModel, make_batch
from support.harness import Batch
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together
from support.trainer_harness import LanguageModel, Mixing, batches, fit, plain
from torch import Tensor, nn

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.costs import OTHER

pytestmark = pytest.mark.usefixtures("own_folder")
LAYERS = 7


class Watch(LanguageModel):
    """Notes the memory that steps take."""

    peak_host_bytes = overflow_bytes = unplanned_slots = 0

    def on_train_batch_end(self, *args: Any) -> None:
        stats = self.trainer.strategy.engine.memory.stats  # type: ignore[attr-defined]
        self.peak_host_bytes, self.overflow_bytes = stats.peak_host_bytes, stats.overflow_bytes
        self.unplanned_slots = stats.unplanned_slots


def model() -> nn.Module:
    """Layers of unlike sizes, of which every second one mixes tokens."""
    return PlainModel([Mixing(PlainBlock()) if n % 2 else PlainBlock(dropout=0.1) for n in range(LAYERS)])


class Averaging(PlainBlock):
    """Mixes tokens, with the weights of a layer that does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(1, keepdim=True)


def same_weights(kind: type[PlainBlock]) -> nn.Module:
    return PlainModel([kind() for _ in range(LAYERS)])


def data() -> list[Batch]:
    return [make_batch(2, 48, seed=n) for n in range(4)]


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize(("alpha", "swapped"), [(0.2, 1), (0.5, 4), (0.8, 6)])
def test_memory_and_gradients(alpha: float, swapped: int) -> None:
    """Slots hold what layers save, host memory is what the plan says, and the results are bit-identical."""
    module = Watch(model)
    with pytest.warns(
        UserWarning,
        match=f"one slice, and alpha={swapped / LAYERS:.4g} swaps {swapped} of {LAYERS} layer calls, because",
    ):
        result = fit(MemoStrategy(alpha=alpha), module, batches(data()))
    swap = result.plan.swap
    whole = [swap.storage.call(n).tokens(OTHER) == swap.storage.tokens for n in range(LAYERS)]
    assert len(swap.storage.calls) == 2 and sum(whole) == swapped
    assert (module.overflow_bytes, module.unplanned_slots) == (0, 0)
    assert module.peak_host_bytes == swap.host_bytes
    expected = plain(LanguageModel(model), batches(data()))
    assert result.losses == expected.losses
    weights = expected.module.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())


@pytest.mark.slow
def test_a_plan_is_resumed(tmp_path: Any) -> None:
    """The plan in a checkpoint is used again, and a plan from a file may be used by layers that can be cut."""
    first = fit(MemoStrategy(alpha=0.5), LanguageModel(model), batches(data()))
    path = tmp_path / "plan.json"
    first.plan.save(path)
    with pytest.warns(UserWarning, match=f"one slice, and alpha=0.5714 swaps 4 of {LAYERS} layer calls, because"):
        again = fit(MemoStrategy(alpha=0.5, plan=path), LanguageModel(model), batches(data()))
    assert again.plan.swap == first.plan.swap
    assert again.losses == first.losses


@pytest.mark.slow
def test_a_plan_that_cuts_layers_which_cannot_be_cut(tmp_path: Any) -> None:
    mixing = partial(same_weights, Averaging)
    alike = fit(MemoStrategy(alpha=0.5), LanguageModel(partial(same_weights, PlainBlock)), batches(data()))
    alike.plan.save(tmp_path / "plan.json")
    with pytest.warns(UserWarning, match="the plan is dropped, and the next batch is profiled: it cuts layers into"):
        result = fit(MemoStrategy(alpha=0.5, plan=tmp_path / "plan.json"), LanguageModel(mixing), batches(data()))
    assert len(result.plan.swap.storage.calls) == 2 and result.plan.swap.alpha == 4 / LAYERS
    assert result.losses == plain(LanguageModel(mixing), batches(data())).losses


def late() -> nn.Module:
    """Only the last layer mixes tokens."""
    return PlainModel([PlainBlock(), PlainBlock(), Mixing(PlainBlock())])


@pytest.mark.parametrize("stream_from_host", ["attention", "hidden"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_later_layer_that_cannot_run_slice_after_slice(alpha: float, stream_from_host: str) -> None:
    told, advice = f'stream_from_host="{stream_from_host}" runs layers slice after slice', 'set stream_from_host="none"'
    line = rf"^{told}, but Mixing .*: {advice}$"
    with pytest.raises(ValueError, match=line):
        fit(
            MemoStrategy(alpha=alpha, slice_tokens=16, stream_from_host=stream_from_host),
            LanguageModel(late),
            batches(data()),
        )


NO_MEMORY_SAVED = "layers run as one slice.*, because Mixing may not .*; slice_tokens=16 saves no memory.$"


@slow_if(lambda alpha, case_id: alpha in (0.0, 1.0) or case_id == "auto-alike")
@pytest.mark.parametrize("lengths", [(48, 48, 48, 48), (48, 64, 48, 80)], ids=["alike", "longer"])
@pytest.mark.parametrize("alpha", ["auto", 0.0, 0.5, 1.0])
def test_a_later_layer_that_cannot_be_cut_leaves_slices_to_no_layer(alpha: float | str, lengths: Any) -> None:
    """What lives on the host was left to the strategy. Longer batches are profiled with whole layers."""
    given = [make_batch(2, tokens, seed=n) for n, tokens in enumerate(lengths)]
    module, expected = Recording(late), Recording(late)
    with pytest.warns(UserWarning, match=NO_MEMORY_SAVED):
        result = fit(MemoStrategy(alpha=alpha, slice_tokens=16), module, batches(given))
    swap, longer = result.plan.swap, len(set(lengths)) > 1
    assert (swap.stream_from_host, swap.plain) == ("none", longer and alpha == "auto")
    fit("auto", expected, batches(given))
    for mine, plainly in zip(module.gradients, expected.gradients, strict=True):
        assert max(gradient_errors(mine, plainly).values()) < BOUND


def test_a_plan_of_whole_layers_is_resumed_with_slices(tmp_path: Any) -> None:
    path, settings = tmp_path / "plan.json", {"alpha": 0.5, "slice_tokens": 16}
    first = fit(MemoStrategy(**settings), LanguageModel(late), batches(data()))
    first.plan.save(path)
    with pytest.warns(UserWarning, match=NO_MEMORY_SAVED):
        again = fit(MemoStrategy(**settings, plan=path), LanguageModel(late), batches(data()))
    assert again.plan.swap == first.plan.swap and len(first.plan.swap.storage.calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_plan_with_keys_on_the_host_of_layers_that_can_be_cut(tmp_path: Any, alpha: float) -> None:
    path, settings = tmp_path / "plan.json", {"alpha": alpha, "slice_tokens": 16}
    streams = MemoStrategy(**settings, stream_from_host="attention")
    alike = fit(streams, LanguageModel(partial(same_weights, PlainBlock)), batches(data()))
    assert alike.plan.swap.stream_from_host == "attention"
    alike.plan.save(path)
    module = LanguageModel(partial(same_weights, Averaging))
    with pytest.warns(UserWarning, match="the plan is dropped, and the next batch is profiled: it cuts layers into"):
        result = fit(MemoStrategy(**settings, plan=path), module, batches(data()))
    assert result.plan.swap.stream_from_host == "none"


@pytest.mark.slow
def test_processes_that_train_the_same_weights() -> None:
    run = Run(family=late, tokens=45, ignore=0.0)
    together = train_together(2, run, {"alpha": 0.5, "slice_tokens": 16, "zero_stage": 1})
    errors = together.worst_error(train_alone(run))
    assert max(errors["loss"], errors["gradients"]) <= BOUND, errors


def test_the_remedy_names_the_setting_that_the_user_gave() -> None:
    model = transformers.JambaForCausalLM(
        transformers.JambaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=0, num_experts=1, mamba_d_state=4,
            mamba_dt_rank=4,
        )
    )  # fmt: skip
    line = r'^stream_from_host="model" runs layers slice after slice, but Jamba.*Layer .*: set stream_from_host="none"$'
    with pytest.raises(ValueError, match=line):
        fit(MemoStrategy(stream_from_host="model", slice_tokens=16), LanguageModel(lambda: model), batches(data()))
