"""Which lines of a log are new after a lost connection, by their timestamps."""

from __future__ import annotations

import pytest

from ddpjob.client.cluster_logs import Position


def read(position: Position, *lines: str) -> list[str]:
    texts = [position.text(f"2026-01-02T03:04:{line}".encode()) for line in lines]
    return [text.decode() for text in texts if text is not None]


def test_lines_of_the_last_second_that_are_known_are_left_out_as_often_as_they_were_read() -> None:
    position = Position()
    assert read(position, "05.1Z a", "06.1Z same", "06.1Z same", "06.2Z ") == ["a", "same", "same", ""]
    assert position.since == "2026-01-02T03:04:06Z"
    for _ in range(2):
        position.reconnect()
        assert read(position, "06.1Z same", "06.1Z same", "06.2Z ") == []
    assert read(position, "06.2Z ", "06.1Z same", "07Z b") == ["", "same", "b"]


def test_a_node_in_another_zone_is_asked_in_its_own_time() -> None:
    position = Position()
    read(position, "05.1+02:00 a")
    assert position.since == "2026-01-02T03:04:05+02:00"


def test_no_line_is_lost_when_the_clock_of_a_node_is_set_back() -> None:
    position = Position()
    read(position, "30Z a", "10Z b")
    assert position.since == "2026-01-02T03:04:10Z"
    position.reconnect()
    assert read(position, "30Z a", "10Z b", "11Z c") == ["c"]


def test_a_line_without_a_timestamp_is_not_of_the_log() -> None:
    with pytest.raises(ValueError, match="unable to retrieve"):
        Position().text(b"unable to retrieve container logs")
