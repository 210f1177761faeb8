"""The head's checks of messages, and the limit on what one worker can make it write (see theatre.py)."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from builders import counted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace
from theatre import BASE_DIGEST, Stage, StageWorker, make_config

from hpc_es import bounds
from hpc_es.allowance import Allowance
from hpc_es.head import checks, core
from hpc_es.head.events import Tick
from hpc_es.paths import RunPaths
from hpc_es.recorded import verify
from hpc_es.records import Episode, EvalId, Result
from hpc_es.store import read
from hpc_es.store import records as journal
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter
from hpc_es.store.schema import EPISODES, EVALUATIONS
from hpc_es.transport import messages
from hpc_es.transport.messages import AnyMessage, Report

FROM_WORKERS = (
    messages.Hello,
    messages.Heartbeat,
    messages.Report,
    messages.HandBack,
    messages.Draining,
    messages.Fetch,
    messages.EpochReady,
    messages.Arrived,
    messages.Goodbye,
    messages.StatusRequest,
    messages.StopRequest,
    messages.DrainRequest,
)
MEGABYTE = "x" * 1_000_000


def records_of(stage: Stage, kind: type) -> list[Any]:
    return [record for record in stage.records if isinstance(record, kind)]


def notes_of(stage: Stage) -> str:
    return "\n".join(f"{note.what}: {note.detail}" for note in records_of(stage, journal.Noted))


def undisturbed() -> Stage:
    stage = Stage(make_config())
    stage.add_worker("seat-0")
    stage.run()
    return stage


def about_to_report(stage: Stage) -> tuple[StageWorker, Report]:
    """A worker, and the report of its first evaluation, which the head has not heard."""
    worker = stage.busy_worker("seat-0")
    stage.finish_evaluation(worker)
    report = stage.to_head.pop()
    assert isinstance(report, Report)
    return worker, report


def say(stage: Stage, *said: AnyMessage) -> None:
    """Have the head hear this, and nothing else meanwhile."""
    stage.to_head.clear()
    stage.to_head += said
    while stage.to_head:
        stage.move("to_head")


# --- the rules of fields --------------------------------------------------------------------------------------------


def without_rule(kind: type[Struct]) -> Iterator[str]:
    """Fields that could hold anything at all."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        what, inner = bounds.shape(hint)
        while what in ("optional", "many"):
            what, inner = bounds.shape(inner)
        if what == "struct":
            yield from (f"{name}.{field}" for field in without_rule(inner))
        elif what == "plain" and inner is not bool and not get_args(inner):  # a Literal has arguments
            yield name


@pytest.mark.parametrize("kind", FROM_WORKERS)
def test_every_field_of_workers_messages_has_a_rule(kind: type[Struct]):
    assert set(without_rule(kind)) <= {"result.fitness"}  # it must be the mean of rewards, which have one


@pytest.mark.parametrize(("kind", "columns"), [(Episode, EPISODES), (Result, EVALUATIONS)])
def test_every_accepted_message_fits_into_run_h5(kind: type[Struct], columns: Any):
    holds = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}
    dtypes = {column.name: column.dtype for column in columns}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        what, rule = bounds.shape(hint)
        if what == "ruled" and dtypes.get(name) in holds:
            least, most = holds[dtypes[name]]
            assert least <= rule.least <= rule.most <= most


# --- poisoned reports -----------------------------------------------------------------------------------------------


def of_result(**changes: Any) -> Callable[[Report], Report]:
    return lambda report: replace(report, result=replace(report.result, **changes))


def of_episode(**changes: Any) -> Callable[[Report], Report]:
    """Changes the second episode, and the fitness to match, if there is one."""

    def apply(report: Report) -> Report:
        first, second, *rest = report.result.episodes
        episodes = (first, replace(second, **changes), *rest)
        fitness = sum(e.reward for e in episodes) / len(episodes)
        return replace(report, result=replace(report.result, episodes=episodes, fitness=fitness))

    return apply


def of_episodes(change: Callable[[tuple[Episode, ...]], tuple[Episode, ...]]) -> Callable[[Report], Report]:
    return lambda report: replace(report, result=replace(report.result, episodes=change(report.result.episodes)))


