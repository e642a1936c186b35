"""Sharded checkpoints: exact in every topology, and whole or not there when a process dies."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities.consolidate_checkpoint import _load_distributed_checkpoint
from support.disks import mounted
from support.draws import REPEATABLE, draws
from support.mutations import damage_folder
from support.pickles import Touches
from support.processes import Group, ProcessError, run_in_processes
from support.samples.checkpoints import STEPS, checkpoint_of, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memo.parallel.open_checkpoint import FolderReader
from lightning_memo.parallel.ranks import on_every_rank, on_first_rank
from lightning_memo.parallel.sharded_checkpoint import (
    existing_checkpoint,
    load_sharded,
    optimizer_state,
    remove_checkpoint,
    save_sharded,
    sharded_model_state,
)

VOCABULARY = 33  # cut unevenly, as are the 11 rows of each half of the MLP's 22
TOPOLOGIES = {
    # processes, data x context, tensor, how
    "one": (1, 1, 1, None),
    "tp2": (2, 1, 2, None),
    "zero2-dp2": (2, 2, 1, "shard"),
    "zero0-dp2": (2, 2, 1, "replicate"),
    "zero3-dp4": (4, 4, 1, "shard"),
    "zero3-dp2-tp2": (4, 2, 2, "shard"),
    "zero0-dp2-tp2": (4, 2, 2, "replicate"),
}


class Wrapped(torch.nn.Module):
    """As in a LightningModule: names have a prefix, and there is a buffer beside the model."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32, hidden: int = 16) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=22, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, tie_word_embeddings=tied, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).to(dtype)
        self.register_buffer("scale", torch.full((3,), 0.5))


def build(topology: str = "one", seed: int = 0, frozen: bool = False, **changes):
    """A model with random weights, sharded, and its optimizer in two groups."""
    torch.manual_seed(seed)
    module = Wrapped(**changes)
    if frozen:
        module.model.model.embed_tokens.weight.requires_grad_(False)
    _, data, tensor, how = TOPOLOGIES[topology]
    if data * tensor > 1:
        shard(module.model, init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp_cp", "tp")), how)
    weights = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in weights if p.ndim >= 2]}, {"params": [p for p in weights if p.ndim < 2], "lr": 3e-3}],
        lr=1e-2, betas=(0.8, 0.9),
    )  # fmt: skip
    return module, optimizer


def train(module, optimizer, steps: int = STEPS, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, 8), generator=generator)
        module.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def full(value):
    """The whole tensor, a copy of it; other values as they are."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def everything(module, optimizer):
    """All weights and all of the optimizer's state by names, unsharded."""
    table = {name: full(value) for name, value in module.state_dict().items()}
    state = optimizer_state(module, optimizer)
    table |= {(name, key): full(value) for name, values in state["state"].items() for key, value in values.items()}
    return table, state["param_groups"]


def assert_same(actual, expected) -> None:
    (table, groups), (expected_table, expected_groups) = actual, expected
    assert groups == expected_groups
    assert table.keys() == expected_table.keys()
    for name, value in expected_table.items():
        assert table[name].dtype == value.dtype, name
        assert torch.equal(table[name], value), name


def save(topology, path, rest=None, trained=STEPS, **changes):
    module, optimizer = build(topology, **changes)
    train(module, optimizer, trained)
    save_sharded(checkpoint_of(module, optimizer, **(rest or {})), path)
    return everything(module, optimizer)


def load(topology, path, trained=0, strict=True, **changes):
    """Loads over other weights, and other optimizer state."""
    module, optimizer = build(topology, seed=1, **changes)
    train(module, optimizer, trained, seed=8)
    rest = load_sharded(path, module, [optimizer], strict)
    return everything(module, optimizer), rest


def load_and_go_on(topology, path):
    """Loads, and trains one more step."""
    module, optimizer = build(topology, seed=1)
    rest = load_sharded(path, module, [optimizer])
    loaded = everything(module, optimizer)
    train(module, optimizer, 1, seed=9)
    return loaded, rest, everything(module, optimizer)[0]


