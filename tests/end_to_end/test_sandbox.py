"""Programs in a sandbox: their permissions, their limits, and the files they leave."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_es.envs import sandbox as sandboxes
from hpc_es.envs.sandbox import Limits, Sandbox
from hpc_es.errors import ConfigError, EnvError

SMALL = Limits(seconds=5, cpu_seconds=5, memory_mib=96, disk_mib=4, files=64, processes=16, output_chars=400)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(SMALL) as opened:
        yield opened


def _processes_with(mark: str) -> list[str]:
    """Processes of this machine with `mark` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return [pid for pid in found if pid != str(os.getpid())]


def _eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- what a program can do ---------------------------------------------------------------------------------------


def test_a_program_gives_its_output_and_its_status(sandbox: Sandbox) -> None:
    ran = sandbox.run("echo out; echo err >&2; exit 3")
    assert (ran.output, ran.status, ran.ended) == ("out\nerr\n", 3, "exit")
    assert sandbox.run(["python3", "-c", "print(6 * 7)"]).output == "42\n"
    assert sandbox.run("kill -TERM $$").status == -signal.SIGTERM


def test_a_program_reads_its_whole_input_whatever_its_size(sandbox: Sandbox) -> None:
    assert sandbox.run("cat", stdin="häh?\n").output == "häh?\n"
    assert sandbox.run("wc -c", stdin="x" * 2_000_000).output.strip() == "2000000"
    assert sandbox.run("true", stdin="x" * 2_000_000).status == 0  # nobody reads it
    assert sandbox.run("cat").output == ""


def test_files_last_from_one_program_to_the_next_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(b"\x00\xff")
    with Sandbox(SMALL, {"a/b.txt": b"given\n", "page.bin": tmp_path / "page"}) as one:
        assert one.run("cat a/b.txt; wc -c < page.bin; pwd").output == f"given\n2\n{sandboxes.FOLDER}\n"
        one.run("echo kept > mine; echo too > /tmp/mine; echo and > /dev/shm/mine")
        assert one.run("cat mine /tmp/mine /dev/shm/mine").output == "kept\ntoo\nand\n"
    with Sandbox(SMALL) as other:
        assert other.run("ls -A . /tmp /dev/shm").output.split() == [".:", "/dev/shm:", "/tmp:"]


def test_the_same_program_prints_the_same_twice() -> None:
    code = "import threading; print({'a', 'b'}, object(), map(abs, []), lambda: 0, threading.Lock())"
    shown = []
    for _ in range(2):
        with Sandbox(SMALL) as sandbox:
            shown.append(sandbox.run(["python3", "-c", code]).output)
    assert shown[0] == shown[1]
    assert " at 0x" in shown[0]


def test_packages_of_the_worker_can_be_imported_when_asked_for() -> None:
    with Sandbox(Limits(), packages=("numpy", "yaml")) as sandbox:
        ran = sandbox.run("python3 -c 'import numpy, yaml; print(numpy.arange(4).sum(), numpy.__file__)'")
        assert ran.output.startswith("6 /opt/packages/numpy/")
    with pytest.raises(ConfigError, match=r"no_such_package, which is not installed: pip install no_such_package"):
        Sandbox(packages=("no_such_package",))


def test_a_program_that_cannot_be_started_is_an_outcome(sandbox: Sandbox) -> None:
    assert sandbox.run(["no-such-program"]).status == 127
    assert sandbox.run("no-such-program").status == 127
    huge = sandbox.run("echo " + "x" * 1_000_000)
    assert (huge.status, huge.output) == (126, "bash: Argument list too long\n")
    assert sandbox.run("echo \0").status == 126
    assert sandbox.run(["echo", "\ud800"]).status in (0, 126)
    assert sandbox.run("chmod 000 .").ended == "exit"  # its own folder
    assert sandbox.run("true").status == 126


# --- what ends it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["sleep 100", "trap '' TERM INT HUP; while true; do sleep 1; done", "sleep 100 | cat"]
)
def test_a_program_that_never_ends_is_ended(command: str) -> None:
    with Sandbox(Limits(seconds=0.5)) as sandbox:
        ran = sandbox.run(f"echo so far; {command}")
        assert (ran.output, ran.ended) == ("so far\n", "time")
        assert 0.5 <= ran.seconds < 5
        assert sandbox.run("echo again").output == "again\n"


UNWAITED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
"""No parent is told what these children used."""


