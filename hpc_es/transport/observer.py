"""One question to the live head, from anyone who holds the run's keys: `hpc-es status`, `hpc-es stop`.

Invariant: it ends within the time that it was given, whatever has become of the head.
"""

import secrets as random
import time

import zmq

from hpc_es.errors import TransportError
from hpc_es.paths import RunPaths
from hpc_es.transport.messages import AnyMessage, decode, encode, read_rendezvous
from hpc_es.transport.secrets import load_secrets
from hpc_es.transport.sockets import Connection, milliseconds


def ask(paths: RunPaths, message: AnyMessage, timeout_s: float) -> AnyMessage:
    """Send one message to the live head as an observer and return its answer.

    Errors: TransportError when there is no head, it does not answer within `timeout_s`, or keys are refused.
    """
    keys = load_secrets(paths)
    try:
        there = read_rendezvous(paths.rendezvous)
    except OSError as error:  # a network file system may fail for a moment while the file is replaced
        raise TransportError(f"{paths.rendezvous} cannot be read: {error.strerror}") from error
    if there is None:
        raise TransportError(
            f"{paths.rendezvous} does not exist: no head has started this run; start it with `hpc-es run`"
        )
    deadline = time.monotonic() + timeout_s
    context = zmq.Context()
    connection = Connection(context, there, keys, f"observer-{random.token_hex(8)}".encode())
    try:
        poller = zmq.Poller()
        poller.register(connection.socket, zmq.POLLIN)
        poller.register(connection.monitor, zmq.POLLIN)
        while not connection.is_refused and (remaining_s := deadline - time.monotonic()) > 0:
            poller.poll(milliseconds(remaining_s))
            if connection.watch():  # again after a connection that broke, for what was under way is gone
                connection.send(encode(0, message))
            for data in connection.receive():
                return decode(data).message
    finally:
        connection.close()
        context.term()
    raise TransportError(
        f"the head of generation {there.generation} (process {there.pid} on {there.head_host}) gave no answer within "
        f"{timeout_s:g} s: {connection.trouble}; if it is gone, start the run again and it goes on where it stopped"
    )
