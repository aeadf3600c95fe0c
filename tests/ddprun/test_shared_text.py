"""A text in shared memory: its reader sees a whole text at any time, also after the writer was killed."""

from __future__ import annotations

from ddprun import shared_text
from ddprun.shared_text import LONGEST, SIZE, SharedText, read


def test_reader_sees_the_newest_whole_text() -> None:
    memory = memoryview(bytearray(SIZE))
    assert read(memory) == ""
    text = SharedText(memory)
    for content in ("one", "two é", "three", ""):
        assert text.write(content)
        assert read(memory) == content
    assert not text.write("x" * (LONGEST + 1))
    assert read(memory) == ""
    assert text.write("x" * LONGEST)
    assert read(bytes(memory)) == "x" * LONGEST


def test_write_that_was_not_finished_leaves_the_text_before() -> None:
    memory = memoryview(bytearray(SIZE))
    SharedText(memory).write("before")
    whole = bytes(memory)
    SharedText(memory).write("later, and longer")  # goes on with the numbers of the writer before
    later = bytes(memory)
    changed = [index for index in range(SIZE) if whole[index] != later[index]]
    for kept in range(0, len(changed)):
        torn = bytearray(later)
        torn[changed[kept]] = whole[changed[kept]]  # this byte was not written yet
        assert read(torn) == "before", changed[kept]
    assert read(later) == "later, and longer"


def test_memory_with_other_content_is_no_text() -> None:
    for content in (b"\xff" * SIZE, b"\x01" * SIZE, bytes(range(256)) * (SIZE // 256)):
        assert shared_text.read(content) == ""
