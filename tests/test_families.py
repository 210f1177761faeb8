"""Model families in vLLM, as tiny random models in one process (families_front.py): members are written straight into
live memory, or the model is loaded anew for each; either way they are the members that transformers computes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DIRECT = ["llama_untied", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"]
LOADED_ANEW = ["mixtral", "olmoe", "qwen3_moe", "qwen3_next"]
"""Mixtures of experts, whose weights vLLM's CPU backend packs once they are loaded."""
BFLOAT16 = ["qwen3_next"]
"""vLLM's CPU kernels know no other type for its linear attention; A_log stays in float32, as in the checkpoint."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was said of each family."""
    script, folder = Path(__file__).with_name("families_front.py"), tmp_path_factory.mktemp("families")
    log = (folder / "log").open("w+")
    front = [sys.executable, script, folder, *DIRECT, *LOADED_ANEW]
    output = subprocess.run(front, stdout=subprocess.PIPE, stderr=log, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"family"')]
    assert lines, log.seek(0) or log.read()[-2000:]
    return {line["family"]: line for line in lines}


@pytest.mark.parametrize("family", [*DIRECT, *LOADED_ANEW])
def test_a_family_computes_the_member_that_transformers_computes(family: str, said: dict[str, dict[str, Any]]) -> None:
    found = said[family]
    assert "ours" in found, found
    way = "direct" if family in DIRECT else "load_weights: this model family repacks weights after loading"
    assert found["weights"] == way
    assert found["proven"]
    np.testing.assert_allclose(found["ours"], found["theirs"], atol=0.2 if family in BFLOAT16 else 5e-5)
    assert np.ptp(found["theirs"]) > 1
