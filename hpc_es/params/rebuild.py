"""Bring an arena to any version of a run, from the nearest checkpoint and the commits, and check its digest."""

from collections.abc import Callable, Mapping, Sequence

from hpc_es.errors import VerifyError
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
