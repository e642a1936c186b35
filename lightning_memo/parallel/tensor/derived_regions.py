"""Derives how a layer is divided over ranks, from runs of the layer itself.

Note: [A region, and its proof]
A region begins at a block, whose input is whole on every rank, and ends at a linear layer that is split row-wise, whose
outputs are summed over the ranks. In between, each rank has its own heads or MLP columns, which column-wise linear
layers make from what is whole. A traced run shows the candidates: a row-wise layer takes what other linear layers make,
and nothing else of the tokens. Which rows of a weight belong together (packed projections have several parts), and
which attributes count heads, is not known. Divisions are tried in turn, and each has to be proven.

For the proof the layer runs once whole, and once for each rank with the rank's rows. In a rank's run the row-wise layer
computes its partial sum, and passes on the whole one. A division is right if

- the partial sums of all ranks add up to the whole sum,
- the gradients of the block's input and of all weights inside add up to the whole ones,
- the partial sums depend on nothing else that gets a gradient, and
- the layer's results, computed from the whole sums, remain the same: no rank's part goes elsewhere.

Weights are random, so that sums do not agree by chance. What cannot be proven stays whole on every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.parallel.tensor.linear_layers import input_features, is_linear, matrix_of, output_features
from lightning_memo.parallel.tensor.local_shares import FirstArgument, LocalShares
from lightning_memo.parallel.tensor.sample_runs import LayerCall, LinearCalls, trace_linear_calls

_TOLERANCE = 1e-4  # relative, in fp32; another division is wrong by about 1
_LEAST = 1e-3  # smaller gradients, relative to those of the whole region, count as large as this
_WIDEST = 8  # adding up outputs that are wider than the divided inputs, by this factor, takes longer than the product
_PARTS_OF_PACKED = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a layer that is divided over ranks; see the note above. Names are dotted.

    Attributes:
        colwise: Column-wise layers, each with the numbers of output features of its parts. Each part is divided.
        rowwise: The row-wise layer.
        block: The module around the column-wise layers; `None` if that is the whole layer.
        shares: What of the block counts a rank's own heads or features.
        per_head: Parameters of the block whose first dimension is divided.
        beyond: Parameters inside the block that compute with the whole sum.
    """

    colwise: Mapping[str, tuple[int, ...]]
    rowwise: str
    block: str | None
    shares: LocalShares
    per_head: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()

    def renamed(self, name: Callable[[str], str]) -> Region:
        """Returns the same region with other names."""
        return replace(
            self,
            colwise={name(m): parts for m, parts in self.colwise.items()},
            rowwise=name(self.rowwise),
            block=None if self.block is None else name(self.block),
            per_head=tuple(map(name, self.per_head)),
            beyond=tuple(map(name, self.beyond)),
        )


def derive_regions(call: LayerCall, ranks: int) -> list[Region]:
    """Find the regions of a layer that a number of ranks can divide, and prove each of them.

    Args:
        call: A call of the layer.
        ranks: Number of ranks.

    Returns:
        The regions, with names in the layer.
    """
    try:
        traced = trace_linear_calls(call)
    except Exception:  # whatever a layer raises that does not run twice
        return []
    found: list[Region] = []
    taken: set[nn.Module] = set()
    for rowwise in reversed(traced.sources):
        colwise = _makers_of(rowwise, traced)
        if colwise:
            candidate = _Candidate(call, rowwise, colwise, ranks)
            modules = {rowwise, *colwise, *candidate.inside}
            if taken.isdisjoint(modules) and (region := candidate.proven()) is not None:
                found.append(region)
                taken |= modules
    return found[::-1]


def _makers_of(rowwise: nn.Module, traced: LinearCalls) -> list[nn.Module]:
    """Returns the layers whose outputs a row-wise layer would take; none if it takes something else, too.

    Those whose outputs others take stay whole, like the low-rank factors of multi-head latent attention, and those
    that select tokens or experts: a selection from parts may be another one.
    """
    sources = traced.sources[rowwise]
    if not sources or not sources <= traced.sources.keys():
        return []
    before: set[nn.Module | None] = set()
    left = [source for m in sources if m is not None for source in traced.sources[m]]
    while left:
        m = left.pop()
        if m not in before:
            before.add(m)
            left += traced.sources.get(m, ()) if m is not None else ()
    return [m for m in traced.sources if m in sources - before - traced.selecting]


