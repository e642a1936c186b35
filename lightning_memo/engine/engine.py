"""The engine: wraps a model's layers and runs their calls by a swap plan."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.attach import attach_attention
from lightning_memo.engine.attention import attend
from lightning_memo.engine.attention_kernels import AttentionKernels
from lightning_memo.engine.block_reader import BlockReader
from lightning_memo.engine.find import find_hugging_face
from lightning_memo.engine.intercept import current_layout, handling, set_layout
from lightning_memo.engine.layer_forward import needs_grad, read_call, replace_forward
from lightning_memo.engine.layer_kinds import LayerKinds
from lightning_memo.engine.lazy_inputs import attach_lazy_inputs
from lightning_memo.engine.lazy_tensor import LazyTensor, real
from lightning_memo.engine.memory import SlotMemory, TestMode
from lightning_memo.engine.probe import LayerTraits
from lightning_memo.engine.profile import StepProfile
from lightning_memo.engine.run import LayerCall, LayerRun
from lightning_memo.engine.schedule import run_last_layer, run_layer_schedule, run_nested, run_without_backward
from lightning_memo.engine.sequence import SequenceRun, SlicedModel
from lightning_memo.engine.slice_arguments import parkable
from lightning_memo.engine.slices import (
    Action,
    SavedBytes,
    TokenRange,
    slice_tokens_by_alpha,
    slot_bytes,
)
from lightning_memo.engine.streamed_attention import StreamedAttention, UlyssesCore
from lightning_memo.engine.streamed_sizes import streamed_sizes
from lightning_memo.engine.unit import Unit
from lightning_memo.engine.wishes import Wishes
from lightning_memo.kernels import AttentionSpec
from lightning_memo.parallel.batch import takes_loss_arguments
from lightning_memo.parallel.context import ContextGroups
from lightning_memo.parallel.layout import TokenLayout, slice_multiple
from lightning_memo.plan import HostBacked, StreamedBytes, SwapPlan

_KINDS_OF_LAYERS = 4
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
        schedule: "auto", "nest" to nest slices where that is not necessary, or "slice" to run the whole model on one
            slice after the other.
        test_mode: Delays and poison, to bring out copy races.
        context: Processes that share the tokens of a sequence, if several do.
        shards: Processes that share the tokens between the blocks of a layer (sequence parallelism).
        slice_tokens: Longest slice in a profiled step of which no more may be on the device; `None`: no limit.
        host_backed: What lives on the host in a profiled step: see :class:`~lightning_memo.plan.SwapPlan`; "auto" is
            "attention" where `slice_tokens` are given and the layers can run slice after slice.
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
        slice_tokens: int | None = None,
        host_backed: HostBacked | Literal["auto"] = "none",
    ) -> None:
        self.layers = list(layers)
        self.device = device
        self.test_mode = test_mode
        self.profile: StepProfile | None = None
        self.swap: SwapPlan | None = None
        self.memory: SlotMemory | None = None
        self.on_mark: Callable[[int, str], None] | None = None
        self._model = model
        self._context, self._shards = context, shards
        self._wishes = Wishes(schedule, slice_tokens, host_backed, divided=context is not None or shards > 1)
        self.attention = AttentionKernels(attention, context, self.slices_outside)
        self.kinds = LayerKinds(self.attention.backend, self._wishes)
        self._runs: weakref.WeakValueDictionary[int, LayerRun] = weakref.WeakValueDictionary()
        self._reader: BlockReader | None = None
        self._sequence: SequenceRun | None = None
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._planned_tokens = 0
        self._shared: list[SavedBytes] = []  # what layers share of the first slice, where it waits on the host
        self._outgrown = self._planned_short = False
        self._undo: list[Callable[[], None]] = []

    # ---- life

    def attach(self) -> None:
        """Put the engine around the layers' forward."""
        for layer in self.layers:
            self._undo.append(replace_forward(layer, self._run))
        self._undo += attach_attention(self._model)
        if self._wishes.states_on_host:
            self._undo += attach_lazy_inputs(self._model, self._wishes.slice_tokens or 1)
        if self._wishes.schedule == "slice":
            sliced = SlicedModel(self, self._wishes.slice_tokens or 1)
            self._undo.append(replace_forward(self._language_model(), sliced))

    def _language_model(self) -> nn.Module:
        """What the schedule "slice" cuts.

        Raises:
            ValueError: The model has none.
        """
        model = next(iter(find_hugging_face(self._model)), None)
        if model is None or not takes_loss_arguments(model):
            raise ValueError(
                'schedule="slice" runs a causal language model of transformers slice by slice, and '
                f'{type(self._model).__name__} has none: use schedule="layer"'
            )
        return model

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

        Raises:
            ValueError: It is for another way of running the layers.
        """
        if why := self.why_not(swap):
            raise ValueError(f"the plan cannot run here: {why}")
        self.unload()
        self.swap, self._planned_tokens = swap, tokens
        if swap.mode == "memo":
            self._allocate(swap)

    def why_not(self, swap: SwapPlan) -> str:
        """Why layers cannot run by a plan, which was made for other settings; empty if they can."""
        if "slice" in (swap.schedule, self._wishes.schedule) and swap.schedule != self._wishes.schedule:
            return f'it was made for schedule="{swap.schedule}"'
        if self._context is not None and swap.streamed != self.slices_outside:
            return f'it was made for host_backed="{swap.host_backed}"'
        return ""

    def unload(self) -> None:
        """Forget the plan. Activations of forwards whose backward has not run are lost."""
        self.reset()
        if self.memory is not None:
            self.memory.close()
        self.swap = self.memory = self.profile = self._reader = None
        self._outgrown = False

    def reset(self) -> None:
        """Give back whatever an interrupted step still holds."""
        for unit in list(self._units.values()):
            unit.release()
        if self.memory is not None:
            self.memory.abandon()
        self._units.clear()
        self._runs.clear()

    def _allocate(self, swap: SwapPlan, pinned: bool = True) -> None:
        self.memory = SlotMemory(
            swap.slot_bytes, swap.host_bytes, self.device, pinned, self.test_mode, whole_slots=not swap.streamed,
            gradient_bytes=swap.gradient_host_bytes, state_bytes=swap.state_host_bytes,
        )  # fmt: skip
        # One block is computed with while another arrives; gradients are also on their way back.
        self._reader = self.memory.reader(3 if swap.host_backed == "all" else 2)

    @property
    def host_bytes(self) -> int:
        """Host memory held for swapped activations."""
        return 0 if self.memory is None else self.memory.host_bytes

    @property
    def slots_in_use(self) -> int:
        """Host slots and rounding buffers held by layer calls whose backward has not ended."""
        return 0 if self.memory is None else self.memory.slots_in_use

    # ---- one layer call

    def _run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A slice of the model needs the keys and values of earlier ones in layers without gradients, too.
        if not torch.is_grad_enabled() or not (self._sequence or needs_grad(layer, (args, kwargs))):
            return self._run_plainly(layer, forward, args, kwargs)
        if self._backward_was_interrupted():
            self.reset()
        x, call = self._read_call(layer, forward, args, kwargs)
        alive = max(self._runs.keys(), default=-1) + 1
        tokens = call.tokens if self._sequence is None else self._sequence.tokens
        if alive == 0 and self.profiles(call.batch, tokens):
            self._start_profile(call, x)
        if self.profile is None and self.swap is not None and self.swap.mode == "plain":
            return self._run_plainly(layer, forward, args, kwargs)
        if self._sequence is not None:
            return self._run_slice(self._sequence, call, x.contiguous(), alive)
        if not (self.swap is not None and self.swap.streamed):
            x = real(x)
        return self._run_slices(call, x.contiguous(), alive)

    def _run_plainly(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The layer as it is, but for attention that has to meet tokens of other processes or of earlier slices."""
        lazy = any(isinstance(t, LazyTensor) for t in tree_leaves((args, kwargs)))
        if self._context is None and self._shards == 1 and not lazy:
            return forward(*args, **kwargs)
        x, call = self._read_call(layer, forward, args, kwargs)
        layout = current_layout()
        outside = layout is not None and layout.outside and len(layout.bounds) > 1
        if outside or (isinstance(x, LazyTensor) and (self.swap is None or self.swap.streamed)):
            return self._run_slices_without_backward(call, x.contiguous())
        self.kinds.of(call, x)

        def attend_across(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            return attend(self.attention.backend(q, k, v, spec), q, k, v, spec)

        with handling(attend_across):
            return forward(*args, **kwargs)

    def _run_slices_without_backward(self, call: LayerCall, x: Tensor) -> Any:
        """A layer call of which nothing is differentiated, in a step that runs slice by slice."""
        if not self._runs and self.profiles(call.batch, call.tokens):
            self._start_profile(call, x)
        slices = self.slices_for(self.kinds.of(call, x), call.tokens)
        self._check_layout(slices)
        return run_without_backward(LayerRun(self, call, x, 0, slices, self.memory, True, True, measured=False), x)

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

    @contextlib.contextmanager
    def slice_by_slice(self, layout: TokenLayout, batch: int) -> Iterator[SequenceRun]:
        """Inside, layers get one slice of the sequence after the other.

        Args:
            layout: The sequence.
            batch: Sequences.
        """
        if self._backward_was_interrupted():
            self.reset()
        if self._runs:
            raise ValueError(
                'schedule="slice" takes one forward of the model before its backward, and there is another: run the '
                'backward first, or use schedule="layer"'
            )
        planned = None if self.profiles(batch, layout.tokens) else self.swap
        alpha, longest = (0.0, self._wishes.slice_tokens) if planned is None else (planned.alpha, planned.slice_tokens)
        self._sequence = SequenceRun(self, self.cut(layout.tokens, alpha, longest), batch)
        set_layout(layout)
        try:
            yield self._sequence
        finally:
            self._sequence = None
            set_layout(None)

    def _run_slice(self, sequence: SequenceRun, call: LayerCall, x: Tensor, alive: int) -> Any:
        """A layer call on one slice of the sequence."""
        index = alive % len(self.layers)
        self.mark(alive, "forward_begin", index, sequence.index)
        assert self.swap is not None
        if self.profile is None and alive >= self.swap.calls * len(sequence.slices):
            self._outgrown = True
        if sequence.index == 0:  # the last slice may have a single token, which says nothing
            self.kinds.of(call, x)
        assert self.memory is not None
        sequence.enter(call, self.memory)
        if self.profile is not None and sequence.index == 0:
            self._shared = sequence.arguments.saved
        part = TokenRange(0, call.tokens, sequence.slice.action)
        run = LayerRun(
            self, call, x, index, (part,), self.memory, swap=True, streamed=True, sequence=sequence, key=alive
        )
        self._runs[alive] = run
        if call.layer is not self.layers[-1]:
            return run_layer_schedule(run, x)
        y, sequence.output = run_last_layer(run, x)
        return y

    def _run_slices(self, call: LayerCall, x: Tensor, index: int) -> Any:
        self.mark(index, "forward_begin", index)
        traits = self.kinds.of(call, x)
        slices = self.slices_for(traits, call.tokens)
        self._check_layout(slices)
        assert self.swap is not None
        if self.profile is None and index >= self.swap.calls:
            self._outgrown = True  # more forwards before a backward than were planned: these stay on the device
        swap = self.swap.streamed or index < self.swap.calls - RESIDENT_CALLS
        run = LayerRun(self, call, x, index, slices, self.memory, swap, self.swap.streamed)
        self._runs[index] = run
        nested = not run.whole and "nest" in (self._wishes.schedule, traits.schedule)
        return run_nested(run, x) if nested else run_layer_schedule(run, x)

    def slices_for(self, traits: LayerTraits, tokens: int) -> tuple[TokenRange, ...]:
        """How the plan cuts a layer's input. A layer that cannot be cut is swapped or recomputed as one."""
        assert self.swap is not None
        alpha = self.swap.alpha
        if traits.why_whole or self.kinds.agreed.why_whole:
            return (TokenRange(0, tokens, Action.SWAP if alpha >= 1.0 else Action.RECOMPUTE),)
        return self.cut(tokens, alpha, self.swap.slice_tokens)

    def cut(self, tokens: int, alpha: float, longest: int | None) -> tuple[TokenRange, ...]:
        """Slices of this process's tokens, swapped up to `alpha`, each at most `longest`."""
        groups = self._context if self.slices_outside else None
        unit = 1 if groups is None else slice_multiple(groups.ring_size, groups.ulysses_size, self._shards)
        return slice_tokens_by_alpha(tokens, alpha, longest, unit)

    @property
    def states_on_host(self) -> bool:
        """Whether hidden states between layers, and their gradients, are on the host."""
        return self.swap is not None and self.swap.host_backed == "all" and self._sequence is None

    @property
    def slices_outside(self) -> bool:
        """Whether slices are ranges of the whole sequence, which context-parallel processes share."""
        return self._context is not None and self._wishes.may_stream

    def profiles(self, batch: int, tokens: int) -> bool:
        """Whether a step with so many sequences of so many tokens is going to be profiled: no plan covers it."""
        # A batch that needed no slices tells nothing of those that do.
        outgrown = self._outgrown or (self._planned_short and tokens > (self._wishes.slice_tokens or tokens))
        return self.swap is None or outgrown or batch * tokens > self._planned_tokens

    def bounds_for(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a training batch are going to end; nothing if layers run as one slice.

        Args:
            batch: Sequences.
            tokens: Tokens of each that this process holds between the blocks of a layer.
        """
        if self.profiles(batch, tokens):
            longest = self._wishes.slice_tokens if self._wishes.may_stream else None
            return tuple(part.stop for part in self.cut(tokens, 0.0, longest)) if longest else ()
        if self.swap is None or self.swap.mode == "plain":
            return ()
        traits = next((traits for traits in self.kinds if traits.why_whole), self.kinds.agreed)
        return tuple(part.stop for part in self.slices_for(traits, tokens))

    def _check_layout(self, slices: Sequence[TokenRange]) -> None:
        """Sequence-parallel shards hold their part of every slice: a batch laid out for others is in another order.

        Raises:
            RuntimeError: The batch was laid out for other slices.
        """
        layout = current_layout()
        if layout is None or (layout.shards == 1 and not layout.outside):
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
        self.kinds.forget()
        traits = self.kinds.of(call, x)
        sliced = self.slices_outside or self._sequence is not None
        backing = self._wishes.backing(traits, type(call.layer).__name__, call.tokens, sliced)
        slices = self.cut(call.tokens, 0.0, None if backing == "none" else self._wishes.slice_tokens)
        if self._sequence is not None:
            slices = self._sequence.slices
            # Layers of different kinds may get different ones: of some kinds, how many is not known yet.
            shared = parkable((call.args, call.kwargs)) * _KINDS_OF_LAYERS
            self._shared = [SavedBytes("shared", t.nbytes * traits.tokens // call.tokens) for t in shared]
        bootstrap = self._bootstrap(traits, x.nbytes * traits.tokens // call.tokens, slices, backing)
        self.unload()
        self._planned_short = self._wishes.may_stream and call.tokens <= (self._wishes.slice_tokens or 0) and not sliced
        self.swap, self._planned_tokens = bootstrap, call.batch * slices[-1].stop
        self._allocate(bootstrap, pinned=False)
        self.profile = StepProfile(self.device, call.batch, slices[-1].stop, slices[0].tokens)
        self.profile.setup_seconds = time.perf_counter() - started

    def _bootstrap(
        self, traits: LayerTraits, input_bytes: int, slices: Sequence[TokenRange], host_backed: HostBacked
    ) -> SwapPlan:
        """Full recomputation, as far as a layer's memory is known before it has run."""
        saved = (SavedBytes("input", input_bytes), *traits.saved)
        plan = SwapPlan(
            mode="memo", alpha=0.0, schedule="layer", slice_tokens=None, calls=len(self.layers),
            slot_bytes=slot_bytes(saved, traits.tokens, slices, "layer"),
        )  # fmt: skip
        if host_backed == "none":
            return plan
        calls = [(saved, traits.tokens)] * len(self.layers)
        sizes = self.streamed_bytes(calls, slices, host_backed)
        return replace(
            plan, schedule=self.kinds.schedule, slice_tokens=self._wishes.slice_tokens, host_backed=host_backed,
            slot_bytes=sizes.slot, streamed_host_bytes=sizes.host, gradient_host_bytes=sizes.gradients,
            state_host_bytes=sizes.states, staging_bytes=sizes.staging,
        )  # fmt: skip

    def streamed_bytes(
        self, calls: Sequence[tuple[Sequence[SavedBytes], int]], slices: Sequence[TokenRange], host_backed: HostBacked
    ) -> StreamedBytes:
        """Memory of a plan by which slices swap for themselves; see :func:`streamed_sizes`."""
        kinds, block_tokens = self.kinds, self.attention.block_tokens
        return streamed_sizes(calls, list(kinds), slices, host_backed, block_tokens, kinds.schedule, self._shared)

    # ---- what layer runs ask for

    def streamed_attention(self, slices: Sequence[TokenRange]) -> StreamedAttention | UlyssesCore:
        """Attention whose earlier keys and values come from the host, for slices of this process's tokens."""
        assert self._reader is not None and self.swap is not None
        return self.attention.streamed(slices, self._reader, self.memory if self.swap.host_backed == "all" else None)

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

    def mark(self, key: int, name: str, index: int, first_slice: int = 0) -> None:
        """A layer call begins or ends something: tell whoever measures.

        Args:
            key: The call among those that are alive.
            name: What happens.
            index: The layer's position, which calls for several slices of a sequence share.
            first_slice: The slice of the sequence, if the call is for one.
        """
        if self.profile is not None:
            self.profile.mark(index, name, again=first_slice > 0)
        if self.on_mark is not None:
            self.on_mark(key, name)

    def open_unit(self, memory: SlotMemory | None, swap: bool) -> Unit:
        """A unit of memory, behind those that are alive."""
        unit = Unit(self, max(self._units.keys(), default=-1) + 1, memory, swap)
        self._units[unit.number] = unit
        return unit

    def close_unit(self, unit: Unit) -> None:
        if self._units.get(unit.number) is unit:
            del self._units[unit.number]

    def fetch(self, unit: Unit, memory: SlotMemory) -> None:
        """Bring a unit to the device; start bringing the one that comes next."""
        assert unit.slot is not None
        memory.fetch(unit.slot, unit.number)
        unit.slot.in_backward = True
        following = self._units.get(unit.number - 1)
        if following is not None and following.slot is not None:
            memory.fetch(following.slot, following.number, ahead=True)

    def end_backward(self, run: LayerRun) -> None:
        run.mark("backward_end")
        if self._runs.get(run.key) is run:
            del self._runs[run.key]
