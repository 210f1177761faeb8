r"""The agent's prompts, and the parsing of its answers.

A turn is thought, then one fenced block of ```bash or ```python, which is run, or the answer in \boxed{...}. Text after
the first block is ignored, because the model wrote it before it saw the block's output.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from hpc_es.envs.sandbox import FOLDER, Execution, Limits

Style = Literal["full", "short"]
Tool = Literal["bash", "python"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>bash|sh|shell|python3?|py)"
    r"(?:[ \t]++(?P<line>[^\n`]++)(?P<end_of_line>```)"
    r"|[ \t]*\r?(?:\n|\Z)(?P<code>.*?)(?P<end>^[ \t]*```[ \t]*\r?$|\Z))",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
"""A block of several lines, or one on a single line: ```bash ls```"""
_BRACE = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)

_RULES = (
    "Solve the problem in steps, with the help of a computer. In each turn, think, and then do one of two things.\n"
    "1. Run a program: write one block that begins with {blocks} and ends with ```. It is run in the "
    "folder {folder}, and you are shown what it prints. Every block is a new process; files in the folder stay. There "
    "is no network. Python has {packages}. A program may take {seconds:g} seconds and {memory} MiB.\n"
    "2. Give the final answer, in a turn without a block: \\boxed{{answer}}, only the number or expression.\n"
    "{required}You have {max_turns} turns."
)
_REQUIRED = "Run at least one program before you answer, if only to check: without one, no answer counts. "
_SHORT = (
    "Solve the problem with {language}. First compute, for example:\n```{tool}\n{example}\n```\n"
    "You are shown the output. Then answer, for example: \\boxed{{84}}"
)
_LANGUAGES: dict[Tool, tuple[str, str]] = {"python": ("Python", "print(12 * 7)"), "bash": ("bash", "echo $((12 * 7))")}
"""For each tool, its name in a short prompt, and an example."""
_HOW = {
    "full": "Write one block of {blocks}, closed by ```, or the final answer as \\boxed{{answer}}.",
    "short": "Write a ```{tool} block, or the answer as in \\boxed{{84}}.",
}
_ENDED = {
    "time": "it ran for {0.seconds:g} seconds",
    "cpu": "it used {0.cpu_seconds:g} seconds of processor time",
    "memory": "it used more than {0.memory_mib} MiB of memory",
    "processes": "it started more than {0.processes} processes",
    "output": "it wrote without end",
}


@dataclass(frozen=True)
class Call:
    tool: Tool
    code: str


@dataclass(frozen=True)
class Answer:
    text: str


@dataclass(frozen=True)
class Refusal:
    why: str


def read(text: str, tools: tuple[Tool, ...] = TOOLS) -> Call | Answer | Refusal:
    """The action of a turn: its first block, or else its last box. A block for any other tool is refused."""
    block = _BLOCK.search(text)
    if block is None:
        answer = last_boxed(text)
        return Answer(answer) if answer else Refusal("There is neither a block nor an answer in this.")
    if not (block["end"] or block["end_of_line"]):
        return Refusal("The block has no end, so it was not run.")
    code = block["line"] or block["code"]
    if not code.strip():
        return Refusal("The block is empty.")
    tool: Tool = "python" if block["language"].lower().startswith("py") else "bash"
    return Call(tool, code) if tool in tools else Refusal(f"There is no {tool} tool, so the block was not run.")


def last_boxed(text: str) -> str:
    r"""The content of the last `\boxed{...}` with matching braces; empty if there is none."""
    still_open: list[int] = []  # start of each open box; -1 for other braces
    first = last = -1
    for brace in _BRACE.finditer(text):
        if brace["box"]:
            still_open.append(brace.end())
        elif brace["open"]:
            still_open.append(-1)
        elif brace["close"] and still_open and (start := still_open.pop()) > first:
            first, last = start, brace.start()
    return text[first:last].strip() if first >= 0 else ""


def rules(
    style: Style,
    limits: Limits,
    packages: tuple[str, ...],
    require_tool: bool,
    max_turns: int,
    tools: tuple[Tool, ...] = TOOLS,
) -> str:
    """The rules that precede every problem."""
    if style == "short":
        language, example = _LANGUAGES[_simplest(tools)]
        return _SHORT.format(language=language, tool=_simplest(tools), example=example)
    return _RULES.format(
        blocks=_blocks(tools),
        folder=FOLDER,
        packages=", ".join(packages),
        seconds=limits.seconds,
        memory=limits.memory_mib,
        required=_REQUIRED if require_tool else "",
        max_turns=max_turns,
    )


def output(ran: Execution, limits: Limits) -> str:
    """The text that the agent is shown after a program has run."""
    shown = ran.output.rstrip("\n") or "(nothing)"
    if ran.ended != "exit":
        shown += f"\n[ended: {_ENDED[ran.ended].format(limits)}]"
    elif ran.status:
        shown += f"\n[exit status {ran.status}]"
    return f"Output:\n{shown}"


def refusal(refused: Refusal, style: Style, tools: tuple[Tool, ...] = TOOLS) -> str:
    """Why a turn was refused, and how to answer."""
    return f"{refused.why} {_HOW[style].format(blocks=_blocks(tools), tool=_simplest(tools))}"


def _blocks(tools: tuple[Tool, ...]) -> str:
    """The possible starts of a block, as text."""
    return " or ".join(f"```{tool}" for tool in tools)


def _simplest(tools: tuple[Tool, ...]) -> Tool:
    """The tool that a short prompt offers: Python, if there is a choice."""
    return "python" if "python" in tools else tools[0]


LAST_TURN = "This is your last turn: answer now."
