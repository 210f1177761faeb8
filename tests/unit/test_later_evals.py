"""Evaluations made after a run: their journal grows, breaks and goes on, and the run loses nothing by it."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import h5py
import pytest
from fake_run import NUM_EVAL_TASKS, later_eval, started, write_later, write_run
from hdf5_tables import as_first_release
from msgspec.structs import replace
from repository import SUPPORT

import hpc_es.store
from hpc_es.errors import JournalDamaged, StoreError
from hpc_es.paths import RunPaths
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import file_frames, read_file
from hpc_es.store.later import EvalJournal
from hpc_es.store.protocol import protocol_of
from hpc_es.store.records import AnyRecord

OWN = '{"run":{"name":"a","num_updates":4},"model":{"path":"m"},"task":{"env":"sudoku"}}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    rebuild(tmp_path / "run")
    return tmp_path / "run"


def begin(root: Path, name: str = "later") -> EvalJournal:
    return EvalJournal.open(RunPaths(root), name, started(1, 0))


def version(number: int) -> list[AnyRecord]:
    return later_eval(number, 0.25 * number)[1:]


def later_rewards(root: Path) -> list[float]:
    evals = hpc_es.store.read(root).evals
    return list(evals[evals["source"] == "later"]["reward_mean"])


# --- the journal --------------------------------------------------------------------------------------------------


def test_appended_records_are_visible_at_once_and_an_h5_with_the_first_half_gains_the_second(root: Path) -> None:
    later = begin(root)
    assert later_rewards(root) == []
    later.append(*version(1))
    assert later_rewards(root) == [0.25]
    rebuild(root)  # has one version of the two
    later.append(*version(2))
    run = hpc_es.store.read(root)
    assert later_rewards(root) == [0.25, 0.5]
    for table in (run.evals, run.evaluations, run.episodes):
        rows = table[table["source"] == "later"]
        assert len(rows) == len(rows.drop_duplicates()) == 2
    assert len(run.evals) == 4
    later.close()


def test_a_resumed_evaluation_finds_earlier_records(root: Path) -> None:
    later = begin(root)
    later.append(*version(1))
    later.close()
    again = EvalJournal.open(RunPaths(root), "later", replace(started(1, 0), time=5.0))
    assert again.earlier == (started(1, 0), *version(1))
    again.append(*version(2))
    again.close()
    assert list(read_file(again.path)) == [started(1, 0), *version(1), *version(2)]


@pytest.mark.parametrize("lost", [34, 40, 73])
def test_a_torn_tail_is_left_out_by_readers_and_cut_by_the_next_writer(root: Path, lost: int) -> None:
    later = begin(root)
    later.append(*version(1))
    whole = later.path.stat().st_size
    later.append(*version(2))
    later.close()
    os.truncate(later.path, later.path.stat().st_size - lost)
    with pytest.warns(UserWarning, match="a torn tail"):
        assert later_rewards(root) == [0.25]
    with pytest.warns(UserWarning, match="a torn tail"):
        again = begin(root)
    assert again.path.stat().st_size == whole, "the tail is gone, and no end mark while it is written"
    again.append(*version(3))
    again.close()
    assert later_rewards(root) == [0.25, 0.75]


def test_a_full_disk_loses_only_unrecorded_results(root: Path) -> None:
    script = f"""
        import resource, sys
        sys.path[:0] = {[str(Path(__file__).parent), str(SUPPORT)]!r}
        from pathlib import Path
        from test_later_evals import StoreError, begin, version
        root = Path({str(root)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, resource.RLIM_INFINITY))
        later = begin(root)
        for number in range(1, 100):
            try:
                later.append(*version(number))
            except StoreError as error:
                print(number, error)
                break
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failed, message = done.stdout.split(maxsplit=1)
    assert "cannot write" in message
    recorded = [0.25 * number for number in range(1, int(failed))]
    path = RunPaths(root).later_eval("later")
    frames = file_frames(path)
    list(frames)
    assert frames.torn_bytes == 0
    assert later_rewards(root) == recorded
    again = begin(root)
    again.append(*version(int(failed)))
    again.close()
    assert later_rewards(root) == [*recorded, 0.25 * int(failed)]


def test_a_name_has_one_writer_at_a_time(root: Path) -> None:
    later = begin(root)
    with pytest.raises(StoreError, match="is being written by another process"):
        begin(root)
    begin(root, "other").close()
    later.close()
    begin(root).close()


