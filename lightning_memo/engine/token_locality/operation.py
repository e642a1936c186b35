"""One call of an operator of PyTorch, as rules see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_memo.engine.token_locality.token_dims import TOKENS, Dim, Dims, TokenSizes, TokensMixed
from lightning_memo.utils.operator_values import tensors_in

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of an operator.

    Attributes:
        operator: The operator.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
        result: What it returned.
        dims_of: Returns the dims of a tensor.
        sizes: Sizes of dims.
    """

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any
    dims_of: Callable[[Tensor], Dims]
    sizes: TokenSizes
    outs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outs", tensors_in(self.result))

    @property
    def name(self) -> str:
        """Name of the operator, for example "aten.cumsum"."""
        return str(self.operator.overloadpacket)

    @property
    def out(self) -> Tensor:
        """The first tensor that the operator returned."""
        return self.outs[0]

    def tensor(self, place: int) -> Tensor:
        """Return a positional argument that is a tensor."""
        t = self.arguments[place]
        assert isinstance(t, Tensor)
        return t

    def dims(self, place: int) -> Dims:
        """Return the dims of a positional argument."""
        return self.dims_of(self.tensor(place))

    def argument(self, place: int, name: str, default: Any = _MISSING) -> Any:
        """Return an argument that is given by position or by name."""
        value = self.arguments[place] if len(self.arguments) > place else self.keywords.get(name, default)
        assert value is not _MISSING, f"{self.name} without {name}"
        return value

    def along(self, place: int, default: Any = _MISSING) -> int:
        """Return the dimension, given at `place` or as `dim`, along which the operator computes.

        Raises:
            TokensMixed: This dimension holds tokens.
        """
        dims = self.dims(0)
        n = self.argument(place, "dim", default) % max(len(dims), 1)
        self.check_plain(dims[n] if dims else ())
        return int(n)

    def check_plain(self, dim: Dim) -> None:
        """Check that a dim holds no tokens.

        Raises:
            TokensMixed: It does.
        """
        if TOKENS in dim:
            raise TokensMixed(f"{self.name} computes along the tokens")

    def shortened(self, dims: Dims, n: int, start: int, out: Tensor | None = None) -> Dims:
        """Return `dims` for an output (by default the first) that is a part of dimension `n`, from `start` on.

        Raises:
            TokensMixed: The dimension holds tokens, and the part is not a number of whole copies of them.
        """
        size = (self.out if out is None else out).shape[n]
        if dims[n][1:] == (TOKENS,) and self.sizes.holds_tokens(size) and start % self.sizes.tokens == 0:
            return (*dims[:n], self.sizes.of_size(size), *dims[n + 1 :])
        return self.resized(dims, n, out)

    def resized(self, dims: Dims, n: int, out: Tensor | None = None) -> Dims:
        """Return `dims` with the size that dimension `n` has in an output (by default the first).

        Raises:
            TokensMixed: This dimension holds tokens, or the new size is a number of tokens.
        """
        self.check_plain(dims[n])
        size = (self.out if out is None else out).shape[n]
        if self.sizes.holds_tokens(size):
            raise TokensMixed(f"{self.name} makes a tensor by the number of tokens")
        return (*dims[:n], self.sizes.without_tokens(size), *dims[n + 1 :])
