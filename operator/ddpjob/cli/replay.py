"""``ddpjob replay``: what the operator would do about the job in a bundle."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ddpjob.cli.text import duration, one_line

if TYPE_CHECKING:
    from ddpjob.client.bundle.replay import ObjectName, Replay

_LONGEST = 200


def replay(
    file: Annotated[str, Argument(metavar="BUNDLE", help="The zip that ddpjob bundle wrote.")],
    *,
    after: Annotated[
        float, Option("--after", metavar="SECONDS", min=0, help="So many seconds after the recording.")
    ] = 0.0,
    output: Annotated[
        Literal["text", "json"], Option("--output", "-o", metavar="FORM", help="text, or json: the whole plan.")
    ] = "text",
) -> int:
    """Show what the operator of this release would do about the job in a bundle; nothing is carried out.

    It decides by the recorded objects alone. The JSON has the schema docs/schemas/replay.json.

    \b
    Example:
      ddpjob replay tests/client/incidents/lost-pod.zip
    """
    from ddpjob.client.bundle import replay as replayed

    made = replayed(file, after=after)
    if output == "json":
        print(json.dumps(made.wire(), indent=2))
    else:
        print("\n".join(one_line(line) for line in _lines(made)))
    return 0


def _lines(made: "Replay") -> Iterator[str]:
    yield f"{made.job} in namespace {made.namespace}, recorded {made.recorded}, planned for {made.now}"
    if made.is_idle:
        yield "nothing to do"
    if made.starts_attempt is not None:
        yield f"starts attempt {made.starts_attempt}"
    for field, value in (made.status_patch or {}).items():
        if field == "conditions":
            continue  # long, and follows from the rest
        yield f"status.{field}: {_short(value)}"
    yield from (f"delete {one.kind} {one.name}" for one in made.deletes)
    yield from (f"change {one.kind} {one.name}: {_short(one.spec)}" for one in made.changes)
    for phase in made.creates:
        yield f"create {_named(phase)}"
    yield from (f"event {one.type} {one.reason}: {one.message}" for one in made.events)
    if made.reads_logs:
        yield f"read the logs of {', '.join(made.reads_logs)}"
    if made.polls:
        yield f"ask {made.polls} for its progress"
    if made.requeue_after is not None:
        yield f"plan again after {duration(made.requeue_after)}, or after a change"
    if made.assumed:
        yield f"note:  taken to exist, because it is not recorded: {', '.join(made.assumed)}"


def _named(phase: "list[ObjectName]") -> str:
    shown = ", ".join(f"{one.kind} {one.name}" for one in phase[:4])
    return shown if len(phase) <= 4 else f"{shown} and {len(phase) - 4} more"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
