"""What this machine can do at best: memory bandwidth, and the kernels alone, on data that stays in the cache.

Each function makes work for rows.alternate, to be timed in turn with what it is the limit of: as many bytes or
elements, on the same pool of threads (hpc_es.noise.threads).
"""

from collections.abc import Callable

import numpy as np

from hpc_es.noise import Perturbation, Update, kernels, threads

CACHED = 2**16
"""Elements: theta and its copy are 512 KiB, which lie in a core's L2 cache."""


def copying(num_bytes: int, num_threads: int) -> Callable[[], None]:
    """Half of the bytes read, half of them written, by numpy; far more than a cache holds, if num_bytes is."""
    source, target = np.ones(num_bytes // 16), np.ones(num_bytes // 16)
    chunk = -(-source.size // (8 * num_threads))

    def copy(begin: int) -> None:
        np.copyto(target[begin : begin + chunk], source[begin : begin + chunk])

    return lambda: threads.run(copy, range(0, source.size, chunk))


def perturbing(
    num_elements: int, num_threads: int, dtype: type[np.generic], member: Perturbation
) -> Callable[[], None]:
    """The kernel of perturb again and again over one small array per thread."""
    theta, outs = np.ones((num_threads, CACHED), np.float32), np.empty((num_threads, CACHED), dtype)

    def perturb(thread: int) -> None:
        for _ in range(num_elements // (CACHED * num_threads)):
            kernels().perturb(theta[thread], outs[thread], 1, member)

    return lambda: threads.run(perturb, range(num_threads))


def updating(num_elements: int, num_threads: int, versions: list[Update]) -> Callable[[], None]:
    """The kernel of update, likewise."""
    theta = np.ones((num_threads, CACHED), np.float32)

    def update(thread: int) -> None:
        for _ in range(num_elements // (CACHED * num_threads)):
            kernels().update(theta[thread], 1, versions)

    return lambda: threads.run(update, range(num_threads))
