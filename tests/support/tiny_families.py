"""Tiny random models of many families as Hugging Face folders, with the tokenizer of the tiny Llama."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_es.params.tiny_llama import HEAD_DIM, HEADS, INTERMEDIATE, KV_HEADS, VOCAB, write_tiny_llama

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama_untied": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "phi3": {"pad_token_id": 0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "qwen3_next": {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**HYBRID, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 32},
}
"""Settings that differ between the families."""
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def write_family(name: str, folder: Path, **others: Any) -> Path:
    """A model of the family, with other settings where given; returns `folder`."""
    write_tiny_llama(folder)
    config = AutoConfig.for_model(name.removesuffix("_untied"), **COMMON | FAMILIES[name] | others)
    return save_random(AutoModelForCausalLM, config, folder)


def save_random(auto: Any, config: Any, folder: Path) -> Path:
    """Random weights of the model that the auto class makes of the config, norms included; returns `folder`."""
    torch.manual_seed(0)
    model = auto.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder
