"""The choice of the attention kernel: the fastest one in a trial, the same on all processes and in later runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.kernels.attention_reference import make_inputs
from support.parallel_training import Run, train
from support.processes import run_in_processes
from support.samples.plans import small_plan
from support.trainer_harness import LanguageModel, fit
from torch import Tensor

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.plan_cache import PlanCache
from lightning_memo.artifacts.swap_plan import AttentionTrial
from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels import select_kernel as select
from lightning_memo.kernels.attention_kernel import AttentionResult
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.kernels.fallback_kernels import Replay
from lightning_memo.kernels.select_kernel import PROBE_TOKENS, ProbeInputs, agreed, fastest_kernel, try_kernels
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner.token_slices import plan_of_alpha, plan_of_plain_training

SPEC = AttentionSpec()


class Chunked(CpuFlash):
    """Another kernel of the CPU, called "cudnn" here, which computes some rows of a window at a time."""

    name = "cudnn"
    mask_entries = 64
    uses = 0

    def forward(self, *args: Any, **kwargs: Any) -> AttentionResult:
        type(self).uses += 1
        return super().forward(*args, **kwargs)


class Broken(CpuFlash):
    def forward(self, *args: Any, **kwargs: Any) -> AttentionResult:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\nat some line")


class Blind(CpuFlash):
    """A kernel that wrongly sees all keys in every call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *starts: int) -> AttentionResult:
        return super().forward(q, k, v, replace(spec, causal=False), *starts)


class Unserving(CpuFlash):
    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        return False


def costs(**seconds: float) -> Callable[[Callable[[], object]], float]:
    """Runs what is measured, and returns the time that `seconds` has for the kernel, in order of the trials."""
    calls = {"first": 0}
    names = list(seconds)

    def seconds_of(work: Callable[[], object]) -> float:
        work()
        name = names[calls["first"] % len(names)]
        calls["first"] += 1
        return seconds[name]

    return seconds_of


@contextlib.contextmanager
def kernels_of_the_cpu(**others: type[CpuFlash]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select.KERNELS, "cpu", {"sdpa": CpuFlash, **others})
        yield


def choose(kernels: AttentionSelector, **sizes: Any) -> str:
    q, k, v, _ = make_inputs(**sizes)
    with kernels.choosing():
        kernels.backend(q, k, v, SPEC)
    return kernels.chosen


# ---- trials


def test_kernels_are_measured_side_by_side_and_the_random_state_stays():
    q, k, v, _ = make_inputs(key_heads=2)
    before = torch.get_rng_state()
    trials = try_kernels({"sdpa": CpuFlash, "cudnn": Replay}, ProbeInputs.like(q, k, v, SPEC), costs(sdpa=3, cudnn=2))
    assert [(trial.name, trial.seconds, trial.why_not) for trial in trials] == [("sdpa", 3, ""), ("cudnn", 2, "")]
    assert fastest_kernel(trials) == "cudnn"
    assert torch.equal(torch.get_rng_state(), before)


def test_the_clock_of_the_device_measures():
    class ReplayOfTheCpu(Replay):
        serves = CpuFlash.serves

    with kernels_of_the_cpu(cudnn=ReplayOfTheCpu):
        kernels = AttentionSelector("auto")
        choose(kernels, batch=1, queries=128, keys=128)
    assert [trial.name for trial in kernels.trials] == ["sdpa", "cudnn"]
    assert all(0 < trial.seconds < 10 for trial in kernels.trials)
    assert kernels.chosen == min(kernels.trials, key=lambda trial: trial.seconds).name