def relay(topology, source, target):
    """Loads, and saves what was loaded."""
    module, optimizer = build(topology, seed=2)
    load_sharded(source, module, [optimizer])
    save_sharded(checkpoint_of(module, optimizer), target)


def run(topology, function, *args, **kwargs):
    """Rank 0's answer."""
    size = TOPOLOGIES[topology][0]
    if size == 1:
        return function(topology, *args, **kwargs)
    return run_in_processes(size, of_first, function, topology, *args, **kwargs)[0]


def of_first(function, *args, **kwargs):
    """Rank 0's answer, and of other ranks none, which would be sent for nothing."""
    answer = function(*args, **kwargs)
    return answer if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """Saves in a topology, once; the checkpoint, which no test may change, and what it is of."""

    @functools.cache
    def saved(topology, **changes):
        path = tmp_path_factory.mktemp("saved") / "c.ckpt"
        return path, run(topology, save, path, **changes)

    return saved


@pytest.mark.slow
@pytest.mark.parametrize("source", TOPOLOGIES)
def test_every_topology_loads_what_any_saved(saved_by, source):
    path, saved = saved_by(source)
    after = {}
    for target in TOPOLOGIES:
        loaded, rest, after[target] = run(target, load_and_go_on, path)
        assert_same(loaded, saved)
        assert rest == {"global_step": STEPS, "hyper_parameters": {"a": [1, 2]}}
    for target, state in after.items():  # and training goes on alike
        for name, value in after["one"].items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5, msg=f"{target} {name}")


def test_state_survives_a_tour_of_topologies(saved_by, tmp_path):
    tour = ["zero3-dp2-tp2", "zero3-dp4", "one", "tp2", "zero0-dp2-tp2", "zero2-dp2"]
    path, saved = saved_by(tour[0])
    for number, topology in enumerate(tour[1:]):
        run(topology, relay, path, path := tmp_path / str(number))
    assert_same(run("one", load, path)[0], saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.bfloat16}, {"tied": True}, {"frozen": True}, {"trained": 0}],
    ids=["bf16", "tied", "frozen", "unstepped"],
)
@pytest.mark.parametrize("target", ["one", "zero3-dp4", "zero0-dp2-tp2"])
def test_special_models(saved_by, changes, target):
    model = {key: value for key, value in changes.items() if key != "trained"}
    path, saved = saved_by("zero3-dp2-tp2", **changes)
    has_state = {name[0] for name in saved[0] if isinstance(name, tuple)}
    assert bool(has_state) == ("trained" not in changes)
    assert ("model.model.embed_tokens.weight" in has_state) == (has_state != set() and "frozen" not in changes)
    loaded, _ = run(target, load, path, trained=1, **model)
    assert_same(loaded, saved)


@pytest.fixture(scope="module")
def saved_file(tmp_path_factory):
    """A file that no test may change, and what it is of."""
    path = tmp_path_factory.mktemp("saved") / "c.ckpt"
    return path, save_file(path)


def save_file(path):
    module, optimizer = build()
    train(module, optimizer)
    rest = {"global_step": STEPS}
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], **rest}, path)
    return everything(module, optimizer)


@pytest.mark.parametrize("target", TOPOLOGIES)
def test_file_of_one_process(saved_file, target):
    path, saved = saved_file
    loaded, rest = run(target, load, path, trained=1)
    assert_same(loaded, saved)
    assert rest == {"global_step": STEPS}


def test_replicated_weights_are_written_once(saved_by):
    one, replicated = (
        sum(file.stat().st_size for file in saved_by(topology)[0].glob("*.distcp")) for topology in ("one", "zero0-dp2")
    )
    assert replicated < 1.1 * one


def test_lightning_consolidates(saved_by):
    path, saved = saved_by("zero3-dp2-tp2")
    checkpoint = _load_distributed_checkpoint(path)
    assert checkpoint["global_step"] == STEPS
    for name, value in checkpoint["state_dict"].items():
        assert torch.equal(value, saved[0][name])
    name = "model.lm_head.weight"
    assert torch.equal(checkpoint["optimizer_0"]["state"][name]["exp_avg"], saved[0][name, "exp_avg"])


