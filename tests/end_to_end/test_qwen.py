"""Qwen3.5 and Qwen3-VL in the transformers engine, and what the CPU installation has to do and to refuse for them.

In vLLM: test_families.py and test_images.py.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT
from tiny_families import write_family
from tiny_qwen import SEEING, write_tiny_qwen
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hpc_es.config.schema import EngineConfig, ModelConfig
from hpc_es.engine.transformers import TransformersEngine
from hpc_es.errors import ConfigError, EngineError
from hpc_es.params.arena import Arena
from hpc_es.records import Member

MEMBER = Member(seed=7, sign=-1, sigma=0.05)
PROMPT = list(range(3, 40))
ANSWERS = [(41, 42, 43), (44,), (45, 46)]
COMPLETE = ROOT / "tools" / "complete_torchvision.py"


def written(family: str, folder: Path) -> Path:
    return (write_tiny_qwen if family in SEEING else write_family)(family, folder)


async def play(model: ModelConfig) -> list[list[float]]:
    """Logits of the centre, of a member, and of the centre again; log-probabilities of answers of the member."""
    engine = await TransformersEngine.start(model, EngineConfig(kind="transformers", max_model_len=64), threads=1)
    said = list[list[float]]()
    for member in (None, MEMBER, None):
        await engine.perturb(member)
        said.append(await engine.logits(PROMPT))
    await engine.perturb(MEMBER)
    said += await engine.log_probabilities(PROMPT, ANSWERS)
    await engine.close()
    return said


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5", "qwen3_vl"])
def test_a_member_in_transformers_is_that_of_its_checkpoint(family: str, tmp_path: Path) -> None:
    folder = written(family, tmp_path / "model")
    centre, member, again, *scored = asyncio.run(play(ModelConfig(path=str(folder), dtype="float32")))
    assert again == centre
    reference = (AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM).from_pretrained(folder)
    arena, parameters = Arena.from_pretrained(folder), dict(reference.named_parameters())
    with torch.inference_mode():
        for name in arena.trained:
            parameters[name].copy_(torch.from_numpy(arena.perturbed(name, MEMBER, "float32")))
        logits = reference(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(member), logits, atol=2e-5, rtol=0)
        for answer, found in zip(ANSWERS, scored, strict=True):
            rows = reference(torch.tensor([[*PROMPT, *answer]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            expected = rows[torch.arange(len(answer)), list(answer)]
            torch.testing.assert_close(torch.tensor(found), expected, atol=5e-5, rtol=0)
    assert max(abs(a - b) for a, b in zip(centre, member, strict=True)) > 1


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_that_transformers_keeps_in_another_form_are_refused_by_name(family: str, tmp_path: Path) -> None:
    model = ModelConfig(path=str(written(family, tmp_path / "model")), dtype="float32")
    with pytest.raises(EngineError, match=r"no parameter model\.language_model\.layers\.0\.mlp\.experts\..*use vllm"):
        asyncio.run(play(model))


@pytest.mark.vllm
def test_unsupported_linear_attention_features_of_vllms_cpu_backend_are_refused_or_disabled(tmp_path: Path) -> None:
    vllm_launch = pytest.importorskip("hpc_es.engine.vllm_launch")
    folder = written("qwen3_5", tmp_path / "model")
    arena, engine = Arena.from_pretrained(folder), EngineConfig(max_model_len=64)
    assert engine.prefix_cache
    given = vllm_launch.arguments(ModelConfig(path=str(folder)), engine, "extension", arena)
    assert not given["enable_prefix_caching"]
    with pytest.raises(ConfigError, match=r"model\.dtype=float32: .*set model\.dtype=bfloat16"):
        vllm_launch.arguments(ModelConfig(path=str(folder), dtype="float32"), engine, "extension", arena)
    plain = write_family("qwen3", tmp_path / "plain")
    assert vllm_launch.arguments(ModelConfig(path=str(plain)), engine, "extension", arena)["enable_prefix_caching"]


@pytest.mark.slow
def test_a_torchvision_without_its_operators_is_completed_once_and_a_whole_one_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "extension.py").write_text("import torch\n\n\ndef _has_ops():\n    return False\n")
    register = (
        "from . import extension\nimport torch\ntorch.library.register_fake('torchvision::nms')(lambda *_: None)\n"
    )
    (package / "__init__.py").write_text(register)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def complete() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, COMPLETE], env=environment, capture_output=True, text=True)

    assert complete().returncode == 0
    completed = (package / "extension.py").read_text()
    assert "roi_align" in completed
    assert complete().returncode == 0
    assert (package / "extension.py").read_text() == completed
    (package / "__init__.py").write_text("raise ImportError('built for another torch')")
    failed = complete()
    assert (failed.returncode, failed.stdout) == (
        1,
        "torchvision does not load: ImportError: built for another torch\n",
    )
    assert (package / "extension.py").read_text() == completed
