"""One call of one layer: its memory, its attention, and when that comes and goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_memo.artifacts.tensor_kind_costs import Place
from lightning_memo.engine.attention.sliced_attention import SlicedAttention
from lightning_memo.engine.attention.streamed_attention import StreamedAttention, StreamedUlysses
from lightning_memo.engine.copies.step_recorder import Subject
from lightning_memo.engine.forward.cut_tokens import cut
from lightning_memo.engine.forward.intercept import LayerMode
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.memory.checksums import TensorLabel
from lightning_memo.engine.memory.lazy_tensor import Assembly, LazyTensor, read_parts
from lightning_memo.engine.memory.resident_tensors import ResidentTensors
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved.changing_buffers import ForwardState
from lightning_memo.engine.saved.not_activations import SharedTensors
from lightning_memo.engine.saved.offload_group import Handle, Unit
from lightning_memo.engine.saved.parked_arguments import ParkedView
from lightning_memo.engine.saved.weight_copies import FrozenCasts, WeightCopies, WeightCopy
from lightning_memo.kernels import AttentionSpec, RngState
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import TokenRange

if TYPE_CHECKING:
    from lightning_memo.engine.engine import Engine
    from lightning_memo.engine.sequence.sliced_model import SequenceRun


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's forward and its arguments beside the input, which is `[batch, tokens, hidden]`.

    `token_dim` is 1, or 0 for a layer that takes `[tokens, batch, hidden]`. With sequence parallelism the input holds
    one of `shards` parts of the tokens, and attention sees the same slice of all parts.
    """

    layer: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int
    batch: int
    token_dim: int = 1
    shards: int = 1

    def run(self, x: Tensor, part: TokenRange) -> Any:
        """The layer's own forward on some of the tokens, whose input is `x`."""
        arguments = (self.args, self.kwargs)
        part_of = cut(arguments, self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)
        # Of all tokens they may be lazy still, and a layer may hand them to kernels of its own.
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.materialize, part_of)
        return self.forward(x, *args, **kwargs)

    def mode(self, part: TokenRange) -> LayerMode:
        return LayerMode(self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)


Core = SlicedAttention | StreamedAttention | StreamedUlysses


