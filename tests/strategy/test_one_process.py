"""In one process, Lightning treats a run as it treats one without this strategy: each test does the same in both."""

from __future__ import annotations

import contextlib
import copy
import csv
import http.server
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    ModelCheckpoint,
)
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from support.devices import DEVICE
from support.processes import run_in_processes
from support.trainer_harness import assert_usable_again, listening, make_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.callbacks import Monitor

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Layered(LightningModule):
    """A module with layers to swap, which can be pickled, and whose batch size can be searched."""

    def __init__(self, **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.batch_size, self.lr = 2, 0.01
        self.losses: list[float] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.backbone = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for block in self.backbone:
            x = block(x)
        return self.head(x).square().mean()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch))

    test_step = validation_step

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)

    def _data(self) -> DataLoader[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            rows = RandomDataset(WIDTH, 1)  # all alike: a loader does not resume by itself
            return DataLoader([rows[0]] * 64, batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = _data


@pytest.fixture(params=["auto", "memo"])
def trainer_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Trainer]:
    """Make trainers, plain ones or with this strategy. What a test demands of the plain ones is what Lightning does."""

    def make(**settings: Any) -> Trainer:
        strategy = "auto" if request.param == "auto" else MemoStrategy(alpha=1.0)
        return make_trainer(strategy, **{"default_root_dir": tmp_path, "limit_val_batches": 1} | settings)

    return make


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- restoring


def saved(trainer_of: Callable[..., Trainer], path: Any, module: LightningModule | None = None, **settings: Any) -> Any:
    """Train two steps and save; return the module."""
    module, trainer = module or Layered(), trainer_of(max_steps=2, **settings)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    return module


def test_weights_only_is_passed_on(trainer_of: Any, tmp_path: Path) -> None:
    """A path among the hyperparameters is read only if the user allows it."""
    path = tmp_path / "a.ckpt"
    saved(trainer_of, path, Layered(folder=tmp_path))
    for refused in (None, True):
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            trainer_of().fit(Layered(), ckpt_path=path, weights_only=refused)
    trainer = trainer_of()
    trainer.fit(module := Layered(), ckpt_path=path, weights_only=False)
    assert len(module.losses) == 2
    for evaluate in (trainer_of().validate, trainer_of().test):
        evaluate(Layered(), ckpt_path=path, weights_only=False, verbose=False)
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            evaluate(Layered(), ckpt_path=path, weights_only=True, verbose=False)


class Order(Callback):
    """Notes which weights are there when, and in which order hooks run."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.at: dict[str, dict[str, Tensor]] = {}

    def _note(self, hook: str, module: nn.Module) -> None:
        self.hooks.append(hook)
        self.at[hook] = weights(module)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._note("setup", pl_module)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._note("on_load_checkpoint", pl_module)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.hooks.append("load_state_dict")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"of": "the callback"}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("on_fit_start", pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("on_train_start", pl_module)


class NotesItsHooks(Layered):
    order: Order

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.order.hooks.append("module.on_load_checkpoint")

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.order.hooks.append("configure_optimizers")
        return super().configure_optimizers()


def resumed(make: Callable[..., Trainer], path: Any) -> tuple[list[str], bool]:
    """Resume; return the order of hooks, and whether the saved weights are there in `on_fit_start`."""
    order, first = Order(), NotesItsHooks()
    first.order = Order()
    saved(make, path, first, callbacks=[first.order])
    before, module = first.order, NotesItsHooks()
    module.order = order
    make(max_steps=4, callbacks=[order]).fit(module, ckpt_path=path)
    assert order.hooks != before.hooks
    same = order.at["on_fit_start"].items()
    return order.hooks, all(torch.equal(t, order.at["on_train_start"][name]) for name, t in same)


HOOKS = [
    "setup", "module.on_load_checkpoint", "on_load_checkpoint", "load_state_dict", "configure_optimizers",
    "on_fit_start", "on_train_start",
]  # fmt: skip


def test_order_of_hooks(trainer_of: Any, tmp_path: Path) -> None:
    assert resumed(trainer_of, tmp_path / "a.ckpt") == (HOOKS, True)


def test_finetuning_resumes(trainer_of: Any, tmp_path: Path) -> None:
    """Groups of parameters that a callback has added are restored before the states of optimizers."""

    settings = {"max_steps": -1, "limit_train_batches": 2}
    finetuning = partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, verbose=False)
    trainer = trainer_of(max_epochs=2, callbacks=[finetuning()], **settings)
    trainer.fit(Layered())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer = trainer_of(max_epochs=3, callbacks=[finetuning()], **settings)
    trainer.fit(module := Layered(), ckpt_path=tmp_path / "a.ckpt")
    assert len(trainer.optimizers[0].param_groups) == 2 and len(module.losses) == 2


class Grows(Layered):
    """Makes a module, and sets its learning rate, from what a checkpoint holds."""

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.extra = nn.Linear(WIDTH, 1)
        checkpoint["state_dict"] |= {f"extra.{name}": t for name, t in self.extra.state_dict().items()}
        checkpoint["optimizer_states"] = []
        self.lr = 0.25

    @override
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss + self.extra(x).square().mean() if hasattr(self, "extra") else loss


def test_what_on_load_checkpoint_makes_is_trained(trainer_of: Any, tmp_path: Path) -> None:
    saved(trainer_of, tmp_path / "a.ckpt", Grows())
    trainer, module = trainer_of(), Grows()
    trainer.fit(module, ckpt_path=tmp_path / "a.ckpt")
    group = trainer.optimizers[0].param_groups[0]
    assert group["lr"] == 0.25 and any(p is module.extra.weight for p in group["params"])
    assert module.extra.weight.grad is not None


def in_two_processes(folder: Path, resumes: bool) -> Any:
    """Save in two processes, or resume there from what they or a single process saved."""
    settings = {"devices": 2, "use_distributed_sampler": False, "default_root_dir": folder, "limit_val_batches": 0}

    def make(**more: Any) -> Trainer:
        return make_trainer(MemoStrategy(zero_stage=2), **settings | more)

    if not resumes:
        warned = pytest.warns(UserWarning, match="^AsyncCheckpointIO does not save")
        with warned if dist.get_rank() == 0 else contextlib.nullcontext():
            saved(make, folder / "a.ckpt", Layered(folder=folder), plugins=[AsyncCheckpointIO()])
        return None
    with pytest.raises(ValueError, match="weights_only=False"):
        make().fit(Layered(), ckpt_path=folder / "a.ckpt")
    make().fit(module := Layered(), ckpt_path=folder / "a.ckpt", weights_only=False)
    with pytest.raises(FileNotFoundError):
        make().fit(Layered(), ckpt_path=folder / "missing.ckpt")
    make().fit(from_url := Layered(), ckpt_path=f"file://{folder}/one.ckpt", weights_only=False)
    return module.losses, from_url.losses, resumed(make, folder / "b.ckpt")


@pytest.mark.slow
def test_several_processes_restore_in_the_same_order(tmp_path: Path) -> None:
    """Also with `weights_only`, and from where only a `CheckpointIO` can read; a single process reads their folder."""

    def make(**more: Any) -> Trainer:
        return make_trainer(**{"strategy": "auto", "default_root_dir": tmp_path, "limit_val_batches": 0} | more)

    def memo(**more: Any) -> Trainer:
        return make(**{"strategy": MemoStrategy(alpha=1.0)} | more)

    saved(make, tmp_path / "one.ckpt", Layered(folder=tmp_path))
    make().fit(expected := Layered(), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    run_in_processes(2, in_two_processes, tmp_path, False)
    for losses, from_url, order in run_in_processes(2, in_two_processes, tmp_path, True):
        assert losses == pytest.approx(expected.losses, rel=1e-5)  # sums of gradients of the same rows
        assert from_url == pytest.approx(expected.losses, rel=1e-5)
        assert order == (HOOKS, True)
    memo().fit(module := Layered(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert module.losses == pytest.approx(expected.losses, rel=1e-5)
    found = [
        trainer.validate(Layered(), ckpt_path=tmp_path / name, weights_only=False, verbose=False)[0]["val_loss"]
        for trainer, name in (
            (make(limit_val_batches=2), "one.ckpt"),
            (memo(limit_val_batches=2), "a.ckpt"),
        )
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[0] > 0


# ---- CheckpointIO


class Slow(TorchCheckpointIO):
    """Writes late, and fails if it is told to."""

    fails = False

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.2)
        if self.fails:
            raise OSError("the disk is full")
        super().save_checkpoint(*args, **kwargs)


class Fails(Slow):
    fails = True


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Lightning leaves its handlers of signals behind if the teardown of a `CheckpointIO` fails."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("own_handlers")
def test_the_end_of_a_fit_waits_for_asynchronous_checkpoints(trainer_of: Any, tmp_path: Path) -> None:
    settings = {"max_steps": 2, "enable_checkpointing": True}
    checkpoints = ModelCheckpoint(tmp_path / "ckpt", save_last=True)
    trainer_of(plugins=[AsyncCheckpointIO(Slow())], callbacks=[checkpoints], **settings).fit(Layered())
    assert {path.name for path in (tmp_path / "ckpt").iterdir()} == {"epoch=0-step=2.ckpt", "last.ckpt"}
    checkpoints = ModelCheckpoint(tmp_path / "ckpt", save_last=False)
    with pytest.raises(OSError, match="the disk is full"):
        trainer_of(plugins=[AsyncCheckpointIO(Fails())], callbacks=[checkpoints], **settings).fit(Layered())


class Folders(CheckpointIO):
    """Writes folders, in a format of its own."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.ended = 0

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).mkdir(parents=True)
        torch.save((checkpoint, storage_options), Path(path, "meta.pt"))
        Path(path, ".metadata").write_text("none of torch's")

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return torch.load(Path(path, "meta.pt"), weights_only=False)[0]

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(Path(path).name)

    @override
    def teardown(self) -> None:
        self.ended += 1


