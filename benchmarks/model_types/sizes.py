"""Sizes of configurations that need consistent values, by model type and, for parts, by `type.attribute`."""

from __future__ import annotations

from typing import Any

DERIVED = object()
"""Stands for a value that the class of a configuration computes from others."""

# Composite types without default parts: attribute -> model type of the part.
SUB_CONFIGS: dict[str, dict[str, str]] = {
    "encoder-decoder": {"encoder": "bert", "decoder": "bert"},
    "vision-encoder-decoder": {"encoder": "vit", "decoder": "bert"},
}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_ATTENTION_TYPES = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA3N = {"num_kv_shared_layers": 2, "layer_types": _ATTENTION_TYPES, "activation_sparsity_pattern": [0.0] * 4}
_QWEN4 = {
    "indexer_kv_heads": 1,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 4,
    "indexer_head_dim": 8,
}
_GEMMA4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 8}
_DOTS = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16,
         "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_HALF_MROPE = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
_IMAGE_TOKEN = {"image_token_index": 100}
_BLT = {"hidden_size_global": 32}
_SLIDING = {"layer_types": _ATTENTION_TYPES, "sliding_window": 16}
_SLIDING_QWEN = {**_SLIDING, "use_sliding_window": True}
_MLP = {"mlp_layer_types": ["dense", "sparse"] * 2}
_LFM2 = {"layer_types": ["conv", "full_attention"] * 2}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8},
    "blt.encoder_config": _BLT,
    "blt.decoder_config": _BLT,
    "blip-2": _IMAGE_TOKEN,
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "codegen": {"rotary_dim": 4},
    "cohere2_moe": _MLP,
    "cohere_compass_text": {"layer_types": _ATTENTION_TYPES, "rope_parameters": dict.fromkeys(_ATTENTION_TYPES, _ROPE)},
    "dbrx.attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "deepseek_ocr2_encoder": _SLIDING_QWEN,
    "deepseek_ocr2_text": _ROUTED | _MLP,
    "deepseek_v2": _ROUTED,
    "deepseek_v4": {"layer_types": ["sliding_attention", "compressed_sparse_attention",
                                    "heavily_compressed_attention", "compressed_sparse_attention"]},
    "dots1": _ROUTED | _SLIDING,
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots3_note_text": {f"swa_{name}": size for name, size in _DOTS.items()},
    "emu3": {"vocabulary_map": {"<image>": 100}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4, "vocab_size": 128},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm4v_moe_text": _HALF_MROPE,
    "glm4v_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8,
                         "layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "hunyuan_vl_text": {"num_key_value_heads": 4, "head_dim": 8},
    "inkling_text": _MLP,
    "instructblip": _IMAGE_TOKEN,
    "instructblipvideo": {"video_token_index": 100},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": _SLIDING,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "longcat_flash": {"head_dim": 8, "qk_rope_head_dim": 8, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mellum": _SLIDING | _MLP,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, **_MLP},
    "ministral": _HEADS | _SLIDING,
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "muse_spark_text": _MLP,
    "neomme": {"head_dim": 16},
    "nemotron": _HEADS,
    "perceiver": {"max_position_embeddings": 48, "d_latents": 32, "num_latents": 16, "num_self_attends_per_block": 4},
    "paddleocr_vl_text": _MROPE,
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192},
    "qwen2": _SLIDING_QWEN,
    "qwen2_5_omni_text": _MROPE | _SLIDING_QWEN,
    "qwen2_5_vl_text": _MROPE | _SLIDING_QWEN,
    "qwen2_moe": _SLIDING_QWEN,
    "qwen2_vl_text": _MROPE | _SLIDING_QWEN,
    "qwen3": _SLIDING_QWEN,
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_shape": [4, 12], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 8,
                 "lsh_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 0},
    "roc_bert": {"shape_vocab_size": 128, "shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "smollm3": _SLIDING_QWEN,
    "step3p5": _SLIDING,
    "unlimited_ocr_text": {"layer_types": ["reference_sliding_attention", "full_attention"] * 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "xlnet": {"d_head": DERIVED},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_blocks": 4, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1, "adapter_rank": 4,
               "n_mamba_heads": 8, "mamba_headdim": DERIVED, "attention_head_dim": DERIVED, "hybrid_layer_ids": DERIVED,
               "attention_hidden_size": DERIVED},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": DERIVED,
              "attention_head_dim": DERIVED, "mamba_dt_rank": DERIVED},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 16},
}  # fmt: skip
