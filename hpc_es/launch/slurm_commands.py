"""The commands of Slurm and how their output is read: all that this project knows of them is in this module.

Invariants: the controller's word about a job comes before the accounting's, which lags and calls a job ended
(NODE_FAIL, PREEMPTED) that has long been queued again; everything but sbatch works without accounting; an answer that
cannot be understood counts as none, never as another one. Output formats are asked for explicitly, since JSON and
defaults differ between versions.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_es.config.yaml12 import seconds
from hpc_es.errors import LaunchError

TIMEOUT_S = 60.0

_ENDED_WELL = frozenset(("COMPLETED",))
_ENDED_BY_SLURM = frozenset(("CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE", "REVOKED"))
_ENDED_BADLY = frozenset(("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "GONE"))
FINAL = _ENDED_WELL | _ENDED_BY_SLURM | _ENDED_BADLY
"""States that a job does not leave again. GONE is ours: it has ended, and nothing remembers how, as with a
pending element of an array that was cancelled."""

_FAILED = _ENDED_BADLY - {"GONE"} | {"NODE_FAIL", "TIMEOUT", "PREEMPTED", "DEADLINE"}

UNKNOWN = "UNKNOWN"
"""Also ours: the controller did not answer, so nothing is known."""

_UNSURE = frozenset(("NODE_FAIL", "PREEMPTED"))
"""States of the accounting that a job which is requeued leaves again."""

_REASONS = {
    "Priority": "jobs of higher priority come first",
    "Resources": "waits for free nodes",
    "JobArrayTaskLimit": "slurm.max_parallel workers run already",
    "Dependency": "waits for the head to start",
    "BeginTime": "was requeued, starts again shortly",
    "QOSMaxJobsPerUserLimit": "your limit of running jobs in this QOS",
    "QOSMaxGRESPerUser": "your limit of GPUs in this QOS",
    "QOSMaxCpuPerUserLimit": "your limit of CPUs in this QOS",
    "AssocGrpGRES": "your group's limit of GPUs",
    "AssocGrpCpuLimit": "your group's limit of CPUs",
    "AssocMaxJobsLimit": "your account's limit of running jobs",
    "PartitionDown": "the partition is down: ask the administrators",
    "PartitionTimeLimit": "asks for more time than the partition allows: lower slurm.<role>.time",
    "PartitionNodeLimit": "asks for more than the partition has",
    "ReqNodeNotAvail": "the nodes it needs are down or reserved",
    "JobHeldUser": "is held: scontrol release JOB",
    "JobHeldAdmin": "is held by an administrator",
    "launch_failed_requeued_held": "could not be started and is held: scontrol release JOB, once the node is repaired",
}


_ENDED_BY_ITSELF = frozenset(("NonZeroExitCode", "JobLaunchFailure", "RaisedSignal", "None", ""))
"""Reasons of a failed job that say less than its exit code. JobLaunchFailure is also what Slurm 22.05 calls a batch
script that was killed."""


class NotInstalled(LaunchError):
    """A command of Slurm does not exist on this machine or in this container."""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    error: str


@dataclass(frozen=True)
class JobStatus:
    """One job, or one element of an array, as Slurm sees it."""

    name: str
    """12, or 12_3."""
    state: str
    """A word of Slurm's, GONE, or UNKNOWN."""
    reason: str = ""
    """Why it is pending or failed, in Slurm's word."""
    node: str = ""
    seconds_left: float | None = None
    """Until its time limit."""
    seconds_running: float | None = None
    """Since it started; None unless it is running."""
    exit_code: str = ""
    """7:0, or 0:9 where signal 9 ended it, of a job that failed; empty where Slurm was not asked for it."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    @property
    def has_failed(self) -> bool:
        """Whether it ended for good for a reason that lies in the job or its node, not by anyone's wish."""
        return self.state in _FAILED

    @property
    def explanation(self) -> str:
        """The reason for a person."""
        if self.has_failed and (ending := _ending(self.exit_code)) and self.reason.split(":")[0] in _ENDED_BY_ITSELF:
            return ending
        meaning = _REASONS.get(self.reason.split(",")[0])
        return f"{self.reason}: {meaning}" if meaning else self.reason


