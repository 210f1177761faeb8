"""Limits on the size of messages on the control plane, in bytes; both ends know them.

libzmq reads a message into memory before its sender has shown a key, so the limit also bounds the memory that a
stranger can use per connection. Invariant: every message that we send fits, or its sender raises an error that says so;
a message above the limit closes its connection.
"""

from hpc_es.config.schema import Config
from hpc_es.errors import TransportError

EPISODE_BYTES = 256
"""An Episode with the longest number in every field."""
HEADROOM = 72 * 2**10
"""Everything in a message to the head except its episodes: names, facts of a Hello, the error of an evaluation."""
TO_HEAD = HEADROOM + 1024 * EPISODE_BYTES
"""Largest message to a head that does not know how many episodes a report has."""
TO_WORKER = 2**26
"""Largest message to a worker: a commit of 500,000 members, or the status of 100,000 workers. A worker has only the
connection to the head."""
MEMBERS_PER_ANSWER = 2**16
"""Members of all commits in one reply to Fetch, about 6 MB: a worker that needs more asks again."""


def to_head(config: Config) -> int:
    """Largest message that the head of this run accepts: a report of the largest evaluation."""
    episodes = max(config.es.tasks_per_member, config.eval.batch or 0)
    return HEADROOM + episodes * EPISODE_BYTES


def check(data: bytes, largest: int, what: object) -> bytes:
    """Return `data` if it fits into `largest` bytes. Errors: TransportError."""
    if len(data) > largest:
        raise TransportError(
            f"a {type(what).__name__} of {len(data):,} bytes cannot be sent: the other end takes at most {largest:,}. "
            f"A text in it is too long, or it has more entries than the configuration asks for"
        )
    return data