# ---- what is there when a process dies


def die_at(number, folder):
    """Has this process killed at its operation of a number on what lies in a folder."""
    count = itertools.count()

    def look(event, args):
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
        changes |= event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(folder) in str(args) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def small(epoch):
    """A checkpoint that takes no time, and what it is of."""
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    return module, optimizer, checkpoint_of(module, optimizer, epoch=epoch)


def epoch_in(path):
    module, optimizer, _ = small("read over")
    return load_sharded(path, module, [optimizer])["epoch"]


def save_until(folder, at):
    *_, checkpoint = small("new")
    die_at(at, folder)
    save_sharded(checkpoint, folder / "last.ckpt")


def leave_old(folder, kind):
    """The old checkpoint: none, a folder, a file, a link; or what a kill between the two renames left."""
    module, optimizer, checkpoint = small("old")
    if kind == "file":
        whole = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": "old"}
        torch.save(whole, folder / "last.ckpt")
    elif kind != "none":
        save_sharded(
            checkpoint, folder / {"link": "step.ckpt", "previous": "last.previous.ckpt"}.get(kind, "last.ckpt")
        )
    if kind == "link":
        (folder / "last.ckpt").symlink_to("step.ckpt")


def killed(function, *args):
    """Runs a function in a copy of this process, which takes no time to start; whether it was killed."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(Exception):
            function(*args)
            os._exit(0)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*a save was interrupted")
@pytest.mark.parametrize("kind", ["none", "folder", "file", "link", "previous"])
def test_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path, kind):
    ends = []
    for at in itertools.count():
        folder = tmp_path / str(at)
        folder.mkdir()
        leave_old(folder, kind)
        if not killed(save_until, folder, at):
            break
        path = folder / "last.ckpt"
        if kind == "none" and not path.exists():
            with pytest.raises(FileNotFoundError, match="no such checkpoint"):
                existing_checkpoint(path)
            ends.append("none")
        else:
            ends.append(epoch_in(path))
        save_sharded(small("next")[-1], path)  # succeeds, and sweeps
        assert epoch_in(path) == "next"
        assert {path.name for path in folder.iterdir()} == {"last.ckpt"} | ({"step.ckpt"} if kind == "link" else set())
    first = "none" if kind == "none" else "old"
    assert ends == [first] * ends.count(first) + ["new"] * ends.count("new")
    assert ends.count(first) > 5 and (ends[-1] == "new" or kind == "none")
    assert epoch_in(folder / "last.ckpt") == "new"
    if kind == "link":
        assert epoch_in(folder / "step.ckpt") == "old"


def test_a_note_tells_of_the_predecessor(tmp_path):
    save_sharded(small("old")[-1], tmp_path / "last.previous.ckpt")
    with pytest.warns(UserWarning, match=r"a save was interrupted; taking .*last\.previous\.ckpt"):
        assert epoch_in(tmp_path / "last.ckpt") == "old"


def save_and_die(path, rank, at):
    if dist.get_rank() == rank:
        die_at(at, path.parent)
    save("zero2-dp2", path, rest={"epoch": "new"}, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "at"), [(0, 2), (1, 0)], ids=["first rank", "other rank"])
def test_kill_of_one_rank_leaves_the_old_checkpoint(tmp_path, rank, at):
    saved = run("zero2-dp2", save, tmp_path / "last.ckpt", rest={"epoch": "old"})
    group = Group(2)
    with pytest.raises(ProcessError, match=f"rank {rank}\nthe process ended"):
        group.run(save_and_die, tmp_path / "last.ckpt", rank, at)
    loaded, rest = run("tp2", load, tmp_path / "last.ckpt")
    assert rest["epoch"] == "old"
    assert_same(loaded, saved)


def save_without_room(path, full_rank):
    """One rank's files cannot grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    module, optimizer = build("zero2-dp2", seed=4)
    train(module, optimizer)
    if dist.get_rank() == full_rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        save_sharded(checkpoint_of(module, optimizer, epoch="new"), path)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_fails_all(tmp_path, rank):
    saved = run("zero2-dp2", save, tmp_path / "last.ckpt")
    errors = run_in_processes(2, save_without_room, tmp_path / "last.ckpt", rank)
    for kind, message in errors:
        assert kind in ("OSError", "WriteError")
        assert message.startswith(f"rank {rank}: "), message
        assert message.endswith("last.ckpt cannot be written (File too large): raise the limit of the size of files "
                                "(ulimit -f), or give a folder on another disk")  # fmt: skip
    assert_same(run("one", load, tmp_path / "last.ckpt")[0], saved)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def error_of_save(path, **changes):
    module, optimizer = build("zero2-dp2", **changes)
    try:
        save_sharded(checkpoint_of(module, optimizer), path)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    with mounted(tmp_path / "disk", "1m") as disk:
        saved = run("zero2-dp2", save, disk / "last.ckpt")
        errors = run_in_processes(2, error_of_save, disk / "last.ckpt", hidden=4096)
        for kind, message in errors:
            assert kind in ("OSError", "WriteError")
            assert "last.ckpt cannot be written (No space left on device): free space there, or give a" in message
        assert [path.name for path in disk.iterdir()] == ["last.ckpt"]
        assert_same(run("one", load, disk / "last.ckpt")[0], saved)
        saved = run("zero2-dp2", save, disk / "last.ckpt", seed=3)
        assert_same(run("one", load, disk / "last.ckpt")[0], saved)