def test_folders_of_another_checkpoint_io(trainer_of: Any, tmp_path: Path) -> None:
    plugin, checkpoints = Folders(), ModelCheckpoint(tmp_path / "ckpt", save_top_k=1, every_n_train_steps=2)
    settings = {"plugins": [plugin], "enable_checkpointing": True}
    trainer = trainer_of(callbacks=[checkpoints], **settings)
    trainer.fit(module := Layered())
    assert plugin.removed == ["epoch=0-step=2.ckpt"] and plugin.ended == 1
    trainer.save_checkpoint(tmp_path / "with_options", storage_options={"a": 1})
    assert torch.load(tmp_path / "with_options" / "meta.pt", weights_only=False)[1] == {"a": 1}
    other = trainer_of(max_steps=6, **settings)
    other.fit(again := Layered(), ckpt_path=checkpoints.best_model_path)
    assert len(again.losses) == 2
    trainer_of(max_steps=6).fit(straight := Layered())
    assert straight.losses == module.losses + again.losses


def test_remote_paths(trainer_of: Any) -> None:
    """Checkpoints in a file system of fsspec are written, removed, read, and missed."""
    folder = f"memory://{time.monotonic_ns()}"
    checkpoints = ModelCheckpoint(folder, save_top_k=1, every_n_train_steps=2)
    trainer = trainer_of(callbacks=[checkpoints], enable_checkpointing=True)
    trainer.fit(module := Layered())
    files = fsspec.filesystem("memory").ls(folder, detail=False)
    assert [file.rpartition("/")[2] for file in files] == ["epoch=0-step=4.ckpt"]
    trainer_of(max_steps=6).fit(again := Layered(), ckpt_path=checkpoints.best_model_path)
    trainer_of(max_steps=6).fit(straight := Layered())
    assert straight.losses == module.losses + again.losses
    for path in (f"{folder}/missing.ckpt", "missing.ckpt", Path("missing.ckpt")):
        with pytest.raises(FileNotFoundError, match="not found"):
            trainer_of().fit(Layered(), ckpt_path=path)
        with pytest.raises(FileNotFoundError, match="not found"):
            trainer_of().validate(Layered(), ckpt_path=path)


