"""Polling the progress of a pod: a real HTTP server on loopback, with valid and malformed responses."""

import asyncio
import json
import pickle
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from ddpjob.api.names import Key
from ddpjob.api.report import TrainingReport, training_report
from ddpjob.engine.observed import NOT_POLLED
from ddpjob.progress.poller import ProgressPoller
from ddpjob.progress.reader import MAX_BYTES, UnusableAnswerError, complete_body, parse
from tests.processes import eventually_async
from tests.worlds.loopback import Handler, serving

KEY = Key("default", "mnist")


class Trainer:
    """Rank 0's progress server; ``handler`` responds, ``polls`` counts the requests."""

    def __init__(self) -> None:
        self.polls = 0
        self.port = 0
        self.handler: Handler = self.say({})

    def say(self, answer: object) -> Handler:
        async def handler(request: web.BaseRequest) -> web.Response:
            return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))

        return handler

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.polls += 1
        return await self.handler(request)


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer()
    async with serving(trainer.handle) as url:
        trainer.port = int(url.rpartition(":")[2])
        yield trainer


class Polling:
    """A poller with a short interval, and its results."""

    def __init__(self) -> None:
        self.news: list[Key] = []
        self.results: list[str] = []
        self.poller = ProgressPoller(0.02, self.news.append, self.results.append)

    async def until(self, condition: Callable[[], object]) -> None:
        await eventually_async("the poller got there", condition)


@pytest.fixture
async def polling() -> AsyncIterator[Polling]:
    polling = Polling()
    yield polling
    await polling.poller.close()


async def test_response_is_kept_with_the_name_of_its_pod(trainer: Trainer, polling: Polling) -> None:
    trainer.handler = trainer.say({"schema": 1, "step": 3})
    polling.poller.follow(KEY, ("pod-0", "127.0.0.1", trainer.port))
    await polling.until(lambda: polling.news)
    shown = polling.poller.polled(KEY)
    assert (shown.pod, shown.report) == ("pod-0", TrainingReport(step=3))


async def test_a_changed_response_queues_the_job_and_the_same_one_after_a_failure(
    trainer: Trainer, polling: Polling
) -> None:
    """After a failure the time without a step begins again, so the deadline needs a new timer."""

    async def answer(text: object) -> None:
        trainer.handler = trainer.say(text)
        seen = len(polling.results)
        await polling.until(lambda: len(polling.results) >= seen + 3)

    polling.poller.follow(KEY, ("pod-0", "127.0.0.1", trainer.port))
    await answer({"step": 3, "ageSeconds": 0.1})
    news = len(polling.news)
    await answer({"step": 3, "ageSeconds": 9.9})
    assert len(polling.news) == news
    await answer({"step": 4, "ageSeconds": 0.1})
    assert len(polling.news) == news + 1
    await answer([])
    assert polling.results[-1] == "unusable" and len(polling.news) == news + 1
    await answer({"step": 4})
    assert len(polling.news) == news + 2
    polling.poller.follow(KEY, ("pod-1", "127.0.0.1", trainer.port))
    await polling.until(lambda: len(polling.news) == news + 3)


async def test_a_job_that_is_not_followed_is_not_polled_and_has_no_response(trainer: Trainer, polling: Polling) -> None:
    trainer.handler = trainer.say({"step": 3})
    polling.poller.follow(KEY, ("pod-0", "127.0.0.1", trainer.port))
    await polling.until(lambda: polling.poller.polled(KEY).report)
    polling.poller.forget(KEY)
    polls = trainer.polls
    await asyncio.sleep(0.2)  # ten intervals in which nothing may come
    assert trainer.polls <= polls + 1
    assert polling.poller.polled(KEY) == NOT_POLLED


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"step": 3, "junk": [[] for _ in range(16_000)]}),
        json.dumps({"phase": "x" * 60_000}),
        '{"loss": ' + "9" * 4000 + ', "step": 4}',
    ],
    ids=["small objects", "a long text", "a long number"],
)
def test_report_of_a_response_of_maximum_size_is_small(body: str) -> None:
    assert len(body) <= MAX_BYTES
    assert len(pickle.dumps(training_report(parse(body.encode())))) < 1_000, "bytes that are kept for each job"


@pytest.mark.parametrize("answer", [None, []], ids=["unreachable", "unusable"])
async def test_silence_of_a_minute_is_a_problem_until_the_next_response(
    trainer: Trainer, unused_tcp_port: int, answer: object
) -> None:
    polling, now = Polling(), 0.0
    polling.poller = ProgressPoller(0.02, polling.news.append, polling.results.append, clock=lambda: now)
    expected = "unreachable" if answer is None else "unusable"
    trainer.handler = trainer.say(answer)
    target = ("pod-0", "127.0.0.1", unused_tcp_port if answer is None else trainer.port)
    polling.poller.follow(KEY, target)
    await polling.until(lambda: expected in polling.results)
    now = 59.0
    seen = len(polling.results)
    await polling.until(lambda: len(polling.results) > seen + 1)
    assert polling.poller.polled(KEY).problem is None and not polling.news
    now = 60.0
    await polling.until(lambda: polling.news)
    assert polling.poller.polled(KEY).problem == expected
    seen = len(polling.results)
    await polling.until(lambda: len(polling.results) > seen + 2)
    assert polling.news == [KEY], "the job is queued once"
    trainer.handler = trainer.say({"step": 3})
    polling.poller.follow(KEY, ("pod-0", "127.0.0.1", trainer.port))
    await polling.until(lambda: polling.poller.polled(KEY).report)
    assert polling.poller.polled(KEY).problem is None and polling.news == [KEY, KEY]
    await polling.poller.close()


