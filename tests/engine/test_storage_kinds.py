"""Storage by kinds of tensors: gradients, bytes, and products that are not computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from support.alpha_plans import alpha_swap
from support.families import FAMILIES, PlainBlock, PlainModel, make_batch
from support.harness import (
    Batch,
    Step,
    assert_close,
    assert_equal,
    gradients_of,
    in_double,
    loss_and_gradients,
)
from support.markers.slow import slow_if
from support.samples.storage_kinds import BASE, TOKENS, ByKind, Rows, everything
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_memo.artifacts.costs import Place
from lightning_memo.engine import TestMode

# As in the tests of every family: distance to fp64, in units of plain training's own.
FARTHER = 1.25


def lora() -> nn.Module:
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(FAMILIES["llama_gqa"].build(), config)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (lora() if name == "lora" else FAMILIES[name].build()).train()


@dataclass
class Case:
    """A model that is attached and profiled, and the result of plain training on a batch."""

    batch: Batch
    amp: bool
    nested: bool
    double: nn.Module
    plain: Step
    under_test: ByKind


CASES = [("llama", False), ("llama_gqa", True), ("gpt2", True), ("block_dropout", False), ("lora", False)]
CASES += [("lora", True), ("mistral_window", False), ("qwen3_moe", False)]
# Attention runs over all slices at once.
NESTED = [
    ("gpt2_dropout", False),
    ("encoder_layer", False),
    ("llama_gqa", True),
    ("lora", False),
    ("gpt2_dropout", True),
]


slow_nested = slow_if(lambda case: case[2] and case[:2] not in (("gpt2_dropout", False), ("encoder_layer", False)))


@pytest.fixture(
    scope="module",
    params=[*((*case, False) for case in CASES), *((*case, True) for case in NESTED)],
    ids=lambda case: case[0] + "-bf16" * case[1] + "-nest" * case[2],
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, amp, nested = request.param
    model, batch = build(name), make_batch(2, TOKENS)
    plain, double = loss_and_gradients(model, batch, amp), in_double(model)
    with ByKind(model, joint_attention=nested) as under_test:
        under_test.profile_step(batch, amp)
        yield Case(batch, amp, nested, double, plain, under_test)


@slow_nested
def test_gradients_and_bytes_where_everything_is_somewhere(case: Case) -> None:
    under_test, engine = case.under_test, case.under_test.engine
    swapped, kept = under_test.load_storage(everything(under_test.products, case.nested), BASE)
    model = under_test.model
    model.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.amp):
        loss = model(**case.batch).loss
    runs: list[Any] = list(engine.calls)
    assert [run.storage.group.slot.used_bytes for run in runs] == swapped
    assert [run.storage.resident.size_bytes for run in runs] == kept
    del runs
    loss.backward()
    assert engine.memory is not None
    assert engine.memory.stats.peak_host_bytes == engine.host_bytes == sum(swapped[:-2])
    least = 2 if all(p.requires_grad for p in model.parameters()) else 3  # no gradient goes through the first layer
    assert len(set(swapped)) == least
    under_test.assert_as_planned()
    under_test.assert_empty()
    assert_as_good(case, Step(loss.detach(), gradients_of(model)))


def assert_as_good(case: Case, actual: Step) -> None:
    """Gradients in fp32 equal those of plain training up to rounding; others are no farther from fp64."""
    assert actual.gradients.keys() == case.plain.gradients.keys()
    if not case.amp:
        assert actual.distance(case.plain) <= 1e-6
        return
    exact = loss_and_gradients(case.double, case.batch)
    assert actual.distance(exact) <= FARTHER * case.plain.distance(exact)


@slow_nested
def test_products_are_those_with_a_row_for_each_token(case: Case) -> None:
    """The last product is not among them, because nothing in the layer needs its output, unless dropout follows."""
    products = case.under_test.products
    assert products == ["linear1"] or len(set(products)) == len(products) >= 3
    assert not any("expert" in name for name in products)
    assert "mlp.down_proj" not in products and (case.nested or "mlp.c_proj" not in products)


def test_a_shorter_batch_runs_in_the_same_slots() -> None:
    model, shorter = build("llama"), make_batch(1, 23)
    plain = loss_and_gradients(model, shorter)
    with ByKind(model) as under_test:
        under_test.profile_step(make_batch(2, TOKENS))
        under_test.load_storage(everything(under_test.products))
        assert under_test.step(shorter).distance(plain) <= 1e-6


def test_a_dropped_graph_gives_its_memory_back(llama: ByKind) -> None:
    llama.load_storage(everything(llama.products))
    batch = make_batch(2, TOKENS)
    loss = llama.model(**batch).loss
    assert llama.engine.slots_in_use > 0
    del loss
    llama.assert_empty()
    loss = llama.model(**batch).loss
    torch.autograd.grad(loss, list(llama.engine.layers[-1].parameters()))  # recomputes in no other layer
    del loss
    llama.assert_empty()


class Made(TorchDispatchMode):
    """Records the memory of all floating-point tensors that are made for a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, torch.Size]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 2 and len(t) > 1:
                self._made[t.untyped_storage()._cdata] = StorageWeakRef(t.untyped_storage()), t.shape
        return out

    @property
    def alive(self) -> list[torch.Size]:
        """Shapes of those tensors that have not been freed."""
        return [shape for made, shape in self._made.values() if not made.expired()]


