"""run.h5 and its reader: the tables are those of the journal."""

import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import pandas as pd
import pytest
from builders import counted
from fake_run import BASE_DIGEST, NUM_EVAL_TASKS, fake_records, later_eval, started, write_later, write_run
from hdf5_tables import assert_same, from_journal, tables
from msgspec import structs

import hpc_es.store
from hpc_es.errors import ConfigError, JournalDamaged, StoreError
from hpc_es.paths import RunPaths
from hpc_es.store import hdf5
from hpc_es.store.hdf5 import Hdf5Writer, rebuild
from hpc_es.store.journal import JournalWriter, read_journal
from hpc_es.store.projection import Projection
from hpc_es.store.records import Committed, Joined, Leased, Left, Noted, Started
from hpc_es.store.rows import Changes, storable
from hpc_es.store.schema import TABLES

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


# --- what stands in the tables ----------------------------------------------------------------------------------


def test_every_column_has_its_unit_and_meaning_in_the_file(root: Path) -> None:
    rebuild(root)
    with h5py.File(root / "run.h5", "r", locking=False) as file:
        assert set(file) == set(TABLES)
        for table, columns in TABLES.items():
            assert set(file[table]) == {column.name for column in columns}
            for column in columns:
                attrs = file[table][column.name].attrs
                assert isinstance(attrs["unit"], str)
                assert len(attrs["meaning"]) > 3
                assert ("null" in attrs) == (column.null is not None)
                if column.dtype == "float64":
                    assert attrs["unit"] or column.name == "utility", f"{table}.{column.name}"
        assert file.attrs["base_digest"] == BASE_DIGEST
        assert {"schema_version", "config", "versions", "run_id", "generation"} <= set(file.attrs)


def test_the_columns_that_the_design_names_are_there(root: Path) -> None:
    evaluations = hpc_es.store.read(rebuild(root)).evaluations
    expected = (
        "dispatch_version consumed_version lag status seed sign sigma subspace fitness utility coefficient tokens_in "
        "tokens_out turns time_planned time_leased time_started time_finished time_received worker host slurm_job "
        "array_task attempt"
    )
    assert set(expected.split()) <= set(evaluations.columns)


def test_staleness_can_be_recomputed_for_every_accepted_evaluation(root: Path) -> None:
    rebuild(root)
    run = hpc_es.store.read(root)
    accepted = run.evaluations[(run.evaluations["status"] == "accepted") & (run.evaluations["kind"] == "train")]
    assert (accepted["lag"] == accepted["consumed_version"] - accepted["dispatch_version"]).all()
    assert set(accepted["lag"]) == {0, 1}
    lag_of = {
        member.eval_id: record.commit.version - 1 - member.eval_id.version
        for record in read_journal(root)
        if isinstance(record, Committed)
        for member in counted(record.commit)
    }
    assert len(accepted) == len(lag_of)
    for _, row in accepted.iterrows():
        assert row["lag"] == next(
            lag for key, lag in lag_of.items() if key.version == row["dispatch_version"] and key.slot == row["slot"]
        )
    by_update = accepted.groupby("consumed_version")["lag"]
    assert list(by_update.max()) == list(run.updates["lag_max"])
    assert list(by_update.mean()) == list(run.updates["lag_mean"])


def test_unknown_values_are_null(root: Path) -> None:
    evaluations = hpc_es.store.read(rebuild(root)).evaluations
    centre = evaluations[evaluations["kind"] == "eval"]
    assert len(centre) == 4
    for column in ("seed", "subspace", "lag", "consumed_version", "planned_update", "sigma", "utility"):
        assert centre[column].isna().all(), column
    void = evaluations[evaluations["status"] == "void"].iloc[0]
    assert void["error"] == "engine fault"
    assert pd.isna(void["lag"])
    assert pd.isna(void["fitness"])


def test_updates_evals_and_workers_add_up(root: Path) -> None:
    run = hpc_es.store.read(rebuild(root))
    train = run.evaluations[(run.evaluations["kind"] == "train") & (run.evaluations["status"] == "accepted")]
    means = train.groupby("consumed_version")["fitness"].mean()
    assert list(means) == pytest.approx(list(run.updates["fitness_mean"]))
    assert list(run.updates["discarded"]) == [0, 1, 0, 0]
    assert list(run.evals["version"]) == [0, 4]
    assert list(run.evals["num_tasks"]) == [NUM_EVAL_TASKS] * 2
    rewards = run.episodes[run.episodes["kind"] == "eval"].groupby("dispatch_version")["reward"]
    assert list(rewards.mean()) == pytest.approx(list(run.evals["reward_mean"]))
    assert list(rewards.sem()) == pytest.approx(list(run.evals["standard_error"]))
    accepted = run.evaluations[run.evaluations["status"] == "accepted"]
    seconds = accepted["seconds_update"] + accepted["seconds_perturb"] + accepted["seconds_rollout"]
    assert list(seconds.groupby(accepted["worker"]).sum()) == pytest.approx(list(run.workers["seconds_useful"]))
    assert run.workers["num_results"].sum() == run.evaluations["time_received"].notna().sum()
    assert (run.workers["seconds_connected"] == run.workers["time_left"] - run.workers["time_joined"]).all()


