"""Process 1 of a sandbox: runs one program after another and ends whatever it started.

Invariant: when an answer is given, no process but this one is left; when this one ends, or the pipe from the worker
closes, the kernel ends all others with it. Runs by itself, inside the namespaces that `sandbox.py` makes, on the bare
standard library; requests and answers are lines of JSON on its standard input and output.
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
"""Seconds between two looks at what the program uses."""
SECONDS_TO_END = 10.0
"""Processes that survive SIGKILL for longer are a fault of the machine."""
MAX_OUTPUT = 2**24
"""Bytes after which a program is ended; what is kept of them is far less."""
OPEN_FILES = 256
SOCKET_MIB = 8  # as which a socket counts: what its buffers may grow to, which no process is seen to use
NICENESS = 5
MIB = 2**20

_LIBC = ctypes.CDLL(None, use_errno=True)
_FOUND = re.compile(r"^(RssAnon|RssShmem|VmSwap|HugetlbPages|Threads):\s+(\d+)", re.MULTILINE)
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what has no handler never reaches a first process from inside
    _LIBC.personality(0x0040000)  # no random addresses: a program that prints them prints the same twice
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
    """All that can be written to is one file system in memory, so that its size bounds everything together."""
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
    """Of each process: what it may allocate, and, since page tables are memory too, the addresses that it may use.

    All processes together are watched. The address space of this process counts as well, hence its least value.
    """
    for what, limit in (
        (resource.RLIMIT_DATA, size),
        (resource.RLIMIT_AS, max(4 * size, 1024 * MIB)),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 1),  # 0 would still start the host's crash handler; 1 is the kernel's word for never
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # before anything else on the machine
    os.nice(NICENESS)


def _protect_the_host(devices: list[str]) -> None:
    """/proc, with the settings of the whole machine, and devices are read-only: a worker that is root owns them, and
    what one owns takes no privilege, as the mode of /dev/null."""
    no_setuid_no_programs, no_devices, remount_read_only = 2 | 8, 4, 1 | 32 | 4096
    for place in ("/proc", *devices):
        flags = remount_read_only | no_setuid_no_programs | (no_devices if place == "/proc" else 0)
        _checked(f"remount of {place}", _LIBC.mount(None, place.encode(), None, flags, None))


def _give_up_privileges() -> None:
    """No capability is left, no system call that leads out of the bounds, and no program may look into this process."""
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
    of_a_process: tuple[int, ...]
    """Calls whose first argument is a process, 0 for the caller."""
    setpriority: int
    mmap: int
    clone: int
    clone3: int
    socket: int
    setsockopt: int


_MACHINES = {
    # memory that no process is seen to use: memfd_create, memfd_secret, shmget, msgget, semget, vmsplice; namespaces
    # of one's own, which would allow any mount: unshare, setns; keys, which are the worker's too: add_key,
    # request_key, keyctl; what no exercise needs: bpf, perf_event_open, userfaultfd, io_uring_setup, io_setup,
    # ioprio_set. Of a process, for the first is the watcher: prlimit64, sched_setparam, -scheduler, -affinity, -attr
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
"""Sockets that a network namespace holds: unix, IPv4, IPv6, netlink. Others (vsock) lead to the host."""
_NAMESPACES = 0x7E020000
"""Flags of clone that make a namespace."""
_SHARED_ANONYMOUS = 0x21
"""Flags of mmap for memory that stays when nobody has it mapped any more, so that it is in no process's account."""


