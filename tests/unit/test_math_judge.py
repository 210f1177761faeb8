"""math_tool's judge: what counts as a right answer, and what judging costs at most."""

import contextlib
import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpc_es import envs
from hpc_es.envs.math_tool import judge
from hpc_es.envs.math_tool.judge import is_right, number
from hpc_es.envs.sandbox import Execution
from hpc_es.errors import ConfigError, EnvError


@pytest.mark.parametrize(
    ("right", "answer"),
    [
        ("18", r"\$18"),
        ("1000", "1,000"),
        ("70000", "70{,}000."),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{2}{9}", r"\dfrac{4}{18}"),
        ("-3/4", r"-\frac{3}{4}"),
        ("C", "C"),
    ],
)
def test_plain_numbers_need_no_algebra(right: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "Sandbox", None)
    assert is_right(right, answer)


@pytest.mark.parametrize("answer", ["19", "-18", "18,000", r"\frac{18}{7}"])
def test_other_numbers_are_wrong(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "Sandbox", None)
    assert not is_right("18", answer)


def test_only_plain_numbers_are_read_as_numbers() -> None:
    for text in ("", "1,00", "½", "٣", "12 cm", "--3", "3/0", r"\frac{1}{0}", "9" * 101, "1e5", "0x10", "nan"):
        assert number(text) is None, text


def test_algebra_is_left_to_math_verify() -> None:
    pairs = [
        ("x^2 - 3x - 10", "(x+2)(x-5)", True),
        ("18", r"18 \text{ dollars}", True),
        (r"\frac{1}{3}", "0.333333", True),
        ("18", r"\frac{", False),
        ("18", "\ud800", False),
    ]
    with ThreadPoolExecutor(2) as pool:  # not the main thread, where alone math-verify's own limits work
        assert list(pool.map(lambda pair: is_right(*pair[:2]), pairs)) == [pair[2] for pair in pairs]


@pytest.mark.parametrize(
    ("right", "answer"),
    [
        *[
            ("42", text)
            for text in (r"42\text{ or anything}", r"42\text{ or so}\text{ more}", r"42\mathrm{ or anything}")
        ],
        *[
            ("42", text)
            for text in (r"42\textit{ or 43}", r"42\text{ 43}", r"42\text{ (not 43)}", r"42\text{ a {or} b}")
        ],
        *[
            ("42", text)
            for text in (r"41\to 42", r"41 \Rightarrow 42", r"43\implies 42", r"42 \text{ but also others}")
        ],
        ("C", r"C\text{ or A}"),
        ("7", r"7\text{ which is what all of this comes to}"),
    ],
)
def test_an_answer_that_says_more_than_a_value_and_its_unit_is_wrong(
    right: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "Sandbox", None)  # it needs no algebra to see that
    assert not is_right(right, answer)


VERDICTS = [
    ("42", r"4200\%", False),
    ("42", "4200 percent", False),
    ("42", r"42\%", True),
    ("0.5", r"50\%", True),
    (r"50\%", "0.5", True),
    (r"50\%", "50", True),
    ("0.1,0.2", r"10\%,20\%", True),
    ("0.000000001", "0.0", False),
    (r"10^{-9}", "0.0", False),
    ("0", "0.0000001", False),
    ("0.0000012", "0.000001", False),
    ("0", "0.0", True),
    (r"\frac{1}{10^{9}}", "0.000000001", True),
    ("42", "41=42", False),
    ("42", "x=41=42", False),
    ("42", r"6 \cdot 7=42", True),
    ("42", "41, 42", False),
    ("42", r"42\text{ or }41", False),
    ("1,2", r"x=1\text{ or }x=2", True),
    ("42", r"42\text{ cm}^2", True),
    ("42", r"\text{42}", True),
    ("42", r"42\text{ m^2}", True),
    ("42", r"42\text{ miles per hour}", True),
    (r"10^{400}", "10^{400}+0", True),
]


class NoSandbox:
    """Runs the judge's program in this process, where the algebra is loaded once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "NoSandbox":
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, command: list[str], stdin: str) -> Execution:
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr("sys.stdin", io.StringIO(stdin))
            exec(command[2], {})
        return Execution(said.getvalue(), 0, "exit", 0.0)


def test_percentages_numbers_near_zero_and_several_answers_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "Sandbox", NoSandbox)
    found = [(right, given, is_right.__wrapped__(right, given)) for right, given, _ in VERDICTS]
    assert found == VERDICTS


def test_an_expression_that_never_ends_is_wrong_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "LIMITS", judge.LIMITS.model_copy(update={"cpu_seconds": 5}))
    assert not is_right("3", "9^{9^{9^{9}}}")


def test_an_answer_is_never_run_as_a_program() -> None:
    assert not is_right("3", "print('equal')")


def test_a_very_long_answer_is_wrong_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "Sandbox", None)
    assert not is_right("3", "3+0" * 1000)


def test_a_judge_that_cannot_run_is_a_fault_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_PROGRAM", "import no_such_module")
    with pytest.raises(EnvError, match=r"math-verify cannot be run: .*no_such_module"):
        is_right("3", "x + 3 - x + 0")


def test_a_comparison_that_got_no_processor_time_is_a_fault_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "LIMITS", judge.LIMITS.model_copy(update={"seconds": 0.1}))
    with pytest.raises(EnvError, match=r"not compared within 0\.1 s"):
        is_right("3", "x + 3 - x + 1 - 1")


def test_the_clock_on_the_wall_decides_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import signal; signal.alarm = lambda seconds: seconds and signal.raise_signal(signal.SIGALRM)\n"
    monkeypatch.setattr(judge, "_PROGRAM", slow + judge._PROGRAM)
    assert is_right("3", "x + 3 - x + 2 - 2")


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match=r"pip install 'hpc_es\[math\]'"):
        envs.make("math_tool")


def test_making_it_loads_no_algebra_into_the_worker() -> None:
    code = (
        "import sys, hpc_es.envs as envs; envs.make('math_tool').reset(0); "
        "sys.exit(bool({'sympy', 'math_verify'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
