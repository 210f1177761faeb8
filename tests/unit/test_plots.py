"""Figures show what the tables say, for every mode of staleness; numbers behind them are those of the journal."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import counted
from staged_run import Staged, stage, staircase, sync, tail

from hpc_es.analysis.figures import plots
from hpc_es.analysis.figures.canvas import png
from hpc_es.analysis.statistics.episodes import brackets, per_update, per_version
from hpc_es.analysis.statistics.lags import composition, deviating_updates, lag_counts, prescribed
from hpc_es.analysis.statistics.timeline import spans, worker_shares
from hpc_es.analysis.statistics.waiting import discard_bias, members
from hpc_es.errors import ConfigError, HpcEsError, NothingToShow
from hpc_es.store import Run
from hpc_es.store.journal import read_journal
from hpc_es.store.records import Committed, Discarded, Leased, Reported

pytestmark = pytest.mark.filterwarnings("error")

TAIL = {0: 2, 1: 1, 2: 1}
STEPS = ((1, 0), (4, 3), (7, 6))
MODES: dict[str, Staged] = {
    "sync": Staged(composition=sync(4)),
    "natural": Staged(staleness={"mode": "natural", "max_lag": 1}, workers=8, spread=1.5, num_updates=20),
    "tail": Staged(
        staleness={"mode": "tail", "counts": {str(lag): count for lag, count in TAIL.items()}}, composition=tail(TAIL)
    ),
    "staircase": Staged(
        staleness={"mode": "staircase", "steps": STEPS},
        composition=staircase(4, STEPS),
        fitness=lambda version, noise: 0.3 + 0.01 * version + 0.001 * noise,
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {mode: stage(tmp_path_factory.mktemp(mode), staged) for mode, staged in MODES.items()}


@pytest.fixture
def empty(tmp_path: Path) -> Run:
    """A head that has just begun."""
    return stage(tmp_path / "run", Staged(composition=sync(4), num_updates=0, success={}))


EVERYWHERE: list[Callable[[Any], Any]] = [
    plots.plot_learning_curve,
    plots.plot_costs,
    plots.plot_lags,
    plots.plot_composition,
    plots.plot_timeline,
    plots.plot_worker_shares,
    plots.plot_durations,
    plots.plot_waiting,
    plots.plot_update_norms,
    plots.plot_episodes,
    plots.plot_finals,
    plots.plot_lengths,
]


@pytest.mark.parametrize("plot", EVERYWHERE, ids=lambda plot: str(plot.__name__))
def test_every_mode_has_its_figure_alone_and_beside_the_others(
    plot: Callable[[Any], Any], runs: dict[str, Run]
) -> None:
    for run in runs.values():
        assert plot(run).axes[0].has_data()
    figure = plot(list(runs.values()))
    assert png(figure).startswith(b"\x89PNG")
    assert not _titles_in_others(figure)


def _titles_in_others(figure: Any) -> list[str]:
    """Titles that run into another one, or out of a figure that has been drawn."""
    drawn = [text for axes in figure.axes for text in (axes._left_title, axes.title) if text.get_text()]
    boxes = [text.get_window_extent() for text in drawn]
    return [
        text.get_text()
        for text, box in zip(drawn, boxes, strict=True)
        if box.x1 > figure.bbox.x1 or any(box.overlaps(other) for other in boxes if other is not box)
    ]


@pytest.mark.parametrize(
    "plot",
    [
        *EVERYWHERE,
        plots.plot_discards,
        plots.plot_brackets,
        plots.plot_drift,
        plots.plot_magnitudes,
        plots.plot_at_k,
        plots.plot_horizon,
    ],
    ids=lambda plot: str(plot.__name__),
)
def test_a_run_that_has_just_begun_has_no_figures_and_it_says_why(plot: Callable[[Any], Any], empty: Run) -> None:
    with pytest.raises(NothingToShow, match=r"\w+ \w+ \w+"):
        plot(empty)


@pytest.mark.parametrize(
    "plot", [*EVERYWHERE, plots.plot_discards, plots.plot_brackets], ids=lambda plot: str(plot.__name__)
)
def test_figures_take_paths_as_well_as_runs(plot: Callable[[Any], Any], runs: dict[str, Run]) -> None:
    run = runs["staircase" if plot is plots.plot_brackets else "natural"]
    path = run.folder
    for given in (str(path), path, [path], {"a": path}, {"a": [str(path)]}):
        assert len(plot(given).axes) == len(plot(run).axes)
    for wrong in (3, [None], {"a": 3}):
        with pytest.raises(ConfigError, match="is not a run: give a run"):
            plot(wrong)
    with pytest.raises(HpcEsError, match="nowhere is not a run"):
        plot("nowhere")


def xs(line: Any) -> list[float]:
    return [float(value) for value in line.get_xdata()]


def ys(line: Any) -> list[float]:
    return [float(value) for value in line.get_ydata()]


# --- learning ----------------------------------------------------------------------------------------------------


def test_the_curve_has_every_update_its_trailing_mean_and_every_evaluation(runs: dict[str, Run]) -> None:
    run = runs["sync"]
    left, right = plots.plot_learning_curve([run], measure="fitness").axes
    (thin, thick), points = left.lines, right.lines[0]
    fitness = run.updates["fitness_mean"].to_numpy()
    assert xs(thin) == list(range(1, 9))
    assert ys(thin) == list(fitness)
    trailing = [fitness[max(0, update - 5) : update].mean() for update in range(1, 9)]
    assert np.allclose(ys(thick), trailing)
    assert xs(points) == [0, 4, 8]
    assert ys(points) == list(run.evals["reward_mean"])


def test_the_star_stands_at_the_earliest_peak_and_the_legend_says_it(runs: dict[str, Run]) -> None:
    figure = plots.plot_learning_curve(runs["sync"])
    star = next(line for line in figure.axes[1].lines if line.get_marker() == "*")
    assert (xs(star), ys(star)) == ([4], [3 / 8])  # 3 of 8 tasks at versions 4 and 8
    assert figure.legends[0].get_texts()[0].get_text() == "Sync: peak 37.5 % at update 4, final 37.5 %"


def test_runs_of_one_condition_are_drawn_as_their_mean(tmp_path: Path) -> None:
    repeated = [
        stage(tmp_path / f"run{seed}", Staged(composition=sync(4), seed=seed, success={8: solved}))
        for seed, solved in enumerate((2, 6))
    ]
    left, right = plots.plot_learning_curve(repeated).axes
    mean = next(line for line in right.lines if line.get_marker() == "o")
    assert ys(mean) == [0.5]
    trailing = [run.updates["fitness_mean"][:5].mean() for run in repeated]
    thick = max(left.lines, key=lambda line: float(line.get_linewidth()))
    assert ys(thick)[4] == pytest.approx(np.mean(trailing))


def test_cost_is_an_alternative_x_axis(runs: dict[str, Run]) -> None:
    left, right = plots.plot_learning_curve(runs["sync"], x="evaluations").axes
    assert xs(left.lines[0]) == [4 * update for update in range(1, 9)]
    assert xs(right.lines[0]) == [0, 16, 32]


# --- staleness ---------------------------------------------------------------------------------------------------


def test_lags_are_those_of_the_schedule(runs: dict[str, Run]) -> None:
    # 8 updates: lag 1 from update 2 (7 cohorts), lag 2 from update 3 (6), what is missing is fresh
    assert lag_counts(runs["tail"])["accepted"].to_dict() == {0: 32 - 7 - 6, 1: 7, 2: 6}
    assert lag_counts(runs["staircase"])["accepted"].to_dict() == {0: 12, 3: 12, 6: 8}


def test_discarded_lags_are_counted_apart(runs: dict[str, Run], tmp_path: Path) -> None:
    records = list(read_journal(stage(tmp_path / "run", MODES["natural"]).folder or tmp_path))
    discarded = [record.update - 1 - record.eval_id.version for record in records if isinstance(record, Discarded)]
    assert len(discarded) > 5
    counts = lag_counts(runs["natural"])
    assert counts["discarded"].sum() == len(discarded)
    assert counts["discarded"][2] == discarded.count(2)
    assert counts["discarded"][[0, 1]].sum() == 0
    assert counts["accepted"].sum() == 80


def test_cohorts_have_the_composition_that_is_prescribed(runs: dict[str, Run]) -> None:
    assert composition(runs["tail"]).loc[[1, 2, 8]].to_numpy().tolist() == [[4, 0, 0], [3, 1, 0], [2, 1, 1]]
    for mode in ("sync", "tail", "staircase"):
        assert deviating_updates(runs[mode]) == []
    assert prescribed(runs["natural"]) is None


def test_a_cohort_that_deviates_from_its_schedule_is_named(tmp_path: Path) -> None:
    staleness = {"mode": "controlled", "lag": 2, "share": 0.5}
    fresh = stage(tmp_path / "run", Staged(staleness=staleness, composition=sync(4)))
    assert deviating_updates(fresh) == [3, 4, 5, 6, 7, 8]
    assert "6 of 8 cohorts deviate" in plots.plot_composition(fresh).axes[0].get_title(loc="left")


def test_at_each_step_fitness_falls_back_to_the_start(runs: dict[str, Run]) -> None:
    found = brackets(runs["staircase"])
    assert found[["update", "lag"]].to_numpy().tolist() == [[4, 3], [7, 6]]
    fitness = runs["staircase"].updates["fitness_mean"]
    assert found["before"].tolist() == [fitness[2], fitness[5]]
    assert found["at"].tolist() == [fitness[3], fitness[6]]
    assert found["at"].to_numpy() == pytest.approx(fitness[0], abs=0.003)
    assert found["before"][0] > found["at"][0] + 0.01
    assert brackets(runs["sync"]).empty
    plots.plot_brackets(list(runs.values()))


def test_the_fitness_of_a_staircase_is_drawn_raw(runs: dict[str, Run]) -> None:
    figure = plots.plot_learning_curve(runs["staircase"])
    thick = max(figure.axes[0].lines, key=lambda line: float(line.get_linewidth()))
    assert ys(thick) == list(runs["staircase"].updates["fitness_mean"])
    assert figure.axes[0].get_title(loc="left") == "Training: cohort fitness, raw"
    turns = max(plots.plot_episodes(runs["staircase"]).axes[0].lines, key=lambda line: float(line.get_linewidth()))
    assert ys(turns) == list(per_update(runs["staircase"])["turns"])
    together = plots.plot_learning_curve([runs["sync"], runs["staircase"]]).axes[0].get_title(loc="left")
    assert together == "Training: cohort fitness, mean of 5 updates, raw for a staircase"


def test_brackets_have_sync_and_async_1_of_the_same_settings_beside_them(runs: dict[str, Run], tmp_path: Path) -> None:
    natural = replace(MODES["natural"], num_updates=8)
    others = [
        stage(tmp_path / "async1", natural),
        stage(tmp_path / "async2", replace(natural, staleness={"mode": "natural", "max_lag": 2})),
        stage(tmp_path / "bigger", replace(MODES["sync"], es={"alpha": 1e-3})),
    ]
    figure = plots.plot_brackets(runs["staircase"], references=[*runs.values(), *others])
    lines = {str(line.get_label()): line for line in figure.axes[0].lines if " " not in str(line.get_label())}
    assert ys(lines["Sync"]) == list(runs["sync"].updates["fitness_mean"])
    assert ys(lines["Async-1"]) == list(others[0].updates["fitness_mean"])
    assert not {"Async-2", "Tail-2", "Staircase"} & {*lines}
    assert len(plots.plot_brackets(runs["staircase"]).axes[0].lines) == len(figure.axes[0].lines) - 2


def test_finals_are_shown_by_condition_with_every_run(tmp_path: Path, runs: dict[str, Run]) -> None:
    repeated = [
        stage(tmp_path / f"run{seed}", Staged(composition=sync(4), seed=seed, success={0: 1, 8: solved}))
        for seed, solved in enumerate((2, 6))
    ]
    axes = plots.plot_finals([*repeated, runs["tail"]]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Sync (2)", "Tail-2 (1)"]
    (dots,) = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() == "o"]
    assert xs(dots) == [2 / 8, 6 / 8]
    means = [container.lines[0] for container in axes.containers]
    assert [xs(line) for line in means] == [[0.5], [3 / 8]]
    (deviation,), (error,) = (container.lines[2] for container in axes.containers)
    assert np.ptp(deviation.get_segments()[0][:, 0]) == pytest.approx(2 * np.std([2 / 8, 6 / 8], ddof=1))
    assert np.ptp(error.get_segments()[0][:, 0]) == pytest.approx(2 * (3 / 8 * 5 / 8 / 8) ** 0.5)


# --- time --------------------------------------------------------------------------------------------------------


def test_flight_and_queue_are_those_of_the_journal(runs: dict[str, Run]) -> None:
    run = runs["tail"]
    leased, received, expected = {}, {}, []
    for record in read_journal(run.folder or Path()):
        match record:
            case Leased(time=time, eval_id=eval_id):
                leased[eval_id] = time
            case Reported(time=time, result=result):
                received[result.eval_id] = time
            case Committed(time=time, commit=commit):
                for member in counted(commit):
                    at = received[member.eval_id]
                    expected.append((at - leased[member.eval_id], time - at))
    found = members(run).dropna(subset="queue")
    pairs = sorted(zip(found["flight"], found["queue"], strict=True))
    assert np.array(pairs) == pytest.approx(np.array(sorted(expected)))


def test_shares_are_of_the_seconds_connected(runs: dict[str, Run]) -> None:
    run = runs["natural"]
    found, workers = worker_shares(run), run.workers.set_index("worker")
    for row in found.to_dict("records"):
        worker = workers.loc[row["worker"]]
        assert row["busy"] == worker["seconds_busy"] / worker["seconds_connected"]
        assert row["useful"] == worker["seconds_useful"] / worker["seconds_connected"]
    assert (found["useful"] < found["busy"]).any()
    assert found["worker"].tolist() == [f"w{number}" for number in range(8)]


def test_the_timeline_has_one_bar_per_finished_evaluation(runs: dict[str, Run]) -> None:
    run = runs["natural"]
    found = spans(run)
    finished = run.evaluations["time_finished"].notna()
    assert len(found) == finished.sum()
    assert (found["fate"] == "discarded").sum() == (run.evaluations["status"] == "discarded").sum() > 0
    *bars, commits = plots.plot_timeline(run, window=(0.0, 1e4)).axes[0].collections
    assert sum(len(collection.get_paths()) for collection in bars) == len(found)
    assert len(commits.get_paths()) == 20


def test_a_long_run_is_shown_in_part(tmp_path: Path) -> None:
    run = stage(tmp_path / "run", Staged(composition=sync(4), num_updates=40, success={}))
    axes = plots.plot_timeline(run).axes[0]
    low, high = axes.get_xlim()
    end = spans(run)["end"].max()
    assert high - low == pytest.approx(end * 24 / 40)
    assert 0 <= low < high <= end
    inside = run.updates["time_committed"].sub(1000).between(low, high).sum()
    assert axes.get_title(loc="left") == f"Sync, {inside} of 40 commits shown"


def test_discards_are_longer_where_the_late_ones_are(runs: dict[str, Run]) -> None:
    run = runs["natural"]
    rows = run.evaluations[(run.evaluations["kind"] == "train") & run.evaluations["time_received"].notna()]
    seconds = rows["seconds_update"] + rows["seconds_perturb"] + rows["seconds_rollout"]
    means = seconds.groupby(rows["status"]).mean()
    found = discard_bias(run).loc["seconds"]
    assert found["difference"] == pytest.approx(means["discarded"] - means["accepted"])
    assert 0 < found["low"] < found["difference"] < found["high"]
    assert discard_bias(runs["sync"]).empty
    assert len(plots.plot_discards(list(runs.values())).axes) == 2  # the others have none


def test_a_few_discards_have_no_interval_and_the_figure_says_so(runs: dict[str, Run], tmp_path: Path) -> None:
    few = stage(tmp_path / "run", replace(MODES["natural"], num_updates=4))
    found = discard_bias(few)
    assert 0 < found["num_discarded"].max() < 5
    assert found[["low", "high"]].isna().all(axis=None)
    right = plots.plot_discards(few).axes[1]
    assert right.get_title(loc="left").endswith("consumed, no interval below 5")
    assert "no interval" not in plots.plot_discards(runs["natural"]).axes[1].get_title(loc="left")


def test_the_timeline_lists_only_states_that_occur(runs: dict[str, Run]) -> None:
    for chosen in (runs["sync"], [runs["sync"], runs["tail"]]):
        texts = [text.get_text() for text in plots.plot_timeline(chosen).legends[0].get_texts()]
        assert texts == ["member, consumed", "centre: the unperturbed policy", "commit"]


# --- episodes ----------------------------------------------------------------------------------------------------


def test_turns_and_tokens_are_means_per_episode(runs: dict[str, Run]) -> None:
    run = runs["sync"]
    first = run.evaluations[(run.evaluations["kind"] == "train") & (run.evaluations["planned_update"] == 1)]
    assert per_update(run)["turns"][1] == first["turns"].sum() / 8  # 4 members play 2 tasks
    assert per_version(run)["tokens_out"].to_dict() == {0: 15, 4: 15, 8: 15}


def test_several_runs_share_a_figure_that_is_saved_as_png(runs: dict[str, Run], tmp_path: Path) -> None:
    path = plots.save_png(plots.plot_learning_curve(list(runs.values())), tmp_path / "report" / "curve.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_naming_the_modules_loads_neither_matplotlib_nor_pandas() -> None:
    script = (
        "import sys, hpc_es.analysis.figures.plots; print({'matplotlib', 'pandas', 'numpy', 'h5py'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output == "set()\n"