def run(command: Sequence[str]) -> Answer:
    """A command that does not answer in time has failed. Errors: NotInstalled when there is no such command."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S, env=_environment()
        )
    except FileNotFoundError:
        raise NotInstalled(f"there is no {command[0]} here: this must run where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{command[0]} did not answer within {TIMEOUT_S:g} s")
    return Answer(done.returncode, done.stdout, done.stderr.strip())


def _environment() -> dict[str, str]:
    """Ours without what would beat a script's own lines (SBATCH_*), change a format (SQUEUE_*, SACCT_*), or pass the
    identity of the job that we run in on to the one that we queue (SLURM_*)."""
    foreign = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {key: value for key, value in os.environ.items() if key in kept or not key.startswith(foreign)}


class Slurm:
    """The commands. Tests replace `run`."""

    def __init__(self, run: Callable[[Sequence[str]], Answer] = run) -> None:
        self._run = run
        self._forgotten: dict[str, JobStatus] = {}
        """How jobs ended that only the accounting still knows. They cannot change, so it is asked once."""

    def require(self) -> None:
        """Errors: LaunchError where there is no Slurm to queue jobs with."""
        try:
            self._run(["sbatch", "--version"])
        except LaunchError as error:
            raise LaunchError(f"{error}; `hpc-es run CONFIG` runs on this machine, without Slurm") from None

    def submit(self, script: Path, *flags: str) -> str:
        """Queue a script; its job id. Errors: LaunchError with sbatch's own words."""
        answer = self._run(["sbatch", "--parsable", *flags, str(script)])
        match = re.search(r"^(\d+)(;.*)?$", answer.out, re.MULTILINE)
        if answer.code or not match:
            raise LaunchError(_refusal(answer))
        return match[1]

    def check(self, script: Path) -> None:
        """Have sbatch look at a script without queueing it. Errors: LaunchError with sbatch's own words."""
        answer = self._run(["sbatch", "--test-only", str(script)])
        if answer.code:
            raise LaunchError(_refusal(answer))

    def cancel(self, job_ids: Iterable[str], *flags: str) -> None:
        """Jobs that have ended already are no error. Errors: LaunchError when the controller refuses."""
        answer = self._run(["scancel", *flags, *job_ids])
        if answer.code and "Invalid job id" not in answer.error:
            raise LaunchError(f"scancel: {answer.error}")

    def requeue(self, name: str, *, after: str | None = None) -> None:
        """Have a job start again, from the queue. `name` is 12 or 12_3: with 12 a whole array would be requeued.
        `after`: not before this job has started; where Slurm refuses that, the job starts as soon as it can.

        Errors: LaunchError when the controller refuses to requeue it.
        """
        answer = self._run(["scontrol", "requeue", name])
        if answer.code:
            raise LaunchError(f"scontrol requeue {name}: {answer.error or answer.out.strip()}")
        if after is not None:  # a dependency can only be given to a job that is pending, so it comes second
            self._run(["scontrol", "update", f"jobid={name}", f"dependency=after:{after}"])

    def partitions(self) -> tuple[str, ...]:
        """Existing partitions; empty if sinfo does not list them."""
        answer = self._run(["sinfo", "--noheader", "--format=%R"])
        return tuple(sorted(set(answer.out.split()))) if answer.code == 0 else ()

    def time_limits(self) -> dict[str, float]:
        """Longest time of a job, in seconds, in each partition that has a limit; the default partition also as ""."""
        answer = self._run(["sinfo", "--noheader", "--format=%P|%l"])
        limits: dict[str, float] = {}
        for line in answer.out.splitlines() if answer.code == 0 else ():
            name, _, text = line.strip().partition("|")
            if (limit := _seconds(text)) is not None:
                limits[name.rstrip("*")] = limit
                if name.endswith("*"):
                    limits[""] = limit
        return limits

    def statuses(self, job_ids: Sequence[str], elements: Sequence[str] = ()) -> list[JobStatus]:
        """Every job and every element of every array among `job_ids`, in order. Errors: LaunchError without squeue.

        `elements`: those of the arrays that must not be left out (12_3). The controller forgets each of them minutes
        after its end, even while its siblings run. Others that were cancelled before they started are one entry with
        the name of the array, or none.
        """
        queued = self._ask_controller(job_ids)
        known = {status.name: status for status in queued or ()}
        lost = [job_id for job_id in job_ids if not any(_belongs(name, job_id) for name in known)]
        named = {*known, *lost}
        lost += [name for name in elements if name not in named and name.partition("_")[0] not in named]
        if lost:
            for status in self._recall(lost):
                if queued is None and status.state in _UNSURE:
                    status = JobStatus(status.name, UNKNOWN)
                known[status.name] = status
        for job_id in lost:
            if not any(_belongs(name, job_id) for name in known):
                known[job_id] = JobStatus(job_id, UNKNOWN if queued is None else "GONE")
        return sorted(known.values(), key=lambda status: _order(status.name))

    def with_exit_codes(self, statuses: Sequence[JobStatus]) -> list[JobStatus]:
        """The same, where failed jobs that the controller still knows have their exit codes."""
        asked = dict.fromkeys(
            status.name.partition("_")[0] for status in statuses if status.has_failed and not status.exit_code
        )
        codes = {name: code for job_id in asked for name, code in self._exit_codes(job_id)}
        return [
            replace(status, exit_code=codes.get(status.name, "")) if not status.exit_code else status
            for status in statuses
        ]

    def _exit_codes(self, job_id: str) -> Iterator[tuple[str, str]]:
        """(12_3, 7:0) of the job and its elements. squeue has exit codes too, in forms that differ between versions."""
        answer = self._run(["scontrol", "show", "job", job_id, "--oneliner"])
        for line in answer.out.splitlines() if answer.code == 0 else ():
            facts = dict(re.findall(r"\b(JobId|ArrayJobId|ArrayTaskId|ExitCode)=(\S+)", line))
            if "ExitCode" in facts and (name := facts.get("ArrayJobId", facts.get("JobId"))):
                yield f"{name}_{facts['ArrayTaskId']}" if "ArrayTaskId" in facts else name, facts["ExitCode"]

    def _recall(self, names: Sequence[str]) -> list[JobStatus]:
        """What the accounting says of jobs that the controller does not name; how one ended is asked only once."""
        asked = [name for name in names if name not in self._forgotten]
        answers = self._ask_accounting(asked) if asked else []
        remembered = [self._forgotten[name] for name in names if name in self._forgotten]
        for each in answers:
            if "_" in each.name and each.is_final and each.state not in _UNSURE:
                self._forgotten[each.name] = each
        return [*answers, *remembered]

    def _ask_controller(self, job_ids: Sequence[str]) -> list[JobStatus] | None:
        """None when it does not answer."""
        command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}"]
        answer = self._run([*command, "--format=%i|%T|%N|%L|%r|%M"])
        if answer.code:
            return [] if "Invalid job id" in answer.error else None
        return list(_parse(answer.out, "left", "reason", "running"))

    def _ask_accounting(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Empty when there is none."""
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}"]
        try:
            answer = self._run([*command, "--format=JobID,State,NodeList,ExitCode"])
        except LaunchError:
            return []  # it was not even installed here
        return list(_parse(answer.out, "exit_code")) if answer.code == 0 else []


def _refusal(answer: Answer) -> str:
    said = answer.error or answer.out.strip() or f"exit code {answer.code}"
    return said.replace("sbatch: error: ", "").replace("allocation failure: ", "")


def _parse(text: str, *further: str) -> Iterator[JobStatus]:
    """Lines of name|state|nodes, and then what `further` names. Lines of another form are skipped."""
    for line in text.splitlines():
        name, state, nodes, *values = (*line.strip().split("|"), "", "")
        word = re.match(r"[A-Z_]+", state)  # "CANCELLED by 1000", "COMPLETED+"
        if word:
            said = dict(zip(further, values, strict=False))
            reason, code = said.get("reason", ""), said.get("exit_code", "")
            is_running = word[0] in ("RUNNING", "COMPLETING", "SUSPENDED")
            status = JobStatus(
                name,
                word[0],
                # a job that was cancelled in the queue keeps the reason why it waited
                reason="" if reason in ("None", "(null)") or word[0] == "CANCELLED" else reason,
                node="" if nodes in ("None assigned", "(null)", "N/A") else nodes,
                seconds_left=_seconds(said.get("left", "")) if is_running else None,
                seconds_running=_seconds(said.get("running", "")) if is_running else None,
                exit_code=code if word[0] in _FAILED and re.fullmatch(r"\d+:\d+", code) else "",
            )
            for one in _expand(name):
                yield replace(status, name=one)


def _ending(exit_code: str) -> str:
    """7:0 -> exit code 7; 0:9 -> killed by SIGKILL; empty where there is nothing to say."""
    code, _, number = exit_code.partition(":")
    if number not in ("", "0"):
        names = {str(each.value): each.name for each in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"
    return f"exit code {code}" if code not in ("", "0") else ""


def _expand(name: str) -> Iterator[str]:
    """12 -> 12; 12_[0-1,4%2] -> 12_0, 12_1, 12_4. Anything else (steps, 12+0) -> nothing."""
    if re.fullmatch(r"\d+(_\d+)?", name):
        yield name
    elif match := re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", name):
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            if first.isdigit() and (last or first).isdigit():
                yield from (f"{match[1]}_{i}" for i in range(int(first), int(last or first) + 1))


def _seconds(text: str) -> float | None:
    try:
        return float(seconds(text))
    except ValueError:  # UNLIMITED, INVALID, NOT_SET, or nothing
        return None


def _belongs(name: str, job_id: str) -> bool:
    """Whether a job is, or is an element of, the one that was asked for."""
    return name == job_id or name.startswith(f"{job_id}_")


def _order(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("_"))
