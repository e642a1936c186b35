"""TransformerEngine's modules train in FP8 as plainly: losses, gradients, weights, scales and histories, bit by bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.architectures.fp8_models import (
    EngineBlock,
    FromThirdStep,
    GatedBlock,
    InFp8,
    blocks_of,
    engine,
    manager,
    recipe_of,
    scales_in,
    trained,
)
from support.families import FAMILIES, VOCABULARY
from support.markers.slow import slow_if
from support.trainer_harness import batches, loader
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = [pytest.mark.usefixtures("own_folder")]


def strategy(alpha: float, **settings: Any) -> MemoStrategy:
    return MemoStrategy(alpha=alpha, **settings)


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@slow_if(lambda recipe, alpha: recipe not in ("delayed", "current", "blocks") or alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("recipe", ["delayed", "most_recent", "unfused", "current", "mxfp8", "mxfp8_2d", "blocks"])
def test_whole_layers_train_bit_by_bit_as_plainly(te: Any, recipe: str, alpha: float) -> None:
    """At every alpha, which is the fraction of the layers that are swapped."""
    _, expected = trained(None, InFp8(recipe_of(recipe)), max_steps=5)
    result, found = trained(strategy(alpha), InFp8(recipe_of(recipe)), max_steps=5)
    assert not result.plan.swap.plain and result.plan.swap.alpha == alpha
    compare(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "lines"), [("mxfp8", 1), ("blocks", 0)])
def test_one_line_names_a_recipe_that_has_not_run_on_a_gpu(te: Any, recipe: str, lines: int) -> None:
    """When the first layer computes by it."""
    module = FromThirdStep(recipe_of(recipe))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(strategy(0.5), module, max_steps=4)
    told = [str(w.message) for w in caught if "has not run on a GPU" in str(w.message)]
    assert len(told) == lines and all("MXFP8BlockScaling of TransformerEngine" in line for line in told)


class _TwiceAtOnce(InFp8):
    """Sums the losses of two forwards, after the first of which the scales are updated."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + super().loss({name: t.flip(0, 1) for name, t in batch.items()})


class _Evaluated(InFp8):
    """Runs a forward without gradients before the backward of the fourth step, by another recipe.

    The scales have a history by then: a new state begins with 1.
    """

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss, own = super().loss(batch), self.recipe
        if self.global_step != 3:
            return loss
        self.recipe = recipe_of("mxfp8")
        with torch.no_grad():
            super().loss(batch)
        self.recipe = own
        return loss


class _FrozenBlock(EngineBlock):
    """A block in which one weight is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv.weight.requires_grad_(False)


def _mixed() -> nn.Module:
    """Return a model whose first layers have PyTorch's modules in their places."""
    model = blocks_of()
    for block in model.blocks[:2]:
        block.out = nn.Linear(32, 32)
    return model


