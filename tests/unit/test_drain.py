"""hpc-es drain: asked over the real control plane of the head's decisions (see theatre.py)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from control_peers import serving
from theatre import Stage, make_config

from hpc_es.errors import LaunchError, TransportError
from hpc_es.head.core import Received
from hpc_es.head.status import Anchor, status
from hpc_es.launch.drain import drain
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import StatusRequest
from hpc_es.transport.secrets import create_secrets


@contextmanager
def answering(stage: Stage, paths: RunPaths) -> Iterator[None]:
    """Let the core of `stage` answer observers, as the loop does."""
    create_secrets(paths)
    over = threading.Event()
    with serving(paths) as server:

        def answer() -> None:
            while not over.is_set():
                for peer, envelope in server.receive(0.05):
                    if not isinstance(envelope.message, StatusRequest):
                        stage.handle(Received(envelope.message))
                    server.send(peer, status(stage.core, Anchor("run", 1, 0.0, 0), 1.0))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """drain, in a run with the workers 12_0 (which holds an evaluation), 12_3 and 14_3."""
    stage = Stage(make_config())
    for seat in ("12_0", "12_3", "14_3"):
        stage.add_worker(seat)
    while stage.to_head:
        stage.move("to_head")
    with answering(stage, RunPaths(tmp_path)):
        yield lambda who: drain(RunPaths(tmp_path), who)


def test_a_draining_worker_exits_after_its_current_evaluation(ask: Callable[[str], str]) -> None:
    assert ask("0").startswith("12_0 exits when ")


@pytest.mark.parametrize("who", ["3", "12_4", "nobody"])
def test_a_name_that_means_no_single_worker_is_answered_with_those_there_are(
    ask: Callable[[str], str], who: str
) -> None:
    with pytest.raises(LaunchError, match=r"12_3, 14_3"):
        ask(who)


def test_without_a_head_it_says_so(tmp_path: Path) -> None:
    create_secrets(RunPaths(tmp_path))
    with pytest.raises(TransportError, match="no head has started this run"):
        drain(RunPaths(tmp_path), "0")
