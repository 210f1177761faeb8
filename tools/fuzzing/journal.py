"""Damaged journals: the run's segments and those of later evaluations, with and without files that know better."""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from fuzzing import readers
from fuzzing.base import Base
from fuzzing.bytes import appended, cut, flipped, overwritten, zeroed
from fuzzing.child import Case, learn
from hpc_es.paths import RunPaths
from hpc_es.store.frames import Frames

Mutation = Callable[[random.Random, Base, Path], str]
"""Damages a run folder; says what it did."""

HEADER = 8


def case(base: Base, seed: int) -> Case:
    rng = random.Random(f"journal {seed}")
    chosen = (
        *readers.READERS,
        *(readers.report,) * (seed % 50 == 0),
        readers.resume,
        *(readers.run_on,) * (seed % 250 == 7),
    )
    learn(base, *chosen)
    run = base.copy()
    kind = rng.choice(list(MUTATIONS))
    left = _remove_witnesses(rng, run) if kind not in NEED_WITNESSES else "all"
    return Case(kind, f"{MUTATIONS[kind](rng, base, run)}; beside it: {left}", chosen)


def _remove_witnesses(rng: random.Random, run: Path) -> str:
    """What else tells how far the run came may be gone."""
    paths = RunPaths(run)
    if rng.random() < 0.5:
        return "all"
    paths.hdf5.unlink()
    if rng.random() < 0.5:
        return "no run.h5"
    shutil.rmtree(paths.checkpoints)
    shutil.rmtree(paths.evals)
    return "the journal alone"


# --- one file -----------------------------------------------------------------------------------------------------


def _file(rng: random.Random, run: Path) -> Path:
    paths = RunPaths(run)
    files = [path for _, path in paths.segments()]
    return rng.choice([*files, *files, files[-1], *paths.later_evals()])


def _bytes(change: Callable[[random.Random, bytes], bytes]) -> Mutation:
    def mutate(rng: random.Random, base: Base, run: Path) -> str:
        path = _file(rng, run)
        path.write_bytes(change(rng, path.read_bytes()))
        return path.name

    return mutate


# --- whole frames ---------------------------------------------------------------------------------------------------


def _frames(data: bytes) -> list[bytes]:
    frames = Frames(Path("-"), data)
    starts = [offset for offset, _ in frames.payloads()] + [frames.content[0]]
    whole = [data[a:b] for a, b in itertools.pairwise(starts)]
    return [*whole, data[frames.content[0] :]] if frames.closed else whole


def _rearranged(change: Callable[[random.Random, Base, Path, list[bytes]], list[bytes]]) -> Mutation:
    def mutate(rng: random.Random, base: Base, run: Path) -> str:
        path = _file(rng, run)
        data = path.read_bytes()
        path.write_bytes(data[:HEADER] + b"".join(change(rng, base, path, _frames(data))))
        return path.name

    return mutate


def _cut_between(rng: random.Random, base: Base, path: Path, frames: list[bytes]) -> list[bytes]:
    return frames[: rng.randrange(1, len(frames))]


def _without(rng: random.Random, base: Base, path: Path, frames: list[bytes]) -> list[bytes]:
    start = rng.randrange(len(frames))
    return frames[:start] + frames[start + rng.choice((1, 1, 2, 5)) :]


def _doubled(rng: random.Random, base: Base, path: Path, frames: list[bytes]) -> list[bytes]:
    which, where = rng.randrange(len(frames)), rng.randint(0, len(frames))
    return [*frames[:where], frames[which], *frames[where:]]


def _swapped(rng: random.Random, base: Base, path: Path, frames: list[bytes]) -> list[bytes]:
    changed, (a, b) = list(frames), rng.sample(range(len(frames)), 2)
    changed[a], changed[b] = changed[b], changed[a]
    return changed


def _mixed(rng: random.Random, base: Base, path: Path, frames: list[bytes]) -> list[bytes]:
    """A frame of another segment, or of another run, in place of one or between two."""
    strangers = [*base.other.values(), *base.twin.values()]
    own = [p.read_bytes() for p in (base.run / "journal.1.hpcj", base.run / "journal.3.hpcj") if p.name != path.name]
    stranger = rng.choice(_frames(rng.choice([*strangers, *own])))
    where = rng.randint(0, len(frames))
    return [*frames[:where], stranger, *frames[where + rng.randrange(2) :]]


