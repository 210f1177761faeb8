"""BufferedPages behaves like a file, except that the disk sees nothing before `commit`."""

import gc
import io
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_disk import small_disk

from hpc_es.store.pages import BufferedPages, DamagedPage, NoChecksums, Pages

places = st.integers(0, 3 * 4096)
steps = st.one_of(
    st.tuples(st.just("write"), places, st.binary(min_size=1, max_size=5000)),
    st.tuples(st.just("truncate"), places, st.just(b"")),
    st.tuples(st.just("commit"), st.just(0), st.just(b"")),
)


@example(b"x" * 9000, [("truncate", 100, b""), ("write", 9500, b"y"), ("commit", 0, b"")])
@example(b"x", [("truncate", 0, b""), ("write", 4096, b"y"), ("commit", 0, b"")])
@given(st.binary(max_size=9000), st.lists(steps, max_size=12))
def test_it_reads_like_a_file_and_the_disk_has_the_last_commit(
    before: bytes, steps: list[tuple[str, int, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        model, committed = io.BytesIO(before), before
        with BufferedPages(path, create=True) as pages:
            pages.write(before)
            pages.commit()
        with BufferedPages(path) as pages:
            for name, place, data in steps:
                if name == "commit":
                    pages.commit()
                    committed = model.getvalue()
                elif name == "truncate":
                    pages.truncate(place)
                    grow_or_cut(model, place)
                else:
                    for file in (pages, model):
                        file.seek(place)
                        file.write(data)
                pages.seek(0)
                assert pages.readall() == model.getvalue()
                assert path.read_bytes().startswith(committed)
                with Pages(path) as proven:
                    assert proven.readall() == committed


def grow_or_cut(model: io.BytesIO, size: int) -> None:
    """os.ftruncate's meaning: unlike BytesIO it also grows."""
    content = model.getvalue()[:size].ljust(size, b"\0")
    model.seek(0)
    model.truncate()
    model.write(content)


def test_a_full_disk_shows_at_commit_only(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk, BufferedPages(disk / "file", create=True) as pages:
        assert pages.write(bytes(2**20)) == 2**20
        with pytest.raises(OSError, match="No space left"):
            pages.commit()


def test_creating_refuses_a_file_that_exists(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        BufferedPages(tmp_path / "file", create=True)


def test_no_byte_that_was_not_written_is_ever_read(tmp_path: Path) -> None:
    """Every kind of damage, on every page and on the checksums themselves: an error, or the bytes that were written."""
    path, rng = tmp_path / "file", random.Random(0)
    content = rng.randbytes(5 * 4096 + 100)
    with BufferedPages(path, create=True) as pages:
        pages.write(content)
        pages.commit()
    whole = path.read_bytes()
    swapped = whole[4096:8192] + whole[:4096] + whole[8192:]
    altered = [swapped, b"", whole + b"\0", *(whole[:length] for length in range(0, len(whole), 500))]
    altered += [
        whole[:at] + bytes(min(4096, len(whole) - at)) + whole[at + 4096 :] for at in range(0, len(whole), 4096)
    ]
    flipped = [*rng.sample(range(len(content)), 50), *range(len(content), len(whole))]
    altered += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in flipped]
    for data in altered:
        path.write_bytes(data)
        for kind in (Pages, BufferedPages):
            with pytest.raises((DamagedPage, NoChecksums)):
                read_whole(kind, path)


def read_whole(kind: type[Pages], path: Path) -> bytes:
    with kind(path) as pages:
        return pages.readall()


def test_a_file_that_is_refused_is_closed_once(tmp_path: Path) -> None:
    """Closing twice would close whatever file has taken the number in between."""
    (tmp_path / "file").write_bytes(b"something else")
    for kind in (Pages, BufferedPages):
        with pytest.raises(NoChecksums):
            kind(tmp_path / "file")
        with (tmp_path / "other").open("wb") as other:
            gc.collect()
            other.write(b"x")
