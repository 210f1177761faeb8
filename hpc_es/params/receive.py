"""Fill an arena with the contents of another one, received over the network.

Invariant: afterwards the arena holds theta of the version that it names, as its digest proves, or theta_0 on failure.
"""

from collections.abc import Iterable

from hpc_es.errors import DigestMismatch, TransportError
from hpc_es.params.arena import Arena


def receive(arena: Arena, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
    """Fill theta and state with the buckets, which are consecutive parts of an arena of the same layout at `version`.

    Errors: DigestMismatch when the bits do not have `digest`, TransportError when there are too many or too few bytes,
    and errors of `buckets` itself.
    """
    memory, filled = arena.memory.data.cast("B"), 0
    try:
        for bucket in buckets:
            if filled + len(bucket) > len(memory):
                raise TransportError(
                    f"received more than the arena's {len(memory)} bytes; check that both sides use the same model and "
                    "configuration"
                )
            memory[filled : filled + len(bucket)] = bucket
            filled += len(bucket)
        if filled < len(memory):
            raise TransportError(
                f"received {filled} of the arena's {len(memory)} bytes; check that both sides use the same model and "
                "configuration"
            )
        if (found := arena.digest()) != digest:
            raise DigestMismatch(f"the received theta_{version} has digest {found:016x}; announced was {digest:016x}")
    except BaseException:
        arena.reload(None)
        raise
    arena.version = version