# --- whole segments -------------------------------------------------------------------------------------------------


def _renamed(rng: random.Random, base: Base, run: Path) -> str:
    paths = RunPaths(run)
    _generation, path = rng.choice(paths.segments())
    new = paths.segment(rng.choice([1, 2, 3, 4, 7, 99]))
    path.rename(new)
    return f"{path.name} -> {new.name}"


def _segments_swapped(rng: random.Random, base: Base, run: Path) -> str:
    (_, a), (_, b) = rng.sample(RunPaths(run).segments(), 2)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second), b.write_bytes(first)
    return f"{a.name} <-> {b.name}"


def _segment_removed(rng: random.Random, base: Base, run: Path) -> str:
    segments = RunPaths(run).segments()
    gone = rng.choice([segments, segments[-1:], segments[-2:], [rng.choice(segments)]])
    for _, path in gone:
        path.unlink() if rng.random() < 0.7 else path.write_bytes(b"")
    return ", ".join(path.name for _, path in gone)


def _newest_removed_and_more(rng: random.Random, base: Base, run: Path) -> str:
    """What knows better goes too, all but one."""
    paths = RunPaths(run)
    paths.segment(3).unlink()
    remove = {
        "run.h5": paths.hdf5.unlink,
        "rendezvous.json": paths.rendezvous.unlink,
        "checkpoints": lambda: shutil.rmtree(paths.checkpoint(6)),
        "evals": lambda: shutil.rmtree(paths.evals),
    }
    kept = rng.choice(list(remove))
    for name, action in remove.items():
        if name != kept:
            action()
    return f"only {kept} knows"


def _foreign_segment(rng: random.Random, base: Base, run: Path) -> str:
    paths = RunPaths(run)
    there = rng.choice((1, 2, 3, 4, 5))
    name, segments = rng.choice((("other", base.other), ("twin", base.twin)))
    here = rng.choice(list(segments))
    paths.segment(there).write_bytes(segments[here])
    return f"segment {here} of {name} as {there}"


def _foreign_file(rng: random.Random, base: Base, run: Path) -> str:
    data = rng.choice((b"", b"hi\n", rng.randbytes(3000), bytes(5000), (base.run / "config.yaml").read_bytes()))
    path = RunPaths(run).segment(rng.choice((1, 2, 3, 4, 9)))
    path.write_bytes(data)
    return f"{path.name} with {len(data)} bytes of something else"


def _odd_name(rng: random.Random, base: Base, run: Path) -> str:
    names = ("9" * 20, "9" * 40, "-1", "01", "003", "0", "1e3", "٣", "999999999", "4294967296", "", " 4", "4 ")
    path = run / f"journal.{rng.choice(names)}.hpcj"
    data = rng.choice([(base.run / "journal.3.hpcj").read_bytes(), b"hi", b""])
    if rng.random() < 0.3:
        path.mkdir()
    else:
        path.write_bytes(data)
    return path.name


def _folder_named_like_a_segment(rng: random.Random, base: Base, run: Path) -> str:
    path = RunPaths(run).segment(rng.choice((4, 5, 20)))
    path.mkdir()
    return path.name


MUTATIONS: dict[str, Mutation] = {
    "bits flipped": _bytes(flipped),
    "range zeroed": _bytes(zeroed),
    "bytes overwritten": _bytes(overwritten),
    "cut anywhere": _bytes(cut),
    "bytes appended": _bytes(appended),
    "cut between frames": _rearranged(_cut_between),
    "frames removed": _rearranged(_without),
    "frame repeated": _rearranged(_doubled),
    "frames swapped": _rearranged(_swapped),
    "frame of another segment or run": _rearranged(_mixed),
    "segment renamed": _renamed,
    "segments swapped": _segments_swapped,
    "segments removed or emptied": _segment_removed,
    "newest segment and most witnesses removed": _newest_removed_and_more,
    "segment of another run": _foreign_segment,
    "something else as a segment": _foreign_file,
    "odd name": _odd_name,
    "folder named like a segment": _folder_named_like_a_segment,
}
NEED_WITNESSES = ("segments removed or emptied", "newest segment and most witnesses removed", "segment renamed")
"""Without any file that knows better, a newest segment that is gone as a whole cannot be missed."""
