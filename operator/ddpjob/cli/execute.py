"""``ddpjob run`` carried out. It brings the operator and the API's schema, so it comes late."""

import asyncio
import json
import sys
import time
from functools import partial
from typing import Any

from ddpjob.cli import data, documents
from ddpjob.cli.audience import Audience
from ddpjob.cli.display import Display
from ddpjob.cli.ending import Outcome
from ddpjob.cli.ndjson import JsonDisplay
from ddpjob.cli.plain import PlainDisplay
from ddpjob.cli.prepare import Prepared, Request, prepare, require_programs
from ddpjob.cli.printable import one_line
from ddpjob.cli.watch import watched
from ddpjob.local.session import Options, Session, render

Json = dict[str, Any]


def execute(request: Request) -> int:
    """Run, or with ``dry_run`` only show, the job. Returns the exit code; raises ``LocalError``."""
    audience = Audience(sys.stdout)
    prepared = prepare(request)
    if request.dry_run:
        return _dry_run(request, prepared)
    require_programs(prepared.file.job)
    display = _display(request.output, audience)
    begin = time.monotonic()
    with display:
        for note in prepared.notes:
            display.note(note)
        for warning in prepared.warnings:
            display.note(warning, loud=True)
        if request.digits_if_offline:
            warn = partial(display.note, loud=True)
            data.digits_if_offline(prepared.places, fresh=request.fresh, say=display.note, warn=warn)
        options = Options(fresh=request.fresh, volumes=prepared.places.volumes, directory=prepared.file.directory)
        shows_output = not data.runs_ddptrain(prepared.file.job)
        job, stopped_by = asyncio.run(
            watched(
                lambda on_change: Session(
                    prepared.file.job,
                    prepared.file.others,
                    prepared.places.folder,
                    options,
                    on_change=on_change,
                    say=display.note,
                ),
                display,
                audience,
                prepared.places.record if shows_output else None,
            )
        )
        outcome = Outcome(job, prepared.places, time.monotonic() - begin, request.again, stopped_by)
        display.end(outcome)
    if request.output == "yaml":
        print(documents.dump(job), end="", file=audience.stream)
    return outcome.exit_code


def _dry_run(request: Request, prepared: Prepared) -> int:
    """The objects that a cluster would hold, the user's ConfigMaps included; Secrets stay where they are."""
    shown = [other for other in prepared.file.others if other.get("kind") != "Secret"]
    objects = [*render(prepared.file.job), *shown]
    for note in prepared.notes:
        print(f"· {one_line(note)}", file=sys.stderr)
    if len(shown) < len(prepared.file.others):
        print("· Secrets are left out", file=sys.stderr)
    if request.digits_if_offline:
        print("· --digits-if-offline looks for MNIST when the job runs, not now", file=sys.stderr)
    if request.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        print(documents.dump(*objects), end="")
    return 0


def _display(output: str | None, audience: Audience) -> Display:
    if output == "json":
        return JsonDisplay(audience.stream)
    if output == "yaml":
        return PlainDisplay(Audience(sys.stderr).stream)
    if output == "table" or (output is None and audience.is_terminal()):
        from rich.console import Console

        from ddpjob.cli.live import LiveDisplay

        return LiveDisplay(Console(file=audience.stream, highlight=False, emoji=False, markup=False))
    return PlainDisplay(audience.stream)
