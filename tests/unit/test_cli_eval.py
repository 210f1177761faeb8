"""`hpc-es eval` and `hpc-es evals` as they are typed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eval_bench import LATER, OTHER, TASK_FILE, a_run, play
from typer.testing import CliRunner, Result

from hpc_es.cli import app
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths
from hpc_es.recorded.eval_config import EvalRequest
from hpc_es.worker.trajectories import read_trajectory_file


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return a_run(tmp_path, monkeypatch)


def invoke(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_the_command_prints_a_table_and_the_same_as_json(root: Path) -> None:
    table = invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--name", LATER).stdout
    assert "lab actions=3, T=1 max_tokens=1: 12 tasks x 3 repeats" in table
    assert "theta_0" in table
    assert "tasks or decoding differ from the run's own" in table
    answer = json.loads(
        invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--name", LATER, "--json").stdout
    )
    assert (answer["name"], answer["num_tasks"], answer["num_repeats"]) == (LATER, 12, 3)
    first, second = answer["evaluated"]
    assert (first["difference"], second["version"]) == (None, 4)
    assert second["difference"]["reward"]["difference"] == pytest.approx(second["reward"] - first["reward"])
    assert [at["k"] for at in second["pass_at"]] == [1, 2, 3]
    assert first["success_interval"][0] <= first["success"] <= first["success_interval"][1]


def test_ranks_that_cannot_share_a_model_are_refused_before_an_engine_starts(root: Path) -> None:
    model = write_tiny_llama("tiny")
    options = ("--task", "task.yaml", "--out", "evals/tiny", "engine.kind=vllm", "engine.tensor_parallel=3")
    said = invoke("eval", model, *options, code=2).output
    assert "engine.tensor_parallel=3 does not divide the model's 4 attention heads" in " ".join(said.split())
    assert not Path("evals/tiny").exists()


LOUD = """\
import subprocess

from hpc_es.envs.lab import Lab

class Loud(Lab):
    def reset(self, task):
        print("hello from the environment")
        subprocess.run(["echo", "hello from its program"], check=True)
        return super().reset(task)
"""


def test_json_stands_alone_on_stdout_whatever_an_environment_prints(root: Path) -> None:
    Path("loud.py").write_text(LOUD)
    Path("task.yaml").write_text(TASK_FILE.replace("env: lab", "env: 'loud:Loud'"))
    command = [sys.executable, "-m", "hpc_es", "eval", str(root), "--task", "task.yaml", "--num-tasks", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["num_tasks"] == 2
    assert "hello from the environment" in done.stderr
    assert "hello from its program" in done.stderr


def test_in_a_narrow_terminal_columns_go_below_one_another_and_no_number_is_cut(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_es.cli.output.WIDTH_IN_FILES", 60)
    printed = invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--repeats", 9).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    assert printed.count("version ") > 2
    for words in ("pass@2", "pass@4", "pass@8", "pass@9", "reward - theta_0", "solved - theta_0"):
        assert printed.count(words) == 1


def test_one_version_answers_at_the_top(root: Path) -> None:
    answer = json.loads(invoke("eval", root, "--version", 1, "--num-tasks", 5, "--json").stdout)
    assert (answer["version"], answer["num_tasks"]) == (1, 5)
    assert {"fitness", "success"} <= set(answer)
    assert (Path(answer["run"]) / "evals" / f"{answer['name']}.hpcj").is_file()


def test_greedy_repeats_are_allowed_and_said_to_be_worth_little(root: Path) -> None:
    assert "differ only by effects of batching" in invoke("eval", root, "--repeats", 2, "--num-tasks", 4).stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "nowhere is not a run folder (with config.yaml), a model folder (with config.json), or the URL"),
        (["run", "--versions", "0", "--version", "1"], "--versions 0 and --version 1 exclude each other"),
        (["run", "--versions", "7"], "version 7 does not exist"),
        (["run", "--name", "../x"], "--name ../x must consist of letters"),
        (["run", "--name", ""], "--name  must consist of letters"),
        (["run", "--name", "run"], "--name run is reserved for the run's own evaluations"),
        (["run", "--out", "x"], "--out x is for models and endpoints"),
        (["model", "--model", "x", "--task", "task.yaml"], "--model x is for runs and endpoints; model is a model"),
        (["run", "--model", "x"], "model.path=x: no such folder"),
        (["model"], "model has no tasks of its own: name them with --task FILE"),
        (["model", "--task", "task.yaml", "--versions", "3"], "model is not a run, so it has only version 0"),
        (["http://localhost:1/v1", "--task", "task.yaml"], "name one of its models by --model NAME"),
        (["ftp://a", "--model", "m", "--task", "task.yaml"], "must be a base URL with http:// or https://"),
    ],
)
def test_a_mistake_is_reported_in_one_line(root: Path, arguments: list[str], complaint: str) -> None:
    assert complaint in invoke("eval", *arguments, code=2).stderr


def test_an_endpoint_that_does_not_answer_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001, raising=False)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01, raising=False)
    answer = invoke("eval", "http://127.0.0.1:9/v1", "--model", "m", "--task", "task.yaml", "task.chat=true", code=1)
    assert "http://127.0.0.1:9/v1 was not reached or did not answer" in answer.stderr


def test_all_recorded_evaluations_are_listed_and_compared(root: Path) -> None:
    assert "no complete evaluation" in invoke("evals", root).stdout
    invoke("eval", root, "--versions", "0,4", "--task", "task.yaml", "--name", LATER)
    invoke("eval", root, "--version", 2, "--name", "own")
    invoke("eval", "model", "--task", "task.yaml")
    listed = invoke("evals", root, "evals/model-task").stdout
    for words in (f"{root}, later\n", f"{root}, own\n", "evals/model-task, its own evaluations\n", "lab, greedy"):
        assert words in listed
    answer = json.loads(invoke("evals", root, "--against", "evals/model-task", "--json").stdout)
    rows = {(row["source"], row["version"]): row["difference"] for row in answer["evaluated"]}
    assert rows[LATER, 0]["reward"]["difference"] == 0.0
    assert rows[LATER, 4]["reward"]["num_tasks"] == 12
    assert rows["own", 2] is None  # by another protocol
    answer = json.loads(invoke("evals", root, "--against", f"{root}@2", "--json").stdout)
    assert answer["evaluated"][-1]["difference"]["success"]["p_value"] == 1.0
    assert "no evaluation of that version" in invoke("evals", root, "--against", f"{root}@3", code=2).stderr
    assert "must be one run" in invoke("evals", root, "--against", "a,b", code=2).stderr
    assert "is not a run" in invoke("evals", "nowhere", code=2).stderr


def test_a_sample_of_the_episodes_is_kept_word_by_word(root: Path) -> None:
    play(root, "0,1", EvalRequest(OTHER.task, num_tasks=8, repeats=2, keep=7))
    kept = list(read_trajectory_file(RunPaths(root).later_eval_trajectories(LATER)))
    assert sorted((k.eval_id.version, k.episode.task) for k in kept) == [(v, t) for v in (0, 1) for t in range(7)]
    shown = invoke("episodes", root, "--eval", LATER)
    assert "14 kept episodes" in shown.stdout
    assert f"--eval {LATER} --version 1 --member -1" in shown.stdout
    assert "mean reward" in invoke("episodes", root, "--eval", LATER, "--version", 1, "--member", -1).stdout
    assert "no later evaluation 'x', only later" in invoke("episodes", root, "--eval", "x", code=2).stderr
