"""The largest messages of the control plane, in bytes: what each end takes, and what the other never exceeds.

libzmq reads a message into memory before anybody has shown a key, so the limit is also what a stranger may take per
connection. Invariant: every message of our own fits, or its sender fails with an error that says so; a message above
the limit ends the connection that brings it.
"""

from hpc_es.config.schema import Config
from hpc_es.errors import TransportError

EPISODE_BYTES = 256
"""An Episode with the longest number in every field."""
HEADROOM = 72 * 2**10
"""Everything in a message to the head but its episodes: names, facts of a Hello, the error of an evaluation."""
TO_HEAD = HEADROOM + 1024 * EPISODE_BYTES
"""What a head takes that is not told how many episodes a report has."""
TO_WORKER = 2**26
"""An announced commit of 500,000 members, or the status of 100,000 workers. One connection, and it is the head's."""
MEMBERS_PER_ANSWER = 2**16
"""Members of all commits in one answer to Fetch, about 6 MB: whoever needs more asks again."""


def to_head(config: Config) -> int:
    """The largest message that the head of this run takes: a report of the largest evaluation."""
    episodes = max(config.es.tasks_per_member, config.eval.batch or 0)
    return HEADROOM + episodes * EPISODE_BYTES


def check(data: bytes, largest: int, what: object) -> bytes:
    """`data` if it fits. Errors: TransportError."""
    if len(data) > largest:
        raise TransportError(
            f"a {type(what).__name__} of {len(data):,} bytes cannot be sent, for the other end takes {largest:,} at "
            f"most: a text in it is too long, or it has more entries than the configuration asks for"
        )
    return data
