"""``ddpjob checkpoints``: lists what the volume of a job holds."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, show, table
from ddpjob.cli.text import age, number_of, one_line, size_text

if TYPE_CHECKING:
    from ddpjob.cli.table import Row
    from ddpjob.client.volume.contents import CheckpointFile, VolumeContents

_FAILED = 1
_MOST = 10  # names of other files


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
    from ddpjob.cli.transfer import shown_transfer

    client = find(name, where)
    with client, shown_transfer(quiet=output == "json") as show:
        found = client.checkpoints(name, verify=verify, on_progress=show)
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
    for line in _others(found):
        print(one_line(line))


def _row(checkpoint: "CheckpointFile") -> "Row":
    size = "" if checkpoint.bytes is None else size_text(checkpoint.bytes)
    state = checkpoint.state + (f": {checkpoint.problem}" if checkpoint.problem else "")
    is_damaged = bool(checkpoint.problem)
    return (checkpoint.run, checkpoint.step, size, age(checkpoint.saved), Cell(state, is_damaged), checkpoint.path)


def _others(found: "VolumeContents") -> Iterator[str]:
    for kind, files in (("metrics", found.metrics), ("other files", found.others)):
        names = ", ".join(file.path for file in files[:_MOST]) + (", …" if len(files) > _MOST else "")
        if files:
            yield f"{kind}: {number_of(len(files), 'file')}, {size_text(sum(file.bytes for file in files))}: {names}"
    yield from (f"not listed: {text}" for text in found.unlisted)
