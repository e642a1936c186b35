"""Lightning's plugin for TransformerEngine, which converts modules and enters the FP8 autocast in each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import transformer_engine as fabric
from lightning.pytorch.plugins import TransformerEnginePrecision
from support.architectures.fp8_models import EngineBlock, blocks_of, recipe_of, scales_in, strategy, trained
from support.devices import DEVICE
from support.families import FAMILIES, PlainBlock
from support.processes import run_in_processes
from support.trainer_harness import LanguageModel, Sequences, loader, make_trainer
from support.transformer_engine_stand_in import find_in, stand_in
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.usefixtures("own_folder", "installed")]


@pytest.fixture
def installed(te: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "_TRANSFORMER_ENGINE_AVAILABLE", fabric._TRANSFORMER_ENGINE_AVAILABLE)  # set back
    find_in(tmp_path / "site")


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def plugin(**settings: Any) -> TransformerEnginePrecision:
    return TransformerEnginePrecision(**{"weights_dtype": torch.bfloat16, "recipe": recipe_of("unfused")} | settings)


def _plain_blocks() -> nn.Module:
    return blocks_of(PlainBlock)


def _engine_blocks() -> nn.Module:
    return blocks_of(EngineBlock)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "converted": (_plain_blocks, {}),
    "in float32": (_plain_blocks, {"weights_dtype": torch.float32}),
    "in float32, but for FP8": (
        _plain_blocks,
        {"weights_dtype": torch.float32, "fallback_compute_dtype": torch.bfloat16},
    ),
    "kept": (_engine_blocks, {"replace_layers": False}),
    "of Hugging Face": (FAMILIES["llama"].build, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*the logits of all tokens are computed at once")
def test_the_plugin_trains_as_without_the_strategy(te: Any, case: str, alpha: float) -> None:
    build, settings = CASES[case]
    _, expected = trained(None, LanguageModel(build), max_steps=4, plugins=[plugin(**settings)])
    result, found = trained(strategy(alpha=alpha), LanguageModel(build), max_steps=4, plugins=[plugin(**settings)])
    assert result.plan.swap.alpha == alpha and any(type(m) is te.Linear for m in result.module.modules())
    assert list(scales_in(result.module))
    compare(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("replace_layers", [None, True])
def test_models_that_configure_model_makes(te: Any, replace_layers: bool | None) -> None:
    """With `replace_layers=True`, Lightning replaces the classes while the model is made."""

    def train(by: Any) -> list[Tensor]:
        module = LanguageModel(_plain_blocks, in_configure_model=True)
        return trained(by, module, max_steps=4, plugins=[plugin(replace_layers=replace_layers)])[1]

    compare(train(strategy(alpha=0.5)), train(None))


@pytest.mark.slow
def test_the_flag_is_the_short_form_of_the_plugin(te: Any) -> None:
    def train(by: Any) -> list[Tensor]:
        return trained(by, LanguageModel(_plain_blocks), max_steps=4, precision="transformer-engine")[1]

    compare(train(strategy(alpha=0.5)), train(None))


@pytest.mark.slow
def test_validation_between_steps(te: Any) -> None:
    settings = {"max_steps": 4, "val_check_interval": 1, "limit_val_batches": 1}

    def train(by: Any) -> list[Tensor]:
        module = LanguageModel(_plain_blocks)
        return trained(by, module, val_data=loader(), plugins=[plugin()], **settings)[1]

    compare(train(strategy(alpha=0.5)), train(None))


# ---- in several processes


def _batches() -> list[dict[str, Tensor]]:
    """Return this process's rows."""
    sequences, rank = Sequences(8), dist.get_rank()
    return [{name: t[None].to(DEVICE) for name, t in sequences[2 * n + rank].items()} for n in range(4)]


def _by_strategy(folder: Path) -> list[float]:
    find_in(folder)
    with stand_in():
        module, data = LanguageModel(_plain_blocks), DataLoader(_batches(), batch_size=None)  # type: ignore[arg-type]
        make_trainer(strategy(alpha=0.5), devices=2, plugins=[plugin()], use_distributed_sampler=False).fit(
            module, data
        )
        return module.losses


def _plainly(folder: Path) -> list[float]:
    find_in(folder)
    with stand_in():
        precision = plugin()
        module = precision.convert_module(LanguageModel(_plain_blocks)).to(DEVICE)
        model, optimizer, losses = DistributedDataParallel(module.model), module.configure_optimizers(), []
        for batch in _batches():
            with precision.forward_context():
                loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.slow
def test_data_parallel_processes_train_as_plainly(tmp_path: Path) -> None:
    assert run_in_processes(2, _by_strategy, tmp_path) == run_in_processes(2, _plainly, tmp_path)


# ---- in one line


@pytest.mark.parametrize("given", ["weights_dtype", "fallback_compute_dtype"])
def test_float16_is_refused(te: Any, given: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^TransformerEnginePrecision with {given}=torch.float16 is not .*: give torch.b"
    ):
        make_trainer(strategy(), plugins=[plugin(**{given: torch.float16})])
