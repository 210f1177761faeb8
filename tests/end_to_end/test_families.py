"""Model families in vLLM, as tiny random models in one process (families_front.py): members are written straight into
live memory, or the model is loaded anew for each; either way they are the members that transformers computes."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from repository import SUPPORT
from tiny_qwen import MTP

DIRECT = ["llama_untied", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "qwen3_vl"]
LOADED_ANEW = ["mixtral", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_5_moe"]
"""Mixtures of experts, whose weights vLLM's CPU backend packs once they are loaded."""
CONVOLVED = ["qwen3_5_text", "qwen3_5"]
"""Gated delta nets, whose convolutions vLLM packs where the CPU has AVX-512 BF16: loaded anew there, else direct."""
TOLERANCE = {"qwen3_next": 0.2, "qwen3_5_text": 0.2, "qwen3_5": 0.4, "qwen3_5_moe": 0.4}
"""In bfloat16, the only type of vLLM's CPU kernels for linear attention; A_log stays in float32."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The report on each family."""
    script, folder = SUPPORT / "families_front.py", tmp_path_factory.mktemp("families")
    log = (folder / "log").open("w+")
    front = [sys.executable, script, folder, *DIRECT, *LOADED_ANEW, *CONVOLVED]
    output = subprocess.run(front, stdout=subprocess.PIPE, stderr=log, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"family"')]
    assert lines, log.seek(0) or log.read()[-2000:]
    return {line["family"]: line for line in lines}


@pytest.mark.parametrize("family", [*DIRECT, *LOADED_ANEW, *CONVOLVED])
def test_a_family_computes_the_member_that_transformers_computes(family: str, said: dict[str, dict[str, Any]]) -> None:
    found = said[family]
    assert "ours" in found, found
    direct = family in DIRECT or (family in CONVOLVED and not torch.cpu._is_avx512_bf16_supported())
    assert found["weights"] == ("direct" if direct else "load_weights: this model family repacks weights after loading")
    assert found["proven"]
    assert found["returned"], "the centre's log-probabilities came back to the same bits"
    np.testing.assert_allclose(found["ours"], found["theirs"], atol=TOLERANCE.get(family, 5e-5))
    assert np.ptp(found["theirs"]) > 1


def test_noise_reaches_each_trained_tensor_of_qwen3_5_and_leaves_multi_token_prediction_alone(
    said: dict[str, dict[str, Any]],
) -> None:
    assert said["qwen3_5"]["ignored"] == []
    assert said["qwen3_5"]["untrained"] == sorted(MTP)
