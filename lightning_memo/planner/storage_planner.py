"""Makes a storage plan in whole tokens: solves a linear program, rounds its shares and checks the result."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.artifacts.costs import (
    ATTENTION,
    INPUT,
    MOVED,
    OTHER,
    PLACES,
    Budget,
    CallCosts,
    Place,
    StorageCosts,
)
from lightning_memo.artifacts.prices import Price, Resource
from lightning_memo.artifacts.swap_plan import CallPlan, StoragePlan, StoredRange
from lightning_memo.planner.linear_program import LinearProgram, Terms, add, scale
from lightning_memo.planner.simulate_step import simulate
from lightning_memo.planner.step_time import step_time
from lightning_memo.utils.units import format_bytes

Shares = Mapping[tuple[str, Place], float]
"""Share of the tokens for which a kind of tensor is stored in a place."""

# The time of recomputed attention grows with the square of its tokens. The program approximates it by tangents, and
# adds more at the solution until the error is at most this share of the step.
_TANGENTS: Final = 8
_MOST_TANGENTS: Final = 20
_CLOSE: Final = 1e-8
_SHORTEST_UNIT: Final = 1e-6
# Among equally fast plans: the fewest moved bytes, where the slower medium counts twice, then the fewest kept bytes.
_BURDEN: Final[dict[Place, float]] = {"device": 0.01, "host": 1.0, "disk": 2.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageSolution:
    """An optimum of the linear program."""

    shares: tuple[Shares, ...]
    """Shares of each class of layer calls."""

    required: tuple[str, ...]
    """Kinds of tensors that are stored for all tokens."""

    seconds: float
    """Expected seconds of a step."""

    prices: tuple[Price, ...]


def _places(budget: Budget) -> tuple[Place, ...]:
    """The places that there are."""
    return PLACES if budget.disk_bytes else PLACES[:2]


def required_kinds(may_drop_attention: bool) -> tuple[str, ...]:
    """Kinds of tensors that must be stored for all tokens."""
    return (INPUT,) if may_drop_attention else (INPUT, ATTENTION)


def solve_storage(
    costs: StorageCosts,
    budget: Budget,
    *,
    may_drop_attention: bool,
    whole_calls: bool = False,
    bounce_share: float = 0.0,
) -> StorageSolution | None:
    """Minimize the step time over the shares of the tokens for which each kind of tensor is stored, with HiGHS.

    As in MEMO, section 4.2, the offload of a layer call overlaps the forward of the next call, and its prefetch the
    next call's backward with its recomputation. Each such pair takes as long as the longer of the two, which is
    exact for a schedule with two rounding buffers. The last two calls copy nothing, unless several micro-batches are
    in flight. If all layers are equal, the objective is MEMO's time of a step, in which a call's copy overlaps its own
    computation. Calls of one class have the same shares.

    Args:
        costs: Bytes and seconds of each class of layer calls.
        budget: Capacities.
        may_drop_attention: Whether attention outputs may be recomputed.
        whole_calls: Whether shares are those of the layer calls of a class, each of which treats all tokens alike. The
            copies of such calls would be uneven, so only layer inputs and attention outputs leave the device.
        bounce_share: Host bytes of the bounce buffers per byte of the largest amount that a layer call spills.

    Returns:
        The optimum; among several, one that moves the fewest bytes. None if the budget cannot hold the required kinds.

    Raises:
        RuntimeError: HiGHS failed.
    """
    return _Model(costs, budget, required_kinds(may_drop_attention), whole_calls, bounce_share).solve()


class _Class:
    """Columns of one class of layer calls, and expressions of them."""

    def __init__(
        self, program: LinearProgram, costs: StorageCosts, number: int, places: Sequence[Place], movable: Sequence[str]
    ) -> None:
        self.costs = costs.classes[number]
        self.calls, self.copies = costs.class_calls[number], costs.class_copies[number]
        self._stored = {
            (kind, place): program.column(0.0, float(place == "device" or (place in places and kind in movable)))
            for kind in self.costs.kinds
            for place in PLACES
        }
        self.again = program.column(0.0, 1.0)  # share of the attention forward that is recomputed

    def stored(self, kind: str, weight: float = 1.0) -> Terms:
        """`weight` times the share of the tokens for which a kind is stored."""
        return {self._stored[kind, place]: weight for place in PLACES}

    def bytes(self, *places: Place) -> Terms:
        """Bytes that a layer call stores in some places."""
        return {
            self._stored[kind, place]: float(size)
            for place in places
            for kind, size in zip(self.costs.kinds, self.costs.sizes, strict=True)
        }

    def recompute(self) -> tuple[float, Terms]:
        """Seconds to recompute tensors in the backward, as a constant and an expression."""
        everything = self.costs.recompute_seconds
        saved = [self.stored(product.name, -product.seconds) for product in self.costs.products]
        again = {self.again: self.costs.attention_seconds}
        return everything, add([*saved, self.stored(OTHER, -everything), again])

    def shares(self, program: LinearProgram) -> Shares:
        return {key: min(max(program.values[column], 0.0), 1.0) for key, column in self._stored.items()}


class _Model:
    """The program of a step in seconds and bytes. Columns of time are scaled by the time of about one layer call."""

    def __init__(
        self, costs: StorageCosts, budget: Budget, required: tuple[str, ...], whole_calls: bool, bounce_share: float
    ) -> None:
        self._costs, self._budget, self._required, self._bounce_share = costs, budget, required, bounce_share
        self._whole_calls = whole_calls
        self._program = LinearProgram()
        self._unit = max(
            _SHORTEST_UNIT,
            *(call.forward_seconds + call.backward_seconds + call.recompute_seconds for call in costs.classes),
        )

        self._classes = [
            _Class(self._program, costs, n, _places(budget), (INPUT, ATTENTION) if whole_calls else call.kinds)
            for n, call in enumerate(costs.classes)
        ]
        self._capacities: dict[Resource, int] = {}
        self._copies: dict[Resource, list[tuple[int, Terms]]] = {}
        for part in self._classes:
            self._add_places(part)
        self._add_capacities()
        self._constant = costs.outside_seconds
        self._step = add(self._add_compute(self._classes[number]) for number in costs.unpaired(costs.call_classes))
        for (copied, computed), count in Counter(costs.pairs(costs.call_classes)).items():
            times = self._add_pair(self._classes[copied], self._classes[computed])
            self._step = add([self._step, scale(times, count)])

    def solve(self) -> StorageSolution | None:
        self._program.minimize(scale(self._step, 1 / self._unit))
        if not self._solve_with_tangents():
            return None
        seconds, prices = self._seconds(), tuple(self._prices())
        self._program.row(self._step, most=seconds - self._constant + self._negligible())
        self._program.minimize(self._burden())
        # Choosing among the optima can fail if coefficients differ by many orders of magnitude. The first one, which is
        # as fast, is kept then.
        with contextlib.suppress(RuntimeError):
            self._program.solve()
        shares = tuple(part.shares(self._program) for part in self._classes)
        return StorageSolution(shares=shares, required=self._required, seconds=seconds, prices=prices)

    def _add_places(self, part: _Class) -> None:
        for kind in (INPUT, ATTENTION):
            self._program.row(part.stored(kind), least=1.0 if kind in self._required else 0.0, most=1.0)
        self._program.row(add([part.stored(OTHER), part.stored(ATTENTION, -1.0)]), most=0.0)
        for product in part.costs.products:
            self._program.row(add([part.stored(OTHER), part.stored(product.name)]), most=1.0)
        for number in range(1, _TANGENTS + 1):
            self._add_tangent(part, number / _TANGENTS)

    def _add_tangent(self, part: _Class, dropped: float) -> None:
        """`again >= share + slope * (1 - stored - dropped)`: the recomputed share is convex in the dropped share."""
        tokens = self._costs.tokens
        share = part.costs.attention_share(dropped * tokens, tokens)
        slope = part.costs.attention_slope(dropped * tokens, tokens) * tokens
        self._program.row(add([{part.again: 1.0}, part.stored(ATTENTION, slope)]), least=share + slope * (1 - dropped))

    def _add_compute(self, part: _Class) -> Terms:
        """Forward, backward and recomputation of a layer call; the constant part is added to that of the step."""
        everything, recompute = part.recompute()
        self._constant += part.costs.forward_seconds + part.costs.backward_seconds + everything
        return recompute

    def _add_pair(self, copied: _Class, computed: _Class) -> Terms:
        """Seconds of forward and backward in which one call computes while another call's bytes are copied."""
        costs = self._costs
        forward, backward = (
            {self._program.column(seconds / self._unit): self._unit}
            for seconds in (computed.costs.forward_seconds, computed.costs.backward_seconds)
        )
        everything, recompute = computed.recompute()
        compute = computed.costs.backward_seconds + everything
        self._program.row(add([recompute, scale(backward, -1.0)]), most=-compute)
        moved, spilled = copied.bytes(*MOVED), copied.bytes("disk")
        self._add_copy("offload bandwidth", moved, costs.offload_bytes_per_second, forward)
        self._add_copy("prefetch bandwidth", moved, costs.prefetch_bytes_per_second, backward)
        if self._budget.disk_bytes:
            self._add_copy("disk write bandwidth", spilled, costs.disk_write_bytes_per_second, forward)
            self._add_copy("disk read bandwidth", spilled, costs.disk_read_bytes_per_second, backward)
        return forward | backward

    def _add_copy(self, resource: Resource, copied: Terms, rate: float, time: Terms) -> None:
        seconds = scale(copied, 1 / rate)
        row = self._program.row(add([seconds, scale(time, -1.0)]), most=0.0)
        self._copies.setdefault(resource, []).append((row, seconds))

    def _add_capacities(self) -> None:
        costs, budget, program = self._costs, self._budget, self._program
        # The column is the size of a rounding buffer.
        slot = {program.column(0.0): float(max(sum(part.costs.sizes) for part in self._classes) or 1)}
        for part in self._classes:
            program.row(add([part.bytes(*MOVED), scale(slot, -1.0)]), most=0.0)
        kept = add(scale(part.bytes("device"), part.calls) for part in self._classes)
        transient = self._add_recomputed()
        least = costs.transient_device_bytes - costs.recomputed_device_bytes
        room = budget.device_bytes - costs.fixed_device_bytes - least
        self._add_capacity("device memory", add([kept, scale(slot, 2.0), transient]), room)
        on_host = add(scale(part.bytes("host"), part.copies) for part in self._classes)
        if budget.disk_bytes:
            spilled = add(scale(part.bytes("disk"), part.copies) for part in self._classes)
            self._add_capacity("disk space", spilled, budget.disk_bytes)
            on_host = add([on_host, self._add_bounce_buffers()])
        self._add_capacity("host memory", on_host, budget.host_bytes)

    def _add_recomputed(self) -> Terms:
        """Bytes by which the tensors that a layer recomputes raise the peak of a step."""
        if not self._costs.recomputed_device_bytes:
            return {}
        if self._whole_calls:
            return {self._program.column(1.0, 1.0): float(self._costs.recomputed_device_bytes)}
        largest = max(part.costs.other_bytes for part in self._classes)
        most = {self._program.column(0.0): float(largest or 1)}
        for part in self._classes:
            size = float(part.costs.other_bytes)
            below = largest - self._costs.recomputed_device_bytes - size
            self._program.row(add([part.stored(OTHER, -size), scale(most, -1.0)]), most=below)
        return most

    def _add_bounce_buffers(self) -> Terms:
        """Host bytes of the bounce buffers: a share of the largest amount that a layer call spills."""
        most = {self._program.column(0.0): float(max(sum(part.costs.sizes) for part in self._classes) or 1)}
        for part in self._classes:
            if part.copies:
                self._program.row(add([part.bytes("disk"), scale(most, -1.0)]), most=0.0)
        return scale(most, self._bounce_share)

    def _add_capacity(self, resource: Resource, held: Terms, limit: float) -> None:
        # A limit above twice the largest possible amount changes nothing, and far larger numbers hurt the solver.
        self._capacities[resource] = self._program.row(held, most=min(limit, 2 * sum(held.values())))

    def _seconds(self) -> float:
        return self._constant + self._program.value(self._step)

    def _negligible(self) -> float:
        return _CLOSE * (self._seconds() + self._unit)

    def _burden(self) -> Terms:
        largest = max(max(part.costs.sizes) for part in self._classes) or 1
        parts = [scale(part.bytes(place), _BURDEN[place] / largest) for part in self._classes for place in PLACES]
        return add(parts)

    def _solve_with_tangents(self) -> bool:
        for _ in range(_MOST_TANGENTS):
            if not self._program.solve():
                return False
            far = [(part, dropped) for part in self._classes if (dropped := self._dropped_too_cheaply(part))]
            for part, dropped in far:
                self._add_tangent(part, dropped)
            if not far:
                break
        return True

    def _dropped_too_cheaply(self, part: _Class) -> float:
        """Share of the tokens whose attention is dropped, if the tangents underestimate its time; else 0."""
        tokens = self._costs.tokens
        dropped = 1.0 - self._program.value(part.stored(ATTENTION))
        missing = part.costs.attention_share(dropped * tokens, tokens) - self._program.values[part.again]
        return dropped if missing * part.costs.attention_seconds * part.calls > self._negligible() else 0.0

    def _prices(self) -> Iterator[Price]:
        """The dual variables: seconds that a marginal amount of each resource saves."""
        costs = self._costs
        limits: dict[Resource, float] = {
            "device memory": self._budget.device_bytes,
            "host memory": self._budget.host_bytes,
            "offload bandwidth": costs.offload_bytes_per_second,
            "prefetch bandwidth": costs.prefetch_bytes_per_second,
        }
        if self._budget.disk_bytes:
            limits["disk space"] = self._budget.disk_bytes
            limits["disk write bandwidth"] = costs.disk_write_bytes_per_second
            limits["disk read bandwidth"] = costs.disk_read_bytes_per_second
        for resource, limit in limits.items():
            gain = self._capacity_price(resource) if resource in self._capacities else self._rate_price(resource, limit)
            yield Price(resource=resource, limit=limit, seconds=max(gain * self._unit, 0.0))

    def _capacity_price(self, resource: Resource) -> float:
        return -self._program.dual(self._capacities[resource])

    def _rate_price(self, resource: Resource, rate: float) -> float:
        # One more unit of bandwidth shortens a copy by 1 / rate of its time, which equals relaxing its row by as much.
        rows = self._copies.get(resource, [])  # with two layer calls, nothing is copied
        return sum(-self._program.dual(row) * self._program.value(seconds) for row, seconds in rows) / rate