POISON: dict[str, tuple[Callable[[Report], Report], str]] = {
    "a fitness beyond all rewards": (of_result(fitness=1e200), "fitness is 1e+200; the mean"),
    "a fitness that is no number": (of_result(fitness=math.nan), "not a finite number"),
    "a fitness that is not the mean": (lambda r: of_result(fitness=r.result.fitness + 1e-12)(r), "the mean of its"),
    "rewards beyond the bound": (of_episode(reward=1e200), "result.episodes[1].reward is 1e+200"),
    "an infinite reward": (of_episode(reward=-math.inf), "result.episodes[1].reward is -inf"),
    "negative turns": (of_episode(turns=-1), "result.episodes[1].turns is -1"),
    "tokens beyond every column": (of_episode(tokens_out=2**63), "tokens_out is 9223372036854775808"),
    "seconds that are no number": (of_episode(seconds_in_env=math.nan), "seconds_in_env is nan"),
    "an end nobody knows": (of_episode(ended=MEGABYTE), "result.episodes[1].ended is 'xxx"),
    "a task that was not assigned": (of_episode(task=99), "its episodes are of tasks"),
    "too few episodes": (of_episodes(lambda e: e[:1]), "its episodes are of tasks"),
    "too many episodes": (of_episodes(lambda e: e + e), "its episodes are of tasks"),
    "no episodes": (of_episodes(lambda e: ()), "its episodes are of tasks none"),
    "episodes in another order": (of_episodes(lambda e: e[::-1]), "its episodes are of tasks"),
    "a digest below 0": (of_result(digest=-1), "result.digest is -1"),
    "endless seconds": (of_result(seconds_update=math.inf), "result.seconds_update is inf"),
    "an error beside a measurement": (of_result(error=MEGABYTE), "both an error and measurements"),
    "an age that is no number": (lambda r: replace(r, started_age=math.nan), "started_age is nan"),
    "an age below 0": (lambda r: replace(r, finished_age=-1.0), "finished_age is -1.0"),
    "an age beyond the run's": (lambda r: replace(r, started_age=1e8), "the run began"),
    "an end before the beginning": (lambda r: replace(r, started_age=1.0, finished_age=2.0), "it ended 2 s ago"),
}


@pytest.mark.parametrize(("poison", "words"), POISON.values(), ids=POISON)
def test_a_poisoned_report_is_refused_acknowledged_and_its_evaluation_replaced(poison, words: str, tmp_path: Path):
    stage = Stage(make_config())
    worker, report = about_to_report(stage)
    poisoned, eval_id = poison(report), report.result.eval_id
    say(stage, poisoned)
    assert (worker.name, messages.Ack(eval_id)) in stage.to_workers
    (note,) = [note for note in records_of(stage, journal.Noted) if note.level == "error"]
    assert note.what == f"result {eval_id} of worker {worker.name} is refused"
    assert words in note.detail
    assert len(note.detail) < 1000
    assert [record.eval_id for record in records_of(stage, journal.Voided)] == [eval_id]
    say(stage, poisoned)
    assert len(records_of(stage, journal.Voided)) == 1, "what is sent again is of an evaluation that is void already"
    assert stage.run().finished
    assert str(counted(stage.commits()[0])[eval_id.slot].eval_id) == f"{eval_id}r1"
    refuse_impossible_records(stage)
    assert len(tables(stage, tmp_path).evaluations) == 3 * 4 + 3 * 2 + 1


def test_a_mean_that_python_added_up_otherwise_is_one():
    stage = Stage(make_config(es={"tasks_per_member": 10}))
    _, report = about_to_report(stage)
    episodes = tuple(replace(episode, reward=0.1) for episode in report.result.episodes)
    for fitness in (0.1, sum([0.1] * 10) / 10):  # as from Python 3.12 on, and before
        assignment = stage.core.ledger.evaluations[report.result.eval_id].assignment
        result = replace(report.result, episodes=episodes, fitness=fitness)
        assert checks.why_no_result(replace(report, result=result), assignment, 1.0) is None


def test_a_poisoned_report_takes_no_work_from_the_worker_that_has_it():
    stage = Stage(make_config())
    honest, report = about_to_report(stage)
    stage.add_worker("seat-1")
    say(stage, messages.Hello("mallory", "seat-9", "host", 1, BASE_DIGEST, {}))
    say(stage, replace(of_result(fitness=1e200)(report), worker="mallory"))
    assert not records_of(stage, journal.Voided)
    say(stage, report)
    assert [r.worker for r in records_of(stage, journal.Reported) if r.result.eval_id == report.result.eval_id] == [
        honest.name
    ]


