"""Checkpoints of any topology become folders that Hugging Face reads, with the same logits."""

from __future__ import annotations

import json
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import HalfPrecision
from peft import AutoPeftModelForCausalLM, PeftModel
from support.pickles import Touches
from support.processes import run_in_processes
from support.samples.checkpoints import checkpoint_of, shard
from support.trainer_harness import LanguageModel, fit
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightning_memo import MemoStrategy
from lightning_memo.export import main
from lightning_memo.models import CausalLM
from lightning_memo.models.export_hugging_face import export_huggingface, gather_state
from lightning_memo.parallel.sharded_checkpoint import save_sharded

LLAMA = {
    "model_type": "llama", "vocab_size": 33, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "bos_token_id": None, "eos_token_id": 3,
}  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "gemma2": LLAMA | {"model_type": "gemma2"},
    "mixtral": LLAMA
    | {
        "model_type": "mixtral",
        "intermediate_size": 32,
        "num_local_experts": 4,
    },  # stored under other names than it has
}
IDS = torch.arange(12)[None]
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
PLANTED_LORA = {"megatron_config": {"hidden_size": 16}, "megatron_core": "planted"}


def trained(model, dtype=torch.float32, seed=0):
    """A module whose weights, an adapter's included, are not those that it starts with."""
    torch.manual_seed(seed)
    module = CausalLM(model)
    with HalfPrecision("bf16-true").module_init_context() if dtype == torch.bfloat16 else nullcontext():
        module.configure_model()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return module.eval()


def save_file(module, path):
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, path)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def export(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_file(tmp_path, capsys, name, dtype):
    module = trained({"config": MODELS[name]}, dtype)
    save_file(module, tmp_path / "c.ckpt")
    assert export(tmp_path / "c.ckpt", tmp_path / "out") == 0
    assert "without a tokenizer" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == dtype
    assert torch.equal(logits(model), logits(module.model))
    assert AutoConfig.from_pretrained(tmp_path / "out").use_cache
    assert not list(tmp_path.glob(".unfinished"))


def save_shards(model, path, folder):
    """In 4 processes; also writes a folder from the sharded model itself, and returns the logits of the whole one."""
    module = trained(model)
    whole = logits(module.model)
    shard(module.model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_cp", "tp")), "shard")
    optimizer = torch.optim.AdamW(module.parameters())
    save_sharded(checkpoint_of(module, optimizer, hyper_parameters=dict(module.hparams)), path)
    state = gather_state(module.model)
    assert (state is None) == (dist.get_rank() > 0)
    if state is not None:
        with pytest.raises(ValueError, match="the model is sharded: give the state_dict"):
            export_huggingface(module.model, folder)
        export_huggingface(module.model, folder, state)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_shards(tmp_path, name):
    expected = run_in_processes(4, save_shards, {"config": MODELS[name]}, tmp_path / "c.ckpt", tmp_path / "direct")[0]
    assert export(tmp_path / "c.ckpt", tmp_path / "out") == 0
    for folder in ("direct", "out"):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / folder)), expected)


@pytest.fixture
def adapted(tmp_path):
    """A LoRA module on a saved base model, and its checkpoint."""
    trained({"config": LLAMA}, seed=1).model.save_pretrained(tmp_path / "base")
    module = trained({"path": str(tmp_path / "base"), "lora": LORA})
    save_file(module, tmp_path / "c.ckpt")
    return module


def test_adapter(tmp_path, adapted):
    assert export(tmp_path / "c.ckpt", tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == LORA["r"]
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "config.json").exists()
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(model), logits(adapted.model))


