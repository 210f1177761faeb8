"""Run untrusted programs in a sandbox.

bubblewrap builds a sandbox from Linux namespaces: no network, no files of the host except its programs, none of the
worker's environment variables, no privileges. Its working folder persists from one program to the next.

Invariant: when `run` returns, no process of the program is left. Anything the program did (run for ever, fork, fill
memory or disk, write endless output) is an outcome, never an error. An error means that the sandbox itself failed.

The memory limit covers the anonymous and shared memory of all processes together, measured 50 times a second, and the
kernel also limits what each process can allocate. Each socket counts as 8 MiB. Files are kept in memory too, with a
limit of their own. Pipe buffers are not counted, but bounded by the number of processes and open files.
"""

import base64
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpc_es.errors import ConfigError, EnvError

FOLDER = "/task"
"""The working folder inside the sandbox."""
GRACE = 30.0
"""Seconds that a sandbox may need beyond the program's time limit, on a busy machine."""
SECONDS_TO_END = 15.0
"""Seconds until a sandbox that should end is killed; longer than it takes to end its programs."""
_PACKAGES = "/opt/packages"
_PROGRAMS = "/opt/bin"
_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""Devices inside the sandbox, and the host's device behind each. /dev/zero is the host's /dev/full, which also reads as
zeros but cannot be mapped: a mapped /dev/zero may be shared memory that is counted in no process."""


class Limits(BaseModel):
    """Limits of one program and its child processes. Files persist, so their limits apply to the whole sandbox."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seconds: float = Field(20.0, gt=0, le=3600)
    """Wall-clock time. In a run, task.step_timeout must be at least half a minute longer."""
    cpu_seconds: float = Field(20.0, gt=0, le=36000)
    """CPU time of all cores together."""
    memory_mib: int = Field(512, ge=64)
    """Memory of all processes together. Each episode that a worker plays at once may use this much, plus disk_mib."""
    disk_mib: int = Field(64, ge=1)
    """Size of the working folder, /tmp and /dev/shm together."""
    files: int = Field(4096, ge=16)
    processes: int = Field(64, ge=1)
    """Number of processes, counting every thread."""
    output_chars: int = Field(4000, ge=2)
    """Most characters of output that are kept; the middle of a longer output is replaced by a note."""


Ended = Literal["exit", "time", "cpu", "memory", "processes", "output"]


@dataclass(frozen=True)
class Execution:
    """The result of a program in a sandbox."""

    output: str
    """Standard output and standard error in the order written; bytes that are not UTF-8 are replaced."""
    status: int
    """Exit status of the program; negative if a signal ended it (-9 for SIGKILL), 126 or 127 if it could not start."""
    ended: Ended
    """`exit` if the program ended itself, else the limit that it exceeded."""
    seconds: float


class Sandbox:
    """A sandbox, started with its first program. It ends with `close`, or when this process ends for any reason."""

    def __init__(
        self,
        limits: Limits | None = None,
        files: Mapping[str, bytes | Path] | None = None,
        *,
        packages: Sequence[str] = (),
    ) -> None:
        """`files` are put into the working folder under their relative names; `packages` are packages of the worker's
        Python that programs can import.

        Errors: ConfigError if this machine cannot create sandboxes, a file cannot be read or has an invalid name, or a
        package is not installed.
        """
        require_sandbox()
        self._limits = limits or Limits()
        self._files = {_relative(name): _content(source) for name, source in (files or {}).items()}
        if sum(map(len, self._files.values())) > self._limits.disk_mib * 2**20:
            raise ConfigError(f"disk_mib={self._limits.disk_mib} is too small for the sandbox's files; raise it")
        self._packages = {name: path for package in packages for name, path in _package(package).items()}
        self._first: _FirstProcess | None = None
        self._is_closed = False

    def run(self, command: str | Sequence[str], stdin: str = "") -> Execution:
        """Run a bash command, or a program with its arguments. Not for concurrent calls.

        Errors: EnvError when the sandbox fails.
        """
        if self._is_closed:
            raise EnvError("this sandbox is closed")
        if self._first is None:
            self._first = _FirstProcess(self._limits, self._files, self._packages)
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        return Execution(**self._first.ask({"argv": argv, "stdin": stdin}, self._limits.seconds + GRACE))

    def close(self) -> None:
        """End all programs and the sandbox. May be called twice, and by another thread while a program runs."""
        self._is_closed = True
        if self._first is not None:
            self._first.end()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@cache