def test_a_worker_that_was_sent_away_does_not_come_back_under_its_name():
    stage = Stage(make_config(run={"max_failures_in_a_row": 100}))
    worker, report = about_to_report(stage)
    for _ in range(checks.MAX_REFUSALS + 1):
        say(stage, of_result(digest=-1)(report))
    stage.to_workers.clear()
    say(stage, messages.Hello(worker.name, "seat-0", "host", 1, BASE_DIGEST, {}))
    ((_, answer),) = stage.to_workers
    assert isinstance(answer, messages.Leave)


def test_a_worker_that_is_refused_again_and_again_is_sent_away_and_the_others_finish():
    stage = Stage(make_config(run={"max_failures_in_a_row": 100}))
    worker, report = about_to_report(stage)
    for _ in range(checks.MAX_REFUSALS + 1):
        say(stage, of_result(digest=-1)(report))
    leave = [m for name, m in stage.to_workers if name == worker.name and isinstance(m, messages.Leave)]
    assert len(leave) == 1
    assert "broke a rule" in leave[0].reason
    assert worker.name not in stage.core.crew.workers
    stage.add_worker("seat-1")
    assert stage.run().finished


def test_a_run_whose_results_are_all_refused_gives_up_and_says_why():
    stage = Stage(make_config(run={"max_failures_in_a_row": 3}))
    stage.add_worker("seat-0")
    for _ in range(500):
        if stage.exit is not None:
            break
        stage.to_head = type(stage.to_head)(
            of_result(digest=-1)(m) if isinstance(m, Report) else m for m in stage.to_head
        )
        stage.move(stage.moves()[0])
    assert stage.exit is not None
    assert stage.exit.failed
    assert "result.digest is -1" in stage.exit.reason
    assert isinstance(stage.records[-1], journal.Stopped)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker": MEGABYTE}, "worker is 'xxx"),
        ({"seat": "a\x1b[2J"}, "seat is 'a\\x1b[2J'"),
        ({"pid": -1}, "pid is -1"),
        ({"base_digest": -(2**63)}, "base_digest is -9223372036854775808"),
        ({"facts": dict.fromkeys(map(str, range(1000)), "x")}, "a table of at most 40 names"),
        ({"gpu": MEGABYTE}, "gpu is"),
        ({"version": -5}, "version is -5"),
    ],
)
def test_a_worker_whose_hello_breaks_a_rule_is_refused(changes: dict[str, Any], words: str):
    stage = Stage(make_config())
    hello = replace(messages.Hello("mallory", "seat", "host", 1, BASE_DIGEST, {}), **changes)
    say(stage, hello)
    ((_, answer),) = [(name, m) for name, m in stage.to_workers if isinstance(m, messages.Refused)]
    assert words in answer.reason
    assert words in notes_of(stage)
    assert not records_of(stage, journal.Joined)
    assert max(len(msgspec.msgpack.encode(record)) for record in stage.records) < 4000


def test_long_words_are_cut_where_they_come_in():
    stage = Stage(make_config())
    worker = stage.busy_worker("seat-0")
    facts = {"fact": MEGABYTE}
    say(
        stage,
        messages.Hello("other", "seat-1", "host", 1, BASE_DIGEST, facts),
        messages.HandBack(worker.name, worker.current.eval_id, MEGABYTE),
        messages.Draining(worker.name, MEGABYTE),
        messages.Arrived(worker.name, 1, False, MEGABYTE),
        messages.Goodbye(worker.name, MEGABYTE),
        messages.StopRequest("\x1b[2J" + MEGABYTE),
    )
    assert stage.run().reason.startswith("\\x1b[2J")
    assert max(len(msgspec.msgpack.encode(record)) for record in stage.records) < 5000


def test_a_failed_evaluation_keeps_the_ends_of_its_error():
    stage = Stage(make_config())
    _, report = about_to_report(stage)
    failed = replace(report.result, fitness=math.nan, episodes=(), error="begin" + MEGABYTE + "end")
    say(stage, replace(report, result=failed))
    (record,) = records_of(stage, journal.Reported)
    assert record.result.error.startswith("begin")
    assert record.result.error.endswith("end")
    assert len(record.result.error) <= 2000


# --- what earlier heads believed ------------------------------------------------------------------------------------


def test_a_poisoned_result_in_an_old_journal_is_void_when_the_next_head_starts():
    stage = Stage(make_config())
    worker, report = about_to_report(stage)
    stage.records.append(journal.Reported(1.0, worker.name, of_result(fitness=1e200)(report).result, 0.5, 0.9, 1))
    worker.unacked.clear()
    stage.start_head()
    (void,) = records_of(stage, journal.Voided)
    assert "fitness is 1e+200" in void.reason
    assert stage.run().finished


