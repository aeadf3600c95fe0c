"""``ddpjob checkpoints`` and ``pull``: list the volume of a job, and copy from it."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, show, table
from ddpjob.cli.text import age, duration, number_of, one_line, size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpjob.cli.table import Row
    from ddpjob.client.volume.contents import CheckpointFile, PullProgress, VolumeContents

_FAILED = 1
_MOST = 10  # names of other files
_SECONDS, _REDRAW_SECONDS = 10.0, 0.2


def checkpoints(
    name: Name,
    output: Form = "text",
    *,
    verify: Annotated[bool, Option("--verify/--no-verify", help="Read the checkpoints and compare their digests.")] = (
        True
    ),
    where: Where,
) -> int:
    """List what the volume of a job holds: checkpoints with step, size, time and state, metrics, other files.

    On a cluster, a pod with the image of the job reads the volume; it is deleted at the end. The JSON has the schema
    docs/reference/schemas/checkpoints.json.

    \b
    Exit codes:
      0  every checkpoint is intact, or was not verified
      1  a checkpoint is damaged or cannot be read

    \b
    Example:
      ddpjob checkpoints mnist-cpu
    """
    client = find(name, where)
    with client, shown_transfer(quiet=output == "json") as shown:
        found = client.checkpoints(name, verify=verify, on_progress=shown)
    if output == "json":
        print(json.dumps(found.wire(), indent=2))
    else:
        _show(found, client.place)
    return _FAILED if any(checkpoint.problem for checkpoint in found.checkpoints) else 0


def _show(found: "VolumeContents", place: str) -> None:
    print(one_line(f"claim {found.claim}, {found.directory} ({place})"), flush=True)
    if found.checkpoints:
        header = ("RUN", "STEP", "SIZE", "AGE", "STATE", "FILE")
        show(table(header, list(map(_row, found.checkpoints)), whole=("STEP", "FILE"), folded="STATE"))
    else:
        print("no checkpoints of ddprun.checkpoints or ddptrain")
    for kind, files in (("metrics", found.metrics), ("other files", found.others)):
        names = ", ".join(file.path for file in files[:_MOST]) + (", …" if len(files) > _MOST else "")
        if files:
            size = size_text(sum(file.bytes for file in files))
            print(one_line(f"{kind}: {number_of(len(files), 'file')}, {size}: {names}"))
    for text in found.unlisted:
        print(one_line(f"not listed: {text}"))


def _row(checkpoint: "CheckpointFile") -> "Row":
    size = "" if checkpoint.bytes is None else size_text(checkpoint.bytes)
    state = Cell(": ".join(filter(None, (checkpoint.state, checkpoint.problem))), bool(checkpoint.problem))
    return (checkpoint.run, checkpoint.step, size, age(checkpoint.saved), state, checkpoint.path)


def pull(
    name: Name,
    *,
    to: Annotated[
        str | None, Option("--to", metavar="DIR", help="Directory to copy to; default: one named as the job.")
    ] = None,
    steps: Annotated[
        list[int] | None, Option("--step", metavar="N", help="The checkpoint of this step. May be repeated.")
    ] = None,
    metrics: Annotated[
        bool, Option("--metrics", help="The metrics of all runs; with --step, the checkpoint as well.")
    ] = False,
    everything: Annotated[
        bool, Option("--all", help="All files but hidden ones: a name that begins with a dot and is not .metadata.")
    ] = False,
    output: Form = "text",
    where: Where,
) -> int:
    """Copy the newest checkpoint from the volume of a job, or other files, and compare digests on the way.

    A checkpoint must also have the digest that the training wrote; of --all, `ddpjob checkpoints --verify` compares it.

    On a cluster, a pod with the image of the job sends the files; it is deleted at the end. A connection that is cut is
    made again, and after any other end the same command continues. The JSON has the schema
    docs/reference/schemas/pull.json.

    \b
    Exit codes:
      0    all files are here and have their digests
      1    a file could not be copied, or with --all is not listed
      130  stopped by Ctrl-C; the same command continues

    \b
    Example:
      ddpjob pull mnist-cpu --to trained
    """
    client = find(name, where)
    try:
        with _sigterm_like_ctrl_c(), client, shown_transfer(quiet=output == "json") as shown:
            done = client.pull(name, to, steps=steps or (), metrics=metrics, everything=everything, on_progress=shown)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        raise
    if output == "json":
        print(json.dumps(done.wire(), indent=2))
    else:
        for file, path in zip(done.files, done.paths, strict=True):
            print(one_line(f"{path}: {size_text(file.bytes)}, sha256 {file.sha256}"))
        print(one_line(f"{number_of(len(done.files), 'file')} of {done.job} ({client.place}) in {done.to}"))
        if done.agreed:
            print(one_line(f"all ranks agreed: they had the same parameters at {done.agreed}"))
    if not done.complete:
        print("warning: the volume has more files, which are not copied", file=sys.stderr)
    return 0 if done.complete else _FAILED


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM end the block by KeyboardInterrupt, so that the pod is deleted."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def shown_transfer(*, quiet: bool = False) -> "Iterator[Callable[[PullProgress], None]]":
    """Show on standard error what the returned function is called with: on a terminal one line that changes, elsewhere
    a line now and then, and a new wait at once. quiet: show nothing.
    """
    begin = shown = time.monotonic()
    waiting = ""
    is_terminal = sys.stderr.isatty()
    pause, end = (_REDRAW_SECONDS, "\x1b[K\r") if is_terminal else (_SECONDS, "\n")
    width = shutil.get_terminal_size().columns - 1 if is_terminal else None

    def show_progress(progress: "PullProgress") -> None:
        nonlocal shown, waiting
        now = time.monotonic()
        is_due = progress.waiting != waiting if progress.waiting else now - shown >= pause
        waiting = progress.waiting
        if is_due and not quiet:
            shown = now
            total = progress.total
            part = f"{100 * progress.done / total:.0f} % of {size_text(total)}, " if total else ""
            line = f"{duration(now - begin):>6}  {one_line(waiting or part + progress.path)}"
            print(line[:width], end=end, file=sys.stderr, flush=True)

    try:
        yield show_progress
    finally:
        if is_terminal and not quiet:
            print("\x1b[K", end="", file=sys.stderr, flush=True)
