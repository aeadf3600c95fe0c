"""The same facts, whether a person at a terminal, a log or a program is told."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddpjob.api import names
from ddpjob.cli.host_paths import HostPaths
from ddpjob.cli.live import LiveDisplay
from ddpjob.cli.output import INTERVAL, JsonDisplay, PlainDisplay
from ddpjob.cli.snapshot import Snapshot, snapshot
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.local.state import StateFolder
from tests.builders import a_job, ended, running

Json = dict[str, Any]
PROGRESS = {
    "display": "45% 210/470",
    "phase": "train",
    "epoch": 1,
    "totalEpochs": 2,
    "step": 210,
    "totalSteps": 470,
    "percent": 44,
    "loss": "0.2347",
    "accuracy": "0.971200",
    "samplesPerSecond": "12345",
    "etaSeconds": 75,
}
STATUS = {
    "state": "Running",
    "attempt": 2,
    "restarts": 1,
    "nodesReady": "2/2",
    "world": {"worldSize": 4, "nprocPerNode": 2},
    "progress": PROGRESS,
    "checkpoint": {"path": "run-000001/step-000000200.pt", "step": 200, "resumedFromStep": 150},
}
# What every way of showing must tell.
TOLD = ("Running", "1/2", "210/470", "44 %", "0.2347", "97.12 %", "12,345 samples/s", "1m15s left", "200", "150")


def a_pod(rank: int, status: Json, attempt: int = 2) -> Json:
    labels = {names.LABEL_ATTEMPT: str(attempt), names.LABEL_NODE_RANK: str(rank)}
    return {"metadata": {"name": f"mnist-0a1b2-{attempt}-{rank}", "labels": labels}, "status": status}


def some_facts(**changes: Any) -> Snapshot:
    job = a_job(status=STATUS | changes)
    return snapshot(job, [a_pod(0, running()), a_pod(1, ended(3)), a_pod(0, ended(1), attempt=1)])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(shown: Snapshot, width: int = 120) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    display = LiveDisplay(console)
    display.show(shown)
    console.print(display.table(shown))
    return console.export_text()


def told(*shown: Snapshot, clock: Clock | None = None) -> str:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock=clock or Clock())
    for one in shown:
        display.show(one)
    return stream.getvalue()


def test_table_and_lines_tell_the_same() -> None:
    for text in (drawn(some_facts()), told(some_facts())):
        for fact in (*TOLD, "mnist-0a1b2-2-0", "mnist-0a1b2-2-1", "Error", "exit code 3", "restarts 1 of at most 3"):
            assert fact in text, fact


def test_pods_of_earlier_attempts_are_not_shown() -> None:
    assert "mnist-0a1b2-1-0" not in drawn(some_facts()) + told(some_facts())


def test_json_has_every_fact_under_the_names_of_the_status() -> None:
    stream = io.StringIO()
    JsonDisplay(stream).show(some_facts())
    told_json = json.loads(stream.getvalue())
    for key in ("epoch", "totalEpochs", "step", "totalSteps", "loss", "accuracy", "samplesPerSecond", "etaSeconds"):
        assert told_json[key] == PROGRESS[key]
    assert told_json["nodes"][1] == {
        "rank": 1,
        "pod": "mnist-0a1b2-2-1",
        "state": "Error",
        "detail": "exit code 3",
        "since": "2026-03-01T12:00:00Z",
    }


def test_json_is_silent_while_nothing_changes() -> None:
    stream = io.StringIO()
    display = JsonDisplay(stream)
    for _ in range(3):
        display.show(some_facts())
    assert len(stream.getvalue().splitlines()) == 1


def test_lines_come_only_with_news() -> None:
    assert told(some_facts()) == told(some_facts(), some_facts())


def test_mere_progress_is_told_every_few_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    display = PlainDisplay(stream, clock=clock)
    for step in range(100):
        display.show(replace(some_facts(), step=step, percent=None))
        clock.now += INTERVAL / 10
    assert len([line for line in stream.getvalue().splitlines() if "step" in line]) == 10


def test_a_change_of_state_is_told_at_once() -> None:
    text = told(some_facts(), replace(some_facts(), state="Restarting", message="node_rank 1 was ended by SIGKILL"))
    assert "Restarting" in text and "SIGKILL" in text


def test_a_small_terminal_and_a_large_job_keep_the_nodes_that_need_attention() -> None:
    pods = [a_pod(rank, ended(1) if rank == 77 else running()) for rank in range(100)]
    text = drawn(snapshot(a_job(status=STATUS, numNodes=100), pods), width=60)
    assert "mnist-0a1b2-2-77" in text
    assert "… and 88 more" in text
    assert len(text.splitlines()) < 24


@pytest.mark.parametrize("show", [drawn, told], ids=["table", "lines"])
def test_a_hostile_status_cannot_steer_the_terminal(show: Any) -> None:
    evil = "\x1b]0;owned\x07[bold]x[/bold]\x1b[2J\n\u202e"
    conditions = [{"type": "Running", "status": "False", "reason": "R", "message": evil}]
    job = a_job(status=STATUS | {"state": evil, "conditions": conditions, "progress": PROGRESS | {"loss": "1e3\x07"}})
    waiting = {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": evil, "message": evil}}}]}
    text = show(snapshot(job, [a_pod(0, waiting)]))
    assert "[bold]x[/bold]" in text  # no markup of ours either
    for character in "\x07\u202e":
        assert character not in text
    assert "owned" not in text and "\x1b]" not in text and "\x1b[2J" not in text


def a_result(tmp_path: Path, status: Json, **more: Any) -> RunResult:
    job = a_job(status=status)
    return RunResult(job, HostPaths(job, StateFolder(tmp_path)), 12.0, "ddpjob run mnist.yaml", **more)


FAILURE = {"attempt": 2, "rank": 1, "pod": "mnist-0a1b2-2-1", "action": "Fail", "reason": "Error", "exitCode": 3}


def test_a_failure_ends_with_three_lines_and_the_culprits_last_words(tmp_path: Path) -> None:
    result = a_result(
        tmp_path,
        {"state": "Failed", "restarts": 1, "failures": [FAILURE | {"message": "node_rank 1 ended with exit code 3"}]},
    )
    log = result.paths.record.log("mnist-0a1b2-2-1")
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {n}\n" for n in range(1000)) + "last \x1b[31mwords")
    told_lines = summary_lines(result, 80)
    assert told_lines[1:4] == [
        "error: mnist failed after 1 restart: node_rank 1 ended with exit code 3",
        "hint:  its last lines are below",
        "next:  ddpjob logs mnist --node 1 --attempt 2",
    ]
    assert told_lines[-1] == "  last words"
    assert "  line 0" not in told_lines
    assert result.exit_code == 1


def test_data_that_could_not_be_downloaded_leads_to_the_options_that_do_without(tmp_path: Path) -> None:
    failure = FAILURE | {"exitCode": 66, "message": "no mirror delivered FILE; next: ddptrain data fetch"}
    result = a_result(tmp_path, {"state": "Failed", "failures": [failure]})
    assert "--digits-if-offline" in summary_lines(result, 80)[2]


def test_a_program_that_is_not_installed_is_told_apart(tmp_path: Path) -> None:
    result = a_result(tmp_path, {"state": "Failed", "failures": [FAILURE | {"reason": "StartError"}]})
    assert "installed here" in summary_lines(result, 80)[2]


@pytest.mark.parametrize(
    ("state", "stopped_by", "code"),
    [("Succeeded", None, 0), ("Succeeded", 2, 0), ("Failed", None, 1), ("Suspended", 2, 130), ("Suspended", 15, 143)],
)
def test_the_exit_code_says_how_it_ended(tmp_path: Path, state: str, stopped_by: int | None, code: int) -> None:
    result = a_result(tmp_path, {"state": state}, stopped_by=stopped_by)
    assert result.exit_code == code
    assert result.wire()["exitCode"] == code
    assert ("ddpjob run mnist.yaml" in "\n".join(summary_lines(result, 80))) == (state == "Suspended")


def test_an_accuracy_that_is_no_number_does_not_spoil_the_result(tmp_path: Path) -> None:
    result = a_result(tmp_path, {"state": "Succeeded", "progress": {"accuracy": "nan", "loss": "nan"}})
    json.loads(json.dumps(result.wire()), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
