"""Decisions of the core on the collective plane: how commits are announced, who is in an epoch, who receives theta.

Pure, like the core. Invariants:
- at most one epoch change per commit, which includes all joins and losses since the last one;
- a commit is announced to every worker; workers outside of an epoch get the commit record in the announcement (all
  workers, if a Gloo group would be too large);
- one transfer of theta at a time, only to workers that hold no evaluation and have missed more than SOON_APPLIED
  commits. It sends the version that the arena has when its thread starts the transfer.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from hpc_es.config.schema import TransportConfig
from hpc_es.head.crew import Crew, Worker
from hpc_es.head.instructions import Broadcast, Instruction, OpenGroup, Send, Transfer
from hpc_es.records import Commit
from hpc_es.transport import messages
from hpc_es.transport.backends import Backend, Offer, choose_backend

NCCL_TRIES = 2
"""How many NCCL groups in a row may fail to form before Gloo is used."""
MAX_COMMITS_WITHOUT_TRY = 63
"""Largest number of commits that are sent over the control plane before a Gloo group is tried again. The number about
doubles with every failure in a row: if a firewall prevents the mesh, every try costs each worker
transport.collective_timeout."""
SOON_APPLIED = 2
"""A worker that has missed at most this many commits applies them itself. This takes about as long as a transfer costs
all others, since the head's arena cannot change during one. So workers that waited for a restart of the head need no
transfer."""


@dataclass
class Epoch:
    """A process group: the head is rank 0, `workers` follow in order."""

    number: int
    workers: tuple[str, ...]
    backend: Backend
    up: bool = False


class Plane:
    """The current epoch and transfer. Its methods return instructions."""

    def __init__(
        self, config: TransportConfig, crew: Crew, offer: Offer, note: Callable[[str, str, str], None]
    ) -> None:
        """offer: the backend that the head supports. note: records an event; takes level, what, detail."""
        self.config, self.crew, self.offer, self._note = config, crew, offer, note
        self.epoch: Epoch | None = None
        self.transfer: Transfer | None = None
        self._num_epochs = self._num_transfers = 0
        self._nccl_failures = 0
        self._gloo_failures = 0
        self._commits_to_wait = 0
        self._noted_reason = ""
        """Why Gloo is used instead of NCCL, as last recorded."""
        self._exceeds_gloo = False

    def start(self) -> None:
        """Record a warning if the configuration asks for transfers of theta and the head cannot send it."""
        if self.config.join == "broadcast" and self.offer.backend == "none":
            why = "transport.backend=none" if self.config.backend == "none" else "the head has no torch.distributed"
            what = f"theta cannot be sent (transport.join=broadcast, and {why})"
            self._note("warning", what, "joining workers load a checkpoint and apply the commits after it")

    # --- commit records --------------------------------------------------------------------------------------

    def announce(self, commit: Commit) -> list[Instruction]:
        """Announce a commit to every worker; members of the epoch get the record by broadcast."""
        data = messages.encode_commit(commit)
        sha256 = hashlib.sha256(data).digest()
        epoch = self._usable_epoch()
        with_record = messages.Announce(commit.version, 0, len(data), sha256, data)
        announced = messages.Announce(commit.version, epoch.number if epoch else 0, len(data), sha256, None)
        members = set(epoch.workers) if epoch else set()
        announcements: list[Instruction] = [
            Send(name, announced if name in members else with_record) for name in self.crew.workers
        ]
        return announcements if epoch is None else [*announcements, Broadcast(epoch.number, data)]

    def change_epoch(self) -> list[Instruction]:
        """Open a new process group if the membership has changed; called once per commit."""
        members = self._able_to_join()
        names = tuple(worker.name for worker in members)
        if not members or (self.epoch is not None and self.epoch.workers == names):
            return []
        if self._commits_to_wait > 0:
            self._commits_to_wait -= 1
            return []
        backend = self._choose(members)
        if backend == "none" or self._too_many_for_gloo(len(members), backend):
            self.epoch = None
            return []
        self._num_epochs += 1
        self.epoch = Epoch(self._num_epochs, names, backend)
        return [OpenGroup(self.epoch.number, names, backend)]

    def group_up(self, number: int) -> None:
        if self.epoch is not None and self.epoch.number == number:
            self.epoch.up = True
            self._nccl_failures = self._gloo_failures = 0

    def has_member(self, number: int, worker: str) -> bool:
        """Whether a worker is a member of an epoch that has not ended."""
        return self.epoch is not None and self.epoch.number == number and worker in self.epoch.workers

    def end_epoch(self, number: int, detail: str) -> None:
        if self.epoch is None or self.epoch.number != number:
            return
        if not self.epoch.up and self.epoch.backend == "nccl":
            self._nccl_failures += 1
        elif not self.epoch.up:
            self._gloo_failures += 1
            self._commits_to_wait = min(2**self._gloo_failures - 1, MAX_COMMITS_WITHOUT_TRY)
        self.epoch = None
        self._note("warning", f"epoch {number} of the collective plane ended", detail)

    def _usable_epoch(self) -> Epoch | None:
        """The epoch if its group is up and all its members are connected. The loss of a member ends it."""
        epoch = self.epoch
        if epoch is None or not epoch.up:
            return None
        if not all(name in self.crew.workers for name in epoch.workers):
            self.epoch = None
            return None
        return epoch

    def _able_to_join(self) -> list[Worker]:
        """Workers that can join a process group, in a fixed order."""
        able = (worker for worker in self.crew.workers.values() if worker.offer.backend != "none")
        return sorted(able, key=lambda worker: worker.name)

    def _too_many_for_gloo(self, num_members: int, backend: Backend) -> bool:
        """Whether commits go over the control plane because of the number of workers; records every change of this."""
        most = self.config.gloo_max_workers
        exceeds_gloo = backend == "gloo" and num_members > most
        if exceeds_gloo and not self._exceeds_gloo:
            what = f"commits go over the control plane: {num_members} workers are too many for a Gloo group"
            self._note("info", what, f"transport.gloo_max_workers={most}")
        elif self._exceeds_gloo and not exceeds_gloo:
            self._note("info", f"commits go by broadcast again: {num_members} workers are few enough for a group", "")
        self._exceeds_gloo = exceeds_gloo
        return exceeds_gloo

    def _choose(self, members: list[Worker]) -> Backend:
        """Backend of a group of the head and these workers; records, once, why NCCL is not used."""
        choice = choose_backend(self.config.backend, [self.offer, *(worker.offer for worker in members)])
        backend, why = choice.backend, choice.why
        if backend == "nccl" and self._nccl_failures >= NCCL_TRIES:
            backend, why = "gloo", f"{self._nccl_failures} NCCL groups in a row could not be formed"
        if why and why != self._noted_reason:
            self._noted_reason = why
            self._note("warning", "the collective plane uses Gloo instead of NCCL", why)
        return backend

    # --- theta for joining workers ---------------------------------------------------------------------------

    def welcome(self, worker: Worker, hello: messages.Hello, version: int) -> None:
        """Mark a worker as joining if a transfer to it is possible and worthwhile; until then it gets no work."""
        is_possible = self.config.join == "broadcast" and "none" not in (self.offer.backend, worker.offer.backend)
        is_worthwhile = version - hello.version > SOON_APPLIED
        if is_possible and is_worthwhile and worker.state == "ready" and hello.holding is None:
            self.crew.mark(worker, "joining")

    def open_transfer(self, version: int, digest: int) -> list[Instruction]:
        """Start a transfer to all joining workers, unless one is running.

        `version` is the one that the arena has when its thread starts the transfer.
        """
        waiting = [worker for worker in self._able_to_join() if worker.state == "joining"]
        if not waiting or self.transfer is not None:
            return []
        backend = self._choose(waiting)
        if backend == "gloo":  # the others get the next transfer
            waiting = waiting[: self.config.gloo_max_workers]
        self._num_transfers += 1
        names = tuple(worker.name for worker in waiting)
        self.transfer = Transfer(self._num_transfers, names, backend, version, digest)
        return [self.transfer]

    def call(self, calls: dict[str, messages.OpenTransfer]) -> list[Instruction]:
        """Invite the workers, now that the arena's thread is ready. Earlier they would have to wait for an update."""
        return [Send(name, call) for name, call in calls.items() if name in self.crew.workers]

    def end_transfer(self, workers: tuple[str, ...], num_bytes: int, seconds: float, error: str) -> None:
        """Note that the head has finished the transfer. Workers that missed it load a checkpoint and apply commits."""
        transfer, self.transfer = self.transfer, None
        if transfer is None:
            return
        for name in transfer.workers:
            if (worker := self.crew.workers.get(name)) is not None and worker.state == "joining":
                self.crew.mark(worker, "ready")
        what = f"theta_{transfer.version} to {', '.join(workers or transfer.workers)}"
        if error:
            self._note("warning", f"the transfer of {what} failed", error)
            return
        rate = num_bytes / max(seconds, 1e-9) / 1e6
        self._note("info", f"sent {what}", f"{num_bytes:,} bytes in {seconds:.2f} s, {rate:,.0f} MB/s")
        if missing := [name for name in transfer.workers if name not in workers]:
            self._note("warning", f"{', '.join(missing)} did not join the transfer of theta_{transfer.version}", "")
