"""Reading files ends, whatever lies under their names."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fake_run import write_run

import hpc_es.store
from hpc_es.envs.manifest import read_tasks
from hpc_es.errors import HpcEsError
from hpc_es.files import read_bytes, read_json
from hpc_es.transport.rendezvous import read_rendezvous
from hpc_es.worker.seat import _read as read_seat

pytestmark = pytest.mark.timeout(60)

NO_FILE: dict[str, Callable[[Path], None]] = {
    "named pipe": os.mkfifo,
    "device without an end": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}
BOTTOMLESS = b'{"x":' + b"[" * 100_000


class Fields(msgspec.Struct):
    x: int = 0


@pytest.mark.parametrize("kind", NO_FILE)
def test_anything_but_a_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    NO_FILE[kind](tmp_path / "a")
    with pytest.raises(OSError, match=r"is not a file|is a directory|Too many levels"):
        read_bytes(tmp_path / "a")


@pytest.mark.parametrize("text", [b"", b"\xff", b'{"x":"\xff"}', b'{"x":' + b"9" * 6000 + b"}", BOTTOMLESS])
def test_invalid_json_is_one_kind_of_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(msgspec.DecodeError):
        read_json(tmp_path / "a", Fields)


@pytest.mark.parametrize("kind", ["named pipe", "device without an end"])
@pytest.mark.parametrize("name", ["run.h5", "rendezvous.json", "evals/x.hpcj", "journal.2.hpcj"])
def test_readers_of_a_run_folder_skip_or_refuse_anything_but_files(tmp_path: Path, name: str, kind: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    NO_FILE[kind](tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert len(hpc_es.store.read(tmp_path).updates)
        except HpcEsError:
            pytest.fail("the journal is whole")


def test_deeply_nested_json_in_a_run_folder_causes_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(BOTTOMLESS)
    assert read_seat(file) is None
    assert read_rendezvous(file) is None
    with pytest.raises(HpcEsError, match="nested too deeply"):
        read_tasks(file)
