"""One pool of threads for kernels that release the GIL.

Ours, because numba's default threading layer aborts on two concurrent parallel calls. Invariant: all threads are
started at once, by `start`, so they keep the CPU affinity of that moment whatever an inference engine narrows later.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Lock
from typing import TypeVar

Item = TypeVar("Item")

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_num_threads = 0


def start(num_threads: int | None = None) -> int:
    """Have a pool of `num_threads` (default: as before, else the CPUs of this process) running; returns its size."""
    with _lock:
        _running(num_threads)
        return _num_threads


def run(work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """work(item) for every item, spread over the pool; returns when all are done, raises the first error."""
    items = list(items)
    queue = iter(items)

    def drain() -> None:
        for item in queue:
            work(item)

    if len(items) <= 1:
        drain()
        return
    with _lock:
        pool = _running(None)
        drains = [pool.submit(drain) for _ in range(min(_num_threads, len(items)))]
    for drained in wait(drains).done:
        drained.result()


def _running(num_threads: int | None) -> ThreadPoolExecutor:
    """The pool; a new one where the size changes. Call with the lock."""
    global _pool, _num_threads
    wanted = num_threads or _num_threads or len(os.sched_getaffinity(0))
    if _pool is None or wanted != _num_threads:
        if _pool is not None:
            _pool.shutdown(wait=False)
        _pool, _num_threads = ThreadPoolExecutor(wanted, thread_name_prefix="hpc-es-kernel"), wanted
        together = Barrier(wanted + 1)
        for _ in range(wanted):
            _pool.submit(together.wait)
        together.wait()
    return _pool


def _forget() -> None:
    """Threads do not survive a fork."""
    global _pool, _lock
    _pool, _lock = None, Lock()


os.register_at_fork(after_in_child=_forget)
