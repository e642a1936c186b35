"""The engine: wraps a model's layers and runs their calls by a swap plan."""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memo.artifacts.costs import Place
from lightning_memo.artifacts.swap_plan import StreamFromHost, SwapPlan
from lightning_memo.engine.attention.attention_selector import AttentionSelector, WholeAttention
from lightning_memo.engine.attention.hugging_face import attach_attention
from lightning_memo.engine.attention.sliced_attention import StreamedAttention, StreamedUlysses
from lightning_memo.engine.bootstrap_plan import bootstrap_plan, bytes_ahead
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.refuse_checkpointing import refuse_checkpoint_around
from lightning_memo.engine.layers.argument_containers import Run, dicts_apart, unpack_container_arguments
from lightning_memo.engine.layers.call_meter import CallPosition
from lightning_memo.engine.layers.call_storage import StoragePolicy
from lightning_memo.engine.layers.layer_run import LayerRun, SequenceRun, run_of_call
from lightning_memo.engine.layers.pending_calls import MicroBatches, PendingCalls
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.layers.token_sharing import SequenceCutter, TokenSharing, check_bounds, has_global_slices
from lightning_memo.engine.loaded_plan import (
    PlanLimits,
    allocate_slots,
    open_reader,
    planned_slices,
    runs_whole,
    why_made_for_others,
)
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor, on_host, real
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.modules.fused_kernels import attach_fused
from lightning_memo.engine.modules.layer_classes import LayerClasses, RequestedSettings
from lightning_memo.engine.modules.layer_forward import (
    disable_compile,
    needs_grad,
    replace_forward,
    run_eager,
    warn_of_uncompiled,
    why_reads_cache,
)
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.modules.packed_rows import attach_documents
from lightning_memo.engine.modules.slice_comparison import SliceComparison
from lightning_memo.engine.modules.token_local_modules import attach_lazy_inputs, attach_rotary
from lightning_memo.engine.recurrence import RecurrentStates, RunningDocuments, StateCall, handing
from lightning_memo.engine.saved_tensors.call_arguments import parkable
from lightning_memo.engine.saved_tensors.offload_group import OffloadGroups
from lightning_memo.engine.sliced_model.sliced_model import SlicedModel, find_causal_lm
from lightning_memo.engine.slices.segments import Segment
from lightning_memo.engine.slices.slice_schedules import run_last_layer, run_schedule, run_without_backward
from lightning_memo.engine.timeline_recorder import Subject, TimelineRecorder
from lightning_memo.parallel.ranks import smallest_segments
from lightning_memo.planner.token_slices import KEPT, SavedBytes, TokenRange
from lightning_memo.utils.around_forward import has_user_hooks, leave_own_contexts, saves_on_cpu, why_without_hooks
from lightning_memo.utils.class_names import class_name


def run_whole(
    attention: AttentionSelector, handed: RecurrentStates, call: LayerCall, x: Tensor, forward: Callable[[], Any]
) -> Any:
    """Run a layer, whose attention and recurrences need the tokens of other processes, and return what it returns.

    Args:
        attention: Selects attention kernels.
        handed: The states of its recurrences.
        call: The layer and its arguments.
        x: The layer's input.
        forward: Runs the layer with all its arguments, key-value caches included.
    """
    with handling(WholeAttention(attention, call.layout), call.layer, call.layout):
        if handed.exchange is None:
            return forward()
        numbers = itertools.count()

        def hand(state_call: StateCall) -> Tensor:
            number = next(numbers)
            start = handed.start(number, state_call, first=True)
            return handed.run(number, state_call, start, first=True, last=True)

        documents = RunningDocuments.of(call.documents, call.layout, 0)
        with handing(call.layer, hand, functools.partial(handed.check, call.name), documents):
            output = call.run(x, TokenRange(0, call.tokens, KEPT))  # a cache would take the state
    handed.settle()
    return output


