"""vLLM's processes wait for each other asleep where they wait on the cores that compute.

On a CPU vLLM's engine and its workers talk through shared memory, and whoever waits spins on it for a second: longer
than a step takes, so the engine spins while its worker computes, and takes a third of the CPU time of a node whose
cores are all used. Invariant: a message wakes whoever waits for it; should a wake-up get lost, vLLM looks again within
5 s.
"""

from functools import partialmethod

SPIN_S = 0.01
"""After a message. Not 0: ZeroMQ's queue of wake-ups holds one, and a message right behind another may find it full;
only the spinning sees that message then. A step takes longer than this, so that nobody spins during one."""


def sleep_while_waiting() -> None:
    """In this process, for queues that are made from now on; beside a GPU, where cores are free, nothing changes."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=SPIN_S)
