"""The hidden states of a layer call: its input, its output, and their gradients, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.memory.offloaded_tensor import TensorBuilder, read_parts
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import TokenRange


class WholeStates:
    """Hidden states of a layer that runs on all its tokens at once.

    Args:
        call: The layer and its arguments.
        x: The layer's input, `[batch, tokens, hidden]`.
        slices: The slices in which the layer runs.

    Attributes:
        device: Where the layer runs.
        x_requires_grad: Whether the layer's input needs a gradient.
    """

    def __init__(self, call: LayerCall, x: Tensor, slices: Sequence[TokenRange]) -> None:
        self.device, self.x_requires_grad = x.device, x.requires_grad
        self._dim = call.token_dim
        self._bounds = [(part.start, part.stop) for part in slices]
        self._y: TensorBuilder | Tensor | None = None
        self._dx: TensorBuilder | Tensor | None = None
        self._dy: Iterator[Tensor] | None = None

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Return the input of each slice, without history."""
        return read_parts(x, self._dim, self._bounds)

    def write_output(self, part: TokenRange, y: Tensor) -> None:
        """Take a slice's part of the layer's output."""
        self._y = y.detach()

    def take_output(self) -> Tensor:
        """Return the layer's output, and hold it no longer."""
        y, self._y = self._y, None
        assert y is not None
        return y.take() if isinstance(y, TensorBuilder) else y

    def begin_output_gradient(self, dy: Tensor) -> None:
        """Take the gradient of the layer's output; slices read their parts, last slice first."""
        self._dy = read_parts(dy, self._dim, self._bounds[::-1])

    def next_output_gradient(self) -> Tensor | None:
        """Return the part of the output's gradient of the slice whose turn it is; `None` if the output has none."""
        if self._dy is None:
            return None
        for dy in self._dy:
            self._forget_gradient()
            return dy
        raise AssertionError("every slice has taken its part of the output's gradient")

    def _forget_gradient(self) -> None:
        self._dy = iter(())  # it need not live longer than the slice needs it

    def drop_output_gradient(self) -> None:
        """Hold the gradient of the output no longer."""
        self._dy = None

    def drop_gradients(self) -> None:
        """Hold no gradients, of which the input's may be incomplete."""
        self._dy = self._dx = None

    def write_input_gradient(self, part: TokenRange, dx: Tensor) -> None:
        """Take a slice's part of the gradient of the layer's input."""
        self._dx = dx

    def take_input_gradient(self) -> Tensor | None:
        """Return the gradient of the layer's input, and hold it no longer; `None` if there is none."""
        dx, self._dx = self._dx, None
        return dx.take() if isinstance(dx, TensorBuilder) else dx


class SlicedStates(WholeStates):
    """Hidden states of a layer that runs slice after slice.

    Args:
        call: The layer and its arguments.
        x: The layer's input, `[batch, tokens, hidden]`.
        slices: The slices in which the layer runs.
        memory: The host memory for the output and the gradient of the input; `None` if they are on the device.
    """

    def __init__(self, call: LayerCall, x: Tensor, slices: Sequence[TokenRange], memory: SlotMemory | None) -> None:
        super().__init__(call, x, slices)
        self._tokens, self._memory = call.tokens, memory
        self._rows_at_once = slices[0].tokens * call.batch

    def write_output(self, part: TokenRange, y: Tensor) -> None:
        self._y = self._written(self._y, part, y)

    def _forget_gradient(self) -> None:
        """Later slices need their parts."""

    def write_input_gradient(self, part: TokenRange, dx: Tensor) -> None:
        self._dx = self._written(self._dx, part, dx)

    def _written(self, into: TensorBuilder | Tensor | None, part: TokenRange, t: Tensor) -> TensorBuilder:
        if not isinstance(into, TensorBuilder):
            shape = list(t.shape)
            shape[self._dim] = self._tokens
            into = TensorBuilder(shape, t.dtype, t.device, self._rows_at_once, self._memory)
        into.write(self._dim, part.start, local_part(t))
        return into
