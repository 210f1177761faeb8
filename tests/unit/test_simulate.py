"""The simulator against closed forms, against itself, and against real runs."""

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_run import Staged, stage
from theatre import make_config
from typer.testing import CliRunner

from hpc_es.cli.simulate import _time
from hpc_es.config import Config, load
from hpc_es.errors import ConfigError, RunFailed
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.records import EvalId
from hpc_es.simulator.durations import Durations, LogNormal, of_run, parse
from hpc_es.simulator.simulate import Preemption, Simulation, mode_name, simulate, with_mode
from hpc_es.store import read
from hpc_es.store import records as journal
from hpc_es.store.journal import JournalWriter

LONG_TAILED = "lognormal:median=60,sigma=0.8"


def config_of(population: int, num_updates: int = 10, mode: str = "sync", **changes: object) -> Config:
    config = make_config(
        run={"name": "simulated", "num_updates": num_updates},
        es={"population": population, "tasks_per_member": 1},
        eval={"num_tasks": 0},
        checkpoint={"every": 1000},
        **changes,
    )
    return with_mode(config, mode)


def lasting(text: str, seed: int = 0, population: int = 4) -> Durations:
    return parse(text, population=population, seed=seed)


# --- closed forms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "rounds"), [(1, 8), (3, 3), (4, 2), (7, 2), (8, 1), (20, 1)])
def test_a_barrier_with_constant_durations_costs_whole_rounds(workers, rounds):
    result = simulate(config_of(8), lasting("constant:60"), num_workers=workers)
    assert result.wall_clock_s == pytest.approx(10 * rounds * 60)
    assert result.busy_share == pytest.approx(8 / (rounds * workers))
    assert result.lags == {0: 80}


@given(st.integers(2, 12), st.data(), st.integers(0, 5), st.floats(0, 2), st.integers(0, 1000))
@settings(max_examples=40)
def test_natural_asynchrony_shows_at_most_workers_minus_one_stale_results_per_cohort(n, data, max_lag, sigma, seed):
    workers = data.draw(st.integers(1, n))
    durations = Durations(LogNormal(60, sigma), seed=seed)
    result = simulate(config_of(n, 20, f"natural:{max_lag}"), durations, num_workers=workers)
    assert len(result.stale) == 20
    assert max(result.stale) <= workers - 1
    assert result.lag_max <= max_lag


def test_that_bound_is_reached():
    result = simulate(config_of(8, 40, "natural:4"), lasting(LONG_TAILED), num_workers=4)
    assert max(result.stale) == 3


def test_natural_asynchrony_keeps_workers_busy_where_the_barrier_does_not():
    durations = lasting(LONG_TAILED)
    sync = simulate(config_of(8, 150), durations, num_workers=4)
    natural = simulate(config_of(8, 150, "natural:1"), durations, num_workers=4)
    hold = simulate(config_of(8, 150, "natural:1:hold"), durations, num_workers=4)
    assert sync.busy_share < 0.75
    assert natural.busy_share >= 0.97
    assert hold.useful_share > natural.useful_share
    assert hold.num_discarded == 0 < natural.num_discarded


def test_no_lag_at_all_is_the_barrier():
    durations = lasting(LONG_TAILED)
    sync = simulate(config_of(8), durations, num_workers=3)
    assert simulate(config_of(8, mode="natural:0"), durations, num_workers=3).wall_clock_s == sync.wall_clock_s


def test_a_slow_arena_is_the_pace_of_fast_workers():
    result = simulate(config_of(2), lasting("constant:1,head_update=10"), num_workers=2)
    assert result.wall_clock_s == pytest.approx(1 + 9 * 10)
    assert result.arena_share == pytest.approx(9 * 9 / 101)  # the last update is waited for in the end


