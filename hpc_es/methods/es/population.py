"""The members of a cohort: seed and sign of the perturbation in every slot.

Invariant: a member is a pure function of the run's seed and the evaluation's id (design, section 3), so a restarted
head and `verify` derive the same members again.
"""

from hpc_es.records import EvalId, Member
from hpc_es.seeds import derive


def member(run_seed: int, eval_id: EvalId, *, sigma: float, mirrored: bool) -> Member:
    """The member in slot `eval_id.slot`; with `mirrored`, slots 2j and 2j+1 share a seed and differ in sign.

    A replacement has a new seed. The other half of its pair stays valid on its own.
    """
    group, half = divmod(eval_id.slot, 2) if mirrored else (eval_id.slot, 0)
    seed = derive(run_seed, "member", eval_id.version, group, eval_id.replacement)
    return Member(seed=seed, sign=-1 if half else 1, sigma=sigma)
