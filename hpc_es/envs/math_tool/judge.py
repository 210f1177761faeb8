"""Is an answer the right one? By math-verify, but for plain numbers, which need no algebra.

Invariant: an answer that cannot be compared, or not within the limits of processor time and memory, is wrong, never an
error; how busy the machine is decides nothing, so a comparison that got no processor time is a fault. Algebra runs in
a sandbox of its own, because sympy may compute for ever on an expression, and reads some by evaluating them.
"""

import importlib.util
import json
import re
from fractions import Fraction
from functools import lru_cache

from hpc_es.envs.sandbox import Limits, Sandbox
from hpc_es.errors import ConfigError, EnvError

LIMITS = Limits(seconds=45, cpu_seconds=10, memory_mib=1024, output_chars=10_000)
"""Of one comparison, of which importing sympy takes some seconds. They stand in for math-verify's own limits, which go
by the clock on the wall."""
MAX_CHARACTERS = 1000
"""Of an answer; no right one is longer."""
_PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "mpmath")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,100})(\.\d{1,100})?|[+-]?\.\d{1,100}", re.ASCII)
_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\\[dt]?frac\{(\d{1,100})\}\{(\d{1,100})\}|([+-]?\d{1,100})/(\d{1,100})", re.ASCII
)
_PROGRAM = r"""
import json, sys
from math_verify import parse, verify
try:
    right, given = (parse(r"\boxed{" + text + "}", parsing_timeout=None) for text in json.load(sys.stdin))
    print("equal" if verify(right, given, timeout_seconds=None) else "different")
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
    """Whether two answers in LaTeX are equal.

    Errors: EnvError when they cannot be looked at, also because the machine is too busy.
    """
    if len(given) > MAX_CHARACTERS:
        return False
    if right == given or (number(right) is not None and number(right) == number(given)):
        return True
    if None not in (number(right), number(given)) and "." not in right + given:  # decimals are equal when rounded
        return False
    with Sandbox(LIMITS, packages=_PACKAGES) as sandbox:
        ran = sandbox.run(["python3", "-c", _PROGRAM], stdin=json.dumps([right, given]))
    verdict = ran.output.strip().rpartition("\n")[2]
    if ran.ended == "exit" and ran.status > 0:
        raise EnvError(f"math-verify cannot be run: {verdict}")
    if ran.ended == "time":
        raise EnvError(f"an answer was not compared within {LIMITS.seconds:g} s: play fewer episodes at once")
    return verdict == "equal"


def number(text: str) -> Fraction | None:
    """A plain number or fraction, perhaps with dollar signs and thousands separators around and in it; else None."""
    bare = text.replace("\\$", "").replace("$", "").replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    bare = bare.strip().removesuffix(".")
    if _NUMBER.fullmatch(bare):
        return Fraction(bare.replace(",", ""))
    if fraction := _FRACTION.fullmatch(bare):
        above, below = (int(part) for part in fraction.groups()[1:] if part is not None)
        return Fraction(-above if fraction["sign"] == "-" else above, below) if below else None
    return None
