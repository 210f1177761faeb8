r"""Mathematics with a tool, as in Agentic ESOpt (Zheng et al., 2026): ReAct, at most 50 turns, one program per turn.

Reward is 1 for a right answer in \boxed{...} after at least one program, else 0. A turn with neither program nor answer
is refused with feedback. An episode that exceeds the context fails.
Invariant: a failing program is an outcome that the agent sees, not an error; a failing sandbox is a fault, never
reward 0.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, validate_call

from hpc_es.envs import problems
from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.envs.math_tool import judge, prompt
from hpc_es.envs.sandbox import Execution, Limits, Sandbox, require_sandbox
from hpc_es.errors import EnvError

EXAMPLES = Path(__file__).with_name("examples.jsonl")
PACKAGES = ("sympy", "mpmath", "numpy")
"""Packages that the agent's programs can import."""


class MathTool(Env):
    history = None
    forgets = False
    strip_thinking = True

    @validate_call
    def __init__(
        self,
        *,
        data: str | None = None,
        data_dir: Path | None = None,
        split: problems.Split = "train",
        max_turns: Annotated[int, Field(ge=1)] = 50,
        require_tool: bool = True,
        tools: Annotated[tuple[prompt.Tool, ...], Field(min_length=1)] = prompt.TOOLS,
        hint: bool = True,
        style: prompt.Style = "full",
        limits: Limits | None = None,
    ) -> None:
        """Problems come from a data set, your own file, or a few examples in this package.

        data: dapo, aime_2026 or gsm8k (with their files in data_dir), or the path of a JSON-lines file with `question`
            or `problem`, and `answer`; `{split}` in the path stands for the split. By default, a few invented problems.
        data_dir: folder with the files of the data set.
        split: for dapo, `train` is dapo_evolve.jsonl and `eval` is dapo_test.jsonl.
        max_turns: most turns per episode.
        require_tool: whether an answer before any program scores 0.
        tools: `bash`, `python` or both; the published protocol has only bash, from which Python can be called.
        hint: whether the agent is told to answer in its last turn.
        style: `short` is a prompt for small models.
        limits: limits of each program, as in `sandbox.Limits`; the middle of a longer output is left out.

        Errors: ConfigError when problems cannot be read, programs cannot be run, or answers cannot be checked here.
        """
        require_sandbox()
        judge.require_math_verify()
        path = EXAMPLES if data is None else problems.find(data, split, data_dir)
        self._problems = problems.read(path, split)
        self.num_tasks = len(self._problems)
        self._max_turns, self._require_tool, self._style = max_turns, require_tool, style
        self._tools, self._hint = tuple(dict.fromkeys(tools)), hint
        self._limits = limits or Limits()
        self._sandbox: Sandbox | None = None
        self._running = False

    def facts(self, task: int) -> TaskFacts:
        """The problem's id; the shortest success takes one program and an answer."""
        return TaskFacts(self._problem_of(task).id, horizon=2 if self._require_tool else 1)

    def reset(self, task: int) -> Observation:
        self._problem = self._problem_of(task)
        self.close()
        self._num_turns = self._num_calls = 0
        self._running = True
        told = prompt.rules(self._style, self._limits, PACKAGES, self._require_tool, self._max_turns, self._tools)
        return Observation((Message("system", told), Message("user", self._problem.question)))

    def step(self, text: str) -> StepResult:
        if not self._running:
            raise EnvError("no episode is running; call reset first")
        asked = prompt.read(text, self._tools)
        self._num_turns += 1
        if isinstance(asked, prompt.Answer):
            return self._end(asked.text)
        if isinstance(asked, prompt.Refusal):
            return self._continue(prompt.refusal(asked, self._style, self._tools), {"refused": asked.why}, invalid=True)
        ran = self._run(asked)
        self._num_calls += 1
        info = {"tool": asked.tool, "ended": ran.ended, "status": ran.status}
        return self._continue(prompt.output(ran, self._limits), info)

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
        self._sandbox = None

    def _problem_of(self, task: int) -> problems.Problem:
        if not 0 <= task < self.num_tasks:
            raise EnvError(f"task {task} does not exist; tasks are 0..{self.num_tasks - 1}")
        return self._problems[task]

    def _run(self, call: prompt.Call) -> Execution:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._limits, packages=PACKAGES)
        return self._sandbox.run(call.code if call.tool == "bash" else ["python3", "-c", call.code])

    def _continue(self, feedback: str, info: dict[str, Any], invalid: bool = False) -> StepResult:
        """Give feedback and continue with the next turn, or end the episode after the last one."""
        left = self._max_turns - self._num_turns
        if left == 0:
            self._finish()
            return StepResult(None, 0.0, terminated=False, truncated=True, invalid=invalid, info=info)
        if left == 1 and self._hint:
            feedback += f"\n{prompt.LAST_TURN}"
        return StepResult(Observation((Message("user", feedback),)), 0.0, False, False, invalid=invalid, info=info)

    def _end(self, answer: str) -> StepResult:
        is_right = judge.is_right(self._problem.answer, answer)
        success = is_right and (self._num_calls > 0 or not self._require_tool)
        self._finish()
        info = {"answer": answer, "right": is_right, "calls": self._num_calls}
        return StepResult(None, float(success), terminated=True, truncated=False, success=success, info=info)

    def _finish(self) -> None:
        self._running = False
        self.close()
