"""What the model is shown in each turn, and how its answer is read.

The setting of verl-agent in words of our own: the task, the last few observations and actions, the current observation
letter by letter as the original shows it, the admissible actions; the answer is thought, then
`<action>...</action>`.
"""

import re
from collections.abc import Sequence
from typing import Literal

Style = Literal["think", "plain"]
MAX_CHARACTERS = 13_000
"""A longer prompt loses its history."""
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)

_HOW_TO_ANSWER = {
    "think": (
        "Think step by step about what the page tells you and which action brings you closer to the purchase, inside "
        "<think> </think>. Then give exactly one of the actions above inside <action> </action>."
    ),
    "plain": "Answer with exactly one of the actions above and nothing else.",
}


def write(
    task: str,
    observation: str,
    actions: Sequence[str],
    history: Sequence[tuple[str, str]],
    num_turns: int,
    max_turns: int,
    style: Style,
) -> str:
    """The prompt of one turn.

    history: the last (observation, action) pairs; num_turns: turns that were taken so far.
    """
    rules = (
        "You are shopping in WebShop, an online shop that shows its pages as text. Find a product that meets the task, "
        "choose the options that it asks for, and buy it."
    )
    now = (
        f"Turn {num_turns + 1} of {max_turns}. The page now:\n{observation}",
        "Actions that you can take:\n" + "\n".join(actions),
        _HOW_TO_ANSWER[style],
    )
    text = "\n\n".join((rules, f"Task: {task}", *_past(history, num_turns), *now))
    if history and len(text) > MAX_CHARACTERS:
        text = "\n\n".join((rules, f"Task: {task}", *now))
    return text


def _past(history: Sequence[tuple[str, str]], num_turns: int) -> list[str]:
    if not history:
        return []
    past = "\n".join(
        f"[Turn {turn}] page: {page}\n[Turn {turn}] your action: {action}"
        for turn, (page, action) in enumerate(history, num_turns - len(history) + 1)
    )
    return [f"The last {len(history)} of your {num_turns} turns so far:\n{past}"]


def read(answer: str) -> str:
    """The action in an answer: what the last action tags hold, in lower case; without tags, the answer itself."""
    tagged = _TAGGED.findall(answer)
    return tagged[-1].strip().lower() if tagged else answer.strip()