def test_a_checkpoint_holds_up_the_next_update():
    config = config_of(2).model_copy(update={"checkpoint": make_config().checkpoint})  # every second version
    result = simulate(config, lasting("constant:10,head_update=1,checkpoint=100"), num_workers=2)
    assert result.wall_clock_s == pytest.approx(20 + 4 * (1 + 100 + 1))  # update 3 is applied after checkpoint 2


def test_every_worker_applies_every_update_once():
    plain = simulate(config_of(4), lasting("constant:10"), num_workers=2)
    result = simulate(config_of(4), lasting("constant:10,update=3"), num_workers=2)
    assert result.wall_clock_s == pytest.approx(plain.wall_clock_s + 9 * 3)
    assert result.useful_s == pytest.approx(plain.useful_s + 2 * 9 * 3)


def test_messages_take_their_time():
    result = simulate(config_of(4), lasting("constant:10,dispatch=1,report=2"), num_workers=4)
    assert result.wall_clock_s == pytest.approx(10 * 13)
    assert result.message_share == pytest.approx(3 / 13)


# --- what must hold whatever happens -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "natural:2", "natural:1:hold", "controlled:2:0.5", "staircase"])
@pytest.mark.parametrize("silent", [False, True])
def test_every_second_is_in_one_account_and_lost_evaluations_are_made_again(mode, silent):
    config = config_of(6, 40, mode)
    result = simulate(
        config, lasting(LONG_TAILED), num_workers=5, preemption=Preemption(600, requeue_s=120, silent=silent)
    )
    assert result.num_lost > 20
    assert sum(result.lags.values()) == 6 * 40
    shares = (result.busy_share, result.lost_share, result.waiting_share, result.arena_share, result.end_share)
    assert sum(shares) + result.message_share == pytest.approx(1)
    assert result.message_share < 0.01
    assert result.useful_share <= result.busy_share + 1e-9


def test_a_worker_that_vanishes_without_a_word_costs_the_heartbeat_timeout():
    preemption = Preemption(300, requeue_s=1000)
    spoken = simulate(config_of(6, 30), lasting("constant:60"), num_workers=6, preemption=preemption)
    silent = Preemption(300, requeue_s=1000, silent=True)
    assert simulate(config_of(6, 30), lasting("constant:60"), num_workers=6, preemption=silent).wall_clock_s > (
        spoken.wall_clock_s + 30
    )


def test_the_same_simulation_twice_is_the_same():
    config, preemption = config_of(6, 20, "natural:1"), Preemption(500)
    first, second = (
        simulate(config, lasting(LONG_TAILED + ",start=30"), num_workers=5, preemption=preemption) for _ in range(2)
    )
    assert first.wall_clock_s == second.wall_clock_s
    assert first.stale == second.stale
    other = simulate(config, lasting(LONG_TAILED + ",start=30", seed=1), num_workers=5, preemption=preemption)
    assert other.wall_clock_s != first.wall_clock_s


def test_evaluations_that_outlast_their_workers_end_the_simulation():
    with pytest.raises(RunFailed, match=r"version 0 of 10.*outlasting workers.*, \d+ evaluations queued"):
        simulate(config_of(2), lasting("constant:60"), num_workers=2, preemption=Preemption(1, requeue_s=1))


def test_evaluations_that_outlast_their_lease_end_the_simulation():
    config = config_of(2, transport={"lease_timeout": 50})
    with pytest.raises(RunFailed, match="lease_timeout"):
        simulate(config, lasting("constant:60"), num_workers=2)


def test_ten_thousand_workers_are_simulated():
    result = simulate(config_of(10_000, 2, "natural:2"), lasting(LONG_TAILED), num_workers=10_000)
    assert sum(result.lags.values()) == 20_000
    assert result.compute_s < 120


# --- durations ------------------------------------------------------------------------------------------------------