@pytest.mark.parametrize(
    "command",
    [
        "while :; do :; done",
        "for i in 1 2 3 4; do (while :; do :; done) & done; wait",
        "for i in $(seq 100); do timeout 0.1 bash -c 'while :; do :; done'; done",
        "for i in $(seq 100); do (timeout 0.1 bash -c 'while :; do :; done' &); sleep 0.1; done",
        f"python3 -c '{UNWAITED}'",
    ],
)
def test_processor_time_counts_for_all_processes_together(command: str) -> None:
    with Sandbox(Limits(seconds=20, cpu_seconds=0.4)) as sandbox:
        assert sandbox.run(command).ended == "cpu"
        assert sandbox.run("for i in $(seq 1000); do :; done").ended == "exit"  # each program has its own


@pytest.mark.parametrize(
    "bomb",
    [
        "f() { f | f; }; f",
        "python3 -c 'import os\nwhile True: os.fork()'",
        "python3 -c 'import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()'",
    ],
)
def test_a_fork_bomb_goes_off_inside(bomb: str) -> None:
    with Sandbox(Limits(processes=16)) as sandbox:
        assert sandbox.run(bomb).ended == "processes"
        assert int(sandbox.run("ls /proc | grep -c '^[0-9]'").output) <= 4  # the first, bash, ls, grep


def test_one_process_gets_no_more_memory_than_the_limit(sandbox: Sandbox) -> None:
    ran = sandbox.run(["python3", "-c", "x = bytearray(200 * 2**20)"])
    assert "MemoryError" in ran.output
    assert ran.ended == "exit"


def test_many_processes_get_no_more_memory_together(sandbox: Sandbox) -> None:
    hog = "x = bytearray(b'1') * (30 * 2**20)"
    ran = sandbox.run(f'for i in 1 2 3 4 5 6; do python3 -c "{hog}; import time; time.sleep(100)" & done; wait')
    assert ran.ended == "memory"


def test_memory_that_belongs_to_no_process_is_refused(sandbox: Sandbox) -> None:
    calls = "import os; os.memfd_create('hidden')"
    assert "PermissionError" in sandbox.run(["python3", "-c", calls]).output
    assert sandbox.run("ipcmk -M 1000000").status != 0
    assert sandbox.run("ipcmk -Q").status != 0
    assert sandbox.run("ipcmk -S 32000").status != 0
    for file in ("-1", "os.open('/dev/zero', os.O_RDWR)"):  # stays when it is no more mapped
        assert sandbox.run(["python3", "-c", f"import mmap, os; mmap.mmap({file}, 2**20)"]).status == 1
    pool = "from multiprocessing import Pool, Value; Value('i'); print(Pool(2).map(abs, [-1, -2]))"
    assert sandbox.run(["python3", "-c", pool]).output == "[1, 2]\n"  # whose shared memory is on the disk


def test_sockets_count_as_memory_since_the_kernel_keeps_what_they_hold(sandbox: Sandbox) -> None:
    pairs = "import socket, time; kept = [socket.socketpair() for _ in range({})]; time.sleep(0.2); print(len(kept))"
    assert sandbox.run(["python3", "-c", pairs.format(4)]).output == "4\n"
    assert sandbox.run(["python3", "-c", pairs.format(10)]).ended == "memory"
    wider = "import socket; socket.socket().setsockopt(socket.SOL_SOCKET, socket.{}, 10**6)"
    assert [sandbox.run(["python3", "-c", wider.format(name)]).status for name in ("SO_SNDBUF", "SO_RCVBUF")] == [1, 1]


@pytest.mark.parametrize("place", [".", "/tmp", "/dev/shm"])
def test_the_disk_is_bounded_whatever_is_filled(sandbox: Sandbox, place: str) -> None:
    assert "No space left" in sandbox.run(f"head -c 100M /dev/zero > {place}/big").output
    used = sandbox.run("du -cbs /task /tmp /dev/shm | tail -n 1 | cut -f 1").output
    assert int(used) <= SMALL.disk_mib * 2**20 + 1000
    assert "No space left" in sandbox.run("echo more > /tmp/more").output  # it is one disk
    assert sandbox.run(f"rm {place}/big; echo more > /tmp/more && cat /tmp/more").output == "more\n"


def test_so_is_the_number_of_files(sandbox: Sandbox) -> None:
    assert "No space left" in sandbox.run("touch $(seq 1000)").output
    assert int(sandbox.run("ls | wc -l").output) < SMALL.files


def test_no_other_place_can_be_written_to(sandbox: Sandbox) -> None:
    for folder in ("/", "/usr", "/dev", "/opt", "/etc", "/root", "/proc", "/run", sys.base_prefix):
        assert sandbox.run(f"test -d {folder} && touch {folder}/x").status != 0, folder
    assert sandbox.run("mount -t tmpfs none /tmp").status != 0
    assert sandbox.run("unshare -Urm true").status != 0
    pruned = r"\( -path '/proc/[0-9]*/*' -o -path /dev -o -path /task -o -path /tmp \) -prune"
    assert sandbox.run(f"find / {pruned} -o -type f -writable -print 2> /dev/null").output == ""  # also not /proc/sys
    assert sandbox.run("head -c 2 /dev/zero; echo x > /dev/null").output == "\0\0"
    for device in ("null", "zero", "full", "random", "urandom"):  # the host's own, and root's as the worker may be
        mode = Path("/dev", device).stat().st_mode
        assert sandbox.run(f"chmod {mode & 0o777:o} /dev/{device}").status != 0, device
    for device in ("/dev/full", "/dev/tty", "/dev/kmsg", "/dev/mem"):
        assert sandbox.run(f"echo x > {device}").status != 0, device


