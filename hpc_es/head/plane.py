"""What the core decides about the collective plane: how a commit is announced, who forms an epoch, who is sent theta.

Pure, like the core. Invariants: at most one epoch change per commit, joins and losses batched; a commit is announced
to every worker, with the record to those who are in no epoch, which is everybody where a Gloo group would be too large;
one transfer at a time, of theta as the arena has it when
its thread comes to it, and only to workers that hold nothing and have missed more than they would soon catch up with.
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
"""NCCL groups in a row that did not come up, before Gloo takes over."""
MAX_COMMITS_WITHOUT_TRY = 63
"""Most commits that go over the control plane before a Gloo group is tried again. After each failure in a row they are
about twice as many: a mesh that a firewall prevents costs every worker transport.collective_timeout at each try."""
SOON_APPLIED = 2
"""Missed commits that are no reason to move theta: every worker spends as long at a commit anyway, and the head's arena
need not stand still. So those who wait while the head restarts go on as they are."""


@dataclass
class Epoch:
    """A process group: the head is rank 0, `workers` follow in order."""

    number: int
    workers: tuple[str, ...]
    backend: Backend
    up: bool = False


class Plane:
    """The present epoch and transfer. Its methods return what is to be done."""

    def __init__(
        self, config: TransportConfig, crew: Crew, offer: Offer, note: Callable[[str, str, str], None]
    ) -> None:
        """`offer`: what the head brings along. `note` leaves an event: level, what, detail."""
        self.config, self.crew, self.offer, self._note = config, crew, offer, note
        self.epoch: Epoch | None = None
        self.transfer: Transfer | None = None
        self._num_epochs = self._num_transfers = 0
        self._nccl_failures = 0
        self._gloo_failures = 0
        self._commits_to_wait = 0
        self._told = ""
        self._exceeds_gloo = False

    def start(self) -> None:
        """An event says where the head has no way to send theta, though it is asked to."""
        if self.config.join == "broadcast" and self.offer.backend == "none":
            why = "transport.backend=none" if self.config.backend == "none" else "the head has no torch.distributed"
            what = f"theta cannot be sent (transport.join=broadcast, and {why})"
            self._note("warning", what, "who joins goes by checkpoint and journal")

    # --- commit records --------------------------------------------------------------------------------------

    def announce(self, commit: Commit) -> list[Instruction]:
        """To every worker; members of the epoch get the record by broadcast."""
        data = messages.encode_commit(commit)
        sha256 = hashlib.sha256(data).digest()
        epoch = self._usable_epoch()
        with_record = messages.Announce(commit.version, 0, len(data), sha256, data)
        announced = messages.Announce(commit.version, epoch.number if epoch else 0, len(data), sha256, None)
        members = set(epoch.workers) if epoch else set()
        told: list[Instruction] = [
            Send(name, announced if name in members else with_record) for name in self.crew.workers
        ]
        return told if epoch is None else [*told, Broadcast(epoch.number, data)]

    def change_epoch(self) -> list[Instruction]:
        """A new process group when the membership has changed; to be called once per commit."""
        members = self._able_to_meet()
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
        """Whether a worker was called to an epoch that is not over."""
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
        """The epoch if its group is up and all its members are still connected; else it is over."""
        epoch = self.epoch
        if epoch is None or not epoch.up:
            return None
        if not all(name in self.crew.workers for name in epoch.workers):
            self.epoch = None
            return None
        return epoch

    def _able_to_meet(self) -> list[Worker]:
        """Workers that can join a process group, in a fixed order."""
        able = (worker for worker in self.crew.workers.values() if worker.offer.backend != "none")
        return sorted(able, key=lambda worker: worker.name)

    def _too_many_for_gloo(self, num_members: int, backend: Backend) -> bool:
        """Whether commits go over the control plane for the number of workers; an event says when that changes."""
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
        """Backend of a group of the head and these workers. If NCCL cannot be used, an event says why, once."""
        choice = choose_backend(self.config.backend, [self.offer, *(worker.offer for worker in members)])
        backend, why = choice.backend, choice.why
        if backend == "nccl" and self._nccl_failures >= NCCL_TRIES:
            backend, why = "gloo", f"{self._nccl_failures} groups in a row did not come up with NCCL"
        if why and why != self._told:
            self._told = why
            self._note("warning", "the collective plane uses Gloo instead of NCCL", why)
        return backend

    # --- theta for those who join ----------------------------------------------------------------------------

    def welcome(self, worker: Worker, hello: messages.Hello, version: int) -> None:
        """Note that a worker is to be sent theta_version or later, and gets no work until then."""
        able = self.config.join == "broadcast" and "none" not in (self.offer.backend, worker.offer.backend)
        pays = version - hello.version > SOON_APPLIED
        if able and pays and worker.state == "ready" and hello.holding is None:
            self.crew.mark(worker, "joining")

    def open_transfer(self, version: int, digest: int) -> list[Instruction]:
        """To all who wait, once the transfer before it has ended. The arena is at `version` when it comes to this."""
        waiting = [worker for worker in self._able_to_meet() if worker.state == "joining"]
        if not waiting or self.transfer is not None:
            return []
        backend = self._choose(waiting)
        if backend == "gloo":  # the others have the next transfer
            waiting = waiting[: self.config.gloo_max_workers]
        self._num_transfers += 1
        names = tuple(worker.name for worker in waiting)
        self.transfer = Transfer(self._num_transfers, names, backend, version, digest)
        return [self.transfer]

    def call(self, calls: dict[str, messages.OpenTransfer]) -> list[Instruction]:
        """The arena's thread is ready for the transfer; nobody was told before, or they would wait for an update."""
        return [Send(name, call) for name, call in calls.items() if name in self.crew.workers]

    def end_transfer(self, workers: tuple[str, ...], num_bytes: int, seconds: float, error: str) -> None:
        """The head's part is over, also for those who took no part: they go by checkpoint and journal."""
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
            self._note("warning", f"{', '.join(missing)} did not come to the transfer of theta_{transfer.version}", "")
