"""Tables over runs, against numbers worked out by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
from staged_run import Staged, stage, sync, tail

import hpc_es.store
from hpc_es.analysis.figures.curves import plot_costs, plot_learning_curve
from hpc_es.analysis.report.figures import Selection
from hpc_es.analysis.statistics import conditions
from hpc_es.analysis.statistics.progress import TRAILING_UPDATES, outcome, progress
from hpc_es.analysis.statistics.runs import condition_label, conditions_of, labelled, staleness_label
from hpc_es.cli.report import read_runs
from hpc_es.errors import ConfigError, NothingToShow

pytestmark = pytest.mark.filterwarnings("error")
Run = hpc_es.store.Run
LAG_2 = {"mode": "controlled", "lag": 2, "share": 0.5}


def staged(folder: Path, **changes: object) -> Run:
    name = f"run{len(list(folder.iterdir()))}"
    return stage(folder / name, Staged(**{"composition": sync(4), **changes}))  # type: ignore[arg-type]


def test_a_tie_for_the_peak_goes_to_the_earliest_and_the_final_is_the_last(tmp_path: Path) -> None:
    found = outcome(staged(tmp_path, success={0: 1, 2: 5, 4: 2, 6: 5, 8: 3}))
    assert (found.start, found.peak, found.peak_update) == (1 / 8, 5 / 8, 2)
    assert (found.final, found.final_update, found.num_tasks) == (3 / 8, 8, 8)
    assert found.standard_error == pytest.approx(math.sqrt(3 / 8 * 5 / 8 / 8))


def test_a_run_without_evaluations_has_no_peak(tmp_path: Path) -> None:
    run = staged(tmp_path, success={})
    assert math.isnan(outcome(run).peak)
    row = conditions.table(run).iloc[0]
    assert row["num_runs"] == 1
    assert math.isnan(row["peak_update_mean"])
    assert "| Sync | 1 | - | - | - | - |" in conditions.markdown(conditions.table(run))


def test_costs_are_counted_up_to_each_commit(tmp_path: Path) -> None:
    run = staged(tmp_path)
    found = progress(run)
    assert list(found["evaluations"]) == [4 * update for update in range(9)]  # sync: nothing is in flight at a commit
    train = run.evaluations[run.evaluations["kind"] == "train"]
    assert found["tokens"].iloc[-1] == (train["tokens_in"] + train["tokens_out"]).sum()
    third = train[train["planned_update"] <= 3]
    seconds = third[["seconds_update", "seconds_perturb", "seconds_rollout"]].to_numpy().sum()
    assert found["worker_seconds"][3] == pytest.approx(seconds)
    assert found["gpu_seconds"].isna().all()  # there are none
    assert found["wall_clock_s"][3] == pytest.approx(run.updates["time_committed"][2] - 1000)
    fitness = found["fitness"].to_numpy()
    assert found["trailing"][8] == pytest.approx(fitness[4:9].mean())
    assert found["trailing"][2] == pytest.approx(fitness[1:3].mean())
    assert TRAILING_UPDATES == 5


def test_a_worker_with_several_gpus_costs_as_many_gpu_seconds(tmp_path: Path) -> None:
    gpu = {"device": "NVIDIA H200"}
    single, quadruple = staged(tmp_path, **gpu), staged(tmp_path, engine={"tensor_parallel": 4}, **gpu)
    assert progress(quadruple)["gpu_seconds"].iloc[-1] == pytest.approx(4 * progress(single)["gpu_seconds"].iloc[-1])
    costs = conditions.costs({"one": single, "four": quadruple})
    assert costs["gpu_seconds_mean"][1] == pytest.approx(4 * costs["gpu_seconds_mean"][0])
    assert costs["worker_seconds_mean"][1] == pytest.approx(costs["worker_seconds_mean"][0])
    assert "GPU-seconds" in conditions.costs_markdown(costs)


def test_seconds_of_workers_without_a_gpu_are_not_called_gpu_seconds(tmp_path: Path) -> None:
    run = staged(tmp_path)
    text = conditions.costs_markdown(conditions.costs(run))
    assert "Worker-seconds" in text
    assert "GPU" not in text
    assert [axes.get_xlabel().partition(" ")[0] for axes in plot_costs(run).axes][2:] == [
        "worker-seconds",
        "wall-clock",
    ]
    with pytest.raises(NothingToShow, match="x='worker_seconds' compares them all"):
        plot_learning_curve(run, x="gpu_seconds")


def test_runs_that_differ_only_in_seed_and_name_are_one_condition(tmp_path: Path) -> None:
    runs = [staged(tmp_path, seed=seed) for seed in (0, 1)] + [
        staged(tmp_path, staleness=LAG_2, composition=tail({0: 2, 2: 2}))
    ]
    found = conditions_of(runs)
    assert [(condition.label, len(condition.runs)) for condition in found] == [("Sync", 2), ("Lag-2 50 %", 1)]
    assert [label for label, _ in labelled(runs)] == ["Sync, seed 0", "Sync, seed 1", "Lag-2 50 %"]


def test_conditions_with_equal_labels_are_distinguished_by_their_differences(tmp_path: Path) -> None:
    runs = [
        staged(tmp_path),
        staged(tmp_path, population=6, composition=sync(6)),
        staged(tmp_path, es={"alpha": 1e-3}),
    ]
    labels = [condition.label for condition in conditions_of(runs)]
    assert labels == [
        "Sync 4x2 es.alpha.start=0.0005",
        "Sync 6x2 es.alpha.start=0.0005",
        "Sync 4x2 es.alpha.start=0.001",
    ]


def test_conditions_that_differ_in_many_settings_go_by_the_name_of_a_run(tmp_path: Path) -> None:
    runs = [
        stage(tmp_path / place / "run", Staged(composition=sync(4), num_updates=updates, es=es))
        for place, updates, es in (("a", 8, {}), ("b", 6, {"alpha": 1e-3, "sigma": 0.1}), ("c", 4, {"alpha": 1e-4}))
    ]
    assert [condition.label for condition in conditions_of(runs)] == ["Sync run", "Sync run #2", "Sync run #3"]


@pytest.mark.parametrize(
    ("staleness", "label"),
    [
        ({"mode": "natural", "max_lag": 1}, "Async-1"),
        ({"mode": "natural", "max_lag": 1, "overdue": "hold"}, "Async-1 hold"),
        ({"mode": "controlled", "lag": 4, "share": 0.1875}, "Lag-4 18.75 %"),
        ({"mode": "tail", "counts": {"0": 8, "32": 1, "64": 1, "128": 0}}, "Tail-64"),
        ({"mode": "staircase", "isolated": True}, "Staircase isolated"),
        ({}, "Sync"),
    ],
)
def test_labels_are_those_of_the_paper(staleness: dict[str, object], label: str) -> None:
    assert staleness_label(staleness) == label


def test_a_label_names_the_methods_additions(tmp_path: Path) -> None:
    es = {"subspaces": 4, "shaping": "centred_ranks", "optimiser": {"kind": "adam"}, "control": "random-walk"}
    assert condition_label(staged(tmp_path, es=es)) == "Sync, CoPES-4, centred ranks, adam, random walk"


def test_the_table_has_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    runs = [staged(tmp_path, seed=seed, success={0: 1, 8: solved}) for seed, solved in enumerate((2, 4, 6))]
    table = conditions.table(runs)
    assert len(table) == 1
    row = table.iloc[0]
    assert (row["condition"], row["num_runs"], row["num_tasks"]) == ("Sync", 3, 8)
    assert row["final_mean"] == pytest.approx(0.5)
    assert row["final_sd"] == pytest.approx(np.std([0.25, 0.5, 0.75], ddof=1))
    text = conditions.markdown(table)
    assert "| Sync | 3 | 12.50 ± 0.00 | 50.00 ± 25.00 | 8 ± 0 | 50.00 ± 25.00 |" in text
    error = 100 * np.mean([math.sqrt(p * (1 - p) / 8) for p in (0.25, 0.5, 0.75)])
    assert f"on 8 tasks, is {error:.2f} points" in text
    costs = conditions.costs(runs)
    assert costs["evaluations_mean"][0] == 32
    assert "| Sync | 3 | 32 ± 0 | 0 ± 0 |" in conditions.costs_markdown(costs)


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    solved = {"Sync": {0: 2, 1: 4, 2: 3, 3: 3}, "Lag": {0: 3, 1: 6, 3: 6, 7: 8}}
    runs = {
        name: [staged(tmp_path, seed=seed, success={8: count}) for seed, count in seeds.items()]
        for name, seeds in solved.items()
    }
    found = conditions.paired(runs).set_index("outcome").loc["final"]
    assert (found["condition"], found["num_pairs"], found["num_better"]) == ("Lag", 3, 3)
    assert found["mean"] == pytest.approx((1 / 8 + 2 / 8 + 3 / 8) / 3)
    assert found["low"] == pytest.approx(1 / 8)
    assert found["high"] == pytest.approx(3 / 8)
    assert found["p"] == 2 / 8
    assert "+25.00 ± 12.50" in conditions.paired_markdown(conditions.paired(runs))
    two = conditions.paired({name: members[:2] for name, members in runs.items()}).iloc[1]
    assert two["mean"] == pytest.approx(1.5 / 8)
    assert math.isnan(two["low"])


def test_a_base_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no condition 'Async-1' to compare with: Sync"):
        conditions.paired(staged(tmp_path), base="Async-1")
    with pytest.raises(ConfigError, match="the measure 'sucess' is unknown: success or fitness"):
        outcome(staged(tmp_path), "sucess")  # type: ignore[arg-type]


# --- what may not be pooled --------------------------------------------------------------------------------------


def test_one_name_for_runs_of_different_settings_is_refused(tmp_path: Path) -> None:
    runs = [staged(tmp_path, seed=0), staged(tmp_path, seed=1, num_updates=6)]
    with pytest.raises(ConfigError, match=r"run0 and run1 cannot both be 'Sync': run.num_updates is 8 and 6"):
        conditions.table({"Sync": runs})
    assert len(conditions_of(runs)) == 2


def test_a_run_given_twice_is_refused(tmp_path: Path) -> None:
    run = staged(tmp_path)
    for twice in ([run, run], [run, run.folder], {"a": [run, run]}):
        with pytest.raises(ConfigError, match=r"run0 is given twice in '(a|Sync)'"):
            conditions.table(twice)  # type: ignore[arg-type]
    assert len(conditions_of({"a": run, "b": run})) == 2


def test_a_seed_that_comes_twice_in_a_condition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run0 and run1 of 'Sync' have the same seed, 3"):
        conditions.table([staged(tmp_path, seed=3), staged(tmp_path, seed=3)])


def test_an_unnamed_run_does_not_join_a_name_of_other_settings(tmp_path: Path) -> None:
    paths = [staged(tmp_path, seed=seed, num_updates=updates).folder for seed, updates in ((0, 8), (1, 8), (0, 6))]
    named = read_runs([f"Sync={paths[0]}", str(paths[1])])
    assert {label: len(runs) for label, runs in named.items()} == {"Sync": 2}  # type: ignore[union-attr, arg-type]
    named = read_runs([f"Sync={paths[0]}", str(paths[2])])
    assert list(named) == ["Sync", "Sync (run2)"]  # type: ignore[arg-type]


def test_runs_of_unequal_length_are_not_paired_and_the_footnote_says_so(tmp_path: Path) -> None:
    lag = {"staleness": LAG_2, "composition": tail({0: 2, 2: 2})}
    runs = {
        "Sync": [staged(tmp_path, seed=seed) for seed in (0, 1)],
        "Shorter": [staged(tmp_path, seed=0, num_updates=4, **lag)],
        "Unfinished": [staged(tmp_path, seed=0, success={4: 8}, **lag), staged(tmp_path, seed=1, **lag)],
    }
    found = conditions.paired(runs)
    assert found["num_pairs"].tolist() == [0, 0, 1, 1]
    assert found["num_unequal"].tolist() == [1, 1, 1, 1]
    foot = conditions.paired_text(found).foot
    assert "Left out of Shorter minus Sync: 1 pair of unequal length" in foot
    assert "Left out of Unfinished minus Sync: 1 pair of" in foot


def test_a_figure_of_one_run_of_several_says_which(tmp_path: Path) -> None:
    several = conditions_of([staged(tmp_path, seed=seed) for seed in (0, 1)])[0]
    alone = conditions_of({"Alone": staged(tmp_path)})[0]
    assert list(Selection((several, alone), "success").few) == ["Sync: run0, 1 of 2 runs", "Alone"]
    assert list(Selection((several,), "success").few) == ["Sync: run0, 1 of 2 runs", "Sync: run1, 2 of 2 runs"]