_FEWEST_TILES: Final = 16

# A tile is stored if at most this part of it is missing: rounding up, to the nearest, and down. Rounding down tolerates
# a small part because the solver reaches whole tiles only within its tolerance.
_MISSING: Final = (0.999, 0.5, 0.001)
_NOTHING: Final = 1e-7
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


class StorageError(ValueError):
    """The budget cannot hold the tensors that have to be stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageNeeds:
    """Time of a step and the memory that it needs, without alignment."""

    step_seconds: float
    device_bytes: int
    rounding_bytes: int
    """Part of `device_bytes` for the two rounding buffers."""

    host_bytes: int
    disk_bytes: int

    def fits(self, budget: Budget) -> bool:
        """Whether no memory needs more than its budget."""
        on_host = self.host_bytes <= budget.host_bytes and self.disk_bytes <= budget.disk_bytes
        return on_host and self.device_bytes <= budget.device_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedSolution:
    """A plan in whole tokens, made from an optimum of the linear program."""

    storage: StoragePlan
    needs: StorageNeeds
    bound_seconds: float
    """Lower bound of the step time, reached with arbitrary fractions of the tokens."""

    prices: tuple[Price, ...]


def plan_storage(
    costs: StorageCosts,
    budget: Budget,
    *,
    tile_tokens: int = 128,
    may_drop_attention: bool = True,
    tolerance: float = 1e-3,
    bounce_share: float = 0.0,
) -> RoundedSolution:
    """Decide where the tensors of every layer call are stored so that the step time is minimal.

    Args:
        costs: Bytes and seconds of each class of layer calls.
        budget: Capacities, which the plan respects to the byte.
        tile_tokens: Ranges begin at multiples of this many tokens if such a plan fits.
        may_drop_attention: Whether attention outputs may be recomputed.
        tolerance: Share of the step time by which a simpler plan may be slower, that is, one that recomputes no
            attention output or that cuts layers into fewer and longer slices.
        bounce_share: See `solve_storage`.

    Raises:
        StorageError: The budget cannot hold the layer inputs, and the attention outputs if they may not be recomputed.
        RuntimeError: HiGHS failed.
    """
    return _Rounding(costs, budget, tile_tokens, may_drop_attention, bounce_share).best(tolerance)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Searches a plan in whole tokens that is nearly as fast as the optimum of the linear program."""

    costs: StorageCosts
    budget: Budget
    tile_tokens: int
    may_drop_attention: bool
    bounce_share: float

    def best(self, tolerance: float) -> RoundedSolution:
        ideal = self._solve(self.budget, self.may_drop_attention)
        if ideal is None:
            raise StorageError(_shortage(self.costs, self.budget, self.may_drop_attention))
        longest = (1 + tolerance) * ideal.seconds
        simple = self._solve(self.budget, False) if self.may_drop_attention else ideal
        if simple is None or simple.seconds > longest:
            simple = ideal
        storage, needs = self._in_long_slices(simple, longest) or self._in_little_room(ideal)
        whole = self._in_whole_calls() if needs.step_seconds > longest else None
        if whole is not None and whole[1].step_seconds < needs.step_seconds:
            storage, needs = whole
        simulate(self.costs, storage, self.budget, self.bounce_share)
        return RoundedSolution(storage=storage, needs=needs, bound_seconds=ideal.seconds, prices=simple.prices)

    def _solve(self, budget: Budget, may_drop_attention: bool, whole_calls: bool = False) -> StorageSolution | None:
        return solve_storage(
            self.costs,
            budget,
            may_drop_attention=may_drop_attention,
            whole_calls=whole_calls,
            bounce_share=self.bounce_share,
        )

    def _in_whole_calls(self) -> _Found | None:
        """The fastest plan that fits of those that treat all tokens of a layer call alike: no layer runs in slices."""
        solution = self._solve(self.budget, False, whole_calls=True)
        if solution is None:
            return None
        costs = self.costs
        lengths = [calls * costs.tokens for calls in costs.class_calls]
        ways = roundings(costs.classes, solution, lengths, costs.tokens, costs.tokens)
        return self._fastest(_of_whole_calls(costs, way) for way in ways)

    def _in_long_slices(self, solution: StorageSolution, longest: float) -> _Found | None:
        """Round to the largest tiles with which the step is fast enough, else to the given tiles, if that fits.

        Where layer inputs and attention outputs need small tiles to fit, the other kinds may do with large ones.
        """
        found: list[_Found] = []
        for tile in _tiles(self.costs.tokens, self.tile_tokens):
            for required_tile in dict.fromkeys((tile, self.tile_tokens)):
                rounded = self._round(solution, required_tile, tile)
                if rounded is not None and rounded[1].step_seconds <= longest:
                    return rounded
                found += [rounded] if rounded else []
        return min(found, key=lambda way: way[1].step_seconds, default=None)

    def _in_little_room(self, ideal: StorageSolution) -> _Found:
        """If no rounding of the optimum fits, solve again with a budget that leaves room for rounding up."""
        costs, budget = self.costs, self.budget
        for tile in (self.tile_tokens, 1):
            roomy = self._solve(_less(budget, costs, ideal, tile), self.may_drop_attention)
            for solution in (ideal, roomy):
                found = self._round(solution, tile, tile) if solution else None
                if found is not None:
                    return found
        for place in _places(budget):
            # The solver violates capacities by up to 1e-9 of their largest coefficient; these plans are exact.
            least = self._storage((_all_in(place, ideal.required, costs.tokens),) * len(costs.classes))
            if (needs := needs_of(costs, least, self.bounce_share)).fits(budget):
                return least, needs
        raise StorageError(_shortage(costs, budget, self.may_drop_attention))

    def _round(self, solution: StorageSolution, tile: int, product_tile: int) -> _Found | None:
        """The fastest rounded plan that fits."""
        lengths = [self.costs.tokens] * len(self.costs.classes)
        return self._fastest(map(self._storage, roundings(self.costs.classes, solution, lengths, tile, product_tile)))

    def _fastest(self, plans: Iterable[StoragePlan]) -> _Found | None:
        ways = ((storage, needs_of(self.costs, storage, self.bounce_share)) for storage in plans)
        fitting = (way for way in ways if way[1].fits(self.budget))
        return min(fitting, key=lambda way: way[1].step_seconds, default=None)

    def _storage(self, calls: tuple[CallPlan, ...]) -> StoragePlan:
        return StoragePlan(tokens=self.costs.tokens, call_classes=self.costs.call_classes, calls=calls)


