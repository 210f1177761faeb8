"""Send one message to the running head, as any process with the run's keys may: `hpc-es status`, `hpc-es stop`, and the
parent of a worker that died.

Invariant: every call returns within its time limit, in whatever state the head is.
"""

import secrets as random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from hpc_es.errors import TransportError
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import AnyMessage, decode, encode
from hpc_es.transport.rendezvous import Rendezvous, read_rendezvous
from hpc_es.transport.secrets import load_secrets
from hpc_es.transport.sockets import Connection, milliseconds


def ask(paths: RunPaths, message: AnyMessage, timeout_s: float) -> AnyMessage:
    """Send one message to the running head as an observer, and return its answer.

    Errors: TransportError if there is no head, if it does not answer within `timeout_s`, or if it refuses our key.
    """
    there = _live_head(paths)
    deadline = time.monotonic() + timeout_s
    with _connected(paths, there, f"observer-{random.token_hex(8)}") as connection:
        while not connection.is_refused and (remaining_s := deadline - time.monotonic()) > 0:
            if _wait(connection, remaining_s):  # also after a reconnection: the first message may be lost
                connection.send(encode(0, message))
            for data in connection.receive():
                return decode(data).message
        trouble = connection.trouble
    raise TransportError(
        f"the head of generation {there.generation} (process {there.pid} on {there.head_host}) gave no answer within "
        f"{timeout_s:g} s: {trouble}; if it has exited, start the run again, and it resumes where it stopped"
    )


def tell(paths: RunPaths, message: AnyMessage, timeout_s: float, *, sender: str) -> None:
    """Send one message on behalf of a worker that has exited, without waiting for an answer.

    Errors: TransportError if no head can be reached within `timeout_s`, or if it refuses our key.
    """
    there = _live_head(paths)
    deadline = time.monotonic() + timeout_s
    with _connected(paths, there, sender, linger_ms=milliseconds(timeout_s)) as connection:
        while not connection.is_ready:
            remaining_s = deadline - time.monotonic()
            if connection.is_refused or remaining_s <= 0:
                raise TransportError(f"the head on {there.head_host} could not be reached: {connection.trouble}")
            _wait(connection, remaining_s)
        connection.send(encode(there.generation, message))


def _live_head(paths: RunPaths) -> Rendezvous:
    try:
        there = read_rendezvous(paths.rendezvous)
    except OSError as error:  # a network file system may fail for a moment while the file is replaced
        raise TransportError(f"{paths.rendezvous} cannot be read: {error.strerror}") from error
    if there is None:
        raise TransportError(
            f"{paths.rendezvous} does not exist: no head has started this run; start it with `hpc-es run`"
        )
    return there


@contextmanager
def _connected(paths: RunPaths, there: Rendezvous, identity: str, linger_ms: int = 0) -> Iterator[Connection]:
    keys = load_secrets(paths)
    context = zmq.Context()
    connection = Connection(context, there, keys, identity.encode())
    try:
        yield connection
    finally:
        connection.close(linger_ms)
        context.term()


def _wait(connection: Connection, timeout_s: float) -> bool:
    """Wait for an event on the connection; returns whether it has just become ready, for the first time or again."""
    poller = zmq.Poller()
    poller.register(connection.socket, zmq.POLLIN)
    poller.register(connection.monitor, zmq.POLLIN)
    poller.poll(milliseconds(timeout_s))
    return connection.watch()
