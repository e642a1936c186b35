"""Peak of a training step that runs by a plan, computed from buffers with lifetimes.

The plan's own number of device bytes is an upper bound: it adds the peaks of different moments. A step reaches its peak
in one of these: in the forward of a layer, when those before it keep tensors; in the loss; in the backward of a
layer, when the layers after it have gradients and those before it keep tensors; or in the optimizer. Lightning deletes
the gradients of the step before between forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_memo.estimate.inputs.precision_bytes import FP32
from lightning_memo.estimate.memory.working_set import HuggingFaceStep


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
    """A step whose layer calls run by a plan."""

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