def save_on_disks_of_their_own(path):
    """The first rank does not see what the others wrote."""
    module, optimizer = build("zero2-dp2")
    save = dcp.save

    def save_and_hide(*args, **kwargs):
        metadata = save(*args, **kwargs)
        if dist.get_rank() == 0:
            next((path.parent / ".unfinished").rglob("__1_*")).unlink()
        return metadata

    with mock.patch.object(dcp, "save", save_and_hide):
        save_sharded(checkpoint_of(module, optimizer), path)


def test_a_file_system_that_is_not_shared_is_refused(tmp_path):
    with pytest.raises(ProcessError) as failure:
        run_in_processes(2, save_on_disks_of_their_own, tmp_path / "c.ckpt")
    assert len(failure.value.errors) == 2
    for text in failure.value.errors.values():
        assert re.search(r"incomplete checkpoint: __1_0\.distcp is missing; all processes must write to one", text)
    assert not list(tmp_path.iterdir())


def errors_of(function, failing, error):
    def work():
        if dist.get_rank() == failing:
            raise error
        return dist.get_rank()

    try:
        return function(work)
    except Exception as raised:
        return type(raised).__name__, str(raised)


def test_ranks_fail_together():
    run = functools.partial(run_in_processes, 2, errors_of)
    assert run(on_every_rank, None, None) == [0, 1]
    assert run(on_first_rank, None, None) == [0, 0]
    full, wrong = OSError(28, "No space left on device", "file"), TypeError("no")
    assert run(on_every_rank, 1, full)[0] == ("OSError", "rank 1: file: No space left on device")
    assert run(on_every_rank, 0, wrong) == [("TypeError", "no"), ("RuntimeError", "rank 0: TypeError: no")]
    assert run(on_first_rank, 0, ValueError("x")) == [("ValueError", "x"), ("ValueError", "rank 0: x")]
    assert run(on_first_rank, 1, wrong) == [0, 0]


# ---- bad input


