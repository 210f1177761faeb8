"""Damage that any file may suffer."""

import random


def flipped(rng: random.Random, data: bytes) -> bytes:
    """One to eight bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def zeroed(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    length = min(rng.choice((1, 16, 512, 4096)), len(data) - start)
    return data[:start] + bytes(length) + data[start + length :]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice((0, rng.randrange(len(data)), max(len(data) - rng.randint(1, 64), 0)))]


def overwritten(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    junk = rng.randbytes(rng.choice((1, 4, 64)))
    return data[:start] + junk + data[start + len(junk) :]


def appended(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice((bytes(4096), rng.randbytes(300), data[-100:]))


def any_damage(rng: random.Random, data: bytes) -> bytes:
    return rng.choice((flipped, zeroed, cut, overwritten, appended))(rng, data)