def test_a_poisoned_evaluation_of_the_centre_in_an_old_journal_is_made_again():
    stage = undisturbed()
    place, last = max(
        (place, r)
        for place, r in enumerate(stage.records)
        if isinstance(r, journal.Reported) and r.result.eval_id.purpose != "train"
    )
    poisoned = replace(last, result=replace(last.result, fitness=1e300))
    stage.records = [*stage.records[:place], poisoned]
    stage.exit = None
    stage.workers.clear()
    stage.start_head()
    assert [record.eval_id for record in records_of(stage, journal.Voided)] == [last.result.eval_id]
    stage.add_worker("seat-5")
    assert stage.run().finished
    assert stage.core.ledger.eval_fitness == undisturbed().core.ledger.eval_fitness


# --- how much one worker can make the head write ---------------------------------------------------------------------

FLOODS: dict[str, Callable[[str, int], AnyMessage]] = {
    "drains": lambda name, i: messages.Draining(name, "x"),
    "arrivals": lambda name, i: messages.Arrived(name, i, False, "x"),
    "lost groups": lambda name, i: messages.EpochReady(name, i % 5, False, "x"),
    "fetches": lambda name, i: messages.Fetch(name, 0, 2**53),
    "bad fetches": lambda name, i: messages.Fetch(name, -i - 1, 5),
    "drain requests": lambda name, i: messages.DrainRequest(name),
    "refused hellos": lambda name, i: messages.Hello(f"{name}.{i}", "s", "h", 1, 1, {}),
    "wrong hellos": lambda name, i: messages.Hello("", "s", "h", 1, 1, {}),
    "strangers": lambda name, i: messages.Arrived(f"nobody-{i}", i, False, "x"),
    "given-up leases": lambda name, i: messages.Hello(name, "seat-0", "host", 1, BASE_DIGEST, {}),
    "seats": lambda name, i: messages.Hello(f"{name}.{i}", "seat-0", "host", 1, BASE_DIGEST, {}),
    "poison": lambda name, i: Report(name, Result(EvalId(0, i % 4), math.inf, (), -1, 0.0, 0.0, 0.0), 0.0, 0.0),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_no_flood_of_one_worker_makes_the_head_write_much(flood: Callable[[str, int], AnyMessage], monkeypatch):
    monkeypatch.setattr(core, "JOINS_AT_ONCE", 50)
    stage = Stage(make_config(run={"max_failures_in_a_row": 10**6}))
    worker = stage.busy_worker("seat-0")
    before = len(stage.records)
    for i in range(3000):
        stage.now += 0.01
        say(stage, flood(worker.name, i))
        stage.to_workers.clear()
    written = stage.records[before:]  # in a minute
    assert len(written) < 4 * (50 + checks.JOINS_PER_MINUTE), Counter(type(record).__name__ for record in written)
    assert len(msgspec.msgpack.encode(written)) < 300_000


def test_events_that_were_left_out_are_summed_up():
    stage = Stage(make_config())
    worker = stage.busy_worker("seat-0")
    for i in range(100):
        say(stage, messages.Arrived(worker.name, i, False, "no"))
    stage.now += 5.0
    stage.handle(Tick())
    told = notes_of(stage).count("did not receive theta")
    assert checks.EVENTS_AT_ONCE <= told < 70
    assert f"{100 - told} events were left out: more than 60 a minute: {100 - told} of {worker.name}" in notes_of(stage)


def test_an_allowance_grows_back_and_no_further():
    allowance = Allowance(2, per_minute=60)
    assert [allowance.take(0.0) for _ in range(3)] == [True, True, False]
    assert [allowance.take(1.0) for _ in range(2)] == [True, False]
    assert [allowance.take(100.0) for _ in range(3)] == [True, True, False]
    assert not allowance.take(50.0), "a clock that was set back gives nothing away"


def test_no_worker_can_lease_more_than_one_evaluation():
    stage = Stage(make_config())
    worker = stage.busy_worker("seat-0")
    for slot in range(4):
        say(stage, messages.HandBack(worker.name, EvalId(7, 7), "x", holding=EvalId(0, slot)))
    leased = [entry for entry in stage.core.ledger.evaluations.values() if entry.state == "leased"]
    assert len(leased) == 1
    assert leased[0].assignment.eval_id == stage.core.crew.workers[worker.name].lease


def test_the_answer_to_a_fetch_has_a_bounded_size(monkeypatch):
    monkeypatch.setattr("hpc_es.transport.limits.MEMBERS_PER_ANSWER", 8)
    stage = Stage(make_config(run={"num_updates": 5}))
    worker = stage.add_worker("seat-0")
    while stage.core.ledger.version < 5:
        stage.move(stage.moves()[0])
    stage.to_workers.clear()
    say(stage, messages.Fetch(worker.name, 2, 2**53))
    (answer,) = [m for _, m in stage.to_workers if isinstance(m, messages.Records)]
    assert [commit.version for commit in answer.commits] == [2, 3]  # of four members each


# --- whatever is said -----------------------------------------------------------------------------------------------

integers = st.one_of(
    st.integers(-2, 5), st.sampled_from([2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, -(2**31), -(2**63)])
)
floats = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0, 1e100, 1e200, -1e200, math.nan, math.inf]))
texts = st.one_of(st.text(max_size=5), st.sampled_from(["terminated", "seat-0", "seat-0.0", "seat-1.1", "\x1b[2J"]))
ids = st.builds(EvalId, st.integers(0, 2), st.integers(-2, 4), st.integers(0, 1)) | st.builds(
    EvalId, integers, integers, integers
)


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type, whatever its rule says."""
    what, inner = bounds.shape(hint)
    if what == "ruled":
        return strategy_of(get_args(hint)[0])
    if what == "optional":
        return st.none() | strategy_of(inner)
    if what == "many":
        return st.lists(strategy_of(inner), max_size=3).map(tuple)
    if what == "struct":
        return ids if inner is EvalId else anything(inner)
    plain = {int: integers, float: floats, str: texts, dict[str, str]: st.dictionaries(texts, texts, max_size=3)}
    return plain[hint] if hint in plain else st.from_type(hint)


def anything(kind: type[Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: strategy_of(hint) for name, hint in hints.items()})


messages_of_any_kind = st.one_of([anything(kind) for kind in FROM_WORKERS if kind is not messages.StopRequest])


def altered(report: Report) -> st.SearchStrategy[Report]:
    """Honest reports with one field changed."""
    hints = get_type_hints(Result, include_extras=True)

    def change(name: str) -> st.SearchStrategy[Report]:
        return strategy_of(hints[name]).map(lambda value: of_result(**{name: value})(report))

    return st.sampled_from(sorted(hints)).flatmap(change)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_the_head_continues_with_a_sound_journal_whatever_messages_arrive(data):
    stage = Stage(make_config(run={"max_failures_in_a_row": 10**6}))
    for k in range(2):
        stage.add_worker(f"seat-{k}")
    for _ in range(data.draw(st.integers(0, 60), label="moves")):
        if stage.exit is not None:
            break
        what = data.draw(st.sampled_from([*stage.moves(), "odd", "altered", "restart"]), label="next")
        if what == "odd":
            stage.to_head.appendleft(data.draw(messages_of_any_kind))
        elif what == "altered":
            reports = [m for m in stage.to_head if isinstance(m, Report)]
            if reports:
                stage.to_head.appendleft(data.draw(altered(reports[0])))
        elif what == "restart":
            stage.start_head()
        else:
            stage.move(what)
    stage.add_worker("seat-0")
    stage.add_worker("seat-9")
    stage.run()
    refuse_impossible_records(stage)


def refuse_impossible_records(stage: Stage) -> None:
    """Every number is finite, every text is bounded, and every result that counts is possible."""
    started = replace(stage.records[0], config_json=stage.config.model_dump_json())
    history = verify.AuditedHistory([started, *(r for r in stage.records[1:] if not isinstance(r, journal.Started))])
    assert verify._check_results(history, stage.core.ledger.digests) == []
    for commit in history.commits.values():
        assert verify._check_scalars(history, commit) == []
    for record in stage.records:
        if isinstance(record, journal.Reported) and record.result.error is not None:
            assert math.isnan(record.result.fitness)
            record = replace(record, result=replace(record.result, fitness=0.0))
        assert all(math.isfinite(value) for value in numbers_in(msgspec.to_builtins(record)))
        assert len(msgspec.msgpack.encode(record)) < 20_000


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, float):
        yield value


def tables(stage: Stage, folder: Path) -> Any:
    """run.h5 of the stage's journal, read back."""
    started = replace(stage.records[0], config_json=stage.config.model_dump_json())
    writer = JournalWriter.create(RunPaths(folder), lambda generation, size: started)
    for record in stage.records[1:]:
        writer.append(record)
    writer.close()
    return read(rebuild(folder))
