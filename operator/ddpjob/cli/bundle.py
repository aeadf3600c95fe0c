"""``ddpjob bundle``: one zip with all that can be read of a job, without secrets, to attach to an issue."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from ddpjob.cli.options import Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find
from ddpjob.cli.text import number_of, one_line

if TYPE_CHECKING:
    from ddpjob.client.bundle.manifest import Manifest


def bundle(
    name: Name,
    file: Annotated[
        str | None, Option("--file", "-f", metavar="FILE", help="The new file; by default JOB-TIME.zip.")
    ] = None,
    *,
    hide_names: Annotated[
        bool,
        Option(
            "--hide-names", help="Replace names of jobs, namespaces, nodes, claims, images and others by pseudonyms."
        ),
    ] = False,
    logs: Annotated[bool, Option("--logs", help="Add the ends of the logs of the pods.")] = False,
    output: Annotated[
        Literal["text", "json"], Option("--output", "-o", metavar="FORM", help="text, or json: the manifest.")
    ] = "text",
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Write one zip that shows what happened to a job: the job, pods, events, the operator's log, metrics, versions.

    Values of variables, annotations and what looks like a secret are removed. manifest.json lists what is in the file,
    and what could not be read and why; its schema is docs/schemas/bundle.json. Look into the file before you give it
    away.

    \b
    Example:
      ddpjob bundle mnist-cpu --hide-names
    """
    client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    path = file or f"{'job' if hide_names else name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.zip"
    with client:
        made = client.bundle(name, path, hide_names=hide_names, logs=logs)
    if output == "json":
        print(json.dumps(made.wire() | {"file": path}, indent=2))
    else:
        print("\n".join(one_line(line) for line in _lines(made, path, client.place)))
    return 0


def _lines(made: "Manifest", path: str, place: str) -> Iterator[str]:
    size = sum(one.bytes for one in made.files)
    yield f"wrote {path}: {number_of(len(made.files), 'file')}, {size:,} bytes, about {made.job}, {place}"
    yield from (f"- {one.path}: {one.what}" for one in made.files)
    gone = made.redaction
    removed = f"{gone.env_values} values of variables, {gone.annotations} of annotations, {gone.secrets} other secrets"
    yield f"removed: {removed}; names are {'pseudonyms' if gone.names_hidden else 'kept (--hide-names)'}"
    yield from (f"not in it: {one.what}: {one.reason}" for one in made.unread)
    if not gone.same_plan:
        yield "note:  without what was removed, the operator would decide otherwise: a replay may mislead"
    yield f"next:  look into it; ddpjob replay {path} shows what the operator would do"