_Found = tuple[StoragePlan, StorageNeeds]


def _tiles(tokens: int, tile_tokens: int) -> Iterator[int]:
    doublings = max((tokens // (_FEWEST_TILES * tile_tokens)).bit_length() - 1, 0)
    return (tile_tokens << power for power in range(doublings, -1, -1))


def _all_in(place: Place, kinds: Sequence[str], tokens: int) -> CallPlan:
    """Store all tokens of some kinds in one place, and nothing else."""
    return CallPlan(ranges=tuple(StoredRange(kind=kind, place=place, start=0, stop=tokens) for kind in kinds))


def _less(budget: Budget, costs: StorageCosts, solution: StorageSolution, tile: int) -> Budget:
    """The budget without the bytes that rounding can add: a tile for each place of a required kind, and a byte each."""
    added = [
        sum(-(-size * tile * len(PLACES) // costs.tokens) for size in call.sizes[: len(solution.required)])
        + len(PLACES) * len(call.kinds)
        for call in costs.classes
    ]
    on_device = total(costs.class_calls, added) + 2 * max(added)
    copied = total(costs.class_copies, added)
    return Budget(
        device_bytes=max(budget.device_bytes - on_device, 0),
        host_bytes=max(budget.host_bytes - copied, 0),
        disk_bytes=max(budget.disk_bytes - copied, 0),
    )


def _shortage(costs: StorageCosts, budget: Budget, may_drop_attention: bool) -> str:
    """Describe in one line what has to be stored, and the memory available for it."""
    kinds = required_kinds(may_drop_attention)
    sizes = [sum(call.sizes[: len(kinds)]) for call in costs.classes]
    least, buffers = total(costs.class_calls, sizes), 2 * max(sizes)
    room = budget.device_bytes - costs.fixed_device_bytes - costs.transient_device_bytes
    what = "layer inputs" if may_drop_attention else "layer inputs and attention outputs"
    device = f"has {format_bytes(room)} left" if room >= 0 else f"lacks {format_bytes(-room)} even without them"
    disk = f", the disk {format_bytes(budget.disk_bytes)}" if budget.disk_bytes else ""
    way_out = "raise device_memory or host_memory" if room >= 0 else "raise device_memory"
    return (
        f"the {what} of {costs.calls} layer calls need {format_bytes(least)}, and if they are offloaded, another "
        f"{format_bytes(buffers)} of device buffers, but the device {device} and the host has "
        f"{format_bytes(budget.host_bytes)}{disk}: {way_out}, or shorten the sequence"
    )


def _of_whole_calls(costs: StorageCosts, classes: Sequence[CallPlan]) -> StoragePlan:
    """Return a plan whose layer calls are cut out of the calls of their classes, laid one after another.

    Args:
        costs: Costs of the layer calls.
        classes: Ranges of the tokens of all calls of each class.
    """
    tokens, plans = costs.tokens, [(0, CallPlan(ranges=()))] * costs.calls
    for number, plan in enumerate(classes):
        members = [call for call, of in enumerate(costs.call_classes) if of == number]
        # Neighbours in a line are far from each other in the step, so that copies are evenly spread.
        for place, call in enumerate(sorted(members, key=lambda call: call * _GOLDEN % 1)):
            first = place * tokens
            inside = [r for r in plan.ranges if r.start <= first < r.stop]
            plans[call] = number, CallPlan(ranges=tuple(replace(r, start=0, stop=tokens) for r in inside))
    order = list(dict.fromkeys(plans))
    calls = tuple(plan for _, plan in order)
    return StoragePlan(tokens=tokens, call_classes=tuple(map(order.index, plans)), calls=calls)


def roundings(
    calls: Sequence[CallCosts], solution: StorageSolution, lengths: Sequence[int], tile: int, product_tile: int
) -> Iterator[tuple[CallPlan, ...]]:
    """Round shares of the tokens to ranges that begin at multiples of a tile, in several ways.

    Args:
        calls: Classes of layer calls.
        solution: Shares of each class.
        lengths: Tokens that the shares of each class are of.
        tile: Tokens of a tile of layer inputs and attention outputs.
        product_tile: Tokens of a tile of all other kinds.

    Yields:
        Plans of all classes. The last ones store no more than the shares, except for kinds that must be stored.
    """
    for missing in _MISSING:
        for spare in (*PLACES, None):
            tilings = [
                _Tiling(shares, tokens, tile, product_tile, solution.required, missing, spare)
                for shares, tokens in zip(solution.shares, lengths, strict=True)
            ]
            yield tuple(tiling.plan(call) for call, tiling in zip(calls, tilings, strict=True))


@dataclass(frozen=True, slots=True)
class _Tiling:
    """One way to round: each share is rounded, and so is their sum over the places, which can be larger."""

    shares: Shares
    tokens: int
    tile: int
    product_tile: int
    required: Sequence[str]
    missing: float
    spare: Place | None  # gets the tokens by which the rounded sum is larger

    def plan(self, call: CallCosts) -> CallPlan:
        """Ranges of all kinds. Attention is dropped for the first tokens, so kinds that need it lie at the end."""
        given = {kind: self._lay(kind, self.tokens) for kind in (INPUT, ATTENTION)}
        whole = self._lay(OTHER, self.tokens, self._first(given[ATTENTION]))
        rest = [self._lay(product.name, self._first(whole)) for product in call.products]
        return CallPlan(ranges=tuple(r for ranges in (*given.values(), whole, *rest) for r in ranges))

    def _first(self, ranges: Sequence[StoredRange]) -> int:
        return min((r.start for r in ranges), default=self.tokens)

    def _lay(self, kind: str, stop: int, lowest: int = 0) -> list[StoredRange]:
        """Ranges of a kind that end at `stop`; none begins before `lowest`."""
        ranges = []
        for place, length in self._lengths(kind, stop, lowest).items():
            if length:
                ranges.append(StoredRange(kind=kind, place=place, start=stop - length, stop=stop))
                stop -= length
        return ranges[::-1]

    def _lengths(self, kind: str, stop: int, lowest: int) -> dict[Place, int]:
        shares = {place: share for place in reversed(PLACES) if (share := self.shares[kind, place]) > _NOTHING}
        if not shares:
            return {}
        first = 0 if kind in self.required else self._start(kind, stop, sum(shares.values()), lowest)
        lengths, start = {}, stop
        for place, share in shares.items():
            lengths[place] = start - max(self._start(kind, start, share, lowest), first)
            start -= lengths[place]
        taker = self.spare if self.spare in shares else max(shares, key=lambda place: shares[place])
        if taker == self.spare or kind in self.required:
            lengths[taker] += start - first
        return lengths

    def _start(self, kind: str, stop: int, share: float, lowest: int) -> int:
        tile = self.tile if kind in (INPUT, ATTENTION) else self.product_tile
        tiles = math.ceil((stop - share * self.tokens) / tile - self.missing)
        return min(max(tiles * tile, lowest), stop)


def needs_of(costs: StorageCosts, storage: StoragePlan, bounce_share: float = 0.0) -> StorageNeeds:
    """Time and memory of a step.

    Args:
        costs: Bytes and seconds of the layer calls.
        storage: A plan for these layer calls.
        bounce_share: See `solve_storage`.
    """
    costs, calls = costs.of_plan(storage.call_classes), storage.calls
    kept, swapped, spilled = (
        [plan.stored_bytes(call, costs.tokens, place) for call, plan in zip(costs.classes, calls, strict=True)]
        for place in PLACES
    )
    rounding = 2 * max(a + b for a, b in zip(swapped, spilled, strict=True))
    recomputed = storage.recomputed_bytes([costs.classes[number].other_bytes for number in costs.call_classes])
    leaving = (size for copies, size in zip(costs.class_copies, spilled, strict=True) if copies)
    bounce_bytes = math.ceil(bounce_share * max(leaving, default=0))
    return StorageNeeds(
        step_seconds=step_time(costs, storage).seconds,
        device_bytes=costs.fixed_device_bytes
        + costs.working_bytes_with(recomputed)
        + rounding
        + total(costs.class_calls, kept),
        rounding_bytes=rounding,
        host_bytes=total(costs.class_copies, swapped) + bounce_bytes,
        disk_bytes=total(costs.class_copies, spilled),
    )


def total(counts: Sequence[int], sizes: Sequence[int]) -> int:
    """Sum of the sizes, each times its count."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
