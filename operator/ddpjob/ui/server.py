"""The pages of ``ddpjob ui``: their addresses, the streams that keep them current, and the commands behind buttons."""

import asyncio
import json
import re
import shlex
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from urllib.parse import urlencode

from jinja2 import ChoiceLoader, PackageLoader
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from ddpjob.api.times import parse_time
from ddpjob.cli.place import is_of_this_machine
from ddpjob.cli.text import duration, one_line
from ddpjob.client.base import Client
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError
from ddpjob.ui.fleet import GROUPS, fleet
from ddpjob.ui.job import LiveJob
from ddpjob.ui.jobs import WatchedJobs
from ddpjob.ui.log import MOST, FollowedLogs
from ddpjob.ui.strip import ranks_now, sentence
from ddpjob.version import __version__
from ddpplot import figure
from ddpplot.page import STYLE as PAGE_STYLE
from ddpplot.page import duration as page_duration
from ddpplot.page import policy, render

STYLE = PAGE_STYLE + Markup((files("ddpjob.ui") / "templates" / "ui.css").read_text())  # noqa: S704 - a constant
_LIVE = (files("ddpjob.ui") / "templates" / "live.js").read_text()
_POLICY = policy(STYLE, "; script-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'")
_HEADERS = {"Content-Security-Policy": f"{_POLICY}; frame-ancestors 'none'"}
TEMPLATES = figure.TEMPLATES.overlay(loader=ChoiceLoader([PackageLoader("ddpjob.ui"), PackageLoader("ddpplot")]))
TEMPLATES.filters |= {"duration": page_duration, "query": lambda parts: f"?{urlencode(parts)}" if parts else ""}
_FIRST = 10.0  # seconds that a page waits for the first answer
_SEND = 1.0  # seconds between two looks whether a page has changed
_AGES = 15.0  # seconds until a page of all jobs is sent again, as ages and those that wait for long change without news
_SHOWN_RANKS, _SHOWN_JOBS = 24, 300
_RANK = re.compile("[0-9]{1,6}")

Verb = Callable[[Client, DDPJob], str]


def _stacks(client: Client, job: DDPJob) -> str:
    from ddpjob.cli.stacks import headline, listed

    seen = client.stacks(job)
    parts = [headline(seen)]
    parts += [f"ranks {listed([one.rank for one in group])}:\n{group[0].stacks.strip()}" for group in seen.groups]
    return "\n\n".join(parts)


def _profile(client: Client, job: DDPJob) -> str:
    from ddpjob.cli.profile import headline

    found = client.profile(job)
    return f"{headline(found)}\n{found.file}: open it at https://ui.perfetto.dev"


def _changed(change: str) -> Verb:
    def act(client: Client, job: DDPJob) -> str:
        getattr(client, change)(job)
        return f"{job.name} {change}{'ed' if change != 'resume' else 'd'}"

    return act


VERBS: dict[str, tuple[str, Verb]] = {
    "stacks": ("Take the Python stacks of all ranks; the training goes on.", _stacks),
    "profile": ("Profile five steps of all ranks into a file of this directory; the training goes on.", _profile),
    "suspend": ("Stop the pods after they saved a checkpoint.", _changed("suspend")),
    "resume": ("Start the suspended job again.", _changed("resume")),
    "restart": ("Restart all pods after they saved a checkpoint.", _changed("restart")),
}


def verbs_of(job: DDPJob) -> list[str]:
    """Return the commands that make sense now."""
    if job.finished:
        return []
    if job.state in ("Suspended", "Interrupted"):
        return ["resume"]
    return ["stacks", "profile", "suspend", "restart"]


