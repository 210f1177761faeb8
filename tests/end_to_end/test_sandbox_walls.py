"""The limits that a program in a sandbox cannot pass, and faults of the sandbox itself."""

import errno
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_es.envs import sandbox as sandboxes
from hpc_es.envs.sandbox import Limits, Sandbox, require_sandbox
from hpc_es.envs.sandbox_inside import _MACHINES, system_call_filter
from hpc_es.errors import ConfigError, EnvError

SMALL = Limits(seconds=5, cpu_seconds=5, memory_mib=96, disk_mib=4, files=64, processes=16, output_chars=400)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(SMALL) as opened:
        yield opened


# --- what it never reaches ---------------------------------------------------------------------------------------


def test_there_is_no_network_not_even_to_the_worker(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        ran = sandbox.run(["python3", "-c", f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"])
        assert "ConnectionRefusedError" in ran.output
        with pytest.raises(TimeoutError):
            server.accept()
    for target in ("('192.0.2.1', 80)", "('example.org', 80)"):
        assert sandbox.run(["python3", "-c", f"import socket; socket.create_connection({target}, 2)"]).status == 1
    assert "PermissionError" in sandbox.run(["python3", "-c", "import socket; socket.socket(socket.AF_VSOCK)"]).output


def test_the_hosts_files_and_the_workers_variables_are_not_there(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do-not-tell")
    (tmp_path / "secret").write_text("do-not-tell")
    with Sandbox(SMALL) as later:  # made when the variable is there
        seen = later.run(f"env; cat {tmp_path}/secret; ls /home /etc /var /mnt /srv; cat /proc/*/environ").output
    assert "do-not-tell" not in seen
    assert "SECRET_TOKEN" not in seen
    for path in (tmp_path, Path(__file__), Path("/etc/passwd"), Path("/etc/hostname"), Path.home() / ".bashrc"):
        assert sandbox.run(f"ls -d {path}").status != 0, path
    assert int(sandbox.run("ls /proc | grep -c '^[0-9]'").output) <= 4  # no process but its own


def test_no_denied_system_call_goes_through(sandbox: Sandbox) -> None:
    known = _MACHINES[platform.machine()]
    x32 = 0x40000000
    calls = [(number, 0) for number in (*known.denied, x32 + 39)] + [(known.clone, 1 << 28), (known.clone, 1 << 30)]
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print([(libc.syscall(n, a, 0, 0, 0, 0), ctypes.get_errno()) for n, a in {calls}])\n"
        f"print(libc.syscall({known.clone3}, 0, 0), ctypes.get_errno())"
    )
    denied, unknown = (-1, errno.EPERM), (-1, errno.ENOSYS)
    ran = sandbox.run(["python3", "-c", program])
    assert ran.output == f"{[denied] * len(calls)}\n{unknown[0]} {unknown[1]}\n"


def test_a_machine_whose_system_calls_are_unknown_is_refused() -> None:
    with pytest.raises(OSError, match="no system-call filter is known for pdp11; known: x86_64, aarch64"):
        system_call_filter("pdp11")


def test_the_first_process_can_be_neither_ended_nor_read_nor_led(sandbox: Sandbox) -> None:
    sandbox.run("kill -KILL 1; kill -STOP 1; kill -TERM 1; kill -INT 1; kill -KILL -1")
    assert sandbox.run("echo alive").output == "alive\n"
    for what in ("as=1", "cpu=0", "nofile=3"):
        assert sandbox.run(f"prlimit --pid 1 --{what}").status != 0, what
    for command in ("renice 19 1", "renice 19 -u 1000", "chrt -i -p 0 1", "taskset -p 1 1", "ionice -c 3 -p 1"):
        assert sandbox.run(command).status != 0, command
    assert sandbox.run("ulimit -v 100000; taskset -p 1 0 > /dev/null; nice -n 2 nice").status == 0  # its own it may
    for command in ("readlink /proc/1/fd/0", "cat /proc/1/environ", "head -c 1 /proc/1/mem", "echo x > /proc/1/fd/1"):
        assert sandbox.run(command).status != 0, command
    assert sandbox.run("grep -h Cap /proc/self/status").output.count("0000000000000000") >= 4
    assert "NoNewPrivs:\t1" in sandbox.run("cat /proc/self/status | head -c 10000 | grep NoNew").output


# --- faults of the machinery -------------------------------------------------------------------------------------


def test_a_sandbox_that_dies_is_an_error_and_no_outcome(sandbox: Sandbox) -> None:
    sandbox.run("true")
    assert sandbox._first is not None
    sandbox._first.kill()
    with pytest.raises(EnvError, match="the sandbox has ended"):
        sandbox.run("true")
    with pytest.raises(EnvError):
        sandbox.run("true")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is all of the PATH, on a machine where nobody has looked for a sandbox yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    require_sandbox.cache_clear()
    yield tmp_path
    require_sandbox.cache_clear()


def test_a_machine_without_bubblewrap_gets_an_early_error_with_the_remedy(programs: Path) -> None:
    with pytest.raises(ConfigError, match=r"no `bwrap` on the PATH.*apt install bubblewrap"):
        Sandbox()


@pytest.mark.parametrize("says", ["echo 'No permissions to create new namespace' >&2; exit 1", "exec sleep 100"])
def test_a_kernel_that_forbids_namespaces_gets_an_early_error_with_the_remedy(
    programs: Path, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "GRACE", 1.0)
    monkeypatch.setattr(sandboxes, "SECONDS_TO_END", 1.0)
    fake = programs / "bwrap"
    fake.write_text(f"#!/bin/sh\n{says}\n")
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match=r"cannot make a sandbox here.*max_user_namespaces"):
        Sandbox()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_files_cannot_be_laid_outside_the_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="relative to the working folder"):
        Sandbox(SMALL, {name: b"x"})


def test_files_that_do_not_fit_or_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="disk_mib=4 is too small"):
        Sandbox(SMALL, {"big": bytes(5 * 2**20)})
    with pytest.raises(ConfigError, match="cannot be read"):
        Sandbox(SMALL, {"x": Path("no/such/file")})
