"""Seeds of a run: every random choice is a pure function of the run's seed and of labels that name its purpose.

Invariant: a restarted head and `verify` derive the same seeds and task batches again (design, section 3).
"""

import hashlib
import struct
from collections.abc import Iterator

_WORD = struct.Struct("<Q")


def derive(seed: int, *labels: str | int) -> int:
    """A 64-bit seed from a parent seed and labels; independent for different labels (BLAKE2b)."""
    text = "\x1f".join(f"{type(label).__name__}:{label}" for label in labels)
    return _WORD.unpack(hashlib.blake2b(text.encode(), key=_WORD.pack(seed), digest_size=8).digest())[0]


def task_batch(run_seed: int, version: int, size: int, num_tasks: int) -> tuple[int, ...]:
    """`size` different tasks out of `num_tasks`, the same for all members of a version.

    Errors: ValueError if there are fewer than `size` tasks.
    """
    if size > num_tasks:
        raise ValueError(f"a batch of {size} different tasks cannot be drawn from {num_tasks}")
    moved: dict[int, int] = {}  # sparse Fisher-Yates: holds only the changed positions of 0..num_tasks-1
    batch = []
    for place, word in zip(range(size), _words(run_seed, "tasks", version), strict=False):
        other = place + word % (num_tasks - place)
        batch.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return tuple(batch)


def sampling_seed(run_seed: int, version: int) -> int:
    """Sampling seed of all members of a version."""
    return derive(run_seed, "sampling", version)


def eval_sampling_seed(run_seed: int, repeat: int = 0, first: int = 0) -> int:
    """Sampling seed of the batch of evaluation tasks that begins with task `first`.

    It is the same for all versions, so that comparisons are paired; it differs between repeats and batches.
    """
    return derive(run_seed, "eval sampling", *([repeat, first] if repeat or first else []))


def episode_seed(seed: int, position: int, turn: int) -> int:
    """Seed of one answer, from a sampling seed, the episode's position in its batch, and the turn.

    It has 63 bits, because engines expect a signed integer.
    """
    return derive(seed, "episode", position, turn) >> 1


def _words(seed: int, *labels: str | int) -> Iterator[int]:
    place = 0
    while True:
        yield derive(seed, *labels, place)
        place += 1
