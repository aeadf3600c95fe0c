"""``ddpjob why``: one verdict on a job in any state, with its evidence and the next command."""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.api.text import attributed
from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.text import is_coloured, one_line, red

if TYPE_CHECKING:
    from ddpjob.client.verdict.explanation import Evidence, Explanation

_LONGEST = 400  # characters of one value
_SHORT = 20  # characters of a text that may be repeated
_LINES = 8
_NEW = 0.25
"""The share of words of a value that the lines above it do not have, from which it adds something."""


def why(
    name: Name,
    output: Form = "text",
    *,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Print all of the evidence, also what repeats.")] = False,
    where: Where,
) -> int:
    """Say why a job is in its state: one sentence, what else shows it, how sure it is, and what to do next.

    It works while the job waits, runs or hangs and after it failed, also when its pods are gone or the operator is
    down. The JSON has the schema docs/reference/schemas/explanation.json.

    \b
    Example:
      ddpjob why mnist-cpu
    """
    client = find(name, where)
    with client:
        found = client.explain(name)
    if output == "json":
        print(json.dumps(found.wire(), indent=2))
    else:
        print("\n".join(verdict_lines(found, client.place, coloured=is_coloured(), verbose=verbose)))
    return 0


def verdict_lines(found: "Explanation", place: str, *, coloured: bool, verbose: bool = False) -> Iterator[str]:
    """Yield the verdict for a person; only what is abnormal is in colour.

    verbose: with all evidence. Otherwise these are at most ``_LINES`` lines, and no value that repeats others.
    """
    colour = coloured and found.is_abnormal
    operator = "" if found.operator == "Unknown" else f", operator {found.operator.lower()}"
    stage = f"stage: {found.stage} ({one_line(found.reason)}), confidence {found.confidence.lower()}{operator}, {place}"
    notes = [one_line(text) for text in found.unread]
    advice = [
        f"{name}:  {one_line(attributed(name, text, found.from_program))}"
        for name, text in (("hint", found.hint), ("next", found.next))
        if text
    ]
    end = [stage, *(f"note:  {text}" for text in (notes if verbose or not notes else ["; ".join(notes)])), *advice]
    items = [(item, item.value) for item in found.evidence] if verbose else list(added_evidence(found))
    most = len(items) if verbose else _LINES - 1 - len(end)
    yield red(one_line(found.sentence)) if colour else one_line(found.sentence)
    for item, value in items if len(items) <= most else items[: most - 1]:
        text = one_line(value)
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
        yield f"  {one_line(f'{item.kind} {item.name} {item.field}')}: {shown}"
    if len(items) > most:
        yield f"  … {len(items) - most + 1} more: ddpjob why {found.job} -v"
    yield from end


def added_evidence(found: "Explanation") -> Iterator[tuple["Evidence", str]]:
    """Yield the evidence that says more than the verdict and the evidence before it, and its value without these."""
    code = found.exit_code if found.exception else None  # an exception implies it
    said = _words(f"{found.sentence} {found.reason} {found.hint} {found.next} {code} True False next")
    texts = [text for text in (found.next, found.hint) if text]
    for item in found.evidence:
        value = item.value
        for text in texts:
            value = value.replace(text, "…") if len(text) > _SHORT else value
        texts.append(item.value)
        words = _words(value)
        if len(words - said) >= max(_NEW * len(words), 1):
            said |= words
            yield item, value


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
