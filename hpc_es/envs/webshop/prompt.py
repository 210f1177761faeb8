"""The prompt of each turn, and the parsing of answers.

The setting is that of verl-agent, with our own wording: the task, the last few observations and actions, the current
observation exactly as the original shows it, and the admissible actions; the answer is thought, then
`<action>...</action>`. The styles `plain` and `short` are additions for small models.
"""

import re
from collections.abc import Sequence
from typing import Literal

from hpc_es.envs.webshop.goals import Goal

Style = Literal["think", "plain", "short"]
MAX_CHARACTERS = 13_000
"""A prompt with more characters drops its history."""
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_END = re.compile("</action>", re.IGNORECASE)

_NO_BRACKETS = str.maketrans("[]", "  ")

_RULES = (
    "You are shopping in WebShop, an online shop that shows its pages as text. Find a product that meets the task, "
    "choose the options that it asks for, and buy it."
)
_EXAMPLE = " For example: search[red lamp], then click[b000000000], then click[large], then click[buy now]."
_HOW_TO_ANSWER = {
    "think": (
        "Think step by step about what the page tells you and which action brings you closer to the purchase, inside "
        "<think> </think>. Then give exactly one of the actions above inside <action> </action>."
    ),
    "plain": "Answer with exactly one of the actions above and nothing else.",
    "short": "Answer with exactly one action.",
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
    """Write the prompt of one turn.

    `history` holds the last (observation, action) pairs; `num_turns` is the number of turns so far. The style `short`
    has an example instead of the list of actions.
    """
    now = [f"Turn {num_turns + 1} of {max_turns}. The page now:\n{observation}", _HOW_TO_ANSWER[style]]
    if style == "short":
        rules = _RULES + _EXAMPLE
    else:
        rules = _RULES
        now.insert(1, "Actions that you can take:\n" + "\n".join(actions))
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


def searches(goal: Goal) -> list[str]:
    """Searches offered to a ranking model: the whole instruction, without the price, and without the options.

    Brackets are left out, because they would end an action too early.
    """
    whole = goal["instruction_text"].lower()
    priceless = whole.partition(", and price lower than ")[0]
    first_option = next(iter(goal["goal_options"]), None) if isinstance(goal["goal_options"], dict) else None
    bare = priceless if first_option is None else priceless.partition(f" with {first_option}: ")[0]
    queries = (" ".join(query.translate(_NO_BRACKETS).split()) for query in (whole, priceless, bare))
    return [f"search[{query}]" for query in dict.fromkeys(queries) if query]


def read(answer: str) -> str:
    """The action in an answer, in lower case: the content of the last action tags, or the answer itself without
    tags."""
    # Stop at the last closing tag: after it, every opening tag would search the rest of the text in vain.
    ends = [match.end() for match in _END.finditer(answer)]
    tagged = _TAGGED.findall(answer, 0, ends[-1]) if ends else []
    return tagged[-1].strip().lower() if tagged else answer.strip()
