"""``ddpjob``: parses the command line, runs one verb, and turns every mistake into three lines and an exit code."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from ddpjob import __version__
from ddpjob.cli import errors
from ddpjob.cli.delete import delete
from ddpjob.cli.get import get
from ddpjob.cli.logs import logs
from ddpjob.cli.run import run
from ddpjob.local.errors import LocalError

app = typer.Typer(
    name="ddpjob",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
_VERBS = {verb.__name__: verb for verb in (run, get, logs, delete)}
for verb in _VERBS.values():
    app.command()(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpjob {__version__}")
        raise typer.Exit


@app.callback()
def ddpjob(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run DDPJobs on this machine, without a cluster.

    \b
    Example:
      ddpjob run manifests/examples/mnist-cpu.yaml --digits-if-offline
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(get_command(app).main(words, prog_name="ddpjob", standalone_mode=False) or 0)
    except LocalError as error:
        return _refused(error, words)
    except typer.TyperException as error:
        return _refused(_usage(error, words), words)
    except (typer.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read us left; what is still buffered must not complain when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _refused(error: LocalError, words: Sequence[str]) -> int:
    errors.show(error)
    if "run" in words[:1] and _wants_json(words):
        from ddpjob.cli.ndjson import refused

        refused(sys.stdout, error, errors.USAGE)
    return errors.USAGE


def _wants_json(words: Sequence[str]) -> bool:
    pairs = zip(words, [*words[1:], ""], strict=True)
    return (
        "-ojson" in words or "--output=json" in words or any(p in (("-o", "json"), ("--output", "json")) for p in pairs)
    )


def _usage(error: typer.TyperException, words: Sequence[str]) -> LocalError:
    """A mistake on the command line itself."""
    context = getattr(error, "ctx", None)
    verb = next((word for word in words[:1] if word in _VERBS), "")
    command = getattr(context, "command_path", None) or f"ddpjob {verb}".strip()
    near = ", ".join(getattr(error, "possibilities", None) or ())
    message = str(getattr(error, "message", "")) if near else ""
    usage = " ".join(context.get_usage().split()) if context is not None else f"Usage: {command} [OPTIONS] …"
    return LocalError(
        (message or error.format_message()).rstrip("."),
        f"did you mean {near}?" if near else usage.removeprefix("Usage: "),
        f"{command} --help shows every option and an example",
    )


if __name__ == "__main__":
    sys.exit(main())