@pytest.mark.parametrize("queries", [7, PROBE_TOKENS + 5])
def test_trials_have_the_models_heads_and_a_bounded_length(queries):
    shapes = [(2, 8, queries, 16), (2, 4, queries, 16), (2, 4, queries, 16)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    on_host = [t.new_empty(t.shape, device="cpu") for t in (q, k, v)]
    spec = AttentionSpec(window=3, lengths=(5, 6), documents=((0,), (0, 2)), scale=0.5)
    inputs = ProbeInputs.like(*on_host, spec, parts=2)
    tokens = min(queries, PROBE_TOKENS)
    assert inputs.q.shape == inputs.dout.shape == (1, 4, tokens, 16)
    assert inputs.k.shape == inputs.v.shape == (1, 2, tokens, 16)
    assert {t.dtype for t in (inputs.q, inputs.k, inputs.v, inputs.dout)} == {torch.bfloat16}
    assert inputs.spec == AttentionSpec(scale=0.5)  # batches differ in the rest


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(Broken, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), (Blind, "its output differs by ")],
)
def test_a_kernel_that_raises_or_is_wrong_is_dropped_and_says_why(kernel, why):
    q, k, v, _ = make_inputs()
    makers = {"sdpa": CpuFlash, "cudnn": kernel, "flash_attn": Chunked}
    trials = try_kernels(makers, ProbeInputs.like(q, k, v, SPEC), lambda work: work() or 1.0)
    assert [bool(trial.why_not) for trial in trials] == [False, True, False]
    assert trials[1].why_not.startswith(why)
    assert "\n" not in trials[1].why_not
    assert trials[1].seconds is None
    assert fastest_kernel(trials) != "cudnn"


def test_without_any_kernel_the_reasons_are_told():
    q, k, v, _ = make_inputs()
    trials = try_kernels({"sdpa": Broken, "cudnn": Broken}, ProbeInputs.like(q, k, v, SPEC), lambda work: work() or 1.0)
    with pytest.raises(
        ValueError, match=r"^no attention kernel runs .*sdpa: RuntimeError.*cudnn: RuntimeError"
    ) as error:
        fastest_kernel(trials)
    assert "\n" not in str(error.value)


def test_running_out_of_memory_is_not_the_kernels_fault():
    class Large(CpuFlash):
        def forward(self, *args: Any) -> AttentionResult:
            raise torch.OutOfMemoryError("out of memory")

    q, k, v, _ = make_inputs()
    with pytest.raises(torch.OutOfMemoryError):
        try_kernels({"sdpa": CpuFlash, "cudnn": Large}, ProbeInputs.like(q, k, v, SPEC), lambda work: work() or 1.0)


def test_a_kernel_is_as_fast_as_on_the_slowest_process():
    ranks = [
        [AttentionTrial(name="sdpa", seconds=2.0), AttentionTrial(name="cudnn", seconds=1.0)],
        [AttentionTrial(name="sdpa", seconds=2.1), AttentionTrial(name="cudnn", seconds=5.0)],
    ]
    assert [(trial.name, trial.seconds) for trial in agreed(ranks)] == [("sdpa", 2.1), ("cudnn", 5.0)]
    assert fastest_kernel(agreed(ranks)) == "sdpa"


def test_a_kernel_that_some_process_has_not_is_dropped():
    fine = [AttentionTrial(name="sdpa", seconds=2.0), AttentionTrial(name="cudnn", seconds=1.0)]
    failed = [fine[0], AttentionTrial(name="cudnn", why_not="no plan")]
    assert agreed([fine, failed])[1] == AttentionTrial(name="cudnn", why_not="rank 1: no plan")
    assert agreed([fine, fine[:1]])[1] == AttentionTrial(name="cudnn", why_not="rank 1: not available")
    assert agreed([failed]) == tuple(failed)


# ---- the choice of a run


def test_the_fastest_is_chosen_once():
    with kernels_of_the_cpu(cudnn=Chunked):
        measured, tried = costs(sdpa=2, cudnn=1), []
        kernels = AttentionSelector("auto", seconds_of=lambda work: tried.append(work) or measured(work))
        assert choose(kernels) == "cudnn"
        q, k, v, _ = make_inputs()
        assert type(kernels.backend(q, k, v, SPEC)) is Chunked
        assert tried
        tried.clear()
        assert choose(kernels) == "cudnn"
        assert not tried


def test_where_there_is_one_kernel_nothing_is_tried():
    kernels = AttentionSelector("auto", seconds_of=lambda work: pytest.fail("tried"))
    assert choose(kernels) == "sdpa"
    assert kernels.trials == ()


