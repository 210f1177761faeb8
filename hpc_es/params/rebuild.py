"""Bring an arena to a version of a run: from the nearest checkpoint and the commits, or from bytes of another arena.

Invariant: afterwards the arena holds theta of the version that was asked for, as its digest proves, or an error was
raised. After a failed transfer it holds theta_0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from hpc_es.errors import DigestMismatch, TransportError, VerifyError
from hpc_es.params import checkpoint
from hpc_es.params.arena import Arena
from hpc_es.params.report import UpdateReport
from hpc_es.paths import RunPaths
from hpc_es.records import Commit, Weights


def bring_to(
    version: int,
    arena: Arena,
    paths: RunPaths,
    commits: Mapping[int, Commit],
    digests: Mapping[int, int],
    apply: Callable[[Sequence[Commit]], UpdateReport] | None = None,
) -> UpdateReport:
    """Rebuild theta_version in the arena and return the report of the last pass.

    `commits` and `digests` map versions to what the run recorded. `apply` applies commits to this arena; default:
    Arena.apply. Errors: VerifyError when the rebuilt theta does not have the recorded bits, or when they exist only in
    a lost checkpoint of a trainer; ModelError.
    """
    began_from = checkpoint.restore(paths, arena, version, digests)
    missed = [commits[v] for v in range(began_from + 1, version + 1)]
    if trained := [commit.version for commit in missed if isinstance(commit.body, Weights)]:
        raise VerifyError(
            f"the checkpoint of theta_{trained[-1]} is missing or damaged, and a trainer's result cannot be computed "
            f"again: restore {paths.checkpoint(trained[-1])} from a copy"
        )
    report = (apply or arena.apply)(missed)
    if (recorded := digests.get(version, report.digest)) != report.digest:
        raise VerifyError(
            f"theta_{version}, rebuilt from version {began_from} and the journal, has digest {report.digest:016x}, but "
            f"the journal says {recorded:016x}: `hpc-es verify {paths.root}` shows the first version that differs"
        )
    return report


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