class Quiet(http.server.SimpleHTTPRequestHandler):
    @override
    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_checkpoint_on_a_web_server(trainer_of: Any, tmp_path: Path) -> None:
    first = saved(trainer_of, tmp_path / "a.ckpt")
    with served(tmp_path) as url:
        trainer_of().fit(again := Layered(), ckpt_path=f"{url}/a.ckpt")
    trainer_of().fit(straight := Layered())
    assert straight.losses == first.losses + again.losses


# ---- the end of a run


def test_teardown(trainer_of: Any) -> None:
    """The module and the states of optimizers leave the device, and a second fit takes them there again."""
    ends = []

    class Ends(TorchCheckpointIO):
        @override
        def teardown(self) -> None:
            ends.append(True)

    trainer, module = trainer_of(plugins=[Ends()]), Layered()
    trainer.fit(module)
    assert module.device == torch.device("cpu") and len(ends) == 1
    state = trainer.optimizers[0].state.values()
    assert {s["momentum_buffer"].device.type for s in state} == {"cpu"}
    trainer.validate(module, verbose=False)
    assert module.device == torch.device("cpu") and len(ends) == 2
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module)
    assert len(module.losses) == 6
    with pytest.raises(ZeroDivisionError):
        trainer_of(plugins=[Ends()], callbacks=[Divides()]).fit(Layered())
    assert len(ends) == 4


class Divides(Callback):
    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError


class Copies(Callback):
    """Copies the trainer in the middle of a fit."""

    copies: tuple[Trainer, ...] = ()

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 3:
            self.copies = pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)


