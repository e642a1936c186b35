import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import OmegaConf
from support.samples.models import TINY
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_memo.cli.hydra_command import config_dir
from lightning_memo.models import CausalLM, ModelConfig, build_model, check_vocabulary, load_hf_config

IDS = torch.arange(48).remainder(11).reshape(2, 24)
BATCH = {"input_ids": IDS, "labels": IDS}


def trainer(tmp_path, **changes):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{"accelerator": "cpu", "max_steps": 3, "default_root_dir": tmp_path, **quiet, **changes})


def batches(count=8):
    return DataLoader([BATCH] * count, batch_size=None)


@pytest.mark.parametrize(
    ("preset", "parameters", "layers", "kv_heads"),
    [
        ("llama_tiny", 6.5e6, 8, 8),
        ("llama3_2_1b", 1.236e9, 16, 8),
        ("llama3_2_3b", 3.213e9, 28, 8),
        ("llama3_8b", 8.03e9, 32, 8),
        ("qwen3_8b", 8.19e9, 36, 8),
        ("qwen3_30b_a3b", 30.53e9, 48, 4),
        ("gpt_7b", 6.65e9, 32, None),
    ],
)
def test_presets_have_the_published_sizes(preset, parameters, layers, kv_heads):
    with initialize_config_dir(config_dir(), version_base="1.3"):
        settings = OmegaConf.to_container(compose("train", [f"model={preset}"]).model)
    with torch.device("meta"):
        model = build_model(ModelConfig(**settings))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
    assert model.config.num_hidden_layers == layers
    assert getattr(model.config, "num_key_value_heads", None) == kv_heads
    assert not model.config.use_cache


def test_saved_model_is_loaded_for_training(tmp_path):
    saved = build_model(ModelConfig(config=TINY))
    saved.save_pretrained(tmp_path)
    loaded = build_model(ModelConfig(path=str(tmp_path)))
    assert loaded.training
    for name, weight in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_checkpoints_of_earlier_versions_have_an_option_that_is_gone():
    module = CausalLM({"config": TINY, "liger": False})
    module.configure_model()
    assert module.model is not None
    with pytest.warns(UserWarning, match=r"model\.liger has no effect any more"):
        CausalLM({"config": TINY, "liger": True})


def test_lora_trains_the_adapters_alone():
    model = build_model(ModelConfig(config=TINY, lora={"r": 2, "target_modules": "all-linear"}))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_lora_settings_without_a_rank_are_refused():
    """They would train all weights, silently."""
    with pytest.raises(ValueError, match=r"model.lora has rank, lora_alpha, but no r: give .* r=0 to train"):
        CausalLM({"config": TINY, "lora": {"rank": 4, "lora_alpha": 8}})
    assert all(p.requires_grad for p in build_model(ModelConfig(config=TINY, lora={"r": 0})).parameters())


def test_unknown_lora_settings_are_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"model.lora.alpha: .* one of r, target_modules, .*lora_alpha, ") as caught:
        build_model(ModelConfig(config=TINY, lora={"r": 2, "alpha": 4}))
    assert "\n" not in str(caught.value) and "task_type" not in str(caught.value)


def test_lora_without_peft_is_explained(monkeypatch):
    monkeypatch.setattr("lightning_memo.models.model_builder._PEFT", False)
    with pytest.raises(ValueError, match=r"model.lora.r=2: LoRA needs peft; pip install"):
        build_model(ModelConfig(config=TINY, lora={"r": 2}))


def test_gradient_checkpointing_changes_memory_and_not_the_gradients():
    torch.manual_seed(1)
    plain = build_model(ModelConfig(config=TINY))
    torch.manual_seed(1)
    checkpointed = build_model(ModelConfig(config=TINY, gradient_checkpointing=True))
    saved = []
    for model in (plain, checkpointed):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            loss = model(**BATCH).loss
        loss.backward()
        saved.append(sum(sizes))
    assert saved[1] < saved[0] / 2
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give model.config .* or model.path"),
        ({"path": "/nowhere"}, "model.path=/nowhere: no config.json there; give"),
        ({"config": {"model_type": "nothing"}}, "model.config: Hugging Face refuses it: .*nothing"),
        ({"config": TINY | {"num_attention_heads": 3}}, "(?s)model.config: Hugging Face refuses it: .*hidden size"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        load_hf_config(ModelConfig(**settings))


def test_small_vocabulary_is_refused():
    check_vocabulary(ModelConfig(config=TINY), 64)
    with pytest.raises(ValueError, match=r"ids go up to 64.*embeddings for 64"):
        check_vocabulary(ModelConfig(config=TINY), 65)


def test_small_vocabulary_is_refused_before_training():
    data = LightningDataModule.from_datasets([{"input_ids": torch.tensor([64])}])
    data.vocab_size = 65
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    with pytest.raises(ValueError, match=r"ids go up to 64.*embeddings for 64"):
        trainer.fit(CausalLM({"config": TINY}), datamodule=data)


def test_norms_and_biases_do_not_decay(tmp_path):
    module = CausalLM({"config": TINY | {"attention_bias": True}}, weight_decay=0.3)
    runner = trainer(tmp_path, max_steps=1)
    runner.fit(module, batches())
    decays = {id(p): group["weight_decay"] for group in runner.optimizers[0].param_groups for p in group["params"]}
    assert len(decays) == len(list(module.parameters()))
    for name, p in module.named_parameters():
        assert decays[id(p)] == (0.0 if "norm" in name or name.endswith("bias") else 0.3), name


def test_rate_warms_up_and_falls_to_its_least(tmp_path):
    class Rates(CausalLM):
        def on_train_batch_end(self, *args):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    rates = []
    trainer(tmp_path, max_steps=12, accumulate_grad_batches=2).fit(
        Rates({"config": TINY}, lr=1.0, warmup_steps=4, min_lr_ratio=0.1), batches(24)
    )
    steps = rates[1::2]
    assert steps[:4] == [0.25, 0.5, 0.75, 1.0]
    assert steps[3:] == sorted(steps[3:], reverse=True)
    assert steps[-1] == pytest.approx(0.1)


def test_logged_values(tmp_path):
    module = CausalLM({"config": TINY}, lr=0.5, warmup_steps=0)
    runner = trainer(tmp_path, val_check_interval=3, check_val_every_n_epoch=None)
    runner.fit(module, batches(), batches(1))
    logged = runner.callback_metrics
    assert logged["tokens"] == 3 * 48
    assert {"train_loss", "val_loss", "lr"} <= set(logged)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_config(module.model.config)
        expected.load_state_dict(module.model.state_dict())
        assert logged["val_loss"] == pytest.approx(expected(**BATCH).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "weights"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)]
)
def test_precision_decides_the_weights_type(tmp_path, precision, weights):
    module = CausalLM({"config": TINY | {"dtype": "bfloat16"}})
    runner = trainer(tmp_path, precision=precision)
    runner.fit(module, batches())
    assert {p.dtype for p in module.parameters()} == {weights}
    assert runner.callback_metrics["train_loss"].isfinite()


def test_model_is_built_once(tmp_path):
    module = CausalLM({"config": TINY})
    assert module.model is None
    module.configure_model()
    model = module.model
    trainer(tmp_path).fit(module, batches())
    assert module.model is model
    assert isinstance(module, LightningModule)
