"""Log files are read while they grow, and from their end without reading all of them."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ddpjob.client import local_logs as logs
from ddpjob.client.local_logs import LogFile, last_lines


def test_line_is_returned_once_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    log = LogFile(path)
    assert list(log.lines()) == []
    with path.open("ab", buffering=0) as stream:
        stream.write(b"one\ntw")
        assert list(log.lines()) == ["one"]
        stream.write("o\nthr€e".encode()[:-2])
        assert list(log.lines()) == ["two"]
        stream.write("€e".encode()[2:])
        assert list(log.lines()) == []
    assert list(log.lines(to_the_end=True)) == ["thr€e"]
    assert list(log.lines(to_the_end=True)) == []


@given(st.lists(st.text(alphabet="ab", max_size=5), max_size=12), st.booleans(), st.integers(0, 14), st.integers(1, 7))
def test_last_lines_equal_those_of_reading_the_whole_file(
    tmp_path_factory: object, lines: list[str], ends: bool, count: int, block: int
) -> None:
    folder = tmp_path_factory.mktemp("log")  # type: ignore[attr-defined]
    path = folder / "trainer.log"
    text = "\n".join(lines) + ("\n" if ends and lines else "")
    path.write_text(text)
    expected = text.split("\n")
    if expected[-1] == "":
        expected.pop()
    before, logs._BLOCK = logs._BLOCK, block
    try:
        assert last_lines(path, count) == (expected[-count:] if count else [])
    finally:
        logs._BLOCK = before


def test_line_without_line_feed_is_returned_in_parts_that_end_between_two_characters(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    text = "x" + "€" * logs._LONGEST
    path.write_text(text)
    pieces = list(LogFile(path).lines(to_the_end=True))
    assert len(pieces) > 1 and "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= logs._LONGEST + logs._BLOCK
