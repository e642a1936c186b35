"""In packed rows, states of recurrences and convolutions begin anew in each document, as if each ran by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.architectures.hybrids import HYBRIDS, SIZES, make_hybrid, make_separate
from support.devices import DEVICE
from support.harness import Batch, EngineUnderTest, Step, assert_close, beside, loss_and_gradients, on_device
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoCallback, MemoLoop, MemoStrategy

# Lengths of the documents of each row: some start in both rows at once, some are shorter than a convolution.
SHORT = (1, 2) if DEVICE.type == "cpu" else (3,)  # the emulated GPU has no kernel for products with a single token
ROWS = ((13, *SHORT, 29, 25), (14, 31, 25), (70,))
TOKENS = 70
BOUND = 1e-6  # of `assert_close`
HALF_BOUND = 0.015
KINDS = [config for config in HYBRIDS if config != "GraniteMoeHybridConfig"]  # whose attention sees all documents
FEW = ("Qwen3NextConfig", "BambaConfig", "Lfm2Config")
few_kinds = slow_if(lambda config: config not in FEW)
QUICK_ARGUMENTS = (("Lfm2Config", "model"), ("BambaConfig", "none"))
build = functools.partial(make_hybrid, use_cache=False)


def packed(rows: int = len(ROWS)) -> Batch:
    ids = torch.randint(1, 96, (len(ROWS), TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
    return {"input_ids": ids[:rows], "labels": ids[:rows], "position_ids": positions[:rows]}


@functools.cache
def reference(config: str, rows: int = len(ROWS)) -> Step:
    return loss_and_gradients(make_separate(config), packed(rows))


@pytest.mark.parametrize("config", KINDS)
def test_documents_would_see_each_other_in_plain_training(config: str) -> None:
    assert loss_and_gradients(build(config), packed()).distance(reference(config)) > 10 * BOUND


@slow_if(lambda config: config != "BambaConfig")
@pytest.mark.parametrize("config", KINDS)
def test_whole_layers_and_slices(config: str) -> None:
    batch, alone = packed(), reference(config)
    with EngineUnderTest(build(config)) as under_test:
        assert_close(under_test.profile_step(batch), alone)
        for alpha, slice_tokens in ((0.0, 7), (0.5, None), (0.5, 33), (1.0, 16)):
            under_test.load(alpha, slice_tokens)
            assert_close(under_test.step(batch), alone)
        other = make_batch_of_one_document()
        plain = loss_and_gradients(build(config), other)
        assert_close(under_test.step(other), plain)  # the next batch is not packed


def make_batch_of_one_document() -> Batch:
    return packed() | {"position_ids": torch.arange(TOKENS).expand(len(ROWS), -1)}


@slow_if(lambda config, stream_from_host: (config, stream_from_host) != ("BambaConfig", "model"))
@pytest.mark.parametrize("stream_from_host", ["attention", "hidden", "model"])
@pytest.mark.parametrize("config", KINDS)
def test_slices_on_the_host(config: str, stream_from_host: Any) -> None:
    batch, alone = packed(), reference(config)
    with EngineUnderTest(build(config), slice_tokens=16, stream_from_host=stream_from_host) as under_test:
        assert_close(under_test.profile_step(batch), alone)
        for alpha in (0.0, 0.5, 1.0):
            under_test.load(alpha)
            assert_close(under_test.step(batch), alone)
        if stream_from_host == "hidden":
            under_test.load(0.0, segment_calls=1)
            assert_close(under_test.step(batch), alone)


@few_kinds
@pytest.mark.parametrize("config", KINDS)
def test_plain_layers_and_evaluation(config: str) -> None:
    """Nothing is swapped or recomputed, and no slice runs."""
    model, batch, alone = on_device(build(config)), packed(), reference(config)
    with MemoLoop(model, torch.optim.SGD(model.parameters(), lr=0.0)) as memo:
        for _ in range(3):
            assert_close(loss_and_gradients(model, batch), alone)
            memo._batches.end()  # type: ignore[union-attr]
        assert memo.plan is not None and memo.plan.swap.plain
        with torch.no_grad():
            torch.testing.assert_close(model(**beside(model, batch)).loss, alone.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stream_from_host", ["none", "hidden", "model"])
def test_slices_in_half_precision(stream_from_host: Any) -> None:
    """Runs on GPUs, too, on which attention in slices is not computed in fp32."""
    model, batch = functools.partial(build, "Qwen3NextConfig"), packed(2)
    alone = loss_and_gradients(make_separate("Qwen3NextConfig"), batch, amp=True)
    assert loss_and_gradients(model(), batch, amp=True).distance(alone) > 10 * HALF_BOUND
    slices = {} if stream_from_host == "none" else {"slice_tokens": 16, "stream_from_host": stream_from_host}
    with EngineUnderTest(model(), **slices) as under_test:
        assert under_test.profile_step(batch, amp=True).distance(alone) <= HALF_BOUND
        under_test.load(0.5, 16)
        assert under_test.step(batch, amp=True).distance(alone) <= HALF_BOUND


def arguments_for_kernels() -> Batch:
    """Return what `DataCollatorWithFlattening` of transformers tells kernels, of the first row."""
    lengths = torch.tensor(ROWS[0])
    edges = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)[None].int()
    longest = int(lengths.max())
    return {
        "seq_idx": numbers, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest,
        "max_length_k": longest,
    }  # fmt: skip


@slow_if(lambda config, stream_from_host: (config, stream_from_host) not in QUICK_ARGUMENTS)
@pytest.mark.parametrize("stream_from_host", ["none", "model"])
@pytest.mark.parametrize("config", FEW)
def test_arguments_for_kernels(config: str, stream_from_host: Any) -> None:
    """Functions of transformers without these kernels would raise."""
    batch = packed(1) | arguments_for_kernels()
    slices = {"slice_tokens": 16, "stream_from_host": stream_from_host} if stream_from_host == "model" else {}
    with EngineUnderTest(build(config), **slices) as under_test:
        assert_close(under_test.profile_step(batch), reference(config, 1))
        under_test.load(0.5)
        assert_close(under_test.step(batch), reference(config, 1))


@pytest.mark.parametrize("left_out", ["position_ids", "seq_idx", "cu_seq_lens_q"])
def test_arguments_for_kernels_that_contradict_positions_are_refused(left_out: str) -> None:
    batch = packed(1) | arguments_for_kernels()
    if left_out == "position_ids":
        del batch[left_out]
    else:
        batch[left_out] = batch[left_out] // 2 * 2
    named = "seq_idx" if left_out == "position_ids" else left_out
    refused = pytest.raises(ValueError, match=f"^{named} and position_ids tell of other documents: give position_ids ")
    with EngineUnderTest(build("BambaConfig")) as under_test, refused:
        under_test.profile_step(batch)


def test_a_users_function_without_a_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bamba import modeling_bamba

    own = modeling_bamba.mamba2_chunk_scan

    def without_state(hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, **others: Any) -> Any:
        return own(hidden_states, dt, A, B, C, chunk_size, **others)

    monkeypatch.setattr(modeling_bamba, "mamba2_chunk_scan", without_state)
    refused = pytest.raises(ValueError, match=r"^rows hold .*, and mamba2_chunk_scan takes or returns no state")
    with EngineUnderTest(build("BambaConfig")) as under_test, refused:
        under_test.profile_step(packed())


class Evaluated(LanguageModel):
    """Keeps the loss of a validation."""

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluated = self.loss(batch)


def evaluated(family: Callable[[], nn.Module]) -> Tensor:
    module = Evaluated(family)
    make_trainer(MemoStrategy()).validate(module, DataLoader(rows_of(packed()), batch_size=len(ROWS)))
    return module.evaluated


def test_an_evaluation_without_training() -> None:
    loss = evaluated(functools.partial(build, "BambaConfig"))
    torch.testing.assert_close(loss, reference("BambaConfig").loss, rtol=1e-6, atol=0)


# ---- models whose states cannot begin anew

WHY = "position_ids tell that rows hold several documents, and JambaForCausalLM passes information from token to token "


def make_jamba() -> nn.Module:
    config = transformers.JambaConfig(
        **{name: value for name, value in SIZES.items() if name != "head_dim"}, attn_layer_period=2,
        attn_layer_offset=1, num_experts=1, mamba_d_state=4, mamba_dt_rank=4, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-any-return]


def rows_of(batch: Batch) -> list[dict[str, torch.Tensor]]:
    return [{name: t[row] for name, t in batch.items()} for row in range(len(batch["input_ids"]))]


def fit(tmp_path: Path) -> None:
    trainer = make_trainer(MemoStrategy(), max_steps=1)
    trainer.fit(LanguageModel(make_jamba), DataLoader(rows_of(packed()), batch_size=2))


def validate(tmp_path: Path) -> None:
    evaluated(make_jamba)


def loop(tmp_path: Path) -> None:
    model = on_device(make_jamba())
    with MemoLoop(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        loss_and_gradients(model, packed())


def trainer(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=DEVICE.type == "cpu", save_strategy="no"
    )
    transformers.Trainer(make_jamba(), arguments, train_dataset=rows_of(packed()), callbacks=[MemoCallback()]).train()


@pytest.mark.parametrize("run", [fit, validate, loop, trainer])
def test_packed_rows_are_refused(run: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{WHY}") as raised:
        run(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_cache_is_refused() -> None:
    why = r"BambaModel makes a key-value cache.*: set model\.config\.use_cache = False, or "
    with EngineUnderTest(make_hybrid("BambaConfig")) as under_test, pytest.raises(ValueError, match=why):
        under_test.profile_step(packed())
