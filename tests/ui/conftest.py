"""``ddpjob ui`` as a program, and a client of its pages."""

from __future__ import annotations

import http.client
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.cli.program import Program


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass
class Pages:
    """The pages of one program. ``root`` is the path of the page of all jobs, with its token."""

    port: int
    root: str

    def __call__(self, path: str = "", *, method: str = "GET", whole: str | None = None, **headers: str) -> Answer:
        """Return the answer for a path below the token, or for a whole path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, self.root + path if whole is None else whole, headers=given)
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read().decode())
        finally:
            connection.close()

    @contextmanager
    def lines(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """Give an answer that is read line by line."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", self.root + path)
        answer = connection.getresponse()
        try:
            yield answer
        finally:
            answer.close()  # which holds the connection open, too
            connection.close()

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[str]]:
        """Give the data of the events of a stream."""
        with self.lines(path) as answer:
            assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
            lines = (line.decode() for line in answer)
            yield (line.removeprefix("data: ") for line in lines if line.startswith("data: "))


@pytest.fixture
def ddpjob(tmp_path: Path) -> Program:
    return Program(tmp_path)


@contextmanager
def served(ddpjob: Program, *options: str) -> Iterator[Pages]:
    """Start ``ddpjob ui``."""
    with ddpjob.started("ui", "--no-browser", *options) as process:
        yield pages_of(process)


def pages_of(process: subprocess.Popen[str]) -> Pages:
    """Return the pages of a program that has been started."""
    assert process.stdout is not None
    address = urlsplit(process.stdout.readline().strip())
    assert address.hostname == "127.0.0.1", address
    token = address.path.split("/")[1]
    assert len(token) >= 32
    return Pages(address.port or 0, f"/{token}/")
