"""Members of a cohort: member seeds, signs, task batches and sampling seeds.

Invariant: everything here is a pure function of the run seed and an evaluation's id (design, section 3), so a
head that restarts, and anyone who verifies a run, derives the same members again.
"""

import hashlib
import struct
from collections.abc import Iterator

from hpc_es.es.records import EvalId, Member

_WORD = struct.Struct("<Q")


def derive(seed: int, *labels: str | int) -> int:
    """A 64-bit seed from a parent seed and labels; independent for different labels (BLAKE2b)."""
    text = "\x1f".join(f"{type(label).__name__}:{label}" for label in labels)
    return _WORD.unpack(hashlib.blake2b(text.encode(), key=_WORD.pack(seed), digest_size=8).digest())[0]


def member(run_seed: int, eval_id: EvalId, *, sigma: float, mirrored: bool) -> Member:
    """The member of slot `eval_id.slot`; with `mirrored`, slots 2j and 2j+1 share a seed and differ in sign.

    A replacement draws a new seed: the half of a pair that it leaves behind stays valid on its own.
    """
    group, half = divmod(eval_id.slot, 2) if mirrored else (eval_id.slot, 0)
    seed = derive(run_seed, "member", eval_id.version, group, eval_id.replacement)
    return Member(seed=seed, sign=-1 if half else 1, sigma=sigma)


def task_batch(run_seed: int, version: int, size: int, num_tasks: int) -> tuple[int, ...]:
    """`size` different tasks out of `num_tasks`, the same for all members of a version.

    Errors: ValueError when there are fewer tasks than asked for.
    """
    if size > num_tasks:
        raise ValueError(f"a batch of {size} different tasks cannot be drawn from {num_tasks}")
    moved: dict[int, int] = {}  # sparse Fisher-Yates: only the touched places of 0..num_tasks-1
    batch = []
    for place, word in zip(range(size), _words(run_seed, "tasks", version), strict=False):
        other = place + word % (num_tasks - place)
        batch.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return tuple(batch)


def sampling_seed(run_seed: int, version: int) -> int:
    """The same for all members of a version."""
    return derive(run_seed, "sampling", version)


def eval_sampling_seed(run_seed: int, repeat: int = 0, first: int = 0) -> int:
    """Sampling seed of the batch of evaluation tasks that begins with task `first`.

    It is the same for all versions, so that they are compared in pairs; it differs for each repeat and batch.
    """
    return derive(run_seed, "eval sampling", *([repeat, first] if repeat or first else []))


def episode_seed(seed: int, position: int, turn: int) -> int:
    """63 bits (engines want a signed seed) for one answer: batch position and turn under a sampling seed."""
    return derive(seed, "episode", position, turn) >> 1


def _words(seed: int, *labels: str | int) -> Iterator[int]:
    place = 0
    while True:
        yield derive(seed, *labels, place)
        place += 1
