"""Write a tiny random Llama as a Hugging Face folder: the same bytes for the same arguments, on every machine.

Writing it needs neither torch nor transformers. It loads in transformers and in vLLM, whose CPU attention supports head
sizes of 32 and 64. The tokenizer is byte-level without merges, so that every ASCII character is one token.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB, HIDDEN, INTERMEDIATE, HEAD_DIM, HEADS, KV_HEADS = 320, 64, 128, 32, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_llama(folder: str | Path, *, seed: int = 0, tied: bool = True, layers: int = 2) -> Path:
    """Write a Llama of about 100,000 float32 parameters with grouped-query attention; return `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write_tokenizer(folder)
    save_file(tiny_tensors(seed=seed, tied=tied, layers=layers), folder / "model.safetensors", {"format": "pt"})
    return folder


def tiny_tensors(*, seed: int, tied: bool, layers: int) -> dict[str, np.ndarray]:
    """Float32 arrays by canonical name, scaled so that logits differ clearly between tokens."""
    rng = np.random.default_rng(seed)
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (query, HIDDEN),
            prefix + "self_attn.k_proj.weight": (key, HIDDEN),
            prefix + "self_attn.v_proj.weight": (key, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, query),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    tensors = {}
    for name, shape in shapes.items():
        centre = 1.0 if "norm" in name else 0.0
        tensors[name] = (centre + 0.12 * rng.standard_normal(shape)).astype(np.float32)
    return tensors


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
