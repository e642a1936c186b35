"""Time and memory of the programs in the papers' tables: MEMO's, Megatron-LM, DeepSpeed-Ulysses and FPDT.

Hardware, weights, collectives and the planner are those of `lightning_memo.estimate`. What the programs do differently
is here: fused kernels, 2 + 2 + 12 bytes per weight, full logits, interleaved pipelines and memory without a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from typing import Final, Literal

from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import PlanMemory
from lightning_memo.estimate import Cluster, Constants, ModelShape, Parallelism
from lightning_memo.estimate.device_bytes import (
    CHUNKED_LOGIT_BYTES,
    LOGIT_BYTES,
    ModelState,
    backward_bytes,
    device_parameters,
    layer_weights,
    model_state_bytes,
)
from lightning_memo.estimate.saved_tensors import BF16, FP32, ElementBytes
from lightning_memo.estimate.step_buffers import CHUNK_BYTES
from lightning_memo.estimate.step_times import BACKWARD_OF_ATTENTION, LayerTimes, ring_bandwidth
from lightning_memo.planner import HostMemoryError, Restrictions, make_plan
from lightning_memo.planner.token_slices import memory_of_slots

Method = Literal["memo", "full_swap", "full_recompute", "megatron", "plain", "deepspeed_ulysses", "fpdt"]
"""MEMO; MEMO that swaps or recomputes everything; Megatron-LM with and without recomputation; and two peers."""

PUBLISHED_ALPHAS: Final = ((1.0, 1.0), (0.5, 0.5), (0.25, 0.125))
"""Pairs of the least alpha of the linear program and the alpha of the paper's runs. Below the last pair, they had alpha
0. The pairs are read from table 7 of the appendix, not derived."""

DEEPSPEED_ATTENTION_TIME: Final = 2.0
"""Time of attention relative to Megatron-LM, from table 3 of MEMO. FlashAttention 1 takes twice the time of
FlashAttention 2 (FlashAttention-2, section 4), as does a kernel that computes masked pairs. The paper does not report
which kernel was used."""

FPDT_HIDDEN_STATES: Final = 8
"""Number of hidden-state tensors of all tokens that FPDT holds on a device: a layer's input, output, attention output
and residual, and their gradients."""

FPDT_CHUNK_TOKENS: Final = 65536
"""Tokens of the sequence in a chunk of FPDT (section 5.1 of its paper)."""

FPDT_CHUNK_HIDDEN_STATES: Final = 20
"""Number of hidden-state tensors of a chunk: queries, keys, values and output with their gradients (8), their copies
sent between devices (8), and those of the next chunk copied from the host (4)."""

ZERO_BUFFER_BYTES: Final = 4_000_000_000
"""DeepSpeed's default limits for ZeRO 3 in bf16: 1e9 gathered weights, and two reduction buckets of 5e8."""

SEQUENCE_PARALLEL_LOSS_BYTES: Final = 2 * FP32
"""Additional bytes per logit: Megatron-DeepSpeed's loss of a divided sequence does not work in place, but allocates the
softmax and its logarithm."""

_NO_LIMIT: Final = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronMemory:
    """How the allocator of MEMO's Megatron-LM behaves when memory is not planned."""

    reorganised_bytes_per_second: float
    """Rate at which it reorganizes fragmented skeletal activations."""

    cache_growth: float
    """Free memory below which it reorganizes, relative to the memory of the loss and a layer's backward."""


