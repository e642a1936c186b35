"""Functions of transformers in which tokens meet in a state. Mixers call them by name."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import ModuleType

from torch import nn

_QKV = ("query", "key", "value", "g", "beta")
_CHANNELS = ("hidden_states", "weight", "bias", "activation")
_SCANNED = ("hidden_states", "dt", "A", "B", "C", "chunk_size")


@dataclass(frozen=True, slots=True)
class StateFunction:
    """A function that hands a state from token to token.

    Attributes:
        names: The names of its first arguments.
        by_token: The arguments that hold one entry for each token. The first one is never left out.
        like: The argument whose shape the result has.
        token_dim: The dimension of tokens in these arguments.
        start: The keyword for the state at the start; empty for a convolution, whose state is a part of its input.
        end: The keyword by which the state at the end is asked for.
        pairs: Whether the function returns a pair in any case.
    """

    names: tuple[str, ...]
    by_token: tuple[str, ...]
    like: str
    token_dim: int
    start: str = ""
    end: str = ""
    pairs: bool = False


_DELTA_RULE = StateFunction(_QKV, _QKV, "value", 1, "initial_state", "output_final_state", pairs=True)
STATE_FUNCTIONS = {
    "causal_conv1d_fn": StateFunction(_CHANNELS, _CHANNELS[:1], "hidden_states", 2),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": StateFunction(
        _SCANNED, ("hidden_states", "dt", "B", "C"), "hidden_states", 1, "initial_states", "return_final_states"
    ),
}
# Kernels that join several of these functions take no state. If they return None, mixers call the functions.
JOINED_FUNCTIONS = ("mamba2_split_conv1d_scan_combined",)


@functools.cache
def functions_of(kind: type[nn.Module]) -> tuple[tuple[ModuleType, str], ...]:
    """Return the functions that a class of transformers may call: the Python module, and the name in it."""
    homes = [sys.modules[c.__module__] for c in kind.__mro__ if c.__module__.startswith("transformers.")]
    return tuple(
        (home, name) for home in homes for name in (*STATE_FUNCTIONS, *JOINED_FUNCTIONS) if hasattr(home, name)
    )