def test_what_only_a_replay_computes_is_not_tried():
    q, k, v, _ = make_inputs()
    with kernels_of_the_cpu(cudnn=Chunked):
        kernels = AttentionSelector("auto", seconds_of=lambda work: pytest.fail("tried"))
        with kernels.choosing():
            assert isinstance(kernels.backend(q, k, v, AttentionSpec(dropout=0.1)), Replay)
    assert kernels.chosen == "sdpa"


def test_a_kernel_that_leaves_all_to_another_is_not_tried():
    with kernels_of_the_cpu(cudnn=Unserving):
        assert choose(AttentionSelector("auto", seconds_of=lambda work: pytest.fail("tried"))) == "sdpa"


def test_outside_of_a_profiled_step_nothing_is_chosen():
    q, k, v, _ = make_inputs()
    with kernels_of_the_cpu(cudnn=Chunked):
        kernels = AttentionSelector("auto")
        assert type(kernels.backend(q, k, v, SPEC)) is CpuFlash
    assert kernels.chosen is None


def test_a_wished_kernel_is_taken_even_if_it_is_slower():
    with kernels_of_the_cpu(cudnn=Chunked, flash_attn=Broken):
        kernels = AttentionSelector("cudnn", seconds_of=costs(sdpa=1, cudnn=2))
        assert choose(kernels) == "cudnn"
    assert [trial.name for trial in kernels.trials] == ["sdpa", "cudnn"]


def test_a_wished_kernel_that_fails_is_refused():
    with (
        kernels_of_the_cpu(cudnn=Broken),
        pytest.raises(
            ValueError, match=r'^attention="cudnn" does not work here \(RuntimeError: cuDNN.*"auto"'
        ) as error,
    ):
        choose(AttentionSelector("cudnn"))
    assert "\n" not in str(error.value)


def test_a_plan_needs_its_kernel():
    assert AttentionSelector("auto").why_not("cudnn") == ""
    assert "not installed" in AttentionSelector("auto").why_not("flash_attn")
    assert 'attention="sdpa", but attention="cudnn" is set' in AttentionSelector("cudnn").why_not("sdpa")
    assert AttentionSelector("cudnn").why_not("cudnn") == ""


# ---- plans


def test_the_table_of_a_plan_tells_of_the_trials():
    plan = small_plan()
    swap = replace(plan.swap, storage=plan_of_alpha(plan.costs.tokens, 0.5, plan.swap.calls), attention="cudnn")
    trials = (
        AttentionTrial(name="sdpa", seconds=0.0021),
        AttentionTrial(name="cudnn", seconds=0.0012),
        AttentionTrial(name="flash_attn", why_not="ImportError: undefined symbol"),
    )
    plan = replace(plan, swap=swap, attention_trials=trials)
    assert "alpha=0.5, cudnn attention" in str(plan)
    lines = [" ".join(line.split()) for line in plan.explain().splitlines()]
    first = lines.index("cudnn 1.2 ms")
    assert lines[first:][:3] == ["cudnn 1.2 ms", "sdpa 2.1 ms", "flash_attn not used: ImportError: undefined symbol"]
    plain = replace(swap, storage=plan_of_plain_training(plan.costs.tokens, plan.swap.calls))
    assert "cudnn" not in replace(plan, swap=plain).explain()


def test_a_saved_plan_keeps_choice_and_trials():
    plan = small_plan()
    plan = replace(
        plan,
        swap=replace(plan.swap, attention="flash_attn"),
        attention_trials=(AttentionTrial(name="sdpa", seconds=0.5), AttentionTrial(name="cudnn", why_not="no")),
    )
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match=r'swap.attention is .*magic.*, expected "sdpa" or'):
        Plan.from_json(plan.to_json().replace('"flash_attn"', '"magic"'))