def test_of_a_long_output_beginning_and_end_are_kept(sandbox: Sandbox) -> None:
    ran = sandbox.run("seq 100000")
    assert (ran.ended, ran.status) == ("exit", 0)
    assert ran.output.startswith("1\n2\n3\n")
    assert ran.output.endswith("99999\n100000\n")
    assert "bytes left out" in ran.output
    assert len(ran.output) < SMALL.output_chars + 50
    shown = sandbox.run(["python3", "-c", "print('ä' * 399)"]).output
    assert shown == "ä" * 399 + "\n"


def test_endless_output_is_cut_while_it_is_written(sandbox: Sandbox) -> None:
    ran = sandbox.run("yes")
    assert ran.ended == "output"
    assert len(ran.output) < SMALL.output_chars + 50


def test_output_that_is_not_text_is_still_shown(sandbox: Sandbox) -> None:
    assert sandbox.run(r"printf 'a\xff\xfe\0b'").output == "a\ufffd\ufffd\0b"
    assert len(sandbox.run("head -c 100000 /dev/urandom").output) < SMALL.output_chars + 50


# --- what it leaves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["sleep 98765 &", "setsid nohup sleep 98765 > /dev/null 2>&1 < /dev/null & disown"])
def test_nothing_that_it_started_outlives_a_program(sandbox: Sandbox, start: str) -> None:
    ran = sandbox.run(f"({start}) & echo started")
    assert (ran.output, ran.ended) == ("started\n", "exit")
    assert ran.seconds < 3
    assert not _processes_with("98765")


def test_output_that_a_socket_keeps_open_is_not_waited_for() -> None:
    keep = "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [a.fileno(), b.fileno(), 1, 2]); print('sent')"
    with Sandbox() as sandbox:  # until the kernel finds them, those sockets count
        ran = [sandbox.run(["python3", "-c", f"import socket; {keep}"]) for _ in range(8)]
    assert {(each.output, each.ended) for each in ran} == {("sent\n", "exit")}
    assert sum(each.seconds for each in ran) < 5


def test_closing_ends_a_program_that_runs() -> None:
    sandbox = Sandbox(Limits(seconds=60))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run("sleep 87654")
        except EnvError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert _eventually(lambda: bool(_processes_with("87654")))
    sandbox.close()
    thread.join(10)
    assert not thread.is_alive()
    assert raised
    assert not _processes_with("87654")
    with pytest.raises(EnvError, match="closed"):
        sandbox.run("true")


def test_a_worker_that_is_killed_leaves_nothing() -> None:
    code = (
        "import threading; from hpc_es.envs.sandbox import Limits, Sandbox\n"
        "idle = Sandbox(); idle.run('true')\n"
        "Sandbox(Limits(seconds=600, output_chars=76543)).run('setsid sleep 76543 & sleep 76543')"
    )
    worker = subprocess.Popen([sys.executable, "-c", code])
    assert _eventually(lambda: len(_processes_with("76543")) >= 5, 20)  # worker, bwrap twice, bash, two sleeps
    worker.kill()
    worker.wait()
    assert _eventually(lambda: not _processes_with("76543"))


def test_the_thread_that_made_it_may_end() -> None:
    with ThreadPoolExecutor(1) as pool:
        sandbox = pool.submit(Sandbox, SMALL).result()
        pool.submit(sandbox.run, "touch mine").result()
    with sandbox:
        assert sandbox.run("ls").output == "mine\n"


def test_sandboxes_that_are_closed_hold_no_files_and_no_processes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with Sandbox(Limits(output_chars=54321)) as sandbox:
            sandbox.run("true")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not _processes_with("54321")


def test_an_unclosed_sandbox_still_ends() -> None:
    sandbox = Sandbox(Limits(output_chars=65432))
    sandbox.run("true")
    assert _processes_with("65432")
    del sandbox
    assert _eventually(lambda: not _processes_with("65432"))


def test_sixteen_at_once_keep_apart() -> None:
    def play(number: int) -> str:
        with Sandbox(SMALL) as sandbox:
            sandbox.run(f"echo {number} > mine; sleep 0.2")
            return sandbox.run("cat mine").output

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(play, range(16))) == [f"{number}\n" for number in range(16)]
