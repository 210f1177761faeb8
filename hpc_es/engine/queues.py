"""Lets vLLM's processes sleep while they wait for each other, if they run on the cores that compute.

On a CPU, vLLM's engine and its workers communicate through shared memory, and a waiting process polls it for a second
without sleeping. That is longer than a step takes, so the engine polls while its worker computes, and uses a third of
the CPU time of a fully used node. Invariant: a message wakes the process that waits for it; if a wake-up is lost, vLLM
looks again within 5 s.
"""

from functools import partialmethod

SPIN_S = 0.01
"""Seconds of polling after a message. Not 0: ZeroMQ's queue of wake-ups holds only one, so a second message right after
the first may not wake anybody, and only polling notices it. A step takes longer, so nobody polls during one."""


def sleep_while_waiting() -> None:
    """Apply to queues that this process makes from now on. With a GPU, where cores are free, nothing changes."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=SPIN_S)