def test_the_kernel_is_part_of_the_key_of_cached_plans(tmp_path):
    cache = PlanCache(tmp_path, lambda text: None, 1, "")
    plan = small_plan()
    other = replace(plan, swap=replace(plan.swap, attention="cudnn"))
    assert cache._path(plan) != cache._path(other)
    measured_again = replace(plan, attention_trials=(AttentionTrial(name="sdpa", seconds=1.0),))
    assert cache._path(plan) == cache._path(measured_again)


# ---- training


@pytest.fixture
def cudnn_is_faster(monkeypatch):
    """Two kernels on the CPU, of which the second one is measured as faster."""
    monkeypatch.setitem(select.KERNELS, "cpu", {"sdpa": CpuFlash, "cudnn": Chunked})
    monkeypatch.setattr(
        "lightning_memo.engine.attention.attention_selector._clock_of", lambda device: costs(sdpa=2, cudnn=1)
    )
    monkeypatch.setattr(Chunked, "uses", 0)


def test_a_run_takes_the_kernel_its_plan_and_its_checkpoint_keep_it(cudnn_is_faster, tmp_path, capsys, monkeypatch):
    strategy = MemoStrategy(alpha=0.5)
    fit(strategy, LanguageModel("llama"), max_steps=2)
    used = Chunked.uses
    assert used > 0
    assert strategy.plan.swap.attention == "cudnn"
    assert "alpha=0.5, cudnn attention" in capsys.readouterr().out
    assert "cudnn 1.00 s sdpa 2.00 s" in " ".join(strategy.plan.explain().split())
    strategy.plan.save(tmp_path / "plan.json")

    monkeypatch.setattr(
        "lightning_memo.engine.attention.attention_selector._clock_of", lambda device: pytest.fail("tried")
    )
    again = MemoStrategy(plan=tmp_path / "plan.json")
    fit(again, LanguageModel("llama"), max_steps=1)
    assert again.plan.swap.attention == "cudnn"
    assert again.plan.attention_trials == strategy.plan.attention_trials
    assert Chunked.uses > used


def test_a_plan_for_another_kernel_than_wished_is_made_again(cudnn_is_faster, tmp_path):
    strategy = MemoStrategy(alpha=0.5)
    fit(strategy, LanguageModel("llama"), max_steps=1)
    strategy.plan.save(tmp_path / "plan.json")
    wished = MemoStrategy(alpha=0.5, attention="sdpa", plan=tmp_path / "plan.json")
    with pytest.warns(UserWarning, match='was made for attention="cudnn", but attention="sdpa" is set'):
        fit(wished, LanguageModel("llama"), max_steps=1)
    assert wished.plan.swap.attention == "sdpa"


def test_a_wished_kernel_that_is_not_for_the_device_is_told():
    strategy = MemoStrategy(alpha=0.5, attention="cudnn")
    with pytest.warns(
        UserWarning, match=r'attention="cudnn" is left to PyTorch: it does not compute torch.float32 .* cpu'
    ):
        fit(strategy, LanguageModel("llama"), max_steps=1)


def _train_with_other_clocks(seconds: list[dict[str, float]]) -> tuple[str, list[float]]:
    """Train with kernels whose measured times are those that `seconds` has for this rank."""
    clock = costs(**seconds[dist.get_rank()])
    with kernels_of_the_cpu(cudnn=Chunked), pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_memo.engine.attention.attention_selector._clock_of", lambda device: clock)
        outcome = train(
            Run(steps=2), {"alpha": 0.5, "context_parallel_size": 2}, lambda trainer: {"plan": trainer.strategy.plan}
        )
    plan = outcome.notes["plan"]
    return plan.swap.attention, [trial.seconds for trial in plan.attention_trials]


@pytest.mark.slow
def test_processes_take_one_kernel():
    seconds = [{"sdpa": 2.0, "cudnn": 1.0}, {"sdpa": 2.5, "cudnn": 9.0}]
    assert run_in_processes(2, _train_with_other_clocks, seconds) == [("sdpa", [2.5, 9.0])] * 2


def test_a_process_alone_gathers_from_nobody():
    kernels = AttentionSelector("auto", ranks=Ranks(), seconds_of=costs(sdpa=1))
    assert choose(kernels) == "sdpa"
