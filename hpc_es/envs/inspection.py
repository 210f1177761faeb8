"""Ask an environment what a run must know before it starts: the number of tasks, and facts about them.

A user's environment is asked in a separate process, because it may end, block or damage that process; built-in ones are
asked in this process. Invariants: no call takes longer than its time limit; every failure is an EnvError that names the
call; a user's environment has no effect on this process.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from hpc_es import envs, errors
from hpc_es.calls import CALLS, Calls, cause, during, grace_s
from hpc_es.config.schema import Config
from hpc_es.envs.base import Env, TaskFacts
from hpc_es.errors import EnvError, HpcEsError
from hpc_es.quoting import quote_error, quote_value
from hpc_es.records import Purpose

Value = TypeVar("Value")

IMPORT_S = 120.0
"""Time limit for importing the environment's module: torch on a slow file system takes a minute."""


MAX_TASKS = 2**53
"""Most tasks, so that task indices fit run.h5 and every JSON reader."""
MAX_ID, MAX_HORIZON = 1000, 2**31 - 1
"""Most characters of a task's id, and largest horizon in turns."""


class Inspection(msgspec.Struct, frozen=True):
    """What an environment says about itself."""

    num_tasks: int
    shows_images: bool
    facts: list[TaskFacts]
    """Facts about the first tasks, up to the requested number."""


class _Answer(msgspec.Struct, frozen=True):
    """Answer of the process that asked the environment: an inspection, or one of our errors by name."""

    found: Inspection | None = None
    error: str = ""
    text: str = ""


def inspect(config: Config, kind: Purpose, num_facts: int = 0) -> Inspection:
    """Create the environment of a configuration, ask it, and close it.

    Errors: ConfigError for an option or a name that does not exist; EnvError for any fault of the environment, also
    when it ends the process that asks it, or does not answer within task.step_timeout.
    """
    if config.task.env in envs.registered():
        return _inspect(config, kind, num_facts)
    return _inspect_elsewhere(config, kind, num_facts)


def _inspect(config: Config, kind: Purpose, num_facts: int) -> Inspection:
    def ask(what: str, call: Callable[[], Value]) -> Value:
        return _within(config.task.step_timeout, "task.step_timeout=", f"{config.task.env}: {what}", call)

    _within(IMPORT_S, "", f"{config.task.env}: importing its module", lambda: envs.find(config.task.env))
    env = ask("making the environment", lambda: envs.make_for(config, kind))
    try:
        num_tasks, shows_images = ask("num_tasks", lambda: (_count(env, config), bool(env.shows_images)))
        wanted = range(min(num_facts, num_tasks))
        facts = [ask(f"facts({task})", functools.partial(_facts, env, task)) for task in wanted]
    except BaseException:
        with contextlib.suppress(EnvError):  # the first error is the cause
            ask("close", env.close)
        raise
    ask("close", env.close)
    return Inspection(num_tasks, shows_images, facts)


def _within(limit_s: float, setting: str, what: str, call: Callable[[], Value]) -> Value:
    """Run an environment's code for at most `limit_s`; `setting` is the key of this limit, like `task.step_timeout=`.

    Errors: EnvError when the code raises or does not return (its thread then keeps running); our own errors pass
    unchanged.
    """
    outcome: list[Value | BaseException] = []
    has_ended = threading.Event()

    def run() -> None:
        with CALLS.noted(what):
            try:
                outcome.append(call())
            except BaseException as error:
                outcome.append(error)
        has_ended.set()

    threading.Thread(target=run, daemon=True, name="env").start()
    if not has_ended.wait(limit_s):
        raise EnvError(f"{what} did not return within {setting}{limit_s:g} s")
    if not isinstance(result := outcome[0], BaseException):
        return result
    if isinstance(result, HpcEsError):
        raise result
    raise EnvError(f"{what} raised {quote_error(result)}") from result


def _count(env: Env, config: Config) -> int:
    num_tasks = env.num_tasks
    try:
        return checked_count(num_tasks)
    except EnvError as error:
        raise EnvError(f"{config.task.env}: {error}") from None


def _facts(env: Env, task: int) -> TaskFacts:
    return checked_facts(env.facts(task), task)


def checked_count(num_tasks: object) -> int:
    """The number of tasks that an environment reports. Errors: EnvError when it is not a positive int."""
    if type(num_tasks) is not int or not 0 < num_tasks <= MAX_TASKS:
        raise EnvError(f"num_tasks is {quote_value(num_tasks)}; it must be an int from 1 to {MAX_TASKS}")
    return num_tasks


def checked_facts(facts: object, task: int) -> TaskFacts:
    """Facts about one task. Errors: EnvError when they are not what the contract allows."""
    try:
        found = msgspec.json.decode(msgspec.json.encode(facts), type=TaskFacts)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise EnvError(f"facts({task}) must return TaskFacts: {quote_error(error)}, in {quote_value(facts)}") from None
    if len(found.id) > MAX_ID or not 0 <= (found.horizon or 0) <= MAX_HORIZON:
        raise EnvError(
            f"facts({task}) must have an id of at most {MAX_ID} characters, and a horizon that is None or from 0 to "
            f"{MAX_HORIZON}, in {quote_value(facts)}"
        )
    return found


# --- in a separate process ----------------------------------------------------------------------------------------

_PROGRAM = "import sys; sys.path[:] = {path!r}; from hpc_es.envs.inspection import answer; answer(*sys.argv[1:])"


def _inspect_elsewhere(config: Config, kind: Purpose, num_facts: int) -> Inspection:
    limit_s = config.task.step_timeout
    with tempfile.TemporaryDirectory(prefix="hpc-es-env-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
        (folder / "calls").touch()
        program = _PROGRAM.format(path=sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", program, name, kind, str(num_facts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # so that everything it leaves behind can be killed
        )
        try:
            code = process.wait(2 * IMPORT_S + (num_facts + 3) * (limit_s + grace_s(limit_s)))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        try:
            answer = msgspec.json.decode((folder / "answer.json").read_bytes(), type=_Answer)
        except (OSError, msgspec.MsgspecError):
            raise EnvError(_died(config, Calls.of(folder / "calls"), code)) from None
    if answer.found is not None:
        return answer.found
    kind_of_error = getattr(errors, answer.error, EnvError)
    raise kind_of_error(answer.text)


def _died(config: Config, calls: Calls, code: int | None) -> str:
    how = "did not end" if code is None else calls.last_words or cause(code)
    return f"{config.task.env}: the process that asked for its tasks {how}{during(calls.running())}"


def answer(folder: str, kind: Purpose, num_facts: str) -> None:
    """Entry point of the separate process. It answers in a file, since the environment may close or use its pipes."""
    path = Path(folder)
    CALLS.share(path / "calls")
    config = Config.model_validate_json((path / "config.json").read_text(encoding="utf-8"))
    try:
        said = _Answer(_inspect(config, kind, int(num_facts)))
    except HpcEsError as error:
        said = _Answer(None, type(error).__name__, str(error))
    unfinished = path / "answer"
    unfinished.write_bytes(msgspec.json.encode(said))
    unfinished.rename(path / "answer.json")
    os._exit(0)  # a thread that never returns, ours or the environment's, must not keep this process alive
