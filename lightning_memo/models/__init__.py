"""Hugging Face causal language models and the Lightning module that trains them."""

from lightning_memo.models.causal_lm import CausalLM
from lightning_memo.models.model_builder import ModelConfig, build_model, check_vocabulary, load_hf_config

__all__ = ["CausalLM", "ModelConfig", "build_model", "check_vocabulary", "load_hf_config"]
