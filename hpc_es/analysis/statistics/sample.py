"""Replays theta at every version on a random sample of parameters, from base model and journal alone.

The noise of an element depends only on its address, so a few thousand elements can be replayed without the rest, with
the same kernels. Invariant: replayed elements equal theta bit for bit; only the step from the sample to all parameters
is an estimate, and every estimate comes with its standard error.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_es.config.load import from_record
from hpc_es.errors import ConfigError, ModelError, NothingToShow
from hpc_es.records import Commit
from hpc_es.store import Run

if TYPE_CHECKING:
    import numpy as np

    from hpc_es.noise import Matrix, State
    from hpc_es.params.layout import Slot
    from hpc_es.params.weights import Stored

    Floats = np.ndarray[Any, np.dtype[np.float64]]

PIECE = 1024
"""Number of consecutive elements in a piece. Neighbours have noise as independent as any other elements."""
NUM_PIECES = 128
_MAX_ERRORS = 8.0
"""Largest deviation from a recorded update norm, in standard errors, before the base model counts as another one."""


@dataclass(frozen=True)
class Sample:
    """Estimates of norms and distances over all trained parameters at V updates, from a sample."""

    num_parameters: int
    """Number of trained parameters, d."""
    num_sampled: int
    commits: tuple[Commit, ...]
    norms: "Floats"
    """[V] |theta_u - theta_{u-1}|."""
    norm_errors: "Floats"
    """[V] Standard errors of `norms`."""
    distances: "Floats"
    """[V] |theta_u - theta_0|."""
    distance_errors: "Floats"
    changes: "Floats"
    """[num_sampled] theta_V - theta_0."""


@lru_cache(maxsize=8)
def sample(run: Run, model: Path | None = None, num_pieces: int = NUM_PIECES) -> Sample:
    """Replay a run on up to `num_pieces` pieces of 1,024 parameters, drawn with a fixed seed.

    `model` is the path of the base model if it has moved. The result is cached, since several figures need it.
    Errors: NothingToShow without journal, commits or base model, or if that is not the model of this run.
    """
    import numpy as np

    from hpc_es.store.history import History

    if run.folder is None:
        raise NothingToShow("the commits are in the journal, which is not in the folder of this run.h5")
    commits = tuple(History.read(run.folder).commits.values())
    if not commits:
        raise NothingToShow("no update has been committed yet")
    slots = _trained_slots(run, model)
    pieces = list(_draw(slots, num_pieces))
    start = np.concatenate([piece.theta for piece in pieces]).astype(np.float64)
    size, before = sum(slot.stored.size for slot in slots), start
    norms, distances = [], []
    for commit in commits:
        _advance(pieces, commit)
        now = np.concatenate([piece.theta for piece in pieces]).astype(np.float64)
        norms.append(estimate_norm(now - before, size))
        distances.append(estimate_norm(now - start, size))
        before = now
    (norm, norm_error), (distance, distance_error) = np.array(norms).T, np.array(distances).T
    _check_base(run, norm, norm_error)
    return Sample(size, start.size, commits, norm, norm_error, distance, distance_error, before - start)


def estimate_norm(values: "Floats", size: int) -> tuple[float, float]:
    """Estimate the Euclidean norm of `size` elements from a random sample, and its standard error.

    Uses the delta method with the finite-population correction.
    """
    squares = values**2
    mean = float(squares.mean())
    if mean == 0:
        return 0.0, 0.0
    error = float(squares.std()) / math.sqrt(values.size) * math.sqrt(max(1 - values.size / size, 0.0))
    return math.sqrt(size * mean), math.sqrt(size) * error / (2 * math.sqrt(mean))


# --- pieces ------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Consecutive elements of one tensor, with their optimiser state."""

    ident: int
    start: int
    theta: "np.ndarray[Any, Any]"
    state: "list[State]"
    matrix: "Matrix | None"


def _trained_slots(run: Run, model: Path | None) -> "list[Slot]":
    from hpc_es.params.layout import lay_out

    try:
        config = from_record(str(run.attrs["config"]))
        slots = lay_out(
            model or config.model.path, config.model.include, config.model.exclude, config.es.optimiser.kind
        )
    except ConfigError as error:
        raise NothingToShow(str(error)) from error
    except ModelError as error:
        raise NothingToShow(f"the base model cannot be read ({error}); give its path with --model") from error
    return [slot for slot in slots if slot.trained and slot.stored.size]


def _draw(slots: "Sequence[Slot]", num_pieces: int) -> Iterator[_Piece]:
    """Draw pieces uniformly without replacement."""
    import numpy as np

    from hpc_es.noise import State

    ends = np.cumsum([-(-slot.stored.size // PIECE) for slot in slots])
    total = int(ends[-1])
    for number in sorted(random.Random(0).sample(range(total), min(num_pieces, total))):
        index = int(np.searchsorted(ends, number, side="right"))
        slot = slots[index]
        start = PIECE * (number - (int(ends[index - 1]) if index else 0))
        theta = np.empty(min(PIECE, slot.stored.size - start), np.float32)
        _part(slot.stored, start, theta.size).read_into(theta)
        state = [State(np.zeros_like(theta), kept.ident) for kept in slot.state]
        yield _Piece(slot.ident, start, theta, state, slot.matrix)


def _part(stored: "Stored", start: int, count: int) -> "Stored":
    """Describe a slice of a stored tensor as a stored tensor."""
    from hpc_es.params.weights import FLOATS

    return replace(stored, shape=(count,), offset=stored.offset + start * FLOATS[stored.dtype].itemsize)


def _advance(pieces: list[_Piece], commit: Commit) -> None:
    """Update all pieces in place from theta_{u-1} to theta_u."""
    from hpc_es.noise import kernels
    from hpc_es.params.arena import update_of

    update = update_of(commit)
    for piece in pieces:
        kernels().update(piece.theta, piece.ident, [update], start=piece.start, state=piece.state, matrix=piece.matrix)


def _check_base(run: Run, norms: "Floats", errors: "Floats") -> None:
    """Check that the sample agrees with the norms that the head recorded. Errors: NothingToShow."""
    import numpy as np

    recorded = run.updates.sort_values("version")["update_norm"].to_numpy(float)[: len(norms)]
    off = np.abs(recorded - norms[: len(recorded)]) > _MAX_ERRORS * errors[: len(recorded)] + 1e-6 * recorded
    if off.any():
        update = int(np.argmax(off))
        raise NothingToShow(
            f"the norm of update {update + 1} is {norms[update]:.4g} on this base model, but the run recorded "
            f"{recorded[update]:.4g}: it began from another model; give the path of that one with --model"
        )
