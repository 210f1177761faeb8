"""Head, workers and observers on IPv6, as on a cluster that has nothing else (groups: test_collective.py)."""

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gated
import pytest
from control_peers import EVAL_ID, PATIENCE_S, hear, serving, wait_until, working
from repository import SUPPORT

from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.records import Result
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal
from hpc_es.transport import address
from hpc_es.transport import messages as m
from hpc_es.transport.observer import ask
from hpc_es.transport.rendezvous import read_rendezvous
from hpc_es.transport.secrets import create_secrets

CONFIG = """
run: {name: six, dir: DIR, num_updates: 4}
model: {path: MODEL, dtype: float32}
task:
  env: gated:Sudoku
  options: {size: 4, blanks: 2, partial_credit: true, action: digit, prompt: short}
  chat: false
es: {population: 4, sigma: 0.5, alpha: 0.5, tasks_per_member: 3}
sampling: {max_tokens: 1}
eval: {num_tasks: 0}
engine: {kind: lab, max_concurrent: 1, max_model_len: 512, threads: 1}
transport: {host: "[::1]", backend: gloo}
launch: {workers: 2}
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    create_secrets(paths)
    return paths


@pytest.fixture
def link_local(ipv6_loopback: str) -> str:
    """An address of this machine that is only valid on one network."""
    for line in address._IPV6_ADDRESSES.read_text().splitlines():
        digits, *_, interface = line.split()
        if digits.startswith("fe80"):
            return f"{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))}%{interface}"
    pytest.skip("no interface of this machine has a link-local address")


def test_workers_and_observers_reach_a_head_on_ipv6(paths: RunPaths, ipv6_loopback: str) -> None:
    converse(paths, ipv6_loopback)


def test_workers_and_observers_reach_a_head_on_a_link_local_address(paths: RunPaths, link_local: str) -> None:
    converse(paths, link_local)


def converse(paths: RunPaths, host: str) -> None:
    """A worker reports, and an observer asks."""
    answers: list[Any] = []
    with serving(paths, host=host) as server, working(paths) as worker:
        hear(server, m.Hello)
        worker.client.send(m.Report("w", Result(EVAL_ID, 0.5, (), 0, 0.1, 0.2, 0.3), 9.0, 1.0))
        hear(server, m.Report)
        server.send(b"w", m.Ack(EVAL_ID))
        assert worker.client.flush(PATIENCE_S)
        asking = threading.Thread(target=lambda: answers.append(ask(paths, m.StatusRequest(), PATIENCE_S)))
        asking.start()
        while not answers and asking.is_alive():
            for peer, envelope in server.receive(0.02):
                if isinstance(envelope.message, m.StatusRequest):
                    server.send(peer, m.Leave("the answer", False))
        asking.join(PATIENCE_S)
        assert server.guard.num_unauthenticated == 0
    assert answers == [m.Leave("the answer", False)]


@pytest.mark.slow
def test_a_whole_run_on_ipv6_answers_its_status_and_broadcasts_its_commits(tmp_path: Path, ipv6_loopback: str) -> None:
    config = tmp_path / "six.yaml"
    model = write_lab_model(tmp_path / "model", LAB_MODELS["lab-100k"])
    config.write_text(CONFIG.replace("DIR", str(tmp_path)).replace("MODEL", str(model)))
    environment = {**os.environ, "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}"}
    environment[gated.PACE] = "0.1"

    def command(*arguments: object) -> "subprocess.Popen[str]":
        line = [sys.executable, "-m", "hpc_es", *map(str, arguments)]
        return subprocess.Popen(line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    paths = RunPaths(tmp_path / "six")
    with command("run", config) as run:
        try:
            wait_until(lambda: paths.rendezvous.exists() or run.poll() is not None, 60)
            status, _ = command("status", paths.root, "--json").communicate(timeout=60)
            output, _ = run.communicate(timeout=200)
        finally:
            run.kill()
    assert run.returncode == 0, output
    assert re.search(r'"generation": *1', status), status
    there = read_rendezvous(paths.rendezvous)
    assert there is not None
    assert there.host == ipv6_loopback
    records = list(read_journal(paths.root, warn=lambda *_: None))
    assert sum(isinstance(record, journal.Committed) for record in records) == 4
    assert not [record for record in records if isinstance(record, journal.Noted) and record.level == "warning"]
    logs = "".join(path.read_text() for path in paths.logs.iterdir())
    assert "[::1]:" in logs
    assert "did not come by broadcast" not in logs
