"""One call of one layer: its memory, its attention, and when that comes and goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_memo.engine.attention import AttentionCore
from lightning_memo.engine.intercept import LayerMode
from lightning_memo.engine.memory import SlotMemory
from lightning_memo.engine.sharded import local_part
from lightning_memo.engine.shared import SharedTensors
from lightning_memo.engine.slices import TokenRange, cut
from lightning_memo.engine.unit import Handle
from lightning_memo.kernels import AttentionSpec, RngState

if TYPE_CHECKING:
    from lightning_memo.engine.engine import Engine


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
        args, kwargs = cut(arguments, self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)
        return self.forward(x, *args, **kwargs)

    def mode(self, part: TokenRange) -> LayerMode:
        return LayerMode(self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)


class LayerRun:
    """State of one layer call from its forward to the end of its backward.

    The autograd graph refers to its slices, and they to it; it refers to neither, so that a graph that is dropped takes
    the run with it, and the slot goes back at once.

    Args:
        engine: Owner of memory, kernels and profile.
        call: The layer and its arguments.
        x: Its input.
        index: Position among the layer calls that are alive, counted from the model's input.
        slices: Token ranges that cover the input.
        memory: Where the call's slot is leased; `None` when every slice keeps its activations.
        swap: Whether the slot leaves for the host.
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
    ) -> None:
        self.engine = engine
        self.call = call
        self.index = index
        self.unit = engine.open_unit(memory, swap)
        self.shared = SharedTensors(call.layer, (call.args, call.kwargs), x)
        self.autocast = _autocast_of(x.device)
        self.device = x.device
        self.x = self.store("input", local_part(x.detach()))  # x itself must not live until the backward
        self.x_requires_grad = x.requires_grad
        self.x_shape = x.shape
        self.rng_start = RngState.capture(x.device)
        self.slices = tuple(slices)
        self.cores: list[AttentionCore] = []
        self.y: Tensor | None = None
        self.dy: Tensor | None = None
        self.dx: Tensor | None = None
        self._started = self._ended = False

    @property
    def attention_slices(self) -> tuple[TokenRange, ...]:
        """The slices as attention sees them."""
        return tuple(part.gathered(self.call.shards) for part in self.slices)

    @property
    def whole(self) -> bool:
        """Whether the layer runs as a single slice."""
        return len(self.slices) == 1

    @property
    def in_backward(self) -> bool:
        """Whether the backward has begun, and not ended."""
        return self._started and not self._ended and self.unit.alive

    # ---- storing and loading

    def store(self, kind: str, t: Tensor, keep: bool = False) -> Handle:
        """Put a tensor into the unit, unless it is kept on the device."""
        if self.engine.profile is not None:
            self.engine.profile.saved(self.index, kind, t.nbytes)
        return t if keep else self.unit.put(t)

    def load(self, handle: Handle) -> Tensor:
        """A stored tensor on the device, in the backward."""
        if not isinstance(handle, Tensor):
            self.begin_backward()
        return self.unit.load(handle)

    def x_of(self, part: TokenRange) -> Tensor:
        """The input of some tokens, from storage."""
        return self.load(self.x).narrow(self.call.token_dim, part.start, part.tokens)

    # ---- forward

    def core(self, number: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionCore:
        """The core of the layer's attention call `number`; slices make their calls in the same order."""
        if number == len(self.cores):
            self.cores.append(AttentionCore(self.engine.backend(q, k, v, spec), self.attention_slices))
        return self.cores[number]

    def end_forward(self) -> None:
        """Nothing of the forward is needed on the device any more."""
        self.unit.end_forward()
        self.engine.mark(self.index, "forward_end")

    # ---- backward

    def begin_backward(self) -> None:
        """Bring the unit back, and start bringing back the one that is needed next."""
        if self._ended:
            raise RuntimeError(
                "a second backward through the same graph (retain_graph) is not supported; run the forward again"
            )
        if self._started:
            return
        self._started = True
        self.engine.mark(self.index, "backward_begin")
        self.unit.begin_backward()

    def end_backward(self) -> Tensor | None:
        """The layer's last act: give everything back, return the gradient of its input."""
        dx = self.dx
        self.dy = self.dx = None
        self._ended = True
        self.cores.clear()
        self.engine.end_backward(self)
        self.release()
        return dx

    def release(self) -> None:
        """Give the slot back; later use of it raises."""
        self.unit.release()


def _autocast_of(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A factory of the autocast context that is active now."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=enabled)