def test_other_folders_are_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is a folder of other things"):
        save("one", tmp_path)
    with pytest.raises(ValueError, match="local path"):
        save("one", "s3://bucket/last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def damage(folder, kind):
    part = next(folder.glob("*.distcp"))
    if kind == "short":
        os.truncate(part, part.stat().st_size // 2)
    elif kind == "metadata":
        os.truncate(folder / ".metadata", 20)
    else:
        {"part": part, "rest": folder / "meta.pt", "table": folder / ".metadata"}[kind].unlink()


@pytest.mark.parametrize("kind", ["short", "metadata", "part", "rest", "table"])
def test_incomplete_checkpoints_are_refused(saved_by, tmp_path, kind):
    shutil.copytree(saved_by("one")[0], tmp_path / "c.ckpt")
    damage(tmp_path / "c.ckpt", kind)
    with pytest.raises(ValueError, match="incomplete checkpoint") as error:
        load("one", tmp_path / "c.ckpt")
    assert "\n" not in str(error.value)


def parts_of(path):
    """What a checkpoint of a small model holds."""
    module, optimizer, _ = small("read over")
    for p in module.parameters():
        p.data.fill_(-1.0)
    rest = load_sharded(path, module, [optimizer], weights_only=False)
    return module.state_dict(), optimizer.state_dict()["state"], rest


def test_random_damage_is_refused_or_harmless(tmp_path):
    seed = 1 if REPEATABLE else random.SystemRandom().randrange(2**32)
    chance, refused = random.Random(seed), 0
    save_sharded(small("whole")[-1], tmp_path / "whole.ckpt")
    weights, states, rest = parts_of(tmp_path / "whole.ckpt")
    for _ in range(draws(40)):
        shutil.rmtree(tmp_path / "last.ckpt", ignore_errors=True)
        shutil.copytree(tmp_path / "whole.ckpt", tmp_path / "last.ckpt")
        done = f"{damage_folder(tmp_path / 'last.ckpt', chance)}, seed {seed}"
        try:
            read, read_states, read_rest = parts_of(tmp_path / "last.ckpt")
        except ValueError as error:
            message, refused = str(error), refused + 1
            assert message.startswith(f"{tmp_path / 'last.ckpt'}") and "\n" not in message, done
            assert f"resume from {tmp_path / 'whole.ckpt'}" in message, done
        else:
            assert read_rest == rest, done
            assert all(torch.equal(weights[name], value) for name, value in read.items()), done
            for number, state in states.items():
                assert all(torch.equal(value, read_states[number][name]) for name, value in state.items()), done
    assert refused > 0.8 * draws(40)
    print(f"{refused} of {draws(40)} refused in one line, the others hold what was saved")  # noqa: T201


@pytest.mark.parametrize("at", [0, 1])
def test_all_ranks_hear_of_damage_that_one_of_them_finds(saved_by, tmp_path, at):
    path = tmp_path / "c.ckpt"
    shutil.copytree(saved_by("zero3-dp4")[0], path)
    part = sorted(path.glob("*.distcp"))[at]
    with part.open("r+b") as file:
        file.seek(part.stat().st_size // 2)
        file.write(b"\x55" * 8)
    for kind, text in run_in_processes(2, errors_of_load, "zero2-dp2", path):
        assert kind in ("DamagedCheckpoint", "ValueError") and "\n" not in text
        assert f"{part.name} has other bytes than those that were written; no other checkpoint is in" in text


def test_folders_without_checksums_are_read(saved_by, tmp_path):
    path, saved = saved_by("zero3-dp4")
    shutil.copytree(path, tmp_path / "old.ckpt")
    (tmp_path / "old.ckpt" / "checksums.json").unlink()
    assert_same(run("tp2", load, tmp_path / "old.ckpt")[0], saved)


def errors_of_load(topology, path, **changes):
    module, optimizer = build(topology, **changes)
    try:
        load_sharded(path, module, [optimizer])
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("topology", ["one", "zero2-dp2"])
def test_other_models_are_refused(tmp_path, topology):
    save("one", tmp_path / "c.ckpt")
    size = TOPOLOGIES[topology][0]

    def refusal(path, **changes):
        if size == 1:
            return errors_of_load(topology, path, **changes)
        return run_in_processes(size, errors_of_load, topology, path, **changes)[-1]

    for path, changes, expected, message in [
        ("c.ckpt", {"hidden": 32}, "ValueError", "[33, 16] in the checkpoint and [33, 32] in the model"),
        ("c.ckpt", {"frozen": True}, "ValueError", "groups of [16, 5] parameters in the checkpoint, of [15, 5] here"),
        ("missing.ckpt", {}, "FileNotFoundError", "no such checkpoint"),
    ]:
        kind, text = refusal(tmp_path / path, **changes)
        assert kind == expected and message in text and "\n" not in text


def test_missing_and_unexpected_names(tmp_path):
    module, optimizer = build()
    checkpoint = checkpoint_of(module, optimizer)
    checkpoint["state_dict"]["surplus"] = checkpoint["state_dict"].pop("model.lm_head.weight")
    save_sharded(checkpoint, tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match=r"model\.lm_head\.weight of the model not in .*, surplus of the checkpoint"):
        load_sharded(tmp_path / "c.ckpt", module, [optimizer])
    other, optimizer = build(seed=1)
    head = other.model.lm_head.weight.clone()
    load_sharded(tmp_path / "c.ckpt", other, [optimizer], strict=False)
    assert torch.equal(other.model.lm_head.weight, head)
    assert torch.equal(other.model.model.embed_tokens.weight, module.model.model.embed_tokens.weight)


def test_weights_alone(tmp_path):
    module, optimizer = build()
    save_sharded({"state_dict": sharded_model_state(module), "epoch": 1}, tmp_path / "c.ckpt")
    other, optimizer = build(seed=1)
    assert load_sharded(tmp_path / "c.ckpt", other) == {"epoch": 1}
    assert torch.equal(other.model.lm_head.weight, module.model.lm_head.weight)
    with pytest.raises(ValueError, match="holds no optimizer_0"):
        load_sharded(tmp_path / "c.ckpt", other, [optimizer])


def test_foreign_optimizer_is_refused():
    module, _ = build()
    with pytest.raises(ValueError, match="not the model's"):
        optimizer_state(module, torch.optim.AdamW(copy.deepcopy(module).parameters()))


def test_files_that_are_no_checkpoints(tmp_path):
    path = tmp_path / "c.ckpt"
    for content in (b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"no checkpoint|weights_only") as error:
            load("one", path)
        assert "\n" not in str(error.value)
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="holds a state_dict"):
        load("one", path)
    torch.save({"state_dict": {}, "path": Path("x")}, path)
    with pytest.raises(ValueError, match="weights_only=False"):
        load("one", path)


def test_remove(tmp_path):
    save("one", tmp_path / "a.ckpt")
    save_file(tmp_path / "b.ckpt")
    (tmp_path / "c.ckpt").symlink_to("a.ckpt")
    remove_checkpoint(tmp_path / "c.ckpt")
    assert load("one", tmp_path / "a.ckpt")
    for name in ("a.ckpt", "b.ckpt", "missing.ckpt"):
        remove_checkpoint(tmp_path / name)
    assert not list(tmp_path.iterdir())


# ---- checkpoints of strangers


def in_metadata(change):
    """Change the metadata of a folder, pickled anew."""

    def plant(folder, touched):
        with (folder / ".metadata").open("rb") as file:
            metadata = pickle.load(file)
        replace_metadata(folder, pickle.dumps(change(metadata, touched)))

    return plant


def replace_metadata(folder, content):
    """Replace the metadata, and remove the checksums, as whoever plants something would."""
    (folder / ".metadata").write_bytes(content)
    (folder / "checksums.json").unlink()


def in_descriptor(metadata, touched):
    metadata.state_dict_metadata["model.lm_head.weight"] = Touches(touched)
    return metadata


def in_path(metadata, touched):
    metadata.planner_data["more"] = ("state_dict", Touches(touched))
    return metadata


def in_place(metadata, touched):
    metadata.storage_meta.checkpoint_id = Touches(touched)
    return metadata


def by_attribute(folder, touched):
    """`getattr`, by which members of enumerations are pickled, leads from a class to every function."""
    calls = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntRV__globals__\ntR."
    replace_metadata(folder, b"cbuiltins\ngetattr\n(" + calls)


def by_older_protocol(folder, touched):
    replace_metadata(folder, pickle.dumps(Touches(touched), protocol=0))


PLANTED = {
    "metadata": in_metadata(lambda metadata, touched: Touches(touched)),
    "descriptor": in_metadata(in_descriptor),
    "path": in_metadata(in_path),
    "place": in_metadata(in_place),
    "attribute": by_attribute,
    "protocol": by_older_protocol,
}


def planted_entries(path, touched, where):
    """Save a checkpoint in which an entry that is no tensor is a pickle of another object."""
    module, optimizer = build()
    checkpoint = checkpoint_of(module, optimizer)
    if where == "weight":
        checkpoint["state_dict"]["model.lm_head.weight"] = Touches(touched)
    elif where == "group":
        checkpoint["optimizer_states"][0]["param_groups"][0]["note"] = Touches(touched)
    else:
        parameter = next(iter(checkpoint["optimizer_states"][0]["param_groups"][0]["params"]))
        checkpoint["optimizer_states"][0]["state"][parameter] = {"step": Touches(touched)}
    save_sharded(checkpoint, path)


@pytest.mark.parametrize("where", PLANTED)
def test_metadata_of_strangers_run_no_code(saved_by, tmp_path, where):
    shutil.copytree(saved_by("one")[0], tmp_path / "c.ckpt")
    touched = tmp_path / "touched"
    PLANTED[where](tmp_path / "c.ckpt", str(touched))
    with pytest.raises(ValueError, match=r"weights_only=|damaged or incomplete checkpoint") as error:
        load("one", tmp_path / "c.ckpt")
    assert "\n" not in str(error.value) and str(tmp_path / "c.ckpt") in str(error.value)
    assert not touched.exists()


@pytest.mark.parametrize("where", ["weight", "group", "state"])
def test_entries_of_strangers_run_no_code(tmp_path, where):
    path, touched = tmp_path / "c.ckpt", tmp_path / "touched"
    planted_entries(path, str(touched), where)
    with pytest.raises(ValueError, match=r"holds more than weights_only=None reads") as error:
        load("one", path)
    assert "\n" not in str(error.value) and not touched.exists()


def test_whoever_trusts_a_folder_reads_all_of_it(tmp_path):
    path, touched = tmp_path / "c.ckpt", tmp_path / "touched"
    planted_entries(path, str(touched), "group")
    module, optimizer = build(seed=1)
    load_sharded(path, module, [optimizer], weights_only=False)
    assert touched.exists()
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.storage_meta.modules = [Touches(str(tmp_path / "too"))]
    replace_metadata(path, pickle.dumps(metadata))
    load_sharded(path, module, weights_only=False)
    assert (tmp_path / "too").exists()


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd"])
def test_files_outside_of_the_folder_are_not_read(saved_by, tmp_path, name):
    shutil.copytree(saved_by("one")[0], tmp_path / "c.ckpt")
    shutil.copytree(tmp_path / "c.ckpt", tmp_path / "other")

    def elsewhere(metadata, touched):
        for part in metadata.storage_data.values():
            part.relative_path = name
        return metadata

    in_metadata(elsewhere)(tmp_path / "c.ckpt", "")
    with pytest.raises(ValueError, match="is not a file of the folder"):
        load("one", tmp_path / "c.ckpt")


def refused(reader):
    try:
        reader.read_metadata()
    except ValueError as error:
        return str(error)
    return None


def test_damaged_metadata_are_one_line(saved_by, tmp_path):
    shutil.copytree(saved_by("one")[0], tmp_path / "c.ckpt")
    file, draw = tmp_path / "c.ckpt" / ".metadata", random.Random(0)
    whole = file.read_bytes()
    read = 0
    for _ in range(draws(300)):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 4))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(bytes(data[: draw.choice((len(data), draw.randrange(len(data))))]))
        message = refused(FolderReader(tmp_path / "c.ckpt", None))
        read += message is None
        assert message is None or ("\n" not in message and str(tmp_path / "c.ckpt") in message)
    assert read < draws(300)
