"""`hpc-es env`: what there is, the contract suite from the command line, and a person in the agent's seat."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpc_es import envs
from hpc_es.cli import app
from hpc_es.envs import sudoku_puzzles

THIRD_PARTY = '''
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.errors import EnvError

class Parrot(Env):
    """Say what you hear."""

    num_tasks = 3

    def __init__(self, fault: str = "none") -> None:
        self.fault, self.word = fault, None

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"no task {task}")
        self.word = f"word{task}"
        return Observation((Message("system", "Repeat."), Message("user", self.word)))

    def step(self, text: str) -> StepResult:
        if self.word is None:
            raise EnvError("no episode")
        if self.fault == "raises":
            raise ZeroDivisionError("an odd word")
        word, self.word = self.word, None
        return StepResult(None, float(text == word), terminated=True, truncated=False, success=text == word)
'''


def invoke(*arguments: str, lines: str = "") -> Result:
    return CliRunner().invoke(app, ["env", *arguments], input=lines)


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A third-party environment in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    Path("my_parrot.py").write_text(THIRD_PARTY)
    return "my_parrot:Parrot"


def test_list_names_every_built_in_environment_with_its_description_and_options() -> None:
    listed = json.loads(invoke("list", "--json").stdout)
    assert list(listed) == envs.registered()
    assert listed["sudoku"]["what"].startswith("Sudoku for agents")
    assert listed["sudoku"]["options"]["size"] == "9"
    assert listed["sudoku"]["choices"]["action"] == ["move", "digit"]
    assert "countdown" in invoke("list").stdout


def test_list_explains_the_options_of_one_environment(parrot: str) -> None:
    shown = invoke("list", "webshop").stdout
    assert "actions = 'free'  (free, rank)" in shown
    assert "max_text: most characters of each text" in shown
    assert "Errors:" not in shown
    assert "fault = 'none'" in invoke("list", parrot).stdout
    assert "did you mean 'sudoku'" in invoke("list", "sudoko").stderr


def test_check_says_that_evaluations_would_play_training_tasks(parrot: str) -> None:
    assert "evaluations will play training tasks" in " ".join(invoke("check", parrot).stdout.split())
    assert "training tasks" not in invoke("check", "sudoku", "size=4", "blanks=2").stdout


def test_check_passes_an_environment_that_keeps_the_contract(parrot: str) -> None:
    result = invoke("check", parrot, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"env": parrot, "options": {}, "ok": True, "num_tasks": 3}
    assert invoke("check", "sudoku", "size=4", "blanks=2").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("my_parrot:Parrot", "fault=raises"), 1, "breaks the contract: step raised ZeroDivisionError"),
        (("my_parrot:Parrot", "falt=raises"), 2, "did you mean 'fault'"),
        (("my_parrot:Parrots",), 2, "cannot be imported"),
        (("no_such_module:Env",), 2, "No module named 'no_such_module'"),
        (("sudoko",), 2, "did you mean 'sudoku'"),
        (("sudoku", "size"), 2, "must look like option=value"),
        (("sudoku", "size=5"), 2, "option size=5"),
    ],
)
def test_a_mistake_is_reported_in_one_message(parrot: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = invoke("check", *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_person_can_play_an_episode_to_its_end(parrot: str) -> None:
    result = invoke("play", parrot, "--task", "2", lines="\nword2\n")
    assert result.exit_code == 0
    assert result.stdout.count("word2") == 2  # shown, and again after the empty line
    assert "[system]" in result.stdout
    assert "reward 1, solved" in result.stdout


def test_a_person_can_solve_a_sudoku_by_the_numbers_of_the_choices() -> None:
    (puzzle,) = sudoku_puzzles.generate(4, 2, "train", 0, 1)
    lines = "".join(f"#{puzzle.solution[cell]}\n" for cell in puzzle.blanks)
    result = invoke("play", "sudoku", "size=4", "blanks=2", "action=digit", lines=f"7\n#9\n{lines}")
    assert result.exit_code == 0
    assert result.stdout.count("answer with one of the 4 choices") == 2
    assert "after 2 turns: reward 1, solved" in result.stdout


def test_a_line_that_ends_in_a_backslash_continues_on_the_next(parrot: str) -> None:
    assert "reward 0, not solved" in invoke("play", parrot, lines="word0\\\nword0\n").stdout
    Path("echo.py").write_text(THIRD_PARTY.replace("text == word", "text == 'a\\nb'"))
    assert "reward 1, solved" in invoke("play", "echo:Parrot", lines="a\\\nb\n").stdout


def test_a_person_who_leaves_ends_the_command_with_the_code_of_a_stop(parrot: str) -> None:
    assert invoke("play", parrot).exit_code == 3


def test_an_environment_that_raises_while_it_is_played_is_named(parrot: str) -> None:
    result = invoke("play", parrot, "fault=raises", lines="hello\n")
    assert result.exit_code == 1
    assert "my_parrot:Parrot: step raised ZeroDivisionError: an odd word" in result.stderr
    assert "no task 9" in invoke("play", parrot, "--task", "9").stderr
