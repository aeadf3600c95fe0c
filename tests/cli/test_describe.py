"""`ddpjob describe` on a job of this machine that failed."""

from __future__ import annotations

import json

import pytest

from ddpjob.api.objects import Json
from tests.cli.program import Program, shell_job
from tests.processes import eventually


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Program:
    ddpjob = Program(tmp_path_factory.mktemp("failed"))
    job = shell_job("bad", "echo 'ValueError: sample 17 is bad'; exit 3", restartPolicy={"maxRestarts": 1})
    assert ddpjob("run", ddpjob.write(job), "-o", "json").code == 1
    return ddpjob


def described(ddpjob: Program) -> Json:
    done = ddpjob("describe", "bad", "-o", "json")
    assert (done.code, done.err) == (0, "")
    found: Json = json.loads(done.out)
    return found


def test_describe_has_the_card_the_conditions_the_pods_and_the_events_of_both_attempts(failed: Program) -> None:
    found = described(failed)
    assert (found["state"], found["place"]) == ("Failed", "this machine") and found["summary"].startswith("bad failed ")
    newest = found["pods"][0]
    assert (newest["attempt"], newest["state"], newest["exitCode"]) == (2, "failed", 3)
    assert {part["type"]: part["status"] for part in found["conditions"]}["Finished"] == "True"
    course = [(entry["reason"], entry["type"]) for entry in found["events"]]
    assert [reason for reason, type_ in course if type_ == "Warning"] == ["Restarting", "Failed"]
    assert (course[0][0], course[-1][0]) == ("Started", "Failed")
    first, *lines = failed("describe", "bad").out.splitlines()
    assert first.startswith("bad failed ")
    titles = [number for number, line in enumerate(lines) if line in ("Conditions", "Pods", "Events")]
    header, *rows, last = lines[titles[2] + 1 :]
    assert header.split() == ["TIME", "SOURCE", "OBJECT", "REASON", "MESSAGE"]
    assert len(rows) == len(found["events"]) and last == f"{len(rows)} events, this machine"
    assert "no job other" in failed("describe", "other").is_refused()[0]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_narrow_terminal_folds_messages_and_cuts_no_time(failed: Program, columns: int) -> None:
    with failed.on_terminal("describe", "bad", columns=columns) as read:
        eventually("all is printed", lambda: "events, this machine" in read())
        lines = read().replace("\x1b[31m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, lines)) <= columns
    assert "sample 17" in "".join(part.strip() for part in lines).replace(" ", " ")
    assert len([line for line in lines if line[2:3] == line[5:6] == ":"]) == len(described(failed)["events"])
