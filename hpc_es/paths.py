"""All file names in a run folder.

RUN/
  config.yaml              the resolved configuration, which head and workers read
  launcher.lock            lock of the `hpc-es run` that controls the run, with its process id
  rendezvous.json          where the live head listens (atomic rename)
  journal.<g>.hpcj         one segment per head start
  run.h5                   derived from the journal; can be deleted at any time
  checkpoints/v00000010/   theta_10 and its manifest
  training/                v00000010.msgpack, the closed cohort from which the trainer makes theta_10, and v00000010/,
                           the trainer's theta_10 until it is committed
  secrets/                 key pairs of head and workers, with mode 0600; the folder has mode 0700
  logs/                    head.log, worker-<seat>.log; for Slurm jobs head-<job>.<attempt>.log,
                           worker-<job>_<task>.<attempt>.log (-<step>.<number> before the attempt, if several
                           workers share a job), and Slurm's own output: slurm-<job>_<task>.out
  seats/                   <seat>.json: the state of each worker, for `hpc-es status`
  slurm/                   the submitted scripts, and <job>.json for every job of the run
  tasks.json               the evaluation tasks: name and horizon of each, and whether it can succeed at all
  evals/                   journals of evaluations made after the run; NAME.tasks.json: their tasks,
                           NAME.trajectories.jsonl: a sample of their episodes as text;
                           retention-NAME.json: a version's results on MMLU-Pro or HellaSwag
  trajectories/            <worker>.jsonl: a sample of the worker's episodes as text
  traces/                  <evaluation>-<hash>.trace: the tokens that were sampled in its episodes (see traces.py)
  report/                  tables and figures
  base/                    only in a fork: theta_V of the original run
  fork.json                only in a fork: original run, version and digest, and the changed settings
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

MAX_GENERATION = 999_999_999

_SEGMENT = re.compile(r"journal\.([1-9][0-9]{0,8})\.hpcj")
_LIKE_A_SEGMENT = re.compile(r"journal\..*\.hpcj")
_CHECKPOINT = re.compile(r"v([0-9]{8})")
_LIKE_A_CHECKPOINT = re.compile(r"v[-+]?\d+")
_JOB_LOG = re.compile(
    r"(slurm|head|worker)-(?P<job>[0-9]+(_[0-9]+)?)(-[0-9]+\.[0-9]+)?(\.(?P<attempt>[0-9]+))?\.(out|log)"
)
_TASKS = ".tasks.json"


@dataclass(frozen=True)
class RunPaths:
    """The paths of all files in one run folder. Creates nothing."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def launcher_lock(self) -> Path:
        return self.root / "launcher.lock"

    @property
    def rendezvous(self) -> Path:
        return self.root / "rendezvous.json"

    @property
    def hdf5(self) -> Path:
        return self.root / "run.h5"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def training_cohort(self, version: int) -> Path:
        """The closed cohort from which the trainer makes theta_version."""
        return self.root / "training" / f"v{version:08d}.msgpack"

    def trained(self, version: int) -> Path:
        """The trainer's checkpoint of theta_version, which moves to `checkpoints` once it is committed."""
        return self.root / "training" / f"v{version:08d}"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def seats(self) -> Path:
        return self.root / "seats"

    def seat(self, name: str) -> Path:
        return self.seats / f"{quote(name, safe='')[:200]}.json"  # a seat's name may have any characters

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    def slurm_job(self, job_id: str) -> Path:
        return self.slurm / f"{job_id}.json"

    def slurm_script(self, role: str) -> Path:
        return self.slurm / f"{role}.sbatch"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks.json"

    @property
    def evals(self) -> Path:
        return self.root / "evals"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def trajectory_file(self, worker: str) -> Path:
        return self.trajectories / f"{worker}.jsonl"

    def trajectory_files(self) -> list[Path]:
        """Existing files of trajectories, by name."""
        return sorted(self.trajectories.glob("*.jsonl"))

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def fork(self) -> Path:
        return self.root / "fork.json"

    def segment(self, generation: int) -> Path:
        return self.root / f"journal.{generation}.hpcj"

    def segments(self) -> list[tuple[int, Path]]:
        """(generation, path) of every journal segment, in order. Similar names are ignored, with a warning."""
        named = _numbered(self.root, _SEGMENT, _LIKE_A_SEGMENT, "a journal segment is called journal.1.hpcj")
        return _only(Path.is_file, named, "a journal segment is a file")

    def later_eval(self, name: str) -> Path:
        """Journal of an evaluation made after the run."""
        return self.evals / f"{name}.hpcj"

    def later_eval_tasks(self, name: str) -> Path:
        """The tasks of an evaluation made after the run."""
        return self.evals / f"{name}{_TASKS}"

    def later_eval_trajectories(self, name: str) -> Path:
        """A sample of the episodes of an evaluation made after the run."""
        return self.evals / f"{name}.trajectories.jsonl"

    def later_evals(self) -> list[Path]:
        """Journals of all evaluations made after the run, by name."""
        return sorted(self.evals.glob("[!.]*.hpcj"))

    def checkpoint(self, version: int) -> Path:
        return self.checkpoints / f"v{version:08d}"

    def written_checkpoints(self) -> list[tuple[int, Path]]:
        """(version, path) of every complete checkpoint, in order. Similar names are ignored, with a warning."""
        named = _numbered(self.checkpoints, _CHECKPOINT, _LIKE_A_CHECKPOINT, "a checkpoint is called v00000010")
        return _only(Path.is_dir, named, "a checkpoint is a folder")

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def job_logs(self, job_id: str) -> list[Path]:
        """Existing logs of a Slurm job: Slurm's output, then one log per attempt; for an array (12), task by task."""
        found = []
        for path in self.logs.glob("*-[0-9]*"):
            match = _JOB_LOG.fullmatch(path.name)
            if match and job_id in (match["job"], match["job"].partition("_")[0]):
                task = match["job"].partition("_")[2]
                found.append(((int(task or 0), int(match["attempt"] or -1)), path))
        return [path for _, path in sorted(found)]


def retention_record(folder: Path, name: str) -> Path:
    """File of one measurement of retention, in RUN/evals or in the folder for a model."""
    return folder / f"retention-{name}.json"


def retention_records(folder: Path) -> list[Path]:
    """Existing measurements of retention, by name."""
    # An evaluation may itself be named retention-NAME; the file with its tasks is not a measurement.
    return sorted(path for path in folder.glob("retention-*.json") if not path.name.endswith(_TASKS))


def _numbered(folder: Path, pattern: re.Pattern[str], similar: re.Pattern[str], rule: str) -> list[tuple[int, Path]]:
    """(number, path) of all names that match the pattern, in order. Warns about similar names as likely mistakes."""
    if not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            found.append((int(match[1]), path))
        elif similar.fullmatch(path.name):
            _ignore(path, rule)
    return sorted(found)


def _only(kind: Callable[[Path], bool], named: list[tuple[int, Path]], rule: str) -> list[tuple[int, Path]]:
    found = []
    for number, path in named:
        if kind(path):
            found.append((number, path))
        elif path.exists() or path.is_symlink():  # otherwise it was removed in the meantime
            _ignore(path, rule)
    return found


def _ignore(path: Path, rule: str) -> None:
    warnings.warn(f"{path} is ignored: {rule}; move it elsewhere", stacklevel=4)