def test_members_of_a_version_share_the_common_part_of_their_durations():
    def spread(shared: float) -> float:
        drawn = LogNormal(60, 0.8, shared)
        return max(drawn.seconds(EvalId(3, slot), "train", 0) for slot in range(50)) / min(
            drawn.seconds(EvalId(3, slot), "train", 0) for slot in range(50)
        )

    assert spread(1.0) == pytest.approx(1)
    assert 1 < spread(0.9) < spread(0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weibull:3", "must be a run folder"),
        ("nowhere/run.h5", "must be a run folder"),
        ("lognormal:sigma=1", "median= is missing"),
        ("lognormal:median=60,spread=1", "'spread' is unknown; allowed: median, sigma"),
        ("constant:sixty", "not a number or a duration like 90s"),
        ("constant:-1", "must not be negative"),
        ("lognormal:median=60,shared=2", "at most 1"),
        ("lognormal:median=60,sigma=1000", "at most 5"),
        ("constant:1e308", r"at most 1e\+09"),
        ("constant:nan", "'nan' must be a finite number"),
    ],
)
def test_wrong_durations_are_refused_with_what_is_allowed(text, message):
    with pytest.raises(ConfigError, match=message):
        lasting(text)


def test_durations_are_read_with_units():
    durations = lasting("lognormal:median=2m,sigma=0,eval=3,head_update=1m30s")
    assert durations.evaluation(EvalId(0, 0), "train") == 120
    assert durations.evaluation(EvalId(0, 0, 0, "eval"), "eval") == 360
    assert durations.head_update(1) == 90


# --- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "natural:3:discard", "natural:1:hold", "controlled:4:0.5", "staircase"])
def test_a_mode_has_one_name(mode):
    assert mode_name(config_of(8, mode=mode)) == mode
    assert with_mode(config_of(8, mode=mode), "config") == config_of(8, mode=mode)


@pytest.mark.parametrize("mode", ["asynchronous", "natural:1:hold:2", "natural:many", "natural:1:wait", "controlled:1"])
def test_an_impossible_mode_is_refused_by_name(mode):
    with pytest.raises(ConfigError, match=f"mode '{mode}'"):
        config_of(8, mode=mode)


# --- a run's own durations --------------------------------------------------------------------------------------------


def recorded(root: Path, config: Config, durations: Durations, num_workers: int) -> float:
    """Journal a simulated run as a real head would; its wall-clock."""
    simulation = Simulation(config, durations, num_workers)
    records: list[journal.AnyRecord] = []
    count = simulation.tally.add

    def add(record: journal.AnyRecord) -> None:
        records.append(record)
        count(record)

    simulation.tally.add = add  # type: ignore[method-assign]
    result = simulation.run()
    root.mkdir()
    text = config.model_dump_json()

    def started(generation: int, predecessor_bytes: int) -> journal.Started:
        return journal.Started(0.0, journal.SCHEMA_VERSION, "simulated", 1, predecessor_bytes, text, 1, {}, "")

    writer = JournalWriter.create(RunPaths(root), started)
    for record in records:
        writer.append(record)
    writer.sync()
    writer.close()
    return result.wall_clock_s


LIKE_REALITY = "lognormal:median=60,sigma=0.8,shared=0.4,eval=2,update=4,dispatch=0.5,report=0.1,start=50,head_update=3"


@pytest.mark.filterwarnings("ignore:.*tables are built from the journal")
@pytest.mark.parametrize("mode", ["sync", "natural:1", "natural:2:hold", "controlled:2:0.5"])
@pytest.mark.parametrize("resample", ["none", "versions", "evaluations"])
def test_a_recorded_run_predicts_its_own_wall_clock(tmp_path, mode, resample):
    config = with_mode(make_config(run={"name": "r", "num_updates": 40}, es={"population": 8}), mode)
    truth = recorded(tmp_path / "run", config, lasting(LIKE_REALITY, population=8), 4)
    run = read(tmp_path / "run")
    predicted = [
        simulate(config, of_run(run, population=8, resample=resample, seed=seed), num_workers=4).wall_clock_s
        for seed in range(3)
    ]
    assert sum(predicted) / 3 == pytest.approx(truth, rel=0.10)