def require_sandbox() -> None:
    """Check once per process that this machine can create sandboxes. Errors: ConfigError with the remedy."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        raise ConfigError(
            "programs of an agent run in bubblewrap, but there is no `bwrap` on the PATH: install it on every node "
            "with workers (apt install bubblewrap, dnf install bubblewrap, conda install -c conda-forge bubblewrap)"
        )
    try:
        first = _FirstProcess(Limits(), {}, {})
        try:
            answer = first.ask({"argv": ["bash", "-c", "true"], "stdin": ""}, GRACE)
        finally:
            first.end()
    except EnvError as error:
        raise ConfigError(
            f"bubblewrap cannot make a sandbox here: {error}. It needs user namespaces: sysctl "
            "user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 (Debian), "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, one that allows them "
            "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
        ) from error
    if answer["status"] != 0:
        raise ConfigError(f"bash does not run in a sandbox here: {answer['output'].strip()}")


class _FirstProcess:
    """The first process in a sandbox, which starts all others (`sandbox_inside.py`), with its pipes."""

    def __init__(self, limits: Limits, files: Mapping[str, bytes], packages: Mapping[str, Path]) -> None:
        """Start the process. Errors: EnvError when it does not start."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self._unread = b""
        self._asking = threading.RLock()
        info, pid_pipe = os.pipe()
        self._info = os.fdopen(info, "rb")
        try:
            self._process = subprocess.Popen(
                _bubblewrap(limits, packages, pid_pipe),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
                pass_fds=(pid_pipe,),
                env={
                    "PATH": f"{_PROGRAMS}:{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
                    "HOME": FOLDER,
                    "USER": "agent",
                    "LANG": "C.UTF-8",
                    "PYTHONPATH": _PACKAGES,
                    "PYTHONHASHSEED": "0",  # so that a program prints the same every time
                    "PYTHONUNBUFFERED": "1",  # so that output before a limit is not lost
                    "PYTHONDONTWRITEBYTECODE": "1",
                    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_THREAD_LIMIT"), "1"),
                },
            )
        except OSError as error:
            raise EnvError(f"bwrap cannot be started: {error}") from error
        finally:
            os.close(pid_pipe)
        assert self._process.stdin is not None
        weakref.finalize(self, self._process.stdin.close)  # subprocess keeps processes that were not waited for
        encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
        self.ask(encoded, GRACE)

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and return the answer. Errors: EnvError, after ending the sandbox, if none comes in time."""
        assert self._process.stdin is not None
        with self._asking:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                line = self._line(time.monotonic() + timeout)
            except (OSError, ValueError):  # the pipe is broken, or was closed by another thread
                line = b""
            if not line:
                said = self._last_words()
                self.end()
                why = "did not answer in time" if line is None else "has ended"
                raise EnvError(f"the sandbox {why}" + (f": {said}" if said else ""))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        if self._said.closed:
            return ""
        self._said.seek(0)
        return self._said.read()[-2000:].decode(errors="replace").strip()

    def _line(self, deadline: float) -> bytes | None:
        """The next line that the process writes; empty if it has ended, None after the deadline."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()  # not select, which fails for file descriptors above 1023
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            data = os.read(pipe, 2**20)
            if not data:
                return b""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def end(self) -> None:
        """Close the pipe, so that the first process ends and the kernel ends all others; kill it if it does not end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        with self._asking:
            for pipe in (self._process.stdout, self._info, self._said):
                pipe.close()

    def kill(self) -> None:
        """Kill the first process; the kernel then ends all others in the sandbox."""
        os.set_blocking(self._info.fileno(), False)
        if info := self._info.read():  # bubblewrap writes the first process's id once it exists
            os.kill(json.loads(info)["child-pid"], signal.SIGKILL)
        self._process.kill()


def _bubblewrap(limits: Limits, packages: Mapping[str, Path], pid_pipe: int) -> list[str]:
    """The command line of a sandbox; `sandbox_inside.py` then mounts the writable part and drops the capability."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--new-session",
        "--as-pid-1",
        "--uid",
        "1000",
    ]
    command += ["--gid", "1000", "--hostname", "sandbox", "--info-fd", str(pid_pipe), "--cap-add", "CAP_SYS_ADMIN"]
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    if not Path(python).is_relative_to("/usr"):
        command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    for name in ("python", "python3"):
        command += ["--symlink", python, f"{_PROGRAMS}/{name}"]
    for name, source in packages.items():
        command += ["--ro-bind", str(source), f"{_PACKAGES}/{name}"]
    for device, on_the_host in _DEVICES.items():
        command += ["--dev-bind", f"/dev/{on_the_host}", f"/dev/{device}"]
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        command += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    for folder in ("/run", "/tmp", "/dev/shm", FOLDER):
        command += ["--dir", folder]
    inside = "/opt/sandbox_inside.py"
    command += ["--proc", "/proc", "--ro-bind", str(_INSIDE), inside, "--remount-ro", "/", "--chdir", "/"]
    settings = {"folder": FOLDER, "devices": [f"/dev/{device}" for device in _DEVICES], **limits.model_dump()}
    return [*command, "--", python, "-I", "-S", inside, json.dumps(settings)]


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(f"file {name!r}: the name must be relative to the working folder and stay inside it")
    return name


def _content(source: bytes | Path) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise ConfigError(f"the sandbox file {source} cannot be read ({error})") from error


def _package(name: str) -> dict[str, Path]:
    """The folder of an importable package, and that of its shared libraries, if it has one."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ConfigError(f"the sandbox needs the package {name}, which is not installed: pip install {name}")
    origin = Path(found.origin)
    path = origin.parent if found.submodule_search_locations else origin
    libraries = path.with_name(f"{name}.libs")
    return {path.name: path} | ({libraries.name: libraries} if libraries.is_dir() else {})