def test_what_is_kept_is_freed_in_the_backward(llama: ByKind) -> None:
    """The graph that refers to it, which the loss holds, may live on."""
    stored: Rows = {kind: [("device", 0, TOKENS)] for kind in ("input", "attention", "mlp.up_proj")}
    llama.load_storage(stored)
    with Made() as made:
        loss = llama.model(**make_batch(2, TOKENS)).loss
        assert len(made.alive) > 3 * len(llama.engine.layers)
        loss.backward()
    assert not made.alive and loss.requires_grad


# ---- what is computed again


def computed(under_test: ByKind, batch: Batch) -> dict[str, float]:
    """FLOPs of a backward, recomputation included, by operator."""
    torch.manual_seed(5)
    loss = under_test.model(**batch).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    under_test.assert_empty()
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module")
def llama() -> Iterator[ByKind]:
    with ByKind(build("llama"), test_mode=None) as under_test:
        under_test.profile_step(make_batch(2, TOKENS))
        yield under_test


def flops_of(under_test: ByKind, rows: Rows) -> float:
    under_test.load_storage(rows)
    return sum(computed(under_test, make_batch(2, TOKENS)).values())


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_stored_product_is_not_computed_again(llama: ByKind, place: Place) -> None:
    up = 2 * 2 * TOKENS * 32 * 64  # FLOPs of one product of 32 x 64 weights, for all tokens of the batch
    layers = len(llama.engine.layers)
    whole = flops_of(llama, BASE)
    assert whole - flops_of(llama, BASE | {"mlp.up_proj": [(place, 0, TOKENS)]}) == layers * up
    assert whole - flops_of(llama, BASE | {"mlp.up_proj": [(place, 14, 28)]}) == layers * up / 4
    nothing = flops_of(llama, BASE | {name: [(place, 0, TOKENS)] for name in llama.products})
    assert nothing == flops_of(llama, BASE | {"other": [(place, 0, TOKENS)]})


