"""transport.join: broadcast, from the head's arena into an engine: the laboratory's, and whole runs with it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from test_run import PACED, Bench, digests, processes_of, records_of, version_of, wait_until

from hpc_es.config.schema import EngineConfig, ModelConfig, TransportConfig
from hpc_es.engine.lab import LabEngine
from hpc_es.params.arena import Arena
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.store import records as journal
from hpc_es.transport.collective import HeadCollective
from hpc_es.transport.messages import OpenTransfer
from hpc_es.worker.arrival import Arrival

HOST, TIMEOUT_S = "127.0.0.1", 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lab_model(tmp_path_factory.mktemp("lab"), LAB_MODELS["lab-10k"])


def send(model: Path, announce_digest: Callable[[int], int]) -> tuple[Arena, LabEngine, list[str]]:
    """theta_3 of a head's arena to one engine. Returns both, and what the worker would tell the head."""
    arena = Arena.from_pretrained(model)
    arena.memory[:] = np.random.default_rng(0).standard_normal(arena.memory.size)
    head, told = HeadCollective(HOST, TIMEOUT_S, lambda event: None), list[str]()

    async def work() -> LabEngine:
        engine = await LabEngine.start(
            ModelConfig(path=str(model), dtype="float32"), EngineConfig(kind="lab"), threads=1
        )
        sending = head.sending(1, ["w"], "gloo")
        memory = arena.memory.data.cast("B")
        (call,) = sending.calls(3, announce_digest(arena.digest()), len(memory)).values()
        thread = Thread(target=sending.send, args=(memory,))
        thread.start()

        def tell(ended: OpenTransfer, trouble: str) -> None:
            assert ended == call
            told.append(trouble)

        arrival = Arrival(engine, TransportConfig(collective_timeout=TIMEOUT_S), tell)
        task = arrival.begin(call)
        await arrival.settled()
        assert task.done()
        thread.join()
        await engine.perturb(None)
        await engine.probe()
        return engine

    try:
        return arena, asyncio.run(work()), told
    finally:
        head.close()


def test_an_engine_serves_the_theta_that_came(model: Path) -> None:
    arena, engine, told = send(model, lambda digest: digest)
    assert (engine.version, engine.digest) == (3, arena.digest())
    assert told == [""]


def test_an_engine_that_received_other_bits_is_at_theta_0_and_the_head_hears_why(model: Path) -> None:
    _, engine, told = send(model, lambda digest: digest ^ 1)
    assert (engine.version, engine.digest) == (0, Arena.from_pretrained(model).digest())
    assert "announced was" in told[0]


def pid_of(line: str) -> int:
    """Process id of the process with this command line."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and (folder / "cmdline").read_text().split("\0") == line.split(" "):
                return int(folder.name)
    raise AssertionError(f"gone: {line}")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_that_is_killed_comes_back_with_theta_by_broadcast(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    template = PACED.replace("backend: none", "backend: gloo, join: broadcast, collective_timeout: 3")
    template = template.replace("num_updates: 4", "num_updates: 7").replace("checkpoint: {every: 2}", "")
    run = bench.start("run", bench.config("joined", template=template))
    root = tmp_path / "joined"
    wait_until(lambda: version_of(root) >= 3)
    witness_and_worker = [line for line in processes_of(root) if " worker " in line and "local-1" in line]
    os.kill(max(map(pid_of, witness_and_worker)), signal.SIGKILL)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert sorted(digests(root)) == list(range(1, 8))
    notes = [record.what for record in records_of(root) if isinstance(record, journal.Noted)]
    (sent,) = [note for note in notes if note.startswith("sent theta_")]
    assert not [note for note in notes if "did not come" in note or "quarantined" in note]
    joiner = sent.split()[-1]
    reports = [record for record in records_of(root) if isinstance(record, journal.Reported)]
    assert any(record.worker == joiner and record.result.error is None for record in reports)
    bench.cli("verify", root)