@pytest.mark.filterwarnings("ignore:.*tables are built from the journal")
def test_a_version_takes_each_duration_of_a_version_of_the_run_once(tmp_path):
    recorded(tmp_path / "run", config_of(8), lasting(LONG_TAILED), 3)
    run = read(tmp_path / "run")
    durations = of_run(run, population=8, resample="versions", seed=5)
    rows = run.evaluations[run.evaluations["dispatch_version"] == 3]
    measured = sorted(rows["seconds_perturb"] + rows["seconds_rollout"])
    drawn = [durations.evaluation(EvalId(13, slot), "train") for slot in range(8)]  # of version 13 mod 10
    assert sorted(drawn) == pytest.approx(measured)
    assert drawn != [durations.evaluation(EvalId(23, slot), "train") for slot in range(8)]
    as_it_was = of_run(run, population=8)
    assert [as_it_was.evaluation(EvalId(13, slot), "train") for slot in rows["slot"]] == pytest.approx(
        list(rows["seconds_perturb"] + rows["seconds_rollout"])
    )


@pytest.mark.filterwarnings("ignore:.*tables are built from the journal")
def test_the_costs_of_a_run_are_measured(tmp_path):
    config = make_config(run={"name": "r", "num_updates": 12}, es={"population": 4}, checkpoint={"every": 4})
    recorded(tmp_path / "run", config, lasting(LIKE_REALITY.replace("sigma=0.8", "sigma=0") + ",checkpoint=7"), 2)
    durations = of_run(read(tmp_path / "run"), population=4)
    assert durations.evaluation(EvalId(0, 0), "train") == pytest.approx(60)
    assert durations.evaluation(EvalId(0, 0, 0, "eval"), "eval") == pytest.approx(120)
    assert durations.catch_up(EvalId(0, 0), 3, load=False) == pytest.approx(12)
    assert durations.catch_up(EvalId(0, 0), 0, load=True) == pytest.approx(2)
    assert durations.dispatch(EvalId(0, 0)) == pytest.approx(0.5)
    assert durations.report(EvalId(0, 0)) == pytest.approx(0.1)
    assert durations.head_update(1) == pytest.approx(3)
    assert durations.checkpoint(1) == pytest.approx(7)
    first, second, restarted = durations.start(0, 0), durations.start(1, 0), durations.start(0, 1)
    assert 25 <= first <= second <= 75
    assert restarted in (first, second)


@pytest.mark.filterwarnings("ignore:.*tables are built from the journal")
def test_a_run_without_held_out_evaluations_cannot_say_how_long_they_take(tmp_path):
    recorded(tmp_path / "run", config_of(4), lasting(LONG_TAILED), 2)
    durations = of_run(read(tmp_path / "run"), population=4)
    with pytest.raises(ConfigError, match=r"eval\.num_tasks=0"):
        simulate(make_config(), durations, num_workers=2)


# --- real runs ------------------------------------------------------------------------------------------------------

