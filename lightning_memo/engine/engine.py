"""The engine: wraps a model's layers and runs their calls by a swap plan."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memo.artifacts.swap_plan import Attention, HostBacked, StreamedBytes, SwapPlan
from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.engine.attention.hugging_face import attach_attention
from lightning_memo.engine.attention.sliced_attention import attend
from lightning_memo.engine.attention.streamed_attention import StreamedAttention, StreamedUlysses
from lightning_memo.engine.bootstrap_plan import first_plan
from lightning_memo.engine.copies.step_recorder import StepRecorder, Subject
from lightning_memo.engine.copies.test_mode import TestMode
from lightning_memo.engine.forward.activation_checkpointing import refuse_layer_in_backward
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.layers.check_layout import check_bounds, check_tokens, divided_by_slices
from lightning_memo.engine.layers.layer_run import LayerCall, LayerRun
from lightning_memo.engine.layers.slice_schedules import run_layer_schedule, run_nested, run_without_backward
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.layers.storage_slices import stored_slices, why_not_stored
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.lazy_tensor import LazyTensor, real
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.memory.spill import Spill
from lightning_memo.engine.modules.layer_forward import needs_grad, read_call, replace_forward
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.modules.layer_traits import LayerKinds
from lightning_memo.engine.modules.lazy_inputs import attach_lazy_inputs
from lightning_memo.engine.modules.requested_settings import Wishes
from lightning_memo.engine.modules.rotary_tables import attach_rotary
from lightning_memo.engine.modules.torch_compile import rest_compiled
from lightning_memo.engine.saved.offload_group import Unit
from lightning_memo.engine.saved.parked_arguments import parkable
from lightning_memo.engine.sequence.layer_calls import find_causal_lm, run_slice, slice_by_slice
from lightning_memo.engine.sequence.sliced_model import SequenceRun, SlicedModel
from lightning_memo.kernels import AttentionSpec
from lightning_memo.parallel.batches.token_layout import TokenLayout, slice_multiple
from lightning_memo.parallel.context.context_groups import ContextGroups
from lightning_memo.parallel.rank_groups import Ranks
from lightning_memo.planner.alpha.streamed_sizes import streamed_sizes
from lightning_memo.planner.token_slices import Action, SavedBytes, TokenRange, slice_tokens_by_alpha
from lightning_memo.utils.units import format_bytes

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
        attention: Wished attention kernel; "auto" is the fastest, found out in the first profiled step.
        schedule: "auto", "nest" to nest slices where that is not necessary, or "slice" to run the whole model on one
            slice after the other.
        test_mode: Delays and poison, to bring out copy races.
        context: Processes that share the tokens of a sequence, if several do.
        shards: Processes that share the tokens between the blocks of a layer (sequence parallelism).
        slice_tokens: Longest slice in a profiled step of which no more may be on the device; `None`: no limit.
        host_backed: What lives on the host in a profiled step: see
            :class:`~lightning_memo.artifacts.swap_plan.SwapPlan`; "auto" is "attention" where `slice_tokens` are
            given and the layers can run slice after slice.
        by_kind: Whether plans say kind by kind what is stored; matrix products are profiled then.
        spill_path: Folder on a disk for the layer calls that a plan spills.
        ranks: Processes that have to agree on an attention kernel; `None`: this one alone.
        check_restored: Whether what comes back to the device is compared with what left it.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        device: torch.device,
        attention: Attention | Literal["auto"] = "auto",
        schedule: str = "auto",
        test_mode: TestMode | None = None,
        context: ContextGroups | None = None,
        shards: int = 1,
        slice_tokens: int | None = None,
        host_backed: HostBacked | Literal["auto"] = "none",
        by_kind: bool = False,
        spill_path: Path | None = None,
        ranks: Ranks | None = None,
        check_restored: bool = False,
    ) -> None:
        self.layers = list(layers)
        self.device = device
        self.test_mode, self.check_restored = test_mode, check_restored
        self.profile: StepProfile | None = None
        self.swap: SwapPlan | None = None
        self.memory: SlotMemory | None = None
        self.on_mark: Callable[[int, str], None] | None = None
        self.before_layer: Callable[[], None] | None = None  # may raise, to end a step before it is over
        self.recorder = StepRecorder(device)
        self._model = model
        self._context, self._shards, self.spill_path = context, shards, spill_path
        self._divided = context is not None or shards > 1
        self.wishes = Wishes(schedule, slice_tokens, host_backed, self._divided, by_kind)
        self.attention = AttentionSelector(attention, context, self.slices_outside, ranks)
        self.kinds = LayerKinds(self.layers, self.attention.backend, self.wishes)
        self._runs: weakref.WeakValueDictionary[int, LayerRun] = weakref.WeakValueDictionary()
        self._reader: BlockReader | None = None
        self.sequence: SequenceRun | None = None
        self._units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self._planned_tokens = 0
        self.shared: list[SavedBytes] = []  # what layers share of the first slice, where it waits on the host
        self._outgrown = self._planned_short = False
        self._undo: list[Callable[[], None]] = []
        self.resting: list[str] = []  # names of compiled modules that run as they were written

    # ---- life

    def attach(self) -> None:
        """Put the engine around the layers' forward."""
        self.resting, self._undo = rest_compiled(self._model, self.layers)
        for layer in self.layers:
            self._undo.append(replace_forward(layer, self._run))
        self._undo += attach_attention(self._model)
        self._undo += attach_rotary(self._model, self.layers)
        if self.wishes.states_on_host:
            self._undo += attach_lazy_inputs(self._model, self.wishes.slice_tokens or 1)
        if self.wishes.schedule == "slice":
            sliced = SlicedModel(self, self.wishes.slice_tokens or 1)
            self._undo.append(replace_forward(find_causal_lm(self._model), sliced))

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
            SpillError: The disk has not got the space for what it spills. The next forward is then profiled.
        """
        if why := self.why_not(swap):
            raise ValueError(f"the plan cannot run here: {why}")
        self.unload()
        if swap.mode == "memo":
            self._allocate(swap)
        self.attention.use(swap.attention)
        self.swap, self._planned_tokens = swap, tokens

    def why_not(self, swap: SwapPlan) -> str:
        """Why layers cannot run by a plan, which was made for other settings; empty if they can."""
        if "slice" in (swap.schedule, self.wishes.schedule) and swap.schedule != self.wishes.schedule:
            return f'it was made for schedule="{swap.schedule}"'
        if swap.mode == "memo" and (swap.storage is not None) != self.wishes.by_kind:
            return f'it was made for storage="{"alpha" if self.wishes.by_kind else "kinds"}"'
        if swap.storage is not None and (why := why_not_stored(swap.storage)):
            return why
        if self._context is not None and swap.streamed != self.slices_outside:
            return f'it was made for host_backed="{swap.host_backed}"'
        if swap.spill_bytes and self.spill_path is None:
            return f"it spills {format_bytes(swap.spill_bytes)} to a disk, and no spill_path is given"
        return self.attention.why_not(swap.attention)

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

    def _allocate(self, swap: SwapPlan) -> None:
        self.memory = SlotMemory(
            swap.slot_bytes, swap.host_bytes, self.device, self.test_mode,
            whole_slots=not swap.streamed and swap.storage is None, gradient_bytes=swap.gradient_host_bytes,
            state_bytes=swap.state_host_bytes, spill=self._open_spill(swap), recorder=self.recorder,
            check_restored=self.check_restored,
        )  # fmt: skip
        # One block is computed with while another arrives; gradients are also on their way back.
        self._reader = self.memory.reader(3 if swap.host_backed == "all" else 2, swap.staging_bytes)

    def _open_spill(self, swap: SwapPlan) -> Spill | None:
        if self.spill_path is None or not swap.spill_bytes:
            return None
        return Spill(self.spill_path, swap.spill_bytes, swap.spill_layout, self.device, self.test_mode, self.recorder)

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
        if self.before_layer is not None:
            self.before_layer()
        if self._has_nothing_to_do(args):
            return forward(*args, **kwargs)
        refuse_layer_in_backward(type(layer).__name__)
        # A slice of the model needs the keys and values of earlier ones in layers without gradients, too.
        if not torch.is_grad_enabled() or not (self.sequence or needs_grad(layer, (args, kwargs))):
            return self._run_plainly(layer, forward, args, kwargs)
        self.reset_if_interrupted()
        x, call = self._read_call(layer, forward, args, kwargs)
        alive = max(self._runs.keys(), default=-1) + 1
        tokens = call.tokens if self.sequence is None else self.sequence.tokens
        if alive == 0 and self.profiles(call.batch, tokens):
            self._start_profile(call, x)
        if self.profile is None and self.swap is not None and self.swap.mode == "plain":
            return self._run_plainly(layer, forward, args, kwargs)
        if self.sequence is not None:
            return run_slice(self, self.sequence, call, x.contiguous(), alive)
        if not (self.swap is not None and self.swap.streamed):
            x = real(x)
        return self._run_slices(call, x.contiguous(), alive)

    def _has_nothing_to_do(self, args: tuple[Any, ...]) -> bool:
        """Whether a plan says that nothing is swapped, and covers this batch: short steps feel every microsecond."""
        plain = self.swap is not None and self.swap.mode == "plain" and self.profile is None
        whole = not self._divided and not self.wishes.states_on_host
        return plain and whole and bool(args) and not self.profiles(*args[0].shape[:2])

    def _run_plainly(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The layer as it is, but for attention that has to meet tokens of other processes or of earlier slices."""
        lazy = any(isinstance(t, LazyTensor) for t in tree_leaves((args, kwargs)))
        if not self._divided and not lazy:
            return forward(*args, **kwargs)
        x, call = self._read_call(layer, forward, args, kwargs)
        if divided_by_slices() or (isinstance(x, LazyTensor) and (self.swap is None or self.swap.streamed)):
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
        check_bounds(slices)
        return run_without_backward(LayerRun(self, call, x, 0, slices, self.memory, True, True, measured=False), x)

    def _read_call(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, LayerCall]:
        x, call = read_call(layer, forward, args, kwargs, self._shards)
        if self._divided:
            check_tokens(call.tokens * self._shards)
        return x, call

    def reset_if_interrupted(self) -> None:
        """Forget a step whose backward an exception ended half-way. PyTorch keeps what waited in it until the next."""
        inside = torch._C._current_graph_task_id() != -1
        if not inside and any(run.in_backward for run in self._runs.values()):
            self.reset()

    @property
    def calls_alive(self) -> int:
        """Layer calls whose backward has not ended."""
        return len(self._runs)

    def begin(self, run: LayerRun, calls: int = 1) -> None:
        """A layer call begins; each of the plan's is so many `calls`."""
        assert self.swap is not None
        if self.profile is None and run.key >= self.swap.calls * calls:
            self._outgrown = True  # more forwards before a backward than were planned: these stay on the device
        self._runs[run.key] = run

    def _run_slices(self, call: LayerCall, x: Tensor, index: int) -> Any:
        self.mark(index, "forward_begin", Subject(index))
        traits = self.kinds.of(call, x)
        self.wishes.check(traits, type(call.layer).__name__, call.tokens)
        assert self.swap is not None
        storage = self.swap.storage
        slices = self.slices_for(traits, call.tokens) if storage is None else stored_slices(storage, index, call.tokens)
        check_bounds(slices)
        swap = self.swap.streamed or index < self.swap.calls - RESIDENT_CALLS
        run = LayerRun(
            self, call, x, index, slices, self.memory, swap, self.swap.streamed,
            spill_bytes=self.swap.bytes_to_spill(index), changing=traits.changing,
        )  # fmt: skip
        self.begin(run)
        nested = not run.whole and "nest" in (self.wishes.schedule, traits.schedule)
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
        return self.swap is not None and self.swap.host_backed == "all" and self.sequence is None

    @property
    def slices_outside(self) -> bool:
        """Whether slices are ranges of the whole sequence, which context-parallel processes share."""
        return self._context is not None and self.wishes.may_stream

    def profiles(self, batch: int, tokens: int) -> bool:
        """Whether a step with so many sequences of so many tokens is going to be profiled: no plan covers it."""
        # A batch that needed no slices tells nothing of those that do.
        outgrown = self._outgrown or (self._planned_short and tokens > (self.wishes.slice_tokens or tokens))
        return self.swap is None or outgrown or batch * tokens > self._planned_tokens

    def bounds_for(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a training batch are going to end; nothing if layers run as one slice.

        Args:
            batch: Sequences.
            tokens: Tokens of each that this process holds between the blocks of a layer.
        """
        if self.profiles(batch, tokens):
            longest = self.wishes.slice_tokens if self.wishes.may_stream else None
            return tuple(part.stop for part in self.cut(tokens, 0.0, longest)) if longest else ()
        if self.swap is None or self.swap.mode == "plain" or self.swap.storage is not None:
            return ()
        traits = next((traits for traits in self.kinds if traits.why_whole), self.kinds.agreed)
        return tuple(part.stop for part in self.slices_for(traits, tokens))

    # ---- profile

    def _start_profile(self, call: LayerCall, x: Tensor) -> None:
        """Begin a step in which every layer is recomputed, with memory for just that."""
        started = time.perf_counter()
        self.kinds.forget()
        with self.attention.choosing():
            traits = self.kinds.of(call, x)
        sliced = self.slices_outside or self.sequence is not None
        backing = self.wishes.backing(traits, type(call.layer).__name__, call.tokens, sliced)
        slices = self.cut(call.tokens, 0.0, None if backing == "none" else self.wishes.slice_tokens)
        if self.sequence is not None:
            slices = self.sequence.slices
            # Layers of different kinds may get different ones: of some kinds, how many is not known yet.
            shared = parkable((call.args, call.kwargs)) * _KINDS_OF_LAYERS
            self.shared = [SavedBytes("shared", t.nbytes * traits.tokens // call.tokens) for t in shared]
        bootstrap = first_plan(self, traits, x.nbytes * traits.tokens // call.tokens, slices, backing)
        self.unload()
        self._planned_short = self.wishes.may_stream and call.tokens <= (self.wishes.slice_tokens or 0) and not sliced
        self.swap, self._planned_tokens = bootstrap, call.batch * slices[-1].stop
        self._allocate(bootstrap)
        self.profile = StepProfile(
            self.device, call.batch, slices[-1].stop, slices[0].tokens, with_products=self.wishes.by_kind
        )
        self.profile.setup_seconds = time.perf_counter() - started

    def streamed_bytes(
        self, calls: Sequence[tuple[Sequence[SavedBytes], int]], slices: Sequence[TokenRange], host_backed: HostBacked
    ) -> StreamedBytes:
        """Memory of a plan by which slices swap for themselves; see :func:`streamed_sizes`."""
        return streamed_sizes(
            calls,
            slices,
            host_backed,
            gradient_bytes=max(-(-traits.key_value_gradient_bytes // traits.tokens) for traits in self.kinds),
            block_tokens=self.attention.block_tokens,
            schedule=self.kinds.schedule,
            shared=self.shared,
        )

    # ---- what the model and layer runs ask for

    def slice_by_slice(self, layout: TokenLayout, batch: int) -> AbstractContextManager[SequenceRun]:
        """Inside, layers get one slice of the sequence after the other: see `sequence_layers.py`."""
        return slice_by_slice(self, layout, batch)

    def streamed_attention(self, slices: Sequence[TokenRange], layer: int) -> StreamedAttention | StreamedUlysses:
        """A layer's attention, for slices of this process's tokens: earlier keys and values come from the host."""
        assert self._reader is not None and self.swap is not None
        host = self.memory if self.swap.host_backed == "all" else None
        return self.attention.streamed(slices, self._reader, host, layer)

    def count_overflow(self, size_bytes: int) -> None:
        if self.memory is not None:
            self.memory.stats.overflow_bytes += size_bytes

    def mark(self, key: int, name: str, subject: Subject) -> None:
        """A layer call begins or ends something: tell whoever measures.

        Args:
            key: The call among those that are alive.
            name: What happens.
            subject: The layer's position, which calls for several slices of a sequence share, and the slice, if the
                call is for one.
        """
        if self.profile is not None:
            self.profile.mark(subject.layer, name, again=bool(subject.part))
        self.recorder.mark(name, subject)
        if self.on_mark is not None:
            self.on_mark(key, name)

    def open_unit(self, memory: SlotMemory | None, swap: bool, spill_bytes: int = 0) -> Unit:
        """A unit of memory, behind those that are alive."""
        unit = Unit(self, max(self._units.keys(), default=-1) + 1, memory, swap, spill_bytes)
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
