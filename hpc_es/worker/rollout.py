"""Plays the episodes of one evaluation, many at a time.

Invariants: a limit of the task is an outcome and is scored; a fault of the machinery (an environment that raises,
never returns or rewards with NaN) is never reward 0: the episode is played once more, and a second fault makes
the evaluation void. Each episode advances as soon as its own answer is there; environments run off the event loop,
but for those that say that they are instant.
"""

import asyncio
import numbers
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hpc_es.config.schema import Config
from hpc_es.engine.base import Engine
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.errors import EngineError, EnvError, ModelError
from hpc_es.es.population import episode_seed
from hpc_es.es.records import Assignment, Episode, Kind

Value = TypeVar("Value")

MAX_STUCK_CALLS = 16
"""Environment calls that never returned before the worker gives up: each holds a thread for good."""
MAX_REWARD = 1e100
"""The largest reward, either way: the squares of a cohort's fitness must stay finite."""
MAX_QUOTE = 1000
"""Characters of an environment's error that are quoted."""


class Player:
    """Plays assignments with one engine; `make_env` is called once per episode.

    Errors: ModelError when task.chat is on and the model has no chat template.
    """

    def __init__(self, config: Config, engine: Engine, make_env: Callable[[Kind], Env]) -> None:
        self.config = config
        self.engine = engine
        self._make_env = make_env
        self._num_stuck = 0
        self._instant: set[Kind] = set()
        if config.task.chat and not engine.tokenizer.chat_template:
            raise ModelError(
                f"task.chat is on, but the tokenizer of {config.model.path} has no chat template: set task.chat=false, "
                "or take a model that was trained to chat"
            )

    async def play(self, assignment: Assignment) -> tuple[Episode, ...]:
        """All episodes of an assignment, in the order of its tasks.

        Errors: EnvError when an episode failed twice; EngineError when the engine or this process is unusable.
        """
        slots = asyncio.Semaphore(self.config.engine.max_concurrent)

        async def one(position: int) -> Episode:
            async with slots:
                return await self._play_with_retry(assignment, position)

        episodes = [asyncio.ensure_future(one(position)) for position in range(len(assignment.tasks))]
        try:
            return tuple(await asyncio.gather(*episodes))
        finally:  # weights may only change again when no episode is left in flight
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def _play_with_retry(self, assignment: Assignment, position: int) -> Episode:
        try:
            return await self._episode(assignment, position, retries=0)
        except EnvError:
            return await self._episode(assignment, position, retries=1)

    async def _episode(self, assignment: Assignment, position: int, retries: int) -> Episode:
        task = assignment.tasks[position]
        env = await self._make(assignment.kind)
        try:
            return await self._turns(env, task, episode_seeds(assignment, position), retries)
        finally:
            await self._in_env(env.close, what=f"close after task {task}", instant=env.instant)

    async def _make(self, kind: Kind) -> Env:
        """An environment; the first one of its kind says whether the others are made in an instant."""
        what = "making the environment"
        env = await self._in_env(self._make_env, kind, what=what, instant=kind in self._instant)
        if env.instant:
            self._instant.add(kind)
        return env

    async def _turns(self, env: Env, task: int, seed_of: Callable[[int], int], retries: int) -> Episode:
        began = time.monotonic()
        reward, success, turns, invalid, tokens_in, tokens_out = 0.0, False, 0, 0, 0, 0
        generating = 0.0
        observation: Observation | None = await self._in_env(
            env.reset, task, what=f"reset({task})", instant=env.instant
        )
        in_env = time.monotonic() - began
        ended = "terminated"
        while observation is not None:
            prompt = self._prompt(observation, task)
            if len(prompt) >= self.config.engine.max_model_len:
                ended = "context"
                break
            if time.monotonic() - began > self.config.task.episode_timeout:
                ended = "time"
                break
            asked = time.monotonic()
            completion = await self.engine.generate(
                prompt, self.config.sampling, seed=seed_of(turns), choices=observation.choices
            )
            answered = time.monotonic()
            step = await self._in_env(
                env.step, completion.text, what=f"step {turns + 1} of task {task}", instant=env.instant
            )
            check_step(step, task)
            generating += answered - asked
            in_env += time.monotonic() - answered
            turns += 1
            reward += float(step.reward)  # numpy's numbers, too, become plain ones
            success = bool(step.success)
            invalid += bool(step.invalid)
            tokens_in += completion.tokens_in
            tokens_out += completion.tokens_out
            ended = "truncated" if step.truncated else "terminated"
            observation = None if step.done else step.observation
        return Episode(task, reward, success, turns, invalid, tokens_in, tokens_out, generating, in_env, ended, retries)

    def _prompt(self, observation: Observation, task: int) -> list[int]:
        """Token ids of an observation. Errors: EnvError when it is none, or cannot be put into tokens."""
        if not isinstance(observation, Observation):
            raise EnvError(f"task {task} shows {type(observation).__name__}: reset and step must show an Observation")
        if not all(isinstance(m, Message) and isinstance(m.content, str) for m in observation.messages):
            raise EnvError(f"task {task} shows messages that are no Message with text")
        if not all(isinstance(choice, str) for choice in observation.choices or ()):
            raise EnvError(f"task {task} offers choices that are not texts")
        try:
            prompt = self.encode(observation)
        except Exception as error:  # a chat template raises whatever it likes
            raise EnvError(f"task {task} shows what cannot be put into tokens: {quote(error)}") from error
        if not prompt:
            raise EnvError(f"task {task} shows nothing: its prompt has no tokens")
        return prompt

    def encode(self, observation: Observation) -> list[int]:
        """Token ids of a prompt."""
        tokenizer = self.engine.tokenizer
        if self.config.task.chat:
            chat = [{"role": message.role, "content": message.content} for message in observation.messages]
            encoded: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
            return list(encoded["input_ids"])
        return list(tokenizer.encode("\n".join(message.content for message in observation.messages)))

    async def _in_env(self, call: Callable[..., Value], *args: Any, what: str, instant: bool) -> Value:
        """Run an environment's code: here when it is instant, else in a thread of its own, for at most
        task.step_timeout seconds."""

        def named() -> Value:
            try:
                return call(*args)
            except BaseException as error:  # whatever an environment raises is its fault
                raise EnvError(f"{self.config.task.env}: {what} raised {quote(error)}") from error

        if instant:
            return named()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Value] = loop.create_future()

        def settle(result: Value | None, error: EnvError | None) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                outcome: tuple[Value | None, EnvError | None] = (named(), None)
            except EnvError as error:
                outcome = (None, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, *outcome)

        # A daemon thread, not a pool: one that never returns must not keep the process from ending.
        threading.Thread(target=run, daemon=True, name="env").start()
        try:
            return await asyncio.wait_for(future, self.config.task.step_timeout)
        except TimeoutError:
            self._num_stuck += 1
            if self._num_stuck >= MAX_STUCK_CALLS:
                raise EngineError(
                    f"{self._num_stuck} calls of {self.config.task.env} never returned; this worker must start afresh"
                ) from None
            raise EnvError(
                f"{self.config.task.env}: {what} did not return within task.step_timeout="
                f"{self.config.task.step_timeout:g} s"
            ) from None


def episode_seeds(assignment: Assignment, position: int) -> Callable[[int], int]:
    """The sampling seed of each turn of one episode."""
    return lambda turn: episode_seed(assignment.sampling_seed, position, turn)


def check_step(step: StepResult, task: int) -> None:
    """Errors: EnvError when a step breaks the contract of environments."""
    if not isinstance(step, StepResult):
        raise EnvError(f"task {task}: step returned {type(step).__name__}; it must return a StepResult")
    if not _is_reward(step.reward):
        raise EnvError(
            f"task {task} was rewarded with {step.reward!r}: a reward must be a finite number, at most {MAX_REWARD:g}"
        )
    if step.observation is None and not step.done:
        raise EnvError(f"task {task} goes on without an observation: end it, or say what the model sees next")


def _is_reward(value: object) -> bool:
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= MAX_REWARD
    except OverflowError:
        return False


def quote(error: BaseException) -> str:
    """Type and text of an error, as text that can be sent and read: short, and valid UTF-8."""
    try:
        text = str(error)
    except Exception:  # it is the environment's own class
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}: {text[:MAX_QUOTE]}".encode(errors="replace").decode()
