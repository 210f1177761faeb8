"""An arena filled from outside, with what another arena holds.

Invariant: afterwards it holds theta of the version that it names, proven by the digest; where that fails, theta_0.
"""

from collections.abc import Iterable

from hpc_es.errors import DigestMismatch, TransportError
from hpc_es.params.arena import Arena


def receive(arena: Arena, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
    """theta and state := the buckets, one after the other: the memory of an arena of the same layout, at `version`.

    Errors: DigestMismatch when the bits are not those of `digest`, TransportError when there are too many or too few,
    and whatever `buckets` raises.
    """
    memory, filled = arena.memory.data.cast("B"), 0
    try:
        for bucket in buckets:
            if filled + len(bucket) > len(memory):
                raise TransportError(f"more than the arena's {len(memory)} bytes came; is its layout another one?")
            memory[filled : filled + len(bucket)] = bucket
            filled += len(bucket)
        if filled < len(memory):
            raise TransportError(f"{filled} of the arena's {len(memory)} bytes came; is its layout another one?")
        if (found := arena.digest()) != digest:
            raise DigestMismatch(f"what came as theta_{version} has digest {found:016x}, announced was {digest:016x}")
    except BaseException:
        arena.reload(None)
        raise
    arena.version = version
