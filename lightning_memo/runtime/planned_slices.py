"""Cuts the layers of several processes into slices before the first step, if it would not fit a device.

One process runs a step again that ran out of memory. Several would wait for each other in the middle of it. They decide
together when the first layer is about to run, and begin the step again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_memo.artifacts.swap_plan import StreamFromHost
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner.make_plan import usable_device_bytes
from lightning_memo.profiler.measured_costs import state_bytes, weight_bytes
from lightning_memo.runtime.training_run import TrainingRun
from lightning_memo.utils.free_memory import free_device_bytes
from lightning_memo.utils.units import format_bytes

# A backward takes so many times what a layer saves: 1.2 to 1.36 with layers of Llama and Qwen3.
_BACKWARD: Final = 1.3
_STATES: Final = 4  # the input and the output of a layer, and their gradients
_GATHERED: Final = 3  # layers whose weights or gradients are whole at once
_FEWEST: Final = 4  # slices of a sequence
_BUSY: Final = 8192  # tokens of a slice that keep a GPU busy
_SHORTEST: Final = 64  # slices of a sequence of which nothing is known but that it does not fit

Cut = tuple[int, StreamFromHost]
"""Longest slice in tokens, and what lives on the host."""


class SlicesNeeded(Exception):
    """The first step has to begin again, in slices.

    Args:
        slice_tokens: Longest slice.
        stream_from_host: What lives on the host.
    """

    def __init__(self, slice_tokens: int, stream_from_host: StreamFromHost) -> None:
        super().__init__(f"the step needs slice_tokens={slice_tokens}, stream_from_host={stream_from_host!r}")
        self.slice_tokens, self.stream_from_host = slice_tokens, stream_from_host


class PlannedSlices:
    """Decides before the first layer of a run whether its layers are cut into slices.

    Args:
        engine: The engine of the run.
        config: The settings of the strategy. Slices that they ask for are left as they are.
        ranks: The processes that decide together.
        run: The training run.
        may_begin_again: Returns whether the first step can begin again.
    """

    def __init__(
        self, engine: Engine, config: MemoConfig, ranks: Ranks, run: TrainingRun, may_begin_again: Callable[[], bool]
    ) -> None:
        self._engine, self._ranks, self._run = engine, ranks, run
        self._may_begin_again = may_begin_again
        given = (config.slice_tokens, config.stream_from_host, config.disk_path) != ("auto", "auto", None)
        whole = engine.settings.stacks > 1 or engine.settings.joint_attention or config.pipeline_parallel_size > 1
        self._decided = given or whole

    def probe(self, find: Callable[[], LayerTraits], call: LayerCall, x: Tensor) -> LayerTraits:
        """Return the traits of the first layer. All processes call this with their first layers.

        Args:
            find: Finds the traits.
            call: The layer and its arguments.
            x: The layer's input.

        Raises:
            SlicesNeeded: The step does not fit some device, and can begin again in slices that fit.
        """
        if self._decided or not self._may_begin_again():
            return find()
        self._decided = True
        traits = None
        with contextlib.suppress(torch.OutOfMemoryError):
            traits = find()
        cuts = [cut for cut in self._ranks.gather(self._cut(traits, call, x)) if cut is not None]
        if cuts and any(self._ranks.gather(self._why_whole(find))):
            return find()
        if cuts:
            tokens = min(tokens for tokens, _ in cuts)
            stream: StreamFromHost = "hidden" if any(stream == "hidden" for _, stream in cuts) else "attention"
            rank_zero_warn(
                f"lightning_memo: a step of {call.tokens} tokens for each process is not expected to fit the device, "
                f"of which {format_bytes(self._room(call))} are left for activations: it begins again with "
                f'slice_tokens={tokens}, stream_from_host="{stream}"; give these settings to begin with them.'
            )
            raise SlicesNeeded(tokens, stream)
        assert traits is not None  # otherwise there are cuts
        return traits

    def _cut(self, traits: LayerTraits | None, call: LayerCall, x: Tensor) -> Cut | None:
        """Return slices with which a step fits this device; `None` if it fits without.

        Args:
            traits: The traits of a layer; `None` if not even its forward fits.
            call: The layer and its arguments.
            x: Its input.
        """
        if traits is None:
            return max(call.tokens // _SHORTEST, 1), "hidden"
        stored = sum(item.size_bytes for item in traits.saved if item.kind in ("out", "lse")) / traits.tokens
        states = x.nbytes / call.tokens
        each = _BACKWARD * traits.saved_bytes / traits.tokens + 2 * (states + stored)  # bytes per token
        room, between = self._room(call), _STATES * states * call.tokens
        if each * call.tokens + between <= room:
            return None
        keys = traits.key_value_gradient_bytes / traits.tokens * call.tokens
        longest = (room - between - keys) / each
        if longest >= min(_BUSY, call.tokens / _FEWEST):
            return _rounded(longest, call.tokens), "attention"
        return _rounded(room / each, call.tokens), "hidden"

    def _room(self, call: LayerCall) -> float:
        """Device bytes for activations, once gradients and the state of the optimizers are there."""
        device, model = self._engine.device, self._run.model
        coming = state_bytes(model, self._run.optimizers) - weight_bytes(model)
        coming += _GATHERED * sum(p.numel() * p.element_size() for p in call.layer.parameters())
        share = self._ranks.on_this_node if device.type == "cpu" else 1
        return usable_device_bytes(0, free_device_bytes(device) // share) - coming

    def _why_whole(self, find: Callable[[], LayerTraits]) -> str:
        """Return why the layer cannot run in slices that processes share; empty if it can."""
        engine = self._engine
        before, engine.attention.sliced = engine.attention.sliced, True
        engine.layer_classes.forget()
        try:
            traits = find()
        except torch.OutOfMemoryError:  # which says nothing about the layer
            return ""
        finally:
            engine.attention.sliced = before
            engine.layer_classes.forget()
        return traits.unsliceable or traits.needs_full_attention


def _rounded(longest: float, tokens: int) -> int:
    """Return the largest power of two up to a number of tokens, or so that there are a few slices."""
    most = min(longest, tokens / _FEWEST)
    return 1 << max(int(most).bit_length() - 1, 0)
