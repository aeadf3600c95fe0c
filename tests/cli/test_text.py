"""Text of a job, a log or a status cannot control the terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api.text import clean, clean_line
from ddpjob.api.time_spent import TimeSpent
from ddpjob.cli.text import one_line, time_text

ATTACKS = {
    "a colour": ("\x1b[31mred\x1b[0m", "red"),
    "a window's title": ("\x1b]0;owned\x07text", "text"),
    "a title that is not closed": ("\x1b]0;owned", ""),
    "a link": ("\x1b]8;;http://x\x1b\\text\x1b]8;;\x1b\\", "text"),
    "the clipboard": ("\x1b]52;c;cm0=\x07", ""),
    "a device control string": ("\x1bP1$tx\x1b\\text", "text"),
    "a reset": ("\x1bctext", "text"),
    "CSI in one byte": ("\x9b2Jtext", "text"),
    "a bell": ("\x07", "\\x07"),
    "an escape at the end": ("text\x1b", "text\\x1b"),
    "turned writing": ("abc\u202efed", "abc\\u202efed"),
    "a lone surrogate": ("a\ud800b", "a\\ud800b"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_escape_sequences_are_removed_and_control_characters_escaped(attack: str) -> None:
    given_text, expected = ATTACKS[attack]
    assert clean(given_text) == expected


@given(st.text())
def test_only_tab_and_line_feed_remain_of_control_characters(text: str) -> None:
    left = clean(text)
    assert not [c for c in left if (ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160]
    left.encode()  # no lone surrogates either


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert clean(text) == text


def test_a_progress_bar_shows_its_last_state() -> None:
    assert clean_line("10 %\r50 %\r100 %\r\n") == "100 %"


def test_one_line_has_no_line_breaks() -> None:
    assert one_line("error:\n  here\r\n\tthere\u2028x") == "error: here there x"


def test_time_names_the_longest_part_first_and_the_goodput_with_its_formula() -> None:
    spent = TimeSpent(as_of="2026-03-01T12:00:00Z", queued=3700, starting=30, training=60, lost=10)
    formula = "goodput 60 % = training / (all - queued - stopped)"
    assert time_text(spent) == f"queued 1h01m, training 1m00s, starting 30s, lost 10s; {formula}"
    assert time_text(TimeSpent(as_of="2026-03-01T12:00:00Z", queued=5)) == "queued 5s"