def test_dropped_attention_runs_again(llama: ByKind, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    backend = type(llama.engine.attention.backend(*[torch.zeros(1, 1, 4, 8)] * 3, _causal()))
    forward = backend.forward

    def counted(self: object, q: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(q.shape[2])
        return forward(self, q, *args, **kwargs)

    batch = make_batch(2, TOKENS)
    llama.load_storage(BASE | {"attention": [("host", 24, TOKENS)]})
    loss = llama.model(**batch).loss
    monkeypatch.setattr(backend, "forward", counted)
    loss.backward()
    assert calls == [24] * len(llama.engine.layers)


def _causal() -> object:
    from lightning_memo.kernels import AttentionSpec

    return AttentionSpec()


# ---- a profiled step whose host memory is limited


def by_kind(under_test: ByKind) -> list[Counter[str]]:
    """Bytes that each layer call of the profiled step would save, by kind."""
    assert under_test.profile is not None
    totals = []
    for call in under_test.profile.in_order():
        assert call.products
        totals.append(Counter[str]())
        for saved in call.saved:
            totals[-1][saved.kind] += saved.size_bytes
    return totals


@slow_if(lambda family, dropped: dropped == 2 and family != "llama")
@pytest.mark.parametrize("family", ["llama", "llama_gqa", "gpt2"])
@pytest.mark.parametrize("dropped", [1, 2])
def test_a_profiled_step_drops_attention_for_which_the_host_has_no_room(family: str, dropped: int) -> None:
    batch = make_batch(2, TOKENS)
    with ByKind(build(family)) as under_test:
        expected, saved = under_test.profile_step(batch), by_kind(under_test)
        leaving = len(under_test.engine.layers) - 2
    assert leaving >= dropped
    inputs, attention = saved[0]["input"], saved[0]["out"] + saved[0]["lse"]
    most = leaving * (inputs + attention) - (dropped - 1) * attention - 1
    with ByKind(build(family), host_limit=most) as under_test:
        assert_equal(under_test.profile_step(batch), expected)
        assert by_kind(under_test) == saved
        memory = under_test.engine.memory
        assert memory is not None and memory.device_bytes == memory.stats.overflow_bytes == 0
        assert memory.stats.peak_host_bytes == memory.host_bytes == leaving * (inputs + attention) - dropped * attention
        again = under_test.profile.seconds_of("attention_again")
        assert [seconds > 0 for seconds in again] == [leaving - dropped <= n < leaving for n in range(leaving + 2)]


class NamedAsKinds(PlainBlock):
    """Two of its projections have the names of kinds of tensors."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.state, self.key = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.key(F.silu(self.state(x)))


def test_modules_with_names_of_kinds_are_products() -> None:
    model, batch = PlainModel([NamedAsKinds() for _ in range(4)]), make_batch(2, TOKENS)
    plain = loss_and_gradients(model, batch)
    with ByKind(model) as under_test:
        under_test.profile_step(batch)
        assert "state.weight" in under_test.products and not {"state", "key"} & set(under_test.products)
        for stored in ((), ("state.weight",), under_test.products):
            under_test.load_storage(BASE | {name: [("host", 8, TOKENS)] for name in stored})
            assert_close(under_test.step(batch), plain)


# ---- copy races


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_delays_and_poison_change_nothing(name: str) -> None:
    model, batch = build(name), make_batch(2, TOKENS)
    with ByKind(model, test_mode=None) as under_test:
        under_test.profile_step(batch)
        rows = everything(under_test.products)
        under_test.load_storage(rows)
        expected = under_test.step(batch)
        for seed in range(3):
            under_test.set_test_mode(TestMode(seed, 0.002))
            under_test.load_storage(rows)
            assert_equal(under_test.step(batch), expected)


# ---- what is refused


def _without(rows: Rows, kind: str) -> Rows:
    return {name: of for name, of in rows.items() if name != kind}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: _without(rows, "input"), "layer inputs have no place"),
        (lambda rows: rows | {"other": [("host", 0, 8)]}, "attention output is not"),
        (lambda rows: rows | {"mlp.up_proj": [("host", 0, 9), ("device", 8, 12)]}, "mlp.up_proj overlap"),
        (lambda rows: rows | {"mlp.up_proj": [("disk", 0, 8)]}, r"spills 8.0 KiB to a disk, and no disk_path"),
    ],
    ids=["input", "attention", "overlap", "no disk"],
)
def test_plans_that_cannot_run_are_refused(llama: ByKind, change: Callable[[Rows], Rows], message: str) -> None:
    rows = change(BASE | {"attention": [("host", 8, TOKENS)]})
    with pytest.raises(ValueError, match=message):
        llama.load_storage(rows)


def test_a_plan_of_kinds_is_refused_where_one_alpha_was_asked_for(
    llama: ByKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.load_storage(BASE | {"mlp.up_proj": [("host", 0, 8)]})
    monkeypatch.setattr(llama.engine.settings, "by_kind", False)
    assert llama.engine.swap is not None and "a place for each kind" in llama.engine.why_not(llama.engine.swap)
    assert llama.engine.why_not(alpha_swap(0.5, 4, 64)) == ""


def test_a_plan_that_moves_inputs_alone_is_not_plain_training(llama: ByKind) -> None:
    llama.load_storage(BASE | {"other": [("device", 0, TOKENS)]})
    assert llama.engine.swap is not None and not llama.engine.swap.plain and llama.engine.memory is not None


def test_nested_attention_has_to_be_stored() -> None:
    with ByKind(build("gpt2_dropout")) as under_test:
        under_test.profile_step(make_batch(2, TOKENS))
        with pytest.raises(ValueError, match="at once, and its outputs have no place"):
            under_test.load_storage(everything(under_test.products))
