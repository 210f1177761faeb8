"""Streams that run work in any order which lane order and declared events allow, and a worse one where asked to.

What a pipeline forgets to wait for, it gets wrong in one of these orders.
"""

import random
from collections.abc import Callable, Sequence
from itertools import permutations

from hpc_es.params.streams import LANES, Event, Lane

Choose = Callable[[list[Lane]], Lane]
"""Chooses the lane that runs next, among those that can."""
Wait = tuple[Lane, Lane]
"""The first lane waits for work of the second."""


class Work:
    """A piece of work, and the event that marks its end."""

    def __init__(self, lane: Lane, run: Callable[[], object], after: Sequence["Work"]) -> None:
        self.lane, self.run, self.after, self.done = lane, run, after, False


class Adversary:
    """Nothing runs before the pass ends. `forget`: a kind of wait that is left out."""

    def __init__(self, choose: Choose, forget: Wait | None = None) -> None:
        self.choose, self.forget = choose, forget
        self.waits = set[Wait]()
        """The declared kinds of waits."""

    def submit(self, lane: Lane, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        self.waits |= {(lane, event.lane) for event in after}
        kept = [event for event in after if (lane, event.lane) != self.forget]
        self._queues[lane].append(Work(lane, work, kept))
        return self._queues[lane][-1]

    def __enter__(self) -> "Adversary":
        self._queues: dict[Lane, list[Work]] = {lane: [] for lane in LANES}
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        while kind is None and any(self._queues.values()):
            ready = [lane for lane, queue in self._queues.items() if queue and all(w.done for w in queue[0].after)]
            work = self._queues[self.choose(ready)].pop(0)
            work.run()
            work.done = True


def eager(*order: Lane) -> Choose:
    """The first lane runs whenever it can, otherwise the second."""
    return lambda ready: min(ready, key=order.index)


def by_chance(seed: int) -> Choose:
    return random.Random(seed).choice


ORDERS = [*(eager(*order) for order in permutations(LANES)), *map(by_chance, range(4))]
