"""Liveness depends only on the event loop, readiness on the watches."""

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from ddpjob_operator.controller import health
from ddpjob_operator.controller.health import MAX_CONNECTIONS, HealthServer, LoopHeartbeat, Verdict
from tests.processes import eventually, eventually_async


def get(port: int, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return int(response.status), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Verdicts:
    """The verdicts that the server reports."""

    def __init__(self) -> None:
        self.alive: Verdict = (True, "ok")
        self.ready: Verdict = (False, "the watch of pods is not open yet")


@pytest.fixture
def verdicts() -> Verdicts:
    return Verdicts()


@pytest.fixture
def server(verdicts: Verdicts) -> Iterator[HealthServer]:
    server = HealthServer(0, alive=lambda: verdicts.alive, ready=lambda: verdicts.ready, metrics=lambda: b"answer 42\n")
    yield server
    server.close()


def test_paths_respond_with_status_and_reason(server: HealthServer, verdicts: Verdicts) -> None:
    assert get(server.port, "/healthz") == (200, "ok\n")
    assert get(server.port, "/readyz") == (503, "the watch of pods is not open yet\n")
    assert get(server.port, "/metrics") == (200, "answer 42\n")
    assert get(server.port, "/secrets")[0] == 404
    verdicts.ready = (True, "ok")
    assert get(server.port, "/readyz?verbose") == (200, "ok\n")


def test_idle_connections_take_few_threads_and_do_not_keep_out_a_probe(server: HealthServer) -> None:
    """Every pod of the cluster may open connections to the port, unless a NetworkPolicy forbids it."""
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * MAX_CONNECTIONS)]
    assert get(server.port, "/healthz") == (200, "ok\n")
    eventually("the older connections are closed", lambda: threading.active_count() - before <= MAX_CONNECTIONS)
    for connection in idle:
        connection.close()
    eventually("all are closed", lambda: threading.active_count() <= before)


async def test_running_event_loop_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "BEAT_SECONDS", 0.01)
    time = 1000.0
    heartbeat = LoopHeartbeat(lambda: time)
    lags: list[float] = []
    beating = asyncio.create_task(heartbeat.run(lags.append))
    await eventually_async("a beat", lambda: lags)
    time += 29
    assert heartbeat.verdict()[0]
    beats = len(lags)
    await eventually_async("more beats", lambda: len(lags) >= beats + 2)
    time += 29
    assert heartbeat.verdict()[0], "58 s after the first beat, 29 after the last"
    beating.cancel()


def test_event_loop_blocked_for_30_s_is_not_alive(server: HealthServer, verdicts: Verdicts) -> None:
    """No loop runs here: the server's thread answers by itself."""
    time = 1000.0
    heartbeat = LoopHeartbeat(lambda: time)
    time += 31
    verdicts.alive = heartbeat.verdict()
    assert get(server.port, "/healthz") == (503, "the event loop has been blocked for 31 s\n")
