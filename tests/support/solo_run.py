"""A short recorded run of the laboratory's model, made without engines, for tests of evaluations after a run."""

from pathlib import Path

from builders import es

from hpc_es.config import Config, save
from hpc_es.params import Arena, checkpoint
from hpc_es.params.lab_model import write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Episode, Result
from hpc_es.results import fitness_of
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION

NUM_UPDATES = 4


def make_run(folder: Path, optimiser: str = "none") -> Path:
    """Four updates of the laboratory's model, a checkpoint of theta_2, and a void evaluation that was replaced."""
    write_lab_model(folder / "model", 8)
    config = Config.model_validate(
        {
            "run": {"name": "run", "num_updates": NUM_UPDATES},
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "task": {"env": "lab", "chat": False},
            "es": {
                "population": 4,
                "sigma": 0.5,
                "alpha": 0.5,
                "tasks_per_member": 3,
                "optimiser": {"kind": optimiser},
            },
            "sampling": {"max_tokens": 1},
            "engine": {"kind": "lab", "max_model_len": 64, "threads": 1},
        }
    )
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    save(config, paths.config)
    arena = Arena.from_pretrained(config.model.path, optimiser=config.es.optimiser.kind)
    start = journal.Started(0.0, SCHEMA_VERSION, "run", 1, 0, config.model_dump_json(), arena.base_digest, {}, "host")
    writer = JournalWriter.create(paths, lambda generation, sealed: start)
    for version in range(NUM_UPDATES):
        assignments = [es(config, 99).assign(version, slot, version + 1) for slot in range(4)]
        again = es(config).replacement(assignments[1])
        writer.append(journal.Planned(1.0, version, (*assignments, again)))
        writer.append(journal.Voided(1.0, assignments[1].eval_id, "a fault"))
        assignments[1] = again
        results = [made_up_result(assignment, arena.digest()) for assignment in assignments]
        for result in results:
            writer.append(journal.Reported(1.0, "w0", result, 0.5, 0.9, 1))
        cohort = list(zip(assignments, results, strict=True))
        commit = es(config).commit(version + 1, cohort)
        report = arena.apply([commit])
        writer.append(journal.Committed(1.0, commit))
        writer.append(journal.Digested(1.0, commit.version, report.digest, report.update_norm, 0.0))
        if commit.version == 2:
            checkpoint.write(paths, arena)
    writer.append(journal.Stopped(2.0, "done", True))
    writer.close()
    return paths.root


def made_up_result(assignment: Assignment, digest: int) -> Result:
    reward = 0.1 * assignment.eval_id.slot
    episodes = tuple(Episode(task, reward, False, 1, 0, 9, 2, 0.1, 0.1, "terminated") for task in assignment.tasks)
    return Result(assignment.eval_id, fitness_of(episodes), episodes, digest, 0.0, 0.0, 0.0)
