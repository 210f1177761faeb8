"""Check any environment against the contract of `base.py`.

`check_env(lambda: make("my.module:MyEnv"))` returns if the environment keeps the contract, and otherwise raises an
error that names the broken rule. It plays a few episodes with extreme answers; none of them may raise.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from hpc_es.calls import CALLS
from hpc_es.envs.base import Env, Observation, StepResult, is_reward
from hpc_es.envs.guard import process_guard
from hpc_es.envs.inspection import checked_count, checked_facts
from hpc_es.errors import EnvError, HpcEsError
from hpc_es.quoting import quote_error, quote_value
from hpc_es.records import MAX_REWARD

ODD_ANSWERS = (
    "",
    " \n\t",
    "\x00",
    "émoji 🧩 ٣ ½ \u202e",
    "9" * 10_000,
    "set " * 5_000,
    "{[(<" * 2_000,
    "-1",
    "%s {0} \\",
)

MAX_TURNS = 10_000
"""An episode that is still running after this many turns is taken to never end."""
CALL_LIMIT_S = 60.0
"""A call that takes longer than this many seconds is taken to never return; equals the default task.step_timeout."""


def check_env(make_env: Callable[[], Env], *, num_episodes: int = 2) -> int:
    """Check an environment on its first `num_episodes` tasks; return its number of tasks.

    Errors: EnvError naming the rule that the environment breaks.
    """
    with made(make_env) as env:
        num_tasks = _check_tasks(env)
        _must_raise(lambda: env.step("x"), "step before the first reset")
        for task in range(min(num_episodes, num_tasks)):
            checked_facts(env.facts(task), task)
            first = _check_observation(env.reset(task))
            _check_deterministic(make_env, env, task, first)
            for answer in ODD_ANSWERS:
                env.reset(task)
                _check_result(_step(env, answer))
            _play(env, env.reset(task))
            _must_raise(lambda: env.step("x"), "step after the episode's end")
            _require(env.reset(task) == first, f"reset({task}) gives a different observation after an episode")
    return num_tasks


@contextlib.contextmanager
def made(make_env: Callable[[], Env]) -> Iterator[Env]:
    """Create an environment for playing in this process, and close it afterwards.

    Its calls are noted, so that a call that ends the process or never returns can be named.
    Errors: EnvError for anything that the environment raises, with the first error as the cause; our own errors pass
    unchanged.
    """
    with CALLS.noted("making the environment", CALL_LIMIT_S):
        env = _Noted(make_env())
    try:
        yield cast(Env, env)
    except BaseException as error:
        last = env.last
        with contextlib.suppress(BaseException):
            env.close()
        if isinstance(error, HpcEsError):
            raise
        raise EnvError(f"{last} raised {quote_error(error)}") from error
    try:
        env.close()
    except BaseException as error:
        raise EnvError(f"close raised {quote_error(error)}") from error


class _Noted:
    """Wraps an environment, guards its calls and remembers the last one."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.last = "reading its attributes"

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            self.last = f"{name}({args[0]})" if name == "reset" else name
            guard = process_guard()
            guard.begin()
            with CALLS.noted(self.last, CALL_LIMIT_S):
                try:
                    return found(*args)
                finally:
                    harm = guard.check(self.last)
                    _require(harm is None, harm or "")

        return call


def _check_tasks(env: Env) -> int:
    num_tasks = checked_count(getattr(env, "num_tasks", None))
    for name, least in (("history", 0), ("max_prompt_tokens", 1)):
        value = getattr(env, name)
        is_count = type(value) is int and value >= least
        _require(value is None or is_count, f"{name} is {quote_value(value)}; it must be None or an int from {least}")
    _must_raise(lambda: env.reset(-1), "reset(-1)")
    _must_raise(lambda: env.reset(num_tasks), f"reset({num_tasks}), one past the last task,")
    return num_tasks


def _check_deterministic(make_env: Callable[[], Env], env: Env, task: int, first: Observation) -> None:
    """Require that the same task with the same answers gives the same episode, in this object and in another."""
    with made(make_env) as other:
        _require(other.num_tasks == env.num_tasks, "two environments with the same options have different num_tasks")
        _require(
            other.reset(task) == first,
            f"reset({task}) gives different observations in two environments with the same options",
        )
        _require(env.reset(task) == first, f"reset({task}) gives different observations when it is called twice")
        answer = first.choices[0] if first.choices else ODD_ANSWERS[0]
        one, two = _step(env, answer), _step(other, answer)
        _check_result(one)
        _require(one == two, f"task {task}: the same answer gives two different results")


def _play(env: Env, observation: Observation) -> None:
    """Play one whole episode; every other answer is an admissible one, if there are any, so that it makes progress."""
    for turn in range(MAX_TURNS):
        answers = observation.choices if observation.choices and turn % 2 else ODD_ANSWERS
        result = _step(env, answers[turn % len(answers)])
        _check_result(result)
        if result.observation is None:
            return
        observation = result.observation
    raise EnvError(f"an episode is still running after {MAX_TURNS} turns; a task needs a limit, reported as truncated")


def _step(env: Env, answer: str) -> StepResult:
    try:
        return env.step(answer)
    except BaseException as error:
        raise EnvError(
            f"step raised {quote_error(error)} on the answer {answer[:40]!r}; an answer is never an error"
        ) from error


def _check_result(result: StepResult) -> None:
    _require(isinstance(result, StepResult), f"step returned {type(result).__name__}; it must return a StepResult")
    _require(
        is_reward(result.reward),
        f"the reward is {quote_value(result.reward)}; it must be a finite number, at most {MAX_REWARD:g}",
    )
    _require(
        not (result.terminated and result.truncated),
        "a step is both terminated and truncated; if the task is over when its limit is reached, it is terminated only",
    )
    _require(result.done or not result.success, "a step reports success although the episode continues")
    if result.observation is None:
        _require(result.done, "a step without an observation is neither terminated nor truncated")
    else:
        _require(not result.done, "the last step still has an observation; it must be None")
        _check_observation(result.observation)


def _check_observation(observation: Observation) -> Observation:
    _require(
        isinstance(observation, Observation),
        f"an observation is {type(observation).__name__}; it must be an Observation",
    )
    _require(len(observation.messages) > 0, "an observation has no messages")
    _require(any(message.content for message in observation.messages), "every message of an observation is empty")
    choices = observation.choices
    if choices is not None:
        _require(len(choices) > 0, "`choices` is empty; use None for free text")
        _require(len(set(choices)) == len(choices), f"`choices` repeats an answer: {quote_value(choices)}")
        _require(all(choices), "`choices` has an empty answer")
    return observation


def _must_raise(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except EnvError:
        return
    except BaseException as error:
        raise EnvError(f"{what} raised {quote_error(error)}; it must raise EnvError") from error
    raise EnvError(f"{what} raised nothing; it must raise EnvError")


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise EnvError(complaint)
