"""A step that runs out of memory is run again or ends with one line, and so does one in which a copy fails."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from support.architectures.scarce import Scarce
from support.families import PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.modes import JOINT
from support.trainer_harness import (
    LanguageModel,
    assert_usable_again,
    fit,
    forwards,
    loader,
    make_trainer,
    plain,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.engine.copy_streams import CopyEvent, ThreadCopyStream
from lightning_memo.engine.memory import slot_memory as memory
from lightning_memo.runtime import memory_watch

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("alpha", [1.0, "auto"], ids=["memo", "plain"])
def test_out_of_memory_once(where, alpha):
    """The step is run again with a smaller plan: losses and weights are those of a run in which nothing failed."""
    with pytest.warns(UserWarning, match="out of device memory") as caught:
        result = fit(MemoStrategy(alpha=alpha, device_memory="64GiB"), Scarce({2: [where]}), max_steps=6)
    told = [str(w.message) for w in caught if "out of device memory" in str(w.message)]
    assert len(told) == 1
    assert "\n" not in told[0]
    assert ("plain training" if alpha == "auto" else "alpha=1 ") in told[0]
    assert "the step is run again" in told[0]
    expected = plain(max_steps=6)
    assert result.losses[:3] == expected.losses[:3]  # from then on slices round, on some processors at once
    assert max(abs(a - b) for a, b in zip(result.losses, expected.losses, strict=True)) <= 3e-6
    assert not result.plan.swap.plain
    assert result.plan.swap.alpha == 0.5 or alpha == "auto"
    assert set(result.held) == {0}


@pytest.mark.slow
def test_out_of_memory_again_and_again():
    """The plan gets smaller each time, down to alpha=0, and slices get shorter after that."""
    fails = {n: ["forward"] for n in (1, 2, 3, 4, 5, 6, 7)}
    with pytest.warns(UserWarning, match="out of device memory") as caught:
        result = fit(MemoStrategy(alpha=1.0), Scarce(fails), max_steps=9)
    told = [str(w.message) for w in caught if "out of device memory" in str(w.message)]
    given = [text.partition(" with ")[2].partition(" (")[0] for text in told[:5]]
    assert given == ["alpha=1", "alpha=0.5", "alpha=0.25", "alpha=0.125", "alpha=0.0625"]
    assert (
        'slice_tokens=2, stream_from_host="none"' in told[5]
        and 'slice_tokens=1, stream_from_host="attention"' in told[6]
    )
    assert (result.plan.swap.storage.slice_tokens, result.plan.swap.stream_from_host) == (1, "attention")
    expected = plain(max_steps=9).losses
    assert result.losses == pytest.approx(expected, abs=3e-6)
    assert set(result.held) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rungs", [1, 2])
def test_a_first_step_that_does_not_fit_runs_in_slices(where, rungs):
    """Slices are shorter after each failure, and the plan is one for them."""
    with pytest.warns(UserWarning, match="out of device memory with every layer recomputed") as caught:
        result = fit(MemoStrategy(device_memory="1.5MiB"), Scarce({0: [where] * rungs}), max_steps=4)
    assert sum("with every layer recomputed" in str(w.message) for w in caught) == rungs
    expected = [(2, "none"), (1, "attention")][rungs - 1]
    assert (result.plan.swap.storage.slice_tokens, result.plan.swap.stream_from_host) == expected
    assert result.losses == pytest.approx(plain(max_steps=4).losses, abs=3e-6)
    assert set(result.held) == {0}


@pytest.mark.slow
def test_a_plan_with_slices_is_used_again(tmp_path):
    """A later run begins with the slices that an earlier one needed."""
    with pytest.warns(UserWarning, match="out of device memory"):
        first = fit(MemoStrategy(alpha=0.5), Scarce({0: ["forward"] * 2}), max_steps=4)
    first.plan.save(tmp_path / "plan.json")
    again = fit(MemoStrategy(plan=tmp_path / "plan.json"), Scarce({}), max_steps=4)
    assert again.plan.swap == first.plan.swap
    assert again.losses == first.losses


@slow_if(lambda fails: len(fails.get(2, ())) == 4 and fails[2][0] == "backward")
@pytest.mark.parametrize(
    ("fails", "settings", "told"),
    [
        ({0: ["forward"] * 3}, {}, "even with every layer recomputed"),
        ({2: ["forward", "backward", "forward", "forward"]}, {}, "even with every layer recomputed"),
        ({2: ["backward", "forward", "backward", "backward"]}, {}, "even with every layer recomputed"),
        ({2: ["backward"]}, {"accumulate_grad_batches": 2}, "after which no optimizer steps is not run again"),
        ({3: ["backward"]}, {"accumulate_grad_batches": 2}, "gradients of earlier batches would be lost"),
    ],
    ids=str,
)
def test_out_of_memory_for_good(fails, settings, told):
    """A step that does not fit ends with one line that says what to do, and the process stays usable."""
    trainer, module = make_trainer(MemoStrategy(alpha=1.0), **settings), Scarce(fails)
    with pytest.raises(torch.OutOfMemoryError, match=told) as caught:
        trainer.fit(module, loader())
    assert "\n" not in str(caught.value)
    assert "shorten the sequence" in str(caught.value)
    assert forwards(module) == []
    assert_usable_again()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, 1])
def test_slices_that_do_not_fit_the_host(batch):
    """The error is that of the device, for which layers were cut, and names both memories."""
    module = Scarce({batch: ["backward"] * (1 + batch)})
    with pytest.raises(torch.OutOfMemoryError, match=r"not fit the device, and in slices.*, not the host") as caught:
        make_trainer(MemoStrategy(host_memory="1KiB")).fit(module, loader())
    assert "\n" not in str(caught.value)
    assert "raise host_memory" in str(caught.value)
    assert forwards(module) == []
    del caught
    assert_usable_again()


class Mixing(PlainBlock):
    """Cannot be cut."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.run_out()
        return super().forward(x - x.mean(1, keepdim=True))


