"""Put a run into Slurm's queue: one job for the head, one array of jobs for the workers.

submitit writes the scripts (its parameters are checked there); submitit's own jobs, a pickled function below a shell,
would keep signals from the roles and count a requeue as an end, so the jobs here run `hpc-es head` and `hpc-es worker`
by exec, as slurm/*.sbatch do. Invariant: what a dry run shows is what is submitted, byte for byte.
"""

import contextlib
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from submitit import SlurmExecutor

from hpc_es.config import Config
from hpc_es.config.schema import JobConfig
from hpc_es.errors import LaunchError
from hpc_es.files import read_json
from hpc_es.launch import prepare
from hpc_es.launch.slurm_commands import UNKNOWN, JobStatus, Slurm
from hpc_es.paths import RunPaths

if TYPE_CHECKING:
    from hpc_es.store import Run

Role = Literal["head", "worker"]

LEAVING_S = 60.0
"""How long workers may take to end after their head."""
NUM_LINES_QUOTED = 15
"""Lines of a log that an error shows."""

_POLL_S = (0.5, 10.0)
"""First and longest pause between two questions to Slurm."""

_STAYING = """\
# This script stays: it passes signals on, and queues the job again when it should be.
trap 'kill -USR2 $!' USR2
trap 'kill -TERM $!' TERM
{command} &
role=$!
wait $role
while kill -0 $role 2>/dev/null; do wait $role; done  # a signal interrupts wait
wait $role
code=$?
if [ $code -eq 4 ]; then  # the time is up, and the job is not queued again yet
    trap '' TERM
    job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
    for pause in 0 2 4 8 16 32; do
        sleep $pause
        scontrol requeue "$job" && break
    done
fi
exit $code"""
"""How a role runs in a container, which has no scontrol, and how several workers run in one job. Any other role
replaces the script by exec, and does all this itself."""

_JOB_ID = re.compile(r"[0-9]{1,18}")


class Recorded(msgspec.Struct, frozen=True):
    """Contents of RUN/slurm/<job>.json: one job of the run, submitted by us or by hand."""

    job_id: str
    role: Role
    time: float
    """Time of its submission or first start, in seconds since the epoch."""
    num_elements: int = 0
    """Of an array, whose elements are then 0, 1, ...; 0: it is not such an array, or that is not known."""


@dataclass(frozen=True)
class Job:
    """A handle of one job, one array, or one task of an array (12, 12, 12_3), much like submitit's.

    Nothing is cached: Slurm is asked every time. Errors: LaunchError where Slurm's commands fail.
    """

    job_id: str
    role: Role
    slurm: Slurm
    paths: RunPaths
    """The file names of the run that it belongs to."""
    num_elements: int = 0
    """See `Recorded`."""

    @property
    def elements(self) -> list[str]:
        """12_0, 12_1, ... of an array whose size is known."""
        return [f"{self.job_id}_{i}" for i in range(self.num_elements)]

    def status(self) -> list[JobStatus]:
        """The job, or every task of the array."""
        return self.slurm.statuses([self.job_id], self.elements)

    @property
    def tasks(self) -> list["Job"]:
        """A handle for each task of the array, in order; a job without an array has itself as its only task."""
        return [replace(self, job_id=status.name, num_elements=0) for status in self.status()]

    @property
    def state(self) -> str:
        """One word for all tasks: RUNNING if one runs, else what is not final, else the first failure."""
        return summarise(self.status())

    def done(self) -> bool:
        """Whether it has ended for good; a job that will be requeued has not."""
        return all(status.is_final for status in self.status())

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until it has ended for good; returns its state. Errors: LaunchError when the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause, longest = _POLL_S
        while True:
            statuses = self.status()
            if all(status.is_final for status in statuses):
                return summarise(statuses)
            if deadline is not None and time.monotonic() > deadline:
                raise LaunchError(f"{self.role} {self.job_id} is {summarise(statuses)} after {timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def result(self, timeout_s: float | None = None) -> str:
        """Wait as `wait` does, and return COMPLETED. Errors: LaunchError for any other end, with the end of the log."""
        if (failure := self.exception(timeout_s)) is not None:
            raise failure
        return "COMPLETED"

    def exception(self, timeout_s: float | None = None) -> LaunchError | None:
        """Wait as `wait` does; None if it completed, else an error that says how it ended and has the end of its log.

        Errors: LaunchError when the time is up.
        """
        state = self.wait(timeout_s)
        if state == "COMPLETED":
            return None
        end = "\n".join(self.stdout().splitlines()[-NUM_LINES_QUOTED:]) or "(its log is empty)"
        failed = [status for status in self.slurm.with_exit_codes(self.status()) if status.has_failed]
        why = f" ({failed[0].explanation})" if failed and failed[0].explanation else ""
        return LaunchError(f"{self.role} {self.job_id} is {state}{why}; the end of its log:\n{end}")

    @property
    def log_files(self) -> list[Path]:
        """The logs that exist, oldest attempt first; what Slurm itself printed comes before them."""
        return self.paths.job_logs(self.job_id)

    def stdout(self) -> str:
        """Everything that it has printed so far, stdout and stderr, of all attempts; of an array, of all tasks."""
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in self.log_files)

    def stderr(self) -> str:
        """The same as `stdout`: both streams go to the same log."""
        return self.stdout()

    def cancel(self) -> None:
        """End it, with all its tasks. A job that has already ended is not an error."""
        self.slurm.cancel([self.job_id])