def system_call_filter(machine: str) -> bytes:
    """Classic BPF: a denied call fails with EPERM, clone3 with ENOSYS, after which libraries call clone.

    Errors: OSError for a machine whose system calls are not known here.
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
        known.setpriority: [first, (equal, 0, 2, 0), second, (equal, 1, 0, 0), deny, allow],  # of this one process
        known.socket: [first, *((equal, len(_FAMILIES) - i, 0, each) for i, each in enumerate(_FAMILIES)), deny, allow],
        known.setsockopt: [second, (equal, 0, 3, 1), third, (equal, 2, 0, 7), (equal, 1, 0, 8), allow, deny],
        known.clone3: [unknown],
        **{call: [first, (equal, 1, 0, 0), deny, allow] for call in known.of_a_process},
        **{call: [deny] for call in known.denied},
    }
    code = [architecture, (equal, 1, 0, known.architecture), deny, number, (at_least, 0, 1, x32), deny]
    for call, rule in rules.items():
        code += [(equal, 0, len(rule), call), *rule]
    return b"".join(struct.pack("=HBBI", *line) for line in [*code, allow])


# --- one program -------------------------------------------------------------------------------------------------


class _Input:
    """What is written to a program as it takes it."""

    def __init__(self, pipe: int, data: bytes) -> None:
        os.set_blocking(pipe, False)
        self.pipe, self._rest = pipe, data

    def write(self) -> bool:
        """Write what the pipe takes; whether anything is left."""
        try:
            self._rest = self._rest[os.write(self.pipe, self._rest[:65536]) :] if self._rest else b""
        except BrokenPipeError:  # nobody reads any more
            return False
        return bool(self._rest)


class _Output:
    """The beginning and the end of what a program writes, however much it is."""

    def __init__(self, pipe: int, characters: int) -> None:
        self.pipe, self.total = pipe, 0
        self._half = characters // 2
        self._room = 4 * self._half  # a character is at most so many bytes
        self._head, self._tail = bytearray(), bytearray()

    def read(self) -> bool:
        """Wait for some more; False at its end."""
        data = os.read(self.pipe, 65536)
        self.total += len(data)
        missing = self._room - len(self._head)
        self._head += data[:missing]
        self._tail += data[missing:]
        del self._tail[: -self._room]
        return bool(data)

    def text(self) -> str:
        """Errors of UTF-8 are replaced; what is longer than `characters` has a mark where its middle was."""
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
    """Of all processes but this one."""

    threads: int
    memory: int
    seconds: float  # with those of children that were waited for
    ticks: dict[str, int]  # of each process alone


def run(request: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Run `argv` with `stdin`; the answer has `output`, `status`, `ended` and `seconds`."""
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
    except (OSError, ValueError) as error:  # no such program, a longer command than the system takes, a zero byte
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
            pass  # what the dead have left; its end may be late, where a socket that was sent to itself keeps it
    seconds = time.monotonic() - began
    return {"output": output.text(), "status": program.returncode, "ended": ended, "seconds": seconds}


def _attend(
    program: subprocess.Popen[bytes], stdin: "_Input", output: "_Output", settings: dict[str, Any], began: float
) -> str:
    """Feed and read a program until it ends (`exit`) or has used up a limit: which one."""
    clock, next_look = _Clock(), began + TICK
    with selectors.DefaultSelector() as selector:
        selector.register(stdin.pipe, selectors.EVENT_WRITE)
        selector.register(output.pipe, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(TICK)}
            if sys.stdin.fileno() in ready:  # no request comes while one is answered: the worker is gone
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
    """End every process but this one. Errors: OSError when the kernel cannot."""
    deadline = time.monotonic() + SECONDS_TO_END
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        _reap(program)
        if time.monotonic() > deadline:
            raise OSError(f"processes are still there {SECONDS_TO_END:g} s after SIGKILL")


def _reap(program: subprocess.Popen[bytes]) -> None:
    """Take away the dead, among them those whose parents died first; notes how the program ended, if it did."""
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
        except OSError:  # it has ended in the meantime
            continue
        for what, value in found:
            if what == "Threads":
                threads += int(value)
            else:
                kibibytes += int(value)
        own, of_children = (sum(map(int, fields[i : i + 2])) for i in (11, 13))  # user and system
        ticks[f"{name} {fields[19]}"] = own  # and when it began, for names come again
        total += own + of_children
    sockets = int(
        Path("/proc/net/sockstat").read_text(encoding="utf-8").split()[2]
    )  # "sockets: used 3", of this namespace
    memory = kibibytes * 1024 + sockets * SOCKET_MIB * MIB
    return _Use(threads, memory, total / _TICKS_PER_SECOND, ticks)


class _Clock:
    """Processor time of one program.

    A parent gets a child's when it waits for it. One that never does would hide it, so what each process was last seen
    to have used is counted too, and the larger number holds."""

    def __init__(self) -> None:
        self._earlier = _seconds_of_the_dead()
        self._seen: dict[str, int] = {}
        self._gone = 0

    def seconds(self, used: _Use) -> float:
        self._gone += sum(ticks for process, ticks in self._seen.items() if process not in used.ticks)
        self._seen = used.ticks
        seen = (self._gone + sum(used.ticks.values())) / _TICKS_PER_SECOND
        return max(seen, used.seconds + _seconds_of_the_dead() - self._earlier)


def _seconds_of_the_dead() -> float:
    """Processor time of all that this process has taken away so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
