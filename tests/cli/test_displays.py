"""The card on a terminal, the plain lines and the JSON show the same facts."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.cli.card import Moment, moment_of
from ddpjob.cli.live import LiveDisplay
from ddpjob.cli.output import INTERVAL, JsonDisplay, PlainDisplay
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.client.job import DDPJob
from ddpjob.engine.desired import Job
from ddpjob.local.state import HostPaths, StateFolder
from tests.builders import a_job, ended, running

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
    "stepsPerSecond": "4.8",
    "etaSeconds": 75,
}
STATUS = {
    "state": "Running",
    "attempt": 2,
    "restarts": 3,
    "restartsInPlace": 2,
    "restartsCountedTowardsLimit": 1,
    "nodesReady": "2/2",
    "world": {"numNodes": 2, "worldSize": 4, "nprocPerNode": 2, "masterAddress": "mnist-0:29500"},
    "progress": PROGRESS,
    "checkpoint": {
        "path": "run-000001/step-000000200.pt",
        "step": 200,
        "resumedFromStep": 150,
        "time": "2026-03-01T12:00:00Z",
    },
}
BEGAN = {"lastTransitionTime": "2026-03-01T12:00:00Z"}
# Every display must show these.
SHOWN = (
    "Running",
    "3 restarts (2 in place, 1 of at most 3 counted)",
    "1/2",
    "210/470",
    "44 %",
    "0.2347",
    "97.12 %",
    "12,345 samples/s",
    "1m15s left",
    "200",
    "150",
)


def a_pod(rank: int, status: Json, attempt: int = 2) -> Json:
    labels = {names.LABEL_ATTEMPT: str(attempt), names.LABEL_NODE_RANK: str(rank)}
    name = f"mnist-0a1b2-{attempt}-{rank}"
    return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": status}


def a_moment(**changes: Any) -> Moment:
    job = DDPJob.from_manifest(an_admitted_job(status=STATUS | changes))
    return moment_of(job, [a_pod(0, running()), a_pod(1, ended(3)), a_pod(0, ended(1), attempt=1)])


def an_admitted_job(**more: Any) -> Json:
    return a_job(restartPolicy={}, **more)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(shown: Moment, width: int = 120) -> str:
    # The display refreshes its own console at any time.
    display = LiveDisplay(Console(width=width, file=io.StringIO(), force_terminal=True))
    display.show(shown)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(display.drawn(shown))
    return console.export_text()


def printed(*shown: Moment, clock: Clock | None = None) -> str:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock=clock or Clock())
    for one in shown:
        display.show(one)
    return stream.getvalue()


def test_card_and_lines_show_the_same() -> None:
    for text in (drawn(a_moment()), printed(a_moment())):
        for part in (*SHOWN, "mnist-0a1b2-2-0", "mnist-0a1b2-2-1", "failed", "exit code 3"):
            assert part in text, part


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        ({"step": 7, "percent": 60, "loss": "0.5", "etaSeconds": 75}, "step 7 (60 %), loss 0.5, 1m15s left"),
        ({"step": 7, "totalSteps": 70, "epoch": 2, "percent": 10}, "epoch 2, step 7/70 (10 %)"),
        ({"step": 7, "totalSteps": 70, "epoch": 0}, "step 7/70"),
        ({"step": 7, "epoch": 0}, "step 7"),
        ({"step": 7, "stepsPerSecond": "0.31"}, "step 7, 0.31 steps/s"),
        ({"step": 7, "totalSteps": 9, "stepsPerSecond": "12.5"}, "step 7/9, 12.5 steps/s"),
        ({"phase": "start"}, "start"),
    ],
)
def test_progress_of_which_a_part_is_known(progress: Json, shown: str) -> None:
    facts = a_moment(progress={"display": "", **progress}, checkpoint=None).training_facts()
    assert ", ".join(facts) == shown


def test_json_has_the_status_and_the_pods_of_the_attempt_once_for_each_change() -> None:
    stream = io.StringIO()
    display = JsonDisplay(stream)
    for _ in range(3):
        display.show(a_moment())
    (line,) = stream.getvalue().splitlines()
    written = json.loads(line)
    assert (written["name"], written["status"]) == ("mnist", STATUS)
    assert [pod["name"] for pod in written["pods"]] == ["mnist-0a1b2-2-0", "mnist-0a1b2-2-1"]
    assert (written["pods"][1]["state"], written["pods"][1]["exitCode"]) == ("failed", 3)


def test_output_names_the_rank_that_printed_it_once() -> None:
    lines = ["[n0r1] loss 0.5", "root cause: rank 1\x1b[2J"]
    plain, live = io.StringIO(), io.StringIO()
    for display in (PlainDisplay(plain), LiveDisplay(Console(file=live, width=80))):
        for line in lines:
            display.output(line)
    assert plain.getvalue() == "n0r1 | loss 0.5\nn0 | root cause: rank 1\n"
    assert live.getvalue() == "n0r1 loss 0.5\nn0 root cause: rank 1\n"


def test_progress_alone_is_written_every_few_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    display = PlainDisplay(stream, clock=clock)
    for step in range(100):
        display.show(a_moment(progress=PROGRESS | {"step": step, "percent": None}))
        clock.now += INTERVAL / 10
    assert len([line for line in stream.getvalue().splitlines() if "step" in line]) == 10


def test_large_job_on_a_small_terminal_shows_nodes_that_need_attention() -> None:
    pods = [a_pod(rank, ended(1) if rank == 77 else running()) for rank in range(100)]
    text = drawn(moment_of(DDPJob.from_manifest(an_admitted_job(status=STATUS, numNodes=100)), pods), width=60)
    assert "mnist-0a1b2-2-77" in text
    assert "… and 92 more" in text


@pytest.mark.parametrize("show", [drawn, printed], ids=["card", "lines"])
def test_hostile_status_cannot_control_the_terminal(show: Any) -> None:
    evil = "\x1b]0;owned\x07[bold]x[/bold]\x1b[2J\n\u202e"
    conditions = [{"type": "Running", "status": "False", "reason": "R", "message": evil} | BEGAN]
    job = an_admitted_job(
        status=STATUS | {"state": evil, "conditions": conditions, "progress": PROGRESS | {"loss": "1e3\x07"}}
    )
    waiting = {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": evil, "message": evil}}}]}
    text = show(moment_of(DDPJob.from_manifest(job), [a_pod(0, waiting)]))
    assert "[bold]x[/bold]" in text  # rich must not interpret it as markup either
    for character in "\x07\u202e":
        assert character not in text
    assert "owned" not in text and "\x1b]" not in text and "\x1b[2J" not in text


def a_result(tmp_path: Path, status: Json, **more: Any) -> RunResult:
    job = an_admitted_job(status=status)
    return RunResult(
        DDPJob.from_manifest(job), HostPaths(Job.of(job), StateFolder(tmp_path)), 12.0, "ddpjob run mnist.yaml", **more
    )


FAILED = {"type": "Finished", "status": "True", "reason": "Error", "message": "attempt 2 failed"} | BEGAN
FAILURE = {
    "time": "2026-03-01T12:00:00Z",
    "attempt": 2,
    "nodeRank": 1,
    "pod": "mnist-0a1b2-2-1",
    "action": "Fail",
    "reason": "Error",
    "exitCode": 3,
    "counted": False,
}


def a_failure(tmp_path: Path, *, has_output: bool = False, **failure: Any) -> RunResult:
    status = {"state": "Failed", "restarts": 1, "conditions": [FAILED], "failures": [FAILURE | failure]}
    return a_result(tmp_path, status, has_output=has_output)


def test_failure_ends_with_the_verdict_and_the_end_of_the_log(tmp_path: Path) -> None:
    result = a_failure(tmp_path, message="node_rank 1 ended with exit code 3", hint="it ended", next="the log")
    log = result.paths.record.log("mnist-0a1b2-2-1")
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {n}\n" for n in range(1000)) + "last \x1b[31mline")
    summary = summary_lines(result, 80)
    assert summary[1:6] == [
        "mnist failed in attempt 2: node_rank 1 ended with exit code 3",
        "stage: Crash (Error), confidence medium, this machine",
        "hint:  it ended",
        "next:  the log",
        "logs:  ddpjob logs mnist --node 1 --attempt 2",
    ]
    assert summary[-1] == "  last line"
    assert "  line 0" not in summary
    assert result.exit_code == 1


def test_the_log_of_a_node_whose_output_was_shown_is_not_repeated(tmp_path: Path) -> None:
    for rank, is_repeated in ((0, False), (1, True)):
        result = a_failure(tmp_path, nodeRank=rank, message="m", has_output=True)
        log = result.paths.record.log("mnist-0a1b2-2-1")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("the last line\n")
        assert ("  the last line" in summary_lines(result, 80)) is is_repeated


def test_a_message_that_a_line_above_has_is_not_printed_again() -> None:
    """Seen: one exception in five lines of a run, and once more in the summary."""
    text, stream = "node_rank 1 (mnist-0a1b2-1-1), rank 1, train.py:4: ValueError: bad", io.StringIO()
    display = PlainDisplay(stream, Clock())
    for state, number, message in (
        ("Restarting", 1, f"attempt 1 failed (restart 1 of 3 follows): {text}; next: look"),
        ("Restarting", 2, f"{text}; next: look"),
        ("Running", 2, ""),
        ("Restarting", 2, f"attempt 2 failed: {text}"),
        ("Failed", 2, f"attempt 2 failed: {text}"),
    ):
        conditions = [{"type": "Running", "status": "False", "reason": "R", "message": message} | BEGAN]
        display.show(a_moment(state=state, attempt=number, conditions=conditions))
    lines = [line for line in stream.getvalue().splitlines() if "mnist-0a1b2-2" not in line]
    assert sum("Restarting" in line for line in lines) == 3 and sum("Failed" in line for line in lines) == 1
    assert sum("ValueError: bad" in line for line in lines) == 2, "each failure once"


@pytest.mark.parametrize(
    ("state", "stopped_by", "code"),
    [("Succeeded", None, 0), ("Succeeded", 2, 0), ("Failed", None, 1), ("Suspended", 2, 130), ("Suspended", 15, 143)],
)
def test_exit_code_depends_on_the_final_state(tmp_path: Path, state: str, stopped_by: int | None, code: int) -> None:
    result = a_result(tmp_path, {"state": state}, stopped_by=stopped_by)
    assert result.exit_code == code
    stream = io.StringIO()
    JsonDisplay(stream).end(result)
    assert json.loads(stream.getvalue())["exitCode"] == code
    assert ("ddpjob run mnist.yaml" in "\n".join(summary_lines(result, 80))) == (state == "Suspended")


def test_result_shows_where_the_time_went(tmp_path: Path) -> None:
    spent = {"asOf": "2026-03-01T12:00:00Z", "queued": 1, "scheduling": 2, "training": 7, "starting": 1}
    result = a_result(tmp_path, {"state": "Succeeded", "time": spent})
    line = next(line for line in summary_lines(result, 80) if line.startswith("  time  "))
    assert "training 7s" in line and "goodput 70 %" in line
