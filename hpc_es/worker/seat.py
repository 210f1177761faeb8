"""State of the worker in each seat, RUN/seats/<seat>.json, for `hpc-es status` and the launcher.

The head knows only workers that have joined; a model takes minutes to load, and may not load at all. Invariant: no
information of the run is lost with these files, and a worker never fails because one cannot be written.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hpc_es.errors import HpcEsError
from hpc_es.files import read_json
from hpc_es.paths import RunPaths
from hpc_es.quoting import quote_error
from hpc_es.transport.messages import SeatStatus, Status

log = logging.getLogger(__name__)

State = Literal["starting", "working", "ended", "failed", "died"]
"""failed: it ended with an error of its own. died: it did not decide to end."""
MAX_DETAIL = 2000
CLOCKS_DIFFER_S = 60.0
"""Most seconds by which the clocks of two nodes are assumed to differ."""


class Seat(msgspec.Struct, frozen=True):
    """Contents of the file of one seat."""

    seat: str
    pid: int
    host: str
    since: float
    """Start of this state, in seconds since the epoch."""
    state: State = "starting"
    detail: str = ""
    """Why it ended, failed or died."""
    worker: str = ""
    """Name of the worker in the run; empty until it has joined."""
    before: str = ""
    """How the previous process in this seat failed or died."""


@contextlib.contextmanager
def occupied(paths: RunPaths, seat: str) -> Iterator[None]:
    """Context of a worker's whole life in this process; records how it ends."""
    begin(paths, seat)
    try:
        yield
    except BaseException as error:
        code = getattr(error, "exit_code", getattr(error, "code", None))  # of typer.Exit, of SystemExit
        if isinstance(error, HpcEsError):
            note(paths, seat, "failed", str(error))
        elif code is not None:
            note(paths, seat, "ended", f"with code {code}")
        else:
            note(paths, seat, "failed", quote_error(error))
        raise


def begin(paths: RunPaths, seat: str) -> Seat:
    """Record that a worker starts in this process."""
    earlier = read(paths, seat)
    before = ""
    if earlier is not None:
        before = earlier.detail if earlier.state in ("failed", "died") else earlier.before
    return _write(paths, Seat(seat, os.getpid(), socket.gethostname(), time.time(), before=before))


def note(paths: RunPaths, seat: str, state: State, detail: str = "", worker: str | None = None) -> Seat | None:
    """Record a new state of the worker in this seat. None if the seat has no file."""
    now = read(paths, seat)
    if now is None:
        return None
    name = now.worker if worker is None else worker
    changed = msgspec.structs.replace(now, state=state, since=time.time(), detail=detail[:MAX_DETAIL], worker=name)
    return _write(paths, changed)


def read(paths: RunPaths, seat: str) -> Seat | None:
    """State of one seat; None if there is no file, or it cannot be read."""
    return _read(paths.seat(seat))


def read_all(paths: RunPaths) -> list[Seat]:
    """States of all seats whose files can be read, sorted by name."""
    found = (_read(path) for path in sorted(paths.seats.glob("[!.]*.json")))
    return [seat for seat in found if seat is not None]


def with_absent(status: Status, paths: RunPaths) -> Status:
    """Add the workers that are not connected to a status: those since this head began or, if no head answers, those
    that failed or died last."""
    now = time.time()
    connected = {worker.seat for worker in status.workers}
    oldest = now - status.seconds_elapsed - CLOCKS_DIFFER_S if status.seconds_elapsed else 0.0
    absent = [seat for seat in read_all(paths) if seat.seat not in connected and seat.since >= oldest]
    shown = ("starting", "working", "failed", "died") if status.seconds_elapsed else ("failed", "died")
    return msgspec.structs.replace(
        status,
        absent=tuple(
            SeatStatus(
                seat.seat,
                "lost" if seat.state == "working" else seat.state,
                max(now - seat.since, 0.0),
                seat.detail or (seat.before and f"before: {seat.before}"),
            )
            for seat in absent
            if seat.state in shown
        ),
    )


def _read(file: Path) -> Seat | None:
    try:
        return read_json(file, Seat)
    except (OSError, msgspec.DecodeError):
        return None


def _write(paths: RunPaths, seat: Seat) -> Seat:
    file = paths.seat(seat.seat)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        paths.seats.mkdir(exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(seat))
        unfinished.replace(file)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)
    return seat
