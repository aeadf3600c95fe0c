"""Downloads over loopback from mirrors that fail in various ways."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ddprun.errors import DataError, UsageError
from ddptrain.config import Config
from ddptrain.data import download as fetch
from ddptrain.data.mnist import MNIST_FILES, IdxFile, load
from tests.ddptrain.runs import ForkServer

Answer = Callable[[http.server.BaseHTTPRequestHandler, str], None]


@contextmanager
def mirror(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """Run an HTTP server on loopback; yields its base URL and the list of requested names."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path.rsplit("/", 1)[-1])
            answer(self, asked[-1])

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/mnist/", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def deliver(content: bytes, length: int | None = None) -> Answer:
    return lambda handler, name: send(handler, content, length)


def send(handler: http.server.BaseHTTPRequestHandler, content: bytes, length: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def good(folder: Path) -> Answer:
    return lambda handler, name: send(handler, (folder / name).read_bytes())


def refuse(status: int) -> Answer:
    return lambda handler, name: handler.send_error(status)


@pytest.fixture
def files(idx: Path) -> tuple[IdxFile, ...]:
    """Return the four files with the digests of the synthetic set, so that its download can succeed."""
    return tuple(
        replace(file, sha256=hashlib.sha256(gzip.decompress((idx / f"{file.name}.gz").read_bytes())).hexdigest())
        for file in MNIST_FILES
    )


@pytest.mark.parametrize(
    "bad",
    [
        refuse(404),
        refuse(503),
        deliver(b"<html>please log in</html>"),
        deliver(gzip.compress(b"another file")),
        deliver(b"\x1f\x8b", 5000),
        deliver(b""),
    ],
)
def test_next_mirror_is_used_after_one_fails(
    idx: Path, tmp_path: Path, files: tuple[IdxFile, ...], bad: Answer
) -> None:
    printed: list[str] = []
    with mirror(bad) as (broken, asked), mirror(good(idx)) as (working, _):
        fetch.fetch(str(tmp_path), mirrors=(broken, working), files=files, log=printed.append)
    assert asked == [f"{file.name}.gz" for file in files]
    assert load("idx", str(tmp_path)).digest == load("idx", str(idx)).digest
    assert not list(tmp_path.glob(".*.tmp"))


def test_only_absent_and_damaged_files_are_downloaded(idx: Path, tmp_path: Path, files: tuple[IdxFile, ...]) -> None:
    with mirror(good(idx)) as (url, asked):
        fetch.fetch(str(tmp_path), mirrors=(url,), files=files)
        fetch.fetch(str(tmp_path), mirrors=(url,), files=files)
        assert len(asked) == 4
        (tmp_path / files[2].name).write_bytes(b"a damaged raw copy, which would be found first")
        fetch.fetch(str(tmp_path), mirrors=(url,), files=files)
        assert asked[4:] == [f"{files[2].name}.gz"]
    assert load("idx", str(tmp_path)).digest == load("idx", str(idx)).digest


def test_leftovers_of_a_killed_download_are_deleted_by_the_next(
    idx: Path, tmp_path: Path, files: tuple[IdxFile, ...]
) -> None:
    leftovers = [tmp_path / f".{file.name}.gz.host.17.0badcafe.tmp" for file in files]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    (tmp_path / ".other.tmp").touch()
    with mirror(good(idx)) as (url, _):
        fetch.fetch(str(tmp_path), mirrors=(url,), files=files)
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [".other.tmp"]


def test_waiting_for_another_download_reports_progress(idx: Path, tmp_path: Path, files: tuple[IdxFile, ...]) -> None:
    other = (tmp_path / ".fetch.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    signs: list[None] = []

    def alive() -> None:
        signs.append(None)
        if len(signs) == 3:
            other.close()

    with mirror(good(idx)) as (url, asked):
        fetch.fetch(str(tmp_path), mirrors=(url,), files=files, alive=alive)
    assert len(asked) == 4


def test_lock_that_is_never_released_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_LOCKED", 0.3)
    with (tmp_path / ".fetch.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another process has held .*\.fetch\.lock"):
            fetch.fetch(str(tmp_path), mirrors=())


def test_error_after_all_mirrors_failed_has_each_reason_and_leaves_no_file(tmp_path: Path) -> None:
    with (
        mirror(refuse(404)) as (one, _),
        mirror(refuse(410)) as (two, _),
        pytest.raises(DataError, match=r"HTTP 404.*HTTP 410") as caught,
    ):
        fetch.fetch(str(tmp_path), mirrors=(one, two))
    assert caught.value.code == 66
    assert [path.name for path in tmp_path.iterdir()] == [".fetch.lock"]


def test_url_that_is_not_http_is_not_opened(tmp_path: Path, idx: Path) -> None:
    with pytest.raises(DataError, match="not an http"):
        fetch.fetch(str(tmp_path), mirrors=(f"file://{idx}/",))


def test_one_of_several_concurrent_fetches_downloads(idx: Path, tmp_path: Path, files: tuple[IdxFile, ...]) -> None:
    with mirror(good(idx)) as (url, asked):
        threads = [
            threading.Thread(target=fetch.fetch, args=(str(tmp_path),), kwargs={"mirrors": (url,), "files": files})
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(asked) == 4


def test_download_works_on_a_volume_without_locks(
    idx: Path, tmp_path: Path, files: tuple[IdxFile, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fetch.fcntl, "flock", refuse)  # as on some network volumes
    with mirror(good(idx)) as (url, _):
        fetch.fetch(str(tmp_path / "new"), mirrors=(url,), files=files)
    assert load("idx", str(tmp_path / "new")).digest == load("idx", str(idx)).digest


def test_complete_directory_is_not_written(tmp_path: Path, idx: Path, files: tuple[IdxFile, ...]) -> None:
    before = idx.stat().st_mtime_ns
    fetch.fetch(str(idx), mirrors=(), files=files)
    assert idx.stat().st_mtime_ns == before


def test_fetch_exits_with_66_if_the_content_is_not_mnist(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    with mirror(good(idx)) as (url, _):
        run = ddptrain.run("fetch", "--data-dir", tmp_path, "--url", url, code=66)
    assert "wrong content" in run.output()
    assert json.loads(run.termination_log.read_text())["code"] == 66


def test_download_without_a_directory_is_refused() -> None:
    with pytest.raises(UsageError, match="--data mnist needs --data-dir"):
        fetch.load(Config(data="mnist", download=True), log=print, alive=lambda: None)
