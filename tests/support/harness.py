"""Run training steps of small models with and without the engine, and compare losses and gradients."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_memo.artifacts.costs import MOVED
from lightning_memo.artifacts.swap_plan import StreamFromHost, SwapPlan
from lightning_memo.engine import Engine, RequestedSettings, TestMode
from lightning_memo.engine.bootstrap_plan import streamed_bytes_of_calls
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.planner.token_slices import TokenRange, plan_of_alpha, slice_slot_bytes, stored_bytes
from lightning_memo.utils.find_layers import find_stacks
from support.alpha_plans import alpha_swap, slices_at
from support.devices import DEVICE

DELAYS = TestMode(seed=1, longest_delay_seconds=0.0005)

Batch = dict[str, Tensor]


class Step(NamedTuple):
    """The loss of a step and the gradient of every parameter that has one."""

    loss: Tensor
    gradients: dict[str, Tensor]

    def norm(self) -> float:
        return float(sum(g.double().norm() ** 2 for g in self.gradients.values()) ** 0.5)

    def distance(self, reference: Step) -> float:
        """Relative error of the whole gradient."""
        squares = (_difference(self, reference, name) ** 2 for name in reference.gradients)
        return float(sum(squares) ** 0.5) / reference.norm()

    def distances(self, reference: Step) -> dict[str, float]:
        """Relative error of each parameter's gradient."""
        norms = {name: float(g.double().norm()) for name, g in reference.gradients.items()}
        return {name: _difference(self, reference, name) / max(norm, 1e-300) for name, norm in norms.items()}


def times_farther(ours: Sequence[Step], plain: Sequence[Step], exact: Sequence[Step]) -> float:
    """Distance of gradients to fp64 in units of plain training's, as the geometric mean of many batches."""
    ratios = (a.distance(c) / b.distance(c) for a, b, c in zip(ours, plain, exact, strict=True))
    return statistics.geometric_mean(ratios)


def _difference(a: Step, b: Step, name: str) -> float:
    found, expected = a.gradients[name].double(), b.gradients[name].double()
    return float((found - expected.to(found.device)).norm())


def loss_and_gradients(model: nn.Module, batch: Batch, amp: bool = False, seed: int = 5) -> Step:
    """Forward and backward, starting from the random state of `seed`."""
    on_device(model).zero_grad()
    torch.manual_seed(seed)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=amp):
        loss = model(**beside(model, batch)).loss
    loss.backward()
    return Step(loss.detach().clone(), gradients_of(model))


