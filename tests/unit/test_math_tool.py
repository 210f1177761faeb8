"""math_tool: how turns are read, how episodes go, and the files that problems come from."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import scripted
from builders import built_assignment
from hypothesis import given
from hypothesis import strategies as st
from repository import CONFIGS

from hpc_es import envs
from hpc_es.config import load
from hpc_es.config.schema import Config
from hpc_es.engine.base import Completion
from hpc_es.envs import problems
from hpc_es.envs.base import StepResult
from hpc_es.envs.check import check_env
from hpc_es.envs.math_tool import MathTool, prompt
from hpc_es.envs.math_tool.judge import number
from hpc_es.envs.math_tool.prompt import Answer, Call, Refusal
from hpc_es.envs.sandbox import Limits
from hpc_es.errors import ConfigError, EnvError
from hpc_es.records import EvalId
from hpc_es.worker.rollout import Player

TASKS = CONFIGS / "tasks"
PROGRAM = "```python\nprint(14 * 24 // 6)\n```"
RIGHT = r"So it is \boxed{56}."
"""Answer of the first example."""


def _env(**options: Any) -> MathTool:
    env = envs.make("math_tool", **options)
    assert isinstance(env, MathTool)
    return env


def _shown(result: StepResult) -> str:
    assert result.observation is not None
    (message,) = result.observation.messages
    return message.content


# --- an episode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"style": "short", "require_tool": False, "max_turns": 3}])
def test_it_keeps_the_contract(options: dict[str, Any]) -> None:
    check_env(lambda: envs.make("math_tool", **options), num_episodes=1)


def test_an_answer_after_a_program_is_a_success() -> None:
    env = _env()
    asked = env.reset(0).messages
    assert [message.role for message in asked] == ["system", "user"]
    assert asked[1].content.startswith("A baker makes 14 trays")
    ran = env.step(f"First I compute.\n{PROGRAM}")
    assert (_shown(ran), ran.invalid, ran.reward) == ("Output:\n56", False, 0)
    end = env.step(RIGHT)
    assert (end.reward, end.success, end.terminated, end.truncated) == (1, True, True, False)
    with pytest.raises(EnvError, match="reset first"):
        env.step(RIGHT)


def test_a_wrong_answer_is_worth_nothing_and_ends_it() -> None:
    env = _env()
    env.reset(0)
    env.step(PROGRAM)
    end = env.step(r"\boxed{55}")
    assert (end.reward, end.success, end.terminated) == (0, False, True)


def test_an_answer_before_any_program_is_never_a_success() -> None:
    strict, lenient = _env(), _env(require_tool=False)
    for env, reward in ((strict, 0), (lenient, 1)):
        env.reset(0)
        end = env.step(RIGHT)
        assert (end.reward, end.success, end.terminated) == (reward, bool(reward), True)
        assert end.info["right"]
    assert (strict.facts(0).horizon, lenient.facts(0).horizon) == (2, 1)


def test_a_turn_that_asks_for_nothing_is_refused_and_counts() -> None:
    env = _env(max_turns=3)
    env.reset(0)
    refused = env.step("I wonder.")
    assert refused.invalid
    assert "neither a block nor an answer" in _shown(refused)
    assert _shown(env.step("Hm.")).endswith("This is your last turn: answer now.")
    end = env.step(PROGRAM)
    assert (end.truncated, end.terminated, end.observation, end.reward) == (True, False, None, 0)


def test_the_published_protocol_has_bash_alone_and_no_hint() -> None:
    env = _env(tools=["bash"], hint=False, max_turns=3)
    told = env.reset(0).messages[0].content
    assert "begins with ```bash and ends" in told
    assert "```python" not in told
    refused = env.step(PROGRAM)
    assert refused.invalid
    assert "There is no python tool" in _shown(refused)
    assert "Write one block of ```bash, closed by ```" in _shown(refused)
    assert _shown(env.step("```bash\npython3 -c 'print(7 * 8)'\n```")) == "Output:\n56"  # and no word on the last turn
    assert env.step(RIGHT).success


@pytest.mark.parametrize(("tools", "example"), [(["bash"], "echo $((12 * 7))"), (["python"], "print(12 * 7)")])
def test_a_short_prompt_shows_a_tool_that_there_is(tools: list[str], example: str) -> None:
    env = _env(tools=tools, style="short")
    assert f"```{tools[0]}\n{example}\n```" in env.reset(0).messages[0].content
    assert f"Write a ```{tools[0]} block" in _shown(env.step("Hm."))


def test_math_tool_requires_at_least_one_tool() -> None:
    for tools in ([], ["perl"]):
        with pytest.raises(ConfigError, match="option tools"):
            _env(tools=tools)


def test_a_refused_turn_does_not_count_as_a_tool_call() -> None:
    env = _env()
    env.reset(0)
    env.step("```python\nprint(")
    assert env.step(RIGHT).reward == 0


def test_files_stay_within_an_episode_and_not_beyond() -> None:
    env = _env()
    env.reset(0)
    env.step("```bash\necho 7 > seven\n```")
    assert (
        _shown(env.step("```python\nimport sympy\nprint(sympy.Integer(open('seven').read()) ** 2)\n```"))
        == "Output:\n49"
    )
    env.reset(0)
    assert _shown(env.step("```bash\nls\n```")) == "Output:\n(nothing)"
    env.close()


def test_errors_of_a_program_are_shown() -> None:
    env = _env(limits={"seconds": 0.5, "output_chars": 100, "processes": 16})
    env.reset(0)
    assert "ZeroDivisionError" in _shown(env.step("```python\n1 / 0\n```"))
    assert _shown(env.step("```bash\nexit 3\n```")) == "Output:\n(nothing)\n[exit status 3]"
    assert _shown(env.step("```bash\necho a; sleep 9\n```")) == "Output:\na\n[ended: it ran for 0.5 seconds]"
    assert "bytes left out" in _shown(env.step("```bash\nseq 1000\n```"))
    assert "more than 16 processes" in _shown(env.step("```bash\nf() { f | f; }; f\n```"))
    assert "wrote without end" in _shown(env.step("```bash\nyes\n```"))
    assert env.step(RIGHT).success
    env.close()


def test_a_sandbox_that_fails_is_an_error_and_no_reward() -> None:
    env = _env()
    env.reset(0)
    env.step(PROGRAM)
    assert env._sandbox is not None
    assert env._sandbox._first is not None
    env._sandbox._first.kill()
    with pytest.raises(EnvError, match="the sandbox has ended"):
        env.step(PROGRAM)
    env.close()


def test_many_episodes_at_once_in_threads_keep_apart() -> None:
    def play(task: int) -> str:
        env = _env()
        env.reset(task)
        env.step(f"```bash\necho {task} > mine\n```")
        shown = _shown(env.step("```bash\ncat mine\n```"))
        env.step(RIGHT)
        return shown

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(8))) == [f"Output:\n{task}" for task in range(8)]


def test_the_loop_keeps_all_turns_and_forgets_none() -> None:
    env = _env()
    assert (env.history, env.forgets, env.strip_thinking) == (None, False, True)


class _Student:
    """An engine that thinks at length, runs a program, and answers what the program printed."""

    tokenizer = scripted.Letters()

    async def generate(self, prompt: list[int], sampling: object, *, seed: int, choices: object = None) -> Completion:
        _, _, printed = "".join(map(chr, prompt)).rpartition("Output:\n")
        said = f"\\boxed{{{printed}}}" if printed.isdigit() else PROGRAM
        return Completion(f"<think>{'x' * 1000} \\boxed{{1}}</think>{said}", len(prompt), 1, truncated=False)


@pytest.mark.parametrize(
    ("room", "outcome"),
    [(200, ("terminated", True, 1.0, 2)), (20, ("context", False, 0.0, 1))],
    ids=["fits", "does not"],
)
def test_a_worker_plays_it_and_episodes_that_exceed_the_context_fail(room: int, outcome: tuple[Any, ...]) -> None:
    first = "\n".join(message.content for message in _env().reset(0).messages)
    config = Config.model_validate(
        {
            "run": {"name": "math", "num_updates": 1},
            "model": {"path": "none"},
            "task": {"env": "math_tool", "chat": False},
            "sampling": {"max_tokens": 10},
            "engine": {"kind": "transformers", "max_model_len": len(first) + room},
        }
    )
    player = Player(config, _Student(), lambda kind: envs.make_for(config, kind))
    episodes = asyncio.run(player.play(built_assignment(EvalId(0, 0), 1, "train", None, (0, 0), sampling_seed=11)))
    assert {(each.ended, each.success, each.reward, each.turns) for each in episodes} == {outcome}


# --- reading a turn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("```bash\nls\n```", Call("bash", "ls\n")),
        ("```sh\nls\n``` ", Call("bash", "ls\n")),
        ("Let me see.\n  ```Python \r\nprint(1)\r\n  ```\r\nThen", Call("python", "print(1)\r\n")),
        ("```python print(1)```", Call("python", "print(1)")),
        ("```py\nx = '```'\n```", Call("python", "x = '```'\n")),
        ("```bash\none\n```\nOutput: 5\n```python\ntwo\n```\n\\boxed{5}", Call("bash", "one\n")),
        ("```text\n\\boxed{2}\n```", Answer("2")),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", Answer(r"\frac{1}{2}")),
        (r"\boxed {\{1, 2\}}", Answer(r"\{1, 2\}")),
        (r"\fbox{3} \boxed{", Refusal("There is neither a block nor an answer in this.")),
        (r"{ \boxed{4\}} }", Answer(r"4\}")),
        (r"\boxed{5 \boxed{6}}", Answer("6")),
        (r"\boxed{}", Refusal("There is neither a block nor an answer in this.")),
        ("```python\nprint(1)", Refusal("The block has no end, so it was not run.")),
        ("```python", Refusal("The block has no end, so it was not run.")),
        ("```python\n \n```", Refusal("The block is empty.")),
        ("answer 5", Refusal("There is neither a block nor an answer in this.")),
    ],
)
def test_a_turn_is_its_first_block_or_else_its_last_box(text: str, asked: object) -> None:
    assert prompt.read(text) == asked


@given(st.text(st.sampled_from("`{}\\boxed python\n \r3"), max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(prompt.read(text), Call | Answer | Refusal)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", ["\\boxed{", "```python\n", "`", " ```", "{", "```bash x", "```python \t", " "])
def test_a_turn_that_repeats_itself_is_read_quickly(part: str) -> None:
    prompt.read(part * 20_000)
    prompt.read("```bash" + part * 60_000)


# --- files -------------------------------------------------------------------------------------------------------


def test_the_examples_are_right_and_in_two_splits() -> None:
    train, held_out = _env(), _env(split="eval")
    assert (train.num_tasks, held_out.num_tasks) == (16, 8)
    ids = [env.facts(task).id for env in (train, held_out) for task in range(env.num_tasks)]
    assert len(set(ids)) == 24
    assert ids[0] == "example train 1"


def test_the_published_files_are_read(shared_data: Path) -> None:
    folder = shared_data / "math"
    expected = {
        ("dapo", "train"): (400, "dapo_456d6073-53a4-448d-9a86-bdf3e3aea918", "-1"),
        ("dapo", "eval"): (100, None, "31"),
        ("aime_2026", "eval"): (30, "aime_2026_001", "277"),
        ("gsm8k", "eval"): (1319, "gsm8k_test 1", "18"),
    }
    for (data, split), (count, name, answer) in expected.items():
        found = problems.read(problems.find(data, split, folder), split)
        assert (len(found), found[0].answer) == (count, answer)
        assert name in (None, found[0].id)
        assert not any("Answer:" in problem.question or "####" in problem.answer for problem in found)
        assert all(number(problem.answer) is not None for problem in found)
        env = _env(data=data, data_dir=folder, split=split)
        assert env.facts(count - 1).id == found[-1].id


def test_no_problem_of_dapo_is_both_trained_and_evaluated_on(shared_data: Path) -> None:
    train, held_out = (problems.read(problems.find("dapo", s, shared_data / "math")) for s in ("train", "eval"))
    assert not {problem.id for problem in train} & {problem.id for problem in held_out}
    assert not {problem.question for problem in train} & {problem.question for problem in held_out}


def test_your_own_file_is_read(tmp_path: Path) -> None:
    lines = [
        {"problem": "One?", "answer": 1, "split": "train"},
        {"question": "Two\u2028?", "answer": "x\n#### 2", "id": 7},
        {"question": "Three?", "answer": "3", "split": "eval"},
    ]
    (tmp_path / "mine-train.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    env = _env(data="mine-{split}.jsonl", data_dir=tmp_path)
    assert [env.facts(task).id for task in range(env.num_tasks)] == ["mine-train 1", "7"]
    assert env.reset(1).messages[1].content == "Two\u2028?"
    assert _env(data=str(tmp_path / "mine-train.jsonl"), split="eval").facts(1).id == "mine-train 5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problems"),
        ("\n \n", "has no problems"),
        ('{"question": "a", "answer": "1"}\n{"question": "b", "ans', "line 2: .*column"),
        ('{"question": "a", "answer": "1"}\n{"question": "b"}', "line 2: the answer is None"),
        ('{"answer": "1"}', "line 1: the question is None"),
        ('{"question": " ", "answer": "1"}', "line 1: the question is ' '"),
        ('{"question": "a", "answer": "x ####"}', "line 1: the answer is 'x ####'"),
        ('{"question": "a", "answer": true}', "line 1: the answer is True"),
        ("[1]", "line 1: this is list"),
        ('{"id": 1, "question": "a", "answer": "1"}\n\n{"id": 1, "question": "b", "answer": "1"}', "line 3: .*id '1'"),
        ('{"question": "a", "answer": "1", "split": "eval"}', "has no problems of the split train"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.jsonl.*{message}"):
        envs.make("math_tool", data=str(path))


def test_bytes_that_are_not_text_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xff\xfe")
    for name in (path, tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read|must be one of"):
            envs.make("math_tool", data=str(name))


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    for count in (1, 2):
        path.write_text('{"question": "a", "answer": "1"}\n' * count)
        assert _env(data=str(path)).num_tasks == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "aime_2026", "data_dir": "x"}, "is for evaluation only"),
        ({"data": "dapo"}, "needs data_dir, the folder with dapo_evolve.jsonl"),
        ({"data": "dapu"}, "must be one of dapo, aime_2026, gsm8k"),
        ({"limits": {"second": 3}}, "limits.second"),
        ({"max_turns": 0}, "max_turns"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        envs.make("math_tool", **options)


# --- presets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_tasks"), [("dapo", 100), ("aime", 30), ("gsm8k", 256)])
def test_presets_have_the_published_settings_and_play_the_published_problems(
    name: str, num_tasks: int, shared_data: Path
) -> None:
    config = load(TASKS / f"math_tool_{name}.yaml", [f"task.options.data_dir={shared_data / 'math'}"]).config
    es, sampling = config.es, config.sampling
    assert (config.run.num_updates, es.population, es.tasks_per_member, es.alpha.start) == (25, 16, 16, 5e-4)
    assert (es.sigma.kind, es.sigma.start, es.sigma.end) == ("cosine", 1e-3, 5e-4)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.presence_penalty) == (1, 1, 40, 2)
    assert (sampling.max_tokens, config.task.options["max_turns"], config.eval.repeats) == (4096, 50, 4)
    assert config.task.options["require_tool"]
    assert config.task.step_timeout > Limits().seconds + 30
    train, held_out = (envs.make_for(config, kind) for kind in ("train", "eval"))
    assert (train.num_tasks, config.eval.num_tasks) == (400, num_tasks)
    assert held_out.num_tasks >= num_tasks
    assert not {train.facts(task).id for task in range(400)} & {held_out.facts(task).id for task in range(num_tasks)}
