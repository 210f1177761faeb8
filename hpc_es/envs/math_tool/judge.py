"""Decide whether an answer is right: plain numbers are compared directly, everything else by math-verify.

Invariant: an answer that cannot be compared within the limits of CPU time and memory is wrong, not an error. The load
of the machine must not decide, so a comparison that got no CPU time is a fault. Algebra runs in a sandbox of its own,
because sympy may compute for ever on an expression, and evaluates some expressions as code while parsing.
"""

import importlib.util
import json
import re
from fractions import Fraction
from functools import lru_cache

from hpc_es.envs.sandbox import Limits, Sandbox
from hpc_es.errors import ConfigError, EnvError

LIMITS = Limits(seconds=45, cpu_seconds=10, memory_mib=1024, output_chars=10_000)
"""Limits of one comparison, of which importing sympy takes some seconds. They replace math-verify's own limits, which
count wall-clock time and so depend on the load."""
MAX_CHARACTERS = 1000
"""Most characters of an answer; no right one is longer."""
_PACKAGES = ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "mpmath")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,100})(\.\d{1,100})?|[+-]?\.\d{1,100}", re.ASCII)
_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\\[dt]?frac\{(\d{1,100})\}\{(\d{1,100})\}|([+-]?\d{1,100})/(\d{1,100})", re.ASCII
)
_STYLED = re.compile(
    r"\\(?:text|textrm|textbf|textit|textsf|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)\s*"
    r"\{(?P<words>(?:[^{}]|\{[^{}]*\})*)\}"
)
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\$?\^?\{?[234]\}?\$?")
_MAX_WORDS = 4
_OTHER_CLAIM = re.compile(
    r"\b(or|and|nor|not|no|none|never|any(thing|one)?|something|every(thing|one)|(what|which|who)ever|n?either|maybe|"
    r"perhaps|possibly|probably|if|unless|otherwise|else|but|is|are|was|wrong|false|incorrect|except|to|through|versus|"
    r"vs|answer|i|you|think|guess)\b",
    re.IGNORECASE,
)
"""Words that never appear in a unit, and that turn an answer into a different one or into several."""
_SEPARATORS = ("or", "and")
"""math-verify reads two answers with one of these words between them as a set, which no single number equals."""
_ARROW = re.compile(r"\S\s*\\(?:to|implies|(?:long)?(?:[rR]ight|[lL]eftright)arrow)(?![A-Za-z])")
_PERCENT = re.compile(r"(?<!%)\\?%(?!\\?%)|\bpercent\b")

_PROGRAM = r"""
import json, sys
from math_verify import parse, verify
from sympy import Eq, FiniteSet

MARGIN = 1e-3  # of the larger; math-verify rounds to six decimals, however small the numbers

def read(text):
    return parse(r"\boxed{" + text + "}", parsing_timeout=None)

def numbers(parsed):
    found = parsed[0] if parsed else None
    members = list(found) if isinstance(found, FiniteSet) else [found]
    members = [each.rhs if isinstance(each, Eq) else each for each in members]
    if not all(getattr(each, "is_number", False) for each in members):
        return None
    return [value(each) for each in members]

def value(number):
    return number.doit().evalf(30)

def close(one, other):
    one, other, apart = (abs(each).evalf(30) for each in (one, other, one - other))
    return bool(apart <= MARGIN * max(one, other))

def contradicts_itself(parsed):
    equations = [each for found in parsed if hasattr(found, "atoms") for each in found.atoms(Eq)]
    sides = [(each.lhs, each.rhs) for each in equations if each.lhs.is_number and each.rhs.is_number]
    return any(not close(value(left), value(right)) for left, right in sides)

def same(right, given):
    if not verify(right, given, timeout_seconds=None) or contradicts_itself(given):
        return False
    ours, theirs = numbers(right), numbers(given)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return True
    scales = (1, 100) if "%" in texts[0] else (1,)  # an answer of 50 % is given as 50, 50 % or 0.5
    return all(any(close(scale * one, other) for other in theirs for scale in scales) for one in ours)

try:
    texts = json.load(sys.stdin)
    right, *given = map(read, texts)
    equal = same(right, given[0])
    if len(given) > 1 and not equal:  # in per cent, where the answer is a share: 50 % is one half, 4200 % is not 42
        ours = numbers(right)
        equal = ours is not None and all(abs(each) <= 1 for each in ours) and same(right, given[1])
    print("equal" if equal else "different")
except Exception:
    print("not to be compared")
"""


def require_math_verify() -> None:
    """Check that math-verify is installed. Errors: ConfigError."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"answers are checked by math-verify; missing: {missing[0]}; pip install 'hpc_es[math]'")


@lru_cache(maxsize=2**14)
def is_right(right: str, given: str) -> bool:
    """Whether two answers in LaTeX are equal.

    Errors: EnvError when they cannot be compared, for example because the machine is too busy.
    """
    if len(given) > MAX_CHARACTERS:
        return False
    if right == given or (number(right) is not None and number(right) == number(given)):
        return True
    if None not in (number(right), number(given)) and "." not in right + given:  # decimals are equal when rounded
        return False
    if _claims_more(right, given):
        return False
    readings = [given]
    if _PERCENT.search(given) and not _PERCENT.search(right):
        readings.insert(0, _PERCENT.sub("", given))
    with Sandbox(LIMITS, packages=_PACKAGES) as sandbox:
        ran = sandbox.run(["python3", "-c", _PROGRAM], stdin=json.dumps([right, *readings]))
    verdict = ran.output.strip().rpartition("\n")[2]
    if ran.ended == "exit" and ran.status > 0:
        raise EnvError(f"math-verify cannot be run: {verdict}")
    if ran.ended == "time":
        raise EnvError(f"an answer was not compared within {LIMITS.seconds:g} s: play fewer episodes at once")
    return verdict == "equal"


def _claims_more(right: str, given: str) -> bool:
    """Whether an answer says more than a value and its unit. math-verify ignores such words, and also everything before
    the last arrow of a chain."""
    if _ARROW.search(given) and not _ARROW.search(right):
        return True
    whole = _STYLED.fullmatch(given.strip(" $."))
    return whole is None and any(_is_a_claim(found["words"], right) for found in _STYLED.finditer(given))


def _is_a_claim(text: str, right: str) -> bool:
    """Whether words in \\text and similar beside an answer are neither its unit nor part of the right answer."""
    if text.strip() in (*_SEPARATORS, "") or text.strip() in right:
        return False
    has_digits = any(character.isdigit() for character in _UNIT_POWER.sub("", text))
    num_words = len(re.findall("[A-Za-z]+", text))
    return has_digits or num_words > _MAX_WORDS or _OTHER_CLAIM.search(text) is not None


def number(text: str) -> Fraction | None:
    """A plain number or fraction, with or without dollar signs and thousands separators; None for anything else."""
    bare = text.replace("\\$", "").replace("$", "").replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    bare = bare.strip().removesuffix(".")
    if _NUMBER.fullmatch(bare):
        return Fraction(bare.replace(",", ""))
    if fraction := _FRACTION.fullmatch(bare):
        above, below = (int(part) for part in fraction.groups()[1:] if part is not None)
        return Fraction(-above if fraction["sign"] == "-" else above, below) if below else None
    return None
