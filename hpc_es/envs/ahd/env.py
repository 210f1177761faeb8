"""Automatic heuristic design in one turn: the model writes a program, which is scored on a set of instances.

Invariant: a program's failure (no function of the right name, an exception, a wrong result, a time limit) is an outcome
with the reward for invalid programs; a failing sandbox is a fault, never a reward.
Source: Agentic ESOpt (Zheng et al., 2026), one proposal of its `Sample`.
"""

import math
from typing import Annotated, Literal

from pydantic import Field, validate_call

from hpc_es.envs.ahd.evaluate import evaluate
from hpc_es.envs.ahd.tasks import SEARCH_SIZE, SIZES, evaluation
from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.envs.sandbox import Limits, require_sandbox
from hpc_es.errors import ConfigError, EnvError
from hpc_es.methods.coevolve import prompts

ProblemName = Literal[
    "tsp_constructive", "kp_constructive", "asp_constructive", "tsp_aco", "cvrp_aco", "bpp_offline_aco"
]
INVALID = {
    "tsp_constructive": 0.75,
    "kp_constructive": 0.0,
    "asp_constructive": 0.0,
    "tsp_aco": 0.75,
    "cvrp_aco": 1.5,
    "bpp_offline_aco": 1.0,
}
"""Objective per node or item that stands for an invalid program: worse than that of a program that chooses blindly."""


class Ahd(Env):
    strip_thinking = True

    @validate_call
    def __init__(
        self,
        *,
        problem: ProblemName = "tsp_constructive",
        size: Annotated[int, Field(ge=1)] | None = None,
        split: Literal["train", "eval"] = "train",
        num_instances: Annotated[int, Field(ge=1)] = 64,
        seed: Annotated[int, Field(ge=0)] = 1234,
        waiting: bool = True,
        invalid_reward: Annotated[float, Field(le=0, allow_inf_nan=False)] | None = None,
        num_tasks: Annotated[int, Field(ge=1)] = 1,
        limits: Limits | None = None,
    ) -> None:
        """The reward is minus the mean length or number of bins, or the mean value or set size where more is better.

        problem: which task.
        size: nodes or items of an instance of the evaluation, or length of the vectors; by default, as in the search.
        split: `train` is the published set of search instances, of one size; `eval` are test instances of `size`.
        num_instances: most instances that a program is evaluated on.
        seed: seed of programs and ant colonies.
        waiting: whether ants of cvrp_aco pay for waiting at the depot, as published.
        invalid_reward: reward of an invalid program; by default below that of a program that chooses blindly.
        num_tasks: number of tasks, which are all the same.
        limits: limits of a program, as in `sandbox.Limits`; by default the published seconds, as CPU time.

        Errors: ConfigError when programs cannot be run here, or there are no instances of that size.
        """
        require_sandbox()
        size = size or SEARCH_SIZE[problem]
        if size not in SIZES[problem]:
            raise ConfigError(f"option size={size} must be one of {', '.join(map(str, SIZES[problem]))} for {problem}")
        is_search = split == "train"
        self.num_tasks = num_tasks
        self._task = evaluation(
            problem,
            size=None if is_search and problem != "asp_constructive" else size,
            split="train" if is_search else "test",
            waiting=waiting,
            num_instances=num_instances,
        )
        invalid = -INVALID[problem] * self._task.instances.shape[1]
        self._invalid_reward = invalid if invalid_reward is None else invalid_reward
        self._problem, self._size, self._split, self._seed, self._limits = problem, size, split, seed, limits
        self._running = False

    def reset(self, task: int) -> Observation:
        self.facts(task)  # refuses a task that does not exist
        self._running = True
        return Observation((Message("user", prompts.ask(self._problem)),))

    def step(self, text: str) -> StepResult:
        if not self._running:
            raise EnvError("no episode is running; call reset first")
        self._running = False
        proposal = prompts.read(text)
        if proposal is None:
            return self._ended(math.nan, "no program")
        done = evaluate(proposal.code, self._task, seed=self._seed, limits=self._limits)
        return self._ended(done.objective, done.invalid)

    def facts(self, task: int) -> TaskFacts:
        """`tsp_constructive 50`"""
        super().facts(task)
        return TaskFacts(f"{self._problem} {self._size} {self._split} {task}", horizon=1)

    def _ended(self, objective: float, invalid: str) -> StepResult:
        is_valid = not invalid
        reward = -objective if is_valid else self._invalid_reward
        info = {"objective": objective} if is_valid else {"invalid": invalid}
        return StepResult(None, reward, True, False, success=is_valid, invalid=not is_valid, info=info)