class Cuttable(PlainBlock):
    @override
    def forward(self, x: Tensor) -> Tensor:
        self.run_out()
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (Mixing, {}, "the batch, or lower loss_chunk_tokens"),
        (
            Cuttable,
            {"slice_tokens": 16, "stream_from_host": "hidden"},
            "the batch, lower slice_tokens, or lower loss_chunk",
        ),
        (
            Cuttable,
            {"slice_tokens": 16, "stream_from_host": "none"},
            r"the batch, lower slice_tokens \(stream_from_host='hidden'",
        ),
        (Cuttable, {"loss_chunk_tokens": None, "test_mode": JOINT}, "set slice_tokens, or set loss_chunk_tokens"),
    ],
    ids=str,
)
def test_the_advice_depends_on_the_settings(kind, settings, told):
    module = LanguageModel(lambda: PlainModel([kind() for _ in range(3)]))
    starved = iter([False] * 3)

    def run_out():
        if module.trainer.global_step and next(starved, True):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for block in module.model.blocks:
        block.run_out = run_out
    with pytest.raises(torch.OutOfMemoryError, match=told):
        make_trainer(MemoStrategy(**settings)).fit(module, loader())


class Accumulating(Scarce):
    """Clears gradients in every other step only."""

    @override
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@pytest.mark.parametrize("batch", [2, 3])
def test_gradients_that_a_user_accumulates_are_not_added_twice(batch):
    """A backward that begins without gradients is run again; one that adds to them is not."""
    module = Accumulating({batch: ["backward"]})
    if batch == 2:
        result = fit(MemoStrategy(alpha=1.0), module, max_steps=6)
        assert result.losses[:4] == fit("auto", Accumulating({}), max_steps=6).losses[:4]
        return
    with pytest.raises(torch.OutOfMemoryError, match="gradients of earlier batches would be lost"):
        make_trainer(MemoStrategy(alpha=1.0)).fit(module, loader())


