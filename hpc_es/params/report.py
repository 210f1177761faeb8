"""The report of applying commits to an arena, and how reports of several ranks are combined."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateReport:
    """Result of `apply`, per version; partial sums if only one rank's slice was updated."""

    digests: tuple[int, ...]
    """Digest of each version; without commits, only the current digest."""
    squares: tuple[float, ...]
    """Sum of squares of theta_v - theta_{v-1}, per version."""
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
    """Combine the reports of all ranks into one."""
    return UpdateReport(
        tuple(sum(parts) % 2**64 for parts in zip(*(report.digests for report in reports), strict=True)),
        tuple(sum(parts) for parts in zip(*(report.squares for report in reports), strict=True)),
        max(report.seconds for report in reports),
    )
