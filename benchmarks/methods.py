"""Training methods for long sequences; each can be switched on for some steps and off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from peers import checkpointing
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine import Engine, RequestedSettings
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.planner.token_slices import memory_of_plan, plan_of_alpha
from lightning_memo.utils.find_layers import find_stacks

PLAIN = "plain"
CHECKPOINTING = "checkpointing"
SAVE_ON_CPU = "save_on_cpu"


@dataclass(frozen=True, slots=True)
class Method:
    """A training method: plain training, a tool of the libraries, or the engine.

    Attributes:
        name: Name on the command line.
        alpha: Fraction of the tokens whose activations are swapped; `None` for methods other than the engine.
        slice_tokens: Longest slice of the engine; `None` means no limit.
    """

    name: str
    alpha: float | None = None
    slice_tokens: int | None = None

    @classmethod
    def parse(cls, name: str) -> Method:
        """Parses `plain`, `checkpointing`, `save_on_cpu`, `alpha=FRACTION` or `alpha=FRACTION:LONGEST_SLICE`.

        Raises:
            ValueError: The name is none of these.
        """
        if name in (PLAIN, CHECKPOINTING, SAVE_ON_CPU):
            return cls(name)
        alpha, _, longest = name.removeprefix("alpha=").partition(":")
        try:
            method = cls(name, float(Fraction(alpha)), int(longest) if longest else None)
        except (ValueError, ZeroDivisionError):
            method = cls(name)
        too_short = method.slice_tokens is not None and method.slice_tokens < 1
        if method.alpha is None or not 0 <= method.alpha <= 1 or too_short:
            raise ValueError(
                f"{name!r} is no method: give {PLAIN}, {CHECKPOINTING}, {SAVE_ON_CPU}, alpha=0, alpha=1/8 and so on up "
                "to alpha=1, or alpha=1/2:256 for slices of at most 256 tokens"
            )
        return method


@dataclass(slots=True)
class Usage:
    """Memory and traffic of one step that the allocations on the device do not show.

    Attributes:
        host_bytes: Host memory that holds activations.
        offloaded_bytes: Bytes copied from device to host.
        buffer_bytes: Device memory that a method holds between steps.
        overflow_bytes: Saved tensors that did not fit in the planned buffers.
    """

    host_bytes: int = 0
    offloaded_bytes: int = 0
    buffer_bytes: int = 0
    overflow_bytes: int = 0


UsageOf = Callable[[], Usage]


class Workload:
    """A model and a batch, and the methods with which a step can run.

    Args:
        model: A Hugging Face causal language model in training mode.
        batch: The arguments of the model.
        device: Device of the model and the batch.
    """

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], device: torch.device) -> None:
        self.model = model
        self.device = device
        self._batch = batch
        self._engine = Engine(model, find_stacks(model)[0].layers, device, RequestedSettings("sdpa"))

    def step(self) -> None:
        """Runs a forward and a backward pass."""
        self.model(**self._batch).loss.backward()

    def free_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        """Waits until the device has finished; returns immediately on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def using(self, method: Method, metered: bool = False) -> AbstractContextManager[UsageOf]:
        """Makes steps inside the block run with `method`; after one step, the result has its memory and traffic.

        Args:
            metered: Whether memory is measured instead of time.
        """
        if method.name == CHECKPOINTING:
            return self._checkpointing()
        if method.name == SAVE_ON_CPU:
            return self._save_on_cpu(apart=metered and self.device.type == "cpu")
        return self._plain() if method.alpha is None else self._memo(method)

    @contextmanager
    def _plain(self) -> Iterator[UsageOf]:
        yield Usage

    @contextmanager
    def _checkpointing(self) -> Iterator[UsageOf]:
        with checkpointing(self.model):
            yield Usage

    @contextmanager
    def _save_on_cpu(self, apart: bool) -> Iterator[UsageOf]:
        """PyTorch's own offloading.

        Args:
            apart: Whether device and host are the same memory. The host's share is then allocated in another thread,
                where the meter of the device does not see it, and the device receives its own copies on the way back.
        """
        hooks = save_on_cpu(pin_memory=True)  # without it, tensors on a CPU are not copied
        usage, pack, unpack = Usage(), hooks.pack_hook, hooks.unpack_hook

        def counting_pack(t: Tensor) -> object:
            usage.offloaded_bytes += t.nbytes
            usage.host_bytes += t.nbytes
            return pool.submit(torch.no_grad()(pack), t).result() if apart else pack(t)

        hooks.pack_hook = counting_pack
        if apart:
            hooks.unpack_hook = lambda packed: unpack(packed).clone()
        with ThreadPoolExecutor(1) as pool, hooks:
            yield lambda: usage

    @contextmanager
    def _memo(self, method: Method) -> Iterator[UsageOf]:
        swap = self._swap_plan(method)
        self._engine.attach()
        try:
            self._engine.load(swap, self._profile.batch * self._profile.tokens)
            memory = self._engine.memory
            assert memory is not None
            _touch(memory)
            yield lambda: Usage(
                self._engine.host_bytes, memory.offloaded_bytes, swap.memory.buffer_bytes, memory.stats.overflow_bytes
            )
        finally:
            self._engine.detach()

    @cached_property
    def _profile(self) -> StepProfile:
        """Returns what the layers save, from one step."""
        self._engine.attach()
        try:
            self.step()
            assert self._engine.profile is not None
            return self._engine.profile
        finally:
            self.free_gradients()
            self._engine.detach()

    def _swap_plan(self, method: Method) -> SwapPlan:
        assert method.alpha is not None
        profile, joint = self._profile, self._engine.layer_classes.joint_attention
        calls = profile.saved_by_calls
        storage = plan_of_alpha(profile.tokens, method.alpha, len(calls), slice_tokens=method.slice_tokens)
        memory = memory_of_plan(storage, calls, len(calls) - 2, joint_attention=joint)
        return SwapPlan(storage=storage, memory=memory, joint_attention=joint)


def _touch(memory: SlotMemory) -> None:
    """Writes to all of a plan's memory once, so that no timed step has page faults."""
    host = memory.host.arena.acquire(memory.host_bytes)
    assert host is not None
    memory.host.arena.release(host.zero_())
    for call in range(2):
        slot = memory.lease(call, swap=False)
        slot.buffer.zero_()
        memory.release(slot)
