"""Peaks of a training step with Llama or Qwen3 layers of Hugging Face, computed from buffers with lifetimes.

As in training, peaks are measured above the weights, all gradients and the optimizer state: gradients that do not exist
yet are subtracted. `HuggingFaceStep` recomputes every layer, with layer inputs and attention outputs in host slots.
`SlicedStep` runs layers slice by slice. `PlannedStep` runs by a plan, whose own number of device bytes is an upper
bound, as it adds the peaks of different moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from typing_extensions import override

from lightning_memo.estimate.layer_buffers import Buffers, LayerBuffers
from lightning_memo.estimate.saved_tensors import FP32
from lightning_memo.estimate.slice_settings import Slices, tables_bytes
from lightning_memo.planner.token_slices import plan_of_alpha, slices_of

RNG_STATE_BYTES: Final = 5056
"""Size of the state of PyTorch's CPU generator. Each layer call saves one."""

CHUNK_BYTES: Final = 512 * 2**20
"""Size of the fp32 logits of a chunk, as in `lightning_memo.loss`, which cannot be imported without torch."""

_FIRST_RUN_STATES: Final = 3
"""Number of generator states that exist when the engine first runs a layer."""

_INT64 = 8

_NORM_ROWS: Final = 12
"""Number of fp32 copies of a chunk of hidden states in the backward of the last norm, if they are on the host."""
_PROBED_SLICES: Final = 2
"""Number of slices on which the engine first runs a layer, if the sequence is longer."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceStep(LayerBuffers):
    """A training step of a Hugging Face model with Llama layers and AdamW, see `LayerBuffers`."""

    optimizer_shards: int = 1
    """Number of devices that the optimizer state is sharded over."""

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients, optimizer state with a step count per weight, and rotary frequencies."""
        sizes, counts = self.sizes, len(self._trained) * FP32
        trained_bytes = (sizes.gradient + sizes.optimizer) * sum(self._trained) + counts
        return sizes.weight * (sum(self._weights) + self.shape.head_dim) + trained_bytes

    @property
    def outside_bytes(self) -> int:
        """Highest peak in the forward, the loss and the optimizer."""
        optimizer = self._optimizer().lower_bound_bytes
        return max(self._forward().lower_bound_bytes, self.peak_of_loss, optimizer)

    @property
    def layers_bytes(self) -> int:
        """Highest peak in the backward of layers: in the first layer, when all others have their gradients."""
        if self.gradients_stay:
            return self._backward().lower_bound_bytes
        return self._backward().lower_bound_bytes - self.gradients_missing_before(0)

    def gradients_missing_before(self, layer: int) -> int:
        """Bytes of gradients that do not exist yet when the backward of a layer begins; the first layer is 0."""
        missing = (layer + 1) * self.trained_in_a_layer
        if self.shape.adapters is None and not self.shape.tied:
            missing += self._weights[0]
        return 0 if self.gradients_stay else self.sizes.gradient * missing

    @property
    def optimizer_bytes(self) -> int:
        """Peak in the optimizer."""
        return self._optimizer().lower_bound_bytes

    @property
    def _weights(self) -> tuple[int, ...]:
        """Number of elements of each weight, in order."""
        shape = self.shape
        embedding = shape.vocab * shape.hidden // self.tensor_parallel
        head = () if shape.tied else (embedding,)
        layer = (*self.layer_weights, *self.adapter_weights)
        return (embedding, *layer * shape.layers, shape.hidden, *head)

    @property
    def _trained(self) -> tuple[int, ...]:
        """Number of elements of each weight that gets a gradient."""
        return self._weights if self.shape.adapters is None else self.adapter_weights * self.shape.layers

    def shared(self, calls: int) -> Buffers:
        """Buffers that live through all layers: positions, their cosines and sines, and generator states."""
        buffers = Buffers()
        buffers.make(self.tokens * _INT64)
        for _ in ("cosines", "sines"):
            buffers.make(self.tokens * self.shape.head_dim * self.sizes.stream)
        buffers.make(calls * RNG_STATE_BYTES)
        return buffers

    @property
    def _logits(self) -> int:
        """Bytes of the logits in fp32. Tensor parallelism divides the vocabulary, not the tokens."""
        return self.tokens * self.shape.vocab * FP32

    @property
    def _chunked(self) -> bool:
        return self._logits > CHUNK_BYTES

    @property
    def peak_of_loss(self) -> int:
        """Peak in the loss. In chunks, its gradients are computed in the forward."""
        if self._chunked:
            return self._chunked_loss().lower_bound_bytes
        missing = 0 if self.gradients_stay else self.sizes.gradient * sum(self._trained)
        backward_peak = self._loss(backward=True).lower_bound_bytes - missing
        return max(self._loss(backward=False).lower_bound_bytes, backward_peak)

    def _loss(self, backward: bool, extra_bytes: int = 0) -> Buffers:
        """Loss of all tokens at once and its backward, without gradients of weights."""
        b, sizes = self.shared(self.shape.layers), self.sizes
        b.make(extra_bytes)
        for _ in ("output", "unweighted", "normed"):
            b.make(self.stream)
        if sizes.stream != FP32:
            b.make(self.tokens * self.shape.hidden * FP32)  # fp32 copy of the norm
        self.copy(b, self.tokens * self.shape.hidden + self._weights[0])
        head_output = b.make(self.product(self.shape.vocab))
        copy = b.make(self._logits) if sizes.product != FP32 else head_output
        probabilities = b.make(self._logits)
        b.free(*{head_output, copy})
        if not backward:
            return b
        picked = b.make(self._logits)  # gradient of each token's loss
        gradient = b.make(self._logits)
        b.free(probabilities, picked)
        if sizes.product != FP32:
            b.make(self.product(self.shape.vocab))
            b.free(gradient)
        return b

    def _chunked_loss(self, extra_bytes: int = 0) -> Buffers:
        """A chunk of the loss, whose gradients are computed in the forward."""
        b = self.shared(self.shape.layers)
        b.make(extra_bytes)
        for _ in ("output of the last layer", "output of the norm", "gradient of this output"):
            b.make(self.stream)
        trained = self.shape.adapters is None
        if trained:
            b.make(self._weights[0] * FP32)  # gradient of the head, to which all chunks add
        self.copy(b, self._weights[0])
        b.make(CHUNK_BYTES)
        if self.sizes.product != FP32:
            b.make(CHUNK_BYTES * self.sizes.product // FP32)
        if trained:
            # Gradients of the head from this chunk and from the one before.
            b.make(2 * self._weights[0] * self.sizes.product)
        return b

    def _optimizer(self) -> Buffers:
        """AdamW, weight by weight: a root and a quotient, which lives until the next weight's."""
        b = self.shared(0)
        last: list[int] = []
        for elements in self._trained:
            root, quotient = (b.make(elements // self.optimizer_shards * self.sizes.optimizer // 2) for _ in range(2))
            b.free(root, *last)
            last = [quotient]
        return b

    def _forward(self) -> Buffers:
        """The engine's first run of a layer, in the first step, with saved tensors on the device."""
        b = self.shared(_FIRST_RUN_STATES)
        b.make(self.stream)  # embeddings, referenced by the model
        b.make(self.stream)  # the layer's input, which is saved
        self.run(b)
        return b

    def _backward(self) -> Buffers:
        b = self.shared(self.shape.layers)
        self.differentiate(b, b.make(self.stream))
        return b


@dataclass(frozen=True, kw_only=True)
class SlicedStep(HuggingFaceStep):
    """A step in slices, with keys and values on the host, see `HuggingFaceStep`.

    `tokens` are those of a process. Buffers that the plan reserves (slots, and blocks of keys and values) are
    not counted.
    """

    slices: Slices

    @property
    @override
    def outside_bytes(self) -> int:
        """Highest peak in the forward, the loss and the optimizer."""
        if self.slices.stream_from_host == "model":
            tail = self._tail().lower_bound_bytes
            return max(self._first_run(1), tail, self._optimizer().lower_bound_bytes)
        peaks = (self._first_run(_PROBED_SLICES), self._run_slice(), self._optimizer().lower_bound_bytes)
        return max(*peaks, self._loss_bytes)

    @property
    @override
    def layers_bytes(self) -> int:
        """Highest peak in the backward of layers, in a slice whose gradients add to those of the slice before."""
        if self.slices.stream_from_host == "model":
            b = self.shared(self.shape.layers)
            b.make(self._arguments)  # arguments of the next slice
            self._part().differentiate(b, b.make(self._part().stream))
            return b.lower_bound_bytes
        missing = 0
        if not self.gradients_stay and self.shape.adapters is None and not self.shape.tied:
            missing = self._weights[0] * self.sizes.gradient  # the gradient of the embeddings comes last
        if self.slices.stream_from_host == "attention":
            return self._around_on_device().lower_bound_bytes - missing
        return max(self._around_on_host().lower_bound_bytes - missing, self._embedding_bytes)

    def _around_on_device(self) -> Buffers:
        b = self.shared(self.shape.layers)
        b.make(2 * self.stream)  # gradients of the layer's output and input
        b.make(self.slices.key_value_gradient_bytes(self.shape) * (self._count - 1) * self.slices.tokens)
        self._part().differentiate(b, b.make(0))
        return b

    def _around_on_host(self) -> Buffers:
        b = self.shared(self.shape.layers)
        plan = plan_of_alpha(self.tokens, 0.0, slice_tokens=self.slices.tokens)
        lengths = [part.tokens for part in slices_of(plan, 0, self.tokens)]
        # In copies: the gradient of the output of the slice before, and those of the input of two slices after.
        in_copies = max(sum(lengths[max(n - 1, 0) : n]) + sum(lengths[n + 1 : n + 3]) for n in range(len(lengths) - 1))
        b.make(in_copies * self.shape.hidden * self.sizes.stream)
        b.make(tables_bytes(self.shape, self.sizes) * self.slices.tokens)
        self._part().differentiate(b, b.make(self._part().stream))
        return b

    # ---- buffers around a layer

    @property
    def _count(self) -> int:
        """Number of slices."""
        return -(-self.tokens // self.slices.tokens)

    def _part(self, count: int = 1) -> LayerBuffers:
        """A layer on a number of slices, whose gradients add to those of other slices."""
        tokens = min(count * self.slices.tokens, self.tokens)
        return LayerBuffers(
            shape=self.shape, sizes=self.sizes, tokens=tokens, blocks=True, ring=self.ring, gradients_stay=True
        )

    @property
    def _arguments(self) -> int:
        """Bytes of the arguments that all layers of a slice use: position tables, and positions twice."""
        return self.slices.tokens * (tables_bytes(self.shape, self.sizes) + 2 * _INT64)

    @override
    def shared(self, calls: int) -> Buffers:
        if self.slices.stream_from_host == "attention":
            return super().shared(calls)
        b = Buffers()
        if self.slices.stream_from_host == "model":  # one generator state for all layers and slices
            b.make(self._arguments if calls else 0)
            b.make(RNG_STATE_BYTES if calls else 0)
        else:
            b.make(self.tokens * _INT64)
            b.make(calls * RNG_STATE_BYTES)
        return b

    # ---- forward

    def _first_run(self, count: int) -> int:
        part = self._part(count)
        b = self.shared(3)
        if self.slices.states_on_host:
            b.make(tables_bytes(self.shape, self.sizes) * part.tokens)
        whole = self.slices.stream_from_host == "attention"
        b.make(self.stream if whole else part.stream)  # embeddings
        b.make(part.stream)  # copy of the layer's input
        part.run(b)
        return b.lower_bound_bytes

    def _run_slice(self) -> int:
        """Peak of the forward of a slice, with the layer's input and output."""
        part = self._part()
        b = self.shared(self.shape.layers)
        if self.slices.stream_from_host != "attention":
            b.make(tables_bytes(self.shape, self.sizes) * part.tokens)
            b.make(4 * part.stream)  # this slice, the next one, and outputs that are copied to the host
        else:
            b.make(2 * self.stream)
        part.run(b)
        return b.lower_bound_bytes

    # ---- loss

    @property
    def _loss_bytes(self) -> int:
        if self.slices.stream_from_host == "attention":
            return self.peak_of_loss
        return max(self._streamed_loss(), self._streamed_norm())

    def _streamed_loss(self) -> int:
        """Peak of a chunk of the loss, with hidden states on the host."""
        b = self.shared(self.shape.layers)
        tokens = self._chunk_tokens
        b.make(6 * tokens * self.shape.hidden * self.sizes.stream)  # the chunk, the next one, and their gradients
        trained = self.shape.adapters is None
        if trained:
            b.make(self._weights[0] * FP32)  # gradient of the head, to which all chunks add
        self.copy(b, self._weights[0])
        b.make(tokens * self.shape.vocab * FP32)
        if self.sizes.product != FP32:
            b.make(tokens * self.shape.vocab * self.sizes.product)
        if trained:
            b.make(self._weights[0] * self.sizes.product)
        return b.lower_bound_bytes

    def _streamed_norm(self) -> int:
        return self.shared(self.shape.layers).lower_bound_bytes + (
            _NORM_ROWS * self._chunk_tokens * self.shape.hidden * FP32
        )

    @property
    def _chunk_tokens(self) -> int:
        return min(self.slices.tokens, CHUNK_BYTES // (self.shape.vocab * FP32))

    @property
    def _embedding_bytes(self) -> int:
        """Bytes of the gradient of the embeddings, to which all slices add in fp32."""
        if self.shape.adapters is not None:
            return 0
        part = self._part()
        summed = FP32 - self.sizes.gradient  # in addition to the final gradient
        return self._weights[0] * (self.sizes.gradient + summed) + 4 * part.stream

    def _tail(self) -> Buffers:
        """Forward and backward of norm, head and loss of a slice."""
        one_slice = replace(self, tokens=self.slices.tokens)
        extra_bytes = self._arguments  # arguments of the slice before
        if self.shape.adapters is None and self.sizes.gradient != FP32:
            extra_bytes += self._weights[0] * FP32  # gradient of the head, summed over slices
        if one_slice._chunked:
            return one_slice._chunked_loss(extra_bytes)
        return one_slice._loss(True, extra_bytes + one_slice.product(self.shape.vocab))  # the model's output has logits


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSlice:
    """Some tokens of a layer call."""

    tokens: int
    made: frozenset[str] = frozenset()
    """Names of the saved tensors that the backward computes again, and frees one by one."""

    kept: frozenset[str] = frozenset()
    """Names of the saved tensors that stay on the device, which the backward frees one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """A layer call, whose slices run one after the other, and in the backward from the last to the first."""

    slices: tuple[PlannedSlice, ...]
    kept_bytes: int
    """Bytes that the call keeps on the device, those of its slices included."""

    input_gradient: bool = True
    """Whether the layer's input requires a gradient."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step whose layer calls run by a plan.

    It reaches its peak in one of these: in the forward of a layer, when those before it keep tensors; in the loss; in
    the backward of a layer, when the layers after it have gradients and those before it keep tensors; or in the
    optimizer. Lightning deletes the gradients of the step before between forward and backward.
    """

    step: HuggingFaceStep
    calls: Sequence[PlannedCall]
    """All layer calls, in order."""

    buffer_bytes: int = 0
    """Bytes of the rounding buffers."""

    plain: bool = False
    """Whether layers run without a plan, so that what their forward makes is what they keep."""

    checkpointed: bool = False
    """Whether layer inputs are what is kept, so that they need no memory in addition."""

    @property
    def peak_bytes(self) -> int:
        """Peak above weights, all gradients and the optimizer state."""
        step, kept = self.step, [call.kept_bytes for call in self.calls]
        peaks = [sum(kept) + step.peak_of_loss, step.optimizer_bytes]
        forward = {call: 0 if self.plain else self._forward(call) for call in set(self.calls)}
        backward = {call: self._backward(call) for call in set(self.calls)}
        for number, call in enumerate(self.calls):
            before = sum(kept[: number + 1])
            peaks += [before + forward[call], before + backward[call] - step.gradients_missing_before(number)]
        return self.buffer_bytes + max(peaks)

    def _forward(self, call: PlannedCall) -> int:
        """Highest peak in the slices of a layer, with the embeddings, the layer's input and its output.

        What the slice and later ones keep is not alive before, and what the slice makes contains what it keeps.
        """
        peaks = []
        for number in range(len(call.slices)):
            b = self.step.shared(self.step.shape.layers)
            for _ in () if self.checkpointed else ("embeddings", "input", "output"):
                b.make(self.step.stream)
            for earlier in call.slices[:number]:
                if earlier.made:  # keys and values for this slice, which are not stored
                    b.make(self._keys_values(earlier))
            layer = self._layer(call, number)
            layer.run(b, saves=False)
            later = sum(layer.saved_bytes(each.tokens, each.kept) for each in call.slices[number:])
            peaks.append(b.lower_bound_bytes - later)
        return max(peaks)

    def _backward(self, call: PlannedCall) -> int:
        """Highest peak in the slices of a layer, without what the call keeps.

        Attention of the last one needs keys and values of all others, and their gradients. They are recomputed then.
        """
        peaks, last, freed = [], len(call.slices) - 1, 0
        for number, part in enumerate(call.slices):
            b = self.step.shared(self.step.shape.layers)
            b.make(self.step.stream)  # gradient of the layer's output
            layer = self._layer(call, number)
            others = sum(layer.saved_bytes(each.tokens, each.made) for each in call.slices[:number])
            others += sum(map(self._keys_values, call.slices)) if last else 0  # side by side
            if number < last:
                b.make(self.step.stream)  # gradient of the layer's input
                b.make(others + self._gradients_of_keys(call.slices[: number + 1]))
                others = 0
                if not layer.gradients_stay:  # those of the slices before exist
                    b.make(layer.trained_in_a_layer * layer.sizes.gradient)
                    layer = replace(layer, gradients_stay=True)
            else:
                others += self._gradients_of_keys(call.slices[:number])
            freed += layer.saved_bytes(part.tokens, part.kept)
            layer.differentiate(b, b.make(0), part.made | part.kept, others)
            peaks.append(b.lower_bound_bytes - freed)
        return max(peaks)

    def _layer(self, call: PlannedCall, number: int) -> HuggingFaceStep:
        """A layer that runs on the tokens of a slice."""
        shape = replace(self.step.shape, input_gradient=call.input_gradient)
        return replace(self.step, shape=shape, tokens=call.slices[number].tokens, blocks=number > 0)

    def _gradients_of_keys(self, parts: Sequence[PlannedSlice]) -> int:
        """Bytes of the sums of gradients of keys and values, which are in fp32."""
        return sum(map(self._keys_values, parts)) * FP32 // self.step.sizes.product

    def _keys_values(self, part: PlannedSlice) -> int:
        shape = self.step.shape
        return 2 * part.tokens * shape.kv_heads * shape.head_dim * self.step.sizes.product // self.step.tensor_parallel
