"""``ddpjob pull``: copies checkpoints and metrics from the volume of a job."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from typer import Option

from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.text import number_of, one_line, size_text

_NOT_ALL = 1


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
    from ddpjob.cli.transfer import shown_transfer

    client = find(name, where)
    try:
        with _sigterm_like_ctrl_c(), client, shown_transfer(quiet=output == "json") as show:
            done = client.pull(name, to, steps=steps or (), metrics=metrics, everything=everything, on_progress=show)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        raise
    if output == "json":
        print(json.dumps(done.wire(), indent=2))
    else:
        for file, path in zip(done.files, done.paths, strict=True):
            print(one_line(f"{path}: {size_text(file.bytes)}, sha256 {file.sha256}"))
        print(one_line(f"{number_of(len(done.files), 'file')} of {done.job} ({client.place}) in {done.to}"))
    if not done.complete:
        print("warning: the volume has more files, which are not copied", file=sys.stderr)
    return 0 if done.complete else _NOT_ALL


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM end the block by KeyboardInterrupt, so that the pod is deleted."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
