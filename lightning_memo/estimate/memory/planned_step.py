"""Peak of a training step that runs by a plan, computed from buffers with lifetimes.

The plan's own number of device bytes is an upper bound: it adds the peaks of different moments. A step reaches its peak
in one of these: in the forward or the backward of its last layer, when all kept tensors are alive; in the loss; in the
backward of its first layer, when all gradients are alive; or in the optimizer. Lightning deletes the gradients of the
step before between forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_memo.estimate.memory.activations import saved_tensors
from lightning_memo.estimate.memory.working_set import HuggingFaceStep


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSlice:
    """Some tokens of a layer call."""

    tokens: int
    made: frozenset[str] = frozenset()
    """Names of the saved tensors that the backward computes again, and frees one by one."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step whose layers run in slices, one after the other, from the last to the first in the backward."""

    step: HuggingFaceStep
    slices: Sequence[PlannedSlice]
    kept_bytes: int
    """Bytes that each layer call keeps on the device until the end of its backward."""

    buffer_bytes: int = 0
    """Bytes of the rounding buffers."""

    plain: bool = False
    """Whether the backward frees what a layer has kept one by one, as without a plan."""

    checkpointed: bool = False
    """Whether layer inputs are what is kept, so that they need no memory in addition."""

    @property
    def peak_bytes(self) -> int:
        """Peak above weights, all gradients and the optimizer state."""
        calls, step = self.step.shape.layers, self.step
        before = calls * self.kept_bytes
        during = before - self.kept_bytes if self.plain else before
        backward = self._backward()
        return self.buffer_bytes + max(
            0 if self.plain else before + self._forward(),  # what the forward makes is what it keeps, if plain
            before + step.peak_of_loss,
            during + backward - step.gradients_missing_in_last_layer,
            during - before + self.kept_bytes + backward - step.gradients_missing_in_first_layer,
            step.optimizer_bytes,
        )

    def _forward(self) -> int:
        """Highest peak in the slices of a layer, with the embeddings, the layer's input and its output."""
        peaks = []
        for number in range(len(self.slices)):
            b = self.step.shared(self.step.shape.layers)
            for _ in () if self.checkpointed else ("embeddings", "input", "output"):
                b.make(self.step.stream)
            for earlier in self.slices[:number]:
                if earlier.made:  # keys and values for this slice, which are not stored
                    b.make(self._keys_values(earlier))
            self._part(number).run(b, saves=False)
            peaks.append(b.lower_bound_bytes)
        return max(peaks)

    def _backward(self) -> int:
        """Highest peak in the slices of a layer.

        Attention of the last one needs keys and values of all others, and their gradients. They are recomputed then.
        """
        peaks, last = [], len(self.slices) - 1
        for number, part in enumerate(self.slices):
            b = self.step.shared(self.step.shape.layers)
            b.make(self.step.stream)  # gradient of the layer's output
            others = sum(self._made_bytes(each) + self._keys_values(each) for each in self.slices[:number])
            layer = self._part(number)
            if number < last:
                b.make(self.step.stream)  # gradient of the layer's input
                b.make(self._keys_values(part) + others)
                others = 0
                if not layer.gradients_stay:  # those of the slices before exist
                    b.make(layer.trained_in_a_layer * layer.sizes.gradient)
                    layer = replace(layer, gradients_stay=True)
            layer.differentiate(b, b.make(0), part.made, others)
            peaks.append(b.lower_bound_bytes)
        return max(peaks)

    def _part(self, number: int) -> HuggingFaceStep:
        return replace(self.step, tokens=self.slices[number].tokens, blocks=number > 0)

    def _keys_values(self, part: PlannedSlice) -> int:
        shape = self.step.shape
        return 2 * part.tokens * shape.kv_heads * shape.head_dim * self.step.sizes.product // self.step.tensor_parallel

    def _made_bytes(self, part: PlannedSlice) -> int:
        tensors = saved_tensors(self.step.shape, kernels=self.step.shape.kernels, sizes=self.step.sizes)
        return sum(part.tokens * t.bytes_per_token for t in tensors if t.name in part.made)
