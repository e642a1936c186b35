"""Every wrong setting and unusable input is refused in one clear line, and the process stays usable."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from support import warm
from support.families import PlainBlock, PlainModel, make_batch
from support.paths import ROOT
from support.samples.messages import assert_one_line
from support.trainer_harness import (
    LanguageModel,
    batches,
    copy_threads,
    fit,
    forwards,
    make_trainer,
    mixing_model,
    plain,
)
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")


# ---- settings


SETTINGS = {
    "alpha too large": ({"alpha": 1.5}, ("alpha=1.5", "0.0 to 1.0", '"auto"')),
    "alpha negative": ({"alpha": -0.1}, ("alpha=-0.1", "0.0 to 1.0")),
    "alpha nan": ({"alpha": float("nan")}, ("alpha=nan", "0.0 to 1.0")),
    "alpha text": ({"alpha": "x"}, ("alpha='x'", "0.0 to 1.0")),
    "alpha switch": ({"alpha": True}, ("alpha=True", "0.0 to 1.0")),
    "alpha none": ({"alpha": None}, ("alpha=None", "0.0 to 1.0")),
    "gone": ({"check_restored": True}, ("check_restored=True is no setting any more", "leave it out")),
    "stream": ({"stream_from_host": "all"}, ("stream_from_host='all'", '"hidden"', '"model"')),
    "attention": ({"attention": "magic"}, ("attention='magic'", '"sdpa"', '"flash_attn"')),
    "also gone": ({"context_parallel_method": "usp"}, ("context_parallel_method='usp'", "set ulysses_size")),
    "context_parallel_size": ({"context_parallel_size": -2}, ("context_parallel_size=-2", "at least 1")),
    "tensor_parallel_size": ({"tensor_parallel_size": 1.5}, ("tensor_parallel_size=1.5", "at least 1")),
    "parallel text": ({"tensor_parallel_size": "auto"}, ("tensor_parallel_size='auto'", "at least 1")),
    "zero_stage": ({"zero_stage": 4}, ("zero_stage=4", "0, 1, 2 or 3")),
    "ulysses_size": (
        {"context_parallel_size": 4, "ulysses_size": 3},
        ("ulysses_size=3", "does not divide", "context_parallel_size=4"),
    ),
    "sequence_parallel": ({"sequence_parallel": 1}, ("sequence_parallel=1", "True or False")),
    "plan_memory": ({"plan_memory": "yes"}, ("plan_memory='yes'", "True or False")),
    "device_memory": ({"device_memory": "lots"}, ("device_memory='lots'", "120GiB")),
    "device_memory unit": ({"device_memory": "5 GiBs"}, ("device_memory='5 GiBs'", "120GiB")),
    "device_memory in bytes": ({"device_memory": 40}, ("device_memory=40", 'did you mean "40GiB"')),
    "host_memory in bytes": ({"host_memory": "40"}, ("host_memory='40'", 'did you mean "40GiB"')),
    "device_memory zero": ({"device_memory": 0}, ("device_memory=0", "120GiB")),
    "host_memory": ({"host_memory": "-1GiB"}, ("host_memory='-1GiB'", "120GiB")),
    "host_memory float": ({"host_memory": 1.5}, ("host_memory=1.5", "120GiB")),
    "slice_tokens": ({"slice_tokens": 0}, ("slice_tokens=0", "128K or 1M")),
    "slice_tokens text": ({"slice_tokens": "few"}, ("slice_tokens='few'", '128K or 1M, or "auto"')),
    "layers": ({"layers": ""}, ("layers=''", "ModuleList")),
    "no names of layers": ({"layers": []}, ("layers=[]", "a list of such names")),
    "layers in a list": ({"layers": ["blocks", 2]}, ("layers=2", "a list of such names")),
    "plan": ({"plan": ""}, ("plan=''", "saved plan")),
}


@pytest.mark.parametrize(("settings", "words"), SETTINGS.values(), ids=SETTINGS)
def test_settings(settings, words):
    """A wrong setting is refused when it is given, with the allowed values."""
    with pytest.raises(ValueError, match="=") as caught:
        MemoStrategy(**settings)
    assert_one_line(caught.value, *words)


@pytest.mark.parametrize(
    ("attention", "package"), [("flash_attn", "flash_attn"), ("transformer_engine", "transformer_engine")]
)
def test_kernel_that_is_not_installed(monkeypatch, attention, package):
    """A missing package is named, with the command that installs it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(ValueError, match="not installed") as caught:
        MemoStrategy(attention=attention)
    assert_one_line(caught.value, attention, "pip install", 'attention="auto"')