class LayerRun:
    """State of one layer call from its forward to the end of its backward.

    The autograd graph refers to its slices, and they to it; it refers to neither, so that a graph that is dropped takes
    the run with it, and the slot goes back at once.

    Args:
        engine: Owner of memory, kernels and profile.
        call: The layer and its arguments.
        x: Its input.
        index: Position among the layer calls, counted from the model's input.
        slices: Token ranges that cover the input.
        memory: Where slots are leased; `None` when every slice keeps its activations.
        swap: Whether they leave the device.
        streamed: Whether every slice has a slot of its own, and attention gets earlier keys and values from the host;
            else the call has one slot.
        sequence: The forward of the model that this is a part of, where the whole model runs slice after slice.
        key: Position among the layer calls that are alive, of all slices of a sequence; `None`: `index`.
        spill_bytes: How much of the slot is for the disk: all of it, unless slices name the places of kinds.
        measured: Whether whoever measures is told of the call.
        changing: Buffers that the layer's forward changes.
    """

    def __init__(
        self,
        engine: Engine,
        call: LayerCall,
        x: Tensor,
        index: int,
        slices: Sequence[TokenRange],
        memory: SlotMemory | None,
        swap: bool,
        streamed: bool = False,
        sequence: SequenceRun | None = None,
        key: int | None = None,
        spill_bytes: int = 0,
        measured: bool = True,
        changing: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self._measured = measured
        self.call = call
        self.index = index
        self.key = index if key is None else key
        self.first_slice = 0 if sequence is None else sequence.index
        self._first_token = 0 if sequence is None else sequence.slice.start
        self.subject = Subject(index, None if sequence is None else sequence.index)
        self.memory, self.swap, self.streamed = memory, swap, streamed
        self.recorded = self.first_slice > 0  # whether the first slice, whose tensors are recorded, is over
        self.shared = SharedTensors(call.layer, (call.args, call.kwargs), x)
        self.autocast = _autocast_of(x.device)
        self.device = x.device
        self.unit = None if streamed else engine.open_unit(memory, swap, spill_bytes)
        self.kept = ResidentTensors()
        self._weight_copies = WeightCopies()
        by_kind = slices[0].places is not None
        self._spills_all = spill_bytes > 0 and not by_kind
        # x itself must not live until the backward. By kind, slices store their parts of it, each in its place.
        self.x: Handle | None = None
        if self.unit is not None and not by_kind:
            self.x = self.store_copy(self.unit, "input", local_part(x.detach()))
        self.x_requires_grad = x.requires_grad
        self.rng_start = RngState.capture(x.device) if sequence is None else sequence.capture_rng(x.device)
        self.state = ForwardState(call.layer, changing)
        self.slices = tuple(slices)
        self._all_slices = self.slices if sequence is None else sequence.slices
        self.cores: list[Core] = [] if sequence is None else sequence.cores(call.layer)
        self._arguments = None if sequence is None else sequence.arguments
        self.y: Assembly | Tensor | None = None
        self.dx: Assembly | Tensor | None = None
        self._dy: Iterator[Tensor] = iter(())
        self._started = self._ended = False

    @property
    def profile(self) -> StepProfile | None:
        """Where what is saved now is recorded."""
        return None if self.recorded or not self._measured else self.engine.profile

    @property
    def attention_slices(self) -> tuple[TokenRange, ...]:
        """The slices as attention sees them: of the layer call, or of the whole sequence."""
        return tuple(part.gathered(self.call.shards) for part in self._all_slices)

    @property
    def whole(self) -> bool:
        """Whether the layer runs as a single slice."""
        return len(self.slices) == 1

    @property
    def needs_mode(self) -> bool:
        """Whether torch functions are to be caught: for dropout in slices, and for attention imported by name.

        Layers of transformers call attention through its interface; for one slice of them nothing is to be caught.
        """
        # FSDP2 and tensor parallelism give a layer a class of their own, made from its own.
        kinds = type(self.call.layer).__mro__
        return not self.whole or not any(kind.__module__.startswith("transformers.") for kind in kinds)

    def check_sliceable(self, spec: AttentionSpec) -> None:
        """Refuse attention that needs tokens a slice has not got.

        Raises:
            ValueError: The attention changed since the layer was looked at.
        """
        if not self.whole and not spec.sliceable:
            raise ValueError(
                f"{type(self.call.layer).__name__} was cut into {len(self.slices)} slices, but its attention is now "
                "not causal, has an explicit mask or draws dropout: keep attention alike in all steps, or set alpha=0"
            )

    @property
    def states_memory(self) -> SlotMemory | None:
        """What keeps the layer's output and the gradient of its input on the host; `None`: they are on the device."""
        on_host = self.streamed and not self.whole and self.engine.states_on_host
        return self.memory if on_host else None

    @property
    def in_backward(self) -> bool:
        """Whether the backward has begun, and not ended."""
        return self._started and not self._ended

    def mark(self, name: str) -> None:
        """The call begins or ends something."""
        if self._measured:
            self.engine.mark(self.key, name, self.subject)

    def slice_subject(self, number: int) -> Subject:
        """A slice of the call; the call itself, if that is its only one."""
        return self.subject if self.whole else Subject(self.index, self.first_slice + number)

    def computing_slice(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Inside, the forward of a slice is computed."""
        recorder = self.engine.recorder
        return contextlib.nullcontext() if self.whole else recorder.computing("slice", self.slice_subject(number))

    # ---- arguments

    def stays(self, t: Tensor) -> bool:
        """Whether a saved tensor is no activation: it stays where it is, or can be had again."""
        return t in self.shared or self._weight_copies.find_frozen(t) is not None

    def shared_handle(self, t: Tensor) -> Handle:
        """The handle of a saved tensor that `stays`."""
        copy = self._weight_copies.find_frozen(t) or WeightCopies.find_trained(t)
        if copy is None and self._arguments is not None:
            return self._arguments.view_of(t) or t
        return copy or t

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, copies of frozen weights are made so that the backward can make them again."""
        needed = self.shared.frozen and torch.is_autocast_enabled(self.device.type)
        return FrozenCasts(self._weight_copies) if needed else contextlib.nullcontext()

    def load_shared(self, handle: ParkedView | WeightCopy) -> Tensor:
        """What `shared_handle` stood for."""
        if isinstance(handle, WeightCopy):
            return self._weight_copies.restore(handle)
        assert self._arguments is not None
        t: Tensor = self._arguments.restore(handle)
        return t

    def restored_call(self) -> LayerCall:
        """The call with its arguments, for a recomputation."""
        if self._arguments is None:
            return self.call
        args, kwargs = self._arguments.restore((self.call.args, self.call.kwargs))
        self.shared = SharedTensors(self.call.layer, (args, kwargs), None)
        return replace(self.call, args=args, kwargs=kwargs)

    # ---- storing and loading

    def store(
        self, unit: Unit, kind: str, t: Tensor, place: Place | None = "swap", part: TokenRange | None = None
    ) -> Handle:
        """Put a tensor into a unit, or keep it on the device; `part` is its slice, if it is not of all tokens."""
        if self.profile is not None:
            self.profile.saved(self.index, kind, t.nbytes)
        if place == "keep":
            return self.kept.put(t)
        handle = unit.put(t, self._spills_all or place == "spill")
        if unit.checks is not None:
            unit.checks.note(handle, self.what(kind, part))
        return handle

    def what(self, kind: str, part: TokenRange | None = None) -> TensorLabel:
        """A tensor of the call, or of one of its slices."""
        start, stop = (0, self.call.tokens) if part is None else (part.start, part.stop)
        return TensorLabel(kind, self.index, self._first_token + start, self._first_token + stop)

    def store_copy(
        self, unit: Unit, kind: str, t: Tensor, place: Place | None = "swap", part: TokenRange | None = None
    ) -> Handle:
        """As `store`, for what the layer may overwrite later: a tensor that finds no room is copied, too."""
        handle = self.store(unit, kind, t, place, part)
        return t.clone() if handle is t else handle

    def open(self, part: TokenRange, x: Tensor) -> tuple[Unit, Handle]:
        """The unit of a slice, and the handle there of the slice's input or the layer's; `x` is the slice's."""
        if self.unit is not None and self.x is not None:
            return self.unit, self.x
        unit = self.unit or self.engine.open_unit(self.memory, self.swap)
        return unit, self.store_copy(unit, "input", local_part(x.detach()), part.place("input"), part)

    def narrow(self, t: Tensor, part: TokenRange) -> Tensor:
        """The tokens of a slice, of a tensor that holds them or all."""
        dim = self.call.token_dim
        return t if t.shape[dim] == part.tokens else t.narrow(dim, part.start, part.tokens)

    # ---- forward

    def core(self, number: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Core:
        """The core of the layer's attention call `number`; slices make their calls in the same order."""
        if number == len(self.cores):
            if self.streamed:
                self.cores.append(self.engine.streamed_attention(self.attention_slices, self.index))
            else:
                self.cores.append(SlicedAttention(self.engine.attention.backend(q, k, v, spec), self.attention_slices))
        return self.cores[number]

    @contextlib.contextmanager
    def measuring_attention(self, spec: AttentionSpec) -> Iterator[None]:
        """Inside, attention is computed."""
        with self.engine.recorder.computing("attention"):
            profile = self.profile
            if profile is None:
                yield
                return
            profile.window(self.index, spec.window)
            profile.mark(self.index, "attention_begin")
            yield
            profile.mark(self.index, "attention_end")

    def take_output(self) -> Tensor:
        """The layer's output; nothing else of the forward is needed on the device any more."""
        y, self.y = self.y, None
        assert y is not None
        self.end_forward()
        return y.take() if isinstance(y, Assembly) else y

    def end_forward(self) -> None:
        """Nothing of the forward is needed on the device any more."""
        self.kept.end_forward()
        if self.unit is not None:
            for core in self.cores:
                core.end_forward()
            self.unit.end_forward()
        if self._arguments is not None:
            args, kwargs = self._arguments.park((self.call.args, self.call.kwargs))
            self.call = replace(self.call, args=args, kwargs=kwargs)
        elif torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it holds a copy of each weight until autocast ends, which is after the loss
        self.mark("forward_end")

    # ---- hidden states

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """The input of each slice, without history."""
        return read_parts(x, self.call.token_dim, [(part.start, part.stop) for part in self.slices])

    def write_output(self, part: TokenRange, y: Tensor) -> None:
        """A slice's share of the layer's output."""
        self.y = y.detach() if self.whole else self._written(self.y, part, y, "output")

    def write_input_gradient(self, part: TokenRange, dx: Tensor) -> None:
        """A slice's share of the gradient of the layer's input."""
        self.dx = dx if self.whole else self._written(self.dx, part, dx, "input gradient")

    def _written(self, into: Assembly | Tensor | None, part: TokenRange, t: Tensor, kind: str) -> Assembly:
        dim, shape = self.call.token_dim, list(t.shape)
        if not isinstance(into, Assembly):
            shape[dim] = self.call.tokens
            at_once = self.slices[0].tokens * self.call.batch
            name = f'"{kind}" of layer {self.index}'
            into = Assembly(shape, t.dtype, t.device, at_once, self.states_memory, name)
        into.write(dim, part.start, local_part(t))
        return into

    def begin_output_gradient(self, dy: Tensor) -> None:
        """The gradient of the layer's output has come: slices take theirs, last first."""
        bounds = [(part.start, part.stop) for part in reversed(self.slices)]
        self._dy = read_parts(dy, self.call.token_dim, bounds)
        self.begin_backward()

    def next_output_gradient(self) -> Tensor:
        """The gradient of the output of the slice whose turn it is."""
        dy = next(self._dy)
        if self.whole:  # it need not live longer than the slice wants it
            self._dy = iter(())
        return dy

    # ---- backward

    def begin_backward(self) -> None:
        """The layer's first act in the backward, or a slice's that is recomputed before it."""
        if self._ended:
            raise RuntimeError(
                "a second backward through the same graph (retain_graph) is not supported; run the forward again"
            )
        if self._started:
            return
        if self.engine.before_layer is not None:
            self.engine.before_layer()
        self._started = True
        self.mark("backward_begin")
        if self.unit is not None:
            self.unit.begin_backward()

    def end_backward(self) -> Tensor | None:
        """The layer's last act: give everything back, return the gradient of its input."""
        dx, self.dx = self.dx, None
        self._dy = iter(())
        self._ended = True
        self._weight_copies.clear()
        if self.first_slice == 0:
            self.release_cores()
        self.engine.end_backward(self)
        if self.unit is not None:
            self.unit.release()
        return dx.take() if isinstance(dx, Assembly) else dx

    def release_cores(self) -> None:
        """Give back what attention holds."""
        while self.cores:
            self.cores.pop().release()


def _autocast_of(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A factory of the autocast context that is active now."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled)
