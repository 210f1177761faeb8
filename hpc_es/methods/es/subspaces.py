"""CoPES: every update splits all parameters into K random, equal, disjoint subspaces; a member perturbs one of them.

theta += alpha * sum_k P_k (1/N_k) sum_i z_{k,i} eps_{k,i}, with sqrt(K) * sigma within a subspace, so that a member is
as far from theta as one that perturbs everything (Wang et al., 2026). z is taken over all N members jointly.
Invariant: a member's subspace and its partition follow from the run seed, its slot, and the update that it was
planned for; so all members planned for one update share a partition, and no mask is stored (noise/reference.py).
"""

import math
from collections import Counter
from collections.abc import Sequence

from hpc_es.seeds import derive

ADVISED_MEMBERS = 10
"""Per subspace and update, at least (Wang et al., 2026)."""


def subspace(slot: int, num_subspaces: int, *, mirrored: bool) -> int:
    """Slots take turns; the two halves of a mirrored pair fall into the same subspace."""
    return (slot // 2 if mirrored else slot) % num_subspaces


def partition_seed(run_seed: int, update: int, num_subspaces: int) -> int:
    """64-bit seed of the partition for `update`; 0 where there is nothing to part."""
    return derive(run_seed, "partition", update) if num_subspaces > 1 else 0


def scaled(sigma: float, num_subspaces: int) -> float:
    """sigma within a subspace: sqrt(K) * sigma."""
    return math.sqrt(num_subspaces) * sigma


def weights(subspaces: Sequence[int]) -> list[float]:
    """1/N_k for each member, N_k the members of its subspace in the cohort; 1/N where there is one subspace.

    Members of several partitions count together by their number k: an element then gets, over all partitions, the
    weight 1 on average, as it does when there is one.
    """
    counts = Counter(subspaces)
    return [1.0 / counts[k] for k in subspaces]


def advice(population: int, num_subspaces: int) -> str | None:
    """A warning when subspaces have few members, else None."""
    if num_subspaces == 1 or population / num_subspaces >= ADVISED_MEMBERS:
        return None
    return (
        f"es.population={population} over es.subspaces={num_subspaces} leaves {population / num_subspaces:g} members "
        f"per subspace; CoPES advises at least {ADVISED_MEMBERS}: raise es.population or lower es.subspaces"
    )