@dataclass
class Pages:
    """The pages about the jobs of one client. root: the first part of all addresses, with the token."""

    client: Client
    root: str
    jobs: WatchedJobs
    logs: FollowedLogs
    is_read_only: bool = False
    options: tuple[str, ...] = ()  # of a command line for the same place
    _live: dict[tuple[str, str], LiveJob] = field(default_factory=dict)
    _drawn: dict[tuple[str, str], tuple[tuple[object, ...], str]] = field(default_factory=dict)
    _drawing: threading.Lock = field(default_factory=threading.Lock)

    def app(self) -> Starlette:
        """Return the application, without its guard."""
        job = f"{self.root}/jobs/{{namespace}}/{{name}}"
        routes = [
            Route(f"{self.root}/", self._fleet),
            Route(f"{self.root}/stream", self._fleet_stream),
            Route(f"{self.root}/live.js", lambda _: Response(_LIVE, media_type="text/javascript")),
            Route(job, self._job),
            Route(f"{job}/stream", self._job_stream),
            Route(f"{job}/log", self._log),
        ]
        if not self.is_read_only:
            routes.append(Route(f"{job}/{{verb}}", self._command, methods=["GET", "POST"]))
        return Starlette(routes=routes)

    async def _fleet(self, request: Request) -> Response:
        await run_in_threadpool(self.jobs.wait, _FIRST)
        return _page(await run_in_threadpool(self._fleet_html, request))

    async def _fleet_stream(self, request: Request) -> Response:
        return self._stream(lambda: (self.jobs.version, time.monotonic() // _AGES), lambda: self._fleet_html(request))

    def _fleet_html(self, request: Request) -> str:
        given = {name: request.query_params.get(name, "") for name in ("group", "q")}
        found = fleet(self.jobs.jobs or (), datetime.now(UTC), group=given["group"], text=given["q"])
        query = urlencode({name: value for name, value in given.items() if value})
        return TEMPLATES.get_template("fleet.html.j2").render(
            policy=_POLICY, style=STYLE, root=self.root, stream=f"{self.root}/stream?{query}", fleet=found,
            most=_SHOWN_JOBS,
            groups=GROUPS, chosen=given["group"], text=given["q"], is_known=self.jobs.jobs is not None,
            place=one_line(self._place), program=f"ddpjob {__version__}",
            is_here=is_of_this_machine(self.client), **self._trouble(),
        )  # fmt: skip

    @property
    def _place(self) -> str:
        return f"{self.client.host}, all namespaces" if self.jobs.all_namespaces else self.client.place

    def _trouble(self, live: LiveJob | None = None) -> dict[str, object]:
        """Return why a page is not current, for its template."""
        trouble, since = self.jobs.trouble, self.jobs.since
        if trouble is None and live is not None:
            return {"trouble": live.trouble, "since": ""}
        return {"trouble": trouble, "since": since.isoformat(timespec="seconds") if since else ""}

    def _found(self, request: Request) -> LiveJob:
        key = request.path_params["namespace"], request.path_params["name"]
        live = self._live.get(key)
        if live is None:
            live = self._live.setdefault(key, LiveJob(self.client, self.jobs, *key))
        live.seen()
        return live

    async def _job(self, request: Request) -> Response:
        await run_in_threadpool(self.jobs.wait, _FIRST)
        key = request.path_params["namespace"], request.path_params["name"]
        if self.jobs.job(*key) is None and key not in self._live:
            if self.jobs.jobs is None:
                return PlainTextResponse(f"the jobs cannot be read yet: {self.jobs.trouble or 'no answer'}\n", 503)
            return PlainTextResponse(f"there is no job {'/'.join(map(one_line, key))}\n", 404)
        live = self._found(request)
        await run_in_threadpool(live.wait, _FIRST)
        return _page(await run_in_threadpool(self._job_html, request, live))

    async def _job_stream(self, request: Request) -> Response:
        key = request.path_params["namespace"], request.path_params["name"]
        if self.jobs.job(*key) is None and key not in self._live:
            return PlainTextResponse("there is no such job\n", 404)

        def version() -> object:
            return self._version(self._found(request))

        return self._stream(version, lambda: self._job_html(request, self._found(request)))

    def _version(self, live: LiveJob) -> tuple[object, ...]:
        return live.version, str(self.jobs.trouble)

    def _job_html(self, request: Request, live: LiveJob) -> str:
        """Return the page, drawn once for all who look at it."""
        key = request.path_params["namespace"], request.path_params["name"]
        with self._drawing:
            version = self._version(live)
            if self._drawn.get(key, ((), ""))[0] != version:
                self._drawn[key] = version, self._draw(key, live)
            return self._drawn[key][1]

    def _draw(self, key: tuple[str, str], live: LiveJob) -> str:
        here = f"{self.root}/jobs/{'/'.join(key)}"
        page, job, table, trouble = live.page, live.job, live.ranks, self._trouble(live)  # its thread may replace them
        if page is None or job is None:
            return TEMPLATES.get_template("confirm.html.j2").render(
                policy=_POLICY, style=STYLE, here=f"{self.root}/", job="all jobs", title=key[1], place=self._place,
                text="The job cannot be read yet: read this page again.", command="/".join(key), asks=False,
                is_bad=True, output=str(trouble["trouble"] or ""),
            )  # fmt: skip
        ranks = ranks_now(table) if table is not None else []
        can_change = not self.is_read_only and self.jobs.job(*key) is not None
        return render(
            TEMPLATES, "job.html.j2", page, live.curves, policy=_POLICY, style=STYLE, root=self.root, here=here,
            stream=f"{here}/stream", actions=verbs_of(job) if can_change else [], uid=job.uid,
            ranks=ranks[:_SHOWN_RANKS], more_ranks=max(0, len(ranks) - _SHOWN_RANKS),
            waits=sentence(table) if table is not None else "",
            strip=live.strip.image(), strip_height=max(40, min(512, 8 * live.strip.rows)), loss=at_risk(job),
            **trouble,
        )  # fmt: skip

    def _stream(self, version: Callable[[], object], html: Callable[[], str]) -> Response:
        """Send the page now, which may have changed since it was read, and after each change, as server-sent events."""

        async def events() -> AsyncIterator[str]:
            known: object = None
            while not self.logs.is_ending():
                now = version()
                if now != known:
                    yield f"data: {json.dumps(await run_in_threadpool(html))}\n\n"
                    known = now
                else:
                    yield ": alive\n\n"
                await asyncio.sleep(_SEND)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _log(self, request: Request) -> Response:
        """Send the log of a rank as text, and what is printed later."""
        rank = request.query_params.get("rank", "0")
        job = self.jobs.job(request.path_params["namespace"], request.path_params["name"])
        world = job.status.world if job is not None else None
        if job is None or not _RANK.fullmatch(rank) or (world is not None and int(rank) >= world.world_size):
            return PlainTextResponse("there is no such job or rank\n", 404)
        if self.logs.is_full:
            return PlainTextResponse(f"{MOST} logs are followed already: close one of them\n", 503)
        return StreamingResponse(self.logs.text(job, int(rank)), media_type="text/plain; charset=utf-8")

    async def _command(self, request: Request) -> Response:
        """Show a command, and carry it out when it is confirmed."""
        namespace, name, verb = (request.path_params[part] for part in ("namespace", "name", "verb"))
        job = self.jobs.job(namespace, name)
        if job is None or verb not in VERBS:
            return PlainTextResponse("there is no such page\n", 404)
        if request.query_params.get("uid", job.uid) != job.uid:
            return PlainTextResponse(f"{name} was deleted, and another job has its name: open its page again\n", 409)
        text, act = VERBS[verb]
        here = f"{self.root}/jobs/{namespace}/{name}"
        output, error = "", None
        if request.method == "POST":
            try:
                output = await run_in_threadpool(act, self.client, job)
            except DDPJobError as failed:
                error = failed
            if error is None and verb not in ("stacks", "profile"):
                return RedirectResponse(here, 303)
        shown = str(error) if error is not None else output
        return _page(
            TEMPLATES.get_template("confirm.html.j2").render(
                policy=_POLICY, style=STYLE, here=here, job=name, title=verb, text=text, place=self._place,
                command=shlex.join(["ddpjob", verb, name, *self.options, "-n", namespace]),
                asks=request.method == "GET", uid=job.uid, output=shown, is_bad=error is not None,
            )
        )  # fmt: skip


def at_risk(job: DDPJob) -> str:
    """Return the last save, and what a loss of all processes now would cost; empty for a job that does not run."""
    saved, progress = job.status.checkpoint, job.status.progress
    if job.finished or job.state != "Running" or progress is None:
        return ""
    if saved is None:
        return "No checkpoint is saved yet: a failure now would lose all steps."
    ago = duration((datetime.now(UTC) - parse_time(saved.time)).total_seconds())
    steps = f" and {progress.step - saved.step:,} steps" if progress.step and progress.step > saved.step else ""
    return f"Step {saved.step:,} was saved {ago} ago: a failure now would lose {ago}{steps}."


def _page(html: str) -> Response:
    return HTMLResponse(html, headers=_HEADERS)
