"""CoPES: every update splits all parameters into K random, equal, disjoint subspaces; a member perturbs one of them.

theta += alpha * sum_k P_k (1/N_k) sum_i z_{k,i} eps_{k,i}. Within a subspace the standard deviation is sqrt(K) * sigma,
so that a member is as far from theta as one that perturbs all parameters (Wang et al., 2026). z is computed over all N
members together.
Invariant: a member's subspace and partition follow from the run seed, its slot, and the update that it was planned
for. So all members planned for one update share a partition, and no mask is stored (noise/reference.py).
"""

import math
from collections import Counter
from collections.abc import Sequence

from hpc_es.seeds import derive

ADVISED_MEMBERS = 10
"""Recommended minimum of members per subspace and update (Wang et al., 2026)."""


def subspace(slot: int, num_subspaces: int, *, mirrored: bool) -> int:
    """Subspace of a slot: slots take turns, and the two halves of a mirrored pair share a subspace."""
    return (slot // 2 if mirrored else slot) % num_subspaces


def partition_seed(run_seed: int, update: int, num_subspaces: int) -> int:
    """64-bit seed of the partition for `update`; 0 if there is one subspace only."""
    return derive(run_seed, "partition", update) if num_subspaces > 1 else 0


def scaled(sigma: float, num_subspaces: int) -> float:
    """sigma within a subspace: sqrt(K) * sigma."""
    return math.sqrt(num_subspaces) * sigma


def weights(subspaces: Sequence[int]) -> list[float]:
    """1/N_k for each member, where N_k counts the cohort's members in its subspace k; 1/N with one subspace.

    If members come from several partitions, those with the same k are counted together. Averaged over all partitions,
    the weights of an element then still sum to 1, as with one partition.
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