@dataclass(frozen=True)
class Submission:
    """A run in Slurm's queue: handles of its head and of its array of workers, and of both as a whole.

    It stands for its run folder wherever a path is expected.
    """

    paths: RunPaths
    """`paths.root` is the run folder, `paths.logs` has the logs, `paths.slurm` the submitted scripts."""
    head: Job
    workers: Job
    """The whole array; `workers.tasks` has a handle for each worker."""
    changed: tuple[str, ...] = ()
    """Differences, which change no bit of the result, from the configuration that the run began with."""

    def __fspath__(self) -> str:
        return str(self.paths.root)

    @property
    def job_id(self) -> str:
        """The head's: one run has one head."""
        return self.head.job_id

    @property
    def state(self) -> str:
        """The head's: when it has ended, so has the run."""
        return self.head.state

    def status(self) -> list[JobStatus]:
        """The head and every worker of this submission."""
        return self.head.slurm.statuses([self.head.job_id, self.workers.job_id], self.workers.elements)

    def done(self) -> bool:
        """Whether the head has ended for good."""
        return self.head.done()

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait for the head, then the workers; returns the head's state. Errors: LaunchError when the time is up."""
        state = self.head.wait(timeout_s)
        self.wait_for_workers()
        return state

    def result(self, timeout_s: float | None = None) -> "Run":
        """Wait for the end of the run and read its tables.

        Errors: LaunchError when the run did not finish, with the end of the head's log, or when the time is up.
        """
        from hpc_es.store import read

        if (failure := self.exception(timeout_s)) is not None:
            raise failure
        return read(self.paths.root)

    def exception(self, timeout_s: float | None = None) -> LaunchError | None:
        """Wait for the end of the run; None if it finished, else why not. Errors: LaunchError when the time is up."""
        self.wait(timeout_s)
        return self.head.exception()

    def stdout(self) -> str:
        """The head's log; `workers.stdout()` has those of the workers."""
        return self.head.stdout()

    def stderr(self) -> str:
        """The same as `stdout`."""
        return self.stdout()

    def wait_for_workers(self) -> None:
        """Wait for the workers after the end of the head, and cancel those that do not end by themselves."""
        try:
            self.workers.wait(LEAVING_S)
        except LaunchError:
            self.workers.cancel()
            self.workers.wait(LEAVING_S)

    def cancel(self) -> None:
        """End everything, also workers that were added later. The head has KillWait (30 s on most clusters) to write a
        checkpoint."""
        added = [job.job_id for job in recorded_jobs(self.paths, self.head.slurm) if job.role == "worker"]
        self.head.slurm.cancel(dict.fromkeys([self.head.job_id, self.workers.job_id, *added]))

    @property
    def finished(self) -> bool:
        """Whether all updates and evaluations are done, by the journal."""
        return prepare.is_finished(self.paths)


