"""Plays the episodes of one evaluation, many at a time.

Invariants: a limit of the task is an outcome and is scored; a fault of the machinery (an environment that raises,
never returns or rewards with NaN) is never reward 0: the episode is played once more, and a second fault makes
the evaluation void. Each episode advances as soon as its own answer is there; environments run off the event loop,
but for those that say that they are instant.
"""

import asyncio
import contextlib
import logging
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from hpc_es.calls import CALLS
from hpc_es.config.schema import Config
from hpc_es.engine.base import Chat, Completion, Generator, ImagePrompt
from hpc_es.envs.base import Env, Message, Observation, StepResult, is_reward
from hpc_es.envs.guard import process_guard
from hpc_es.errors import ConfigError, ContextFull, EngineError, EnvError, ModelError
from hpc_es.quoting import quote_error, quote_value
from hpc_es.records import MAX_PROPOSAL, MAX_REWARD, Assignment, Episode, Purpose
from hpc_es.seeds import episode_seed
from hpc_es.traces import EpisodeTrace, TurnTrace
from hpc_es.worker.history import History, without_thoughts
from hpc_es.worker.trajectories import MAX_TURNS, Trajectory, Turn, is_sampled, shortened

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Prompt = list[int] | ImagePrompt | Chat


class Performance(NamedTuple):
    """The result of playing an assignment."""

    episodes: tuple[Episode, ...]
    text: str = ""
    """The last answer, for an evaluation with purpose "propose"."""
    traces: tuple[EpisodeTrace, ...] = ()
    """The sampled tokens of each episode, if the engine was started with `traces`."""


MAX_STUCK_CALLS = 16
"""Environment calls that never returned before the worker gives up: each holds a thread for good."""