CASES: dict[str, tuple[type[InFp8], Any, dict[str, Any]]] = {
    "accumulated": (InFp8, blocks_of, {"accumulate_grad_batches": 2, "max_steps": 3}),
    "two forwards": (_TwiceAtOnce, blocks_of, {}),
    "turned on": (FromThirdStep, blocks_of, {"max_steps": 5}),
    "half precision": (InFp8, blocks_of, {"precision": "bf16-mixed"}),
    "weights in half precision": (InFp8, blocks_of, {"precision": "bf16-true"}),
    "another recipe between": (_Evaluated, blocks_of, {"max_steps": 5}),
    "frozen": (InFp8, lambda: blocks_of(_FrozenBlock), {}),
    "mixed": (InFp8, _mixed, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:lightning_memo. .* It runs as one slice now")
def test_scales_follow_the_history_of_plain_training(te: Any, case: str, alpha: float) -> None:
    kind, build, settings = CASES[case]
    settings = {"max_steps": 4} | settings
    _, expected = trained(None, kind(recipe_of("delayed"), build), **settings)
    _, found = trained(strategy(alpha), kind(recipe_of("delayed"), build), **settings)
    compare(found, expected)


class _Validated(InFp8):
    """Runs a forward in inference mode before the first step, as `trainer.validate` does."""

    @override
    def on_train_start(self) -> None:
        with torch.inference_mode():
            self.loss({name: t.to(self.device) for name, t in next(iter(loader())).items()})


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_scales_that_inference_has_made(te: Any, alpha: float) -> None:
    """Nothing outside of inference mode may write them, apart from kernels."""
    _, expected = trained(None, _Validated(recipe_of("delayed")), max_steps=4)
    result, found = trained(strategy(alpha), _Validated(recipe_of("delayed")), max_steps=4)
    compare(found, expected)
    assert result.module.model.blocks[0].out.fp8_meta["scaling_fwd"].scale.is_inference()


@pytest.mark.slow
def test_a_resumed_run_has_the_scales_of_one_that_was_not_interrupted(te: Any, tmp_path: Path) -> None:
    """They are extra state of the modules, in checkpoints of Lightning."""
    data = batches([next(iter(loader()))] * 4)  # Lightning starts a loader from its beginning
    _, expected = trained(strategy(0.0), InFp8(recipe_of("delayed")), data, max_steps=4)
    first, _ = trained(strategy(0.0), InFp8(recipe_of("delayed")), data, max_steps=2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    result, found = trained(
        strategy(0.0), InFp8(recipe_of("delayed")), data, max_steps=4, ckpt_path=tmp_path / "two.ckpt"
    )
    assert result.losses == expected[0].tolist()[2:]
    scales = list(scales_in(result.module))
    assert scales and all(
        torch.equal(a, b) for a, b in zip(found[-len(scales) :], expected[-len(scales) :], strict=True)
    )


@pytest.mark.slow
def test_layers_that_were_cut_run_whole_in_fp8(te: Any) -> None:
    """One scale covers all tokens, and slices would have others."""
    losses = trained(None, FromThirdStep(recipe_of("current"), lambda: blocks_of(GatedBlock)), max_steps=4)[0].losses
    module = FromThirdStep(recipe_of("current"), lambda: blocks_of(GatedBlock))
    with pytest.warns(UserWarning, match="Linear of GatedBlock computes in TransformerEngine's FP8.*as one slice now"):
        result, _ = trained(strategy(0.5), module, max_steps=4)
    assert len(result.plan.swap.storage.calls) == 1
    assert result.losses == pytest.approx(losses, rel=1e-6)


class _ByKind(Callback):
    """Notes after each batch whether the plan names places for kinds of tensors."""

    def __init__(self) -> None:
        self.noted: list[bool] = []

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.noted.append(not trainer.strategy.plan.swap.storage.has_one_alpha)


@pytest.mark.slow
def test_a_plan_by_kinds_ends_when_fp8_begins(te: Any) -> None:
    """Places for kinds of tensors are those of layers that can be cut."""
    losses = trained(None, FromThirdStep(recipe_of("current"), lambda: blocks_of(GatedBlock)), max_steps=5)[0].losses
    module, by_kind = FromThirdStep(recipe_of("current"), lambda: blocks_of(GatedBlock)), _ByKind()
    auto = MemoStrategy(device_memory="1.1MiB", host_memory="100KiB")
    with pytest.warns(UserWarning, match="as one slice now"):
        result, _ = trained(auto, module, max_steps=5, callbacks=[by_kind])
    assert by_kind.noted == [True] * 3 + [False] * 2  # a new plan follows the third step
    assert result.losses == pytest.approx(losses, rel=1e-6)


@slow_if(lambda settings: "plan_memory" in settings)
@pytest.mark.parametrize("settings", [{"plan_memory": True}, {"alpha": "auto"}], ids=str)
def test_other_settings_change_nothing(te: Any, settings: dict[str, Any]) -> None:
    _, expected = trained(None, InFp8(recipe_of("delayed")), max_steps=4)
    _, found = trained(MemoStrategy(**{"alpha": 1.0} | settings), InFp8(recipe_of("delayed")), max_steps=4)
    compare(found, expected)


@pytest.mark.slow
def test_spilled_layers(te: Any, tmp_path: Path) -> None:
    """Bytes of FP8 and their scales come back from a disk as they were."""

    def module() -> InFp8:
        return InFp8(recipe_of("delayed"), lambda: blocks_of(layers=6))

    _, expected = trained(None, module(), max_steps=4)
    result, found = trained(strategy(1.0, disk_path=str(tmp_path), host_memory="200KiB"), module(), max_steps=4)
    assert result.plan.swap.disk_calls
    compare(found, expected)


def _with_head() -> nn.Module:
    model = FAMILIES["llama"].build()
    model.lm_head = engine().Linear(32, VOCABULARY, bias=False)
    return model


def test_a_head_in_fp8_computes_all_logits_at_once(te: Any) -> None:
    """In chunks, it would run after the autocast has ended."""
    _, expected = trained(None, InFp8(recipe_of("delayed"), _with_head), max_steps=3)
    plainly = MemoStrategy(alpha=1.0, loss_chunk_tokens=16)
    with pytest.warns(
        UserWarning, match="all tokens are computed at once, because Linear computes in TransformerEngine's FP8"
    ):
        _, found = trained(plainly, InFp8(recipe_of("delayed"), _with_head), max_steps=3)
    compare(found, expected)


# ---- bytes


def saved_bytes(te: Any, recipe: str) -> dict[torch.dtype, int]:
    """Return the bytes of what a block saves besides weights and its input, by dtype."""
    block, found = EngineBlock(), dict[torch.dtype, int]()
    x = torch.randn(2, 32, 32, requires_grad=True)
    known = {t.untyped_storage()._cdata for t in (x, *block.parameters())}
    manager().reset()

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in known:
            known.add(t.untyped_storage()._cdata)
            found[t.dtype] = found.get(t.dtype, 0) + t.untyped_storage().nbytes()
        return t

    with te.autocast(recipe=recipe_of(recipe)), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)
    return found


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_what_is_swapped_is_what_the_modules_save(te: Any, recipe: str) -> None:
    """In FP8: a row of bytes for each input of a product."""
    saved = saved_bytes(te, recipe)
    rows, weights = 64, 3 * 32 * 32 + 32 * 32 + 2 * 2 * 32 * 32
    inputs = rows * (32 + 32 + 32 + 64)  # of the four products
    assert saved[torch.uint8] >= inputs + weights
    result, _ = trained(strategy(1.0), InFp8(recipe_of(recipe)), max_steps=3)
    costs = result.plan.costs
    moved = costs.input_bytes[0] + costs.attention_bytes[0] + costs.other_bytes[0]
    assert moved - costs.input_bytes[0] == pytest.approx(sum(saved.values()), rel=0.02)


@pytest.mark.parametrize(("alpha", "alive"), [(None, True), (0.0, False)])
def test_objects_of_dropped_tensors_hold_no_memory(te: Any, alpha: float | None, alive: bool) -> None:
    """What `ctx.tensor_objects` holds has given its bytes away."""
    storages: list[StorageWeakRef] = []
    counts: list[int] = []
    kind = __import__("transformer_engine.pytorch.tensor.float8_tensor", fromlist=["x"]).Float8TensorStorage
    own = kind.prepare_for_saving

    def noted(self: Any) -> Any:
        tensors, holder = own(self)
        storages.extend(StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None and t.numel() > 64)
        return tensors, holder

    class Counting(InFp8):
        @override
        def on_before_backward(self, loss: Tensor) -> None:
            counts.append(sum(not s.expired() for s in storages))
            storages.clear()

    kind.prepare_for_saving = noted
    trained(None if alpha is None else strategy(alpha), Counting(recipe_of("current")), max_steps=3)
    assert (counts[-1] > 0) is alive


# ---- what the modules keep elsewhere


@slow_if(lambda alpha: alpha == 1)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_lists_of_histories_have_the_modules_only(te: Any, alpha: float) -> None:
    """Neither probes nor recomputations leave entries, which processes would reduce in every step."""
    trained(strategy(alpha), InFp8(recipe_of("delayed")), max_steps=3)
    state = manager().quantization_state
    assert {len(amaxes) for amaxes in state.global_amax_buffer.values()} == {12}
    assert len(state.global_amax_buffer) == 2 and state.autocast_depth == 0
    assert not state.fp8_tensors_recompute_buffer