def test_copies_of_a_trainer(trainer_of: Any) -> None:
    """A Trainer is pickled and copied in a fit and after it, and the copies train on by themselves."""
    trainer = trainer_of(callbacks=[Copies()])
    trainer.fit(module := Layered())
    for copied in trainer.callbacks[0].copies:
        assert copied.global_step == 3
        copied.fit(again := copied.lightning_module)
        assert len(again.losses) == 4 and again.losses == module.losses
    for copied in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert getattr(copied.strategy, "plan", None) == getattr(trainer.strategy, "plan", None)
        assert copied.global_step == 4
        copied.fit_loop.epoch_loop.max_steps = 6
        copied.fit(again := copied.lightning_module)
        assert again is not module and len(again.losses) == 6 and len(module.losses) == 4
    untrained = pickle.loads(pickle.dumps(trainer_of()))
    untrained.fit(other := Layered())
    assert other.losses == module.losses


# ---- logging


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("every", [0, 1, 3])
def test_intervals_of_logging(trainer_of: Any, tmp_path: Path, every: int) -> None:
    """Nothing is logged at other steps than those of the module's metrics, and nothing at all with an interval of 0."""
    logger = CSVLogger(tmp_path, name="", version="")
    settings = {"max_steps": 24, "log_every_n_steps": every, "logger": logger, "callbacks": [Monitor()]}
    trainer_of(limit_val_batches=0, **settings).fit(Layered())
    logger.save()
    found = rows(tmp_path) if every else []
    assert every or not logger.experiment.metrics
    steps = {int(row["step"]) for row in found}
    assert steps == ({step for step in range(24) if (step + 1) % every == 0} if every else set())
    assert {int(row["step"]) for row in found if row["loss"]} == steps
    assert {int(row["step"]) for row in found if row.get("throughput/step_seconds")} == steps


def test_memory_is_logged_for_the_steps_of_other_metrics(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(
        MemoStrategy(alpha=1.0, plan_memory=True), max_steps=-1, max_time={"seconds": 60}, logger=logger
    )
    trainer.log_every_n_steps, module = 2, UntilServed()
    trainer.fit(module)
    found = rows(tmp_path)
    steps = {int(row["step"]) for row in found if row["memory/hits"]}
    assert steps and {step % 2 for step in steps} == {1}
    assert steps <= {int(row["step"]) for row in found if row["loss"]}


class UntilServed(Layered):
    """Ends when metrics of planned memory have been logged."""

    steps_served = 0

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        served = self.trainer.strategy.memory.stats
        self.steps_served += served is not None
        self.trainer.should_stop = self.steps_served == 5


# ---- what Lightning asks of a strategy


def test_what_lightning_asks(trainer_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a launcher has started several processes, each with a Trainer of one device."""
    for name, value in {"LOCAL_RANK": "1", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = trainer_of()
    trainer.fit(Layered())
    ranks = trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size
    assert ranks == (0, 0, 0, 1)
    assert trainer.is_global_zero and trainer.num_devices == 1 and not trainer._accelerator_connector.is_distributed
    assert trainer.strategy.root_device.type == DEVICE.type
    assert (trainer.strategy.launcher, trainer.strategy.handles_gradient_accumulation) == (None, False)
    assert trainer.strategy.broadcast("a") == "a" and trainer.strategy.reduce_boolean_decision(True)
    assert torch.equal(trainer.strategy.reduce(torch.ones(2)), torch.ones(2))
    assert torch.equal(trainer.strategy.all_gather(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_is_searched(trainer_of: Any, mode: str) -> None:
    """By a callback and by the tuner; training goes on from the first weights."""
    search = {"mode": mode, "steps_per_trial": 2, "init_val": 2, "max_trials": 2}
    finder = BatchSizeFinder(**search)
    trainer_of(callbacks=[finder]).fit(module := Layered())
    searched = Layered()
    tuner = Tuner(trainer_of())
    found = tuner.scale_batch_size(searched, **search)
    assert finder.optimal_batch_size == found == module.batch_size == searched.batch_size > 2
    straight = Layered()
    straight.batch_size = module.batch_size
    trainer_of().fit(straight)
    assert module.losses[-4:] == straight.losses


class Seen(Layered):
    """Notes its batches."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.__dict__.setdefault("seen", []).append(batch[..., 0].flatten().tolist())
        return super().training_step(batch, batch_idx)


def batches_seen(settings: dict[str, Any] | None) -> list[list[float]]:
    module, rows = Seen(), torch.arange(8.0)[:, None, None].expand(-1, 2, WIDTH)
    trainer = make_trainer("auto" if settings is None else MemoStrategy(**settings), max_steps=4)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return module.seen


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 2}, {"offload_state": True}])
def test_the_order_of_the_data(settings: dict[str, Any]) -> None:
    assert run_in_processes(1, batches_seen, settings) == run_in_processes(1, batches_seen, None)


