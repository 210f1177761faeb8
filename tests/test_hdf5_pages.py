"""BufferedPages behaves like a file, except that the disk sees nothing before `commit`."""

import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_disk import small_disk

from hpc_es.store.pages import BufferedPages

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
        path.write_bytes(before)
        model, committed = io.BytesIO(before), before
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
                assert path.read_bytes() == committed


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