def submit(config: Config, *, slurm: Slurm | None = None) -> Submission:
    """Create the run folder, or resume its run, and queue its head and its workers.

    The workers wait in the queue until the head has started. Errors: ConfigError, ModelError, EnvError before anything
    is queued; LaunchError when Slurm refuses (then nothing stays queued), when the run is finished, or has a head.
    """
    slurm = slurm or Slurm()
    slurm.require()
    with prepare.launcher_lock(config):
        paths, changed = prepare.write_folder(config)
        if prepare.is_finished(paths):
            raise LaunchError(f"{paths.root} is finished; give another run.name, or look at it with `hpc-es verify`")
        prepare.check(config, in_slurm=True)
        refuse_second_head(paths, slurm)
        refuse_times_above_limits(config, slurm)
        texts = scripts(config, paths)
        paths.slurm.mkdir(exist_ok=True)
        for role, text in texts.items():
            paths.slurm_script(role).write_text(text, encoding="utf-8")
            with _advice(config, role, slurm):
                slurm.check(paths.slurm_script(role))
        with _advice(config, "head", slurm):
            head_id = slurm.submit(paths.slurm_script("head"))
        record(paths, head_id, "head")
        try:
            with _advice(config, "worker", slurm):
                # A worker that waits for a head that is still in the queue would waste a GPU.
                worker_id = slurm.submit(paths.slurm_script("worker"), f"--dependency=after:{head_id}")
        except LaunchError:
            slurm.cancel([head_id])
            raise
        record(paths, worker_id, "worker", config.slurm.workers)
    head = Job(head_id, "head", slurm, paths)
    workers = Job(worker_id, "worker", slurm, paths, config.slurm.workers)
    return Submission(paths, head, workers, tuple(changed))


def attach(root: Path, *, slurm: Slurm | None = None) -> Submission:
    """Handles of the jobs of a run folder, as `submit` returned them: of the newest head, and of the workers that were
    queued with it. Errors: LaunchError when it has no such jobs."""
    paths = RunPaths(root)
    jobs = jobs_of_last_submission(paths, slurm or Slurm())
    # by hand they may have been queued before the head
    workers = [job for job in jobs if job.role == "worker"] or [
        job for job in recorded_jobs(paths, slurm or Slurm()) if job.role == "worker"
    ][-1:]
    if not workers or jobs[0].role != "head":
        raise LaunchError(f"{root} has no jobs of a head and of workers: `hpc-es submit` queues them")
    return Submission(paths, jobs[0], workers[0])


def scripts(config: Config, paths: RunPaths) -> dict[Role, str]:
    """The exact text of both batch scripts. Pure but for the working directory and the Python it stands for."""
    return {"head": _script(config, paths, "head"), "worker": _script(config, paths, "worker")}


def flags(config: Config, paths: RunPaths, role: Role) -> list[str]:
    """The flags of sbatch that a script holds, for slurm/*.sbatch, which hold none of what a site decides."""
    lines = scripts(config, paths)[role].splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


