"""Limits on the size of messages on the control plane, in bytes; both ends know them.

libzmq reads a message into memory before its sender has proved its key, so the limit also bounds the memory that an
unauthenticated connection can use. Invariant: a message that we send is within the limit, or sending it raises an
error. libzmq closes a connection that brings a larger message.
"""

from hpc_es.config.schema import Config
from hpc_es.errors import TransportError

EPISODE_BYTES = 256
"""Size of an Episode with the longest number in every field."""
HEADROOM = 72 * 2**10
"""Size of everything in a message to the head except episodes: names, facts of a Hello, an evaluation's error."""
TO_HEAD = HEADROOM + 1024 * EPISODE_BYTES
"""Largest message to a head that does not know how many episodes a report has."""
TO_WORKER = 2**26
"""Largest message to a worker: a commit of 500,000 members, or the status of 100,000 workers. It may be large, since a
worker has one connection only, to the head."""
MEMBERS_PER_ANSWER = 2**16
"""Most members in all commits of one reply to Fetch, about 6 MB; a worker that needs more sends another Fetch."""


def to_head(config: Config) -> int:
    """Largest message that the head of this run accepts: a report of the largest evaluation."""
    episodes = max(config.es.tasks_per_member, config.eval.batch or 0)
    return HEADROOM + episodes * EPISODE_BYTES


def check(data: bytes, largest: int, what: object) -> bytes:
    """Return `data` if it fits into `largest` bytes. Errors: TransportError."""
    if len(data) > largest:
        raise TransportError(
            f"a {type(what).__name__} of {len(data):,} bytes cannot be sent: the receiver accepts at most {largest:,}. "
            f"A text in it is too long, or it has more entries than the configuration allows"
        )
    return data
