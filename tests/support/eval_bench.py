"""Set-up for tests of evaluations: a run of the lab, a file with other tasks, and ways to interrupt."""

from pathlib import Path

import pytest
from solo_run import make_run

import hpc_es.store
from hpc_es.envs.base import TaskFacts
from hpc_es.envs.lab import Lab
from hpc_es.recorded.eval_config import EvalRequest, Frozen
from hpc_es.recorded.evaluate import Evaluation, evaluate
from hpc_es.recorded.evaluate_model import evaluate_model
from hpc_es.recorded.solo import Solo
from hpc_es.records import Assignment
from hpc_es.records import Result as Played

TASK_FILE = """\
run: {name: other, num_updates: 9}
model: {path: none, dtype: float32}
task: {env: lab, chat: false, options: {actions: 3}}
es: {tasks_per_member: 5}
sampling: {temperature: 1.0, max_tokens: 1}
eval: {num_tasks: 12, repeats: 3}
engine: {kind: lab, max_model_len: 48, threads: 1}
"""
LATER = "later"


def a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four updates in the working directory; eval.num_tasks is 64, batches are of 3."""
    monkeypatch.chdir(folder)
    Path("task.yaml").write_text(TASK_FILE)
    return make_run(folder)


OTHER = EvalRequest(task=Path("task.yaml"))


def silent(text: str) -> None:
    pass


def play(root: Path, versions: str = "last", asked: EvalRequest | None = None, name: str = LATER) -> Evaluation:
    return evaluate(root, versions, asked, name=name, say=silent)


def episodes(root: Path, source: str = LATER) -> list[tuple[int, int, int, float]]:
    """(version, slot, task, reward), in the order of the plan."""
    frame = hpc_es.store.read(root).episodes
    frame = frame[frame["source"] == source]
    return sorted(zip(frame["dispatch_version"], -frame["slot"], frame["task"], frame["reward"], strict=True))


def dies_after(monkeypatch: pytest.MonkeyPatch, num_batches: int, error: BaseException) -> None:
    """Make the next evaluation fail with `error` after `num_batches` batches."""
    whole, played = Solo.play, 0

    async def play(self: Solo, assignment: Assignment) -> Played:
        nonlocal played
        played += 1
        if played > num_batches:
            raise error
        return await whole(self, assignment)

    monkeypatch.setattr(Solo, "play", play)


def count_plays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that are played from now on."""
    whole, counted = Solo.play, list[int]()

    async def play(self: Solo, assignment: Assignment) -> Played:
        counted.append(len(assignment.tasks))
        return await whole(self, assignment)

    monkeypatch.setattr(Solo, "play", play)
    return counted


# --- what is known of the tasks -----------------------------------------------------------------------------------


def out_of_reach(monkeypatch: pytest.MonkeyPatch, *, name: str = "word") -> None:
    """Every fourth task of the laboratory."""
    facts = staticmethod(lambda task: TaskFacts(f"{name} {task}", reachable=task % 4 != 0))
    monkeypatch.setattr(Lab, "facts", facts)


# --- a model, an endpoint -----------------------------------------------------------------------------------------


def play_model(model: str = "model", out: str = "evals/base", asked: EvalRequest = OTHER) -> Evaluation:
    return evaluate_model(Frozen(model), Path(out), asked, say=silent)
