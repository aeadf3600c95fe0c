"""Reports of a script in the format of Kubeflow's TrainJobs: how they are read, added to the progress, and taken."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddpjob.api.report import training_report
from ddpjob.engine.progress import progress_status
from ddprun.diagnostics import Diagnostics
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.trainer_port import TrainerPort, is_wanted
from ddprun.launcher.trainer_status import ReportedTraining, TrainerStatus, parse
from ddprun.reporting.progress import ProgressRecord

NOW = 1_795_442_706.0  # 2026-11-23T14:05:06Z
OWN = {
    "seq": 7, "ageSeconds": 9.0, "phase": "train", "epoch": 0, "totalEpochs": None, "step": 12, "totalSteps": None,
    "loss": None, "samplesPerSecond": None,
}  # fmt: skip


def sent(
    percent: int = 0, *, at: str = "2026-11-23T14:05:06.5+00:00", left: int | None = None, **metrics: object
) -> Any:
    """Return a report as the callback of transformers makes it."""
    status: dict[str, Any] = {"lastUpdatedTime": at, "progressPercentage": percent}
    if left is not None:
        status["estimatedRemainingSeconds"] = left
    status["metrics"] = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return {"trainerStatus": status}


def report(percent: int = 0, *, second: float = 0.0, left: int | None = None, **metrics: float) -> TrainerStatus:
    return TrainerStatus(NOW + second, percent, left, metrics)


def test_report_of_a_step_is_read() -> None:
    found = parse(
        json.dumps(sent(40, left=90, loss=0.5, grad_norm="nan", current_step=120, learning_rate=1e-3)).encode()
    )
    assert found == TrainerStatus(NOW + 0.5, 40, 90, {"loss": 0.5, "current_step": 120})


def test_a_loss_that_is_nan_is_passed_on() -> None:
    status = parse(json.dumps(sent(40, loss="nan", eval_f1="nan", current_step=120)).encode())
    shown = ReportedTraining().after(status, 0, NOW).added_to(OWN, 0.0)
    assert shown["loss"] == "NaN" and "f1" not in shown


def test_time_is_read_in_the_forms_of_python_and_kubernetes() -> None:
    for text in ("2026-11-23T14:05:06+00:00", "2026-11-23T14:05:06Z", "2026-11-23T16:05:06.000000+02:00"):
        assert parse(json.dumps({"trainerStatus": {"lastUpdatedTime": text}}).encode()).sent == NOW


@pytest.mark.parametrize(
    "wrong",
    [
        b"", b"\xff", b"[]", b"{}", b'{"trainerStatus": []}', b'{"trainerStatus": {}}', b"[" * 60_000, b"1" * 5000,
        b'{"trainerStatus": {"lastUpdatedTime": 5}}', b'{"trainerStatus": {"lastUpdatedTime": "soon"}}',
        *(
            json.dumps({"trainerStatus": sent(1)["trainerStatus"] | change}).encode()
            for change in (
                {"progressPercentage": float("nan")}, {"estimatedRemainingSeconds": float("inf")}, {"metrics": 5},
                {"metrics": [5]}, {"metrics": [{}]},
            )
        ),
    ],
)  # fmt: skip
def test_report_of_another_form_is_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(wrong)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["loss", "current_step", "total_steps", "epoch", "eval_accuracy"])
numbers = st.sampled_from(["nan", "inf", "-1", "0", "1e308", "9" * 200, "0.5", "17", ""]) | st.floats().map(str)
statuses = st.fixed_dictionaries(
    {"lastUpdatedTime": st.datetimes().map(lambda time: f"{time.isoformat()}+23:59") | junk},
    optional={
        "progressPercentage": st.integers(0, 100) | junk,
        "estimatedRemainingSeconds": st.integers(0) | junk,
        "metrics": st.lists(st.fixed_dictionaries({"name": names, "value": numbers}), max_size=4) | junk,
    },
)


@given(st.fixed_dictionaries({"trainerStatus": statuses | junk}) | junk)
@example({"trainerStatus": {"lastUpdatedTime": "0001-01-01T00:00:00+23:59"}})
def test_any_report_is_refused_or_gives_a_progress_report(document: Any) -> None:
    try:
        status = parse(json.dumps(document).encode())
    except ValueError:
        return
    shown = ReportedTraining().after(status, 3, NOW).added_to(OWN, 0.0)
    assert shown["step"] >= 0 and shown["seq"] == OWN["seq"] + 1
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def after(*reports: tuple[TrainerStatus, int]) -> ReportedTraining:
    known = ReportedTraining()
    for status, counted in reports:
        known = known.after(status, counted, NOW + 3600)
    return known


def shown(known: ReportedTraining, **own: object) -> dict[str, Any]:
    return known.added_to(OWN | own, 2.0)


def test_a_loss_that_later_reports_keep_has_its_own_step() -> None:
    lost = report(50, second=5, current_step=500, loss=float("nan"))
    known = after((report(total_steps=1000), 0), (lost, 20))
    for each in (known, known.after(report(60, second=9, current_step=600), 80, NOW + 3600)):
        found = shown(each, step=90)
        assert (found["loss"], found["lossStep"]) == ("NaN", 500)
        assert found["step"] > 500
    assert shown(after((report(5, loss=0.5), 7)), step=9)["lossStep"] == 7, "a program that reports no steps"


def test_steps_counted_since_the_last_report_are_added_also_in_a_resumed_training() -> None:
    known = after((report(total_steps=1000), 0), (report(50, second=5, left=90, current_step=500, loss=0.5), 20))
    found = shown(known, step=23)
    assert (found["step"], found["totalSteps"], found["loss"], found["etaSeconds"]) == (503, 1000, 0.5, 90)
    assert (found["ageSeconds"], found["seq"], "percent" in found) == (2.0, 9, False)
    assert shown(known, step=900)["step"] == 1000
    assert shown(known, step=23, ageSeconds=0.5)["ageSeconds"] == 0.5


def test_status_of_the_job_shows_step_percentage_loss_and_time_left() -> None:
    known = after((report(50, second=5, left=90, current_step=500, total_steps=1000, loss=0.5, current_epoch=1.5), 20))
    status = progress_status(training_report(shown(known, step=23)), None, datetime.now(UTC))
    wanted = {"display": "50% 503/1000", "percent": 50, "step": 503, "totalSteps": 1000, "loss": "0.5", "epoch": 2}
    assert status.wire().items() >= (wanted | {"etaSeconds": 90}).items()


def test_training_that_ends_early_does_not_show_its_last_steps() -> None:
    known = after(
        (report(total_steps=100), 0), (report(40, second=5, current_step=40), 40), (report(100, second=6), 41)
    )
    found = shown(known, step=41)
    assert (found["step"], found["totalSteps"], "percent" in found) == (41, 100, False)


def test_epoch_counts_from_one() -> None:
    for finished, epoch in ((0.0, 1), (0.02, 1), (1.0, 1), (1.01, 2)):
        assert shown(after((report(5, current_step=5, current_epoch=finished), 5)))["epoch"] == epoch
    assert shown(after((report(5, current_step=5), 5)))["epoch"] is None


def test_second_training_of_a_script_begins_anew() -> None:
    first = ((report(total_steps=50), 0), (report(99, second=5, current_step=49, loss=0.5, eval_accuracy=0.9), 49))
    known = after(*first, (report(100, second=6), 50), (report(0, second=7, total_steps=30), 50))
    found = shown(known, step=52)
    assert (found["step"], found["totalSteps"], found["loss"], "accuracy" in found) == (2, 30, None, False)
    assert found["seq"] == OWN["seq"] + 4


def test_what_the_script_reports_itself_stays() -> None:
    known = after((report(40, current_step=40, total_steps=100, loss=0.5, current_epoch=3.5, eval_accuracy=0.9), 1))
    own = {"step": 7, "totalSteps": 9, "loss": 0.0, "epoch": 2}
    found = shown(known, **own)
    assert found.items() >= own.items() and found["accuracy"] == 0.9


def test_results_of_tests_are_passed_on_up_to_a_limit() -> None:
    """The launcher knows no name of them; times, and names of other values, are no results."""
    metrics = {"eval_loss": 9.0, "eval_runtime": 3.0, "eval_steps_per_second": 2.0, "eval_step": 7.0, "eval_f1": 0.5}
    found = shown(after((report(40, **metrics), 1)), step=3)
    assert (found["f1"], found["loss"], found["step"]) == (0.5, None, 3) and not found.keys() & {"runtime", "eval_f1"}
    many = {f"eval_f1_of_class_{number}": 0.5 for number in range(400)}
    assert sum(name.startswith("f1") for name in shown(after((report(40, **many), 1)))) == 8


def test_older_report_is_ignored_unless_the_clock_was_set_back() -> None:
    known = ReportedTraining().after(report(40, second=60, current_step=40), 40, NOW + 60)
    assert known.after(report(30, second=50, current_step=30), 41, NOW + 61) is known
    assert known.after(report(50, second=-3000, current_step=50), 50, NOW - 3000).step == 50
    ahead = ReportedTraining().after(report(40, second=9e9, current_step=40), 40, NOW)
    assert ahead.after(report(50, second=5, current_step=50), 50, NOW + 5).step == 50


def test_reports_of_earlier_ranks_end_with_them() -> None:
    progress, diagnostics = NodeProgress(2), Diagnostics.create(0)
    rank_zero = ProgressRecord(2, diagnostics.progress_text())
    progress.follow(diagnostics)
    rank_zero.update(phase="train", step=30)
    progress.take(report(30, current_step=530, total_steps=1000, loss=0.5), NOW)
    rank_zero.update(step=31)
    before = progress.snapshot()
    assert (before["step"], before["loss"], before["totalSteps"]) == (531, 0.5, 1000)
    progress.keep()
    again = Diagnostics.create(0)
    progress.follow(again)
    same = before.keys() - {"phase", "ageSeconds"}
    assert {name: progress.snapshot()[name] for name in same} == {name: before[name] for name in same}
    ProgressRecord(2, again.progress_text()).update(phase="train", step=1)
    found = progress.snapshot()
    assert (found["step"], found["loss"], found["totalSteps"], found["seq"]) == (1, None, None, before["seq"] + 1)
    for opened in (diagnostics, again):
        opened.close()


def test_time_of_saves_adds_up_over_the_lives_of_an_attempt() -> None:
    progress, shown = NodeProgress(1), []
    for number in range(1, 4):
        with contextlib.closing(Diagnostics.create(0)) as diagnostics:
            progress.follow(diagnostics)
            ProgressRecord(1, diagnostics.progress_text()).update(phase="train", step=number, savingSeconds=1.5)
            shown.append(progress.snapshot()["savingSeconds"])
            assert progress.completed({"phase": "start"})["savingSeconds"] == 1.5 * (number - 1)
            progress.keep()
            shown.append(progress.snapshot()["savingSeconds"])
    assert shown == [1.5, 1.5, 3.0, 3.0, 4.5, 4.5]


@pytest.mark.parametrize(("long", "more"), [(600.0, False), (0.0, True)])
def test_life_of_a_script_is_progress_when_it_makes_more_steps_or_trains_long(
    monkeypatch: pytest.MonkeyPatch, *, long: float, more: bool
) -> None:
    """Its steps begin at 0 in each life, and what it has saved is not known."""
    monkeypatch.setattr("ddprun.launcher.node_progress._LONG", long)
    progress, marks = NodeProgress(2), []
    for step in (100, 40):
        with contextlib.closing(Diagnostics.create(0)) as diagnostics:
            progress.follow(diagnostics)
            ProgressRecord(2, diagnostics.progress_text()).update(phase="train", step=step)
            marks.append(progress.mark() or 0)
            progress.keep()
    assert (marks[1] > marks[0]) == more


class Server:
    """A port in this process, whose requests are handled while a client waits; ``env`` has the variables of a rank."""

    def __init__(self) -> None:
        self.taken: list[TrainerStatus] = []
        self.env: dict[str, str] = {}
        self.port = TrainerPort(lambda status, _: self.taken.append(status))
        self.port.begin(1, self.env)

    @property
    def url(self) -> str:
        return self.env["KUBEFLOW_TRAINER_SERVER_URL"]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.split("/")[2], timeout=10)

    def post(self, body: Any, *, path: str = "", token: str | None = None, method: str = "POST") -> int:
        """Return the status of a request with the headers of the callback."""
        own = Path(self.env["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()
        connection = self.connect()
        connection.request(
            method, path or "/" + self.url.split("/", 3)[3], body if isinstance(body, bytes) else json.dumps(body),
            {"Authorization": f"Bearer {own if token is None else token}", "Content-Type": "application/json"},
        )  # fmt: skip
        while connection.sock and not _is_answered(connection.sock):
            self.port.handle(0.05)
        return connection.getresponse().status


def _is_answered(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) is not None
    except BlockingIOError:
        return False
    finally:
        client.settimeout(10)


@contextmanager
def served() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.port.close()


def test_only_reports_of_this_life_with_the_token_are_taken() -> None:
    with served() as server:
        token = server.env["KUBEFLOW_TRAINER_SERVER_TOKEN"]
        assert server.post(sent(1)) == 200
        for wrong in ("", "x", Path(token).read_text()[:-1], "ä"):
            assert server.post(sent(2), token=wrong) == 401
        assert server.post(sent(2), path="/progress") == 404
        assert server.post(b"", method="GET") == 405
        server.port.begin(2, server.env)
        assert server.post(sent(2), path="/lives/1/status") == 404
        assert server.post(sent(3)) == 200
        assert [status.percent for status in server.taken] == [1, 3]


def test_wrong_report_is_answered_with_400_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as server:
        assert [server.post(body) for body in (b"{", {"trainerStatus": 5}, b"x" * 70_000)] == [400] * 3
        assert server.post({"trainerStatus": {"lastUpdatedTime": "\x1b[2J"}}) == 400
        [line] = capsys.readouterr().out.splitlines()
        assert server.taken == [] and line.isprintable()
        assert server.post(sent(100, **{f"eval_f1_of_class_{number}": 0.123456789 for number in range(400)})) == 200


def test_report_that_comes_in_parts_is_taken_beside_slow_clients() -> None:
    with served() as server:
        token, body = Path(server.env["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text(), json.dumps(sent(7))
        head = f"POST /lives/1/status HTTP/1.1\r\nAUTHORIZATION:  Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
        clients = [server.connect() for _ in range(41)]
        for client in clients:
            client.connect()
            client.send(head[:30].encode())
            server.port.handle(5)
        for part in (head[30:], body[:20], body[20:]):
            assert server.taken == []
            clients[-1].send(part.encode())
            server.port.handle(5)
            server.port.handle(0.05)
        assert [status.percent for status in server.taken] == [7]
        for client in clients:
            client.close()


def test_token_is_read_by_the_same_user_only() -> None:
    with served() as server:
        file = server.env["KUBEFLOW_TRAINER_SERVER_TOKEN"]
        assert stat.S_IMODE(Path(file).stat().st_mode) == 0o400
        assert len(Path(file).read_text()) > 40
        if os.getuid() == 0:
            other = subprocess.run(["/bin/cat", file], user=65534, extra_groups=[], capture_output=True, check=False)
            assert (other.returncode, b"Permission denied" in other.stderr, other.stdout) == (1, True, b"")


def test_a_server_of_the_user_a_trainjob_and_a_report_that_is_off_are_left_alone() -> None:
    assert is_wanted({})
    assert is_wanted({"DISABLE_KUBEFLOW_INTEGRATION": "false"})
    for name in ("URL", "TOKEN", "CA_CERT"):
        assert not is_wanted({f"KUBEFLOW_TRAINER_SERVER_{name}": "/x"})
    assert not is_wanted({"DISABLE_KUBEFLOW_INTEGRATION": "true"})


@pytest.mark.parametrize(
    ("env", "changed"),
    [
        ({}, {}),
        ({"http_proxy": ""}, {}),
        ({"HTTP_PROXY": "http://p:1"}, {"no_proxy": "127.0.0.1"}),
        ({"http_proxy": "http://p:1", "NO_PROXY": "a, b"}, {"NO_PROXY": "a,b,127.0.0.1"}),
        ({"http_proxy": "http://p:1", "no_proxy": "*"}, {}),
        ({"all_proxy": "http://p:1", "no_proxy": "127.0.0.1"}, {}),
    ],
)
def test_reports_do_not_go_through_a_proxy(env: dict[str, str], changed: dict[str, str]) -> None:
    with served() as server:
        given = dict(env)
        server.port.begin(1, given)
        assert {name: value for name, value in given.items() if "KUBEFLOW" not in name} == env | changed
