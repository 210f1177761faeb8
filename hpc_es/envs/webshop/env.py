"""WebShop for agents: one search or click per turn, at most 15 turns; a purchase ends the episode.

Invariant: task i of a split is always the same goal, and the same answers give the same episode. All environments of
a process share one catalogue; episodes only add to its bounded caches.
"""

import random
from collections import deque
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, validate_call

from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.envs.webshop import goals, prompt
from hpc_es.envs.webshop.catalogue import shared
from hpc_es.envs.webshop.pages import SEPARATOR, Outcome, Session, parse
from hpc_es.errors import ConfigError, EnvError

NUM_EVAL_TASKS = 128
FIRST_TRAIN_GOAL = 500
"""Goals before this one are for evaluation only, as in verl-agent."""

Split = Literal["train", "eval"]


def goal_ids(split: Split | None, num_goals: int) -> range:
    """The goals of a split: 0..127 for evaluation, 500 and up for training; all goals if split is None."""
    if split == "eval":
        return range(min(NUM_EVAL_TASKS, num_goals))
    return range(FIRST_TRAIN_GOAL if split == "train" else 0, num_goals)


class WebShop(Env):
    @validate_call
    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        seed: Annotated[int, Field(ge=0)] = 0,
        split: Split | None = None,
        goals: goals.Kind = "synthetic",
        max_turns: Annotated[int, Field(ge=1)] = 15,
        history: Annotated[int, Field(ge=0)] = 2,
        style: prompt.Style = "think",
        actions: Literal["free", "rank"] = "free",
        max_text: Annotated[int, Field(ge=1)] | None = None,
        reward: Literal["score", "success"] = "score",
        invalid_penalty: Annotated[float, Field(ge=0)] = 0.0,
        cache_dir: Path | None = None,
    ) -> None:
        """Goals and products come from WebShop's own files, or from the small catalogue of this package.

        data_dir: folder with the original's files; default is a small invented catalogue in this package.
        seed: seed of prices and price limits; the order of the goals is always the original's.
        split: `eval` has 128 fixed goals, `train` has the goals from 500; without a split, task i is goal i.
        goals: `synthetic`, or `human` if the folder has items_human_ins.json.
        max_turns: most turns per episode.
        history: number of past turns in the prompt.
        style: `think` asks for thought and <action> tags. For small models, `plain` asks for the action alone, and
            `short` also has an example instead of the list of actions. Both kinds of answer are always accepted.
        actions: `free` reads the action from text; with `rank` the model ranks the admissible actions. Ranking lets
            models play that are too small to write an action: it offers every click that changes something and, where
            there is a search bar, searches for the instruction and for shorter parts of it.
        max_text: most characters of each text of a page (such as a title) in the prompt; by default all.
        reward: `score` is the original's score of the purchase; `success` is 1 for a score of exactly 1, else 0.
        invalid_penalty: subtracted from the reward for each refused action.
        cache_dir: folder for the arrays of a large catalogue; default ~/.cache/hpc_es/webshop.

        Errors: ConfigError when the catalogue cannot be read or has no goals for the split, or for style=think with
        actions=rank.
        """
        if actions == "rank" and style == "think":
            raise ConfigError("actions=rank cannot be combined with style=think, which asks for text: use style=short")
        self.catalogue = shared(data_dir, seed, goals, cache_dir)
        self._goal_ids = goal_ids(split, len(self.catalogue.goals))
        if not self._goal_ids:
            raise ConfigError(
                f"split={split} is empty: this catalogue has {len(self.catalogue.goals)} {goals} goals, and training "
                f"starts at goal {FIRST_TRAIN_GOAL}; use a larger catalogue, or no split"
            )
        self.num_tasks = len(self._goal_ids)
        self._seed, self._max_turns, self._style = seed, max_turns, style
        self._num_history, self._reward, self._penalty = history, reward, invalid_penalty
        self._ranks, self._max_text = actions == "rank", max_text
        self._session: Session | None = None

    @property
    def goal_ids(self) -> range:
        """The goal number of each task."""
        return self._goal_ids

    @property
    def observation(self) -> str:
        """The current page as the original's text environment shows it; after a purchase, the last page."""
        return self._visit().text

    @property
    def available_actions(self) -> dict[str, Any]:
        """The result of the original's `get_available_actions`."""
        session = self._visit()
        return {"has_search_bar": session.has_search_bar, "clickables": list(session.clickables)}

    @property
    def admissible(self) -> list[str]:
        """The actions that the prompt lists; a search is also accepted on every other page.

        For ranking, every action is complete, and options that are already chosen are left out.
        """
        session = self._visit()
        clicks = [f"click[{name}]" for name in session.clickables if name not in ("search", "")]
        if self._ranks:
            chosen = session.options.values() if session.place == "item" else ()
            clicks = [c for c in clicks if parse(c) == ("click", c[6:-1]) and c[6:-1] not in chosen]
        searches = prompt.searches(session.goal) if self._ranks else ["search[<your query>]"]
        return searches + clicks if session.has_search_bar else clicks

    def facts(self, task: int) -> TaskFacts:
        """The goal's number and ASIN, and whether buying exactly what the goal asks for earns full reward.

        With the original's 1,000 products, this holds for 125 of the 128 evaluation tasks, and 6,452 of all 6,910
        goals.
        """
        number = self._goal(task)
        goal = self.catalogue.goals[number]
        return TaskFacts(f"goal {number} {goal['asin']}", reachable=self.catalogue.ceiling(goal) == 1.0)

    def _goal(self, task: int) -> int:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        return self._goal_ids[task]

    def reset(self, task: int) -> Observation:
        number = self._goal(task)
        self._session = Session(self.catalogue, self.catalogue.goals[number], random.Random(f"{self._seed} {number}"))
        self._history: deque[tuple[str, str]] = deque(maxlen=self._num_history)
        self._num_turns = 0
        self._running = True
        return self._observe()

    def step(self, text: str) -> StepResult:
        session = self._visit()
        if not self._running:
            raise EnvError("no episode is running; call reset first")
        page, action = session.text, prompt.read(text)
        outcome = session.act(action)
        self._history.append((self._cut(self._without_task(page)), action))
        self._num_turns += 1
        truncated = not outcome.done and self._num_turns == self._max_turns
        self._running = not (outcome.done or truncated)
        return StepResult(
            observation=self._observe() if self._running else None,
            reward=self._worth(outcome),
            terminated=outcome.done,
            truncated=truncated,
            success=outcome.done and outcome.reward == 1.0,
            invalid=not outcome.accepted,
            info=self._info(action, outcome),
        )

    def _visit(self) -> Session:
        if self._session is None:
            raise EnvError("no episode is running; call reset first")
        return self._session

    def _worth(self, outcome: Outcome) -> float:
        earned = outcome.reward if self._reward == "score" else float(outcome.reward == 1.0)
        return earned if outcome.accepted else earned - self._penalty

    def _info(self, action: str, outcome: Outcome) -> dict[str, Any]:
        info = {"action": action, "observation": self.observation, **self.available_actions}
        return info if outcome.details is None else {**info, "score": vars(outcome.details)}

    def _observe(self) -> Observation:
        session = self._visit()
        page = self._without_task(session.text) if self._style == "short" else session.text
        text = prompt.write(
            session.goal["instruction_text"],
            self._cut(page),
            self.admissible,
            tuple(self._history),
            self._num_turns,
            self._max_turns,
            self._style,
        )
        return Observation((Message("user", text),), tuple(self.admissible) if self._ranks else None)

    def _without_task(self, page: str) -> str:
        """A page as the history shows it, without the task, which is already in the prompt."""
        task = self._visit().goal["instruction_text"].strip()
        return page.replace(f"Instruction:{SEPARATOR}{task}{SEPARATOR}", "", 1)

    def _cut(self, page: str) -> str:
        """A page as the prompt shows it, with long texts shortened."""
        limit = self._max_text
        return page if limit is None else SEPARATOR.join(_shortened(text, limit) for text in page.split(SEPARATOR))


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()}..."
