"""The games of TextWorldExpress (Jansen & Cote, 2022): find a coin, cook a meal, sort, tidy up, read a map.

Rules, games and scores are the package's (textworld-express 1.1); the prompt is ours. Reward is the game's score, a
number up to 1: each step gives what the score has gained or lost, so that an episode's reward is its last score. A
game that is failed scores -1. Success is the game's own.

Invariant: a task is a seed of one fold of the package's own, so no task is in two splits; the same task and answers
give the same episode. All environments of a process share one Java virtual machine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, validate_call

from hpc_es.envs import twx_jvm
from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.errors import ConfigError, EnvError

Game = Literal["arithmetic", "coin", "cookingworld", "mapreader", "peckingorder", "simonsays", "sorting", "twc"]
FOLDS = {"train": "train", "eval": "dev", "test": "test"}
ALWAYS_SHOWN = frozenset(("inventory", "look around", "task"))
"""Actions that would tell what the prompt says anyway."""
MAX_QUOTE = 80
"""Characters of a refused answer that the prompt repeats."""


class TextWorldExpress(Env):
    @validate_call
    def __init__(
        self,
        *,
        game: Game = "coin",
        game_params: dict[str, int] | None = None,
        split: Literal["train", "eval", "test"] = "train",
        num_tasks: Annotated[int, Field(ge=1)] | None = None,
        max_turns: Annotated[int, Field(ge=1)] = 50,
        actions: Literal["rank", "free"] = "rank",
        history: Annotated[int, Field(ge=0)] = 0,
        reward: Literal["score", "success"] = "score",
    ) -> None:
        """Errors: ConfigError when Java or the package is missing, or for parameters that the game does not have.

        game_params: the package's, e.g. {numLocations: 3, includeDoors: 0} of coin; switches are 0 or 1.
        split: `eval` is the package's fold dev.
        num_tasks: default all of the fold, 1,000.
        actions: `rank` offers what the game admits, `free` reads text and refuses, at the cost of a turn, what the game
            does not admit; the prompt then lists what it does.
        history: past turns in the prompt.
        reward: `success` is 1 for a game that is won, and else 0.
        """
        self._params = ",".join(f"{key}={value}" for key, value in (game_params or {}).items())
        self._name, self._fold = game, FOLDS[split]
        self._max_turns, self._actions, self._reward, self.history = max_turns, actions, reward, history
        try:
            self._game = twx_jvm.open_game(game, self._params)
        except ConfigError as error:
            raise ConfigError(f"option game={game}, game_params={game_params or {}}: {error}") from error
        self._seeds = self._game.seeds(self._fold)[:num_tasks]
        self.num_tasks = len(self._seeds)
        if num_tasks is not None and num_tasks > self.num_tasks:
            raise ConfigError(f"option num_tasks={num_tasks}: {game} has {self.num_tasks} games for split {split}")
        self._running = False

    def reset(self, task: int) -> Observation:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        self._description, self._state = self._game.start(self._seeds[task], self._fold)
        self._turn, self._score, self._running = 0, 0.0, True
        return self._observe("")

    def step(self, text: str) -> StepResult:
        if not self._running:
            raise EnvError("no episode is running; call reset first")
        action = self._read(text)
        if action is not None:
            self._state = self._game.step(action)
        self._turn += 1
        state, before = self._state, self._score
        self._score = float(state["score"])
        success = bool(state["tasksuccess"])
        terminated = success or bool(state["taskfailure"]) or self._score >= 1
        truncated = not terminated and self._turn == self._max_turns
        self._running = not (terminated or truncated)
        gained = self._score - before if self._reward == "score" else float(success)
        observation = self._observe(self._said(text, action)) if self._running else None
        return StepResult(observation, gained, terminated, truncated, success=success, invalid=action is None)

    def facts(self, task: int) -> TaskFacts:
        """Horizons are known of mapreader without doors, simonsays and sorting, from how a game was made."""
        super().facts(task)
        named = " ".join(filter(None, (self._name, self._params)))
        return TaskFacts(f"{named} seed {self._seeds[task]}", self._horizon(self._seeds[task]))

    def close(self) -> None:
        self._game.close()

    def _horizon(self, seed: int) -> int | None:
        if self._name not in _HORIZONS:
            return None
        game = twx_jvm.open_game(self._name, self._params)  # of its own: an episode may be running
        try:
            return _HORIZONS[self._name](game.properties(seed, self._fold))
        finally:
            game.close()

    def _admitted(self) -> tuple[str, ...]:
        """In an order that does not depend on Java's."""
        valid = set(self._state["validActions"])
        return tuple(sorted(valid - ALWAYS_SHOWN or valid))

    def _read(self, text: str) -> str | None:
        """The action that an answer names; None for what the game does not admit now."""
        admitted = {action.lower(): action for action in self._state["validActions"]}
        return admitted.get(" ".join(text.split()).strip("> .").lower())

    def _said(self, text: str, action: str | None) -> str:
        """What became of an answer; a history has the answer itself."""
        if action is None:
            return f"Not possible here: {' '.join(text.split())[:MAX_QUOTE]}"
        return "" if self.history else f"You chose: {action}"

    def _observe(self, happened: str) -> Observation:
        """What the model sees: the task, what became of its last action, the place, and what it carries."""
        state, admitted = self._state, self._admitted()
        parts = [happened, state["observation"]]
        if state["look"] != state["observation"]:
            parts.append(state["look"])
        if "currently empty" not in state["inventory"]:
            parts.append(state["inventory"])
        if self._actions == "free":
            parts.append(f"You can: {'; '.join(admitted)}. Answer with one of these and nothing else.")
        shown = "\n".join(part for part in (" ".join(part.split()) for part in parts) if part)
        now = Message("user", f"{shown}\n>")
        if self._turn and self.history:
            messages: tuple[Message, ...] = (now,)
        else:
            messages = (Message("system", self._description), now)
        return Observation(messages, admitted if self._actions == "rank" else None)


def _of_map(properties: Any) -> int | None:
    """There, take, back, put."""
    return None if properties["includeDoors"] else 2 * properties["actualDistanceApart"] + 2


_HORIZONS = {
    "mapreader": _of_map,
    "simonsays": lambda properties: properties["gameLength"],
    "sorting": lambda properties: 2 * properties["hidden_problemsize"],
}