def test_a_new_head_ends_leases_and_connections_until_the_workers_say_hello_again() -> None:
    projection = Projection()
    records = list(fake_records(1))
    lease = next(number for number, record in enumerate(records) if isinstance(record, Leased))
    for record in [started(1, 0), *records[: lease + 1]]:
        projection.add(record)
    projection.take()
    projection.add(Started(3000.0, 1, "fake", 2, 9, "{}", BASE_DIGEST, {}, "h"))
    changes = projection.take()
    assert changed(changes, "evaluations", "status") == {0: "planned"}
    last_word = records[lease].time
    assert changed(changes, "workers", "time_left") == {0: last_word, 1: last_word}
    projection.add(Joined(3001.0, "w0", "seat0", "node", 10, {}))
    changes = projection.take()
    assert changes.num_rows["workers"] == 2  # the same incarnation, the same row
    assert pd.isna(changed(changes, "workers", "time_left")[0])


def changed(changes: Changes, table: str, name: str) -> dict[int, Any]:
    """The cells of one column in the rows that have changed."""
    rows, cells = changes.columns(table)
    place = [column.name for column in TABLES[table]].index(name)
    return dict(zip(rows, cells[place], strict=True))


def test_a_flush_costs_as_much_as_the_changes_and_not_as_the_file() -> None:
    projection = Projection()
    for record in [started(1, 0), *fake_records(40)]:
        projection.add(record)
    projection.take()
    projection.add(Noted(1.0, "info", "x"))
    assert projection.num_cells == 4


def test_a_text_that_no_longer_holds_is_emptied_in_the_file(tmp_path: Path) -> None:
    writer = Hdf5Writer(RunPaths(tmp_path))
    left = Left(2.0, "w0", "a node failed")
    for record in (started(1, 0), Joined(1.0, "w0", "seat0", "node", 10, {}), left, Joined(3.0, "w0", "", "", 10, {})):
        writer.add(record)
        writer.flush(7)
        shutil.copy(RunPaths(tmp_path).hdf5, tmp_path / "alone.h5")
        if record is left:
            assert list(hpc_es.store.read(tmp_path / "alone.h5").workers["left"]) == ["a node failed"]
    assert list(hpc_es.store.read(tmp_path / "alone.h5").workers["left"]) == [""]


# --- one truth --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_flushing_in_any_steps_gives_the_same_tables_as_the_journal(tmp_path: Path, seed: int) -> None:
    root, rng = tmp_path / "run", random.Random(seed)
    records = write_run(root, 5, seed=seed, lag=seed % 3 + 1)
    writer = Hdf5Writer(RunPaths(root))
    for record in records:
        writer.add(record)
        if rng.random() < 0.2:
            writer.flush(7)
    writer.flush(RunPaths(root).segment(1).stat().st_size)
    step_by_step = tables(hpc_es.store.read(root))
    assert_same(step_by_step, from_journal(root))
    rebuild(root)
    assert_same(step_by_step, tables(hpc_es.store.read(root)))


def test_building_in_small_pieces_gives_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = from_journal(root)
    monkeypatch.setattr(hdf5, "_SPILL_CELLS", 50)
    rebuild(root)
    assert_same(tables(hpc_es.store.read(root)), expected)
    assert sorted(path.name for path in root.iterdir()) == ["journal.1.hpcj", "run.h5"]


def test_a_run_of_many_segments_reads_as_one(root: Path) -> None:
    second = JournalWriter.create(RunPaths(root), started)
    second.append(Noted(5000.0, "info", "resumed"))
    second.close()
    run = hpc_es.store.read(rebuild(root))
    assert run.attrs["generation"] == 2
    assert run.events["what"].iloc[-1] == "resumed"
    assert_same(tables(run), from_journal(root))


# --- later evaluations ------------------------------------------------------------------------------------------


