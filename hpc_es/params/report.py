"""What applying commits to an arena left behind, and how the reports of several ranks become one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateReport:
    """What `apply` left behind, per version; partial sums where only one rank's slice was updated."""

    digests: tuple[int, ...]
    """At least one: without commits, the digest as it is."""
    squares: tuple[float, ...]
    """Sum of squares of theta_v - theta_{v-1}."""
    seconds: float

    @property
    def digest(self) -> int:
        """Digest after the last commit."""
        return self.digests[-1]

    @property
    def update_norms(self) -> tuple[float, ...]:
        """Euclidean norm of each version's change."""
        return tuple(map(math.sqrt, self.squares))

    @property
    def update_norm(self) -> float:
        """Norm of the last commit's change; 0 without commits."""
        return self.update_norms[-1] if self.squares else 0.0


def combine(reports: Sequence[UpdateReport]) -> UpdateReport:
    """One report from those of all ranks."""
    return UpdateReport(
        tuple(sum(parts) % 2**64 for parts in zip(*(report.digests for report in reports), strict=True)),
        tuple(sum(parts) for parts in zip(*(report.squares for report in reports), strict=True)),
        max(report.seconds for report in reports),
    )
