"""Tiny random Qwen models that see images, as Hugging Face folders: Qwen3-VL and Qwen3.5, dense or mixtures of experts.

The processor scales an image to 64 x 64 pixels, which become 4 tokens. Checkpoints of Qwen3.5 hold tensors for
multi-token prediction (`mtp.*`), as the published ones do.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_families import COMMON, EXPERTS, HYBRID, save_random
from tiny_vision import add_tokens, write
from transformers import AutoConfig, AutoModelForImageTextToText

from hpc_es.params.tiny_llama import write_tiny_llama

SIDE, PATCH, MERGE = 64, 16, 2
NUM_IMAGE_TOKENS = (SIDE // PATCH // MERGE) ** 2
HIDDEN = COMMON["hidden_size"]
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
FULL_ROPE = {**ROPE, "mrope_section": [6, 5, 5]}
PARTIAL_ROPE = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
SEEING: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": {"rope_parameters": FULL_ROPE}, "vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {
        "text_config": {
            **EXPERTS,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rope_parameters": FULL_ROPE,
        },
        "vision_config": {"deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "tie_word_embeddings": True,
        "text_config": {**HYBRID, "tie_word_embeddings": True, "rope_parameters": PARTIAL_ROPE},
        "vision_config": {},
    },
    "qwen3_5_moe": {
        "text_config": {
            **EXPERTS,
            **HYBRID,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": PARTIAL_ROPE,
        },
        "vision_config": {},
    },
}
"""Settings that differ between the families."""
MTP = {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN)}
"""Some of the tensors for multi-token prediction."""


def write_tiny_qwen(name: str, folder: Path) -> Path:
    """A model of the family; returns `folder`."""
    write_tiny_llama(folder)
    first = add_tokens(folder, SPECIAL, CHAT_TEMPLATE)
    start, end, image, video = range(first, first + len(SPECIAL))
    own, size = SEEING[name], {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    half = [0.5, 0.5, 0.5]
    pixels = {
        "patch_size": PATCH,
        "size": size,
        "image_mean": half,
        "image_std": half,
    }  # vLLM reads these from the file
    config = AutoConfig.for_model(
        name,
        text_config=COMMON | own["text_config"],
        vision_config=VISION | own["vision_config"],
        tie_word_embeddings=own.get("tie_word_embeddings", False),
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        dtype="float32",
    )
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **pixels},
        "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **pixels},
    }
    write(folder / "processor_config.json", processor)
    save_random(AutoModelForImageTextToText, config, folder)
    _as_published(name, folder / "model.safetensors")
    return folder


def _as_published(name: str, file: Path) -> None:
    """Qwen3.5 with tensors for multi-token prediction, the experts of Qwen3-VL transposed."""
    tensors, generator = load_file(file), torch.Generator().manual_seed(1)
    if name.startswith("qwen3_5"):
        tensors |= {name: torch.randn(shape, generator=generator) for name, shape in MTP.items()}
    else:
        tensors |= {name: t.transpose(1, 2).contiguous() for name, t in tensors.items() if ".mlp.experts." in name}
    save_file(tensors, file, {"format": "pt"})
