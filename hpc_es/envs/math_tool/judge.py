"""Is an answer the right one? By math-verify, but for plain numbers, which need no algebra.

Invariant: an answer that cannot be compared, or not within the limits, is wrong, never an error. Algebra runs in a
sandbox of its own, because sympy may compute for ever on an expression, and reads some by evaluating them.
"""

import importlib.util
import json
import re
from fractions import Fraction
from functools import lru_cache

from hpc_es.envs.sandbox import Limits, Sandbox
from hpc_es.errors import ConfigError, EnvError

LIMITS = Limits(seconds=60, cpu_seconds=20, memory_mib=1024, output_chars=10_000)
"""Of one comparison, of which importing sympy takes a second or two. Processor time decides, not how busy the machine
is."""
MAX_CHARACTERS = 1000
"""Of an answer; no right one is longer."""
_PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "mpmath")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,100})(\.\d{1,100})?|[+-]?\.\d{1,100}")
_PROGRAM = r"""
import json, sys
from math_verify import parse, verify
try:
    right, given = (parse(r"\boxed{" + text + "}") for text in json.load(sys.stdin))
    print("equal" if verify(right, given) else "different")
except Exception:
    print("not to be compared")
"""


def require_math_verify() -> None:
    """Errors: ConfigError when it is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"answers are checked by math-verify; missing: {missing[0]}; pip install 'hpc_es[math]'")


@lru_cache(maxsize=2**14)
def is_right(right: str, given: str) -> bool:
    """Whether two answers in LaTeX are equal. Errors: EnvError when they cannot be looked at."""
    if len(given) > MAX_CHARACTERS:
        return False
    numbers = number(right), number(given)
    if None not in numbers:
        return numbers[0] == numbers[1]
    with Sandbox(LIMITS, packages=_PACKAGES) as sandbox:
        ran = sandbox.run(["python3", "-c", _PROGRAM], stdin=json.dumps([right, given]))
    if ran.ended == "exit" and ran.status > 0:
        raise EnvError(f"math-verify cannot be run: {ran.output.strip()}")
    return ran.output.strip().rpartition("\n")[2] == "equal"


def number(text: str) -> Fraction | None:
    """A plain number, perhaps with dollar signs and thousands separators around and in it; else None."""
    bare = text.replace("\\$", "").replace("$", "").replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    bare = bare.strip().removesuffix(".")
    return Fraction(bare.replace(",", "")) if _NUMBER.fullmatch(bare, re.ASCII) else None