class _Scripts(SlurmExecutor):
    """submitit's executor as a writer of scripts, which needs no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def text(self, command: str, num_elements: int | None) -> str:
        if num_elements is not None:
            self.parameters["map_count"] = num_elements  # as submitit itself makes an array
        return str(self._make_submission_file_text(command, uid=""))


def _script(config: Config, paths: RunPaths, role: Role) -> str:
    settings = config.slurm
    job: JobConfig = getattr(settings, role)
    root = paths.root.resolve()
    setup = settings.setup if job.setup is None else job.setup
    executor = _Scripts(root / "slurm")
    executor.update_parameters(
        job_name=f"{config.run.name}-{role}",
        account=settings.account,
        partition=job.partition,
        qos=job.qos,
        time=ceil(job.time / 60),
        nodes=1,
        ntasks_per_node=settings.workers_per_job if role == "worker" else 1,
        cpus_per_task=job.cpus,
        mem=job.memory,
        gres=job.gres,
        gpus_per_task=job.gpus_per_task,
        setup=["set -e", *setup, "set +e"] if setup else None,
        stderr_to_stdout=True,
        use_srun=False,
        wckey=None,
        array_parallelism=settings.max_parallel or settings.workers,
        additional_parameters={
            "chdir": str(Path.cwd()),  # model.path is relative to it
            "output": str(root / "logs" / ("slurm-%A_%a.out" if role == "worker" else "slurm-%j.out")),
            "requeue": True,
            # B: the signal is for the batch script, which the role replaces by exec
            "signal": f"B:USR2@{round(settings.signal_lead)}",
            **dict(_flag(flag) for flag in job.flags),
        },
    )
    return executor.text(_command(config, root, role), settings.workers if role == "worker" else None)


def _command(config: Config, root: Path, role: Role) -> str:
    """What the script runs once everything is set up."""
    settings = config.slurm
    job: JobConfig = getattr(settings, role)
    python, container = job.python or settings.python, job.container or settings.container
    program = "hpc-es" if container and not python else f"{shlex.quote(python or sys.executable)} -m hpc_es"
    command = f"{program} {role} {shlex.quote(str(root))}"
    if container:
        command = f"{container} {command}"
    num_tasks = settings.workers_per_job if role == "worker" else 1
    if num_tasks > 1:
        command = f"srun --ntasks={num_tasks} --cpus-per-task={job.cpus} --kill-on-bad-exit=0 {command}"
    return _STAYING.format(command=command) if container or num_tasks > 1 else f"exec {command}"


def _flag(text: str) -> tuple[str, Any]:
    name, equals, value = text.removeprefix("--").partition("=")
    return name, value if equals else True


def refuse_times_above_limits(config: Config, slurm: Slurm) -> None:
    """Most clusters accept a job that asks for more time than its partition allows, and never start it.

    A QOS may allow more, so a job that names one is Slurm's to judge. Errors: LaunchError.
    """
    limits = slurm.time_limits()
    for role in ("head", "worker"):
        job: JobConfig = getattr(config.slurm, role)
        for partition in (job.partition or "").split(","):
            limit = limits.get(partition)
            if limit is not None and not job.qos and job.time > limit:
                raise LaunchError(
                    f"slurm.{role}.time={job.time:g} is above the limit of partition {partition or '(the default)'}, "
                    f"{limit:g} s, so the job would wait for ever; ask for less: jobs are queued again at their limit"
                )


@contextlib.contextmanager
def _advice(config: Config, role: Role, slurm: Slurm) -> Iterator[None]:
    """Add the settings of a job to the error when Slurm refuses it."""
    try:
        yield
    except LaunchError as error:
        job: JobConfig = getattr(config.slurm, role)
        settings = job.model_dump(mode="json").items()
        asked = [f"slurm.{role}.{key}={value}" for key, value in settings if value not in (None, [])]
        if role == "worker":
            asked.append(f"slurm.workers={config.slurm.workers}")
        if config.slurm.account:
            asked.append(f"slurm.account={config.slurm.account}")
        there = ", ".join(slurm.partitions()) or "unknown"
        raise LaunchError(
            f"Slurm refuses the {role} job: {error}\nIt asks for {', '.join(asked)}\nPartitions here: {there}"
        ) from None


# --- the jobs of a run ----------------------------------------------------------------------------------------------


def record(paths: RunPaths, job_id: str, role: Role, num_elements: int = 0) -> None:
    """Record a job of the run, once; all processes of the job may call this at the same time."""
    paths.slurm.mkdir(exist_ok=True)
    file = paths.slurm_job(job_id)
    if not file.exists():
        unfinished = file.with_name(f".{file.name}.{time.time_ns()}")
        unfinished.write_bytes(msgspec.json.encode(Recorded(job_id, role, time.time(), num_elements)))
        unfinished.replace(file)


def recorded_jobs(paths: RunPaths, slurm: Slurm | None = None) -> list[Job]:
    """All recorded jobs of the run, in the order of their submission (jobs start in any order)."""
    slurm = slurm or Slurm()
    records = [record for file in paths.slurm.glob("[0-9]*.json") if (record := _recorded(file)) is not None]
    return [
        Job(known.job_id, known.role, slurm, paths, known.num_elements)
        for known in sorted(records, key=lambda known: int(known.job_id))
    ]


def _recorded(file: Path) -> Recorded | None:
    """The record in a file; None, with a warning, for a file that is not such a record."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        known = read_json(file, Recorded)
        if _JOB_ID.fullmatch(known.job_id) and file.stem == known.job_id:
            return known
    warnings.warn(f"{file} is ignored: it is not the record of a Slurm job; move it elsewhere", stacklevel=3)
    return None