class Player:
    """Plays assignments with one engine.

    `make_env` is called once per episode. `keep` gets the sampled episodes of every evaluation that succeeded. Errors:
    ModelError when task.chat is on and the model has no chat template; ConfigError when it is off and the engine takes
    only chats.
    """

    def __init__(
        self,
        config: Config,
        engine: Generator,
        make_env: Callable[[Purpose], Env],
        keep: Callable[[Sequence[Trajectory]], None] | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self._make_env = make_env
        self._keep = keep
        self._num_stuck = 0
        self._instant: set[Purpose] = set()
        self._made: set[Purpose] = set()
        self._making_first = asyncio.Lock()
        self._guard = process_guard()
        self._has_warned = False
        if engine.tokenizer is None:
            if not config.task.chat:
                raise ConfigError(f"task.chat=false: engine.kind={config.engine.kind} takes chats only; leave it on")
        elif config.task.chat and not engine.tokenizer.chat_template:
            raise ModelError(
                f"task.chat is on, but the tokenizer of {config.model.path} has no chat template: set task.chat=false, "
                "or take a model that was trained to chat"
            )

    async def play(self, assignment: Assignment) -> tuple[Episode, ...]:
        """All episodes of an assignment without a context, in the order of its tasks. Errors: as `perform`."""
        return (await self.perform(assignment)).episodes

    async def perform(self, assignment: Assignment, context: str = "") -> Performance:
        """Play an assignment whose policy sees the text `context` before every task.

        Errors: EnvError when an episode failed twice, or for a proposal of more than MAX_PROPOSAL characters;
        EngineError when the engine or this process is unusable.
        """
        slots = asyncio.Semaphore(self.config.engine.max_concurrent)
        self._guard.begin()

        async def one(position: int) -> _Played:
            async with slots:
                return await self._play_with_retry(assignment, position, context)

        running = [asyncio.ensure_future(one(position)) for position in range(len(assignment.tasks))]
        try:
            played = await asyncio.gather(*running)
        finally:  # weights may change only when no episode is running
            for episode in running:
                episode.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        episodes = tuple(each.episode() for each in played)
        text = played[0].last_answer if assignment.purpose == "propose" and played else ""
        sampled = [
            Trajectory(assignment.eval_id, position, episodes[position], tuple(each.kept_turns))
            for position, each in enumerate(played)
            if each.is_sampled
        ]
        if self._keep is not None and sampled:
            await asyncio.to_thread(self._keep, sampled)
        if len(text) > MAX_PROPOSAL:
            raise EnvError(f"a proposal has {len(text)} characters; at most {MAX_PROPOSAL}: lower sampling.max_tokens")
        traces = tuple(EpisodeTrace(each.task, tuple(each.traced_turns)) for each in played)
        return Performance(episodes, text, traces)

    async def _play_with_retry(self, assignment: Assignment, position: int, context: str) -> "_Played":
        try:
            return await self._episode(assignment, position, context, retries=0)
        except EnvError:
            return await self._episode(assignment, position, context, retries=1)

    async def _episode(self, assignment: Assignment, position: int, context: str, retries: int) -> "_Played":
        task = assignment.tasks[position]
        is_kept = self._keep is not None and is_sampled(self.config, assignment, position)
        env = await self._make(assignment.purpose)
        try:
            begun = _Played(task, retries, is_kept)
            played = await self._turns(env, begun, episode_seeds(assignment, position), context)
        except BaseException:
            try:
                await self._close(env, task)
            except EnvError as error:  # the first error is the cause, and this one must not hide it
                log.warning("%s", error)
            raise
        await self._close(env, task)
        return played

    async def _close(self, env: Env, task: int) -> None:
        await self._in_env(env.close, what=f"close after task {task}", instant=env.instant)
        if env.instant:
            self._look_for_harm(f"{self.config.task.env}: task {task}")

    async def _make(self, kind: Purpose) -> Env:
        """Make an environment. The first of its kind is made alone, because it fills caches that all of them share."""
        if kind not in self._made:
            async with self._making_first:
                if kind not in self._made:
                    try:
                        return await self._make_one(kind)
                    finally:
                        self._made.add(kind)
        return await self._make_one(kind)

    async def _make_one(self, kind: Purpose) -> Env:
        """Make one environment. The first says whether making the others is instant."""
        what = "making the environment"
        env = await self._in_env(self._make_env, kind, what=what, instant=kind in self._instant)
        with self._blaming(what):
            if env.instant:
                self._instant.add(kind)
        return env

    async def _turns(self, env: Env, played: "_Played", seed_of: Callable[[int], int], context: str) -> "_Played":
        task, began = played.task, time.monotonic()
        with self._blaming("reading its attributes"):
            history = History(env, self.encode, self._room)
            instant, strips_thinking = env.instant, env.strip_thinking
        observation: Observation | None = await self._in_env(env.reset, task, what=f"reset({task})", instant=instant)
        played.seconds_in_env += time.monotonic() - began
        if context and isinstance(observation, Observation):
            with self._blaming(f"reset({task})"):
                observation = with_context(observation, context)
        while observation is not None:
            prompt = self._prompt(history, observation, task)
            if self._outgrows_context(prompt, observation.choices):
                played.ended = "context"
                break
            if time.monotonic() - began > self.config.task.episode_timeout:
                played.ended = "time"
                break
            asked = time.monotonic()
            try:
                completion = await self._answer(prompt, seed_of(played.turns), observation.choices)
            except ContextFull:
                played.ended = "context"
                break
            answered = time.monotonic()
            said = without_thoughts(completion.text) if strips_thinking else completion.text
            what = f"step {played.turns + 1} of task {task}"
            step = await self._in_env(env.step, said, what=what, instant=instant)
            with self._blaming(what):
                check_step(step, task, so_far=played.reward)
                history.add(said)
                played.seconds_generating += answered - asked
                played.seconds_in_env += time.monotonic() - answered
                played.take(observation, prompt, completion, step)
                observation = None if step.done else step.observation
        return played

    def _look_for_harm(self, what: str) -> None:
        harm = self._guard.check(what)
        if harm and not self._has_warned:
            self._has_warned = True  # one that does it once does it in every episode, so one warning is enough
            log.warning("%s; it was put back", harm)

    @contextlib.contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        """For code that handles values of an environment: any error there is a fault of the environment."""
        try:
            yield
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(f"{self.config.task.env}: {what} raised {quote_error(error)}") from error

    @property
    def _room(self) -> int | None:
        """Maximum number of tokens of a prompt that leaves room for an answer; None if only the engine can count."""
        if self.engine.tokenizer is None:
            return None
        return self.config.engine.max_model_len - self.config.sampling.max_tokens

    def _outgrows_context(self, prompt: Prompt, choices: Sequence[str] | None) -> bool:
        return not isinstance(prompt, Chat) and len(prompt) + room_of(choices) >= self.config.engine.max_model_len

    async def _answer(self, prompt: Prompt, seed: int, choices: Sequence[str] | None) -> Completion:
        """Ask the engine. Errors: those of the engine; EngineError when a chat was not answered within
        task.episode_timeout, retries included."""
        limit = self.config.task.episode_timeout
        answer = self.engine.generate(prompt, self.config.sampling, seed=seed, choices=choices)
        if not isinstance(prompt, Chat):
            return await answer
        try:
            async with asyncio.timeout(limit):
                return await answer
        except TimeoutError:
            url = self.config.engine.url
            raise EngineError(f"{url} gave no answer within task.episode_timeout={limit:g} s") from None

    def _prompt(self, history: History[Prompt], observation: Observation, task: int) -> Prompt:
        """The prompt of a turn.

        Errors: EnvError when the task shows no observation, or none that can be put into tokens.
        """
        if not isinstance(observation, Observation):
            raise EnvError(f"task {task} shows {type(observation).__name__}: reset and step must show an Observation")
        if not all(isinstance(m, Message) and isinstance(m.content, str) for m in observation.messages):
            raise EnvError(f"task {task} shows messages that are not Message objects with text")
        if not all(isinstance(choice, str) for choice in observation.choices or ()):
            raise EnvError(f"task {task} offers choices that are not texts")
        if images := [image for message in observation.messages for image in message.images]:
            self._check_images(images, task, observation.choices)
        try:
            prompt = history.prompt(observation)
        except Exception as error:  # a chat template may raise any error
            raise EnvError(f"task {task} shows what cannot be put into tokens: {quote_error(error)}") from error
        if not prompt:
            raise EnvError(f"task {task} shows nothing: its prompt has no tokens")
        return prompt

    def _check_images(self, images: Sequence[object], task: int, choices: Sequence[str] | None) -> None:
        """Errors: ConfigError when this engine or model takes no images; EnvError for data that is not an image, and
        for choices about an image."""
        if not self.engine.takes_images:
            raise ConfigError(
                f"task {task} shows an image, and engine.kind={self.config.engine.kind} with {self.config.model.path} "
                "takes text alone: turn images off in task.options, or take a vision-language model with "
                "engine.kind=vllm, or one behind engine.kind=endpoint"
            )
        if not self.config.task.chat:
            raise ConfigError(
                f"task {task} shows an image, and only a chat template has a place for it: set task.chat=true"
            )
        if not all(isinstance(image, bytes) for image in images):
            raise EnvError(f"task {task} shows images that are not bytes; give the content of a PNG or JPEG file")
        if choices is not None and self.engine.tokenizer is not None:
            raise EnvError(f"task {task} offers choices about an image; they are ranked for text alone")

    def encode(self, messages: Sequence[Message]) -> Prompt:
        """Messages as a prompt for the engine: token ids, token ids with images, or messages."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            return Chat(tuple(map(sent, messages)), self.config.task.chat_options)
        if self.config.task.chat:
            encoded: Any = tokenizer.apply_chat_template(
                list(map(placed, messages)),
                add_generation_prompt=True,
                return_dict=True,
                **self.config.task.chat_options,
            )
            images = tuple(image for message in messages for image in message.images)
            tokens = list(encoded["input_ids"])
            return ImagePrompt(tokens, images) if images else tokens
        return list(tokenizer.encode("\n".join(message.content for message in messages)))

    async def _in_env(self, call: Callable[..., Value], *args: Any, what: str, instant: bool) -> Value:
        """Run code of an environment: here if it is instant, else in a thread of its own for at most task.step_timeout.

        The call is noted while it runs, so that it can be named if it ends this process.
        """
        env, limit_s = self.config.task.env, self.config.task.step_timeout
        slot = CALLS.begin(f"{env}: {what}", limit_s)

        def named() -> Value:
            try:
                return call(*args)
            except BaseException as error:  # any error in here is a fault of the environment
                raise EnvError(f"{env}: {what} raised {quote_error(error)}") from error
            finally:
                if instant:
                    self._guard.end_copy()  # the other checks are slower, and run once per episode
                else:
                    self._look_for_harm(f"{env}: {what}")
                CALLS.end(slot)

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

        # A daemon thread, not a pool: a call that never returns must not keep the process from ending.
        threading.Thread(target=run, daemon=True, name="env").start()
        try:
            return await asyncio.wait_for(future, limit_s)
        except asyncio.CancelledError:
            CALLS.give_up(slot)
            raise
        except TimeoutError:
            CALLS.give_up(slot)
            self._num_stuck += 1
            if self._num_stuck >= MAX_STUCK_CALLS:
                raise EngineError(
                    f"{self._num_stuck} calls of {env} never returned; this worker must be restarted"
                ) from None
            raise EnvError(f"{env}: {what} did not return within task.step_timeout={limit_s:g} s") from None


class _Played:
    """An episode up to its present turn."""

    def __init__(self, task: int, retries: int, is_sampled: bool) -> None:
        self.task, self.retries, self.is_sampled = task, retries, is_sampled
        self.reward, self.success, self.ended = 0.0, False, "terminated"
        self.turns = self.invalid_actions = self.tokens_in = self.tokens_out = 0
        self.seconds_generating = self.seconds_in_env = 0.0
        self.kept_turns: list[Turn] = []
        self.traced_turns: list[TurnTrace] = []
        self.last_answer = ""

    def take(self, shown: Observation, prompt: Prompt, completion: Completion, step: StepResult) -> None:
        """Count one turn."""
        reward, invalid = float(step.reward), bool(step.invalid)  # also turns numpy numbers into plain ones
        self.turns += 1
        self.reward += reward
        self.success = bool(step.success)
        self.invalid_actions += invalid
        self.tokens_in += completion.tokens_in
        self.tokens_out += completion.tokens_out
        self.ended = "truncated" if step.truncated else "terminated"
        self.last_answer = completion.text
        if (sampled := completion.sampled) is not None:
            images = prompt.images if isinstance(prompt, ImagePrompt) else ()
            turn = TurnTrace(sampled.prompt, sampled.tokens, sampled.log_probabilities, reward, images, sampled.choices)
            self.traced_turns.append(turn)
        if self.is_sampled and self.turns <= MAX_TURNS:
            messages = tuple(Message(message.role, shortened(message.readable)) for message in shown.messages)
            self.kept_turns.append(Turn(messages, shortened(completion.text), reward, invalid))

    def episode(self) -> Episode:
        return Episode(
            self.task,
            self.reward,
            self.success,
            self.turns,
            self.invalid_actions,
            self.tokens_in,
            self.tokens_out,
            self.seconds_generating,
            self.seconds_in_env,
            self.ended,
            self.retries,
        )


def with_context(observation: Observation, context: str) -> Observation:
    """The observation with a context as its first message, or at the start of the task's own system message."""
    first, *others = observation.messages or (Message("system", ""),)
    if first.role != "system":
        return replace(observation, messages=(Message("system", context), *observation.messages))
    merged = f"{context}\n\n{first.content}" if first.content else context
    return replace(observation, messages=(replace(first, content=merged), *others))


def episode_seeds(assignment: Assignment, position: int) -> Callable[[int], int]:
    """The sampling seed of each turn of one episode."""
    return lambda turn: episode_seed(assignment.sampling_seed, position, turn)


def placed(message: Message) -> dict[str, Any]:
    """A message in the form that chat templates take; an image is a part of its content."""
    if not message.images:
        return {"role": message.role, "content": message.content}
    parts = [{"type": "image"}] * len(message.images)
    return {"role": message.role, "content": [*parts, {"type": "text", "text": message.content}]}


def sent(message: Message) -> dict[str, Any]:
    """A message in the form of OpenAI's API; images are parts of its content, as data: URLs."""
    if not message.images:
        return {"role": message.role, "content": message.content}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/{_format(image)};base64,{b64encode(image).decode()}"}}
        for image in message.images
    ]
    return {"role": message.role, "content": [*parts, {"type": "text", "text": message.content}]}


def _format(image: bytes) -> str:
    return "png" if image.startswith(b"\x89PNG") else "jpeg"


def room_of(choices: Sequence[str] | None) -> int:
    """Maximum number of tokens that the choices need after the prompt: a token is at least one byte."""
    return max((len(choice.encode()) for choice in choices or ()), default=0)


def check_step(step: StepResult, task: int, so_far: float = 0.0) -> None:
    """Check the result of a step. Errors: EnvError when it breaks the contract of environments."""
    if not isinstance(step, StepResult):
        raise EnvError(f"task {task}: step returned {type(step).__name__}; it must return a StepResult")
    if not is_reward(step.reward):
        raise EnvError(
            f"task {task} was rewarded with {quote_value(step.reward)}: a reward must be a finite number, at most "
            f"{MAX_REWARD:g}"
        )
    if not is_reward(so_far + float(step.reward)):
        raise EnvError(f"the rewards of task {task} add up to more than {MAX_REWARD:g}")
    if step.observation is None and not step.done:
        raise EnvError(f"task {task} continues without an observation: end it, or return what the model sees next")