async def test_endless_response_is_aborted(trainer: Trainer, polling: Polling) -> None:
    sent = 0

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(10_000):
            await response.write(b"x" * 16_384)
            sent += 16_384
        return response

    trainer.handler = endless
    polling.poller.follow(KEY, ("pod-0", "127.0.0.1", trainer.port))
    await polling.until(lambda: polling.results)
    assert polling.results[0] == "unusable"
    assert sent < 100 * MAX_BYTES


FLOOD = """
import socketserver, sys

class Flood(socketserver.BaseRequestHandler):
    def handle(self):
        try:
            while True:
                self.request.sendall(b"HTTP/1.1 100 Continue\\r\\n\\r\\n" * 2000)
        except OSError:
            pass

class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 256

with Server(("127.0.0.1", 0), Flood) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


async def test_flood_of_informational_responses_is_aborted_and_does_not_block_the_loop(polling: Polling) -> None:
    """120 servers of a tenant that send status 100 without end."""
    keys = [Key("default", f"job-{number}") for number in range(120)]
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    try:
        used = time.thread_time()
        for key in keys:
            polling.poller.follow(key, ("pod-0", "127.0.0.1", port))
        await polling.until(lambda: len(polling.results) >= 2 * len(keys))
        assert polling.results.count("unusable") >= len(keys)  # on a busy machine, some cannot connect in time
        assert set(polling.results) <= {"unusable", "unreachable"}
        assert time.thread_time() - used < 1.0, "seconds of CPU time of the loop's thread"
    finally:
        await polling.poller.close()
        server.kill()
        await server.wait()


async def test_server_that_sends_single_bytes_is_read_a_few_times(polling: Polling) -> None:
    """A read for each byte would use a core for each job of a hostile tenant."""
    reads = 0
    body = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in body:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        writer.close()

    receive = asyncio.SelectorEventLoop.sock_recv

    async def counted(loop: asyncio.SelectorEventLoop, connection: socket.socket, size: int) -> bytes:
        nonlocal reads
        reads += 1
        return await receive(loop, connection, size)

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.SelectorEventLoop, "sock_recv", counted)
        polling.poller.follow(KEY, ("pod-0", "127.0.0.1", server.sockets[0].getsockname()[1]))
        await polling.until(lambda: polling.results)
        await polling.poller.close()
    server.close()
    assert 1 < reads <= 42


@pytest.mark.parametrize(
    ("received", "is_end", "expected"),
    [
        (b"HTTP/1.1 20", False, None),
        (b"HTTP/1.1 200 OK\r\nServer: x\r\n", False, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{}", False, None),
        (b"HTTP/1.1 200 OK\r\ncontent-length:2\r\n\r\n{}", False, b"{}"),
        (b"HTTP/1.0 200 \r\n\r\n{}", False, None),
        (b"HTTP/1.0 200 \r\n\r\n{}", True, b"{}"),
    ],
)
def test_body_is_complete_by_its_length_or_at_the_end(received: bytes, is_end: bool, expected: bytes | None) -> None:
    assert complete_body(received, is_end=is_end) == expected


@pytest.mark.parametrize(
    "received",
    [
        b"hello",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:80/\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_response_other_than_a_plain_one_of_status_200_is_refused(received: bytes) -> None:
    with pytest.raises(UnusableAnswerError):
        complete_body(received, is_end=True)


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b"HTTP/1.1 20",
        b"HTTP/1.1 200 OK\r\nServer: x",
        b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"step": 3}',
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    ],
)
async def test_response_that_is_cut_is_none(polling: Polling, received: bytes) -> None:
    """The launcher, or the pod, ended while it was answering."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(received)
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    polling.poller.follow(KEY, ("pod-0", "127.0.0.1", server.sockets[0].getsockname()[1]))
    await polling.until(lambda: polling.results)
    assert set(polling.results) == {"unreachable"}
    assert polling.poller.polled(KEY).report is None and polling.news == []
    server.close()


async def test_missing_response_times_out(trainer: Trainer, polling: Polling) -> None:
    async def silent(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    trainer.handler = silent
    polling.poller.follow(KEY, ("pod-0", "127.0.0.1", trainer.port))
    await polling.until(lambda: polling.results)
    assert polling.results[0] == "unreachable"


@pytest.mark.parametrize("body", [b"", b"[1]", b"nonsense", b'"text"', b"\xff\xfe", b"[" * 60_000])
def test_response_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(UnusableAnswerError):
        parse(body)


def test_nan_and_infinity_become_texts() -> None:
    assert parse(b'{"loss": NaN, "lr": -Infinity, "step": 3}') == {"loss": "NaN", "lr": "-Infinity", "step": 3}