@pytest.mark.parametrize("place", [3, 30, -40])
def test_a_damaged_one_is_refused_and_hides_nothing_of_the_run(root: Path, place: int) -> None:
    later = begin(root)
    later.append(*version(1))
    later.append(*version(2))
    later.append(*version(3))
    later.close()
    contents = bytearray(later.path.read_bytes())
    contents[len(contents) // 2 if place < 0 else place] ^= 0x10
    later.path.write_bytes(contents)
    with pytest.warns(UserWarning, match=r"later\.hpcj is left out"):
        assert len(hpc_es.store.read(root).evals) == 2
    with pytest.raises((JournalDamaged, StoreError)):
        begin(root)
    assert later.path.read_bytes() == contents


def test_an_h5_of_an_older_hpc_es_is_read_with_its_own_columns(root: Path, tmp_path: Path) -> None:
    write_later(root, "later", later_eval(2, 0.5))
    alone = as_first_release(shutil.move(rebuild(root), tmp_path / "alone.h5"))
    with h5py.File(alone, "r+") as file:
        for column in ("num_repeats", "protocol", "protocol_digest", "other_protocol"):
            del file["evals"][column]
        file.attrs["later_evals"] = json.dumps(["later"])
    os.utime(alone, (0, 0))  # not just being written
    evals = hpc_es.store.read(alone).evals
    assert list(evals["source"]) == ["run", "run", "later"]
    assert evals["num_repeats"].isna().all()
    assert not evals["other_protocol"].any()
    shutil.copy2(alone, root / "run.h5")
    beside_its_journal = hpc_es.store.read(root).evals
    assert list(beside_its_journal["source"]) == ["run", "run", "later"]
    assert list(beside_its_journal["num_repeats"]) == [1, 1, 1]
    with h5py.File(root / "run.h5", "r+") as file:
        del file["evals"]["reward_mean"]
    os.utime(root / "run.h5", (0, 0))
    with pytest.warns(UserWarning, match="damaged"):
        assert list(hpc_es.store.read(root).evals["num_tasks"]) == [NUM_EVAL_TASKS, NUM_EVAL_TASKS, 1]


def test_a_copied_h5_has_the_evaluations_that_it_was_built_with(root: Path, tmp_path: Path) -> None:
    write_later(root, "later", later_eval(2, 0.5))
    shutil.copy(rebuild(root), tmp_path / "alone.h5")
    assert list(hpc_es.store.read(tmp_path / "alone.h5").evals["source"]) == ["run", "run", "later"]


# --- by what was measured -----------------------------------------------------------------------------------------


def with_settings(**sections: object) -> str:
    settings = json.loads(OWN)
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}  # type: ignore[dict-item]
    return json.dumps(settings)


@pytest.mark.parametrize(
    "sections",
    [
        {"task": {"options": {"blanks": 7}}},
        {"eval": {"options": {"blanks": 7}}},
        {"task": {"env": "countdown"}},
        {"task": {"chat": False}},
        {"sampling": {"temperature": 0.7}},
        {"sampling": {"max_tokens": 65}},
        {"engine": {"max_model_len": 4096}},
    ],
)
def test_other_tasks_decoding_or_room_are_another_protocol(sections: dict[str, object]) -> None:
    assert protocol_of(with_settings(**sections)).digest != protocol_of(OWN).digest


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"seed": 3}},
        {"es": {"population": 8}},
        {"task": {"train": {"blanks": 7}, "step_timeout": 1.0}},
        {"eval": {"num_tasks": 5, "repeats": 3, "batch": 2}},
        {"engine": {"threads": 3, "kind": "transformers", "max_concurrent": 3}},
        {"sampling": {"temperature": 0.0}},
    ],
)
def test_how_many_tasks_by_whom_and_how_often_is_not(sections: dict[str, object]) -> None:
    assert protocol_of(with_settings(**sections)) == protocol_of(OWN)


def test_a_protocol_is_named_for_people() -> None:
    other = with_settings(task={"options": {"size": 4}}, eval={"options": {"blanks": 3}}, sampling={"temperature": 0.7})
    assert protocol_of(OWN).label == "sudoku, greedy"
    assert protocol_of(other).label == "sudoku size=4 blanks=3, T=0.7"


def test_evaluations_by_another_protocol_are_distinguished(root: Path) -> None:
    write_later(root, "alike", later_eval(2, 0.5))
    first, *others = later_eval(2, 0.75)
    write_later(root, "other", [replace(first, config_json=with_settings(sampling={"temperature": 1.0})), *others])
    for run in (hpc_es.store.read(root), hpc_es.store.read(rebuild(root))):
        evals = run.evals.drop_duplicates("source").set_index("source")
        assert dict(evals["other_protocol"]) == {"run": False, "alike": False, "other": True}
        assert evals["protocol_digest"]["alike"] == evals["protocol_digest"]["run"]
        assert evals["protocol"]["other"] == "sudoku, T=1"
        assert dict(evals["num_repeats"]) == {"run": 1, "alike": 1, "other": 1}
