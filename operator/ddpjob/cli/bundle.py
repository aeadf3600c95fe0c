"""``ddpjob bundle``: one zip with what can be read of a job, without the values of its user, for an issue."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.text import number_of, one_line

if TYPE_CHECKING:
    from ddpjob.client.bundle.archive import Manifest


def bundle(
    name: Name,
    file: Annotated[
        str | None, Option("--file", "-f", metavar="FILE", help="The new file; by default JOB-TIME.zip.")
    ] = None,
    *,
    logs: Annotated[
        bool,
        Option(
            "--logs",
            help="Add the ends of the logs of the pods, the operator's log of the job, and messages of the program. "
            "Secrets that a program printed are not removed.",
        ),
    ] = False,
    output: Form = "text",
    where: Where,
) -> int:
    """Write one zip that shows what happened to a job: the job, pods, events, versions.

    Values of variables, arguments, headers, attributes, annotations, labels of your own and messages of the program are
    not in it; names of objects and of images are. manifest.json lists what is in the file, and what could not be read
    and why; it is the JSON, with the schema docs/reference/schemas/bundle.json.

    \b
    Example:
      ddpjob bundle mnist-cpu
    """
    client = find(name, where)
    path = file or f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.zip"
    with client:
        made = client.bundle(name, path, logs=logs)
    if output == "json":
        print(json.dumps(made.wire() | {"file": path}, indent=2))
    else:
        print("\n".join(one_line(line) for line in _lines(made, path, client.place)))
    return 0


def _lines(made: "Manifest", path: str, place: str) -> Iterator[str]:
    size = sum(made.files.values())
    yield f"wrote {path}: {number_of(len(made.files), 'file')}, {size:,} bytes, about {made.job}, {place}"
    yield from (f"- {name}: {size:,} bytes" for name, size in made.files.items())
    gone = made.redaction
    yield f"removed: {gone.hidden} values, {gone.left_out} annotations, labels and other fields"
    yield from (f"not in it: {what}: {reason}" for what, reason in made.unread.items())
    if gone.logs:
        yield "next:  read logs and messages before you give the file away: secrets that a program printed are in them"
    else:
        yield "next:  --logs adds logs and messages of the program, with the secrets that it printed"