class Starved(nn.Module):
    """Runs out of memory in a forward, which may be a probe, a comparison or training's."""

    def __init__(self, calls, last):
        super().__init__()
        self._calls, self._last = calls, last  # an iterator, which is not restored after a probe

    def forward(self, x):
        if not isinstance(x, FakeTensor) and next(self._calls) == self._last:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x


@pytest.mark.slow
@pytest.mark.parametrize("call", range(1, 13, 2))
def test_out_of_memory_says_nothing_about_a_layer(call):
    """Layers are cut in later steps, and no line says that they cannot be."""
    module, calls = LanguageModel("block"), itertools.count(1)
    for block in module.model.blocks:
        block.starved = Starved(calls, call)
        block.forward = lambda x, block=block: block.starved(type(block).forward(block, x))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one slice")
        result = fit(MemoStrategy(alpha=0.5), module, max_steps=3)
    assert next(calls) > call + 1
    assert result.losses[-3:] == pytest.approx(fit("auto", LanguageModel("block"), max_steps=3).losses, abs=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 3])
def test_out_of_memory_while_gradients_accumulate(batch):
    """The forward of any batch is run again, with the results of a run in which nothing failed."""
    settings = {"accumulate_grad_batches": 2, "max_steps": 3}
    result = fit(MemoStrategy(alpha=1.0), Scarce({batch: ["forward"]}), **settings)
    assert result.losses[:4] == plain(**settings).losses[:4]


@pytest.mark.slow
def test_out_of_memory_in_a_window_of_one_batch():
    """The last batch of an epoch may be the only one whose gradients a step adds up: its backward is run again."""
    settings = {"accumulate_grad_batches": 2, "max_steps": 4}
    data = loader(6)  # three batches
    result = fit(MemoStrategy(alpha=1.0), Scarce({2: ["backward"]}), data, **settings)
    assert result.losses == pytest.approx(plain(data=data, **settings).losses, abs=3e-6)


def test_host_memory_that_falls(monkeypatch):
    """If other programs take the host's memory, the plan gives its own back, warns, and is made again with less."""
    monkeypatch.setattr(memory_watch, "_CHECK_BATCHES", 1)
    left = iter([2**30, 10])
    monkeypatch.setattr(memory_watch, "available_host_bytes", lambda: next(left, 2**30))
    with pytest.warns(UserWarning, match="the host has 10 B left") as caught:
        result = fit(MemoStrategy(alpha=1.0), max_steps=6)
    assert len([w for w in caught if "the host has" in str(w.message)]) == 1
    assert result.plan.swap.alpha == 0.5
    expected = plain(max_steps=6).losses
    assert result.losses == pytest.approx(expected, abs=3e-6)
    assert result.losses[:4] == expected[:4]


class BrokenStream(ThreadCopyStream):
    """Fails at a copy."""

    fails_at = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._copies = 0

    @override
    def copy_after(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Any = None
    ) -> CopyEvent:
        self._copies += 1
        broken = Unreadable() if self._copies == self.fails_at else source
        return super().copy_after(destination, broken, *after, subject=subject)


class Unreadable:
    """A tensor that a copy cannot read."""

    nbytes = 0

    def data_ptr(self) -> int:
        raise OSError("bus error")


@pytest.mark.parametrize("stream", ["offload", "prefetch"])
@pytest.mark.parametrize("copy", [1, 4])
def test_a_copy_that_fails(monkeypatch, stream, copy):
    """The step ends with one line, and the process stays usable."""

    def make(device, name, delays=None, recorder=None):
        return (BrokenStream if name == stream else ThreadCopyStream)(name, delays, recorder)

    monkeypatch.setattr(BrokenStream, "fails_at", copy)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "make_copy_stream", make)
        trainer, module = make_trainer(MemoStrategy(alpha=1.0)), LanguageModel()
        with pytest.raises(RuntimeError, match="a copy between device and host failed: bus error") as caught:
            trainer.fit(module, loader())
    assert "\n" not in str(caught.value)
    assert forwards(module) == []
    assert "RuntimeCallback" not in {type(callback).__name__ for callback in trainer.callbacks}
    del caught
    assert_usable_again()
