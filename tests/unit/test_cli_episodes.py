"""`hpc-es episodes` on a recorded run, some of whose episodes were kept word by word."""

import json
from pathlib import Path

import pytest
from fake_run import write_run
from typer.testing import CliRunner, Result

from hpc_es.cli import app
from hpc_es.envs.base import Message
from hpc_es.paths import RunPaths
from hpc_es.records import EvalId
from hpc_es.store import read
from hpc_es.worker.trajectories import Trajectory, TrajectoryFile, Turn


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Members 0 and 1 of version 2 and the evaluated policy at version 0 each have an episode that was kept."""
    write_run(tmp_path)
    paths = RunPaths(tmp_path)
    paths.config.write_text("run: {name: fake, num_updates: 4}\n")
    keep(paths, 2, 0, "set 1 2 3")
    keep(paths, 2, 1, "open [sesame]", text="the \N{DOOR} is shut [/bold]")
    keep(paths, 0, -1, "wait")
    return tmp_path


def keep(paths: RunPaths, version: int, slot: int, answer: str, text: str = "what now?") -> None:
    from hpc_es.records import Episode, from_first_release

    episode = Episode(7, 0.5, False, 2, 1, 10, 5, 0.1, 0.2, "truncated")
    turns = (Turn((Message("system", "rules"), Message("user", text)), answer, 0.0, invalid=True),)
    trajectory = Trajectory(from_first_release(EvalId(version, slot)), 0, episode, turns)
    TrajectoryFile(paths.trajectory_file(f"w{slot}"), f"w{slot}").append([trajectory])


def episodes(run: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["episodes", str(run), *map(str, arguments)])


def test_without_a_member_it_lists_the_kept_episodes(run: Path) -> None:
    result = episodes(run)
    assert result.exit_code == 0
    assert "3 kept episodes\nread one with" in result.stdout
    listed = json.loads(episodes(run, "--json").stdout)["kept"]
    assert [(each["version"], each["member"]) for each in listed] == [(0, -1), (2, 0), (2, 1)]
    assert [each["member"] for each in json.loads(episodes(run, "--version", 0, "--json").stdout)["kept"]] == [-1]


def test_a_kept_episode_is_shown_word_by_word_whatever_its_words(run: Path) -> None:
    shown = episodes(run, "--version", 2, "--member", 1).stdout
    for words in (
        "open [sesame]",
        "the \N{DOOR} is shut [/bold]",
        "[system] rules",
        "refused",
        "1 further turn",
    ):
        assert words in shown
    assert "truncated after 2 turns, reward 0.5, not solved" in shown


def test_text_from_models_and_programs_cannot_control_the_terminal(run: Path) -> None:
    keep(RunPaths(run), 2, 3, "\x1b[2Jclear", text="title \x1b]0;mine\x07 \x9b5m\ttab\r\nnext")
    shown = episodes(run, "--member", 3).output
    assert r"\x1b[2Jclear" in shown
    assert r"title \x1b]0;mine\x07 \x9b5m" in shown
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}


def test_the_version_is_the_last_one_that_was_kept_unless_it_is_given(run: Path) -> None:
    assert "open [sesame]" in episodes(run, "--member", 1).stdout
    assert "wait" in episodes(run, "--member", -1).stdout


def test_all_episodes_of_a_member_are_there_in_numbers(run: Path) -> None:
    table = read(run).episodes
    table = table[(table["dispatch_version"] == 1) & (table["slot"] == 0) & (table["source"] == "run")]
    table = table[table["replacement"] == table["replacement"].max()]
    result = episodes(run, "--version", 1, "--member", 0, "--json")
    found = json.loads(result.stdout)
    assert [row["task"] for row in found["episodes"]] == table["task"].tolist()
    assert [row["reward"] for row in found["episodes"]] == table["reward"].tolist()
    assert found["kept"] == []
    assert "store.trajectories" in result.stderr


def test_the_evaluated_policy_is_shown_on_all_its_tasks(run: Path) -> None:
    """They are played in batches, each a slot of its own."""
    table = read(run).episodes
    table = table[(table["dispatch_version"] == 0) & (table["kind"] == "eval") & (table["source"] == "run")]
    assert table["slot"].nunique() > 1
    keep(RunPaths(run), 0, -2, "later batch")
    result = episodes(run, "--version", 0, "--member", -1, "--json")
    found = json.loads(result.stdout)
    assert sorted(row["task"] for row in found["episodes"]) == sorted(table["task"])
    assert len(found["kept"]) == 2
    assert "later batch" in result.stderr


def test_a_long_list_says_how_to_see_the_rest(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_es.cli.episodes.NUM_LISTED", 2)
    assert "the newest 2 of 3 kept episodes; the others: --all, or --version V" in episodes(run).stdout
    assert "3 kept episodes" in episodes(run, "--all").stdout
    assert "1 kept episode\n" in episodes(run, "--version", 0).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--version", 99, "--member", 0), "no episode of member 0 at version 99"),
        (("--version", 1, "--member", 0, "--task", 10**6), "on task 1000000"),
        (("--member", 77), "no episode of member 77 is kept"),
        (("--version", 99), "at version 99: there are some of version "),
    ],
)
def test_missing_episodes_are_reported(run: Path, arguments: tuple[object, ...], message: str) -> None:
    result = episodes(run, *arguments)
    assert (result.exit_code, message in result.stderr) == (2, True)
