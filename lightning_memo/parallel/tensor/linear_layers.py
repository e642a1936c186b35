"""Linear layers whose weights are stored as `[outputs, inputs]`, or transposed, as in GPT-2."""

from __future__ import annotations

from torch import Tensor, nn


def base_layer(m: nn.Module) -> nn.Module:
    """Returns the layer inside an adapter, or the module itself."""
    found: nn.Module = getattr(m, "base_layer", m)
    return found


def is_linear(m: nn.Module | None) -> bool:
    """Whether a module is a linear layer. A derived class may compute something else."""
    return isinstance(m, nn.Linear) or (m is not None and is_transposed(m))


def is_floating_linear(m: nn.Module | None) -> bool:
    """Whether a module is a linear layer whose weight is not quantised."""
    return is_linear(m) and isinstance(m.weight, Tensor) and m.weight.is_floating_point()  # type: ignore[union-attr]


def is_transposed(m: nn.Module) -> bool:
    """Whether a module is a linear layer with a weight `[inputs, outputs]`: transformers' `Conv1D`."""
    return hasattr(m, "nf") and hasattr(m, "nx") and tuple(getattr(m.weight, "shape", ())) == (m.nx, m.nf)


def matrix_of(m: nn.Module, weight: Tensor) -> Tensor:
    """Returns the weight of a linear layer as `[outputs, inputs]`."""
    return weight.t() if is_transposed(m) else weight


def output_features(m: nn.Module) -> int:
    """Number of output features of a linear layer."""
    return int(m.nf if is_transposed(m) else m.out_features)  # type: ignore[arg-type]


def input_features(m: nn.Module) -> int:
    """Number of input features of a linear layer."""
    return int(m.nx if is_transposed(m) else m.in_features)  # type: ignore[arg-type]
