"""Log files of ranks: complete on a volume that works, and no delay for the launcher on a volume that does not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ddprun.launcher import log_files
from ddprun.launcher.log_files import LogFiles

LINES = 40_000  # more than is kept, and than the pipes hold


@pytest.fixture(autouse=True)
def little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_KEPT", 0)
    monkeypatch.setattr(log_files, "_LEAST_KEPT", 100_000)
    monkeypatch.setattr(log_files, "_OPENING", 60.0)


def test_files_have_all_lines_when_they_are_closed(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    paths[0].write_text("of a run before\n")
    paths[1].mkdir()
    logs = LogFiles(paths)
    assert logs.answers and logs.refused == [f"{paths[1]} cannot be written: Is a directory"]
    for stream in logs.streams:
        for number in range(100):
            stream.write(b"line %d\n" % number)
        stream.flush()
    assert not logs.drops
    assert logs.close()
    lines = [f"line {number}" for number in range(100)]
    assert paths[0].read_text().splitlines() == ["of a run before", *lines]
    assert paths[2].read_text().splitlines() == lines


def test_lines_that_a_volume_does_not_take_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_OPENING", 0.1)
    path = tmp_path / "rank-0.log"
    os.mkfifo(path)  # a volume that does not answer: nobody reads it
    logs = LogFiles([path])
    assert not logs.answers and not logs.refused
    for number in range(LINES):
        logs.streams[0].write(b"line %d\n" % number)
        logs.streams[0].flush()
    assert logs.drops
    received = bytearray()
    with path.open("rb", buffering=0) as reader:  # it answers again
        while logs.drain():
            received += reader.read(65536)
        logs.leave()
        while data := reader.read(65536):
            received += data
    *lines, missing = received.decode().splitlines()
    assert lines == [f"line {number}" for number in range(len(lines))]
    count = re.fullmatch(r"\.\.\. (\d+) line\(s\) of output are missing here: the volume .*", missing)
    assert count is not None, missing
    assert len(lines) + int(count[1]) == LINES


def test_end_waits_for_a_volume_that_does_not_answer_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_OPENING", "_FINISHING"):
        monkeypatch.setattr(log_files, name, 0.1)
    path = tmp_path / "rank-0.log"
    os.mkfifo(path)
    logs = LogFiles([path])
    logs.streams[0].write(b"line\n")
    logs.streams[0].flush()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert not logs.close(), "the line is not in the file"
    assert len(os.listdir("/proc/self/fd")) == before - 3  # noqa: PTH208
    path.open("rb").close()  # the process ends


def test_a_full_volume_is_known(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    paths[0].symlink_to("/dev/full")
    logs = LogFiles(paths)
    assert logs.answers and not logs.refused and not logs.drops
    for stream in logs.streams:
        stream.write(b"line\n")
        stream.flush()
    assert not logs.close()
    assert paths[1].read_text() == "line\n", "the process was waited for"


def test_files_that_are_all_refused_are_no_loss_that_is_not_known(tmp_path: Path) -> None:
    logs = LogFiles([tmp_path])
    assert logs.answers and logs.refused
    logs.streams[0].write(b"line\n")
    logs.streams[0].flush()
    assert not logs.drops
    assert logs.close()
