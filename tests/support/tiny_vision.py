"""Write a tiny random vision-language model as a Hugging Face folder: an Idefics3 around the tiny Llama.

Its image processor scales an image to 56 x 56 pixels, which become 4 tokens; it loads in vLLM without torchvision.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hpc_es.params.tiny_llama import HIDDEN, INTERMEDIATE, tiny_tensors, write_tiny_llama

SIDE, PATCH, SHRINK, LAYERS = 56, 14, 2, 2
NUM_PATCHES = (SIDE // PATCH) ** 2
NUM_IMAGE_TOKENS = NUM_PATCHES // SHRINK**2
SPECIAL = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_vision(folder: Path, *, seed: int = 0) -> Path:
    """Returns `folder`."""
    write_tiny_llama(folder, seed=seed, tied=False)
    text = read(folder / "config.json")
    image_token = add_tokens(folder, SPECIAL, CHAT_TEMPLATE)
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_act": "gelu_pytorch_tanh",
    }
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": image_token,
        "pad_token_id": 0,
        "scale_factor": SHRINK,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision,
    }
    processor = {
        "processor_class": "Idefics3Processor",
        "image_seq_len": NUM_IMAGE_TOKENS,
        "image_processor": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": False,
            "size": {"longest_edge": SIDE},
            "max_image_size": {"longest_edge": SIDE},
        },
    }
    write(folder / "config.json", config)
    write(folder / "processor_config.json", processor)
    save_file(_tensors(seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def _tensors(seed: int) -> dict[str, np.ndarray]:
    language = tiny_tensors(seed=seed, tied=False, layers=2)
    tensors = {name.replace("model.", "model.text_model.", 1): array for name, array in language.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (HIDDEN, 3, PATCH, PATCH),
        "embeddings.patch_embedding.bias": (HIDDEN,),
        "embeddings.position_embedding.weight": (NUM_PATCHES, HIDDEN),
        "post_layernorm.weight": (HIDDEN,),
        "post_layernorm.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        inside = {"mlp.fc1": (INTERMEDIATE, HIDDEN), "mlp.fc2": (HIDDEN, INTERMEDIATE)}
        inside |= {f"self_attn.{which}_proj": (HIDDEN, HIDDEN) for which in ("q", "k", "v", "out")}
        inside |= {"layer_norm1": (HIDDEN,), "layer_norm2": (HIDDEN,)}
        for name, shape in inside.items():
            shapes[f"encoder.layers.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layers.{layer}.{name}.bias"] = shape[:1]
    rng = np.random.default_rng(seed + 1)
    for name, shape in shapes.items():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        tensors["model.vision_model." + name] = _normal(rng, shape, centre)
    tensors["model.connector.modality_projection.proj.weight"] = _normal(rng, (HIDDEN, HIDDEN * SHRINK**2))
    return tensors


def _normal(rng: np.random.Generator, shape: tuple[int, ...], centre: float = 0.0) -> np.ndarray:
    return (centre + 0.12 * rng.standard_normal(shape)).astype(np.float32)


def add_tokens(folder: Path, names: Sequence[str], chat_template: str) -> int:
    """Add special tokens behind the tokenizer's own, and a chat template that uses them; returns the first's id."""
    tokenizer = read(folder / "tokenizer.json")
    first = len(tokenizer["model"]["vocab"])
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**like, "id": first + place, "content": name} for place, name in enumerate(names)]
    write(folder / "tokenizer.json", tokenizer)
    settings = read(folder / "tokenizer_config.json")
    write(folder / "tokenizer_config.json", {**settings, "chat_template": chat_template})
    return first


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
