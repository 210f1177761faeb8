"""The agent's prompts, and the parsing of its answers."""

import re
from dataclasses import dataclass

from hpc_es.envs.sandbox import Execution

_ACTIONS = re.compile(
    r"<(?P<kind>bash|answer)>(?P<text>.*?)(?:</(?P=kind)>|\Z)|```(?:bash|sh)\s(?P<command>.*?)(?:```|\Z)", re.DOTALL
)
"""A fenced bash block also counts as a command, because many models use no other form."""
NO_ACTION = "That was no action. Write <bash>a command</bash> or <answer>the answer</answer>."
NO_ANSWER = "That was no answer. Write <answer>the answer</answer>."


@dataclass(frozen=True)
class Action:
    kind: str
    """`bash` or `answer`."""
    text: str


def read(text: str) -> Action | None:
    """The first action of an answer, or None if there is no action or an empty one.

    Later actions are ignored, because the model wrote them before seeing any output. The end tag may be missing,
    because it may be a stop string.
    """
    found = _ACTIONS.search(text)
    if found is None:
        return None
    action = Action(found["kind"] or "bash", (found["text"] or found["command"] or "").strip())
    return action if action.text else None


def rules(page: str, max_turns: int) -> str:
    """The rules for an agent that works with bash on the image file `page`."""
    return (
        f"You answer a question about a scanned page. The page is the image file {page} in the current folder of a "
        "sandbox that has bash, tesseract and python3, and no network. You cannot look at the image yourself.\n"
        f"Work in steps, at most {max_turns}. In each step think briefly, then take one action:\n"
        f"<bash>a command</bash> runs it and shows you its output, for example <bash>tesseract {page} -</bash>\n"
        "<answer>the answer</answer> gives your answer and ends the task.\n"
        "The answer is a short text, in the words of the page. Run at least one command before you answer; an answer "
        "without any scores nothing."
    )


def outcome(ran: Execution) -> str:
    """The text that the agent is shown after a command."""
    text = f"Output:\n{ran.output.strip()}" if ran.output.strip() else "No output."
    if ran.ended != "exit":
        return f"{text}\n(stopped: its limit of {ran.ended} was reached)"
    return text if ran.status == 0 else f"{text}\n(exit status {ran.status})"


def question(text: str) -> str:
    return f"Question: {text}"


def question_about_image(text: str) -> str:
    """The question for a model that is shown the page as an image."""
    return (
        f"Question about this page: {text}\nThink briefly if you need to, then give a short answer in the words of the "
        "page inside <answer></answer>."
    )