REAL = """
run: {name: MODE, dir: DIR, num_updates: 14}
model: {path: DIR/lab-10k, dtype: float32}
task: {env: lab, chat: false, options: {seconds: {kind: lognormal, median: 0.25, sigma: 0.8}}}
es: {population: 6, sigma: 0.3, alpha: 0.3, tasks_per_member: 1}
sampling: {max_tokens: 1}
eval: {every: 5, num_tasks: 4}
engine: {kind: lab, max_model_len: 64, threads: 1}
transport: {backend: none}
staleness: {mode: MODE}
launch: {workers: 3}
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "natural"])
def test_real_processes_take_as_long_as_the_simulator_says(tmp_path, mode):
    write_lab_model(tmp_path / "lab-10k", LAB_MODELS["lab-10k"])
    path = tmp_path / "config.yaml"
    path.write_text(REAL.replace("DIR", str(tmp_path)).replace("MODE", mode))
    assert hpc_es("run", path)[0] == 0
    run = read(tmp_path / mode)
    truth = run.updates["time_committed"].max() - run.evaluations["time_leased"].min()
    simulated = simulate(load(path).config, of_run(run, population=6), num_workers=3)
    # Wide, because a machine that others use stalls between evaluations, too, and a short run hides none of it.
    assert simulated.wall_clock_s == pytest.approx(truth, rel=0.35)
    useful_share = run.workers["seconds_useful"].sum() / run.workers["seconds_connected"].sum()
    assert simulated.useful_share == pytest.approx(useful_share, abs=0.2)


# --- the command ------------------------------------------------------------------------------------------------------


def hpc_es(*arguments: object) -> tuple[int, str, str]:
    from hpc_es.cli import app

    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {name: r, num_updates: 5}\nmodel: {path: none}\ntask: {env: sudoku}\nes: {population: 4}\n"
        "eval: {num_tasks: 0}\n"
    )
    return path


def test_the_command_compares_modes_and_numbers_of_workers(config_file, tmp_path):
    table = tmp_path / "table.csv"
    options = ("--workers", "2,4", "--modes", "sync,natural:1,config", "--csv", table)
    code, output, _ = hpc_es("simulate", config_file, "es.population=6", *options)
    assert code == 0
    lines = [line.split() for line in output.splitlines() if "%" in line]
    modes = ["sync", "natural:1:discard", "sync"]
    assert [line[:2] for line in lines] == [[workers, mode] for workers in ("2", "4") for mode in modes]
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == modes * 2
    assert float(rows[1]["speedup"]) > 1 == float(rows[0]["speedup"])
    assert float(rows[1]["speedup"]) <= float(rows[1]["speedup_bound"])


def test_the_command_answers_in_json(config_file):
    code, output, _ = hpc_es("simulate", config_file, "--durations", "constant:60", "--workers", "2", "--json")
    result = json.loads(output)["results"][0]
    assert (code, result["wall_clock_s"], result["lags"]) == (0, 600, {"0": 20})


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0123, "0.0123 s"), (7.2, "7.20 s"), (599, "599 s"), (900, "0.250 h"), (3.6e7, "10,000 h")]
)
def test_times_have_three_digits_and_a_unit_of_their_size(seconds, shown):
    assert _time(seconds) == shown


def test_the_command_says_how_long_the_run_itself_took(tmp_path):
    run = stage(tmp_path / "run", Staged(workers=2))
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(run.config))
    options = ("--durations", tmp_path / "run", "--workers", "2")
    _, other, _ = hpc_es("simulate", path, "run.num_updates=9", *options)
    assert "the run itself" not in other
    truth = run.updates["time_committed"].max() - run.evaluations["time_leased"].min()
    code, output, errors = hpc_es("simulate", path, *options)
    assert code == 0, errors
    assert f"the run itself took {_time(truth)}; predicted" in output
    assert "arena: idle" in output
    assert "the run itself" not in hpc_es("simulate", path, *options, "--modes", "natural:3")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "0"), "--workers 0"),
        (("--workers", "two"), "--workers two"),
        (("--lifetime", "soon"), "--lifetime soon"),
        (("--modes", "never"), "'never' is unknown"),
        (("--modes", "tail"), "use a preset file"),
        (("--csv", "no/such/folder/table.csv"), "there is no folder no/such/folder"),
        (("--durations", "nowhere"), "--durations nowhere"),
        (("--seed", str(2**64)), "--seed"),
    ],
)
def test_mistakes_in_the_command_are_reported_without_a_traceback(config_file, options, message):
    code, _, errors = hpc_es("simulate", config_file, *options)
    assert code == 2
    assert message in errors


def test_a_table_that_does_not_fit_on_the_disk_is_a_plain_message(config_file):
    code, _, errors = hpc_es("simulate", config_file, "--csv", "/dev/full")
    assert code == 1
    assert "error: /dev/full cannot be written: No space left" in errors
