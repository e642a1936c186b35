"""The engine: wraps a model's layers and runs their calls by a swap plan."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memo.engine.attach import attach_attention, collecting_nothing
from lightning_memo.engine.attention import attend
from lightning_memo.engine.intercept import current_layout, handling
from lightning_memo.engine.layer_forward import needs_grad, read_call, replace_forward
from lightning_memo.engine.memory import SlotMemory, TestMode
from lightning_memo.engine.probe import LayerTraits, probe_layer
from lightning_memo.engine.profile import StepProfile
from lightning_memo.engine.run import LayerCall, LayerRun
from lightning_memo.engine.schedule import run_layer_schedule, run_nested
from lightning_memo.engine.slices import (
    Action,
    SavedBytes,
    TokenRange,
    slice_tokens_by_alpha,
    slot_bytes,
)
from lightning_memo.engine.unit import Unit
from lightning_memo.kernels import AttentionBackend, AttentionSpec, select_backend
from lightning_memo.parallel.context import ContextAttention, ContextGroups
from lightning_memo.plan import SwapPlan

# The last two layer calls never leave the device: their backward comes first (MEMO section 4.1).
RESIDENT_CALLS = 2


class Engine:
    """Runs the layers of a model slice by slice, and swaps or recomputes what they save.

    Without a plan, the first forward with gradients starts a profile: every layer is recomputed, and what it saves and
    how long it takes is recorded in `profile`. `load` sets the plan by which later forwards run.

    Args:
        model: What `layers` belong to; its Hugging Face attention, if any, is directed to the engine while attached.
        layers: Layers that run one after the other, each taking the output of the one before.
        device: Where they run.
        attention: Wished attention back end.
        schedule: "auto", or "nest" to nest slices where that is not necessary.
        test_mode: Delays and poison, to bring out copy races.
        context: Processes that share the tokens of a sequence, if several do.
        shards: Processes that share the tokens between the blocks of a layer (sequence parallelism).
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        device: torch.device,
        attention: str = "auto",
        schedule: str = "auto",
        test_mode: TestMode | None = None,
        context: ContextGroups | None = None,
        shards: int = 1,
    ) -> None:
        self.layers = list(layers)
        self.device = device
        self.test_mode = test_mode
        self.profile: StepProfile | None = None
        self.swap: SwapPlan | None = None
        self.memory: SlotMemory | None = None
        self.on_mark: Callable[[int, str], None] | None = None
        self._model = model
        self._attention = attention
        self._schedule = schedule
        self._context, self._shards = context, shards
        self._agreed = LayerTraits("", "layer", ())
        self._traits: dict[object, LayerTraits] = {}
        self._runs: weakref.WeakValueDictionary[int, LayerRun] = weakref.WeakValueDictionary()
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._planned_tokens = 0
        self._outgrown = False
        self._undo: list[Callable[[], None]] = []

    # ---- life

    def attach(self) -> None:
        """Put the engine around the layers' forward."""
        for layer in self.layers:
            self._undo.append(replace_forward(layer, self._run))
        self._undo += attach_attention(self._model)

    def detach(self) -> None:
        """Leave the model as it was, and give all memory back."""
        while self._undo:
            self._undo.pop()()
        self.unload()

    def load(self, swap: SwapPlan, tokens: int) -> None:
        """Run by `swap` from now on.

        Args:
            swap: The plan.
            tokens: Tokens of the batch that it was made for, all its sequences together.
        """
        self.unload()
        self.swap, self._planned_tokens = swap, tokens
        if swap.mode == "memo":
            self._allocate(swap.slot_bytes, swap.swapped_calls)

    def unload(self) -> None:
        """Forget the plan. Activations of forwards whose backward has not run are lost."""
        self.reset()
        if self.memory is not None:
            self.memory.close()
        self.swap = self.memory = self.profile = None
        self._outgrown = False

    def reset(self) -> None:
        """Give back whatever an interrupted step still holds."""
        for run in list(self._runs.values()):
            run.release()
        self._runs.clear()
        self._units.clear()

    def _allocate(self, slot_size: int, host_slots: int, pinned: bool = True) -> None:
        self.memory = SlotMemory(slot_size, host_slots, self.device, pinned, self.test_mode)

    @property
    def host_bytes(self) -> int:
        """Host memory held for swapped activations."""
        return 0 if self.memory is None else self.memory.arena.size_bytes

    @property
    def slots_in_use(self) -> int:
        """Host slots and rounding buffers held by layer calls whose backward has not ended."""
        return 0 if self.memory is None else self.memory.slots_in_use

    # ---- one layer call

    def _run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not needs_grad(layer, (args, kwargs)):
            return self._run_plainly(layer, forward, args, kwargs)
        if self._backward_was_interrupted():
            self.reset()
        x, call = self._read_call(layer, forward, args, kwargs)
        index = max(self._runs.keys(), default=-1) + 1
        if index == 0 and self.profiles(call.batch * call.tokens):
            self._start_profile(call, x)
        if self.profile is None and self.swap is not None and self.swap.mode == "plain":
            return self._run_plainly(layer, forward, args, kwargs)
        return self._run_slices(call, x.contiguous(), index)

    def _run_plainly(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The layer as it is, but for attention that has to meet the tokens of other processes."""
        if self._context is None and self._shards == 1:
            return forward(*args, **kwargs)
        x, call = self._read_call(layer, forward, args, kwargs)
        self._traits_of(call, x)

        def attend_across(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            return attend(self.backend(q, k, v, spec), q, k, v, spec)

        with handling(attend_across):
            return forward(*args, **kwargs)

    def _read_call(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, LayerCall]:
        x, call = read_call(layer, forward, args, kwargs, self._shards)
        self._check_input(call.tokens)
        return x, call

    def _check_input(self, tokens: int) -> None:
        """Layers among whose tokens there are only some of a sequence need to know which.

        Raises:
            ValueError: Their input is not of the batch that the strategy divided.
        """
        layout = current_layout()
        if self._context is None and self._shards == 1:
            return
        if layout is None or tokens * self._shards != layout.local_tokens:
            expected = "no batch was" if layout is None else f"the last batch was divided into {layout.local_tokens}"
            raise ValueError(
                f"a forward of {tokens * self._shards} tokens, but {expected}: with context_parallel_size or "
                "sequence_parallel models run on the batches that the steps get; generate text in one process"
            )

    def _backward_was_interrupted(self) -> bool:
        """Whether an exception ended a backward half-way. PyTorch keeps what waited in it until the next backward."""
        inside = torch._C._current_graph_task_id() != -1
        return not inside and any(run.in_backward for run in self._runs.values())

    def _run_slices(self, call: LayerCall, x: Tensor, index: int) -> Any:
        self.mark(index, "forward_begin")
        traits = self._traits_of(call, x)
        slices = self.slices_for(traits, call.tokens)
        self._check_layout(slices)
        assert self.swap is not None
        if self.profile is None and index >= self.swap.calls:
            self._outgrown = True  # more forwards before a backward than were planned: these stay on the device
        run = LayerRun(self, call, x, index, slices, self.memory, swap=index < self.swap.calls - RESIDENT_CALLS)
        self._runs[index] = run
        nested = not run.whole and "nest" in (self._schedule, traits.schedule)
        return run_nested(run, x) if nested else run_layer_schedule(run, x)

    def slices_for(self, traits: LayerTraits, tokens: int) -> tuple[TokenRange, ...]:
        """How the plan cuts a layer's input. A layer that cannot be cut is swapped or recomputed as one."""
        assert self.swap is not None
        alpha = self.swap.alpha
        if traits.why_whole or self._agreed.why_whole:
            return (TokenRange(0, tokens, Action.SWAP if alpha >= 1.0 else Action.RECOMPUTE),)
        return slice_tokens_by_alpha(tokens, alpha, self.swap.slice_tokens)

    def profiles(self, tokens: int) -> bool:
        """Whether a step with so many tokens is going to be profiled: no plan covers it."""
        return self.swap is None or self._outgrown or tokens > self._planned_tokens

    def bounds_for(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a training batch are going to end; nothing if layers run as one slice.

        Args:
            batch: Sequences.
            tokens: Tokens of each that this process holds between the blocks of a layer.
        """
        if self.swap is None or self.swap.mode == "plain" or self.profiles(batch * tokens):
            return ()
        traits = next((traits for traits in self.traits if traits.why_whole), self._agreed)
        return tuple(part.stop for part in self.slices_for(traits, tokens))

    def _check_layout(self, slices: Sequence[TokenRange]) -> None:
        """Sequence-parallel shards hold their part of every slice: a batch laid out for others is in another order.

        Raises:
            RuntimeError: The batch was laid out for other slices.
        """
        layout = current_layout()
        if layout is None or layout.shards == 1:
            return
        laid_out = layout.bounds or (slices[-1].stop,)
        if laid_out != tuple(part.stop for part in slices):
            raise RuntimeError(
                f"the batch was laid out for slices that end at {laid_out}, and layers run slices that end at "
                f"{tuple(part.stop for part in slices)}: every forward of a step has to take the strategy's batch"
            )

    # ---- profile

    def _start_profile(self, call: LayerCall, x: Tensor) -> None:
        """Begin a step in which every layer is recomputed, with memory for just that (pageable: it serves once)."""
        started = time.perf_counter()
        self._traits.clear()  # sizes of attention, and whether there are tokens to cut, differ from an earlier batch
        attention = self._traits_of(call, x).attention_bytes
        saved = [SavedBytes("input", x.nbytes), *(SavedBytes("out", size) for size in attention)]
        whole = (TokenRange(0, call.tokens, Action.RECOMPUTE),)
        calls = len(self.layers)
        bootstrap = SwapPlan(
            mode="memo", alpha=0.0, schedule="layer", slice_tokens=None, calls=calls,
            slot_bytes=slot_bytes(saved, call.tokens, whole, "layer"),
        )  # fmt: skip
        self.unload()
        self.swap, self._planned_tokens = bootstrap, call.batch * call.tokens
        self._allocate(bootstrap.slot_bytes, bootstrap.swapped_calls, pinned=False)
        self.profile = StepProfile(self.device, call.batch, call.tokens, x.nbytes)
        self.profile.setup_seconds = time.perf_counter() - started

    @property
    def traits(self) -> tuple[LayerTraits, ...]:
        """Traits of the kinds of layers met so far."""
        return tuple(self._traits.values())

    @property
    def why_whole(self) -> str:
        """Why some layer cannot be cut into slices; empty if all can."""
        return next((traits.why_whole for traits in (*self.traits, self._agreed) if traits.why_whole), "")

    @property
    def schedule(self) -> str:
        """The schedule of the model's layers: "nest" if it is wished, or some layer needs it."""
        schedules = (self._schedule, self._agreed.schedule, *(traits.schedule for traits in self.traits))
        return "nest" if "nest" in schedules else "layer"

    def agree(self, why_whole: str, schedule: str) -> None:
        """Take over what some process found out about its layers, so that all run alike."""
        self._agreed = LayerTraits(why_whole, schedule, ())

    def _traits_of(self, call: LayerCall, x: Tensor) -> LayerTraits:
        """Layers with parameters of the same names and shapes are of one kind, and looked at once."""
        shapes = tuple((name, tuple(p.shape)) for name, p in call.layer.named_parameters())
        # A single token says nothing about longer sequences.
        kind = (type(call.layer), call.layer.training, call.tokens < 2, shapes)
        if kind not in self._traits:
            with collecting_nothing():
                traits = probe_layer(call, x, self.backend)
            self._refuse_mixing(traits)
            self._traits[kind] = traits
        return self._traits[kind]

    def _refuse_mixing(self, traits: LayerTraits) -> None:
        """Layers among whose tokens there are only some of a sequence must not look at others but in attention.

        Raises:
            ValueError: They may.
        """
        if traits.may_mix and current_layout() is not None:
            raise ValueError(
                f"{traits.why_whole}, and the tokens of a sequence are divided over processes: train this model with "
                "context_parallel_size=1 and sequence_parallel=False"
            )

    # ---- what layer runs ask for

    def backend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionBackend:
        """The attention kernel for these tensors, which are all tokens or, context-parallel, this process's."""
        if self._context is not None:
            return ContextAttention(self._context, functools.partial(select_backend, choice=self._attention))
        return select_backend(q, k, v, spec, self._attention)

    def check_sliceable(self, run: LayerRun, spec: AttentionSpec) -> None:
        """Refuse attention that needs tokens a slice has not got.

        Raises:
            ValueError: The attention changed since the layer was looked at.
        """
        if not run.whole and not spec.sliceable:
            raise ValueError(
                f"{type(run.call.layer).__name__} was cut into {len(run.slices)} slices, but its attention is now not "
                "causal, has an explicit mask or draws dropout: keep attention alike in all steps, or set alpha=0"
            )

    def needs_mode(self, run: LayerRun) -> bool:
        """Whether torch functions are to be caught: for dropout in slices, and for attention imported by name.

        Layers of transformers call attention through its interface; for one slice of them nothing is to be caught.
        """
        # FSDP2 and tensor parallelism give a layer a class of their own, made from its own.
        kinds = type(run.call.layer).__mro__
        return not run.whole or not any(kind.__module__.startswith("transformers.") for kind in kinds)

    def count_overflow(self, size_bytes: int) -> None:
        if self.memory is not None:
            self.memory.stats.overflow_bytes += size_bytes

    def mark(self, index: int, name: str) -> None:
        """Layer call `index` begins or ends something: tell whoever measures."""
        if self.profile is not None:
            self.profile.mark(index, name)
        if self.on_mark is not None:
            self.on_mark(index, name)

    def open_unit(self, memory: SlotMemory | None, swap: bool) -> Unit:
        """A unit of memory, behind those that are alive."""
        unit = Unit(self, max(self._units.keys(), default=-1) + 1, memory, swap)
        self._units[unit.number] = unit
        return unit

    def fetch(self, unit: Unit, memory: SlotMemory) -> None:
        """Bring a unit to the device; start bringing the one that comes next."""
        assert unit.slot is not None
        memory.fetch(unit.slot, unit.number)
        unit.slot.in_backward = True
        following = self._units.get(unit.number - 1)
        if following is not None and following.slot is not None:
            memory.fetch(following.slot, following.number, ahead=True)

    def end_backward(self, run: LayerRun) -> None:
        self.mark(run.index, "backward_end")
        if self._runs.get(run.index) is run:
            del self._runs[run.index]
        if self._units.get(run.unit.number) is run.unit:
            del self._units[run.unit.number]
