"""Where a live model's weights are written from: theta in host memory, streamed through a device, or kept on it.

Invariant: whichever base is in use, the same member gives the same bits, and the shares of the digest over all ranks
sum to that of the arena.
"""

from collections.abc import Sequence
from typing import Protocol

from hpc_es.es.records import Commit, Member
from hpc_es.params.report import UpdateReport


class Base(Protocol):
    """theta of one rank. A base is made for the arena that all ranks of an engine share, and for the runs of live
    memory that its rank's model consists of (regions)."""

    def write(self, member: Member | None) -> int:
        """Write a member, or the centre (None), into live memory. Returns this rank's share of the digest."""

    def apply(self, commits: Sequence[Commit]) -> UpdateReport:
        """Advance this rank's share of theta by consecutive commits; partial sums, as Arena.apply."""

    def reload(self) -> None:
        """The arena was loaded anew."""
