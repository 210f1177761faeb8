"""A whole run of many turns: WebShop's 1,000 products, SmolLM2 on vLLM, two workers, natural asynchrony.

configs/webshop_smollm2.yaml made as small as it can be: learning is not asked, that the whole path holds is.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from typer.testing import CliRunner

from hpc_es import store
from hpc_es.cli import app
from hpc_es.envs.manifest import read_tasks
from hpc_es.params.models import get_model
from hpc_es.paths import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.model]

SMALL = (
    "run.num_updates=3",
    "es.population=4",
    "es.sigma=0.02",
    "es.tasks_per_member=1",
    "eval.num_tasks=2",
    "task.options.max_turns=3",
)


def _answer(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> RunPaths:
    folder = tmp_path_factory.mktemp("runs")
    model = get_model("smollm2-135m", ROOT / "models" / "smollm2-135m")
    places = (f"run.dir={folder}", f"model.path={model}", f"task.options.data_dir={shared_data / 'webshop'}")
    command = [sys.executable, "-m", "hpc_es", "run", str(ROOT / "configs" / "webshop_smollm2.yaml"), *SMALL, *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunPaths(folder / "webshop-smollm2")


@pytest.mark.timeout(900)
def test_it_commits_asynchronously_within_the_bound_and_verifies(run: RunPaths) -> None:
    recorded = store.read(run.hdf5)
    trained = recorded.evaluations[recorded.evaluations.kind == "train"]
    accepted = trained[trained.status == "accepted"]
    assert list(recorded.updates.version) == [1, 2, 3]
    assert len(accepted) == 3 * 4
    assert accepted.lag.max() == 1  # nobody waited at a barrier, and the bound held
    assert accepted.worker.nunique() == 2
    assert not recorded.updates.null.all()
    report = _answer("verify", run.root)
    assert (report["ok"], report["problems"]) == (True, [])
    status = _answer("status", run.root)
    assert (status["state"], status["version"]) == ("finished", 3)


def test_its_evaluation_tasks_are_listed_with_their_ceiling(run: RunPaths) -> None:
    manifest = read_tasks(run.tasks)
    assert manifest is not None
    assert [task.id.split()[:2] for task in manifest.tasks] == [["goal", "0"], ["goal", "1"]]
    assert (manifest.env, manifest.ceiling) == ("webshop", 1.0)
    evals = store.read(run.hdf5).evals
    assert sorted(evals.version) == [0, 3]


def test_its_episodes_have_many_turns_and_end_as_the_shop_ends_them(run: RunPaths) -> None:
    episodes = store.read(run.hdf5).episodes
    assert set(episodes.ended) <= {"terminated", "truncated"}
    assert episodes.turns.between(2, 3).all()
    assert (episodes.invalid_actions == 0).all()
    assert episodes.reward.between(0, 1).all()
    kept = _answer("episodes", run.root, "--version", 3, "--member", -1)
    assert "click[b" in json.dumps(kept)


def test_its_report_is_written(run: RunPaths) -> None:
    report = _answer("report", run.root)
    assert Path(report["page"]).stat().st_size > 10_000
    assert report["figures"]
