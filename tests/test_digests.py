"""No bit changes by accident: every schedule of staleness with every setting of ES keeps the digests on record."""

import json
from pathlib import Path

import pytest
from digest_runs import LIST, METHODS, SCHEDULES, run_of

from hpc_es.params.lab_model import LAB_MODELS, write_lab_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lab_model(tmp_path_factory.mktemp("digests"), LAB_MODELS["lab-10k"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_have_the_digests_on_record(schedule: str, model: Path) -> None:
    recorded = json.loads(LIST.read_text())
    found = {f"{schedule}, {method}": run_of(schedule, method, model) for method in METHODS}
    assert found == {name: recorded[name] for name in found}
