"""The engine: wraps a model's layers and runs their calls by a swap plan."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_memo.engine.attach import attach_attention, collecting_nothing
from lightning_memo.engine.attention import attend
from lightning_memo.engine.block_reader import BlockReader
from lightning_memo.engine.find import find_hugging_face
from lightning_memo.engine.intercept import current_layout, handling, set_layout
from lightning_memo.engine.layer_forward import needs_grad, read_call, replace_forward
from lightning_memo.engine.memory import SlotMemory, TestMode
from lightning_memo.engine.probe import LayerTraits, probe_layer
from lightning_memo.engine.profile import StepProfile
from lightning_memo.engine.run import LayerCall, LayerRun
from lightning_memo.engine.schedule import run_last_layer, run_layer_schedule, run_nested
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
from lightning_memo.kernels import AttentionBackend, AttentionSpec, RngState, select_backend
from lightning_memo.parallel.context import ContextAttention, ContextGroups
from lightning_memo.parallel.layout import TokenLayout, slice_multiple
from lightning_memo.parallel.ulysses import HeadExchange
from lightning_memo.plan import HostBacked, StreamedBytes, SwapPlan

# Keys and values that come from the host at once: a kernel call should have work for a whole GPU, and a copy be worth
# its launch.
BLOCK_TOKENS = 2048
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
        self.block_tokens = BLOCK_TOKENS
        self.rng_state: RngState | None = None  # when the last layer call began; most have the same
        self.memory: SlotMemory | None = None
        self.on_mark: Callable[[int, str], None] | None = None
        self._model = model
        self._attention = attention
        self._schedule = schedule
        self._context, self._shards = context, shards
        # Of a profiled step.
        self._slice_tokens, self._host_backed = slice_tokens, host_backed
        self._agreed = LayerTraits("", "layer")
        self._traits: dict[object, LayerTraits] = {}
        self._runs: weakref.WeakValueDictionary[int, LayerRun] = weakref.WeakValueDictionary()
        self._reader: BlockReader | None = None
        self._sequence: SequenceRun | None = None
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._planned_tokens = 0
        self._shared: list[SavedBytes] = []  # what layers share of the first slice, where it waits on the host
        self._outgrown = False
        self._undo: list[Callable[[], None]] = []

    # ---- life

    def attach(self) -> None:
        """Put the engine around the layers' forward."""
        for layer in self.layers:
            self._undo.append(replace_forward(layer, self._run))
        self._undo += attach_attention(self._model)
        if self._schedule == "slice":
            self._undo.append(replace_forward(self._language_model(), SlicedModel(self, self._slice_tokens or 1)))

    def _language_model(self) -> nn.Module:
        """What the schedule "slice" cuts.

        Raises:
            ValueError: The model has none.
        """
        model = next(iter(find_hugging_face(self._model)), None)
        if model is None or not hasattr(model, "loss_function"):
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
        if "slice" in (swap.schedule, self._schedule) and swap.schedule != self._schedule:
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
        self._units.clear()
        self._runs.clear()
        self.rng_state = None

    def _allocate(self, swap: SwapPlan, pinned: bool = True) -> None:
        self.memory = SlotMemory(
            swap.slot_bytes, swap.host_bytes, self.device, pinned, self.test_mode, whole_slots=not swap.streamed,
            gradient_bytes=swap.gradient_host_bytes,
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
        if not torch.is_grad_enabled() or not needs_grad(layer, (args, kwargs)):
            return self._run_plainly(layer, forward, args, kwargs)
        if self._backward_was_interrupted():
            self.reset()
        x, call = self._read_call(layer, forward, args, kwargs)
        alive = max(self._runs.keys(), default=-1) + 1
        tokens = call.tokens if self._sequence is None else self._sequence.tokens
        if alive == 0 and self.profiles(call.batch * tokens):
            self._start_profile(call, x)
        if self.profile is None and self.swap is not None and self.swap.mode == "plain":
            return self._run_plainly(layer, forward, args, kwargs)
        if self._sequence is not None:
            return self._run_slice(self._sequence, call, x.contiguous(), alive)
        return self._run_slices(call, x.contiguous(), alive)

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

    @contextlib.contextmanager
    def slice_by_slice(self, layout: TokenLayout, batch: int) -> Iterator[SequenceRun]:
        """Inside, layers get one slice of the sequence after the other.

        Args:
            layout: The sequence.
            batch: Sequences.
        """
        if self._backward_was_interrupted():
            self.reset()
        planned = None if self.profiles(batch * layout.tokens) else self.swap
        alpha, longest = (0.0, self._slice_tokens) if planned is None else (planned.alpha, planned.slice_tokens)
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
            self._traits_of(call, x)
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
        traits = self._traits_of(call, x)
        slices = self.slices_for(traits, call.tokens)
        self._check_layout(slices)
        assert self.swap is not None
        if self.profile is None and index >= self.swap.calls:
            self._outgrown = True  # more forwards before a backward than were planned: these stay on the device
        swap = self.swap.streamed or index < self.swap.calls - RESIDENT_CALLS
        run = LayerRun(self, call, x, index, slices, self.memory, swap, self.swap.streamed)
        self._runs[index] = run
        nested = not run.whole and "nest" in (self._schedule, traits.schedule)
        return run_nested(run, x) if nested else run_layer_schedule(run, x)

    def slices_for(self, traits: LayerTraits, tokens: int) -> tuple[TokenRange, ...]:
        """How the plan cuts a layer's input. A layer that cannot be cut is swapped or recomputed as one."""
        assert self.swap is not None
        alpha = self.swap.alpha
        if traits.why_whole or self._agreed.why_whole:
            return (TokenRange(0, tokens, Action.SWAP if alpha >= 1.0 else Action.RECOMPUTE),)
        return self.cut(tokens, alpha, self.swap.slice_tokens)

    def cut(self, tokens: int, alpha: float, longest: int | None) -> tuple[TokenRange, ...]:
        """Slices of this process's tokens, swapped up to `alpha`, each at most `longest`."""
        groups = self._context if self.slices_outside else None
        unit = 1 if groups is None else slice_multiple(groups.ring_size, groups.ulysses_size, self._shards)
        return slice_tokens_by_alpha(tokens, alpha, longest, unit)

    @property
    def slices_outside(self) -> bool:
        """Whether slices are ranges of the whole sequence, which context-parallel processes share."""
        return self._context is not None and self._may_stream

    def profiles(self, tokens: int) -> bool:
        """Whether a step with so many tokens is going to be profiled: no plan covers it."""
        return self.swap is None or self._outgrown or tokens > self._planned_tokens

    def bounds_for(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a training batch are going to end; nothing if layers run as one slice.

        Args:
            batch: Sequences.
            tokens: Tokens of each that this process holds between the blocks of a layer.
        """
        if self.profiles(batch * tokens):
            longest = self._slice_tokens if self._may_stream else None
            return tuple(part.stop for part in self.cut(tokens, 0.0, longest)) if longest else ()
        if self.swap is None or self.swap.mode == "plain":
            return ()
        traits = next((traits for traits in self.traits if traits.why_whole), self._agreed)
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
        self._traits.clear()  # sizes of attention, and whether there are tokens to cut, differ from an earlier batch
        traits = self._traits_of(call, x)
        backing = self._backing(traits, call)
        slices = self.cut(call.tokens, 0.0, None if backing == "none" else self._slice_tokens)
        if self._sequence is not None:
            slices = self._sequence.slices
        if self._sequence is not None:
            # Layers of different kinds may get different ones: of some kinds, how many is not known yet.
            shared = parkable((call.args, call.kwargs)) * _KINDS_OF_LAYERS
            self._shared = [SavedBytes("shared", t.nbytes * traits.tokens // call.tokens) for t in shared]
        bootstrap = self._bootstrap(traits, x.nbytes * traits.tokens // call.tokens, slices, backing)
        self.unload()
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
            plan, schedule=self.schedule, slice_tokens=self._slice_tokens, host_backed=host_backed,
            slot_bytes=sizes.slot, streamed_host_bytes=sizes.host, gradient_host_bytes=sizes.gradients,
            staging_bytes=sizes.staging,
        )  # fmt: skip

    def streamed_bytes(
        self, calls: Sequence[tuple[Sequence[SavedBytes], int]], slices: Sequence[TokenRange], host_backed: HostBacked
    ) -> StreamedBytes:
        """Memory of a plan by which slices swap for themselves; see :func:`streamed_sizes`."""
        return streamed_sizes(calls, self.traits, slices, host_backed, self.block_tokens, self.schedule, self._shared)

    @property
    def _may_stream(self) -> bool:
        """Whether a profiled step may have keys and values on the host.

        Where processes share tokens, a batch is laid out for slices before the layers are known, so only if it was
        asked for by name.
        """
        alone = self._shards == 1 and self._context is None
        return self._host_backed != "none" and (self._host_backed != "auto" or alone)

    def _backing(self, traits: LayerTraits, call: LayerCall) -> HostBacked:
        """What lives on the host in a profiled step.

        Raises:
            ValueError: Keys and values shall, and the layers cannot run slice after slice.
        """
        cut_outside = self.slices_outside or self._sequence is not None
        short = self._slice_tokens is None or (call.tokens <= self._slice_tokens and not cut_outside)
        if short or not self._may_stream:
            return "none"
        whole = traits.why_whole or self._agreed.why_whole
        why = (
            whole or f"attention of {type(call.layer).__name__} needs all tokens at once"
            if "nest" in (self._schedule, traits.schedule)
            else whole
        )
        if not why:
            return "all" if self._sequence else "attention" if self._host_backed == "auto" else self._host_backed
        if self._host_backed == "auto" and self._sequence is None:
            return "none"
        raise ValueError(
            f'host_backed="{self._host_backed}" runs layers slice after slice, but {why}: set host_backed="none"'
        )

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
        return "nest" if "nest" in schedules else "slice" if self._schedule == "slice" else "layer"

    def agree(self, why_whole: str, schedule: str) -> None:
        """Take over what some process found out about its layers, so that all run alike."""
        self._agreed = LayerTraits(why_whole, schedule)

    def _traits_of(self, call: LayerCall, x: Tensor) -> LayerTraits:
        """Layers with parameters of the same names and shapes are of one kind, and looked at once."""
        shapes = tuple((name, tuple(p.shape)) for name, p in call.layer.named_parameters())
        # A single token says nothing about longer sequences.
        kind = (type(call.layer), call.layer.training, call.tokens < 2, shapes)
        if kind not in self._traits:
            with collecting_nothing():
                # Where no more than a slice may be on the device, two of them have to show what a layer is like.
                longest = 2 * self._slice_tokens if self._slice_tokens is not None and self._may_stream else None
                traits = probe_layer(call, x, self.backend, longest)
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
            select = functools.partial(select_backend, choice=self._attention)
            return ContextAttention(self._context, select, self.slices_outside)
        return select_backend(q, k, v, spec, self._attention)

    def streamed_attention(self, slices: Sequence[TokenRange]) -> StreamedAttention | UlyssesCore:
        """Attention whose earlier keys and values come from the host, for slices of this process's tokens."""
        assert self.memory is not None and self._reader is not None and self.swap is not None
        host = self.memory if self.swap.host_backed == "all" else None
        groups, select = self._context or ContextGroups(), functools.partial(select_backend, choice=self._attention)
        slices = [part.gathered(groups.ulysses_size) for part in slices]
        kernel = groups.ring_kernel(select, tuple(part.stop for part in slices))
        core = StreamedAttention(kernel, slices, self._reader, host, self.block_tokens, groups.ring_size)
        return core if groups.ulysses is None else UlyssesCore(HeadExchange(groups.ulysses), core)

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
