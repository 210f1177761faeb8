"""A fork begins with the bits of theta_V, says where it comes from, and leaves nothing behind when it fails."""

import json
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
from builders import es
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.config import Config, load, save
from hpc_es.errors import ConfigError, DigestMismatch, HpcEsError
from hpc_es.methods.es.optimiser import Kind
from hpc_es.params import Arena
from hpc_es.paths import RunPaths
from hpc_es.recorded.fork import Fork, plan_fork, theta_digest, write_fork
from hpc_es.recorded.verify import replay
from hpc_es.records import Result
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION

NUM_UPDATES = 3


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/origin below the working directory: three updates of a small checkpoint."""
    return make_origin(tmp_path, monkeypatch)


def make_origin(folder: Path, monkeypatch: pytest.MonkeyPatch, optimiser: Kind = "none") -> Path:
    monkeypatch.chdir(folder)
    small_checkpoint.make(Path("model"))
    config = Config.model_validate(
        {
            "run": {"name": "origin", "num_updates": NUM_UPDATES, "seed": 7},
            "model": {"path": "model", "exclude": ["*norm*"]},
            "task": {"env": "sudoku", "options": {"size": 4}},
            "es": {
                "population": 4,
                "sigma": 1e-2,
                "alpha": {"kind": "linear", "start": 5e-2, "end": 1e-2},
                "optimiser": {"kind": optimiser},
            },
        }
    )
    paths = RunPaths(Path("runs/origin"))
    paths.root.mkdir(parents=True)
    save(config, paths.config)
    arena = Arena.from_pretrained("model", exclude=["*norm*"], optimiser=optimiser)
    start = journal.Started(
        0.0, SCHEMA_VERSION, "origin", 1, 0, config.model_dump_json(), arena.base_digest, {}, "host"
    )
    writer = JournalWriter.create(paths, lambda generation, sealed: start)
    for version in range(NUM_UPDATES):
        cohort = []
        for slot in range(4):
            assignment = es(config).assign(version, slot, version + 1)
            cohort.append((assignment, Result(assignment.eval_id, 0.1 * slot, (), 0, 0.0, 0.0, 0.0)))
        commit = es(config).commit(version + 1, cohort)
        report = arena.apply([commit])
        writer.append(journal.Committed(1.0, commit))
        writer.append(journal.Digested(1.0, commit.version, report.digest, report.update_norm, 0.0))
    writer.append(journal.Stopped(2.0, "done", True))
    writer.close()
    return paths.root


def write(fork: Fork) -> RunPaths:
    return write_fork(fork, lambda: replay(fork.origin.root, fork.version), say=lambda text: None)


def test_a_fork_is_a_run_whose_base_model_is_theta_v(root: Path) -> None:
    fork = plan_fork(root, 2, "forked", ["es.sigma=0.02", "run.num_updates=9"])
    paths = write(fork)
    expected = replay(root, 2)
    found = Arena.from_pretrained(paths.base)
    assert found.base_digest == expected.digest() == theta_digest(expected)
    assert all(np.array_equal(found.tensor(name), expected.tensor(name)) for name in expected.names)
    config = load(paths.config).config
    assert (config.model.path, config.es.sigma.start, config.run.num_updates) == ("runs/forked/base", 0.02, 9)
    assert config.model.exclude == ("*norm*",)
    assert paths.secrets.is_dir()
    said = json.loads(paths.fork.read_text())
    assert (said["version"], said["digest"]) == (2, f"{expected.digest():016x}")
    assert said["run"] == str(root.resolve())
    assert "es.sigma.start: 0.01 -> 0.02" in said["differences"]
    assert not any("model.path" in difference for difference in said["differences"])


def test_an_optimisers_state_begins_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_origin(tmp_path, monkeypatch, "adam")
    fork = plan_fork(root, 2, "forked")
    paths, origin = write(fork), replay(root, 2)
    found = Arena.from_pretrained(paths.base, optimiser="adam")
    assert found.base_digest == theta_digest(origin) != origin.digest()
    assert fork.loses_optimiser
    assert json.loads(paths.fork.read_text())["optimiser_state"] == "begins at zero"
    done = CliRunner().invoke(app, ["fork", "runs/origin", "--version", "1", "--name", "other"])
    assert "; the optimiser's state starts at zero" in done.stdout
    assert not plan_fork(root, 0, "third").loses_optimiser


def test_forks_of_one_version_share_a_seed_that_is_not_the_origins(root: Path) -> None:
    seeds = [plan_fork(root, version, name).config.run.seed for version, name in ((2, "a"), (2, "b"), (1, "c"))]
    assert seeds[0] == seeds[1] != seeds[2]
    assert 7 not in seeds
    assert plan_fork(root, 2, "d", ["run.seed=7"]).config.run.seed == 7


def test_version_0_is_the_base_model_itself(root: Path) -> None:
    paths = write(plan_fork(root, 0, "forked"))
    assert not paths.base.exists()
    assert load(paths.config).config.model.path == "model"


def test_several_forks_may_share_a_base(root: Path) -> None:
    write(plan_fork(root, 3, "a", base=Path("shared")))
    before = (Path("shared") / "model.safetensors").stat().st_mtime_ns
    write(plan_fork(root, 3, "b", base=Path("shared")))
    assert (Path("shared") / "model.safetensors").stat().st_mtime_ns == before
    assert load(Path("runs/b/config.yaml")).config.model.path == "shared"
    with pytest.raises(DigestMismatch, match="shared has digest"):
        write(plan_fork(root, 2, "c", base=Path("shared")))
    assert not Path("runs/c").exists()


def test_a_fork_that_fails_leaves_nothing(root: Path) -> None:
    def fail() -> Arena:
        raise HpcEsError("no arena")

    with pytest.raises(HpcEsError, match="no arena"):
        write_fork(plan_fork(root, 2, "forked"), fail, say=lambda text: None)
    with pytest.raises(HpcEsError):
        write(plan_fork(root, 2, "forked", ["es.tasks_per_member=100000000"]))
    assert [path.name for path in Path("runs").iterdir()] == ["origin"]


@pytest.mark.parametrize(
    ("version", "name", "overrides", "complaint"),
    [
        (4, "forked", [], "version 4 does not exist: runs/origin has versions 0 to 3"),
        (1, "origin", [], "runs/origin already exists: choose another --name for the fork"),
        (1, "a/b", [], "--name a/b must consist of letters"),
        (1, "forked", ["run.name=x"], "run.name cannot be set for a fork: --name names the fork"),
        (1, "forked", ["model.path=x"], "model.path cannot be set for a fork: the base model of a fork is theta_V"),
        (1, "forked", ["es.sigm=1"], "did you mean es.sigma"),
    ],
)
def test_a_fork_that_cannot_be_is_refused(
    root: Path, version: int, name: str, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plan_fork(root, version, name, overrides)


def test_a_folder_that_appears_in_the_meantime_is_not_touched(root: Path) -> None:
    fork = plan_fork(root, 1, "forked")
    fork.paths.root.mkdir()
    (fork.paths.root / "precious").touch()
    with pytest.raises(ConfigError, match="already exists"):
        write(fork)
    assert (fork.paths.root / "precious").exists()


def test_the_command_says_what_starts_over_and_how_to_start(root: Path) -> None:
    done = CliRunner().invoke(app, ["fork", "runs/origin", "--version", "2", "--name", "forked", "es.sigma=0.02"])
    assert done.exit_code == 0, done.output
    assert "runs/forked begins from theta_2 of runs/origin, checked by its digest" in done.stdout
    assert "es.sigma.start: 0.01 -> 0.02" in done.stdout
    assert "schedules start again: update 1 of 3 has sigma 0.02, alpha 0.05" in done.stdout
    assert "start it with: hpc-es run runs/forked" in done.stdout
    again = CliRunner().invoke(app, ["fork", "runs/origin", "--version", "2", "--name", "forked"])
    assert (again.exit_code, again.stdout) == (2, "")
