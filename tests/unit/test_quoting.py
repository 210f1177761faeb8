"""Text quoted from outside is short and cannot control a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_es.errors import EnvError, HpcEsError, LaunchError
from hpc_es.quoting import MAX_MESSAGE, quote, quote_error, quote_value


def test_control_characters_are_made_visible():
    assert quote_error(ValueError("a\x00b\x1b[31mc\nd é")) == "ValueError: a\\x00b\\x1b[31mc\nd é"
    assert quote_error(ValueError("\udc80")) == "ValueError: \\udc80"


def test_the_middle_of_a_long_text_goes():
    shown = quote("begin " + "x" * 1_000_000 + " end")
    assert len(shown) <= 1000
    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "shortened from 1,000,010 characters" in shown


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


class Leaver(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)

    __repr__ = __str__


@pytest.mark.parametrize(
    "value", [Unspeakable(), Leaver(), 10**5000], ids=["an odd class", "a class that exits", "a long number"]
)
def test_an_unprintable_value_is_described(value: object):
    assert quote_value(value) == "(its text cannot be shown)"


def test_an_error_that_cannot_be_shown_is_named():
    assert quote_error(MemoryError()) == "MemoryError"
    assert quote_error(Unspeakable()) == "Unspeakable: (its text cannot be shown)"


@given(st.text(), st.integers(10, 300))
def test_a_quotation_is_short_printable_and_is_not_quoted_again(text: str, most: int):
    shown = quote(text * 20, most)
    assert len(shown) <= most
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert quote(shown, most) == shown


@pytest.mark.parametrize("kind", [HpcEsError, EnvError, LaunchError])
def test_every_error_of_ours_is_bounded_and_printable(kind: type[HpcEsError]):
    said = str(kind("the environment said: " + "\x1b[2J" * 1_000_000 + "; do this"))
    assert len(said) <= MAX_MESSAGE
    assert "\x1b" not in said
    assert said.endswith("do this")