_LAYER_CLASSES = 4


class Engine:
    """Runs the layers of a model slice by slice, and swaps or recomputes the activations that they save.

    Without a plan, the first forward with gradients starts a profile: every layer is recomputed, and `profile` records
    what each layer saves and how long it takes. `load` sets the plan by which later forwards run.

    Args:
        model: The module that contains `layers`. Its Hugging Face attention, if any, is directed to the engine while
            the engine is attached.
        layers: Its layers, of one or more stacks, each of which may be called any number of times in a step.
        device: Device on which the layers run.
        settings: Engine settings, such as the length of slices.
        sharing: How the tokens of a batch are divided over processes. By default, this process holds all tokens.

    Attributes:
        profile: The profile of the running or the last step; `None` if that step ran by a plan.
        swap: The plan; `None` before the first step.
        pages: The host memory of plans.
        memory: The memory of the plan; `None` if the plan swaps nothing.
        layer_classes: The traits of the layers.
        micro_batches: The micro-batches whose calls are alive at once.
        comparison: Compares layers in slices with whole layers while training.
        profiled_tokens: Tokens of each sequence of the last step whose profile began.
        on_mark: Callback for events of layer calls: receives the call number and a name such as "forward_begin".
        before_layer: Callback before each forward and backward of a layer. It may raise an exception to end the step.
        before_profile: Callback before a step that is going to be profiled.
        probe: Finds the traits of the first layer of such a step, by a given function. It may raise to end the step.
        segment_calls: Size of the segments in which all processes run layers again; `None` if they run none again.
        ran_plainly: Whether layers ran as in plain training since this was set to `False`, because a batch was empty or
            too short, hooks of saved tensors were off or a user's, or a key-value cache was filled.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        device: torch.device,
        settings: RequestedSettings | None = None,
        sharing: TokenSharing | None = None,
    ) -> None:
        self.layers = list(layers)
        self.device = device
        self.sharing = sharing or TokenSharing()
        self.settings = replace(settings or RequestedSettings(), divided=self.sharing.divided)
        self.profile: StepProfile | None = None
        self.profiled_tokens = 0
        self.swap: SwapPlan | None = None
        self.pages = HostPages(device)
        self.memory: SlotMemory | None = None
        self.on_mark: Callable[[int, str], None] | None = None
        self.before_layer: Callable[[], None] | None = None
        self.before_profile: Callable[[], None] = lambda: None
        self.probe: Callable[[Callable[[], LayerTraits], LayerCall, Tensor], LayerTraits] = lambda find, *_: find()
        self.recorder = TimelineRecorder(device)
        self.cutter = SequenceCutter(self.sharing, self.settings)
        context = self.sharing.context
        self.attention = AttentionSelector(
            self.settings.attention, context, self.cutter.global_slices, self.sharing.ranks
        )
        self.layer_classes = LayerClasses(self.layers, self.attention.backend, self.settings, self.sharing.gathered)
        self.comparison = SliceComparison(self.layer_classes, self.settings)
        self.limits = PlanLimits(self.settings)
        self.calls = PendingCalls()
        self.offload_groups = OffloadGroups()
        self.micro_batches = MicroBatches(self.calls, self.offload_groups)
        self.sequence: SequenceRun | None = None
        self.parked: list[SavedBytes] = []  # arguments of the first slice that wait on the host
        self.segment_calls: int | None = None
        self.ran_plainly = False
        self._agreed_on_segments = False
        self._model = model
        self._reader: BlockReader | None = None
        self._segment: Callable[[], Segment | None] = lambda: None
        self._undo: list[Callable[[], None]] = []
        self._warned: set[str] = set()

    # ---- life

    def attach(self) -> None:
        """Replace the forward methods of the layers with the engine's."""
        longest, current = self.settings.slice_tokens or 1, self.sharing.current_layout
        compiled, self._undo = disable_compile(
            self._model, self.layers, self.settings.states_on_host, self.tell_of_compiled
        )
        if compiled:
            self.tell_of_compiled(*compiled)
        run = functools.partial(
            self._run, unpack_container_arguments(dicts_apart(functools.partial(run_eager, self._run_call)))
        )
        if self.sharing.context is not None:
            run = functools.partial(self.sharing.divide_call, run)
        self._undo.extend(replace_forward(layer, run) for layer in self.layers)
        if self.settings.fused_kernels:
            self._undo += attach_fused(self.layers, self.device)
        self._undo += attach_attention(self._model, current)
        self._undo += attach_rotary(self._model, self.layers, current)
        self._undo += attach_documents(self._model, current)
        if self.settings.states_on_host:
            self._undo += attach_lazy_inputs(self._model, longest)
        if self.settings.stream_from_host == "model":
            self._undo.append(replace_forward(find_causal_lm(self._model), SlicedModel(self, longest)))

    def tell_of_compiled(self, *compiled: str | nn.Module) -> None:
        """Warn once that compiled modules and functions run uncompiled; modules outside of the model have no name."""
        if "torch.compile" not in self._warned:
            self._warned.add("torch.compile")
            warn_of_uncompiled([each if isinstance(each, str) else class_name(each) for each in compiled])

    def detach(self) -> None:
        """Restore the model, and release all memory."""
        leave_own_contexts()
        self.sharing.gathered.close()
        while self._undo:
            self._undo.pop()()
        self.unload()
        self.pages.close()

    def cut(self, slice_tokens: int, stream_from_host: StreamFromHost) -> None:
        """Forget the plan, and cut layers into slices from now on; see :class:`RequestedSettings` for the arguments."""
        self.detach()
        settings = self.settings
        settings.slice_tokens, settings.stream_from_host, settings.by_kind = slice_tokens, stream_from_host, False
        self.layer_classes.forget()
        self.cutter = SequenceCutter(self.sharing, settings)
        self.attention.sliced = self.cutter.global_slices
        self.attach()

    def load(self, swap: SwapPlan, tokens: int, ahead_bytes: int = 0) -> None:
        """Run later forwards by a plan.

        Args:
            swap: The plan.
            tokens: Number of tokens of the batch that the plan was made for, all sequences together.
            ahead_bytes: Host memory that is locked ahead, for a later plan.

        Raises:
            ValueError: The plan was made for other settings.
            DiskError: The disk does not have the space for what the plan spills. The next forward is then profiled.
        """
        if why := self.why_not(swap):
            raise ValueError(f"the plan cannot run here: {why}")
        self.unload()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what steps by another plan cached has other sizes
        if swap.plain:
            self.pages.close()
        else:
            self.memory = allocate_slots(swap, self.pages, self.settings, self.recorder, ahead_bytes=ahead_bytes)
            self._reader = open_reader(self.memory, swap)
        self.attention.use(swap.attention)
        self.swap = swap
        self.segment_calls, self._agreed_on_segments = swap.storage.segment_calls, True
        self.limits.plan(tokens, swap.calls)

    def why_not(self, swap: SwapPlan) -> str:
        """Return why layers cannot run by a plan that was made for other settings; empty if they can."""
        outside = None if self.sharing.context is None else self.cutter.global_slices
        return why_made_for_others(swap, self.settings, outside) or self.attention.why_not(swap.attention)

    def unload(self) -> None:
        """Forget the plan, and release its memory; see `reset`. Locked host memory is kept for the next plan."""
        self.reset()
        if self.memory is not None:
            self.memory.close()
        self.swap = self.memory = self.profile = self._reader = None

    def reset(self) -> None:
        """Release everything that an interrupted step still holds.

        Activations of forwards whose backward has not run are lost.
        """
        self.offload_groups.release()
        if self.memory is not None:
            self.memory.abandon()
        self.calls.clear()

    @property
    def host_bytes(self) -> int:
        """Host memory held for swapped activations."""
        return 0 if self.memory is None else max(self.memory.host_bytes, self.pages.held_bytes)

    @property
    def slots_in_use(self) -> int:
        """Host slots and rounding buffers held by layer calls whose backward has not ended."""
        return 0 if self.memory is None else self.memory.slots_in_use

    def agreed_segments(self, own: int | None) -> int | None:
        """Return the size of the segments in which all processes run layers again.

        All gather weights for layers that run again. If later steps are not profiled by all, the size stays.

        Args:
            own: The size with which a profiled step fits this process's host; `None` if no layer has to run again.
        """
        ranks = self.sharing.ranks
        if not self._agreed_on_segments or ranks is None or ranks.all_together:
            self.segment_calls = own if ranks is None else smallest_segments(own, ranks.gather)
            self._agreed_on_segments = True
        return self.segment_calls

    # ---- limits and slices of a plan

    def profiles(self, batch: int, tokens: int) -> bool:
        """Return whether a step on `batch` sequences of `tokens` tokens is going to be profiled: no plan covers it."""
        return self.swap is None or not self.limits.covers(batch, tokens)

    def bounds_for(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Return where the slices of a training batch are going to end; empty if layers run as one slice.

        Args:
            batch: Number of sequences.
            tokens: Number of tokens of each that this process holds between the blocks of a layer.
        """
        if self.profiles(batch, tokens):
            longest = self.settings.slice_tokens if self.settings.may_stream else None
            return tuple(part.stop for part in self.cutter.recomputed(tokens, longest)) if longest else ()
        if self.swap is None or self.swap.plain:
            return ()
        traits = next((traits for traits in self.layer_classes if traits.unsliceable), self.layer_classes.agreed)
        return tuple(part.stop for part in self.slices_for(traits, tokens))

    def slices_for(self, traits: LayerTraits, tokens: int, key: int = 0) -> tuple[TokenRange, ...]:
        """Return how the plan cuts a call's input. A layer that cannot be cut is swapped or recomputed as a whole."""
        assert self.swap is not None
        return planned_slices(self.swap, self.cutter, key, tokens, self._runs_whole(self.swap, traits))

    def _runs_whole(self, swap: SwapPlan, traits: LayerTraits) -> bool:
        return runs_whole(
            swap, traits.unsliceable or self.layer_classes.agreed.unsliceable, traits.needs_full_attention
        )

    # ---- one layer call

    def _run(self, run: Run, layer: nn.Module, forward: Run, *args: Any, **kwargs: Any) -> Any:
        if self.before_layer is not None:
            self.before_layer()
        if args and isinstance(args[0], Tensor) and args[0].dim() < 2 and not self.settings.divided:
            return forward(*args, **kwargs)  # a vector: there are no tokens to cut or to count
        plain = self.swap is not None and self.swap.plain and args and isinstance(args[0], Tensor)
        if plain and not (self.settings.divided or self.settings.states_on_host or self.profiles(*args[0].shape[:2])):
            return forward(*args, **kwargs)  # short steps feel every microsecond
        return run(layer, forward, *args, **kwargs)

    def _run_call(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trained = needs_grad(layer, (args, kwargs))
        if trained:
            refuse_checkpoint_around(layer)
        # A slice of the model needs the keys and values of earlier ones in layers without gradients, too.
        if not torch.is_grad_enabled() or not (self.sequence or trained):
            return self._run_plainly(layer, forward, args, kwargs)
        if why := self._why_plainly(layer, args, kwargs):
            return self._run_unmanaged(layer, forward, args, kwargs, why)
        if self.calls.interrupted:
            self.reset()
        (x, call), key = self.sharing.read_call(layer, forward, args, kwargs), self.calls.next_key
        if self.settings.too_short(call.batch, (self.sequence or call).tokens):  # a slice may have a single token
            self.ran_plainly = True
            return self._run_plainly(layer, forward, args, kwargs)
        if key == 0 and self.profiles(call.batch, (self.sequence or call).tokens):
            self._start_profile(call, x)
        assert self.swap is not None
        if self.swap.plain:
            return self._run_plainly(layer, forward, args, kwargs)
        if saves_on_cpu():
            self._warn(
                f"save_on_cpu around {call.name} gets nothing of what its layers save, which is swapped or recomputed"
            )
        return self._run_managed(call, x if self.sequence or self.swap.streamed else real(x), key, self.swap)

    def _why_plainly(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> str:
        """Return why a layer can be neither swapped nor recomputed in this call; empty if it can."""
        if why := why_without_hooks():
            return f"hooks of saved tensors are off: {why}"
        if has_user_hooks():
            return "saved_tensors_hooks are set around it, and would miss what is swapped or recomputed"
        alone = not (self.settings.divided or self.settings.states_on_host or self.sequence)
        return why_reads_cache(layer, args, kwargs) if alone else ""

    def _warn(self, message: str) -> None:
        """Warn of something once."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"lightning_memo: {message}.", stacklevel=4)

    def _run_unmanaged(
        self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], why: str
    ) -> Any:
        """Run a layer that is trained as in plain training, with a warning.

        Raises:
            ValueError: Only slices of the tokens are there.
        """
        if self.sequence or has_global_slices(self.sharing.current_layout.layout):
            raise ValueError(
                f"{class_name(layer)} runs on one slice of the tokens after the other, and cannot run as in plain "
                f'training, but {why}: use stream_from_host="hidden" without context_parallel_size, or change this'
            )
        self._warn(f"{class_name(layer)} runs as in plain training, because {why}")
        self.ran_plainly = True
        return self._run_plainly(layer, forward, *tree_map_only(OffloadedTensor, real, (args, kwargs)))

    def _run_plainly(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a layer as it is; its attention may need the tokens of other processes or of earlier slices."""
        lazy = any(isinstance(t, OffloadedTensor) for t in tree_leaves((args, kwargs)))
        if not self.sharing.divides_now and not lazy:
            return forward(*args, **kwargs)
        x, call = self.sharing.read_call(layer, forward, args, kwargs)
        streamed = self.swap is None or self.swap.streamed
        if not (has_global_slices(call.layout) or (isinstance(x, OffloadedTensor) and streamed)):
            self.layer_classes.of(call, x)
            handed = self.sharing.handed_states(call.layout)
            return run_whole(self.attention, handed, call, x, functools.partial(call.forward, *args, **kwargs))
        x = x.contiguous()
        if not self.calls and self.profiles(call.batch, call.tokens):
            self._start_profile(call, x)
        slices = self.slices_for(traits := self.sharing.agreed(self.layer_classes.of(call, x), x.device), call.tokens)
        check_bounds(call.layout, slices)
        on_host = self.swap is not None and self.swap.gradients_on_host and self.sequence is None
        policy = StoragePolicy(self.memory, swap=True, per_slice=True, states_on_host=on_host)
        run = run_of_call(self, call, x, CallPosition(0, 0), slices, policy, traits, measured=False)
        return run_without_backward(run, x)

    def _run_managed(self, call: LayerCall, given: Tensor, key: int, swap: SwapPlan) -> Any:
        """Run a layer by the plan, or for a profile, on all tokens of its input or on a slice of the sequence."""
        x, sequence = given.contiguous(), self.sequence
        if sequence is None:
            traits, slices = self._cut(call, x, key, swap)
            opened = functools.partial(self._open, key=key, swap=swap, traits=traits, slices=slices)
            number = swap.storage.segments_behind(key)
            if number and len(slices) > 1:
                return self._segment_of(number, x).run(opened(call, x, measured=False), x, opened)
            run = opened(call, x)
        else:
            run = self._begin_in_sequence(call, x, key, sequence)
        self.calls.add(key, run)
        if sequence is not None and call.layer is self.layers[-1]:
            y, sequence.output = run_last_layer(run, x)
            return y
        joint_attention = not run.whole and (self.settings.joint_attention or run.joint_attention)
        return run_schedule(run, x, given, joint_attention)

    def _segment_of(self, number: int, x: Tensor) -> Segment:
        """Return the segment of a layer call whose input is `x`; see Note: [Segments]."""
        segment = self._segment()
        if segment is None or not segment.continues(number, x):
            assert self.memory is not None
            segment = Segment(number, on_host(x, self.memory))
            self._segment = weakref.ref(segment)
        return segment

    def _cut(self, call: LayerCall, x: Tensor, key: int, swap: SwapPlan) -> tuple[LayerTraits, tuple[TokenRange, ...]]:
        """Return the traits of a layer, and the slices in which the call runs."""
        tokens = call.tokens
        own = traits = self.layer_classes.of(call, x)  # before the first mark, as a proof takes long
        slices = self.slices_for(traits, tokens, key)
        due = self.comparison.due(key, swap.calls)
        if len(slices) > 1:
            lengths = [*(part.tokens for part in slices), tokens]
            if self.comparison.ends_slices(call, x, traits, lengths, due, swap.streamed):
                traits = self.layer_classes.of(call, x)
        if (traits := self.sharing.agreed(traits, x.device)) is not own:
            slices = self.slices_for(traits, tokens, key)
        self.settings.check(traits, has_global_slices(call.layout))
        if self._runs_whole(swap, traits) and not swap.storage.has_one_alpha:
            self.limits.exceed()  # slots and rounding buffers were planned for slices
        return traits, slices

    def _open(
        self,
        call: LayerCall,
        x: Tensor,
        *,
        key: int,
        swap: SwapPlan,
        traits: LayerTraits,
        slices: tuple[TokenRange, ...],
        measured: bool = True,
    ) -> LayerRun:
        """Begin a layer call; `measured` as for `run_of_call`."""
        tokens = call.tokens
        leaves, on_host = swap.streamed or key < swap.swapped_calls, swap.gradients_on_host
        if self.profile is not None and self.memory is not None and leaves and not swap.streamed:
            with self.profile.waiting():  # times of layers must not contain waits
                self.memory.wait_for_host()
        if measured:
            self.mark(key, "forward_begin", Subject(key))
        check_bounds(call.layout, slices)
        sizes: dict[Place, int] = {"disk": swap.slot_disk_bytes(key)}
        policy = StoragePolicy(self.memory, leaves, swap.streamed, sizes, on_host)
        run = run_of_call(self, call, x, CallPosition(key, key), slices, policy, traits, measured=measured)
        self.limits.begin_call(key, call.batch * tokens)
        if self.profile is not None and measured:
            self.profile.resize(key, call.batch, tokens, slices[0].tokens)
            self.profile.handed(key, traits.saved)
        return run

    def _begin_in_sequence(self, call: LayerCall, x: Tensor, key: int, sequence: SequenceRun) -> LayerRun:
        layer = key % len(self.layers)
        position = CallPosition(layer, key, sequence.index)
        saved = self._check_in_sequence(call, x, key, sequence) if sequence.index == 0 else ()
        self.mark(key, "forward_begin", position.subject)
        assert self.memory is not None
        sequence.enter(call, self.memory)
        if self.profile is not None and sequence.index == 0:
            self.parked = sequence.arguments.saved
            self.profile.handed(layer, saved)
        slices = (TokenRange(0, call.tokens, sequence.slice.places),)
        traits = LayerTraits("", routes=self.layer_classes.routes)
        policy = StoragePolicy(self.memory, swap=True, per_slice=True)
        run = run_of_call(self, call, x, position, slices, policy, traits, sequence=sequence)
        self.limits.begin_call(key, parts=len(sequence.slices))
        return run

    def _check_in_sequence(self, call: LayerCall, x: Tensor, key: int, sequence: SequenceRun) -> tuple[SavedBytes, ...]:
        """Check a layer on the first slice of a sequence (the last one may be too short), and return what it saves.

        Raises:
            ValueError: The layer cannot run slice after slice.
        """
        traits = self.sharing.agreed(self.layer_classes.of(call, x), x.device)
        if (why := traits.unsliceable or traits.needs_full_attention) and call.tokens > 1:
            raise self.settings.not_streamed_error(why)
        due = self.comparison.due(key, len(self.layers))
        if call.tokens > 1:
            self.comparison.ends_slices(call, x, traits, [call.tokens, sequence.tokens], due, needs_slices=True)
        return traits.saved

    def _start_profile(self, call: LayerCall, x: Tensor) -> None:
        """Begin a step in which every layer is recomputed, with memory for just that."""
        started, self.profiled_tokens = time.perf_counter(), call.tokens
        self.unload()
        self.before_profile()
        self.layer_classes.forget()
        self.comparison.begin_profile()
        with self.attention.choosing():
            find = lambda: self.sharing.agreed(self.layer_classes.of(call, x), x.device)  # noqa: E731
            traits = self.probe(find, call, x)
        sliced = self.cutter.global_slices or self.sequence is not None
        streamed = self.settings.streamed(traits, call.tokens, sliced)
        slices = self.cutter.recomputed(call.tokens, self.settings.profiled_slice_tokens(traits))
        if self.sequence is not None:
            slices = self.sequence.slices
            # Layers of different classes may get different arguments: how many classes there are is not known yet.
            parked = parkable((call.args, call.kwargs)) * _LAYER_CLASSES
            self.parked = [SavedBytes("shared", t.nbytes * traits.tokens // call.tokens) for t in parked]
        limit, input_bytes = self.settings.host_limit(self.pages.held_bytes), x.nbytes * traits.tokens // call.tokens
        in_flight = max(self.micro_batches.in_flight or (), default=None)
        swap = bootstrap_plan(self, traits, input_bytes, slices, streamed, limit, in_flight)
        if limit < math.inf:
            self.pages.reserve(int(limit))
        ahead = max(bytes_ahead(swap, traits, self.device, limit, in_flight), self.pages.held_bytes)
        self.memory = allocate_slots(swap, self.pages, self.settings, self.recorder, limit, ahead)
        if swap.streamed:
            self.pages.wait()  # times of layers must not contain waits
        self._reader = open_reader(self.memory, swap)
        self.swap, tokens = swap, slices[-1].stop
        short = self.settings.may_stream and call.tokens <= (self.settings.slice_tokens or 0) and not sliced
        self.limits.profile(call.batch * tokens, short)
        self.profile = StepProfile(self.device, call.batch, tokens, slices[0].tokens, self.settings.by_kind)
        self.profile.setup_seconds = time.perf_counter() - started

    def streamed_attention(self, slices: Sequence[TokenRange]) -> StreamedAttention | StreamedUlysses:
        """Return the attention core of a layer whose earlier keys and values come from the host.

        Args:
            slices: The slices of this process's tokens.
        """
        assert self._reader is not None and self.swap is not None
        host = self.memory if self.swap.gradients_on_host else None
        return self.attention.streamed(slices, self._reader, host)

    def mark(self, key: int, name: str, subject: Subject) -> None:
        """Report an event of a layer call.

        Args:
            key: Number of the call among those that are alive.
            name: Name of the event, for example "forward_begin".
            subject: The position of the layer, which calls for slices of a sequence share, and the slice if it has one.
        """
        if self.profile is not None:
            self.profile.mark(subject.layer, name, again=bool(subject.part))
        self.recorder.mark(name, subject)
        if self.on_mark is not None:
            self.on_mark(key, name)
