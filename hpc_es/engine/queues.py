"""vLLM's processes wait for each other asleep where they wait on the cores that compute.

On a CPU vLLM's engine and its workers talk through shared memory, and whoever waits spins on it for a second: longer
than a step takes, so the engine spins while its worker computes, and takes a third of the CPU time of a node whose
cores are all used. Invariant: no message is slept through.
"""

from functools import partialmethod

SPIN_S = 0.01
"""After a message. Not 0: ZeroMQ can drop a wake-up that follows the one before within 3 ms, and only the spinning
sees that message then. A step takes longer than this, so that nobody spins during one."""


def sleep_while_waiting() -> None:
    """In this process, for queues that are made from now on; beside a GPU, where cores are free, nothing changes."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=SPIN_S)
