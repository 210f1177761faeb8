"""DocVQA for agents: a question about a scanned page, which the agent reads with OCR from bash.

The protocol is that of Agentic ESOpt (Zheng et al., 2026): each turn is one bash command or the answer, outputs are
returned as text, at most 50 turns. Reward is ANLS, success is an exact match; an answer before any command scores 0.
Invariant: a command that fails or exceeds its limits is an outcome that the agent sees; a failing sandbox is a fault.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, validate_call

from hpc_es.envs.base import Env, Message, Observation, StepResult, TaskFacts
from hpc_es.envs.docvqa import dataset, prompt
from hpc_es.envs.docvqa.anls import anls, is_exact
from hpc_es.envs.sandbox import Limits, Sandbox
from hpc_es.errors import ConfigError, EnvError


class DocVqa(Env):
    strip_thinking = True
    forgets = False  # an episode that exceeds the context fails
    history: int | None = None

    @validate_call
    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        split: dataset.Split = "train",
        page: Literal["tool", "image"] = "tool",
        max_turns: Annotated[int, Field(ge=1)] = 50,
        limits: Limits | None = None,
        num_tasks: Annotated[int, Field(ge=1)] = 1024,
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        """Questions come from the challenge's files, or are asked about generated pages.

        data_dir: folder with DocVQA's train_v1.0*.json, val_v1.0*.json and pages; by default pages are generated.
        split: `eval` is the challenge's validation split.
        page: `tool` is the published protocol; `image` shows the page to a vision-language model, which has no tools
            and answers immediately.
        limits: limits of each command, as in `sandbox.Limits`; the middle of a longer output is left out.
        num_tasks: number of generated pages.
        seed: seed of generated pages.

        Errors: ConfigError when data cannot be read, or with page=tool when commands cannot be run here.
        """
        if page == "tool":
            _require_tools()
        self._questions = (
            dataset.Drawn(split, num_tasks, seed) if data_dir is None else dataset.official(data_dir, split)
        )
        self.num_tasks = len(self._questions)
        if page == "image":
            self.history = 0  # every observation already contains the page
        self.shows_images = page == "image"
        self._max_turns, self._limits = max_turns, limits
        self._sandbox: Sandbox | None = None
        self._running = False

    def facts(self, task: int) -> TaskFacts:
        """The question's id; the shortest success takes one command and an answer, or only an answer if the model sees
        the page."""
        super().facts(task)
        return TaskFacts(f"question {self._questions.id(task)}", horizon=1 if self.shows_images else 2)

    def reset(self, task: int) -> Observation:
        super().facts(task)
        self.close()
        self._task, self._question = task, self._questions.question(task)
        self._num_turns = self._num_commands = 0
        self._running = True
        if self.shows_images:
            return self._show_page()
        self._name = f"page{self._question.suffix}"
        return Observation(
            (
                Message("system", prompt.rules(self._name, self._max_turns)),
                Message("user", prompt.question(self._question.text)),
            )
        )

    def step(self, text: str) -> StepResult:
        if not self._running:
            raise EnvError("no episode is running; call reset first")
        self._num_turns += 1
        action = prompt.read(text)
        if action is not None and action.kind == "answer":
            return self._finish(action.text)
        if action is not None and not self.shows_images:
            return self._continue(self._run(action.text))
        return self._continue(prompt.NO_ANSWER if self.shows_images else prompt.NO_ACTION, invalid=True)

    def close(self) -> None:
        self._running = False
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _run(self, command: str) -> str:
        """Run a command and return the text that the agent is shown."""
        if self._sandbox is None:
            self._sandbox = Sandbox(self._limits, {self._name: self._questions.page(self._task)})
        self._num_commands += 1
        return prompt.outcome(self._sandbox.run(command))

    def _continue(self, text: str, *, invalid: bool = False) -> StepResult:
        if self._num_turns == self._max_turns:
            self.close()
            return StepResult(None, 0.0, terminated=False, truncated=True, invalid=invalid)
        observation = self._show_page(text) if self.shows_images else Observation((Message("user", text),))
        return StepResult(observation, 0.0, terminated=False, truncated=False, invalid=invalid)

    def _finish(self, answer: str) -> StepResult:
        counts = self.shows_images or self._num_commands > 0
        accepted = self._question.accepted
        self.close()
        return StepResult(
            None,
            anls(answer, accepted) if counts else 0.0,
            terminated=True,
            truncated=False,
            success=counts and is_exact(answer, accepted),
            info={"answer": answer, "accepted": accepted},
        )

    def _show_page(self, complaint: str = "") -> Observation:
        text = f"{prompt.question_about_image(self._question.text)}\n{complaint}".strip()
        return Observation((Message("user", text, images=(self._questions.page(self._task),)),))


@cache
def _require_tools() -> None:
    """Check once per process that commands and tesseract work. Errors: ConfigError with the remedy."""
    with Sandbox() as sandbox:
        ran = sandbox.run("tesseract --version")
    if ran.status != 0:
        raise ConfigError(
            f"page=tool: the agent reads pages with tesseract, which does not run in a sandbox here "
            f"({ran.output.strip()}): install it below /usr on every node with workers (apt install tesseract-ocr, "
            "dnf install tesseract), or use page=image to show the page to the model"
        )