SIZES = {
    "context": (
        {"context_parallel_size": 2},
        ("context_parallel_size=2", "does not divide the 1 processes", "devices"),
    ),
    "tensor": ({"tensor_parallel_size": 4}, ("tensor_parallel_size=4", "does not divide the 1 processes", "devices")),
    "all": (
        {"context_parallel_size": 2, "tensor_parallel_size": 2},
        ("context_parallel_size=2 x tensor_parallel_size=2 = 4", "does not divide the 1 processes"),
    ),
}


@pytest.mark.parametrize(("settings", "words"), SIZES.values(), ids=SIZES)
def test_sizes_that_do_not_make_up_the_processes(settings, words):
    """Sizes that do not multiply to the number of processes are refused before anything is built."""
    with pytest.raises(ValueError, match="parallel_size") as caught:
        fit(MemoStrategy(**settings))
    assert_one_line(caught.value, *words)


def test_precision():
    """A precision that is unknown is refused, with those that are known."""
    with pytest.raises(ValueError, match="precision") as caught:
        make_trainer(MemoStrategy(), precision="7-bit")
    assert_one_line(caught.value, "7-bit", "bf16-mixed")


def test_float16():
    """Lightning itself turns 16-mixed into bf16-mixed on a CPU, and would accept 16-true."""
    with pytest.raises(ValueError, match="16-true") as caught:
        make_trainer(MemoStrategy(), precision="16-true")
    assert_one_line(caught.value, 'precision="16-true": give one of 32-true, 64-true, bf16-true, bf16-mixed')
    assert make_trainer(MemoStrategy(), precision="bf16-true").precision == "bf16-true"
    module = LanguageModel("llama")
    module.model.half()
    with pytest.raises(ValueError, match="float16") as caught:
        fit(MemoStrategy(), module)
    assert_one_line(caught.value, "layers run in float16", "bfloat16")


def test_a_folder_that_cannot_be_written():
    """A folder that cannot be written is refused before the first step."""
    Path("file").touch()
    trainer = make_trainer(MemoStrategy(), default_root_dir="file/folder")
    with pytest.raises(ValueError, match="memo_plan") as caught:
        trainer.fit(LanguageModel(), batches([make_batch(2, 16)]))
    assert_one_line(caught.value, "file/folder: memo_plan.json can't be written there", "default_root_dir")
    assert trainer.global_step == 0


def test_strategy_object_belongs_to_one_trainer():
    """A strategy object that belongs to another Trainer is refused; a new object works."""
    strategy = MemoStrategy(alpha=1.0)
    fit(strategy)
    for accelerator in ("cpu", "auto"):
        with pytest.raises(ValueError, match="one Trainer") as caught:
            Trainer(strategy=strategy, accelerator=accelerator)
        assert_one_line(caught.value, "make a new MemoStrategy")
    assert fit(MemoStrategy(alpha=1.0)).losses == plain().losses


@pytest.mark.slow
def test_other_namespace():
    """`pytorch_lightning.Trainer` refuses strategies of `lightning.pytorch`, and prints what to use."""
    pytest.importorskip("pytorch_lightning")
    script = (
        "import pytorch_lightning, lightning_memo\n"
        "try:\n"
        "    pytorch_lightning.Trainer(strategy=lightning_memo.MemoStrategy(), accelerator='cpu', devices=1)\n"
        "except Exception as error:\n"
        "    print(repr(str(error)))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([warm.tools() / "python", "-c", script], capture_output=True, text=True, env=env, check=True)
    assert_one_line(ValueError(ast.literal_eval(done.stdout)), "MemoStrategy", "needs lightning.pytorch.Trainer")


# ---- what is found while fitting


class Checkpointed(LanguageModel):
    """A model with gradient checkpointing of transformers."""

    def __init__(self):
        super().__init__("llama")
        self.model.gradient_checkpointing_enable()


class NoLayers(LanguageModel):
    def __init__(self):
        super().__init__(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))


