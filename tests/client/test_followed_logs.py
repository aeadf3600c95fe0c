"""Followed logs of a cluster: what is silent, what cannot be read, and what ends the reading."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpjob import Client
from ddpjob.api.backoff import Patience
from ddpjob.client import cluster_logs
from ddpjob.errors import StoppedError, UnavailableError
from tests.processes import eventually
from tests.worlds.scripted_api import TIME, Answer, ScriptedApi

QUIET, PATIENCE = 0.2, 1.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_logs, "_QUIET_SECONDS", QUIET)
    monkeypatch.setattr(Patience, "SECONDS", PATIENCE)


def after_reconnects(answers: Callable[[Answer], None]) -> Callable[[Answer, int, dict[str, str]], None]:
    """Return a log with one line, whose requests are answered so until three times the patience has passed."""
    began = time.monotonic()

    def log(answer: Answer, node: int, query: dict[str, str]) -> None:
        if "sinceTime" in query and query["follow"] == "true" and time.monotonic() < began + 3 * PATIENCE:
            return answers(answer)
        answer.begin()
        answer.send(f"{TIME} first\n")
        if "sinceTime" in query:
            answer.send(f"{TIME} last\n")
            answer.api.ended.set()
            answer.send("")
        else:
            answer.until(answer.api.ended)
        return None

    return log


def silent(answer: Answer) -> None:
    answer.begin()
    answer.until(answer.api.ended)


def without_head(answer: Answer) -> None:
    """As a kubelet, which sends the head of its answer with the first line."""
    answer.until(answer.api.ended)


def cut(answer: Answer) -> None:
    """As a load balancer, which ends a connection that is idle."""
    answer.begin()
    answer.close_connection = True


@pytest.mark.parametrize("answers", [silent, without_head, cut])
def test_a_silent_pod_is_followed_for_longer_than_errors_are_survived(
    answers: Callable[[Answer], None], tmp_path: Path
) -> None:
    with ScriptedApi(tmp_path, after_reconnects(answers)) as api, Client.cluster(kubeconfig=api.kubeconfig) as client:
        assert [line.text for line in client.logs("mnist", follow=True)] == ["first", "last"]
        assert api.asked("sinceTime") > 3


def test_a_progress_bar_is_seen_while_it_moves(tmp_path: Path) -> None:
    seen = threading.Event()

    def log(answer: Answer, node: int, query: dict[str, str]) -> None:
        answer.begin()
        answer.send(f"{TIME} begin\n{TIME} \r  0%|")
        threading.Timer(30, seen.set).start()  # if it is not seen
        answer.until(seen)
        answer.send("\r 50%|#  \r100%|##\n")
        answer.api.ended.set()
        answer.send("")

    with ScriptedApi(tmp_path, log) as api, Client.cluster(kubeconfig=api.kubeconfig) as client:
        lines = []
        for line in client.logs("mnist", follow=True):
            lines.append((line.text, line.unfinished))
            if line.unfinished:
                seen.set()
        assert lines == [("begin", False), ("  0%|", True), ("\r  0%|\r 50%|#  \r100%|##", False)]
        assert [line.unfinished for line in client.logs("mnist")] == [False, False]


def test_a_node_whose_log_cannot_be_read_does_not_end_the_others(tmp_path: Path) -> None:
    began = time.monotonic()

    def log(answer: Answer, node: int, query: dict[str, str]) -> None:
        if node == 1:
            return answer.refuse(500, "Get https://10.0.0.7:10250: connect: connection refused")
        answer.begin()
        for number in itertools.count():
            answer.send(f"{TIME} line {number}\n")
            if time.monotonic() > began + 3 * PATIENCE:
                answer.api.ended.set()
                return answer.send("")
            time.sleep(QUIET / 4)
        return None

    with ScriptedApi(tmp_path, log, nodes=2) as api, Client.cluster(kubeconfig=api.kubeconfig, timeout=5) as client:
        with pytest.warns(RuntimeWarning, match=r"the log of mnist-.*-1-1 cannot be read: .*connection refused"):
            lines = [line.text for line in client.logs("mnist", follow=True, all_nodes=True)]
        assert lines == [f"line {number}" for number in range(len(lines))]
        assert time.monotonic() > began + 3 * PATIENCE
        with pytest.warns(RuntimeWarning, match=r"the log of mnist-.*-1-1 cannot be read"):
            assert [line.text for line in client.logs("mnist", all_nodes=True)] == ["line 0"]


@pytest.mark.filterwarnings("ignore:the log of")
def test_a_log_that_cannot_be_read_is_an_error_if_there_is_no_other(tmp_path: Path) -> None:
    def log(answer: Answer, node: int, query: dict[str, str]) -> None:
        answer.refuse(500, "no kubelet")

    refused = pytest.raises(UnavailableError, match=r"the log of mnist-.* cannot be read: .*no kubelet")
    with ScriptedApi(tmp_path, log, nodes=2) as api, Client.cluster(kubeconfig=api.kubeconfig) as client, refused:
        list(client.logs("mnist", follow=True, all_nodes=True))


def quiet_log(answer: Answer, node: int, query: dict[str, str]) -> None:
    answer.begin()
    answer.send(f"{TIME} first\n")
    answer.until(answer.api.ended)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ddpjob-")]


def test_logs_that_are_no_longer_read_leave_no_thread_and_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_logs, "_QUIET_SECONDS", 600.0)
    with ScriptedApi(tmp_path, quiet_log) as api, Client.cluster(kubeconfig=api.kubeconfig) as client:
        for _ in range(3):
            for line in client.logs("mnist", follow=True):
                assert line.text == "first"
                break
        eventually("all threads have ended", lambda: not own_threads(), timeout=30)
        api.is_left_alone()


@pytest.mark.parametrize("what", ["wait", "list", "logs"])
def test_close_ends_what_another_thread_waits_for(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_logs, "_QUIET_SECONDS", 600.0)
    raised = queue.Queue[BaseException]()
    with ScriptedApi(tmp_path, quiet_log) as api, Client.cluster(kubeconfig=api.kubeconfig) as client:
        calls: dict[str, Callable[[], object]] = {
            "wait": lambda: client.wait("mnist"),
            "list": lambda: list(client.watch_list()),
            "logs": lambda: list(client.logs("mnist", follow=True)),
        }

        def call() -> None:
            try:
                calls[what]()
            except BaseException as error:
                raised.put(error)

        threading.Thread(target=call, daemon=True).start()
        eventually("it waits", lambda: api.asked("watch=") and (what != "logs" or api.asked("/log")))
        client.close()
        assert isinstance(raised.get(timeout=30), StoppedError)
        api.is_left_alone()