def beside(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch on the device of a model."""
    device = next(model.parameters()).device
    return {name: t.to(device) if isinstance(t, Tensor) else t for name, t in batch.items()}


def on_device(model: nn.Module) -> nn.Module:
    """Move a model to the device of the tests, unless that is the CPU; some tests name a device themselves."""
    return model if DEVICE.type == "cpu" else model.to(DEVICE)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(actual: Step, expected: Step) -> None:
    """Assert that the losses and all gradients are bit-identical."""
    assert torch.equal(actual.loss, expected.loss), f"loss {actual.loss.item()!r}, expected {expected.loss.item()!r}"
    assert actual.gradients.keys() == expected.gradients.keys()
    differing = [name for name, g in expected.gradients.items() if not torch.equal(actual.gradients[name], g)]
    assert not differing, f"gradients differ: {differing}, whole relative error {actual.distance(expected):.1e}"


def assert_close(actual: Step, expected: Step, bound: float = 1e-6) -> None:
    """Assert that the losses and the whole gradient (fp32) agree up to rounding."""
    assert actual.gradients.keys() == expected.gradients.keys()
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
    assert actual.distance(expected) <= bound


def in_double(model: nn.Module) -> nn.Module:
    """Return a copy of a model in fp64. Experts run one by one, because grouped kernels do not support fp64."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


class ScriptedEngine(Engine):
    """An engine with given slices, for combinations of actions that no alpha produces."""

    script: tuple[TokenRange, ...] | None = None

    def slices_for(self, traits: LayerTraits, tokens: int, key: int = 0) -> tuple[TokenRange, ...]:
        return super().slices_for(traits, tokens, key) if self.script is None else self.script


class EngineUnderTest:
    """An engine attached to a model. On exit the model is restored and all memory released.

    Args:
        model: Model to attach to.
        test_mode: Delays of copies, and poisoned buffers.
        slice_tokens: Maximum number of tokens of a slice, in the profiled step as well.
        stream_from_host: Tensors that stay on the host in all steps.
        device: Device of the model.
        disk_path: Folder for spilled layer calls.
        check_slices: Whether layers are compared with themselves in slices.
        joint_attention: Whether attention runs over all slices of a layer at once.
        fused_kernels: Whether modules of layers are computed by fewer kernels, and not bit by bit as plain training.
    """

    def __init__(
        self,
        model: nn.Module,
        test_mode: TestMode | None = DELAYS,
        slice_tokens: int | None = None,
        stream_from_host: StreamFromHost = "none",
        device: torch.device = DEVICE,
        disk_path: Path | None = None,
        check_slices: bool = True,
        joint_attention: bool = False,
        fused_kernels: bool = False,
    ) -> None:
        self.model = on_device(model)
        self.slice_tokens, self.stream_from_host = slice_tokens, stream_from_host
        self.engine = ScriptedEngine(
            model,
            find_stacks(model)[0].layers,
            device,
            RequestedSettings(
                "sdpa",
                slice_tokens,
                stream_from_host,
                joint_attention,
                disk_path=disk_path,
                test_mode=test_mode,
                check_slices=check_slices,
                fused_kernels=fused_kernels,
            ),
        )
        self.profile: StepProfile | None = None
        self.profiled: Step | None = None

    def __enter__(self) -> EngineUnderTest:
        self.engine.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.detach()

    def set_test_mode(self, test_mode: TestMode | None) -> None:
        """Set the test mode of plans that are loaded from now on."""
        self.engine.settings = replace(self.engine.settings, test_mode=test_mode)

    def step(self, batch: Batch, amp: bool = False, seed: int = 5) -> Step:
        """Run a step with the engine, and assert that it releases all its memory."""
        result = loss_and_gradients(self.model, batch, amp, seed)
        self.assert_empty()
        return result

    def assert_empty(self) -> None:
        assert self.engine.slots_in_use == 0
        assert not self.engine.calls

    def profile_step(self, batch: Batch, amp: bool = False) -> Step:
        """Run the first step, which is profiled."""
        result = self.profiled = self.step(batch, amp)
        self.profile = self.engine.profile
        assert self.profile is not None and self.profile.complete
        return result

    def load(
        self,
        alpha: float,
        slice_tokens: int | None = None,
        script: tuple[TokenRange, ...] | None = None,
        disk_calls: int = 0,
        tokens: int | None = None,
        segment_calls: int | None = None,
    ) -> tuple[int, ...]:
        """Plan for the profiled batch; returns the bytes of slot that each layer call is predicted to fill.

        Where every slice has a slot of its own, the plan may be for more `tokens` than were profiled.
        """
        profile, engine = self.profile, self.engine
        assert profile is not None
        engine.script = script
        if script is None:
            longest = None if engine.layer_classes.unsliceable else slice_tokens or self.slice_tokens
            script = slices_at(tokens or profile.tokens, alpha, longest)
        if self.stream_from_host != "none":
            return self._load_streamed(profile, alpha, script, segment_calls)
        joint = engine.layer_classes.joint_attention
        predicted = tuple(
            stored_bytes(c.saved, profile.tokens, script, *MOVED, joint_attention=joint) for c in profile.in_order()
        )
        plan = alpha_swap(
            alpha, len(profile.calls), max(predicted), profile.tokens, joint_attention=joint, slice_tokens=slice_tokens,
            disk_calls=disk_calls,
        )  # fmt: skip
        engine.load(plan, profile.batch * profile.tokens)
        return predicted

    def _load_streamed(
        self, profile: StepProfile, alpha: float, slices: tuple[TokenRange, ...], segment_calls: int | None
    ) -> tuple[int, ...]:
        """Do the same as `load`, and return the bytes of all slices of each layer call."""
        engine = self.engine
        storage = plan_of_alpha(slices[-1].stop, alpha, len(profile.calls), slice_tokens=self.slice_tokens)
        storage = replace(storage, segment_calls=segment_calls)
        calls = profile.saved_by_calls
        sizes = streamed_bytes_of_calls(engine, calls, slices, self.stream_from_host, storage.segments)
        plan = SwapPlan(
            storage=storage,
            memory=sizes.memory,
            stream_from_host=self.stream_from_host,
        )
        self.engine.load(plan, profile.batch * slices[-1].stop)
        return tuple(sum(slice_slot_bytes(c.saved, profile.slice_tokens, slices)) for c in profile.in_order())

    def assert_as_planned(self) -> None:
        """Assert that every tensor fitted into its planned slot."""
        assert self.engine.memory is not None
        stats = self.engine.memory.stats
        assert (stats.overflow_bytes, stats.unplanned_slots) == (0, 0)


@contextmanager
def planned(
    model: nn.Module, batch: Batch, alpha: float, slice_tokens: int | None = None, joint_attention: bool = False
) -> Iterator[EngineUnderTest]:
    """Yield an engine that has profiled a batch and follows the plan for it."""
    with EngineUnderTest(model, joint_attention=joint_attention) as under_test:
        under_test.profile_step(batch)
        under_test.load(alpha, slice_tokens)
        yield under_test


def assert_trains_like_plain(model: nn.Module, batch: Batch, exact_alphas: tuple[float, ...] = (0.0, 1.0)) -> str:
    """Profiled step and steps at every alpha against plain training; returns why the layers were not cut."""
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model) as under_test:
        assert_equal(under_test.profile_step(batch), plain)
        for alpha in (0.0, 0.5, 1.0):
            under_test.load(alpha)
            for _ in range(2):
                actual = under_test.step(batch)
                (assert_equal if alpha in exact_alphas else assert_close)(actual, plain)
            under_test.assert_as_planned()
        return under_test.engine.layer_classes.unsliceable