class PassesObjects(LanguageModel):
    """Layers that give their hidden states to the next layer in an object."""

    class Block(PlainBlock):
        def forward(self, x):
            return SimpleNamespace(hidden=super().forward(x.hidden if isinstance(x, SimpleNamespace) else x))

    class Model(PlainModel):
        def forward(self, input_ids, labels):
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            logits = self.head(x.hidden)[:, :-1]
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    def __init__(self):
        super().__init__(lambda: self.Model([self.Block() for _ in range(4)]))

    @override
    def loss(self, batch):
        return self.model(**batch)


def left_padded(n=0):
    batch = make_batch(2, 16, padded=True, seed=n)
    return {name: t.flip(1) for name, t in batch.items()}


IN_FIT = {
    "no layers": (
        {"alpha": 0.5},
        NoLayers,
        None,
        ("NoLayers", "no nn.ModuleList", "put its layers into an nn.ModuleList"),
    ),
    "layers by a wrong name": ({"layers": "model.decoder"}, LanguageModel, None, ("model.decoder", "model.blocks")),
    "mixes tokens": (
        {"slice_tokens": 8, "stream_from_host": "attention"},
        lambda: LanguageModel(mixing_model),
        None,
        (
            "Mixing may not compute each token by itself outside attention: aten.mean computes along the tokens",
            'set stream_from_host="none"',
        ),
    ),
    "gradient checkpointing": ({}, Checkpointed, None, ("gradient_checkpointing_disable()", "alpha=0")),
    "host memory, alpha given": (
        {"alpha": 1.0, "host_memory": "1KiB"},
        LanguageModel,
        None,
        ("alpha=1", "host", "1.0 KiB", "raise host_memory"),
    ),
    "host memory, alpha auto": (
        {"host_memory": "1KiB", "device_memory": "400KiB"},
        LanguageModel,
        None,
        ("host", "1.0 KiB", "raise host_memory", "shorten the sequence"),
    ),
    "left padding": (
        {"slice_tokens": 8, "stream_from_host": "model"},
        lambda: LanguageModel("llama"),
        left_padded,
        ("not on the right", "padding_side"),
    ),
    "hidden states in an object": ({}, PassesObjects, None, ("SimpleNamespace", "hidden states")),
}


@pytest.mark.parametrize(("settings", "module", "batch", "words"), IN_FIT.values(), ids=IN_FIT)
def test_in_fit(settings, module, batch, words):
    """Mistakes that only the model or the data reveals are refused in fit, and the process stays usable."""
    module = module()
    data = None if batch is None else batches(batch(n) for n in range(4))
    trainer = make_trainer(MemoStrategy(**settings))
    with pytest.raises(ValueError, match=r"\w") as caught:
        trainer.fit(module, batches(make_batch(2, 16, seed=n) for n in range(4)) if data is None else data)
    assert_one_line(caught.value, *words)
    assert copy_threads() == []
    assert forwards(module) == []
    assert "RuntimeCallback" not in [type(callback).__name__ for callback in trainer.callbacks]
    assert fit(MemoStrategy(alpha=1.0), max_steps=2).losses == plain(max_steps=2).losses


def test_left_padding_in_a_later_batch():
    """A batch that cannot be trained is refused at any step."""
    data = batches([make_batch(2, 16), make_batch(2, 16, padded=True), left_padded()])
    with pytest.raises(ValueError, match="not on the right") as caught:
        fit(MemoStrategy(slice_tokens=8, stream_from_host="model"), LanguageModel("llama"), data)
    assert_one_line(caught.value, "padding_side")
    assert copy_threads() == []


