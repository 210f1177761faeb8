"""Process 1 of a sandbox: runs one program after another and ends all processes that a program started.

Invariant: when it answers a request, no other process is left. When it ends, or the pipe from the worker closes, the
kernel ends all other processes. It runs inside the namespaces that `sandbox.py` creates and uses only the standard
library; requests and answers are lines of JSON on its standard input and output.
"""

import base64
import ctypes
import json
import os
import platform
import re
import resource
import select
import selectors
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

TICK = 0.02
"""Seconds between two measurements of the program's resources."""
SECONDS_TO_END = 10.0
"""Processes that survive SIGKILL for longer than this many seconds are a fault of the machine."""
MAX_OUTPUT = 2**24
"""Bytes of output after which a program is ended; only a small part of them is kept."""
OPEN_FILES = 256
SOCKET_MIB = 8
"""Memory that a socket counts as: its buffers may grow to this, and no process's usage includes them."""
NICENESS = 5
MIB = 2**20

_LIBC = ctypes.CDLL(None, use_errno=True)
_FOUND = re.compile(r"^(RssAnon|RssShmem|VmSwap|HugetlbPages|Threads):\s+(\d+)", re.MULTILINE)
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal from inside that it has no handler for
    _LIBC.personality(0x0040000)  # no address randomisation, so that programs that print addresses are deterministic
    _make_disk(settings)
    _limit_memory(settings["memory_mib"] * MIB)
    _protect_the_host(settings["devices"])
    _give_up_privileges()
    requests = sys.stdin.buffer
    for name, content in json.loads(requests.readline()).items():
        path = Path(settings["folder"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
    _answer({"ready": True})
    while line := requests.readline():
        _answer(run(json.loads(line), settings))


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


# --- before the first program ------------------------------------------------------------------------------------


def _make_disk(settings: dict[str, Any]) -> None:
    """Mount one file system in memory for all writable folders, so that one size limits them together."""
    size = f"size={settings['disk_mib'] * MIB},nr_inodes={settings['files']},mode=755"
    no_setuid_no_devices = 2 | 4
    _checked("mount", _LIBC.mount(b"tmpfs", b"/run", b"tmpfs", no_setuid_no_devices, size.encode()))
    for place in (settings["folder"], "/tmp", "/dev/shm"):
        source = Path("/run", place.replace("/", "_"))
        source.mkdir()
        bind = 4096
        _checked("mount", _LIBC.mount(str(source).encode(), place.encode(), None, bind, None))
    detach = 2
    _checked("umount", _LIBC.umount2(b"/run", detach))


def _limit_memory(size: int) -> None:
    """Limit what each process may allocate and, because page tables take memory too, its address space.

    The memory of all processes together is measured elsewhere. The limit also covers this process's own address space,
    hence its minimum.
    """
    for what, limit in (
        (resource.RLIMIT_DATA, size),
        (resource.RLIMIT_AS, max(4 * size, 1024 * MIB)),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 1),  # with 0 the host's crash handler still starts; with 1 the kernel never starts it
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # killed first when memory runs out
    os.nice(NICENESS)


def _protect_the_host(devices: list[str]) -> None:
    """Make /proc, which has the machine's settings, and the devices read-only: a worker that is root owns them, and an
    owner needs no privilege to change, for example, the mode of /dev/null."""
    no_setuid_no_programs, no_devices, remount_read_only = 2 | 8, 4, 1 | 32 | 4096
    for place in ("/proc", *devices):
        flags = remount_read_only | no_setuid_no_programs | (no_devices if place == "/proc" else 0)
        _checked(f"remount of {place}", _LIBC.mount(None, place.encode(), None, flags, None))


def _give_up_privileges() -> None:
    """Drop all capabilities, block system calls that could evade the limits, and hide this process from programs."""
    version_3, whole_process = 0x20080522, 0
    nothing = struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    _checked("capset", _LIBC.capset(struct.pack("=Ii", version_3, whole_process), nothing))
    no_new_privileges, seccomp, dumpable = 38, 22, 4
    _checked("prctl", _LIBC.prctl(no_new_privileges, 1, 0, 0, 0))
    _checked("prctl", _LIBC.prctl(dumpable, 0, 0, 0, 0))
    code = system_call_filter(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("=H6xQ", len(code) // 8, ctypes.addressof(buffer))
    filter_mode = 2
    _checked("prctl", _LIBC.prctl(seccomp, filter_mode, program, 0, 0))


def _checked(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


class _Machine(NamedTuple):
    architecture: int
    denied: tuple[int, ...]
    only_on_caller: tuple[int, ...]
    """System calls whose first argument is a process id, where 0 means the caller."""
    setpriority: int
    mmap: int
    clone: int
    clone3: int
    socket: int
    setsockopt: int


_MACHINES = {
    # Denied: memory that is counted in no process (memfd_create, memfd_secret, shmget, msgget, semget, vmsplice); new
    # namespaces, in which any mount would be allowed (unshare, setns); keys, which are shared with the worker (add_key,
    # request_key, keyctl); calls that no exercise needs (bpf, perf_event_open, userfaultfd, io_uring_setup, io_setup,
    # ioprio_set). Allowed only on the caller, because process 1 measures the others: prlimit64, sched_setparam,
    # sched_setscheduler, sched_setaffinity, sched_setattr.
    "x86_64": _Machine(
        0xC000003E,
        (319, 447, 29, 68, 64, 278, 272, 308, 248, 249, 250, 321, 298, 323, 425, 206, 251),
        (302, 142, 144, 203, 314),
        *(141, 9, 56, 435, 41, 54),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        (279, 447, 194, 186, 190, 75, 97, 268, 217, 218, 219, 280, 241, 282, 425, 0, 30),
        (261, 118, 119, 122, 274),
        *(140, 222, 220, 435, 198, 208),
    ),
}
_FAMILIES = (1, 2, 10, 16)
"""Socket families confined by a network namespace: unix, IPv4, IPv6, netlink. Others (vsock) can reach the host."""
_NAMESPACES = 0x7E020000
"""Flags of clone that create a namespace."""
_SHARED_ANONYMOUS = 0x21
"""Flags of mmap for memory that can stay allocated while no process maps it, so that no process's usage includes it."""


def system_call_filter(machine: str) -> bytes:
    """The system-call filter as classic BPF. Denied calls fail with EPERM; clone3 fails with ENOSYS, so that libraries
    fall back to clone, whose flags can be checked.

    Errors: OSError for a machine whose system-call numbers are not listed here.
    """
    if machine not in _MACHINES:
        raise OSError(f"no system-call filter is known for {machine}; known: {', '.join(_MACHINES)}")
    known = _MACHINES[machine]
    allow, deny, unknown = ((0x06, 0, 0, answer) for answer in (0x7FFF0000, 0x00050001, 0x00050026))
    load, equal, at_least, any_bit, mask = 0x20, 0x15, 0x35, 0x45, 0x54
    number, architecture = (load, 0, 0, 0), (load, 0, 0, 4)
    first, second, third, fourth = ((load, 0, 0, 16 + 8 * i) for i in range(4))
    x32 = 0x40000000
    rules = {
        known.clone: [first, (any_bit, 0, 1, _NAMESPACES), deny, allow],
        known.mmap: [fourth, (mask, 0, 0, _SHARED_ANONYMOUS), (equal, 0, 1, _SHARED_ANONYMOUS), deny, allow],
        known.setpriority: [first, (equal, 0, 2, 0), second, (equal, 1, 0, 0), deny, allow],  # only on the caller
        known.socket: [first, *((equal, len(_FAMILIES) - i, 0, each) for i, each in enumerate(_FAMILIES)), deny, allow],
        known.setsockopt: [second, (equal, 0, 3, 1), third, (equal, 2, 0, 7), (equal, 1, 0, 8), allow, deny],
        known.clone3: [unknown],
        **{call: [first, (equal, 1, 0, 0), deny, allow] for call in known.only_on_caller},
        **{call: [deny] for call in known.denied},
    }
    code = [architecture, (equal, 1, 0, known.architecture), deny, number, (at_least, 0, 1, x32), deny]
    for call, rule in rules.items():
        code += [(equal, 0, len(rule), call), *rule]
    return b"".join(struct.pack("=HBBI", *line) for line in [*code, allow])


# --- one program -------------------------------------------------------------------------------------------------


class _Input:
    """Feeds a program's standard input as fast as the program reads it."""

    def __init__(self, pipe: int, data: bytes) -> None:
        os.set_blocking(pipe, False)
        self.pipe, self._rest = pipe, data

    def write(self) -> bool:
        """Write as much as the pipe accepts; return whether anything is left."""
        try:
            self._rest = self._rest[os.write(self.pipe, self._rest[:65536]) :] if self._rest else b""
        except BrokenPipeError:  # the program has closed its standard input
            return False
        return bool(self._rest)


class _Output:
    """Keeps the beginning and the end of a program's output, whatever its length."""

    def __init__(self, pipe: int, characters: int) -> None:
        self.pipe, self.total = pipe, 0
        self._half = characters // 2
        self._room = 4 * self._half  # a UTF-8 character has at most 4 bytes
        self._head, self._tail = bytearray(), bytearray()

    def read(self) -> bool:
        """Wait for more output; return False at its end."""
        data = os.read(self.pipe, 65536)
        self.total += len(data)
        missing = self._room - len(self._head)
        self._head += data[:missing]
        self._tail += data[missing:]
        del self._tail[: -self._room]
        return bool(data)

    def text(self) -> str:
        """The output, with invalid UTF-8 replaced; if it is longer than `characters`, a note replaces its middle."""
        if self.total == len(self._head) + len(self._tail):
            head = tail = (self._head + self._tail).decode(errors="replace")
            if len(head) <= 2 * self._half:
                return head
        else:
            head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        head, tail = head[: self._half], tail[-self._half :]
        left_out = max(self.total - len(head.encode()) - len(tail.encode()), 1)
        return f"{head}\n[... {left_out} bytes left out ...]\n{tail}"


class _Use(NamedTuple):
    """Resources used by all processes but this one."""

    threads: int
    memory: int
    seconds: float  # CPU time, including children that have been waited for
    ticks: dict[str, int]  # CPU time of each process alone


def run(request: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Run `argv` with `stdin`; return `output`, `status`, `ended` and `seconds`."""
    began = time.monotonic()
    try:
        program = subprocess.Popen(
            request["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=settings["folder"],
            start_new_session=True,
            bufsize=0,
        )
    except (OSError, ValueError) as error:  # no such program, a command that is too long, or a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        status = 127 if isinstance(error, FileNotFoundError) else 126
        return {"output": f"{request['argv'][0]}: {reason}\n", "status": status, "ended": "exit", "seconds": 0.0}
    assert program.stdin is not None
    assert program.stdout is not None
    output = _Output(program.stdout.fileno(), settings["output_chars"])
    with program.stdin, program.stdout:
        stdin = _Input(program.stdin.fileno(), request["stdin"].encode(errors="replace"))
        ended = _attend(program, stdin, output, settings, began)
        _end_all(program)
        while select.select([output.pipe], [], [], 0)[0] and output.read():
            pass  # read the rest without waiting for its end, which a socket that was sent to itself may keep open
    seconds = time.monotonic() - began
    return {"output": output.text(), "status": program.returncode, "ended": ended, "seconds": seconds}


def _attend(
    program: subprocess.Popen[bytes], stdin: "_Input", output: "_Output", settings: dict[str, Any], began: float
) -> str:
    """Feed and read a program until it ends or exceeds a limit; return `exit` or the limit's name."""
    clock, next_look = _Clock(), began + TICK
    with selectors.DefaultSelector() as selector:
        selector.register(stdin.pipe, selectors.EVENT_WRITE)
        selector.register(output.pipe, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(TICK)}
            if sys.stdin.fileno() in ready:  # end of file, since no request comes during another: the worker is gone
                os._exit(0)
            if stdin.pipe in ready and not stdin.write():
                selector.unregister(stdin.pipe)
                assert program.stdin is not None
                program.stdin.close()
            if output.pipe in ready and not output.read():
                selector.unregister(output.pipe)
            _reap(program)
            if program.returncode is not None:
                return "exit"
            if output.total > MAX_OUTPUT:
                return "output"
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + TICK
            used = _used()
            if used.threads > settings["processes"]:
                return "processes"
            if used.memory > settings["memory_mib"] * MIB:
                return "memory"
            if clock.seconds(used) > settings["cpu_seconds"]:
                return "cpu"
            if now - began > settings["seconds"]:
                return "time"


def _end_all(program: subprocess.Popen[bytes]) -> None:
    """Kill every process but this one. Errors: OSError if some survive."""
    deadline = time.monotonic() + SECONDS_TO_END
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        _reap(program)
        if time.monotonic() > deadline:
            raise OSError(f"processes still exist {SECONDS_TO_END:g} s after SIGKILL")


def _reap(program: subprocess.Popen[bytes]) -> None:
    """Reap all ended processes, including orphans; record the program's exit status if it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == program.pid:
            program.returncode = os.waitstatus_to_exitcode(status)


def _used() -> _Use:
    threads, kibibytes, total, ticks = 0, 0, 0, dict[str, int]()
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            found = _FOUND.findall(Path("/proc", name, "status").read_text(encoding="utf-8", errors="replace"))
            fields = (
                Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
        except OSError:  # the process has ended in the meantime
            continue
        for what, value in found:
            if what == "Threads":
                threads += int(value)
            else:
                kibibytes += int(value)
        own, of_children = (sum(map(int, fields[i : i + 2])) for i in (11, 13))  # user and system time
        ticks[f"{name} {fields[19]}"] = own  # with its start time, because process ids are reused
        total += own + of_children
    sockets = int(
        Path("/proc/net/sockstat").read_text(encoding="utf-8").split()[2]
    )  # "sockets: used 3", of this namespace
    memory = kibibytes * 1024 + sockets * SOCKET_MIB * MIB
    return _Use(threads, memory, total / _TICKS_PER_SECOND, ticks)


class _Clock:
    """CPU time of one program.

    A parent inherits a child's CPU time when it waits for it, and a parent that never waits would hide it. So the last
    measured CPU time of every process is summed too, and the larger of the two numbers counts."""

    def __init__(self) -> None:
        self._earlier = _reaped_seconds()
        self._seen: dict[str, int] = {}
        self._gone = 0

    def seconds(self, used: _Use) -> float:
        self._gone += sum(ticks for process, ticks in self._seen.items() if process not in used.ticks)
        self._seen = used.ticks
        seen = (self._gone + sum(used.ticks.values())) / _TICKS_PER_SECOND
        return max(seen, used.seconds + _reaped_seconds() - self._earlier)


def _reaped_seconds() -> float:
    """CPU time of all processes that this process has reaped so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