def jobs_of_last_submission(paths: RunPaths, slurm: Slurm | None = None) -> list[Job]:
    """The newest head and what was queued after it; all jobs where no head is known."""
    jobs = recorded_jobs(paths, slurm)
    return jobs[max((i for i, job in enumerate(jobs) if job.role == "head"), default=0) :]


def job_statuses(paths: RunPaths, slurm: Slurm | None = None) -> list[tuple[Role, JobStatus]]:
    """Jobs that are not over, and those of the last submission however they ended. Empty where no job is known."""
    jobs = recorded_jobs(paths, slurm)
    if not jobs:
        return []
    last = jobs_of_last_submission(paths, slurm)
    roles, shown = {job.job_id: job.role for job in jobs}, {job.job_id for job in last}
    elements = [name for job in last for name in job.elements]
    statuses = jobs[0].slurm.with_exit_codes(jobs[0].slurm.statuses([job.job_id for job in jobs], elements))
    named = [(status.name.partition("_")[0], status) for status in statuses]
    return [(roles[job_id], status) for job_id, status in named if job_id in shown or not status.is_final]


def cancel(paths: RunPaths, slurm: Slurm | None = None) -> list[str]:
    """End every job of the run; the names of those that were not over. Errors: LaunchError when there is none."""
    active = [status.name for _, status in job_statuses(paths, slurm) if not status.is_final]
    if not active:
        raise LaunchError(f"no Slurm job of {paths.root} is queued or running")
    (slurm or Slurm()).cancel(dict.fromkeys(name.partition("_")[0] for name in active))
    return active


def summarise(statuses: list[JobStatus]) -> str:
    states = [status.state for status in statuses]
    for wanted in ("RUNNING", *(state for state, status in zip(states, statuses, strict=True) if not status.is_final)):
        if wanted in states:
            return wanted
    # GONE last: of elements that were cancelled in the queue nothing else may be known, of their siblings it is
    failures = sorted((state for state in states if state != "COMPLETED"), key=lambda state: state == "GONE")
    return next(iter(failures), "COMPLETED" if states else UNKNOWN)


def refuse_second_head(paths: RunPaths, slurm: Slurm | None = None) -> None:
    """Errors: LaunchError that names the job when the head of this run is queued or running; when Slurm fails."""
    for job in recorded_jobs(paths, slurm):
        if job.role != "head" or JobStatus(job.job_id, state := job.state).is_final:
            continue
        if state == UNKNOWN:
            raise LaunchError(
                f"Slurm does not say whether job {job.job_id}, the head of {paths.root}, has ended: try later"
            )
        script = paths.slurm_script("worker")
        how = f"`sbatch {script}`" if script.is_file() else f"`sbatch slurm/worker.sbatch {paths.root}`"
        raise LaunchError(
            f"{paths.root} has a head already: job {job.job_id} is {state}. Add workers to it with {how}, or end "
            f"it with `hpc-es cancel {paths.root}`"
        )