class BackwardTwice(LanguageModel):
    """A second backward through the same graph."""

    def __init__(self, family):
        super().__init__(family)
        self.automatic_optimization = False

    @override
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)


class BackwardOfSome(BackwardTwice):
    """A backward for some of the weights only, which would have the gradients of all."""

    @override
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward(inputs=[self.model.model.norm.weight])


def test_partial_backward_slice_by_slice():
    with pytest.raises(RuntimeError, match="in one backward") as caught:
        fit(MemoStrategy(stream_from_host="model", slice_tokens=8), BackwardOfSome("llama"))
    assert_one_line(caught.value, 'use stream_from_host="hidden"')


def test_second_backward_slice_by_slice():
    """The gradients of a sequence that runs slice by slice are computed once, also in the step that is profiled."""
    with pytest.raises(RuntimeError, match="retain_graph") as caught:
        fit(MemoStrategy(stream_from_host="model", slice_tokens=8), BackwardTwice("llama"))
    assert_one_line(caught.value, "run a forward for each")
    assert copy_threads() == []


# ---- plans


def _merged(content, fields):
    nested = {name: _merged(content[name], value) for name, value in fields.items() if isinstance(value, dict)}
    return content | fields | nested


def changed(**fields):
    def change(content):
        return json.dumps(content | {name: _merged(content[name], value) for name, value in fields.items()})

    return change


PLANS = {
    "not JSON": (lambda plan: "hello", ("wrong.json", "not a plan", "plan.save()")),
    "empty": (lambda plan: "", ("wrong.json", "not a plan")),
    "cut short": (lambda plan: json.dumps(plan)[:200], ("wrong.json", "not a plan")),
    "other JSON": (lambda plan: "[1, 2]", ("wrong.json", "not a plan", "version")),
    "another version": (lambda plan: json.dumps(plan | {"version": 99}), ("wrong.json", "version is 99")),
    "field missing": (
        lambda plan: json.dumps({name: value for name, value in plan.items() if name != "swap"}),
        ("wrong.json", "swap is missing"),
    ),
    "too few tokens": (changed(swap={"storage": {"tokens": 1}}), ("wrong.json", "a range ends at token")),
    "text for a number": (changed(swap={"in_flight": "four"}), ("wrong.json", "swap.in_flight", "an integer")),
    "negative size": (changed(swap={"memory": {"slot": -1}}), ("wrong.json", "slot=-1")),
    "more than the host has": (changed(swap={"memory": {"host": 2**50}}), ("wrong.json", "host")),
}


@pytest.mark.parametrize(("content", "words"), PLANS.values(), ids=PLANS)
def test_plan_file(content, words):
    """A file that holds no plan, or a plan that needs too much, is refused in one line that names the file."""
    fit(MemoStrategy(alpha=1.0), max_steps=1).plan.save("plan.json")
    Path("wrong.json").write_text(content(json.loads(Path("plan.json").read_text())))
    with pytest.raises(ValueError, match=r"wrong\.json") as caught:
        fit(MemoStrategy(plan="wrong.json"))
    assert_one_line(caught.value, *words)
    assert copy_threads() == []
    assert fit(MemoStrategy(plan="plan.json")).losses == plain().losses


def test_plan_beyond_the_given_host_memory():
    """A plan that needs more host memory than `host_memory` allows is refused, not silently carried out."""
    fit(MemoStrategy(alpha=1.0), max_steps=1).plan.save("plan.json")
    with pytest.raises(ValueError, match="host") as caught:
        fit(MemoStrategy(plan="plan.json", host_memory="1KiB"))
    assert_one_line(caught.value, "plan.json", "1.0 KiB")


@pytest.mark.parametrize("path", ["missing.json", "."], ids=["missing", "folder"])
def test_plan_path(path):
    """A path that does not exist is named."""
    with pytest.raises(ValueError, match="no such file") as caught:
        fit(MemoStrategy(plan=path))
    assert_one_line(caught.value, path)
