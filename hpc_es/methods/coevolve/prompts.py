"""What a model is asked to write, and what its answer says.

Function names and signatures are the published ones; the words are our own. An answer holds a description in braces and
a program. Invariant: `read` takes time linear in the answer, which is cut at MAX_ANSWER characters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_ANSWER = 20_000
"""Characters of an answer that are read; no answer of 1,024 tokens is longer in practice."""
_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)
_BEGINS = ("import ", "from ", "def ", "@")
_CONTINUES = (*_BEGINS, " ", "\t", "#", ")", "]", "}", "class ")


@dataclass(frozen=True)
class Problem:
    """A task as a model sees it."""

    task: str
    signature: str
    """Name and parameters of the function that a program defines."""
    meaning: str
    """What the parameters and the result are."""


PROBLEMS = {
    "tsp_constructive": Problem(
        "Design a rule that builds a short round trip through all nodes in the plane. The trip starts at one node; the "
        "rule then chooses the next node again and again, until all are visited, and the trip returns to its start.",
        "select_next_node(current_node, destination_node, unvisited_nodes, distance_matrix)",
        "current_node and destination_node (where the trip must end) are indices of nodes; unvisited_nodes is a numpy "
        "array of indices, sorted by their distance from current_node; distance_matrix is a numpy array of the "
        "distances between all nodes. Return the index of the next node, one of unvisited_nodes.",
    ),
    "kp_constructive": Problem(
        "Design a rule that fills a knapsack so that its items have the highest total value without exceeding its "
        "capacity. The rule chooses one item after another, until no remaining item fits.",
        "select_next_item(remaining_capacity, weights, values)",
        "remaining_capacity is a number; weights and values are numpy arrays of the remaining items. Return the index "
        "of the next item in these arrays, an integer; its weight must not exceed remaining_capacity.",
    ),
    "asp_constructive": Problem(
        "Design a priority for building a large admissible set: vectors of length n with entries 0, 1 and 2, of which "
        "exactly w are not 0, such that any three of them are told apart in some coordinate. Vectors are added "
        "greedily by descending priority, as long as the set stays admissible.",
        "priority(el, n, w)",
        "el is a candidate vector, a tuple of n integers; n and w are integers. Return a number: the priority of "
        "adding el to the set.",
    ),
    "tsp_aco": Problem(
        "Design the heuristic values that guide an ant colony towards a short round trip through all nodes in the "
        "plane. Ants prefer moves between nodes with a high value.",
        "heuristics(distance_matrix)",
        "distance_matrix is a numpy array of the distances between all nodes, with ones on its diagonal. Return an "
        "array of the same shape with a positive value for every move.",
    ),
    "cvrp_aco": Problem(
        "Design the heuristic values that guide an ant colony towards short routes of vehicles with limited capacity. "
        "Every route starts and ends at the depot, node 0, and every customer is served once. Ants prefer moves with a "
        "high value.",
        "heuristics(distance_matrix, coordinates, demands, capacity)",
        "distance_matrix is a numpy array of the distances between all nodes, with ones on its diagonal; coordinates "
        "(two per node) and demands (0 for the depot) are numpy arrays; capacity is a number. Return an array of the "
        "shape of distance_matrix with a positive value for every move.",
    ),
    "bpp_offline_aco": Problem(
        "Design the heuristic values that guide the packing of items into as few bins of equal capacity as possible. A "
        "bin next takes the item with the highest mean value together with the items in it.",
        "heuristics(demand, capacity)",
        "demand is a numpy array of the sizes of all items; capacity is an integer. Return a square array with a "
        "positive value for every pair of items: how good it is to put them into the same bin.",
    ),
}

OPERATORS = {
    "i1": "Write a new heuristic.",
    "e1": "Write a new heuristic in a form that is completely different from the ones above.",
    "e2": "First find the idea that the heuristics above share. Then write a new heuristic that rests on this idea, "
    "but takes a form different from theirs.",
    "m1": "Write a new heuristic in a different form, as a modified version of the one above.",
    "m2": "Find the main parameters of the heuristic above, and write a new one with different settings of them.",
}
"""What each operator of EoH asks for: i1 has no parents, e1 and e2 have two, m1 and m2 have one."""


@dataclass(frozen=True)
class Heuristic:
    """A proposal: what it does in words, and its program."""

    description: str
    code: str

    @property
    def text(self) -> str:
        """The text of its context, which `read` turns into the same heuristic."""
        return f"{{{self.description}}}\n```python\n{self.code}\n```"


def ask(problem: str, operator: str = "i1", parents: Sequence[str] = ()) -> str:
    """The prompt for one proposal; `parents` are texts of contexts."""
    about = PROBLEMS[problem]
    shown = [f"Heuristic {number}:\n{text}" for number, text in enumerate(parents, start=1)]
    return "\n\n".join(
        [
            about.task,
            *shown,
            OPERATORS[operator],
            "First describe the heuristic's idea in one sentence inside braces { }. Then write it in Python, in a code "
            f"block, as the function {about.signature}. {about.meaning} Give no further explanation.",
        ]
    )


def read(answer: str) -> Heuristic | None:
    """The heuristic in an answer; None if it holds no program."""
    answer = answer[:MAX_ANSWER]
    code, before = _program(answer)
    if not code:
        return None
    return Heuristic(_description(before), code)


def _description(text: str) -> str:
    """Text inside the first braces."""
    _, opened, rest = text.partition("{")
    inside, closed, _ = rest.partition("}")
    return " ".join(inside.split()) if opened and closed else ""


def _program(answer: str) -> tuple[str, str]:
    """(program, text before it): the last code block with a function, or else all lines that look like code."""
    fences = list(_FENCE.finditer(answer))
    blocks = [
        (one.start(), answer[one.end() : two.start()]) for one, two in zip(fences[::2], fences[1::2], strict=False)
    ]
    if len(fences) % 2:  # the answer was cut within its last block
        blocks.append((fences[-1].start(), answer[fences[-1].end() :]))
    for start, block in reversed(blocks):
        if "def " in block:
            return block.strip("\n"), answer[:start]
    lines = answer.split("\n")
    first = next((number for number, line in enumerate(lines) if line.startswith(_BEGINS)), None)
    if first is None or "def " not in answer:
        return "", answer
    last = max(number for number, line in enumerate(lines) if line.startswith(_CONTINUES))
    return "\n".join(lines[first : last + 1]), "\n".join(lines[:first])