class _Candidate:
    """A row-wise layer and the column-wise layers before it."""

    def __init__(self, call: LayerCall, rowwise: nn.Module, colwise: Sequence[nn.Module], ranks: int) -> None:
        self._call, self._rowwise, self._colwise, self._ranks = call, rowwise, colwise, ranks
        self._names = {m: name for name, m in call.layer.named_modules()}
        path = _common([self._names[m].rpartition(".")[0] for m in colwise])
        self._block = call.layer.get_submodule(path) if path else None
        self._entered = colwise if self._block is None else [self._block]
        self.inside = [] if self._block is None else [m for m in self._block.modules() if m is not rowwise]
        own = [p for m in (*colwise, *self.inside) for p in m._parameters.values() if p is not None]
        self._parameters = list(dict.fromkeys([*own, rowwise.weight]))
        bias = getattr(rowwise, "bias", None)
        known = {id(p) for p in (*self._parameters, bias)}
        self._outside = [p for p in call.layer.parameters() if id(p) not in known]

    def proven(self) -> Region | None:
        """Returns the first division that is right; `None` if none is."""
        features = input_features(self._rowwise)
        if features % self._ranks or features * _WIDEST < output_features(self._rowwise):
            return None
        try:
            whole = self._whole()
            if whole is None:
                return None
        except Exception:  # modules may be anything: this one is called otherwise than a block
            return None
        for region in self._divisions():
            # A module that does not compute with a division raises whatever it raises.
            with contextlib.suppress(Exception):
                if (right := self._check(region, whole)) is not None:
                    return right
        return None

    def _divisions(self) -> Iterator[Region]:
        none = LocalShares()
        base = Region({}, self._names[self._rowwise], None if self._block is None else self._names[self._block], none)
        sizes = {input_features(self._rowwise), *map(output_features, self._colwise)}
        shares = [none] if self._block is None else LocalShares.possible(self._block, sizes, self._ranks)
        counts = LocalShares.counts(self._block) if self._block is not None else set()
        for per_head in dict.fromkeys([(), self._per_head(counts)]):
            for parts in self._packings(counts):
                colwise = {self._names[m]: parts[m] for m in self._colwise}
                for share in shares:
                    yield replace(base, colwise=colwise, shares=share, per_head=per_head)

    def _packings(self, counts: set[int]) -> Iterator[dict[nn.Module, tuple[int, ...]]]:
        """Yields the possible parts of each column-wise layer: equal ones, or those of grouped queries."""
        features = {m: output_features(m) for m in self._colwise}
        for number in _PARTS_OF_PACKED:
            parts = {m: (size // number,) * number for m, size in features.items()}
            if all(sum(p) == features[m] and p[0] % self._ranks == 0 for m, p in parts.items()):
                yield parts
        for heads in counts:
            for groups in counts:
                units = heads + 2 * groups
                if groups < heads and groups % self._ranks == 0 and all(n % units == 0 for n in features.values()):
                    yield {
                        m: (heads * n // units, groups * n // units, groups * n // units) for m, n in features.items()
                    }

    def _per_head(self, counts: set[int]) -> tuple[str, ...]:
        divided = [
            self._parameter_name(m, name)
            for m in self.inside
            if not is_linear(m)
            for name, p in m._parameters.items()
            if p is not None and p.dim() and p.shape[0] in counts and p.shape[0] % self._ranks == 0
        ]
        return tuple(divided)

    def _parameter_name(self, m: nn.Module, name: str) -> str:
        return f"{self._names[m]}.{name}" if self._names[m] else name

    def _whole(self) -> _WholeRun | None:
        call, entries, sums = self._call.fresh(), [], []

        def enter(x: Tensor) -> Tensor:
            entries.append(x.clone())
            return entries[-1].clone()  # modules may write into it

        with self._entering(enter), _receiving_outputs(self._rowwise, sums.append):
            results = call.run()
        if len(entries) != len(self._entered) or len(sums) != 1:
            return None
        generator = torch.Generator().manual_seed(2)
        seeds = [torch.randn(t.shape, generator=generator) for t in results]
        loss = sum(((t * seed).sum() for t, seed in zip(results, seeds, strict=True)), torch.zeros(()))
        of_sum, *gradients = torch.autograd.grad(loss, [sums[0], *entries, *self._parameters], allow_unused=True)
        detached = [t.detach() for t in results]
        return _WholeRun([t.detach() for t in entries], sums[0].detach(), detached, of_sum, gradients)

    def _check(self, region: Region, whole: _WholeRun) -> Region | None:
        """Returns the region, with the parameters beyond its sum, if it is right."""
        total: Tensor | None = None
        summed: list[Tensor | None] = [None] * len(whole.gradients)
        for rank in range(self._ranks):
            partial, gradients, results = self._part(region, rank, whole)
            if not all(map(_is_close, results, whole.results)):
                return None
            total = partial if total is None else total + partial
            summed = [_plus(a, b) for a, b in zip(summed, gradients, strict=True)]
        assert total is not None
        bias = getattr(self._rowwise, "bias", None)
        if not _is_close(total if bias is None else total + bias.detach(), whole.sum):
            return None
        least = _LEAST * math.sqrt(sum(float(g.norm()) ** 2 for g in whole.gradients if g is not None))
        beyond: list[str] = []
        names = [None] * len(whole.entries) + self._parameter_names()
        for name, got, expected in zip(names, summed, whole.gradients, strict=True):
            if got is None and expected is not None and name is not None and name.rpartition(".")[0] != region.block:
                beyond.append(name)
            elif not _is_close(_or_zero(got, expected), _or_zero(expected, got), least):
                return None
        return replace(region, beyond=tuple(beyond))

    def _parameter_names(self) -> list[str | None]:
        names = {id(p): name for name, p in self._call.layer.named_parameters()}
        return [names[id(p)] for p in self._parameters]

    def _part(self, region: Region, rank: int, whole: _WholeRun) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
        """Returns the partial sum of a rank, its gradients, and the results of the layer."""
        call = self._call.fresh()
        given = iter(whole.entries)
        entries: list[Tensor] = []
        partial: list[Tensor] = []
        columns = _own_part(input_features(self._rowwise), rank, self._ranks)

        def enter(x: Tensor) -> Tensor:
            entries.append(next(given).clone().requires_grad_())
            return entries[-1].clone()

        def add(x: Tensor) -> Tensor:
            partial.append(F.linear(x, matrix_of(self._rowwise, self._rowwise.weight)[:, columns]))
            return whole.sum.clone()

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._entering(enter))
            stack.enter_context(_replaced(self._rowwise, forward=add))
            for m in self._colwise:
                rows = _own_rows(region.colwise[self._names[m]], rank, self._ranks)
                stack.enter_context(_replaced(m, forward=_rows_of(m, rows)))
            for name in region.per_head:
                holder, _, last = name.rpartition(".")
                m = self._call.layer.get_submodule(holder)
                own = _own_part(m.get_parameter(last).shape[0], rank, self._ranks)
                stack.enter_context(_replaced(m, **{last: m.get_parameter(last)[own]}))
            if self._block is not None:
                stack.enter_context(_replaced(self._block, **region.shares.values(self._block, self._ranks)))
            results = call.run()
        leaves = [*entries, *self._parameters, *self._outside, *call.leaves()]
        gradients = torch.autograd.grad(partial[0], leaves, whole.gradient_of_sum, allow_unused=True)
        inner = len(entries) + len(self._parameters)
        if len(partial) != 1 or any(g is not None for g in gradients[inner:]):
            raise ValueError("a partial sum depends on something outside of the region")
        return partial[0].detach(), list(gradients[:inner]), [t.detach() for t in results]

    @contextlib.contextmanager
    def _entering(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within this context the first argument of the block, or of each column-wise layer, is changed."""
        hooks = []
        for m in self._entered:
            first = FirstArgument(m)

            def hook(_: nn.Module, args: Any, kwargs: Any, first: FirstArgument = first) -> Any:
                return first(change, lambda *a, **k: (a, k), *args, **kwargs)

            hooks.append(m.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()


@dataclass(frozen=True, slots=True)
class _WholeRun:
    """What the whole layer computes.

    Attributes:
        entries: Inputs of the block, or of each column-wise layer.
        sum: Output of the row-wise layer.
        results: Results of the layer.
        gradient_of_sum: Gradient of `sum`.
        gradients: Gradients of the inputs and of the parameters of the region.
    """

    entries: list[Tensor]
    sum: Tensor
    results: list[Tensor]
    gradient_of_sum: Tensor
    gradients: list[Tensor | None]


def _common(paths: Sequence[str]) -> str:
    """Returns the dotted name that all names begin with."""
    parts = [path.split(".") if path else [] for path in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _own_part(size: int, rank: int, ranks: int) -> slice:
    return slice(size // ranks * rank, size // ranks * (rank + 1))


def _own_rows(parts: Sequence[int], rank: int, ranks: int) -> Tensor:
    rows, start = [], 0
    for part in parts:
        rows.append(start + torch.arange(part)[_own_part(part, rank, ranks)])
        start += part
    return torch.cat(rows)


def _rows_of(m: nn.Module, rows: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        bias = None if m.bias is None else m.bias[rows]
        return F.linear(x, matrix_of(m, m.weight)[rows], bias)

    return forward


@contextlib.contextmanager
def _replaced(m: nn.Module, **attributes: Any) -> Iterator[None]:
    """Within this context a module has other attributes, which hide its parameters of the same names."""
    before = {name: vars(m)[name] for name in attributes if name in vars(m)}
    vars(m).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(m)[name]
        vars(m).update(before)


@contextlib.contextmanager
def _receiving_outputs(m: nn.Module, receive: Callable[[Tensor], None]) -> Iterator[None]:
    """Within this context the outputs of a module are received. The caller gets copies, into which it may write."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        receive(output)
        return output.clone()

    handle = m.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _or_zero(t: Tensor | None, like: Tensor | None) -> Tensor:
    if t is not None:
        return t
    return torch.zeros(()) if like is None else torch.zeros_like(like)


def _is_close(got: Tensor, expected: Tensor, least: float = 0.0) -> bool:
    return bool((got - expected).norm() <= _TOLERANCE * max(float(expected.norm()), least))
