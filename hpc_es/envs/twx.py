"""The games of TextWorldExpress (Jansen & Cote, 2022): find a coin, cook a meal, sort, tidy up, read a map.

Rules, games and scores come from the package (textworld-express 1.1); the prompt is our own. The reward is the game's
score, at most 1: each step's reward is the change of the score, so that an episode's reward is its final score. A
failed game scores -1. Success is defined by the game.

Invariant: a task is a seed of one of the package's folds, so no task is in two splits; the same task and answers give
the same episode. All environments of a process share one Java virtual machine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, validate_call

from hpc_es.envs import twx_jvm
from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.errors import ConfigError, EnvError

Game = Literal["arithmetic", "coin", "cookingworld", "mapreader", "peckingorder", "simonsays", "sorting", "twc"]
FOLDS = {"train": "train", "eval": "dev", "test": "test"}
ALWAYS_SHOWN = frozenset(("inventory", "look around", "task"))
"""Actions that only repeat what the prompt already says, so they are not offered."""
MAX_QUOTE = 80
"""Most characters of a refused answer that the prompt repeats."""


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
        """Games come from the package textworld-express.

        game: name of the game.
        game_params: the game's parameters, e.g. {numLocations: 3, includeDoors: 0} for coin; switches are 0 or 1.
        split: `eval` is the package's fold dev.
        num_tasks: by default all games of the fold, 1,000.
        max_turns: most turns per episode.
        actions: with `rank` the model ranks the game's valid actions; with `free` the prompt lists them, the action is
            read from text, and an invalid one is refused and costs a turn.
        history: number of past turns in the prompt.
        reward: `success` is 1 for a game that is won, else 0.

        Errors: ConfigError when Java or the package is missing, or for parameters that the game does not have.
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
        observation = self._observe(self._feedback(text, action)) if self._running else None
        return StepResult(observation, gained, terminated, truncated, success=success, invalid=action is None)

    def facts(self, task: int) -> TaskFacts:
        """Facts about a game; horizons are known for simonsays, sorting and mapreader without doors."""
        super().facts(task)
        named = " ".join(filter(None, (self._name, self._params)))
        return TaskFacts(f"{named} seed {self._seeds[task]}", self._horizon(self._seeds[task]))

    def close(self) -> None:
        self._game.close()

    def _horizon(self, seed: int) -> int | None:
        if self._name not in _HORIZONS:
            return None
        game = twx_jvm.open_game(self._name, self._params)  # a separate game, because an episode may be running
        try:
            return _HORIZONS[self._name](game.properties(seed, self._fold))
        finally:
            game.close()

    def _admitted(self) -> tuple[str, ...]:
        """The valid actions, sorted, because Java's order may vary."""
        valid = set(self._state["validActions"])
        return tuple(sorted(valid - ALWAYS_SHOWN or valid))

    def _read(self, text: str) -> str | None:
        """The action that an answer names; None if it is not valid now."""
        admitted = {action.lower(): action for action in self._state["validActions"]}
        return admitted.get(" ".join(text.split()).strip("> .").lower())

    def _feedback(self, text: str, action: str | None) -> str:
        """Feedback on an answer; with a history an accepted action is not repeated."""
        if action is None:
            return f"Not possible here: {' '.join(text.split())[:MAX_QUOTE]}"
        return "" if self.history else f"You chose: {action}"

    def _observe(self, happened: str) -> Observation:
        """The prompt: the task, the result of the last action, the surroundings, and the inventory."""
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


def _map_horizon(properties: Any) -> int | None:
    """Horizon of mapreader: the way to the coin, take it, the way back, put it down."""
    return None if properties["includeDoors"] else 2 * properties["actualDistanceApart"] + 2


_HORIZONS = {
    "mapreader": _map_horizon,
    "simonsays": lambda properties: properties["gameLength"],
    "sorting": lambda properties: 2 * properties["hidden_problemsize"],
}