def test_double_precision(trainer_of: Any) -> None:
    trainer_of(precision="64-true").fit(module := Layered())
    make_trainer("auto", precision="64-true", limit_val_batches=0).fit(expected := Layered())
    assert module.head.weight.dtype is torch.float64 and module.losses == expected.losses


@pytest.mark.parametrize("settings", [{"devices": 2}, {"strategy": MemoStrategy(zero_stage=2)}])
def test_double_precision_is_refused_where_gradients_are_reduced(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r'^precision="64-true" is for one process .* give one of 32-true, bf16'
    ) as error:
        make_trainer(**{"strategy": MemoStrategy(), "precision": "64-true"} | settings)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_compiled_modules(tmp_path: Path) -> None:
    """A module that `torch.compile` returns is trained and evaluated as it was before, with one warning."""
    make_trainer("auto", limit_val_batches=0).fit(expected := Layered())
    for evaluated in (False, True):
        module = Layered()
        compiled, trainer = torch.compile(module), make_trainer(MemoStrategy(alpha=1.0), limit_val_batches=0)
        with pytest.warns(UserWarning, match="^lightning_memo: torch.compile is off for Layered,") as warned:
            (partial(trainer.validate, verbose=False) if evaluated else trainer.fit)(compiled)
        assert sum("torch.compile" in str(warning.message) for warning in warned) == 1
        assert module.losses == ([] if evaluated else expected.losses)


# ---- models without layers, and layers without tokens


class Vectors(Layered):
    """Calls its layers with single vectors, as in some of the batches."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[0] if batch_idx % 3 else batch, batch_idx)


@pytest.mark.parametrize("alpha", ["auto", 0.5, 1.0])
def test_layers_that_get_vectors(alpha: Any) -> None:
    losses = []
    for strategy in ("auto", MemoStrategy(alpha=alpha)):
        make_trainer(strategy, limit_val_batches=0, max_steps=8).fit(module := Vectors())
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)  # sums of gradients of slices


class Nothing(BoringModel):
    """A model without layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []
        self.layer = nn.Linear(WIDTH, 2)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.losses.append(output["loss"].item())
        return output


class Uncalled(Nothing):
    """A model whose blocks are dicts, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"inner": nn.Linear(WIDTH, WIDTH)}) for _ in range(3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["inner"](x)
        return self.layer(x)


@pytest.mark.parametrize("model", [Nothing, Uncalled])
def test_models_without_layers(model: type[Nothing]) -> None:
    """They are trained plainly, and one line says so; settings for layers are refused in one line."""
    losses = []
    for strategy in ("auto", MemoStrategy()):
        trainer = make_trainer(strategy, limit_val_batches=1)
        with listening() as heard:
            trainer.fit(module := model())
            trainer.validate(module, verbose=False)
        losses.append(module.losses)
        said = [line for line in heard if "trains plainly" in line]
        assert len(said) == (strategy != "auto")
    assert losses[0] == losses[1] and trainer.strategy.plan is None
    settings: list[dict[str, Any]] = [
        {"alpha": 0.5}, {"slice_tokens": 8}, {"layers": "layers"}, {"host_memory": "1GiB"}, {"loss_chunk_tokens": 8},
    ]  # fmt: skip
    for given in settings:
        with pytest.raises(ValueError, match="layers") as caught:
            make_trainer(MemoStrategy(**given), limit_val_batches=0).fit(model())
        assert "\n" not in str(caught.value)
    assert_usable_again()


def without_layers(settings: dict[str, Any], data: Tensor) -> dict[str, Any]:
    trainer = make_trainer(MemoStrategy(**settings), devices=2, use_distributed_sampler=False, limit_val_batches=0)
    trainer.fit(module := Nothing(), DataLoader(data[dist.get_rank() :: 2], batch_size=2))
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in module.state_dict().items()}
    return {name: t.cpu() for name, t in whole.items()}


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}])
def test_models_without_layers_in_several_processes(settings: dict[str, Any]) -> None:
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))
    make_trainer("auto", limit_val_batches=0).fit(expected := Nothing(), DataLoader(data, batch_size=4))
    for found in run_in_processes(2, without_layers, settings, data):
        torch.testing.assert_close(found, dict(expected.state_dict()))  # other sums of gradients
