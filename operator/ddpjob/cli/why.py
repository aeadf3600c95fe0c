"""``ddpjob why``: one verdict on a job in any state, with its evidence and the next command."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from ddpjob.api.text import attributed
from ddpjob.cli.options import Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find
from ddpjob.cli.text import is_coloured, one_line, red

if TYPE_CHECKING:
    from ddpjob.client.verdict.explanation import Explanation

_LONGEST = 400  # characters of one value


def why(
    name: Name,
    output: Annotated[Literal["text", "json"], Option("--output", "-o", metavar="FORM", help="text or json.")] = "text",
    *,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Say why a job is in its state: one sentence, the evidence, how sure it is, and what to do next.

    It works while the job waits, runs or hangs and after it failed, also when its pods are gone or the operator is
    down. The JSON has the schema docs/schemas/explanation.json.

    \b
    Example:
      ddpjob why mnist-cpu
    """
    client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    with client:
        found = client.explain(name)
    if output == "json":
        print(json.dumps(found.wire(), indent=2))
    else:
        print("\n".join(verdict_lines(found, client.place, coloured=is_coloured())))
    return 0


def verdict_lines(found: "Explanation", place: str, *, coloured: bool) -> Iterator[str]:
    """Yield the verdict for a person; only what is abnormal is in colour."""
    colour = coloured and found.is_abnormal
    yield red(one_line(found.sentence)) if colour else one_line(found.sentence)
    for item in found.evidence:
        text = one_line(item.value)
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
        yield f"  {one_line(f'{item.kind} {item.name} {item.field}')}: {shown}"
    operator = "" if found.operator == "Unknown" else f", operator {found.operator.lower()}"
    yield f"stage: {found.stage} ({one_line(found.reason)}), confidence {found.confidence.lower()}{operator}, {place}"
    yield from (f"note:  {one_line(text)}" for text in found.unread)
    for name, advice in (("hint", found.hint), ("next", found.next)):
        if advice:
            yield f"{name}:  {one_line(attributed(name, advice, found.from_program))}"
