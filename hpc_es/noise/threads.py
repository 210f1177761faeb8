"""One thread pool for kernels that release the GIL.

numba's own threads are not used, because its default threading layer aborts on two concurrent parallel calls.
Invariant: `start` starts all threads at once, so they keep the CPU affinity of that moment even if an inference engine
narrows the affinity of the process later.
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
    """Start the pool with `num_threads` threads and return their number.

    By default an existing pool is kept, and a new one gets one thread per CPU of this process.
    """
    with _lock:
        _running(num_threads)
        return _num_threads


def run(work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call work(item) for every item, spread over the pool; return when all are done, or raise the first error."""
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
    """The pool, replaced if the size changes. The caller holds the lock."""
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
    """Drop the pool in a forked child, because threads do not survive a fork."""
    global _pool, _lock
    _pool, _lock = None, Lock()


os.register_at_fork(after_in_child=_forget)
