"""WebShop as an agent plays it: one search or click a turn, at most 15 turns, and the purchase ends it.

Invariant: task i of a split is always the same goal, and the same answers give the same episode. All environments of
a process share one catalogue; an episode adds nothing to it but bounded caches.
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
"""Goals before it are for evaluation only, as in verl-agent."""

Split = Literal["train", "eval"]


def goal_ids(split: Split | None, num_goals: int) -> range:
    """The goals of a split: 0..127 for evaluation, 500 and up for training, all without a split."""
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
        """Errors: ConfigError when the catalogue cannot be read or has no goals for the split, or for style=think with
        actions=rank.

        data_dir: a folder with the original's files; default is the small made-up catalogue of this package.
        seed: of prices and price limits; the order of the goals is always the original's.
        split: `eval` is 128 fixed goals, `train` the goals from 500; without one, task i is goal i.
        goals: `synthetic`, or `human` where the folder has items_human_ins.json.
        history: past turns in the prompt.
        style: the prompt asks for thought and <action> tags (`think`), or, for small models, for the bare action
            (`plain`), or it also has an example in place of the list of actions (`short`). Both kinds of answer are
            always read.
        actions: answers are free text, or one of the admissible actions, which the model ranks (`rank`). Ranking is
            ours, so that models too small to write an action can play: what can be clicked and changes something and,
            where there is a search bar, a search for the instruction and for shorter pieces of it.
        max_text: characters of each text of a page (a title, say) that the prompt shows; by default all.
        reward: the original's score of the purchase, or 1 for a score of exactly 1 and else 0.
        invalid_penalty: taken off the reward for each refused action.
        cache_dir: as in `Catalogue`.
        """
        if actions == "rank" and style == "think":
            raise ConfigError("actions=rank leaves no room for the thoughts that style=think asks for: style=short")
        self.catalogue = shared(data_dir, seed, goals, cache_dir)
        self._goal_ids = goal_ids(split, len(self.catalogue.goals))
        if not self._goal_ids:
            raise ConfigError(
                f"split={split} is empty: this catalogue has {len(self.catalogue.goals)} {goals} goals, and training "
                f"starts at goal {FIRST_TRAIN_GOAL}; take a larger catalogue, or no split"
            )
        self.num_tasks = len(self._goal_ids)
        self._seed, self._max_turns, self._style = seed, max_turns, style
        self._num_history, self._reward, self._penalty = history, reward, invalid_penalty
        self._ranks, self._max_text = actions == "rank", max_text
        self._session: Session | None = None

    @property
    def goal_ids(self) -> range:
        """Which goal each task is: what a run's manifest has to list."""
        return self._goal_ids

    @property
    def observation(self) -> str:
        """The page as the original's text environment shows it; after a purchase its last page."""
        return self._visit().text

    @property
    def available_actions(self) -> dict[str, Any]:
        """As the original's `get_available_actions`."""
        session = self._visit()
        return {"has_search_bar": session.has_search_bar, "clickables": list(session.clickables)}

    @property
    def admissible(self) -> list[str]:
        """The actions that a prompt lists; a search can also be made from every other page. Where they are ranked, each
        is one that the shop accepts as it stands, and options that are chosen already are left out."""
        session = self._visit()
        clicks = [f"click[{name}]" for name in session.clickables if name not in ("search", "")]
        if self._ranks:
            chosen = session.options.values() if session.place == "item" else ()
            clicks = [c for c in clicks if parse(c) == ("click", c[6:-1]) and c[6:-1] not in chosen]
        searches = prompt.searches(session.goal) if self._ranks else ["search[<your query>]"]
        return searches + clicks if session.has_search_bar else clicks

    def facts(self, task: int) -> TaskFacts:
        """Named by goal and ASIN. Reachable is what an oracle reaches that buys just what the goal asks for: of the 128
        evaluation tasks of the original's 1,000 products 125, and 6,452 of their 6,910 goals."""
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
        """A page as history shows it: the task is in the prompt already."""
        task = self._visit().goal["instruction_text"].strip()
        return page.replace(f"Instruction:{SEPARATOR}{task}{SEPARATOR}", "", 1)

    def _cut(self, page: str) -> str:
        """A page as the prompt shows it."""
        limit = self._max_text
        return page if limit is None else SEPARATOR.join(_shortened(text, limit) for text in page.split(SEPARATOR))


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()}..."