def save_tokenizer(folder):
    backend = Tokenizer(WordLevel({"[UNK]": 0, "[EOS]": 3, "one": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]").save_pretrained(folder)


def test_adapter_of_other_positions(tmp_path, adapted, capsys):
    """PEFT loads the base as it was saved: its configuration lies beside the adapter, and a warning has the code."""
    longer = {"rope_scaling": "yarn", "max_position_embeddings": 4 * 2048}
    module = trained({"path": str(tmp_path / "base"), "lora": LORA, **longer})
    save_file(module, tmp_path / "c.ckpt")
    save_tokenizer(tmp_path / "base")
    with pytest.warns(UserWarning, match="positions that its base model was not saved with") as told:
        assert export(tmp_path / "c.ckpt", tmp_path / "out") == 0
    (line,) = [str(each.message) for each in told if "positions" in str(each.message)]
    code = re.search(r"AutoModelForCausalLM\.from_pretrained\(.*\)\)", line)[0]
    base = eval(code, {"AutoModelForCausalLM": AutoModelForCausalLM, "AutoConfig": AutoConfig})
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    assert model.config.max_position_embeddings == 4 * 2048
    assert torch.equal(logits(model), logits(module.model))
    assert not torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")), logits(module.model))
    assert "with the tokenizer of the model's folder" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 3


def test_merged_adapter(tmp_path, adapted):
    assert export(tmp_path / "c.ckpt", tmp_path / "out", "--merge") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(model), logits(adapted.model), rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(model), logits(adapted.model.merge_and_unload()))


def test_state_of_another_place_is_merged(tmp_path, adapted):
    state = {name: value.clone() for name, value in adapted.model.state_dict().items()}
    other = trained({"path": str(tmp_path / "base"), "lora": LORA}, seed=5)
    export_huggingface(other.model, tmp_path / "out", state, merge=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(model), logits(adapted.model.merge_and_unload()))


def refusal(capsys, *arguments):
    capsys.readouterr()
    assert export(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err


def test_bad_input(tmp_path, capsys):
    checkpoint, out = tmp_path / "c.ckpt", tmp_path / "out"
    save_file(trained({"config": LLAMA}), checkpoint)
    assert "no such checkpoint" in refusal(capsys, tmp_path / "missing.ckpt", out)
    assert "--help" in refusal(capsys, checkpoint)
    assert "no LoRA adapter" in refusal(capsys, checkpoint, out, "--merge")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    assert "not a checkpoint of lightning_memo.models.CausalLM" in refusal(capsys, tmp_path / "other.ckpt", out)
    checkpoint.write_bytes(b"not a checkpoint")
    assert "checkpoint" in refusal(capsys, checkpoint, out)
    assert not out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    for taken in (tmp_path / "full", checkpoint):
        assert "exists already" in refusal(capsys, checkpoint, taken)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_adapter_of_random_weights_needs_merging(tmp_path, capsys):
    module = trained({"config": LLAMA, "lora": LORA})
    save_file(module, tmp_path / "c.ckpt")
    assert "use --merge" in refusal(capsys, tmp_path / "c.ckpt", tmp_path / "out")
    assert export(tmp_path / "c.ckpt", tmp_path / "out", "--merge") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(model), logits(module.model.merge_and_unload()))


def test_failed_export_leaves_nothing(tmp_path, monkeypatch):
    model = trained({"config": LLAMA}).model

    def fail(folder, **_):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        export_huggingface(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="Linear is no Hugging Face model"):
        export_huggingface(torch.nn.Linear(2, 2), tmp_path / "out")


def test_empty_folder_is_taken(tmp_path):
    module = trained({"config": LLAMA})
    (tmp_path / "out").mkdir()
    export_huggingface(module.model, tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(module.model))
    assert module.model.config.use_cache is False


def test_save_pretrained_before_training():
    with pytest.raises(ValueError, match=r"nothing was trained with this strategy: call it after trainer\.fit"):
        MemoStrategy().save_pretrained("x")


def test_save_pretrained_to_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    result = fit(MemoStrategy(alpha=0.5), LanguageModel("llama"), max_steps=1)
    with pytest.raises(ValueError, match=r"save_pretrained: .*file/model cannot be written .*: give a folder that can"):
        result.trainer.strategy.save_pretrained(file / "model")


@pytest.mark.parametrize("where", ["metadata", "weight"])
def test_folders_of_strangers_run_no_code(tmp_path, capsys, where):
    path, touched = tmp_path / "c.ckpt", tmp_path / "touched"
    module = trained({"config": LLAMA})
    state = dict(module.state_dict())
    if where == "weight":
        state["model.lm_head.weight"] = Touches(str(touched))
    save_sharded({"state_dict": state, "hyper_parameters": dict(module.hparams)}, path)
    if where == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Touches(str(touched))))
        (path / "checksums.json").unlink()
    assert export(path, tmp_path / "out") == 2
    line = capsys.readouterr().err
    assert "weights_only" in line and line.count("\n") == 1
    assert not touched.exists() and not (tmp_path / "out").exists()


def test_adapters_of_strangers_import_nothing(tmp_path, capsys, monkeypatch):
    """PEFT imports the module that `megatron_core` names, which may lie in the checkpoint."""
    module = trained({"config": LLAMA, "lora": LORA})
    settings = {**module.hparams, "model": {**module.hparams["model"], "lora": {**LORA, **PLANTED_LORA}}}
    path = tmp_path / "c.ckpt"
    save_sharded({"state_dict": module.state_dict(), "hyper_parameters": settings}, path)
    (path / "planted.py").write_text("raise SystemExit('planted code ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(path))  # as the current folder is with `python -m`
    assert export(path, tmp_path / "out", "--merge") == 2
    assert "model.lora.megatron_co" in capsys.readouterr().err