def test_later_evaluations_are_merged_by_rebuild_and_by_read(root: Path) -> None:
    rebuild(root)
    path = write_later(root, "final", later_eval(2, 0.75))
    assert path == root / "evals" / "final.hpcj"
    merged = tables(hpc_es.store.read(root))
    assert list(merged["evals"]["source"]) == ["run", "run", "final"]
    assert merged["evals"]["reward_mean"].iloc[-1] == 0.75
    assert merged["episodes"]["source"].iloc[-1] == "final"
    assert len(merged["workers"]) == 2
    assert_same(merged, from_journal(root))
    rebuild(root)
    assert_same(merged, tables(hpc_es.store.read(root)))


def test_a_damaged_later_evaluation_does_not_hide_the_run(root: Path) -> None:
    path = write_later(root, "bad", later_eval(2, 0.75))
    path.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match=r"bad\.hpcj is left out"):
        rebuild(root)
    with pytest.warns(UserWarning, match=r"bad\.hpcj is left out"):
        assert len(hpc_es.store.read(root).evals) == 2


def test_a_later_evaluation_of_another_base_model_is_left_out_with_a_warning(root: Path) -> None:
    first, *others = later_eval(2, 0.75)
    assert isinstance(first, Started)
    write_later(root, "foreign", [structs.replace(first, base_digest=1), *others])
    with pytest.warns(UserWarning, match=r"foreign\.hpcj is left out: it is of a run on the base model"):
        rebuild(root)
    with pytest.warns(UserWarning, match=r"foreign\.hpcj is left out"):
        assert len(hpc_es.store.read(root).evals) == 2


def test_a_later_evaluation_of_another_run_on_the_same_base_is_left_out_with_a_warning(root: Path) -> None:
    first, *others = later_eval(2, 0.75)
    assert isinstance(first, Started)
    foreign = first.config_json.replace('"num_updates":4', '"num_updates":5')
    write_later(root, "foreign", [structs.replace(first, config_json=foreign), *others])
    with pytest.warns(UserWarning, match=r"foreign\.hpcj is left out: it is an evaluation of another run"):
        rebuild(root)
    with pytest.warns(UserWarning, match=r"foreign\.hpcj is left out"):
        assert len(hpc_es.store.read(root).evals) == 2


# --- reading elsewhere ------------------------------------------------------------------------------------------


def test_a_copied_file_needs_no_journal(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.h5"
    shutil.copy(rebuild(root), copy)
    run = hpc_es.store.read(copy)
    assert len(run.updates) == 4
    assert run.config["run"]["name"] == "fake"
    assert run.units["evaluations"]["tokens_in"] == "tokens"
    copy.write_bytes(copy.read_bytes()[:5000])
    os.utime(copy, (0, 0))
    with pytest.raises(StoreError, match="journal"):
        hpc_es.store.read(copy)


def test_reading_needs_no_torch_and_naming_the_module_costs_nothing(root: Path) -> None:
    rebuild(root)
    script = f"""
        import sys
        import hpc_es.store
        assert not {{"pandas", "h5py", "numpy"}} & set(sys.modules), "slow imports"
        run = hpc_es.store.read({str(root / "run.h5")!r})
        assert len(run.evaluations) and len(run.episodes)
        assert not {{"torch", "vllm", "numba"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def test_a_newer_schema_is_refused_with_both_versions(root: Path) -> None:
    rebuild(root)
    with h5py.File(root / "run.h5", "r+", locking=False) as file:
        file.attrs["schema_version"] = 9
    os.utime(root / "run.h5", (0, 0))  # not just being written
    with pytest.raises(StoreError, match="schema version 9; this hpc_es reads up to 1"):
        hpc_es.store.read(root)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "none" / "run.h5"):
        with pytest.raises(ConfigError, match="is not a run"):
            hpc_es.store.read(path)


def test_texts_that_hdf5_cannot_hold_are_escaped_and_writing_continues(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    writer = JournalWriter.create(RunPaths(tmp_path / "run"), started)
    writer.append(Noted(2000.0, "error", "odd", "boom \x00 é"))
    writer.close()
    rebuild(tmp_path / "run")
    run = hpc_es.store.read(tmp_path / "run")
    assert run.events.detail.iloc[-1] == "boom \\x00 é"
    assert_same(tables(run), from_journal(tmp_path / "run"))
    assert storable("a\udc80") == "a\\udc80"


def test_a_file_ahead_of_a_journal_that_lost_its_end_serves_with_a_warning(root: Path) -> None:
    whole = tables(hpc_es.store.read(rebuild(root)))
    segment = RunPaths(root).segment(1)
    segment.write_bytes(segment.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="ahead of the journal, which has lost its end"):
        assert_same(tables(hpc_es.store.read(root)), whole)
    with pytest.raises(JournalDamaged, match=r"journal\.1\.hpcj is damaged at offset .* its end is lost. Restore"):
        rebuild(root)
