"""The command ``ddpjob ui``."""

import os
import secrets
import socket
import tempfile
import webbrowser
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ddpjob.cli.place import Where, find, first_answer, is_of_this_machine
from ddpjob.errors import DDPJobError

if TYPE_CHECKING:
    from ddpjob.client.base import Client

_HOST = "127.0.0.1"


def ui(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Open the page of this job.")] = None,
    *,
    all_namespaces: Annotated[bool, Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    port: Annotated[
        int, Option("--port", min=0, max=65535, metavar="PORT", help="Port on 127.0.0.1.", show_default="a free one")
    ] = 0,
    read_only: Annotated[bool, Option("--read-only", help="Without buttons that change jobs.")] = False,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the browser.")] = True,
    where: Where,
) -> int:
    """Serve pages about jobs on 127.0.0.1, with your own rights: all jobs, and each with its curves, ranks and events.

    It runs until Ctrl-C. The address has a token, without which other users of this machine cannot read the pages. The
    command needs the extra ui of ddpjob.

    \b
    Example:
      ddpjob ui mnist-cpu
    """
    require_ui()
    import uvicorn

    from ddpjob.ui.guard import Guard
    from ddpjob.ui.jobs import WatchedJobs
    from ddpjob.ui.log import FollowedLogs
    from ddpjob.ui.server import Pages

    if name is None:
        client, path = _first(where, all_namespaces=all_namespaces), ""
    else:
        client = find(name, where)
        path = f"jobs/{client.get(name).namespace}/{name}"
    listener = _listener(port)
    number, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    with client, listener:
        jobs = WatchedJobs(client, all_namespaces=all_namespaces)
        jobs.start()
        logs = FollowedLogs(lambda: _again(client, where), lambda: server.should_exit)
        options = ("--local",) if is_of_this_machine(client) else ("--context", where.context) if where.context else ()
        pages = Pages(client, f"/{token}", jobs, logs, is_read_only=read_only, options=options)
        hosts = {f"{host}:{number}" for host in (_HOST, "localhost")}
        address = f"http://{_HOST}:{number}/{token}/{path}"
        typer.echo(address)
        typer.echo("Ctrl-C ends it.", err=True)
        opened = _open(address) if browser else None
        config = uvicorn.Config(
            Guard(pages.app(), token, hosts), log_level="error", access_log=False, lifespan="off",
            server_header=False, timeout_graceful_shutdown=3,
        )  # fmt: skip
        server = uvicorn.Server(config)
        try:
            server.run(sockets=[listener])
        finally:
            if opened is not None:
                opened.unlink(missing_ok=True)
    return 0


def _first(where: Where, *, all_namespaces: bool) -> "Client":
    """Return the client whose jobs are shown. Raises ``DDPJobError`` if it does not answer."""

    def ask(client: "Client") -> object:
        if is_of_this_machine(client):  # one damaged record must not hide the others
            return client.list(all_namespaces=all_namespaces, on_error=lambda _: None)
        return client.list(all_namespaces=all_namespaces)

    client, _, trouble = first_answer(ask, where)
    if trouble is not None:
        raise trouble
    with client:
        return _again(client, where)  # with the usual time limit


def _again(client: "Client", where: Where) -> "Client":
    """Return another client for the same jobs."""
    return where.machine() if is_of_this_machine(client) else where.cluster()


def require_ui() -> None:
    """Raise ``DDPJobError`` unless the extra is installed."""
    try:
        for module in ("starlette", "uvicorn", "ddpplot.recorded"):
            import_module(module)
    except ModuleNotFoundError as error:
        raise DDPJobError(
            f"the package {error.name} is not installed",
            "the pages need the extra ui of ddpjob",
            "pip install 'ddpjob[ui]'",
        ) from error


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise DDPJobError(
            f"port {port} of {_HOST} cannot be opened: {error.strerror}",
            "another program listens there, or ports below 1024 need other rights",
            "leave out --port: a free port is taken",
        ) from error
    return listener


def _open(address: str) -> Path | None:
    """Open the browser, and return the file that leads it to the address.

    The command line of a browser is visible to all users of the machine, and the address has the token.
    """
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.name != "posix" or _is_mac()):
        return None
    descriptor, file = tempfile.mkstemp(prefix="ddpjob-ui-", suffix=".html")  # for its owner alone
    with os.fdopen(descriptor, "w") as page:
        page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(address)}">')
    webbrowser.open(Path(file).as_uri())
    return Path(file)


def _is_mac() -> bool:
    return os.uname().sysname == "Darwin"
