"""Download of the MNIST files from the first mirror that delivers them intact.

Used by the verb ``fetch`` and by ``--download``. A file is accepted by the digest of its decompressed content and
written atomically. A lock lets one process per directory download; the others wait and then find the files.
"""

import errno
import fcntl
import hashlib
import http.client
import io
import os
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddprun.errors import DataError, volume_errors
from ddprun.files import make_shared, share, write_atomically
from ddptrain.config import Config
from ddptrain.data import mnist
from ddptrain.data.mnist import MNIST_BYTES, MNIST_FILES, Dataset, IdxFile, decompress, read_content
from ddptrain.errors import DownloadFailed

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_TIMEOUT = 30.0  # seconds without a byte
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_CHUNK = 2**18
_POLL = 0.1  # seconds
_LOCKED = 900.0  # seconds to wait for another process's download of 11 MB


def fetch(
    data_dir: str,
    *,
    mirrors: Sequence[str] = MIRRORS,
    files: Sequence[IdxFile] = MNIST_FILES,
    log: Callable[[str], None] = print,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Make ``data_dir`` hold the four files, downloading those that are absent or damaged.

    Args:
        mirrors: base URLs, tried in order.
        alive: called repeatedly while a download, here or in another process, makes progress.
    Raises:
        DataError: no mirror delivered a file; the message has the reason of each.
        VolumeError: the directory cannot be written.
    """
    folder = Path(data_dir)
    if all(is_whole(folder, file) for file in files):
        return  # without a lock, because the volume may be read-only
    with volume_errors(folder), _only_writer(folder, alive) as locked:
        for file in files:
            if is_whole(folder, file):
                continue
            # Temporary files of killed downloads: no other process writes one while we hold the lock.
            for path in folder.glob(f".{file.name}.gz.*.tmp") if locked else []:
                path.unlink(missing_ok=True)
            log(f"fetching {file.name}.gz")
            urls = [f"{mirror.rstrip('/')}/{file.name}.gz" for mirror in mirrors]
            write_atomically(folder / f"{file.name}.gz", _download(file, urls, log=log, alive=alive))
            (folder / file.name).unlink(missing_ok=True)  # a damaged raw copy would be found first


def load(config: Config, *, log: Callable[[str], None], alive: Callable[[], None]) -> Dataset:
    """Return the configured data set, with ``--download`` also if it must be downloaded.

    Raises as ``fetch`` and ``mnist.load``.
    """
    try:  # first, because the reading of MNIST by four ranks of two cores takes half a second
        return mnist.load(config.data, config.data_dir)
    except DataError:
        if not (config.download and config.data == "mnist"):
            raise
    # Called on every rank: the first one on each volume downloads, the others wait for its lock.
    fetch(config.data_dir, log=log, alive=alive)
    return mnist.load(config.data, config.data_dir)


def is_whole(folder: Path, file: IdxFile) -> bool:
    """Return whether the file exists with MNIST's content."""
    try:
        return hashlib.sha256(read_content(folder, file)).hexdigest() == file.sha256
    except DataError:
        return False


@contextmanager
def _only_writer(folder: Path, alive: Callable[[], None]) -> Iterator[bool]:
    """Hold the directory's lock and yield True, or False if the file system has no locks."""
    make_shared(folder)
    path = folder / ".fetch.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
    share(path, 0o664)
    with os.fdopen(descriptor, "w") as lock:
        end, has_lock = time.monotonic() + _LOCKED, False
        while not has_lock:  # polled, because a rank blocked in flock would show no sign of life
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            except BlockingIOError:
                alive()
                if time.monotonic() > end:
                    raise DownloadFailed(
                        f"another process has held {path} for {_LOCKED:.0f} s",
                        hint="its download hangs, or the process is stopped",
                        next_step="end that process and start again",
                    ) from None
                time.sleep(_POLL)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break  # several processes may download, each to its own temporary file: wasteful, but correct
        yield has_lock


def _download(file: IdxFile, urls: Sequence[str], *, log: Callable[[str], None], alive: Callable[[], None]) -> bytes:
    """Return the gzipped file from the first URL that delivers the right content."""
    failures: dict[str, str] = {}
    for url in urls:
        alive()  # so that mirrors that never answer end in an error, not in a hang report
        try:
            content = _get(url, alive)
            digest = hashlib.sha256(decompress(io.BytesIO(content), MNIST_BYTES)).hexdigest()
            if digest == file.sha256:
                return content
            failures[url] = f"wrong content (SHA-256 {digest[:16]}…)"
        except urllib.error.HTTPError as error:
            failures[url] = f"HTTP {error.code}"
        except (OSError, EOFError, zlib.error, http.client.HTTPException, ValueError) as error:
            failures[url] = str(error) or type(error).__name__
        log(f"{url}: {failures[url]}")
    raise DownloadFailed(
        f"no mirror delivered {file.name}: {'; '.join(f'{url}: {failure}' for url, failure in failures.items())}",
        hint="this machine may have no network",
        next_step="try another mirror with `ddptrain fetch --url URL`, copy the four files into the directory, or "
        "train on digits without files: --data digits",
    )


def _get(url: str, alive: Callable[[], None]) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an http(s) URL")
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:  # noqa: S310 - the scheme is checked above
        content = b""
        while len(content) <= MNIST_BYTES and (chunk := answer.read(_CHUNK)):
            content += chunk
            alive()
    if len(content) > MNIST_BYTES:
        raise ValueError("larger than any MNIST file")
    if answer.length:  # read(n) reports no connection that ended early
        raise http.client.IncompleteRead(content, answer.length)
    return content
