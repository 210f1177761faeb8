"""A sample of the episodes as text, for people to read: RUN/trajectories/<worker>.jsonl, and one file for every later
evaluation.

Which episodes is a pure function of the configuration and the assignment. The worker writes them itself: no update
needs them, so they would only burden the network and the journal, and losing some loses nothing. Invariant: they take
bounded space (`MAX_CHARACTERS` a text, `MAX_TURNS` a trajectory, `store.trajectories` a version), and an evaluation
never fails because they cannot be written.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hpc_es.config.schema import Config
from hpc_es.envs.base import Message
from hpc_es.files import open_regular
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Episode, EvalId, from_first_release
from hpc_es.seeds import eval_sampling_seed

log = logging.getLogger(__name__)

MAX_CHARACTERS = 20_000
MAX_TURNS = 200


class Turn(Struct, frozen=True):
    """What the environment showed (without history), the answer of the model, and its reward."""

    messages: tuple[Message, ...]
    answer: str
    """The answer as generated, thoughts included."""
    reward: float
    invalid: bool = False


class Trajectory(Struct, frozen=True):
    """One episode. `turns` has the first MAX_TURNS; `episode` counts all of them."""

    eval_id: EvalId
    position: int
    """Place in the task batch, from 0."""
    episode: Episode
    turns: tuple[Turn, ...]
    worker: str = ""


def is_sampled(config: Config, assignment: Assignment, position: int) -> bool:
    """Whether this episode belongs to the sample of its version.

    Of the members the sample takes the first task of the first one, the second task of the second, and so on, so that
    it shows different members on different tasks; of the evaluated policy the first tasks, each played for the first
    time.
    """
    wanted, slot = config.store.trajectories, assignment.eval_id.slot
    if assignment.purpose == "eval":
        is_first_repeat = assignment.sampling_seed == eval_sampling_seed(config.run.seed, first=assignment.tasks[0])
        return is_first_repeat and assignment.tasks[position] < wanted
    if assignment.purpose == "centre":
        return False
    members, tasks = config.es.population, len(assignment.tasks)
    rounds = range(slot, wanted, members)  # k-th of the sample: member k mod N
    return any((slot + k // members) % tasks == position for k in rounds)


def shortened(text: str) -> str:
    """The text, without its middle if it is longer than MAX_CHARACTERS. Always valid UTF-8."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return text.encode(errors="replace").decode()


class TrajectoryFile:
    """The file of one worker. It is created with the first trajectory."""

    def __init__(self, path: Path, worker: str) -> None:
        self._path, self._worker = path, worker

    def append(self, trajectories: Sequence[Trajectory]) -> None:
        """Append trajectories to the file. If that fails, a warning is logged."""
        named = (msgspec.structs.replace(trajectory, worker=self._worker) for trajectory in trajectories)
        lines = b"".join(msgspec.json.encode(trajectory) + b"\n" for trajectory in named)
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            log.warning("trajectories could not be written: %s", error)


def read_trajectories(paths: RunPaths) -> Iterator[Trajectory]:
    """All trajectories of a run itself, in no particular order. An evaluation that was made twice appears twice."""
    for path in paths.trajectory_files():
        yield from read_trajectory_file(path)


def read_trajectory_file(path: Path) -> Iterator[Trajectory]:
    """Trajectories of one file. Incomplete lines, of workers that were killed, are left out."""
    with open(open_regular(path), "rb") as file:
        for line in file:
            try:
                kept = msgspec.json.decode(line, type=Trajectory)
            except msgspec.DecodeError:
                continue
            yield msgspec.structs.replace(kept, eval_id=from_first_release(kept.eval_id))
