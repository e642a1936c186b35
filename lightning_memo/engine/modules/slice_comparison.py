"""While training, compares now and then layers in slices with whole ones, and recomputed values with the forward's."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.collected_outputs import collecting_nothing
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.modules.compare_slices import difference_in_slices
from lightning_memo.engine.modules.layer_classes import LayerClasses
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.modules.requested_settings import RequestedSettings
from lightning_memo.engine.saved_tensors.saved_sums import SavedSums
from lightning_memo.parallel.tensor.token_exchange import exchanging_nothing

_EVERY = 64  # steps
_MOST_TOKENS = 1024
_PART = 8  # of the tokens, so that a comparison needs less memory than the backward of the layer


class SliceComparison:
    """Compares one layer call in steps 1, 2, 4, 8, ..., 64, and then in every 64th, another layer each time.

    Also looks at what this layer writes and keeps by name, which a second slice would do again.

    In the same steps, sums of the tensors that any layer recomputes are compared with those of its forward.

    Args:
        layer_classes: The traits of the layers, which run as one slice once a difference is found.
        settings: The settings that were requested.

    Attributes:
        before: Called before each comparison, whose memory is no part of a planned step.

    Note: [Comparison of slices]
    The proof holds for the code of a layer as it was. While training, code may take another way, for example because
    the user opens a gate or changes an attribute.
    """

    def __init__(self, layer_classes: LayerClasses, settings: RequestedSettings) -> None:
        self._layer_classes, self._enabled = layer_classes, settings.check_slices
        self._only_slices = settings.storage == "kinds"
        self._steps = self._turns = self._compared = 0
        self._waits = False  # whether this step's comparison is still to come
        self._in_turn = False  # whether this step is one of those
        self.before: Callable[[], None] | None = None

    def sums_of(self, key: int) -> SavedSums | None:
        """Return an empty collection of sums for a slice of a layer call that is recomputed; `None` if none is due.

        Args:
            key: Number of the call among those that are alive.
        """
        return SavedSums(key + self._turns) if self._in_turn else None

    def due(self, key: int, calls: int) -> bool:
        """Return whether a layer call has to be compared.

        Args:
            key: Number of the call among those that are alive. Call 0 begins a step.
            calls: Number of layer calls of a step.
        """
        if key == 0:
            self._steps += 1
            self._in_turn = self._enabled and not (self._steps % _EVERY and self._steps & (self._steps - 1))
            self._waits = self._in_turn
            self._turns += self._in_turn
        if not self._waits or key != self._compared % max(calls, 1):
            return False
        self._waits = False
        self._compared += 1
        return True

    def ends_slices(
        self, call: LayerCall, x: Tensor, traits: LayerTraits, lengths: Sequence[int], due: bool, needs_slices: bool
    ) -> bool:
        """Return whether the layers must not run in slices any more: a layer computes something else then, or writes.

        Args:
            call: The layer and its arguments.
            x: The layer's input.
            traits: The traits of the layer.
            lengths: Numbers of tokens in the slices, and of all tokens; the first one is that of a slice.
            due: Whether the layer is compared with itself.
            needs_slices: Whether layers cannot run as one slice by the plan.

        Raises:
            ValueError: There is a difference, and layers have to run in slices; or the layer writes or keeps what
                cannot be undone.
        """
        if why := self._layer_classes.why_other_at(call, x, traits, lengths):
            self._end(why, call, traits, needs_slices, "")
            return True
        if not due:
            return False
        if self.before is not None:
            self.before()
        tokens = _unlike_other_sizes(max(2, min(_MOST_TOKENS, call.tokens // _PART, lengths[0])), call)
        start, turn = (call.tokens - tokens) // 2, self._compared
        with collecting_nothing(), exchanging_nothing():
            unlike = difference_in_slices(call, x, traits.locality.side_places, start, tokens, turn)
        if not unlike:
            return False
        why = f"{call.name} does not compute in slices what it computes on all tokens ({unlike})"
        self._end(why, call, traits, needs_slices, "this step and earlier ones may have been wrong")
        return True

    def _end(self, why: str, call: LayerCall, traits: LayerTraits, needs_slices: bool, before: str) -> None:
        """Let layers run as one slice from now on.

        Raises:
            ValueError: They have to run in slices.
        """
        divided = call.layout is not None or any(isinstance(p, DTensor) for p in call.layer.parameters())
        if needs_slices or divided or self._only_slices:
            raise ValueError(
                f"{why}, and these settings need slices: {before}{'; ' * bool(before)}train this model without "
                "slice_tokens, and with one process for each sequence"
            )
        warnings.warn(
            f"lightning_memo: {why}. From now on, layers run as one slice{'; ' * bool(before)}{before}.",
            stacklevel=3,
        )
        self._layer_classes.forget()  # what layers do now decides what a recomputation returns to
        self._layer_classes.agree(why, traits.why_nest)


def _unlike_other_sizes(tokens: int, call: LayerCall) -> int:
    """Return a number near `tokens` that is no other size of the arguments, whose dims of tokens are found by size."""
    sizes = {size for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor) for size in t.shape}
    near = itertools.chain(range(tokens, 1, -1), range(tokens + 1, call.tokens + 1))
    return next((n for n in near if n not in sizes | {call.batch}), tokens)
