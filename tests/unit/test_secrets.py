"""The run's keys: made once, private from the first moment, refused when others can read them."""

import threading
from pathlib import Path

import pytest

from hpc_es.errors import TransportError
from hpc_es.paths import RunPaths
from hpc_es.transport.secrets import Secrets, create_secrets, load_secrets


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_keys_are_private_and_differ(paths: RunPaths) -> None:
    keys = create_secrets(paths)
    assert mode(paths.secrets) == 0o700
    assert [mode(file) for file in sorted(paths.secrets.iterdir())] == [0o600, 0o600]
    assert keys.head.secret != keys.workers.secret
    assert load_secrets(paths) == keys


def test_making_them_again_changes_nothing(paths: RunPaths) -> None:
    assert create_secrets(paths) == create_secrets(paths)
    assert [entry.name for entry in paths.root.iterdir()] == ["secrets"]


def test_concurrent_creators_get_the_same_secrets(paths: RunPaths) -> None:
    made: list[Secrets] = []
    makers = [threading.Thread(target=lambda: made.append(create_secrets(paths))) for _ in range(8)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(made) == 8
    assert all(keys == made[0] for keys in made)
    assert [entry.name for entry in paths.root.iterdir()] == ["secrets"]


@pytest.mark.parametrize("bits", [0o040, 0o020, 0o004, 0o002, 0o010])
@pytest.mark.parametrize("name", [".", "head.json", "workers.json"])
def test_secrets_that_others_can_read_are_refused_with_the_remedy(paths: RunPaths, name: str, bits: int) -> None:
    create_secrets(paths)
    path = paths.secrets / name
    wanted = mode(path)
    path.chmod(wanted | bits)
    with pytest.raises(TransportError) as caught:
        load_secrets(paths)
    assert f"mode {wanted | bits:04o}" in str(caught.value)
    assert f"chmod {wanted:o} {path}" in str(caught.value)


def test_the_run_folder_itself_may_be_open(paths: RunPaths) -> None:
    create_secrets(paths)
    paths.root.chmod(0o755)
    load_secrets(paths)


def test_missing_keys_are_named(paths: RunPaths) -> None:
    with pytest.raises(TransportError, match="secrets is missing"):
        load_secrets(paths)
    create_secrets(paths)
    (paths.secrets / "head.json").unlink()
    with pytest.raises(TransportError, match=r"head\.json is missing"):
        load_secrets(paths)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b'{"public": "a", "secret": "b"}', b"\xff\xfe", b'{"public": "", "secret": "\xc3\xa9"}'],
)
def test_garbled_keys_are_refused(paths: RunPaths, content: bytes) -> None:
    create_secrets(paths)
    (paths.secrets / "workers.json").write_bytes(content)
    with pytest.raises(TransportError, match=r"workers\.json contains no CURVE key pair"):
        load_secrets(paths)


def test_a_public_key_that_does_not_belong_to_the_secret_one_is_refused(paths: RunPaths) -> None:
    keys = create_secrets(paths)
    file = paths.secrets / "workers.json"
    file.write_text(file.read_text().replace(keys.workers.public, keys.head.public))
    with pytest.raises(TransportError, match="no CURVE key pair"):
        load_secrets(paths)


def test_a_run_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file is in the way")
    with pytest.raises(TransportError, match="cannot be written"):
        create_secrets(RunPaths(tmp_path / "run"))


def test_secret_keys_stay_out_of_messages_and_logs(paths: RunPaths) -> None:
    keys = create_secrets(paths)
    assert keys.head.secret not in repr(keys)
    assert keys.workers.secret not in repr(keys)