A800: Final = Constants(
    source="fitted to the MEMO paper's A800 runs by benchmarks/fit_papers.py: efficiencies and rates by least absolute "
    "errors to the MFU of tables 3 (7B, 13B), 4 and 5; memory fractions and fragmentation from the cells out of memory",
    dense_efficiency=0.745,
    attention_forward_efficiency=0.689,
    attention_backward_efficiency=0.596,
    memory_efficiency=0.9,
    host_efficiency=0.997,
    merged_bytes_per_second=41.5e9,
    device_share=0.9,
    host_share=0.4707,
    fragmentation=0.5,
)
MEGATRON_MEMORY: Final = MegatronMemory(reorganised_bytes_per_second=6e9, cache_growth=6.0)
"""Fitted in the same way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperEstimate:
    """Prediction for a run. If the status is not "ok", times are None, and sizes are what would be needed."""

    status: Literal["ok", "oom", "oohm"]
    parallel: Parallelism
    alpha: float | None
    step_seconds: float | None
    mfu: float | None
    hfu: float | None
    tokens_per_gpu_per_second: float | None
    device_bytes: dict[str, int]
    host_bytes: int
    """Host memory per node."""


def program_bytes(gradient: int = BF16) -> ElementBytes:
    """Return the sizes of programs that compute in bf16 with fp32 weights and moments (ZeRO, section 3).

    Args:
        gradient: Bytes per gradient. Megatron-LM has 4.
    """
    return ElementBytes(
        weight=BF16, gradient=gradient, optimizer=3 * FP32, product=BF16, stream=BF16, reduced=gradient,
        whole_copies=False,
    )  # fmt: skip


def published_alpha(limit: float, all_hidden: bool) -> float:
    """Return the alpha that a run of MEMO's paper would have had.

    The runs swapped more than layer inputs and attention outputs only if copies of all tokens could be hidden.

    Args:
        limit: Alpha of the linear program.
        all_hidden: Whether the forward, without waiting for the network, is longer than the copies of all tokens.
    """
    return next((alpha for least, alpha in PUBLISHED_ALPHAS if all_hidden and limit >= least), 0.0)


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """A training run of a paper's program, without the parallelism. Models are dense, and all weights are trained."""

    shape: ModelShape
    cluster: Cluster
    constants: Constants
    method: Method
    gpus: int
    seq_len: int
    batch_size: int
    alpha: float | None = None
    """Fraction of the tokens whose activations are swapped, or None for the rule of the paper's runs."""

    allocator: MegatronMemory = MEGATRON_MEMORY

    @property
    def ulysses(self) -> bool:
        """Whether context parallelism exchanges heads, and is the only parallelism beside data parallelism."""
        return self.method in ("deepspeed_ulysses", "fpdt")

    @property
    def swaps(self) -> bool:
        return self.method in ("memo", "full_swap")

    @property
    def recomputes_all(self) -> bool:
        return not self.swaps and self.method != "plain"

    @property
    def planned(self) -> bool:
        """Whether buffers have planned addresses, which avoids fragmentation and reorganization."""
        return self.swaps or self.method == "full_recompute"

    @property
    def sizes(self) -> ElementBytes:
        return program_bytes(BF16 if self.ulysses else FP32)

    @property
    def devices_per_host(self) -> int:
        return min(self.gpus, self.cluster.devices_per_node)

    def parallelisms(self, zero_stage: int | None = None) -> Iterator[Parallelism]:
        """All parallelisms without pipelines that the program can run with.

        Args:
            zero_stage: The ZeRO stage, or None for all that the program supports.
        """
        for tp in _divisors(1 if self.ulysses else self.gpus):
            for cp in _divisors(self.gpus // tp):
                dp = self.gpus // tp // cp
                highest = (3 if self.ulysses else 1) if dp * cp > 1 else 0  # Megatron-LM has a distributed optimizer
                for stage in range(highest + 1) if zero_stage is None else (zero_stage,):
                    parallel = Parallelism(tp=tp, cp=cp, dp=dp, zero_stage=stage)
                    # The DeepSpeed version of FPDT divides heads unevenly.
                    uneven = self.method == "deepspeed_ulysses" and self.shape.heads % cp
                    too_many = self.ulysses and cp > self.shape.heads
                    obstacles = parallel.obstacles(self.shape, self.seq_len, self.batch_size)
                    if not (uneven or too_many or obstacles):
                        yield parallel

    def estimate(self, parallel: Parallelism) -> PaperEstimate:
        """Estimate the time and memory of a training step."""
        return _Step(self, parallel).estimate()

    def solved_alpha(self, parallel: Parallelism) -> float:
        """Return the alpha of MEMO's linear program, without the rule of its paper's runs."""
        step = _Step(self, parallel)
        return program_alpha(step.costs, step.room)


def program_alpha(costs: LayerCosts, room: Budget) -> float:
    """Solve the linear program of MEMO, section 4.2: the largest alpha whose copies hide and which fits the host.

    For each swapped layer, `(S_input + S_attn + alpha * S_others) / B <= T_layer`; over all swapped layers,
    `sum(S_input + S_attn + alpha * S_others) <= M_host`. With alpha as the only variable, the optimum is the smallest
    of the upper bounds. It is 0 if not even its copies hide.

    Raises:
        HostMemoryError: The host cannot hold the layer inputs and attention outputs.
    """
    swapped = range(costs.swapped_calls)
    least = [costs.swapped_bytes(call, 0.0) for call in swapped]
    if sum(least) > room.host_bytes:
        raise HostMemoryError(0.0, PlanMemory(host=sum(least)), room)
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    spare = [costs.forward_seconds[call] * bandwidth - least[call] for call in swapped]
    others = sum(costs.other_bytes[call] for call in swapped)
    hidden = (free / costs.other_bytes[call] for call, free in zip(swapped, spare, strict=True))
    return max(min(1.0, *hidden, (room.host_bytes - sum(least)) / others), 0.0)


def fastest(answers: list[PaperEstimate]) -> list[PaperEstimate]:
    """Sort estimates from best to worst, each division of the work with its best ZeRO stage.

    Those that fit are sorted by time, those that do not fit by the memory that they need.
    """
    divided: dict[tuple[int, ...], list[PaperEstimate]] = {}
    for answer in answers:
        parallel = answer.parallel
        divided.setdefault((parallel.tp, parallel.cp, parallel.dp, parallel.pp), []).append(answer)
    return sorted(map(_best_stage, divided.values()), key=_rank)


def _best_stage(stages: list[PaperEstimate]) -> PaperEstimate:
    seconds = [stage.step_seconds for stage in stages if stage.step_seconds is not None]
    if not seconds:
        return min(stages, key=_rank)
    fast = [stage for stage in stages if stage.step_seconds and stage.step_seconds <= 1.001 * min(seconds)]
    return min(fast, key=lambda stage: stage.device_bytes["total"])


def _rank(answer: PaperEstimate) -> tuple[float, ...]:
    device = answer.device_bytes["total"]
    if answer.step_seconds is not None:
        return 0, answer.step_seconds
    return (1, device) if answer.status == "oom" else (2, answer.host_bytes, device)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layers:
    """Prediction for the layers of one sequence on the fullest device, without the model state."""

    seconds: float
    """Time of forward and backward of all layers of a pipeline stage, and of the head."""

    recomputed_flops: float
    """FLOPs of the recomputation of one sequence, on all devices."""

    device_bytes: dict[str, int]
    host_bytes: int
    alpha: float | None = None
    host_full: bool = False


@dataclass(frozen=True)
class _Step:
    """A step of a run with a parallelism."""

    run: PaperRun
    parallel: Parallelism

    def estimate(self) -> PaperEstimate:
        run, parallel = self.run, self.parallel
        layers = self.swapping() if run.swaps else self.fpdt() if run.method == "fpdt" else self.resident()
        state = dict(zip(("parameters", "gradients", "optimizer"), map(round, astuple(self.state)), strict=True))
        device_bytes = {**state, **layers.device_bytes}
        device_bytes["total"] = sum(device_bytes.values())
        status: Literal["ok", "oom", "oohm"] = "oohm" if layers.host_full else "ok"
        if status == "ok" and device_bytes["total"] > self.room.device_bytes:
            status = "oom"
        seconds = self.step_seconds(layers) if status == "ok" else None
        peak = run.cluster.peak_flops * run.gpus
        model_flops = run.batch_size * run.shape.model_flops(run.seq_len)
        hardware_flops = model_flops + run.batch_size * layers.recomputed_flops
        return PaperEstimate(
            status=status,
            parallel=parallel,
            alpha=layers.alpha,
            step_seconds=seconds,
            mfu=None if seconds is None else 100 * model_flops / seconds / peak,
            hfu=None if seconds is None else 100 * hardware_flops / seconds / peak,
            tokens_per_gpu_per_second=None if seconds is None else run.seq_len * run.batch_size / seconds / run.gpus,
            device_bytes=device_bytes,
            host_bytes=layers.host_bytes * run.devices_per_host * self.sequences_in_flight,
        )

    # ---- memory

    @cached_property
    def state(self) -> ModelState:
        weights = device_parameters(self.run.shape, self.parallel).total
        ranks = self.parallel.dp * self.parallel.cp
        return model_state_bytes(weights, ranks, self.parallel.zero_stage, self.run.sizes)

    @cached_property
    def gathered(self) -> float:
        """Bytes that ZeRO 3 gathers: weights of two layers and gradients of one, or those of the head."""
        shape, sizes, parallel = self.run.shape, self.run.sizes, self.parallel
        if parallel.zero_stage < 3:
            return 0.0
        layer = layer_weights(shape, parallel).total if parallel.dp * parallel.cp > 1 else 0.0
        head = shape.vocab * shape.hidden / parallel.tp
        return max((2 * sizes.product + sizes.gradient) * layer, (sizes.product + sizes.gradient) * head)

    @cached_property
    def logits(self) -> float:
        """Bytes of logits and their gradients: of all tokens, or in FPDT of a chunk."""
        logits = self.run.seq_len / self.parallel.cp * (self.run.shape.vocab / self.parallel.tp)
        if self.run.method != "fpdt":
            return LOGIT_BYTES * logits
        return CHUNKED_LOGIT_BYTES * min(logits, CHUNK_BYTES / FP32)

    @cached_property
    def sequences_in_flight(self) -> int:
        return min(self.parallel.pp, self.run.batch_size // self.parallel.dp)

    @cached_property
    def room(self) -> Budget:
        """Memory of a device, and its part of the host memory for one sequence."""
        cluster, constants = self.run.cluster, self.run.constants
        host = cluster.host_bytes * constants.host_share / self.run.devices_per_host / self.sequences_in_flight
        return Budget(device_bytes=int(cluster.device_bytes * constants.device_share), host_bytes=int(host))

    # ---- times

    @cached_property
    def times(self) -> LayerTimes:
        """Times of a layer call. Kernels are fused, so that no operation but products and attention takes time."""
        run, parallel, shape, constants = self.run, self.parallel, self.run.shape, self.run.constants
        tokens, divided, cluster = run.seq_len, parallel.tp * parallel.cp, run.cluster
        rate = cluster.peak_flops * constants.dense_efficiency * divided
        attention = shape.attention_flops(tokens) / divided / cluster.peak_flops
        if run.method == "deepspeed_ulysses":
            attention *= DEEPSPEED_ATTENTION_TIME
        attention_forward = attention / constants.attention_forward_efficiency
        hidden_bytes = tokens / parallel.cp * shape.hidden * BF16
        collective = hidden_bytes * (parallel.tp - 1) / parallel.tp / ring_bandwidth(cluster, parallel.tp)
        exchanging, merging = self.context_seconds(attention_forward)
        dense = 2 * tokens * shape.multiplied_in_a_layer / rate
        return LayerTimes(
            dense=dense,
            dense_backward=2 * tokens * (2 * shape.multiplied_in_a_layer) / rate,
            later=0.0,
            recomputed_dense=2 * tokens * shape.recomputed_in_a_layer / rate,
            memory_bound=0.0,
            memory_bound_backward=0.0,
            recomputed_memory_bound=0.0,
            attention_forward=attention_forward,
            attention_backward=BACKWARD_OF_ATTENTION * attention / constants.attention_backward_efficiency,
            collective=collective,
            context=exchanging + merging,
            exchange=0.0,
            network=(4 * collective if parallel.tp > cluster.devices_per_node else 0.0)
            + (exchanging if divided > cluster.devices_per_node else 0.0),
        )

    def context_seconds(self, attention_seconds: float) -> tuple[float, float]:
        """Exposed communication of context parallelism, and the time to merge partial outputs.

        A ring sends keys and values while attention runs, and merges an output at each step. Ulysses exchanges queries,
        keys, values and outputs, which no computation hides.
        """
        parallel, widths = self.parallel, self.run.shape.attention
        bandwidth = ring_bandwidth(self.run.cluster, parallel.cp, parallel.tp)
        tokens = self.run.seq_len / (parallel.tp * parallel.cp)
        keys_and_values, output = tokens * (widths.key + widths.value) * BF16, tokens * widths.output * BF16
        if self.run.ulysses:
            sent = keys_and_values + tokens * widths.query * BF16 + output
            return sent * (parallel.cp - 1) / parallel.cp / bandwidth, 0.0
        steps = parallel.cp - 1
        exposed = max(steps * keys_and_values / bandwidth - attention_seconds, 0.0)
        return exposed, steps * output / self.run.constants.merged_bytes_per_second

    @cached_property
    def head_seconds(self) -> float:
        run, shape = self.run, self.run.shape
        flops = 2 * 3 * run.seq_len * shape.vocab * shape.hidden / (self.parallel.tp * self.parallel.cp)
        return flops / (run.cluster.peak_flops * run.constants.dense_efficiency)

    def step_seconds(self, layers: _Layers) -> float:
        """Time of a step. Stages interleave: each waits for one layer of the others."""
        parallel, sequences = self.parallel, self.run.batch_size // self.parallel.dp
        stage = layers.seconds - self.head_seconds
        idle = (parallel.pp - 1) * stage / (self.run.shape.layers // parallel.pp)
        computing = sequences * layers.seconds
        return computing + idle + self.synchronizing(sequences, computing)

    def synchronizing(self, sequences: int, computing: float) -> float:
        """Exposed time of synchronizing weights and gradients.

        ZeRO 3 gathers weights for each forward and backward and reduces gradients after each backward. Computation
        hides this in FPDT, but not in DeepSpeed-Ulysses, as its times for short sequences show.
        """
        parallel, sizes, ranks = self.parallel, self.run.sizes, self.parallel.dp * self.parallel.cp
        weights = device_parameters(self.run.shape, parallel).total
        bandwidth = ring_bandwidth(self.run.cluster, ranks, parallel.tp)
        reduced, gathered = (
            weights * size * (ranks - 1) / ranks / bandwidth
            for size in (sizes.reduced, sizes.product if parallel.zero_stage else sizes.reduced)
        )
        if parallel.zero_stage < 3:
            return reduced + gathered
        moving = sequences * (reduced + gathered + gathered)
        return max(moving - computing, 0.0) if self.run.method == "fpdt" else moving

    # ---- layers

    @cached_property
    def costs(self) -> LayerCosts:
        """Costs of the layers of one pipeline stage for one sequence."""
        run, parallel, shape, times = self.run, self.parallel, self.run.shape, self.times
        tokens = run.seq_len // (parallel.tp * parallel.cp)
        bandwidth = run.cluster.host_bandwidth_of(run.devices_per_host) * run.constants.host_efficiency
        layer_input, attention = shape.hidden * BF16, shape.attention.output * BF16
        calls = shape.layers // parallel.pp
        hidden_states = run.seq_len * shape.hidden * BF16 / (parallel.tp * parallel.cp)
        return LayerCosts(
            batch=1,
            tokens=tokens,
            input_bytes=(tokens * layer_input,) * calls,
            attention_bytes=(tokens * attention,) * calls,
            other_bytes=(tokens * _other_bytes(shape),) * calls,
            forward_seconds=(times.forward,) * calls,
            backward_seconds=(times.backward,) * calls,
            recompute_seconds=(times.recompute,) * calls,
            outside_seconds=self.head_seconds,
            offload_bytes_per_second=bandwidth,
            prefetch_bytes_per_second=bandwidth,
            fixed_device_bytes=round(self.state.total + self.gathered),
            transient_device_bytes=round(self.logits + 2 * hidden_states),
            backward_device_bytes=backward_bytes(shape, run.sizes, run.seq_len, parallel),
        )

    def fpdt(self) -> _Layers:
        """FPDT keeps layer inputs and the keys and values of inactive chunks on the host."""
        hidden_states = self.costs.input_bytes[0]
        chunk = hidden_states * min(FPDT_CHUNK_TOKENS / self.run.seq_len, 1.0)
        buffers = ZERO_BUFFER_BYTES if self.parallel.zero_stage == 3 else 0
        device_bytes = {
            "activations": FPDT_HIDDEN_STATES * hidden_states,
            "transients": round(FPDT_CHUNK_HIDDEN_STATES * chunk) + buffers,
            "logits": round(self.logits),
            "gathered": round(self.gathered),
        }
        return self._without_copies(device_bytes, self.costs.calls * hidden_states)

    def resident(self) -> _Layers:
        """Programs that copy nothing to the host. The peak is in the first stage of a pipeline, or in the last."""
        costs, recomputes = self.costs, self.run.recomputes_all
        saved = costs.skeletal_bytes // costs.calls
        activations = (costs.input_bytes[0] if recomputes else saved) * costs.calls
        again = costs.attention_bytes[0] + costs.other_bytes[0] if recomputes else 0
        in_backward = costs.backward_device_bytes + again
        first_stage = activations * self.sequences_in_flight + in_backward
        at_loss = costs.transient_device_bytes
        if self.run.ulysses and self.parallel.cp > 1:
            tokens = self.run.seq_len // self.parallel.cp
            at_loss += SEQUENCE_PARALLEL_LOSS_BYTES * tokens * self.run.shape.vocab
        last_stage = activations + max(in_backward, at_loss)
        requested = max(first_stage, activations + in_backward + at_loss)
        logits = round(self.logits) if at_loss > in_backward else 0
        if first_stage > last_stage:
            activations, logits = first_stage - in_backward, 0
        alive = max(first_stage, last_stage)
        device_bytes = {
            "activations": activations,
            "transients": alive - activations - logits,
            "logits": logits,
            "gathered": round(self.gathered),
        }
        if not self.run.planned:
            device_bytes["fragmentation"] = round(self.run.constants.fragmentation * sum(device_bytes.values()))
        return self._without_copies(device_bytes, 0, self._reorganisation_seconds(alive, requested))

    def _reorganisation_seconds(self, alive: int, requested: int) -> float:
        """Time per sequence that the allocator of the paper's Megatron-LM spends on reorganizing memory.

        The time of other programs is not known; DeepSpeed's measured times show none.

        Args:
            alive: Peak of live bytes.
            requested: Bytes of the loss and of a layer's backward together, which cannot use the same cached segments.
        """
        allocator, free = self.run.allocator, self.room.device_bytes - self.costs.fixed_device_bytes
        if self.run.method != "megatron" or not alive < free < allocator.cache_growth * requested:
            return 0.0
        # As with a garbage collector, fuller memory is reorganized more often.
        often = 1 / (1 - alive / free)
        return often * self.costs.skeletal_bytes / allocator.reorganised_bytes_per_second

    def _without_copies(self, device_bytes: dict[str, int], host_bytes: int, reorganised: float = 0.0) -> _Layers:
        costs, shape, tokens = self.costs, self.run.shape, self.run.seq_len
        recomputes = self.run.recomputes_all
        again = costs.calls * self.times.forward if recomputes else 0.0
        seconds = costs.outside_seconds + sum(costs.forward_seconds) + sum(costs.backward_seconds) + again
        flops = shape.layers * (2.0 * tokens * shape.multiplied_in_a_layer + shape.attention_flops(tokens))
        return _Layers(
            seconds=seconds + reorganised,
            recomputed_flops=flops if recomputes else 0.0,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            host_full=host_bytes > self.room.host_bytes,
        )

    def swapping(self) -> _Layers:
        """MEMO, whose authors lowered the linear program's alpha, not the device's share of it."""
        wanted = 1.0 if self.run.method == "full_swap" else self.run.alpha
        try:
            plan = self._plan(program_alpha(self.costs, self.room) if wanted is None else wanted)
        except HostMemoryError:
            return self._too_much_for_host(wanted or 0.0)
        if wanted is None:
            plan = self._plan(published_alpha(plan.swap.alpha, self._hides_all_copies()))
            if plan.device_bytes > self.room.device_bytes:
                below = [a for a in (*(a for _, a in PUBLISHED_ALPHAS), 0.0) if a < plan.swap.alpha]
                plans = map(self._plan, below)
                plan = next((less for less in plans if less.device_bytes <= self.room.device_bytes), plan)
        swap, costs = plan.swap, plan.costs
        working = plan.working_set_bytes - swap.memory.buffer_bytes - swap.memory.kept
        return _Layers(
            alpha=swap.alpha,
            seconds=plan.step_seconds,
            recomputed_flops=(1.0 - swap.alpha) * self.run.shape.recomputed_flops(self.run.seq_len),
            device_bytes=self._bytes_of_plan(
                swap.memory.buffer_bytes, swap.memory.kept, working, costs.transient_device_bytes
            ),
            host_bytes=swap.host_bytes,
        )

    def _plan(self, alpha: float) -> Plan:
        """The plan with an alpha (MEMO, section 4.2), whatever the device memory. The runs always swapped."""
        costs = self.costs
        return make_plan(
            costs,
            replace(self.room, device_bytes=_NO_LIMIT),
            Fingerprint(
                model=self.run.shape.name,
                batch=costs.batch,
                tokens=costs.tokens,
                precision="bf16-mixed",
                device=self.run.cluster.device,
                torch="",
                parallel=str(self.parallel),
            ),
            Restrictions(alpha=alpha),
            partial(
                memory_of_slots,
                slot_bytes=lambda fraction: costs.swapped_bytes(0, fraction),
                leaving=costs.swapped_calls,
            ),
        )

    def _hides_all_copies(self) -> bool:
        # Network adapters use the same links to the host: copies are not free while the device waits for the network.
        hiding = self.times.forward - self.times.network
        return self.costs.swapped_bytes(0, 1.0) <= hiding * self.costs.offload_bytes_per_second

    def _bytes_of_plan(self, buffers: int, kept: int, working: int, outside: int) -> dict[str, int]:
        """Device memory by category. Logits count only if the peak is outside the layers."""
        logits = round(self.logits) if working == outside else 0
        return {
            "rounding_buffers": buffers,
            "activations": kept,
            "transients": working - logits,
            "logits": logits,
            "gathered": round(self.gathered),
        }

    def _too_much_for_host(self, alpha: float) -> _Layers:
        """Memory that would be needed without the host limit."""
        costs = self.costs
        buffers, working = 2 * costs.swapped_bytes(0, alpha), costs.working_bytes(1.0 - alpha)
        return _Layers(
            alpha=alpha,
            seconds=0.0,
            recomputed_flops=0.0,
            device_bytes=self._bytes_of_plan(buffers, 0, working, costs.transient_device_bytes),
            host_bytes=(costs.calls - 2) * costs.swapped_bytes(0, alpha),
            host_full=True,
        )


def _other_bytes(shape: ModelShape) -> int:
    """Bytes per token of S_others with fused kernels: 14 hidden states of a GPT in MEMO's table 1."""
    hidden, widths = shape.hidden, shape.attention
    norms_and_residual = 3 * hidden
    attention = widths.query + widths.key + widths.value
    feed_forward = (3 if shape.gated else 2) * shape.ffn
    return (norms_and_residual + attention + feed_forward) * BF16
